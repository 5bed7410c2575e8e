/* For tests of facts that hold on every backend whose device memory is host memory: the oracle
 * itself, and the CPU backend. */
#ifndef SL_TESTS_OPS_EACH_BACKEND_H
#define SL_TESTS_OPS_EACH_BACKEND_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/ops.h"

typedef void (*backend_check_t)(const sl_ops_t *ops, sl_device_t *device);

static inline void on_each_backend(backend_check_t check)
{
    static const char *const names[] = {"ref", "cpu"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const sl_ops_t *ops = NULL;
        sl_device_t *device = NULL;
        assert_int_equal(sl_ops_find(names[i], &ops), SL_OK);
        assert_int_equal(ops->open(&(sl_device_params_t){0}, &device), SL_OK);
        check(ops, device);
        ops->close(device);
    }
}

/* Defines test_NAME, which runs check_NAME on each backend. */
#define EACH_BACKEND_TEST(name)                                                                    \
    static void test_##name(void **state)                                                          \
    {                                                                                              \
        (void)state;                                                                               \
        on_each_backend(check_##name);                                                             \
    }

static inline void assert_near(double got, double expected, double tolerance)
{
    if (!(fabs(got - expected) <= tolerance * (1 + fabs(expected)))) {
        fail_msg("got %.9g, expected %.9g", got, expected);
    }
}

/* Values in (-scale, scale), the same for the same seed. */
static inline void fill_random(float *values, size_t count, float scale, uint64_t seed)
{
    uint64_t state = seed * 0x9E3779B97F4A7C15ull + 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        values[i] = scale * (float)((double)(state >> 33) / 1073741824.0 - 1);
    }
}

#endif
