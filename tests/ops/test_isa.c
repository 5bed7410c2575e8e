/* The inner loops of each instruction set this processor has, where operations would hide an error:
 * the exponential over its whole range, and the rest of a vector. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cpu/isa.h"

static float exp_of(const sl_isa_t *isa, float x)
{
    float out;
    float sum = isa->exp_sum(&out, &x, 1, 0, 1);
    assert_true(sum == out || isnan(out));
    return out;
}

static void test_exponential(void **state)
{
    (void)state;
    for (size_t i = 0; sl_isa_at(i) != NULL; i++) {
        const sl_isa_t *isa = sl_isa_at(i);
        for (float x = -87.3f; x < 88.7f; x += 0.0137f) {
            double expected = exp((double)x);
            double error = fabs(exp_of(isa, x) - expected) / expected;
            if (!(error < 3e-7)) {
                fail_msg("%s: exp(%g) is off by %g of itself", isa->name, (double)x, error);
            }
        }
        assert_true(exp_of(isa, 0) == 1);
        assert_true(exp_of(isa, -88) == 0);
        assert_true(exp_of(isa, -1e30f) == 0);
        assert_true(exp_of(isa, -INFINITY) == 0);
        assert_true(isfinite(exp_of(isa, 88.7228f)));
        assert_true(exp_of(isa, 88.73f) == INFINITY);
        assert_true(exp_of(isa, 1e30f) == INFINITY);
        assert_true(exp_of(isa, INFINITY) == INFINITY);
        assert_true(isnan(exp_of(isa, NAN)));
    }
}

/* Lengths around every number of lanes: sums count each value once, nothing beyond is touched. */
static void test_rest_of_a_vector(void **state)
{
    (void)state;
    for (size_t i = 0; sl_isa_at(i) != NULL; i++) {
        const sl_isa_t *isa = sl_isa_at(i);
        for (size_t count = 0; count <= 70; count++) {
            float x[80], y[80];
            for (size_t j = 0; j < 80; j++) {
                x[j] = j < count ? (float)(j % 5) : NAN;
                y[j] = 2;
            }
            double squares = 0, exps = 0;
            for (size_t j = 0; j < count; j++) {
                squares += (double)x[j] * x[j];
                exps += exp((x[j] - 1) * 0.5);
            }
            assert_true(isa->square_sum(x, count) == (float)squares);
            assert_true(fabs(isa->exp_sum(NULL, x, count, 1, 0.5f) - exps) <= 1e-6 * exps);
            isa->add_scaled(y, x, 3, count);
            for (size_t j = 0; j < 80; j++) {
                assert_true(y[j] == (j < count ? 2 + 3 * x[j] : 2));
            }
            float best = isa->scale_max(x, count, -1);
            assert_true(count == 0 ? best == -INFINITY : best == 0);
            assert_true(count < 5 || x[4] == -4);
            assert_true(isnan(x[count]));
        }
    }
}

static void test_max_ignores_nan(void **state)
{
    (void)state;
    for (size_t i = 0; sl_isa_at(i) != NULL; i++) {
        float x[37];
        for (size_t j = 0; j < 37; j++) {
            x[j] = j % 3 == 0 ? NAN : -(float)j;
        }
        assert_true(sl_isa_at(i)->scale_max(x, 37, 1) == -1);
        float nan[20];
        memset(nan, 0xff, sizeof(nan));
        assert_true(sl_isa_at(i)->scale_max(nan, 20, 1) == -INFINITY);
        float clean[21] = {0};
        assert_true(sl_isa_at(i)->clean_max(clean, nan, 20) == -INFINITY);
        assert_true(clean[0] == -INFINITY && clean[19] == -INFINITY && clean[20] == 0);
        assert_true(sl_isa_at(i)->clean_max(clean, x + 1, 18) == -1);
        assert_true(clean[0] == -1 && clean[2] == -INFINITY && clean[17] == -INFINITY);
    }
}

/* A product of two parts is the sum of both, with lengths that fill no vector. */
static void test_product_of_two_parts(void **state)
{
    (void)state;
    for (size_t i = 0; sl_isa_at(i) != NULL; i++) {
        float x[] = {1, 2, 3, 4, 5}, w[] = {1, 10, 100}, x2[] = {7, 8}, w2[] = {1000, 2000, 3000};
        float out[] = {-1, -1, -1, -1};
        /* x as one row of 3; w as one column of 3; second part: k = 2. */
        sl_dot_t dot = {.parts = {{x, w, 5, 3, 3}, {x2, w2, 2, 3, 2}}, .part_count = 2, .rows = 1,
                        .n = 1, .out = out, .out_stride = 4};
        sl_isa_at(i)->dot(&dot);
        assert_true(out[0] == 1 + 20 + 300 + 7000 + 16000 && out[1] == -1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exponential),
        cmocka_unit_test(test_rest_of_a_vector),
        cmocka_unit_test(test_max_ignores_nan),
        cmocka_unit_test(test_product_of_two_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
