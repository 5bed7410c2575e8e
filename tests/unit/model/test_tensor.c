/* Widening to f32: every half and every bfloat16 there is, against their definitions. */
#include "check.h"

#include <math.h>
#include <stdlib.h>

#include "common/model/checkpoint.h"

#define ALL 65536

/* The value that IEEE 754 gives a number of `exponent_bits` and `mantissa_bits`. */
static double value_of(unsigned bits, int exponent_bits, int mantissa_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = (int)(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
    double mantissa = (double)(bits & ((1u << mantissa_bits) - 1));
    double sign = bits >> (exponent_bits + mantissa_bits) ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) {
        return mantissa == 0 ? sign * INFINITY : NAN;
    }
    if (exponent == 0) {
        return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    }
    return sign * ldexp(mantissa + ldexp(1, mantissa_bits), exponent - bias - mantissa_bits);
}

static void check_all(sl_dtype_t dtype, int exponent_bits, int mantissa_bits)
{
    /* one byte off, as tensors in a mapping may lie */
    unsigned char *bytes = malloc(2 * ALL + 1);
    float *found = malloc(ALL * sizeof(float));
    for (unsigned i = 0; i < ALL; i++) {
        bytes[1 + 2 * i] = (unsigned char)i;
        bytes[2 + 2 * i] = (unsigned char)(i >> 8);
    }
    sl_tensor_t tensor = {.name = "all",
                          .dtype = dtype,
                          .rank = 2,
                          .shape = {256, 256},
                          .data = bytes + 1,
                          .bytes = 2 * ALL};
    sl_tensor_to_f32(&tensor, found);
    for (unsigned i = 0; i < ALL; i++) {
        double expected = value_of(i, exponent_bits, mantissa_bits);
        bool same = isnan(expected)
                        ? isnan(found[i])
                        : (double)found[i] == expected && !signbit(found[i]) == !signbit(expected);
        if (!same) {
            fail_msg("bits %04x: expected %a, found %a", i, expected, (double)found[i]);
        }
    }
    free(found);
    free(bytes);
}

static void test_f16(void **state)
{
    (void)state;
    check_all(SL_DTYPE_F16, 5, 10);
}

static void test_bf16(void **state)
{
    (void)state;
    check_all(SL_DTYPE_BF16, 8, 7);
}

static void test_f32(void **state)
{
    (void)state;
    const float values[3] = {1.5f, -0.0f, INFINITY};
    char bytes[13];
    float found[3];
    memcpy(bytes + 1, values, sizeof(values));
    sl_tensor_t tensor = {.dtype = SL_DTYPE_F32, .rank = 1, .shape = {3, 1}, .data = bytes + 1};
    sl_tensor_to_f32(&tensor, found);
    assert_memory_equal(found, values, sizeof(values));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_f16), cmocka_unit_test(test_bf16),
                                       cmocka_unit_test(test_f32)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
