/*
 * Device code that the kernels share: bf16 in 16-byte pieces, sums and maxima over a warp and a
 * block, small integer arithmetic. Reductions give every thread the result, in an order that does
 * not depend on scheduling.
 */
#ifndef SL_KERNELS_CUDA_VEC_CUH
#define SL_KERNELS_CUDA_VEC_CUH

#include <cuda_bf16.h>
#include <stdint.h>

#define SL_WARP 32u
#define SL_FULL_MASK 0xffffffffu
#define SL_VEC 8u /* bf16 in 16 bytes */

typedef __nv_bfloat16 sl_bf16_t;

__host__ __device__ static inline uint32_t sl_div_up(uint32_t a, uint32_t b)
{
    return a / b + (a % b != 0);
}

/* 16-byte pieces need aligned pointers, and widths and strides in whole pieces. */
static inline bool sl_vec_fits(const void *pointer, uint64_t elements)
{
    return (uintptr_t)pointer % 16 == 0 && elements % SL_VEC == 0;
}

__device__ static inline float sl_to_float(sl_bf16_t x)
{
    return __bfloat162float(x);
}

__device__ static inline sl_bf16_t sl_to_bf16(float x)
{
    return __float2bfloat16_rn(x);
}

/* What a float is after a stay in bf16 memory. */
__device__ static inline float sl_round_bf16(float x)
{
    return __bfloat162float(__float2bfloat16_rn(x));
}

/* Eight bf16 of 16 bytes to floats and back. */
__device__ static inline void sl_unpack8(uint4 raw, float out[8])
{
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ static inline uint32_t sl_pack2(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

__device__ static inline uint4 sl_pack8(const float in[8])
{
    return make_uint4(sl_pack2(in[0], in[1]), sl_pack2(in[2], in[3]), sl_pack2(in[4], in[5]),
                      sl_pack2(in[6], in[7]));
}

__device__ static inline uint4 sl_load16(const void *from)
{
    return *reinterpret_cast<const uint4 *>(from);
}

__device__ static inline void sl_store16(void *to, uint4 raw)
{
    *reinterpret_cast<uint4 *>(to) = raw;
}

__device__ static inline float sl_warp_sum(float x)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(SL_FULL_MASK, x, offset);
    }
    return x;
}

__device__ static inline float sl_warp_max(float x)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(SL_FULL_MASK, x, offset));
    }
    return x;
}

/* Sum over a block of whole warps, at most 1024 threads. `shared` holds 32 floats and may be used
 * again after the next barrier. */
__device__ static inline float sl_block_sum(float x, float *shared)
{
    const unsigned warps = blockDim.x / SL_WARP, warp = threadIdx.x / SL_WARP,
                   lane = threadIdx.x % SL_WARP;
    x = sl_warp_sum(x);
    if (warps == 1) {
        return x;
    }
    if (lane == 0) {
        shared[warp] = x;
    }
    __syncthreads();
    x = lane < warps ? shared[lane] : 0;
    return sl_warp_sum(x);
}

#endif
