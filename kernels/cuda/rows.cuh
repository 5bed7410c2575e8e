/*
 * The shape of row-wise kernels: rows of `pieces` pieces, copied or combined piece by piece. A
 * block is [y][x]: y rows at once, x threads along a row; blockIdx.x counts groups of y rows, and
 * gridDim.y blocks share a row when there are too few rows to fill the GPU.
 *
 *     uint32_t row;
 *     if (sl_tile_row(rows, &row)) {
 *         SL_TILE_LOOP(piece, pieces) { ... }
 *     }
 */
#ifndef SL_KERNELS_CUDA_ROWS_CUH
#define SL_KERNELS_CUDA_ROWS_CUH

#include "kernels/cuda/vec.cuh"

#define SL_TILE_THREADS 256u
#define SL_TILE_BLOCKS_PER_SM 16u /* enough to keep every SM full for two waves */

typedef struct {
    dim3 grid, block;
} sl_tile_t;

/* rows and pieces above 0. */
static inline sl_tile_t sl_tile(uint32_t rows, uint32_t pieces, int sm_count)
{
    uint32_t x = sl_div_up(pieces, SL_WARP) * SL_WARP;
    x = x < SL_TILE_THREADS ? x : SL_TILE_THREADS;
    uint32_t y = SL_TILE_THREADS / x;
    uint32_t groups = sl_div_up(rows, y);
    uint32_t most = sl_div_up(pieces, x);
    uint32_t shared_by = sl_div_up((uint32_t)sm_count * SL_TILE_BLOCKS_PER_SM, groups);
    sl_tile_t tile;
    tile.block = dim3(x, y, 1);
    tile.grid = dim3(groups, shared_by < most ? shared_by : most, 1);
    return tile;
}

__device__ static inline bool sl_tile_row(uint32_t rows, uint32_t *row_p)
{
    *row_p = blockIdx.x * blockDim.y + threadIdx.y;
    return *row_p < rows;
}

#define SL_TILE_LOOP(piece, pieces)                                                                \
    for (uint32_t piece = blockIdx.y * blockDim.x + threadIdx.x; piece < (pieces);                 \
         piece += gridDim.y * blockDim.x)

#endif
