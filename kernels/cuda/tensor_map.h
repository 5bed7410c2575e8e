/*
 * Descriptions of matrices for the tensor copy engine (TMA), as ptx_sm90.cuh's copies want them.
 */
#ifndef SL_KERNELS_CUDA_TENSOR_MAP_H
#define SL_KERNELS_CUDA_TENSOR_MAP_H

#include <cuda.h>

#include "kernels/cuda/device.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SL_TENSOR_MAP_BOX_COLUMNS 64u /* of bf16: the 128 bytes that are swizzled as one row */
#define SL_TENSOR_MAP_RANK_MAX 3u

/* A tensor of bf16, dimensions from the innermost on. The base is aligned to 16 bytes, and strides
 * are multiples of 8 elements. Boxes are SL_TENSOR_MAP_BOX_COLUMNS wide, land in 128-byte swizzle,
 * and hold zeros where they lie outside. */
typedef struct {
    const void *base;
    uint32_t rank;                           /* 2 or 3 */
    uint64_t size[SL_TENSOR_MAP_RANK_MAX];   /* elements */
    uint64_t stride[SL_TENSOR_MAP_RANK_MAX]; /* elements; [0] is not used: 1 */
    uint32_t box[SL_TENSOR_MAP_RANK_MAX];    /* elements; [0] is not used */
} sl_tensor_map_t;

/* SL_ERR_DEVICE, naming the operation `what`, if the driver has no tensor maps or refuses. */
SL_MUST_USE sl_status_t sl_cuda_tensor_map(const sl_tensor_map_t *tensor, const char *what,
                                           CUtensorMap *map_p);

#ifdef __cplusplus
}
#endif

#endif
