/*
 * The product for everything that is odd: tiles of 32 x 32 outputs, K in steps of 32 through shared
 * memory as f32, one sum of fused multiply-adds in K's order per output.
 *
 *    256 threads: lane = output n of the tile, warp w = rows w, w + 8, w + 16, w + 24.
 *    blockIdx.x: row tiles (strided, since the rows of an expert are known only here),
 *    blockIdx.y: tiles of n, blockIdx.z: matrix.
 */
#include "kernels/cuda/plain.h"

#include "kernels/cuda/vec.cuh"

#define TILE 32u
#define WARPS 8u
#define ROWS_PER_THREAD (TILE / WARPS)
#define GRID_ROW_TILES_MAX 64u
#define GRID_YZ_MAX 65535u

/* 32 rows x 32 of k from `row0`, `k0` on; what lies outside is 0. */
__device__ static void load_tile(float (&tile)[TILE][TILE + 1], const sl_bf16_t *from,
                                 uint64_t stride, uint32_t row0, uint32_t rows, uint32_t k0,
                                 uint32_t k)
{
    const uint32_t column = threadIdx.x % SL_WARP;
    for (uint32_t row = threadIdx.x / SL_WARP; row < TILE; row += WARPS) {
        const bool inside = row0 + row < rows && k0 + column < k;
        tile[row][column] =
            inside ? sl_to_float(from[(uint64_t)(row0 + row) * stride + k0 + column]) : 0;
    }
}

static __global__ void __launch_bounds__(WARPS *SL_WARP) plain_product(const sl_plain_product_t p)
{
    __shared__ float x_tile[TILE][TILE + 1], w_tile[TILE][TILE + 1];
    const uint32_t matrix = blockIdx.z, n0 = blockIdx.y * TILE;
    const uint32_t lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
    uint32_t rows = p.rows;
    uint64_t x_at = matrix * p.x_matrix_stride, out_at = matrix * p.out_matrix_stride;
    if (p.row_begin != NULL) {
        const uint32_t begin = (uint32_t)p.row_begin[matrix];
        rows = (uint32_t)p.row_begin[matrix + 1] - begin;
        x_at = begin * p.x_row_stride;
        out_at = begin * p.out_row_stride;
    }
    const sl_bf16_t *x = (const sl_bf16_t *)p.x + x_at;
    const sl_bf16_t *w = (const sl_bf16_t *)p.w + (uint64_t)matrix * p.n * p.k;
    for (uint32_t row0 = blockIdx.x * TILE; row0 < rows; row0 += gridDim.x * TILE) {
        float sums[ROWS_PER_THREAD] = {};
        for (uint32_t k0 = 0; k0 < p.k; k0 += TILE) {
            load_tile(x_tile, x, p.x_row_stride, row0, rows, k0, p.k);
            load_tile(w_tile, w, p.k, n0, p.n, k0, p.k);
            __syncthreads();
            for (uint32_t i = 0; i < TILE; i++) {
                const float weight = w_tile[lane][i];
#pragma unroll
                for (uint32_t j = 0; j < ROWS_PER_THREAD; j++) {
                    sums[j] = fmaf(x_tile[warp + j * WARPS][i], weight, sums[j]);
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (uint32_t j = 0; j < ROWS_PER_THREAD; j++) {
            const uint32_t row = row0 + warp + j * WARPS, n = n0 + lane;
            if (row < rows && n < p.n) {
                const uint64_t at = out_at + row * p.out_row_stride + n;
                if (p.out_f32) {
                    ((float *)p.out)[at] = sums[j];
                } else {
                    ((sl_bf16_t *)p.out)[at] = sl_to_bf16(sums[j]);
                }
            }
        }
    }
}

sl_status_t sl_cuda_plain_product(cudaStream_t stream, const sl_plain_product_t *p,
                                  const char *what)
{
    uint32_t row_tiles = sl_div_up(p->rows, TILE), n_tiles = sl_div_up(p->n, TILE);
    SL_ASSERT(row_tiles > 0 && n_tiles > 0 && p->matrices > 0 && p->k > 0);
    if (n_tiles > GRID_YZ_MAX || p->matrices > GRID_YZ_MAX) {
        return sl_error(SL_ERR_UNSUPPORTED, "cuda %s: %u matrices of %u x %u", what, p->matrices,
                        p->n, p->k);
    }
    dim3 grid(row_tiles, n_tiles, p->matrices);
    if (p->row_begin != NULL && row_tiles > GRID_ROW_TILES_MAX) {
        grid.x = GRID_ROW_TILES_MAX; /* most matrices have far fewer rows than all together */
    }
    plain_product<<<grid, WARPS * SL_WARP, 0, stream>>>(*p);
    SL_CUDA_LAUNCHED(what);
    return SL_OK;
}
