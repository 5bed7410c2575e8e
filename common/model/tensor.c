/* Exact widening of the element types of a checkpoint to f32. */
#include <string.h>

#include "common/model/checkpoint.h"

static float bits_to_f32(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* IEEE half: subnormals are scaled up by hand, the rest moves exponent and mantissa. */
static float f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    if (exponent == 31) {
        return bits_to_f32(sign | 0x7f800000u | mantissa << 13);
    }
    return bits_to_f32(sign | (exponent + 112) << 23 | mantissa << 13);
}

void sl_tensor_to_f32(const sl_tensor_t *tensor, float *out)
{
    const char *from = tensor->data;
    uint64_t count = tensor->shape[0] * tensor->shape[1];
    if (tensor->dtype == SL_DTYPE_F32) {
        memcpy(out, from, count * sizeof(float));
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, from + i * sizeof(bits), sizeof(bits));
        out[i] = tensor->dtype == SL_DTYPE_BF16 ? bits_to_f32((uint32_t)bits << 16)
                                                : f16_to_f32(bits);
    }
}
