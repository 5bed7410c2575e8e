/*
 * The schedule of the absorbed attention: which block of the grid does which keys of which rows.
 *
 * An item is a run of consecutive rows of one request that share the reading of its keys: one row
 * when decoding, up to a tile's worth in a prefill. Its keys are cut in steps of 64 (a page). Items
 * lie one after another on a line of units, a few units of overhead first, then one a step:
 *
 *     item       0               1       2 (no keys)   3
 *     units   |oo0123456789|oo0123456|o|oo012345678901234567890...
 *     parts   |------ 0 ------|------ 1 ------|------ 2 ------|---- ...
 *
 * The line is cut in equal parts, one for each row of the grid; a part does what lies between its
 * cuts. What a part does of an item is a piece. A piece that is not the whole item writes partial
 * sums: to slot 2 c if earlier parts did the item's first steps, else to slot 2 c + 1, of which a
 * part c has one each at most. The piece of the part with the item's first step says (in the
 * combine kernel) how many follow: the part of any step is its unit divided by the part's length.
 *
 * All of it depends on the lengths alone, and the grid on neither, so a graph can hold it.
 */
#ifndef SL_KERNELS_CUDA_ATTN_ABSORBED_PLAN_CUH
#define SL_KERNELS_CUDA_ATTN_ABSORBED_PLAN_CUH

#include "kernels/cuda/vec.cuh"

#define SL_PLAN_STEP_TOKENS 64u
#define SL_PLAN_OVERHEAD 2 /* units: what starting and ending an item costs, in steps */
#define SL_PLAN_PART_MIN 4 /* units; more than the overhead, or a part could be empty */
#define SL_PLAN_PARTS_MAX 255u
#define SL_PLAN_THREADS 1024u

typedef struct {
    int32_t row, rows; /* rows [row, row + rows) */
    int32_t request;
    int32_t unit;   /* where it begins on the line */
    int32_t tokens; /* keys of its longest row */
    int32_t padding[3];
} sl_plan_item_t;

typedef struct {
    int32_t items, units, part_units, padding;
    int32_t part_item[SL_PLAN_PARTS_MAX + 1]; /* the item a part's first unit is in; or `items` */
    sl_plan_item_t item[];                    /* [items], then one that begins at `units` */
} sl_plan_t;

/* Steps [begin, end) of an item of `steps`. */
typedef struct {
    int32_t begin, end, steps;
} sl_plan_piece_t;

static inline size_t sl_plan_bytes(uint32_t rows)
{
    return sizeof(sl_plan_t) + ((size_t)rows + 1) * sizeof(sl_plan_item_t);
}

__host__ __device__ static inline int32_t sl_plan_units(int32_t tokens)
{
    const int32_t steps = (int32_t)sl_div_up((uint32_t)tokens, SL_PLAN_STEP_TOKENS);
    return steps == 0 ? 1 : steps + SL_PLAN_OVERHEAD;
}

/* What of the item on units [unit, unit_end) lies on [begin, end). */
__host__ __device__ static inline sl_plan_piece_t sl_plan_piece(int32_t unit, int32_t unit_end,
                                                                int32_t begin, int32_t end)
{
    sl_plan_piece_t piece;
    const int32_t first = unit + SL_PLAN_OVERHEAD;
    piece.steps = unit_end - unit == 1 ? 0 : unit_end - first;
    piece.begin = begin <= first ? 0 : begin - first;
    piece.end = end <= first ? 0 : end - first;
    piece.begin = piece.begin < piece.steps ? piece.begin : piece.steps;
    piece.end = piece.end < piece.steps ? piece.end : piece.steps;
    return piece;
}

/* Sum of a and b over the threads before this one; and over all. `shared`: [2][32]. */
__device__ static inline void sl_plan_scan(int32_t a, int32_t b, int32_t (*shared)[32],
                                           int32_t before[2], int32_t total[2])
{
    const uint32_t lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
    int32_t x = a, y = b;
    for (uint32_t offset = 1; offset < SL_WARP; offset *= 2) {
        const int32_t from_x = __shfl_up_sync(SL_FULL_MASK, x, offset);
        const int32_t from_y = __shfl_up_sync(SL_FULL_MASK, y, offset);
        x += lane >= offset ? from_x : 0;
        y += lane >= offset ? from_y : 0;
    }
    if (lane == SL_WARP - 1) {
        shared[0][warp] = x;
        shared[1][warp] = y;
    }
    __syncthreads();
    before[0] = x - a, before[1] = y - b;
    total[0] = total[1] = 0;
    for (uint32_t w = 0; w < SL_PLAN_THREADS / SL_WARP; w++) {
        const int32_t in_x = shared[0][w], in_y = shared[1][w];
        before[0] += w < warp ? in_x : 0;
        before[1] += w < warp ? in_y : 0;
        total[0] += in_x;
        total[1] += in_y;
    }
    __syncthreads();
}

/* The item that begins at `row`, if one does: rows 0 means none. */
__device__ static inline sl_plan_item_t sl_plan_item_at(const int32_t *kv_len,
                                                        const int32_t *row_request, uint32_t row,
                                                        uint32_t rows, uint32_t item_rows)
{
    sl_plan_item_t item = {(int32_t)row, 0, (int32_t)row, 0, 0, {0, 0, 0}};
    if (row >= rows) {
        return item;
    }
    item.request = row_request != NULL ? row_request[row] : (int32_t)row;
    if (item_rows > 1 && row % item_rows != 0 && row_request != NULL &&
        row_request[row - 1] == item.request) {
        return item;
    }
    item.rows = 1;
    item.tokens = kv_len[row];
    if (item_rows == 1 || row_request == NULL) {
        return item;
    }
    for (uint32_t next = row + 1; next < rows && next % item_rows != 0; next++) {
        if (row_request[next] != item.request) {
            break;
        }
        item.tokens = max(item.tokens, kv_len[next]);
        item.rows++;
    }
    return item;
}

/* One block. `parts` is at most SL_PLAN_PARTS_MAX. */
static __global__ void __launch_bounds__(SL_PLAN_THREADS)
    sl_plan_kernel(sl_plan_t *plan, const int32_t *kv_len, const int32_t *row_request,
                   uint32_t rows, uint32_t item_rows, uint32_t parts)
{
    __shared__ int32_t shared[2][32];
    int32_t items = 0, units = 0;
    for (uint32_t row0 = 0; row0 < rows; row0 += SL_PLAN_THREADS) {
        sl_plan_item_t item =
            sl_plan_item_at(kv_len, row_request, row0 + threadIdx.x, rows, item_rows);
        int32_t before[2], total[2];
        sl_plan_scan(item.rows > 0, item.rows > 0 ? sl_plan_units(item.tokens) : 0, shared, before,
                     total);
        if (item.rows > 0) {
            item.unit = units + before[1];
            plan->item[items + before[0]] = item;
        }
        items += total[0];
        units += total[1];
    }
    const int32_t part_units =
        max((int32_t)sl_div_up((uint32_t)units, parts), (int32_t)SL_PLAN_PART_MIN);
    if (threadIdx.x == 0) {
        const sl_plan_item_t end = {(int32_t)rows, 0, 0, units, 0, {0, 0, 0}};
        plan->item[items] = end;
        plan->items = items;
        plan->units = units;
        plan->part_units = part_units;
    }
    for (uint32_t c = threadIdx.x; c <= parts; c += SL_PLAN_THREADS) {
        if ((int64_t)c * part_units >= units) {
            plan->part_item[c] = items;
        }
    }
    __syncthreads(); /* all items are written */
    for (int32_t i = (int32_t)threadIdx.x; i < items; i += SL_PLAN_THREADS) {
        const int32_t begin = plan->item[i].unit, end = plan->item[i + 1].unit;
        int32_t c = (begin + part_units - 1) / part_units;
        for (; c <= (int32_t)parts && c * part_units < end; c++) {
            plan->part_item[c] = i;
        }
    }
}

#endif
