/*
 * 16-bit floating point to f32, exact for every value; NaN stays NaN. Little-endian hosts, as the
 * safetensors format demands. Pure functions; any thread.
 */
#ifndef SL_KERNELS_CONVERT_H
#define SL_KERNELS_CONVERT_H

#include <stdint.h>
#include <string.h>

#include "common/model/checkpoint.h"

static inline float sl_float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline float sl_float_from_bf16(uint16_t bits)
{
    return sl_float_from_bits((uint32_t)bits << 16);
}

/* Half precision: 1 sign, 5 exponent (bias 15), 10 fraction bits. */
static inline float sl_float_from_f16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 0x1fu;
    uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24 is exact in f32 */
        float magnitude = (float)fraction * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    if (exponent == 31) { /* infinity or NaN */
        return sl_float_from_bits(sign | 0x7f800000u | fraction << 13);
    }
    return sl_float_from_bits(sign | (exponent + 112u) << 23 | fraction << 13);
}

static inline size_t sl_dtype_bytes(sl_dtype_t dtype)
{
    return dtype == SL_DTYPE_F32 ? 4 : 2;
}

/* `count` elements at `from` (any alignment) to f32. */
static inline void sl_convert_to_f32(float *to, const void *from, sl_dtype_t dtype, size_t count)
{
    const unsigned char *bytes = from;
    if (dtype == SL_DTYPE_F32) {
        memcpy(to, bytes, count * sizeof(float));
        return;
    }
    for (size_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, bytes + 2 * i, sizeof(bits));
        to[i] = dtype == SL_DTYPE_BF16 ? sl_float_from_bf16(bits) : sl_float_from_f16(bits);
    }
}

#endif
