/*
 * How the grouped product's output is cut into tiles, and in which order they are worked on. Pure
 * integer arithmetic for host and device, so that it is tested without a GPU.
 *
 * An expert's rows are cut evenly, not into full tiles and a rest: 300 rows at most 256 a tile are
 * 160 + 140, not 256 + 44. A tile's height is its rows rounded up to a multiple of 16, which is
 * what the kernel has instances for; the rows past the expert's end are computed and not stored.
 *
 *              n ->  0         128        256                 tiles of expert e, in order:
 *   begin[e]        +----------+----------+--
 *     | height      |    0     |    2     |  4                row tiles first, so that
 *     v             +----------+----------+--                 neighbours in time share the same
 *     | height      |    1     |    3     |  5                128 rows of weights in L2
 *   begin[e + 1]    +----------+----------+--
 *
 * Tiles are numbered through all experts; an expert without rows has none.
 */
#ifndef SL_KERNELS_CUDA_GROUPED_TILES_H
#define SL_KERNELS_CUDA_GROUPED_TILES_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define SL_HOST_DEVICE __host__ __device__
#else
#define SL_HOST_DEVICE
#endif

#define SL_TILE_N 128u        /* outputs of a row, i.e. rows of a weight matrix */
#define SL_TILE_ROWS_STEP 16u /* a tile's height is a multiple of it */

typedef struct {
    uint32_t count;  /* tiles one below the other */
    uint32_t height; /* rows from one to the next; the last may be lower */
} sl_row_split_t;

typedef struct {
    uint32_t expert;
    uint32_t row;    /* first row of x and out */
    uint32_t rows;   /* that exist */
    uint32_t height; /* that are computed */
    uint32_t n;      /* first output */
} sl_grouped_tile_t;

SL_HOST_DEVICE static inline uint32_t sl_grouped_height(uint32_t rows)
{
    return (rows + SL_TILE_ROWS_STEP - 1) / SL_TILE_ROWS_STEP * SL_TILE_ROWS_STEP;
}

/* `height_max` is a multiple of SL_TILE_ROWS_STEP. */
SL_HOST_DEVICE static inline sl_row_split_t sl_grouped_split(uint32_t rows, uint32_t height_max)
{
    sl_row_split_t split = {0, 0};
    if (rows == 0) {
        return split;
    }
    uint32_t at_least = (rows + height_max - 1) / height_max;
    uint32_t even = (rows + at_least - 1) / at_least;
    split.height = sl_grouped_height(even);
    split.count = (rows + split.height - 1) / split.height;
    return split;
}

SL_HOST_DEVICE static inline uint32_t sl_grouped_n_tiles(uint32_t n)
{
    return (n + SL_TILE_N - 1) / SL_TILE_N;
}

/* The most tiles there can be, whatever the experts' counts: for sizing a grid. */
SL_HOST_DEVICE static inline uint64_t sl_grouped_tiles_max(uint32_t rows, uint32_t experts,
                                                           uint32_t n, uint32_t height_max)
{
    uint64_t partial = rows < experts ? rows : experts;
    return ((uint64_t)rows / height_max + partial) * sl_grouped_n_tiles(n);
}

/*
 * Tile `index` of the whole, or false past the last. `tile_end[e]` is the number of tiles of
 * experts 0..e. `*expert_p` is where the search starts, at or before the tile's expert, and moves
 * on to it: a caller that asks for rising indices walks the experts once.
 */
SL_HOST_DEVICE static inline bool sl_grouped_find(const int32_t *begin, const uint32_t *tile_end,
                                                  uint32_t experts, uint32_t height_max,
                                                  uint32_t index, uint32_t *expert_p,
                                                  sl_grouped_tile_t *tile)
{
    uint32_t expert = *expert_p;
    while (expert < experts && index >= tile_end[expert]) {
        expert++;
    }
    *expert_p = expert;
    if (expert == experts) {
        return false;
    }
    uint32_t rows = (uint32_t)(begin[expert + 1] - begin[expert]);
    uint32_t local = index - (expert > 0 ? tile_end[expert - 1] : 0);
    sl_row_split_t split = sl_grouped_split(rows, height_max);
    uint32_t above = local % split.count * split.height;
    uint32_t left = rows - above;
    tile->expert = expert;
    tile->row = (uint32_t)begin[expert] + above;
    tile->rows = left < split.height ? left : split.height;
    tile->height = sl_grouped_height(tile->rows);
    tile->n = local / split.count * SL_TILE_N;
    return true;
}

#endif
