/*
 * Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
 * numbers: as easy as 1, 2, 3" (SC 2011). Sampling uses it so that a token's draw is a function of
 * the request's seed and the token's position alone, in any batch, on any rank and machine.
 *
 * The draw, exactly (part of the protocol: every backend and every version must agree):
 *   key     = (seed mod 2^32, seed div 2^32)
 *   counter = (position mod 2^32, position div 2^32, 0, 0)
 *   uniform = floor((word0 * 2^32 + word1) / 2^11) * 2^-53, in [0, 1)
 *
 * Pure functions; any thread.
 */
#ifndef SL_KERNELS_PHILOX_H
#define SL_KERNELS_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define SL_PHILOX_FUNCTION __host__ __device__ static inline
#else
#define SL_PHILOX_FUNCTION static inline
#endif

SL_PHILOX_FUNCTION void sl_philox4x32_10(const uint32_t counter[4], const uint32_t key[2],
                                         uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * c0;
        uint64_t product1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)product1;
        c3 = (uint32_t)product0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* The uniform number in [0, 1) of a seed and a position. */
SL_PHILOX_FUNCTION double sl_philox_uniform(uint64_t seed, uint64_t position)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    uint32_t words[4];
    sl_philox4x32_10(counter, key, words);
    uint64_t bits = ((uint64_t)words[0] << 32 | words[1]) >> 11;
    return (double)bits * 0x1p-53;
}

#endif
