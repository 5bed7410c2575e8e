/*
 * Attention of one query by one warp, for geometries without a kernel of their own: any widths, any
 * alignment, one key a lane. Slow and plain. Nothing of a key at or past `keys` is read.
 */
#ifndef SL_KERNELS_CUDA_ATTN_GENERIC_CUH
#define SL_KERNELS_CUDA_ATTN_GENERIC_CUH

#include <math.h>

#include "kernels/cuda/vec.cuh"

#define SL_GENERIC_WARPS 4u /* of a block */

/* Where the pieces of a key lie. Score = q_first . first + q_second . second. */
typedef struct {
    const sl_bf16_t *first, *second, *value;
} sl_generic_key_t;

typedef struct {
    const sl_bf16_t *first, *second; /* the query's */
    sl_bf16_t *out;                  /* [v_dim] */
    float *lse;                      /* NULL: not wanted */
    float scale;
    uint32_t first_width, second_width, v_dim, keys;
} sl_generic_query_t;

/* f32 of shared memory that a warp needs. */
__host__ __device__ static inline size_t sl_generic_floats(uint32_t first_width,
                                                           uint32_t second_width, uint32_t v_dim)
{
    return (size_t)first_width + second_width + v_dim;
}

__device__ static inline float sl_generic_dot(const float *q, const sl_bf16_t *k, uint32_t width)
{
    float sum = 0;
    for (uint32_t c = 0; c < width; c++) {
        sum += q[c] * sl_to_float(k[c]);
    }
    return sum;
}

/* `locate(j)` gives key j. `shared`: sl_generic_floats() of this warp. All 32 lanes call. */
template <typename LOCATE>
__device__ static inline void sl_generic_attend(const sl_generic_query_t &query,
                                                const LOCATE &locate, float *shared)
{
    const uint32_t lane = threadIdx.x % SL_WARP;
    float *first = shared, *second = first + query.first_width;
    float *sums = second + query.second_width;
    for (uint32_t c = lane; c < query.first_width; c += SL_WARP) {
        first[c] = sl_to_float(query.first[c]) * query.scale;
    }
    for (uint32_t c = lane; c < query.second_width; c += SL_WARP) {
        second[c] = sl_to_float(query.second[c]) * query.scale;
    }
    for (uint32_t c = lane; c < query.v_dim; c += SL_WARP) {
        sums[c] = 0;
    }
    __syncwarp();
    float max = -INFINITY, weight_sum = 0;
    for (uint32_t key0 = 0; key0 < query.keys; key0 += SL_WARP) {
        const uint32_t count = min(SL_WARP, query.keys - key0);
        float score = -INFINITY;
        if (lane < count) {
            const sl_generic_key_t key = locate(key0 + lane);
            score = sl_generic_dot(first, key.first, query.first_width) +
                    sl_generic_dot(second, key.second, query.second_width);
        }
        const float new_max = fmaxf(max, sl_warp_max(score));
        const float shift = new_max == -INFINITY ? 0 : new_max;
        const float correction = expf(max - shift);
        const float weight = lane < count ? expf(score - shift) : 0;
        weight_sum = weight_sum * correction + sl_warp_sum(weight);
        max = new_max;
        for (uint32_t c0 = 0; c0 < query.v_dim; c0 += SL_WARP) {
            const uint32_t c = c0 + lane;
            float sum = c < query.v_dim ? sums[c] * correction : 0;
            for (uint32_t j = 0; j < count; j++) {
                const float w = __shfl_sync(SL_FULL_MASK, weight, (int)j);
                if (c < query.v_dim) {
                    sum += w * sl_to_float(locate(key0 + j).value[c]);
                }
            }
            if (c < query.v_dim) {
                sums[c] = sum;
            }
        }
    }
    const float inverse = weight_sum == 0 ? 0 : 1 / weight_sum;
    for (uint32_t c = lane; c < query.v_dim; c += SL_WARP) {
        query.out[c] = sl_to_bf16(sums[c] * inverse);
    }
    if (query.lse != NULL && lane == 0) {
        *query.lse = weight_sum == 0 ? -INFINITY : max + logf(weight_sum);
    }
    __syncwarp();
}

#endif
