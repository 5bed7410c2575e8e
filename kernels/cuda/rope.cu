/*
 * Rotation of the queries, norm of the latent, and the write into the paged cache: one pass.
 *
 * A warp an item, and no barrier anywhere. A token's item 0 is its latent: the norm's sum is over
 * one warp, k_pe is rotated by its first lanes, and both go to the latents and to the cached slot.
 * Its other items are the rope parts of its heads, a warp's worth of pieces each.
 *
 * The norm rounds like norm.cu; rotations are f32, rounded once.
 */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/vec.cuh"

#define THREADS 128u
#define WARPS (THREADS / SL_WARP)

/* Pairs (2j, 2j+1) of one piece; `cosines` and `sines` are those of its four pairs. */
__device__ static inline void rotate8(float x[SL_VEC], float4 cosines, float4 sines)
{
    const float c[4] = {cosines.x, cosines.y, cosines.z, cosines.w};
    const float s[4] = {sines.x, sines.y, sines.z, sines.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float a = x[2 * j], b = x[2 * j + 1];
        x[2 * j] = fmaf(a, c[j], -b * s[j]);
        x[2 * j + 1] = fmaf(b, c[j], a * s[j]);
    }
}

__device__ static inline uint4 rotated(uint4 raw, const float *cos_sin, uint32_t rope,
                                       uint32_t piece)
{
    float x[SL_VEC];
    sl_unpack8(raw, x);
    rotate8(x, *(const float4 *)(cos_sin + 4 * piece),
            *(const float4 *)(cos_sin + rope / 2 + 4 * piece));
    return sl_pack8(x);
}

/* Where a token is cached; NULL if it is not. */
__device__ static inline sl_bf16_t *cached_token(const sl_rope_cache_t &p, int64_t slot)
{
    if (slot < 0) {
        return NULL;
    }
    uint64_t page = (uint64_t)slot / p.cache.page_tokens;
    uint64_t offset = (uint64_t)slot % p.cache.page_tokens;
    uint64_t token = (page * p.cache.layers + p.layer) * p.cache.page_tokens + offset;
    return (sl_bf16_t *)p.cache.base + token * p.cache.width;
}

__device__ static inline float norm_scale(const sl_rope_cache_t &p, float square_sum)
{
    return rsqrtf(sl_warp_sum(square_sum) / (float)p.kv_lora + p.eps);
}

__device__ static void put(sl_bf16_t *latent, sl_bf16_t *cached, uint32_t at, uint4 raw)
{
    sl_store16(latent + at, raw);
    if (cached != NULL) {
        sl_store16(cached + at, raw);
    }
}

__device__ static void latent_item(const sl_rope_cache_t &p, uint32_t token, const float *cos_sin,
                                   unsigned lane)
{
    sl_bf16_t *latent = (sl_bf16_t *)p.latent + (size_t)token * (p.kv_lora + p.rope);
    sl_bf16_t *cached = cached_token(p, p.slots[token]);
    const sl_bf16_t *weight = (const sl_bf16_t *)p.norm_weight;
    const uint32_t pieces = p.kv_lora / SL_VEC;
    float x[SL_VEC], square_sum = 0;
#pragma unroll 2
    for (uint32_t i = lane; i < pieces; i += SL_WARP) {
        sl_unpack8(sl_load16(latent + i * SL_VEC), x);
#pragma unroll
        for (unsigned j = 0; j < SL_VEC; j++) {
            square_sum = fmaf(x[j], x[j], square_sum);
        }
    }
    for (uint32_t i = lane; i < p.rope / SL_VEC; i += SL_WARP) {
        uint32_t at = p.kv_lora + i * SL_VEC;
        put(latent, cached, at, rotated(sl_load16(latent + at), cos_sin, p.rope, i));
    }
    const float scale = norm_scale(p, square_sum);
#pragma unroll 2
    for (uint32_t i = lane; i < pieces; i += SL_WARP) {
        float factors[SL_VEC];
        sl_unpack8(sl_load16(latent + i * SL_VEC), x);
        sl_unpack8(sl_load16(weight + i * SL_VEC), factors);
#pragma unroll
        for (unsigned j = 0; j < SL_VEC; j++) {
            x[j] = sl_round_bf16(x[j] * scale) * factors[j];
        }
        put(latent, cached, i * SL_VEC, sl_pack8(x));
    }
}

__global__ static void __launch_bounds__(THREADS)
    rope_cache_kernel(sl_rope_cache_t p, uint32_t items)
{
    const uint32_t item = blockIdx.y * WARPS + threadIdx.x / SL_WARP, token = blockIdx.x;
    const unsigned lane = threadIdx.x % SL_WARP;
    if (item >= items) {
        return;
    }
    const float *cos_sin = p.cos_sin + (size_t)p.positions[token] * p.rope;
    if (item == 0) {
        latent_item(p, token, cos_sin, lane);
        return;
    }
    const uint32_t head_pieces = p.rope / SL_VEC, at = (item - 1) * SL_WARP + lane;
    if (at < p.heads * head_pieces) {
        uint32_t head = at / head_pieces, piece = at % head_pieces;
        sl_bf16_t *q = (sl_bf16_t *)p.q + (size_t)token * p.q_stride +
                       (size_t)head * (p.nope + p.rope) + p.nope + piece * SL_VEC;
        sl_store16(q, rotated(sl_load16(q), cos_sin, p.rope, piece));
    }
}

__device__ static void put_pair(sl_bf16_t *to, sl_bf16_t *cached, float a, float b)
{
    to[0] = sl_to_bf16(a);
    to[1] = sl_to_bf16(b);
    if (cached != NULL) {
        cached[0] = sl_to_bf16(a);
        cached[1] = sl_to_bf16(b);
    }
}

__device__ static void rotate_pair(sl_bf16_t *x, sl_bf16_t *cached, const float *cos_sin,
                                   uint32_t rope, uint32_t pair)
{
    float a = sl_to_float(x[2 * pair]), b = sl_to_float(x[2 * pair + 1]);
    float c = cos_sin[pair], s = cos_sin[rope / 2 + pair];
    put_pair(x + 2 * pair, cached != NULL ? cached + 2 * pair : NULL, fmaf(a, c, -b * s),
             fmaf(b, c, a * s));
}

/* Any widths and strides: the same items, a value or a pair at a time. */
__global__ static void __launch_bounds__(THREADS)
    rope_cache_generic_kernel(sl_rope_cache_t p, uint32_t items)
{
    const uint32_t item = blockIdx.y * WARPS + threadIdx.x / SL_WARP, token = blockIdx.x;
    const unsigned lane = threadIdx.x % SL_WARP;
    if (item >= items) {
        return;
    }
    const float *cos_sin = p.cos_sin + (size_t)p.positions[token] * p.rope;
    const uint32_t pairs = p.rope / 2;
    if (item > 0) {
        uint32_t at = (item - 1) * SL_WARP + lane;
        if (at < p.heads * pairs) {
            sl_bf16_t *q = (sl_bf16_t *)p.q + (size_t)token * p.q_stride +
                           (size_t)(at / pairs) * (p.nope + p.rope) + p.nope;
            rotate_pair(q, NULL, cos_sin, p.rope, at % pairs);
        }
        return;
    }
    sl_bf16_t *latent = (sl_bf16_t *)p.latent + (size_t)token * (p.kv_lora + p.rope);
    sl_bf16_t *cached = cached_token(p, p.slots[token]);
    float square_sum = 0;
    for (uint32_t i = lane; i < p.kv_lora; i += SL_WARP) {
        float x = sl_to_float(latent[i]);
        square_sum = fmaf(x, x, square_sum);
    }
    const float scale = norm_scale(p, square_sum);
    for (uint32_t i = lane; i < p.kv_lora; i += SL_WARP) {
        float weight = sl_to_float(((const sl_bf16_t *)p.norm_weight)[i]);
        sl_bf16_t x = sl_to_bf16(sl_round_bf16(sl_to_float(latent[i]) * scale) * weight);
        latent[i] = x;
        if (cached != NULL) {
            cached[i] = x;
        }
    }
    for (uint32_t pair = lane; pair < pairs; pair += SL_WARP) {
        rotate_pair(latent + p.kv_lora, cached != NULL ? cached + p.kv_lora : NULL, cos_sin, p.rope,
                    pair);
    }
}

static bool fits_vectors(const sl_rope_cache_t *p)
{
    return sl_vec_fits(p->q, p->nope) && p->rope % SL_VEC == 0 && p->q_stride % SL_VEC == 0 &&
           sl_vec_fits(p->latent, p->kv_lora) && sl_vec_fits(p->norm_weight, p->kv_lora) &&
           sl_vec_fits(p->cache.base, p->cache.width) && (uintptr_t)p->cos_sin % 16 == 0;
}

sl_status_t sl_cuda_rope_cache(sl_device_t *device, sl_stream_t *stream,
                               const sl_rope_cache_t *params)
{
    sl_rope_cache_t p = *params;
    if (p.rows == 0) {
        return SL_OK;
    }
    SL_ASSERT(p.cache.width == p.kv_lora + p.rope && p.rope % 2 == 0);
    p.q_stride = p.q_stride ? p.q_stride : p.heads * (p.nope + p.rope);
    cudaStream_t on = sl_cuda_enter(device, stream);
    if (fits_vectors(&p)) {
        uint32_t items = 1 + sl_div_up(p.heads * (p.rope / SL_VEC), SL_WARP);
        dim3 grid(p.rows, sl_div_up(items, WARPS), 1);
        SL_LAUNCH("rope_cache", rope_cache_kernel, grid, THREADS, 0, on, p, items);
    } else {
        uint32_t items = 1 + sl_div_up(p.heads * (p.rope / 2), SL_WARP);
        dim3 grid(p.rows, sl_div_up(items, WARPS), 1);
        SL_LAUNCH("rope_cache", rope_cache_generic_kernel, grid, THREADS, 0, on, p, items);
    }
    return SL_OK;
}
