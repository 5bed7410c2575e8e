/*
 * Rows to their experts and back. A pair is (token, slot), numbered token * top_k + slot; its place
 * is the number of pairs before it in the order (expert, pair). Places are counted, never raced
 * for, so they are the same in every run.
 *
 * Few pairs (decode), one launch: a block a pair counts the pairs that go before its own and copies
 * the row; one block more counts for expert_begin.
 *
 * Many pairs (prefill), four launches:
 *   count    a block a segment of pairs: how many of each expert     -> counts[segment][expert]
 *   offsets  one block: expert_begin, and where each segment's pairs of an expert begin
 *   place    a block a segment, a warp a part of it: places, in pair order
 *   gather   a token's row is read once and written top_k times
 */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/rows.cuh"

#define FEW_PAIRS 3072u /* above, every block's reading of all ids costs more than launches */
#define FEW_THREADS 256u
#define HELD_PIECES 4u /* of a row, per thread, loaded while its place is counted */

#define WARPS 8u
#define THREADS (WARPS * SL_WARP)
#define WARP_PAIRS 256u
#define SEGMENT_PAIRS (WARPS * WARP_PAIRS)

/* This thread's share of the pairs that go before `pair`, which goes to `expert`. */
__device__ static uint32_t count_before(const int32_t *ids, uint32_t pairs, int32_t expert,
                                        uint32_t pair)
{
    uint32_t count = 0;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < pairs; i += FEW_THREADS) {
        int32_t id = ids[i];
        count += id >= 0 && (id < expert || (id == expert && i < pair));
    }
    return count;
}

__device__ static uint32_t block_sum(uint32_t x)
{
    __shared__ uint32_t shared[FEW_THREADS / SL_WARP];
    x = __reduce_add_sync(SL_FULL_MASK, x);
    if (threadIdx.x % SL_WARP == 0) {
        shared[threadIdx.x / SL_WARP] = x;
    }
    __syncthreads();
    uint32_t sum = 0;
    for (unsigned i = 0; i < FEW_THREADS / SL_WARP; i++) {
        sum += shared[i];
    }
    return sum;
}

/* Exclusive scan of counts[0 .. n) into out[0 .. n], by one warp. */
__device__ static void scan_by_warp(const uint32_t *counts, uint32_t n, int32_t *out)
{
    const unsigned lane = threadIdx.x % SL_WARP;
    uint32_t before = 0;
    for (uint32_t first = 0; first < n; first += SL_WARP) {
        uint32_t mine = first + lane < n ? counts[first + lane] : 0, sum = mine;
#pragma unroll
        for (unsigned offset = 1; offset < SL_WARP; offset *= 2) {
            uint32_t other = __shfl_up_sync(SL_FULL_MASK, sum, offset);
            sum += lane >= offset ? other : 0;
        }
        if (first + lane < n) {
            out[first + lane] = (int32_t)(before + sum - mine);
        }
        before += __shfl_sync(SL_FULL_MASK, sum, SL_WARP - 1);
    }
    if (lane == 0) {
        out[n] = (int32_t)before;
    }
}

/* The block after those of the pairs. */
__device__ static void few_begins(const sl_moe_permute_t &p, uint32_t *counts)
{
    for (uint32_t e = threadIdx.x; e < p.experts; e += FEW_THREADS) {
        counts[e] = 0;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.rows * p.top_k; i += FEW_THREADS) {
        int32_t id = p.ids[i];
        if (id >= 0) {
            atomicAdd(&counts[id], 1u); /* a count, whatever the order */
        }
    }
    __syncthreads();
    if (threadIdx.x < SL_WARP) {
        scan_by_warp(counts, p.experts, p.expert_begin);
    }
}

/* T: uint4 or one bf16; `pieces` of them are a row. */
template <typename T>
__global__ static void __launch_bounds__(FEW_THREADS)
    few_kernel(sl_moe_permute_t p, uint32_t pieces)
{
    __shared__ uint32_t counts[SL_CUDA_EXPERTS_MAX];
    const uint32_t pair = blockIdx.x, pairs = p.rows * p.top_k;
    if (pair == pairs) {
        few_begins(p, counts);
        return;
    }
    const int32_t expert = p.ids[pair];
    if (expert < 0) {
        if (threadIdx.x == 0) {
            p.sorted_row[pair] = -1;
        }
        return;
    }
    const T *from = (const T *)p.x + (size_t)(pair / p.top_k) * pieces;
    T held[HELD_PIECES];
#pragma unroll
    for (unsigned i = 0; i < HELD_PIECES; i++) {
        uint32_t piece = i * FEW_THREADS + threadIdx.x;
        if (piece < pieces) {
            held[i] = from[piece];
        }
    }
    const uint32_t place = block_sum(count_before(p.ids, pairs, expert, pair));
    if (threadIdx.x == 0) {
        p.sorted_row[pair] = (int32_t)place;
    }
    T *to = (T *)p.x_sorted + (size_t)place * pieces;
#pragma unroll
    for (unsigned i = 0; i < HELD_PIECES; i++) {
        uint32_t piece = i * FEW_THREADS + threadIdx.x;
        if (piece < pieces) {
            to[piece] = held[i];
        }
    }
    for (uint32_t piece = HELD_PIECES * FEW_THREADS + threadIdx.x; piece < pieces;
         piece += FEW_THREADS) {
        to[piece] = from[piece];
    }
}

/* counts[segment][expert] */
__global__ static void __launch_bounds__(THREADS)
    count_kernel(uint32_t *counts, const int32_t *ids, uint32_t pairs, uint32_t experts)
{
    __shared__ uint32_t mine[SL_CUDA_EXPERTS_MAX];
    for (uint32_t e = threadIdx.x; e < experts; e += THREADS) {
        mine[e] = 0;
    }
    __syncthreads();
    const uint32_t first = blockIdx.x * SEGMENT_PAIRS;
#pragma unroll
    for (uint32_t i = 0; i < SEGMENT_PAIRS; i += THREADS) {
        uint32_t pair = first + i + threadIdx.x;
        int32_t id = pair < pairs ? ids[pair] : -1;
        if (id >= 0) {
            atomicAdd(&mine[id], 1u);
        }
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < experts; e += THREADS) {
        counts[(size_t)blockIdx.x * experts + e] = mine[e];
    }
}

/* Counts become places: of the first pair of an expert in a segment. */
__global__ static void __launch_bounds__(SL_CUDA_EXPERTS_MAX)
    offsets_kernel(uint32_t *counts, int32_t *expert_begin, uint32_t segments, uint32_t experts)
{
    __shared__ uint32_t totals[SL_CUDA_EXPERTS_MAX];
    __shared__ int32_t begins[SL_CUDA_EXPERTS_MAX + 1];
    const uint32_t e = threadIdx.x;
    uint32_t total = 0;
    if (e < experts) {
#pragma unroll 8
        for (uint32_t s = 0; s < segments; s++) {
            total += counts[(size_t)s * experts + e];
        }
        totals[e] = total;
    }
    __syncthreads();
    if (threadIdx.x < SL_WARP) {
        scan_by_warp(totals, experts, begins);
    }
    __syncthreads();
    if (e == 0) {
        expert_begin[experts] = begins[experts];
    }
    if (e < experts) {
        uint32_t place = (uint32_t)begins[e];
        expert_begin[e] = begins[e];
#pragma unroll 8
        for (uint32_t s = 0; s < segments; s++) {
            uint32_t *count = &counts[(size_t)s * experts + e];
            uint32_t here = *count;
            *count = place;
            place += here;
        }
    }
}

/* How many lanes below this one have its id, and how many lanes in all. */
__device__ static inline void lanes_alike(int32_t id, unsigned lane, uint32_t *before,
                                          uint32_t *all)
{
    uint32_t alike = __match_any_sync(SL_FULL_MASK, id);
    *before = __popc(alike & ((1u << lane) - 1));
    *all = __popc(alike);
}

/* next[warp][expert]: place of the warp's next pair of that expert. */
__global__ static void __launch_bounds__(THREADS)
    place_kernel(int32_t *sorted_row, const uint32_t *offsets, const int32_t *ids, uint32_t pairs,
                 uint32_t experts)
{
    extern __shared__ uint32_t next[];
    const unsigned lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
    const uint32_t first = blockIdx.x * SEGMENT_PAIRS + warp * WARP_PAIRS;
    uint32_t *mine = next + warp * experts;
    int32_t id[WARP_PAIRS / SL_WARP];
    for (uint32_t i = threadIdx.x; i < WARPS * experts; i += THREADS) {
        next[i] = 0;
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < WARP_PAIRS / SL_WARP; i++) {
        uint32_t pair = first + i * SL_WARP + lane;
        id[i] = pair < pairs ? ids[pair] : -1;
        if (id[i] >= 0) {
            atomicAdd(&mine[id[i]], 1u);
        }
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < experts; e += THREADS) {
        uint32_t place = offsets[(size_t)blockIdx.x * experts + e];
        for (unsigned w = 0; w < WARPS; w++) {
            uint32_t here = next[w * experts + e];
            next[w * experts + e] = place;
            place += here;
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < WARP_PAIRS / SL_WARP; i++) {
        uint32_t pair = first + i * SL_WARP + lane, before, all, place = 0;
        lanes_alike(id[i], lane, &before, &all);
        if (id[i] >= 0) {
            place = mine[id[i]] + before;
        }
        __syncwarp();
        if (id[i] >= 0 && before == 0) {
            mine[id[i]] += all;
        }
        __syncwarp();
        if (pair < pairs) {
            sorted_row[pair] = id[i] >= 0 ? (int32_t)place : -1;
        }
    }
}

template <typename T>
__global__ static void __launch_bounds__(SL_TILE_THREADS)
    gather_kernel(sl_moe_permute_t p, uint32_t pieces)
{
    uint32_t token;
    if (!sl_tile_row(p.rows, &token)) {
        return;
    }
    const T *from = (const T *)p.x + (size_t)token * pieces;
    const int32_t *places = p.sorted_row + (size_t)token * p.top_k;
    SL_TILE_LOOP(piece, pieces)
    {
        T value = from[piece];
        for (uint32_t j = 0; j < p.top_k; j++) {
            int32_t place = places[j];
            if (place >= 0) {
                ((T *)p.x_sorted)[(size_t)place * pieces + piece] = value;
            }
        }
    }
}

/* On `device`'s stream `on`, with `pieces` T a row. */
template <typename T>
static sl_status_t permute_few(cudaStream_t on, const sl_moe_permute_t *p, uint32_t pieces)
{
    SL_LAUNCH("moe_permute", few_kernel<T>, p->rows * p->top_k + 1, FEW_THREADS, 0, on, *p, pieces);
    return SL_OK;
}

template <typename T>
static sl_status_t gather_rows(cudaStream_t on, const sl_moe_permute_t *p, uint32_t pieces,
                               int sm_count)
{
    sl_tile_t tile = sl_tile(p->rows, pieces, sm_count);
    SL_LAUNCH("moe_permute", gather_kernel<T>, tile.grid, tile.block, 0, on, *p, pieces);
    return SL_OK;
}

static sl_status_t place_many(sl_device_t *device, sl_stream_t *stream, const sl_moe_permute_t *p)
{
    cudaStream_t on = sl_cuda_enter(device, stream);
    uint32_t pairs = p->rows * p->top_k, segments = sl_div_up(pairs, SEGMENT_PAIRS);
    void *memory = NULL;
    SL_TRY(sl_cuda_scratch(device, stream, SL_SLOT_MOE_PERMUTE,
                           (size_t)segments * p->experts * sizeof(uint32_t), &memory));
    uint32_t *counts = (uint32_t *)memory;
    SL_LAUNCH("moe_permute", count_kernel, segments, THREADS, 0, on, counts, p->ids, pairs,
              p->experts);
    SL_LAUNCH("moe_permute", offsets_kernel, 1, sl_div_up(p->experts, SL_WARP) * SL_WARP, 0, on,
              counts, p->expert_begin, segments, p->experts);
    SL_LAUNCH("moe_permute", place_kernel, segments, THREADS, WARPS * p->experts * sizeof(uint32_t),
              on, p->sorted_row, counts, p->ids, pairs, p->experts);
    return SL_OK;
}

sl_status_t sl_cuda_moe_permute(sl_device_t *device, sl_stream_t *stream, const sl_moe_permute_t *p)
{
    SL_ASSERT((uint64_t)p->rows * p->top_k < UINT32_MAX / 2 && p->experts > 0);
    SL_TRY(sl_cuda_check_experts(p->experts));
    cudaStream_t on = sl_cuda_enter(device, stream);
    bool vectors = sl_vec_fits(p->x, p->width) && sl_vec_fits(p->x_sorted, p->width);
    uint32_t pieces = vectors ? p->width / SL_VEC : p->width;
    if (p->rows * p->top_k <= FEW_PAIRS) { /* none: expert_begin is still to be written */
        return vectors ? permute_few<uint4>(on, p, pieces) : permute_few<sl_bf16_t>(on, p, pieces);
    }
    SL_TRY(place_many(device, stream, p));
    return vectors ? gather_rows<uint4>(on, p, pieces, device->sm_count)
                   : gather_rows<sl_bf16_t>(on, p, pieces, device->sm_count);
}

/* TOP_K: the number of slots where it is known, so that all loads go out at once; else 0. */
template <unsigned TOP_K>
__device__ static inline void combine8(const sl_moe_combine_t &p, const int32_t *places,
                                       const float *weights, uint32_t at, float sums[SL_VEC])
{
    const unsigned count = TOP_K > 0 ? TOP_K : p.top_k;
    constexpr unsigned batch = TOP_K > 0 ? TOP_K : 4;
    for (unsigned first = 0; first < count; first += batch) {
        uint4 raw[batch];
        float weight[batch];
#pragma unroll
        for (unsigned j = 0; j < batch; j++) {
            int32_t place = first + j < count ? places[first + j] : -1;
            raw[j] = make_uint4(0, 0, 0, 0);
            weight[j] = 0;
            if (place >= 0) {
                raw[j] = sl_load16((const sl_bf16_t *)p.y + (size_t)place * p.width + at);
                weight[j] = weights[first + j];
            }
        }
#pragma unroll
        for (unsigned j = 0; j < batch; j++) {
            float values[SL_VEC];
            sl_unpack8(raw[j], values);
#pragma unroll
            for (unsigned c = 0; c < SL_VEC; c++) {
                sums[c] = fmaf(weight[j], values[c], sums[c]);
            }
        }
    }
}

template <unsigned TOP_K>
__global__ static void __launch_bounds__(SL_TILE_THREADS) combine_kernel(sl_moe_combine_t p)
{
    uint32_t token;
    if (!sl_tile_row(p.rows, &token)) {
        return;
    }
    const int32_t *places = p.sorted_row + (size_t)token * p.top_k;
    const float *weights = p.weights + (size_t)token * p.top_k;
    SL_TILE_LOOP(piece, p.width / SL_VEC)
    {
        const uint32_t at = piece * SL_VEC;
        const size_t whole = (size_t)token * p.width + at;
        float sums[SL_VEC] = {0}, rest[SL_VEC];
        uint4 shared = make_uint4(0, 0, 0, 0);
        if (p.shared != NULL) {
            shared = sl_load16((const sl_bf16_t *)p.shared + whole);
        }
        combine8<TOP_K>(p, places, weights, at, sums);
        sl_unpack8(shared, rest);
#pragma unroll
        for (unsigned c = 0; c < SL_VEC; c++) {
            sums[c] += rest[c];
        }
        sl_store16((sl_bf16_t *)p.out + whole, sl_pack8(sums));
    }
}

__global__ static void __launch_bounds__(SL_TILE_THREADS) combine_generic_kernel(sl_moe_combine_t p)
{
    uint32_t token;
    if (!sl_tile_row(p.rows, &token)) {
        return;
    }
    const int32_t *places = p.sorted_row + (size_t)token * p.top_k;
    const float *weights = p.weights + (size_t)token * p.top_k;
    SL_TILE_LOOP(i, p.width)
    {
        float sum = 0;
        for (uint32_t j = 0; j < p.top_k; j++) {
            if (places[j] >= 0) {
                float y = sl_to_float(((const sl_bf16_t *)p.y)[(size_t)places[j] * p.width + i]);
                sum = fmaf(weights[j], y, sum);
            }
        }
        size_t at = (size_t)token * p.width + i;
        sum += p.shared != NULL ? sl_to_float(((const sl_bf16_t *)p.shared)[at]) : 0;
        ((sl_bf16_t *)p.out)[at] = sl_to_bf16(sum);
    }
}

sl_status_t sl_cuda_moe_combine(sl_device_t *device, sl_stream_t *stream, const sl_moe_combine_t *p)
{
    if (p->rows == 0 || p->width == 0) {
        return SL_OK;
    }
    cudaStream_t on = sl_cuda_enter(device, stream);
    if (!sl_vec_fits(p->out, p->width) || !sl_vec_fits(p->y, p->width) ||
        !sl_vec_fits(p->shared, p->width)) {
        sl_tile_t tile = sl_tile(p->rows, p->width, device->sm_count);
        SL_LAUNCH("moe_combine", combine_generic_kernel, tile.grid, tile.block, 0, on, *p);
        return SL_OK;
    }
    sl_tile_t tile = sl_tile(p->rows, p->width / SL_VEC, device->sm_count);
    if (p->top_k == 6) { /* V2 */
        SL_LAUNCH("moe_combine", combine_kernel<6>, tile.grid, tile.block, 0, on, *p);
    } else if (p->top_k == 8) { /* V3 */
        SL_LAUNCH("moe_combine", combine_kernel<8>, tile.grid, tile.block, 0, on, *p);
    } else {
        SL_LAUNCH("moe_combine", combine_kernel<0>, tile.grid, tile.block, 0, on, *p);
    }
    return SL_OK;
}
