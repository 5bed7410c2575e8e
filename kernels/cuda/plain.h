/*
 * A product for any shape, stride and alignment, at a fraction of the chip's speed: what the fast
 * ways (cuBLAS, grouped.cu) refuse. Real models do not come here.
 */
#ifndef SL_KERNELS_CUDA_PLAIN_H
#define SL_KERNELS_CUDA_PLAIN_H

#include "kernels/cuda/cuda.h"

/*
 * For each matrix i: out[t][n] = sum_k x[t][k] * w[i][n][k].
 *
 * Without row_begin, matrix i has `rows` rows of its own, x and out being *_matrix_stride further
 * on each time (heads). With it, matrix i has the rows [row_begin[i], row_begin[i + 1]) of one x
 * and out (experts), of which there are at most `rows`.
 */
typedef struct {
    void *out;                /* bf16, or f32 if out_f32 */
    const void *x;            /* bf16 */
    const void *w;            /* bf16 [matrices][n][k] dense */
    const int32_t *row_begin; /* device [matrices + 1] or NULL */
    uint32_t rows, matrices, n, k;
    uint64_t x_row_stride, out_row_stride; /* elements; no zero-means-dense here */
    uint64_t x_matrix_stride, out_matrix_stride;
    bool out_f32;
} sl_plain_product_t;

/* One kernel launch; fails as launches do, naming `what`. At least one row, matrix, n and k. */
sl_status_t sl_cuda_plain_product(cudaStream_t stream, const sl_plain_product_t *p,
                                  const char *what);

#endif
