/*
 * Absorbed attention over the paged latents: which kernel, its schedule, and the merge of split
 * items. attn_absorbed_plan.cuh explains the schedule, attn_absorbed_tile.cuh the arithmetic.
 *
 *     plan kernel     1 block                   once a step, see attn.h
 *     tile kernel     head tiles x parts        every multiprocessor one block
 *     combine kernel  parts x tile rows         nearly all of its blocks find nothing to do
 *
 * Tiles have 16, 32 or 64 rows by the number of heads. With many rows (a prefill in absorbed form)
 * neighbouring rows of a request share a tile of 64, so that a page is read once for all of them.
 */
#include "kernels/cuda/attn.h"
#include "kernels/cuda/attn_absorbed_tile.cuh"
#include "kernels/cuda/attn_generic.cuh"
#include "kernels/cuda/cuda.h"

enum {
    COMBINE_THREADS = SL_TILE_LORA / 4, /* a float4 each */
    SHARED_ROWS_MIN = 1024,             /* from this many rows on, rows of a request share tiles */
    ITEM_ROWS_MAX = 16,
};

typedef struct {
    uint32_t tile_rows, tile_heads, tiles; /* heads of a tile and row; tiles to cover all heads */
    uint32_t item_rows, parts;
} shape_t;

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static shape_t choose_shape(const sl_device_t *device, const sl_attn_absorbed_t *p)
{
    shape_t shape;
    const bool share = p->row_request != NULL && p->rows >= SHARED_ROWS_MIN;
    shape.tile_rows = share || p->heads > 32 ? 64 : p->heads > 16 ? 32 : 16;
    shape.tile_heads = smaller(p->heads, shape.tile_rows);
    shape.tiles = sl_div_up(p->heads, shape.tile_heads);
    shape.item_rows =
        share ? smaller(shape.tile_rows / shape.tile_heads, (uint32_t)ITEM_ROWS_MAX) : 1;
    shape.parts = smaller((uint32_t)device->sm_count / shape.tiles, SL_PLAN_PARTS_MAX);
    shape.parts = shape.parts == 0 ? 1 : shape.parts;
    return shape;
}

static bool fits_tiles(const sl_attn_absorbed_t *p)
{
    return p->kv_lora == SL_TILE_LORA && p->cache.width == SL_TILE_WIDTH &&
           p->cache.page_tokens == SL_TILE_TOKENS && sl_vec_fits(p->out, 0) &&
           sl_vec_fits(p->q_latent, 0) && sl_vec_fits(p->q_rope, p->q_rope_row_stride) &&
           p->q_rope_head_stride % SL_VEC == 0 && sl_vec_fits(p->cache.base, 0);
}

/* ---- the plan of a step ---- */

static sl_status_t make_plan(sl_device_t *device, sl_stream_t *stream, const sl_attn_absorbed_t *p,
                             const sl_plan_t **plan_p)
{
    const shape_t shape = choose_shape(device, p);
    cudaStream_t on = sl_cuda_enter(device, stream);
    void *memory;
    sl_cuda_plan_drop(device); /* its memory is overwritten */
    SL_TRY(sl_cuda_scratch(device, stream, SL_SLOT_ATTN_ABSORBED_PLAN, sl_plan_bytes(p->rows),
                           &memory));
    sl_plan_kernel<<<1, SL_PLAN_THREADS, 0, on>>>((sl_plan_t *)memory, p->kv_len, p->row_request,
                                                  p->rows, shape.item_rows, shape.parts);
    SL_CUDA_LAUNCHED("attn_absorbed plan");
    *plan_p = (const sl_plan_t *)memory;
    return SL_OK;
}

extern "C" sl_status_t sl_cuda_attn_absorbed_plan(sl_device_t *device, sl_stream_t *stream,
                                                  const sl_attn_absorbed_t *p)
{
    sl_cuda_plan_drop(device);
    if (p->rows == 0 || p->heads == 0 || p->kv_lora != SL_TILE_LORA ||
        p->cache.width != SL_TILE_WIDTH || p->cache.page_tokens != SL_TILE_TOKENS) {
        return SL_OK; /* without a schedule */
    }
    const sl_plan_t *plan;
    SL_TRY(make_plan(device, stream, p, &plan));
    device->plan = sl_cuda_plan_t{
        plan, sl_cuda_enter(device, stream), p->kv_len, p->row_request, p->rows, p->heads};
    return SL_OK;
}

static sl_status_t find_plan(sl_device_t *device, sl_stream_t *stream, const sl_attn_absorbed_t *p,
                             const sl_plan_t **plan_p)
{
    const sl_cuda_plan_t *now = &device->plan;
    if (now->schedule != NULL && now->stream == sl_cuda_enter(device, stream) &&
        now->kv_len == p->kv_len && now->row_request == p->row_request && now->rows == p->rows &&
        now->heads == p->heads) {
        *plan_p = (const sl_plan_t *)now->schedule;
        return SL_OK;
    }
    return make_plan(device, stream, p, plan_p);
}

/* ---- merge of an item's pieces ---- */

/* Grid: [parts][head tiles][tile rows]. Block (c, ., .) merges the item whose first step part c did
 * and whose last one it did not: there is one at most. */
static __global__ void __launch_bounds__(COMBINE_THREADS)
    combine_kernel(const __grid_constant__ sl_tile_args_t args)
{
    __shared__ float weights[SL_PLAN_PARTS_MAX], parts_of_sum[SL_PLAN_PARTS_MAX];
    const sl_plan_t *plan = args.plan;
    const int32_t part = (int32_t)blockIdx.x, i = plan->part_item[part + 1];
    if (i >= plan->items) {
        return;
    }
    const sl_plan_item_t *item = &plan->item[i];
    const int32_t first = item->unit + SL_PLAN_OVERHEAD, end = plan->item[i + 1].unit;
    const int32_t last_part = (end - 1) / plan->part_units;
    const int32_t row = (int32_t)(blockIdx.z / args.tile_heads);
    const uint32_t head = blockIdx.y * args.tile_heads + blockIdx.z % args.tile_heads;
    if (item->tokens == 0 || first / plan->part_units != part || last_part == part ||
        row >= item->rows || head >= args.heads) {
        return;
    }
    const uint32_t pieces = (uint32_t)(last_part - part + 1);
    const uint32_t rows = gridDim.z, tiles = gridDim.y;
    /* Piece 0 is in slot 2 part + 1, piece j after it in slot 2 (part + j). */
    const size_t slot_rows = (size_t)tiles * rows, in_slot = (size_t)blockIdx.y * rows + blockIdx.z;
    const size_t at0 = (2 * (size_t)part + 1) * slot_rows + in_slot;
    const size_t at1 = 2 * (size_t)part * slot_rows + in_slot;
    float max = -INFINITY;
    for (uint32_t j = 0; j < pieces; j++) {
        max = fmaxf(max, args.stats[j == 0 ? at0 : at1 + 2 * j * slot_rows].x);
    }
    const float shift = max == -INFINITY ? 0 : max;
    for (uint32_t j = threadIdx.x; j < pieces; j += COMBINE_THREADS) {
        const float2 stats = args.stats[j == 0 ? at0 : at1 + 2 * j * slot_rows];
        weights[j] = sl_exp2(stats.x - shift);
        parts_of_sum[j] = weights[j] * stats.y;
    }
    __syncthreads();
    float sum = 0;
    for (uint32_t j = 0; j < pieces; j++) {
        sum += parts_of_sum[j];
    }
    const float inverse = sum == 0 ? 0 : 1 / sum;
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (uint32_t j = 0; j < pieces; j++) {
        const size_t at = j == 0 ? at0 : at1 + 2 * j * slot_rows;
        const float4 x =
            *reinterpret_cast<const float4 *>(args.sums + at * SL_TILE_LORA + threadIdx.x * 4);
        total.x += weights[j] * x.x;
        total.y += weights[j] * x.y;
        total.z += weights[j] * x.z;
        total.w += weights[j] * x.w;
    }
    sl_bf16_t *out =
        args.out + ((size_t)(item->row + row) * args.heads + head) * SL_TILE_LORA + threadIdx.x * 4;
    *reinterpret_cast<uint2 *>(out) = make_uint2(sl_pack2(total.x * inverse, total.y * inverse),
                                                 sl_pack2(total.z * inverse, total.w * inverse));
}

/* ---- launches ---- */

template <uint32_t ROWS>
static sl_status_t launch_tiles(cudaStream_t on, const shape_t &shape, const sl_tile_args_t &args)
{
    const uint32_t bytes = sl_tile_shape<ROWS>::SHARED_BYTES;
    SL_CUDA_TRY(cudaFuncSetAttribute(sl_tile_kernel<ROWS>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                "attn_absorbed");
    const dim3 grid(shape.tiles, shape.parts), combine_grid(shape.parts, shape.tiles, ROWS);
    sl_tile_kernel<ROWS><<<grid, SL_TILE_THREADS, bytes, on>>>(args);
    SL_CUDA_LAUNCHED("attn_absorbed");
    combine_kernel<<<combine_grid, COMBINE_THREADS, 0, on>>>(args);
    SL_CUDA_LAUNCHED("attn_absorbed combine");
    return SL_OK;
}

static sl_status_t attend_tiles(sl_device_t *device, sl_stream_t *stream,
                                const sl_attn_absorbed_t *p)
{
    const shape_t shape = choose_shape(device, p);
    const size_t slot_rows = (size_t)shape.parts * 2 * shape.tiles * shape.tile_rows;
    const size_t sums_bytes = slot_rows * SL_TILE_LORA * sizeof(float);
    cudaStream_t on = sl_cuda_enter(device, stream);
    const sl_plan_t *plan;
    void *memory;
    SL_TRY(find_plan(device, stream, p, &plan));
    SL_TRY(sl_cuda_scratch(device, stream, SL_SLOT_ATTN_ABSORBED,
                           sums_bytes + slot_rows * sizeof(float2), &memory));
    const size_t layer_elements = (size_t)SL_TILE_TOKENS * SL_TILE_WIDTH;
    sl_tile_args_t args;
    memset(&args, 0, sizeof(args));
    args.out = (sl_bf16_t *)p->out;
    args.q_latent = (const sl_bf16_t *)p->q_latent;
    args.q_rope = (const sl_bf16_t *)p->q_rope;
    args.cache = (const sl_bf16_t *)p->cache.base + p->layer * layer_elements;
    args.page_stride = p->cache.layers * layer_elements;
    args.pages = p->pages;
    args.page_begin = p->page_begin;
    args.kv_len = p->kv_len;
    args.plan = plan;
    args.sums = (float *)memory;
    args.stats = (float2 *)((char *)memory + sums_bytes);
    args.q_rope_row_stride = p->q_rope_row_stride;
    args.q_rope_head_stride = p->q_rope_head_stride;
    args.heads = p->heads;
    args.tile_heads = shape.tile_heads;
    args.scale_log2 = p->scale * SL_LOG2_E;
    switch (shape.tile_rows) {
    case 16:
        return launch_tiles<16>(on, shape, args);
    case 32:
        return launch_tiles<32>(on, shape, args);
    default:
        return launch_tiles<64>(on, shape, args);
    }
}

/* ---- any other geometry: a warp for each row and head ---- */

struct absorbed_locate {
    const sl_bf16_t *layer;
    const int32_t *pages;
    size_t page_stride;
    uint32_t page_tokens, width, kv_lora;

    __device__ sl_generic_key_t operator()(uint32_t j) const
    {
        const sl_bf16_t *token = layer + (size_t)pages[j / page_tokens] * page_stride +
                                 (size_t)(j % page_tokens) * width;
        return {token, token + kv_lora, token};
    }
};

static __global__ void __launch_bounds__(SL_GENERIC_WARPS *SL_WARP)
    absorbed_generic_kernel(const __grid_constant__ sl_attn_absorbed_t p)
{
    extern __shared__ __align__(1024) float shared_floats[];
    const uint32_t warp = threadIdx.x / SL_WARP, rope = p.cache.width - p.kv_lora;
    const size_t item = (size_t)blockIdx.x * SL_GENERIC_WARPS + warp;
    if (item >= (size_t)p.rows * p.heads) {
        return;
    }
    const size_t row = item / p.heads, head = item % p.heads;
    const uint32_t tokens = (uint32_t)p.kv_len[row];
    const size_t request = p.row_request != NULL ? p.row_request[row] : row;
    const int32_t begin = tokens == 0 ? 0 : p.page_begin[request];
    const size_t layer_elements = (size_t)p.cache.page_tokens * p.cache.width;
    const absorbed_locate locate = {(const sl_bf16_t *)p.cache.base + p.layer * layer_elements,
                                    p.pages + begin,
                                    p.cache.layers * layer_elements,
                                    p.cache.page_tokens,
                                    p.cache.width,
                                    p.kv_lora};
    const sl_generic_query_t query = {(const sl_bf16_t *)p.q_latent + item * p.kv_lora,
                                      (const sl_bf16_t *)p.q_rope + row * p.q_rope_row_stride +
                                          head * p.q_rope_head_stride,
                                      (sl_bf16_t *)p.out + item * p.kv_lora,
                                      NULL,
                                      p.scale,
                                      p.kv_lora,
                                      rope,
                                      p.kv_lora,
                                      tokens};
    sl_generic_attend(query, locate,
                      shared_floats + warp * sl_generic_floats(p.kv_lora, rope, p.kv_lora));
}

static sl_status_t attend_generic(sl_device_t *device, sl_stream_t *stream,
                                  const sl_attn_absorbed_t *p)
{
    cudaStream_t on = sl_cuda_enter(device, stream);
    const size_t blocks = ((size_t)p->rows * p->heads + SL_GENERIC_WARPS - 1) / SL_GENERIC_WARPS;
    const size_t bytes = SL_GENERIC_WARPS *
                         sl_generic_floats(p->kv_lora, p->cache.width - p->kv_lora, p->kv_lora) *
                         sizeof(float);
    if (bytes > device->smem_max_bytes) {
        return sl_error(SL_ERR_UNSUPPORTED,
                        "cuda attn_absorbed: kv_lora %u, width %u need %zu bytes of shared memory; "
                        "a block has %zu",
                        p->kv_lora, p->cache.width, bytes, device->smem_max_bytes);
    }
    SL_ASSERT(blocks <= INT32_MAX);
    SL_CUDA_TRY(cudaFuncSetAttribute(absorbed_generic_kernel,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                "attn_absorbed");
    absorbed_generic_kernel<<<(uint32_t)blocks, SL_GENERIC_WARPS * SL_WARP, bytes, on>>>(*p);
    SL_CUDA_LAUNCHED("attn_absorbed");
    return SL_OK;
}

extern "C" sl_status_t sl_cuda_attn_absorbed(sl_device_t *device, sl_stream_t *stream,
                                             const sl_attn_absorbed_t *p)
{
    if (p->rows == 0 || p->heads == 0) {
        return SL_OK;
    }
    SL_ASSERT(p->scale > 0 && p->cache.width >= p->kv_lora);
    return fits_tiles(p) ? attend_tiles(device, stream, p) : attend_generic(device, stream, p);
}
