/* The value of one made-up weight (sl_dummy_weight_t), the same on every backend: the finaliser of
 * splitmix64 over seed and place, its upper 24 bits as a number in [-1, 1). */
#ifndef SL_KERNELS_DUMMY_H
#define SL_KERNELS_DUMMY_H

#include <stdint.h>

#ifdef __CUDACC__
#define SL_DUMMY_FUNCTION static inline __host__ __device__
#else
#define SL_DUMMY_FUNCTION static inline
#endif

SL_DUMMY_FUNCTION float sl_dummy_uniform(uint64_t seed, uint64_t place)
{
    uint64_t z = seed + (place + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z = z ^ (z >> 31);
    return (float)(z >> 40) * 0x1p-23f - 1.0f;
}

#endif
