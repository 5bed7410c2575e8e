/* Pieces copied by several threads: each one once, and the first failure with its own text. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdatomic.h>
#include <string.h>

#include "kernels/layers/load_jobs.h"

#define PIECES 1000

static _Atomic uint32_t copied[PIECES];
static float failing; /* the piece that holds this number fails */

static sl_status_t copy_or_fail(sl_device_t *device, void *to, const sl_weight_source_t *source)
{
    float value;
    (void)device;
    memcpy(&value, source->data, sizeof(value));
    if (value == failing) {
        return sl_error(SL_ERR_IO, "piece %g of the file cannot be read", (double)value);
    }
    atomic_fetch_add((_Atomic uint32_t *)to, 1);
    return SL_OK;
}

static sl_status_t run_all(float fails_at)
{
    static float values[PIECES];
    const sl_ops_t ops = {.load_weight = copy_or_fail};
    sl_load_jobs_t jobs = {0};
    sl_progress_t progress;
    failing = fails_at;
    memset(copied, 0, sizeof(copied));
    sl_progress_begin(&progress, "pieces", PIECES * sizeof(float));
    for (uint32_t i = 0; i < PIECES; i++) {
        values[i] = (float)i;
        sl_weight_source_t source = {&values[i], SL_DTYPE_F32, 1, 1, 1};
        assert_int_equal(sl_load_jobs_add(&jobs, &copied[i], &source), SL_OK);
    }
    sl_status_t status = sl_load_jobs_run(&jobs, &ops, NULL, &progress);
    assert_int_equal(jobs.count, 0);
    if (status == SL_OK) {
        assert_int_equal(progress.done, PIECES * sizeof(float));
    }
    sl_load_jobs_free(&jobs);
    return status;
}

static void test_each_once(void **state)
{
    (void)state;
    assert_int_equal(run_all(-1), SL_OK);
    for (uint32_t i = 0; i < PIECES; i++) {
        assert_int_equal(copied[i], 1);
    }
}

static void test_failure(void **state)
{
    (void)state;
    assert_int_equal(run_all(500), SL_ERR_IO);
    assert_non_null(strstr(sl_error_text(), "piece 500 of the file cannot be read"));
    assert_int_equal(copied[500], 0);
    for (uint32_t i = 0; i < PIECES; i++) {
        assert_true(copied[i] <= 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_once),
        cmocka_unit_test(test_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
