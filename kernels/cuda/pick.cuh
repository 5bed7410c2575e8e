/*
 * Choosing the best of many by a warp, ties to the lower index. Values become keys: unsigned
 * integers in the same order, of which 0 is nobody's, so that it can mark what is taken or out.
 */
#ifndef SL_KERNELS_CUDA_PICK_CUH
#define SL_KERNELS_CUDA_PICK_CUH

#include "kernels/cuda/vec.cuh"

#define SL_KEY_NONE 0u
#define SL_KEY_NEGATIVE_INFINITY 0x007fffffu

/* NaN counts as -inf, and -0 as 0. */
__host__ __device__ static inline uint32_t sl_key_of_bits(uint32_t bits)
{
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return SL_KEY_NEGATIVE_INFINITY;
    }
    if ((bits & 0x7fffffffu) == 0) {
        bits = 0;
    }
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__host__ __device__ static inline uint32_t sl_bits_of_key(uint32_t key)
{
    return key & 0x80000000u ? key & 0x7fffffffu : ~key;
}

__device__ static inline uint32_t sl_key(float x)
{
    return sl_key_of_bits(__float_as_uint(x));
}

__device__ static inline float sl_key_value(uint32_t key)
{
    return __uint_as_float(sl_bits_of_key(key));
}

/* The best of keys[0 .. count), of which each lane looks at every 32nd. */
typedef struct {
    uint32_t key, index; /* this lane's own best; key 0: has none */
} sl_lane_best_t;

__device__ static inline sl_lane_best_t sl_lane_best(const uint32_t *keys, uint32_t count,
                                                     unsigned lane)
{
    sl_lane_best_t best = {SL_KEY_NONE, lane};
#pragma unroll 4
    for (uint32_t i = lane; i < count; i += SL_WARP) {
        uint32_t key = keys[i];
        if (key > best.key) {
            best.key = key;
            best.index = i;
        }
    }
    return best;
}

/* Index of the best, the same in all lanes; takes it: its key becomes 0. Some key must not be 0. */
__device__ static inline uint32_t sl_warp_take(uint32_t *keys, uint32_t count, unsigned lane,
                                               sl_lane_best_t *mine)
{
    uint32_t key = __reduce_max_sync(SL_FULL_MASK, mine->key);
    uint32_t index = __reduce_min_sync(SL_FULL_MASK, mine->key == key ? mine->index : 0xffffffffu);
    if (mine->key == key && mine->index == index) {
        keys[index] = SL_KEY_NONE;
        *mine = sl_lane_best(keys, count, lane);
    }
    return index;
}

#endif
