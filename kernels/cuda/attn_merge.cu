/*
 * Merge of two partial attentions by their log-sum-exp. One warp a (row, head): all of its lanes
 * have read the log-sum-exp before one of them writes the merged one.
 */
#include <math.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/vec.cuh"

enum { MERGE_THREADS = 256, MERGE_WARPS = MERGE_THREADS / 32 };

typedef struct {
    float mine, other; /* weights; they sum to 1 */
} merge_weights_t;

__device__ static inline float merge_one(float mine, float other, merge_weights_t w)
{
    return w.mine * mine + w.other * other;
}

/* Two bf16 in a word. */
__device__ static inline uint32_t merge_pair(uint32_t mine, uint32_t other, merge_weights_t w)
{
    return sl_pack2(
        merge_one(__uint_as_float(mine << 16), __uint_as_float(other << 16), w),
        merge_one(__uint_as_float(mine & 0xffff0000u), __uint_as_float(other & 0xffff0000u), w));
}

/* PAIRS: v_dim is a multiple of 4 and rows are 8-byte aligned. */
template <bool PAIRS>
static __global__ void __launch_bounds__(MERGE_THREADS)
    merge_kernel(sl_bf16_t *out, float *lse, const sl_bf16_t *other_out, const float *other_lse,
                 size_t count, uint32_t v_dim)
{
    const size_t item = (size_t)blockIdx.x * MERGE_WARPS + threadIdx.x / SL_WARP;
    const uint32_t lane = threadIdx.x % SL_WARP;
    if (item >= count) {
        return;
    }
    const float a = lse[item], b = other_lse[item];
    if (b == -INFINITY) {
        return; /* nothing to add */
    }
    const float max = fmaxf(a, b);
    const float mine = expf(a - max), other = expf(b - max), sum = mine + other;
    const merge_weights_t weights = {mine / sum, other / sum};
    out += item * v_dim;
    other_out += item * v_dim;
    if (PAIRS) {
        for (uint32_t c = lane * 4; c < v_dim; c += SL_WARP * 4) {
            uint2 x = *reinterpret_cast<const uint2 *>(out + c);
            const uint2 y = *reinterpret_cast<const uint2 *>(other_out + c);
            x.x = merge_pair(x.x, y.x, weights);
            x.y = merge_pair(x.y, y.y, weights);
            *reinterpret_cast<uint2 *>(out + c) = x;
        }
    } else {
        for (uint32_t c = lane; c < v_dim; c += SL_WARP) {
            out[c] = sl_to_bf16(merge_one(sl_to_float(out[c]), sl_to_float(other_out[c]), weights));
        }
    }
    __syncwarp();
    if (lane == 0) {
        lse[item] = max + logf(sum);
    }
}

extern "C" sl_status_t sl_cuda_attn_merge(sl_device_t *device, sl_stream_t *stream,
                                          const sl_attn_merge_t *p)
{
    const size_t count = (size_t)p->rows * p->heads;
    if (count == 0) {
        return SL_OK;
    }
    cudaStream_t on = sl_cuda_enter(device, stream);
    const size_t blocks = (count + MERGE_WARPS - 1) / MERGE_WARPS;
    SL_ASSERT(blocks <= INT32_MAX);
    sl_bf16_t *out = (sl_bf16_t *)p->out;
    const sl_bf16_t *other_out = (const sl_bf16_t *)p->other_out;
    const bool pairs =
        p->v_dim % 4 == 0 && (uintptr_t)p->out % 8 == 0 && (uintptr_t)p->other_out % 8 == 0;
    if (pairs) {
        merge_kernel<true><<<(uint32_t)blocks, MERGE_THREADS, 0, on>>>(
            out, p->lse, other_out, p->other_lse, count, p->v_dim);
    } else {
        merge_kernel<false><<<(uint32_t)blocks, MERGE_THREADS, 0, on>>>(
            out, p->lse, other_out, p->other_lse, count, p->v_dim);
    }
    SL_CUDA_LAUNCHED("attn_merge");
    return SL_OK;
}
