/* A model that does not fit is refused before it takes anything, with what would fit. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/layers/model.h"

typedef struct {
    sl_checkpoint_t *checkpoint;
    sl_model_params_t params;
} rig_t;

static void rig_open(rig_t *rig)
{
    const char *source = getenv("SLUICE_SOURCE_DIR");
    char path[600];
    snprintf(path, sizeof(path), "%s/tests/golden/lite", source != NULL ? source : ".");
    assert_int_equal(sl_checkpoint_open(path, &rig->checkpoint), SL_OK);
    rig->params = (sl_model_params_t){
        .checkpoint = rig->checkpoint,
        .tp = 1,
        .attention = SL_ATTENTION_DP,
        .absorbed = true,
        .max_rows = 64,
        .max_requests = 4,
        .max_logit_rows = 4,
        .page_count = 4,
    };
    assert_int_equal(sl_ops_find("cpu", &rig->params.ops), SL_OK);
}

static void test_too_many_pages(void **state)
{
    (void)state;
    rig_t rig;
    sl_model_t *model = NULL;
    rig_open(&rig);
    rig.params.page_count = 1u << 30;
    assert_int_equal(sl_model_create(&rig.params, &model), SL_ERR_NO_MEMORY);
    assert_null(model);
    const char *remedy = strstr(sl_error_text(), "--pages of at most ");
    assert_non_null(remedy);
    unsigned long long fitting = strtoull(remedy + strlen("--pages of at most "), NULL, 10);
    assert_in_range(fitting, 1, (1u << 30) - 1);
    assert_non_null(strstr(sl_error_text(), "1073741824 latent pages"));
    sl_checkpoint_close(rig.checkpoint);
}

static void test_too_many_rows(void **state)
{
    (void)state;
    rig_t rig;
    sl_model_t *model = NULL;
    rig_open(&rig);
    rig.params.max_rows = 1u << 30;
    assert_int_equal(sl_model_create(&rig.params, &model), SL_ERR_NO_MEMORY);
    assert_non_null(strstr(sl_error_text(), "a smaller --token-budget or --max-batch"));
    sl_checkpoint_close(rig.checkpoint);
}

static uint64_t device_bytes;
static uint32_t allocations;

static sl_status_t device_memory(sl_device_t *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    (void)device;
    *free_bytes = *total_bytes = device_bytes;
    return SL_OK;
}

static sl_status_t device_alloc(sl_device_t *device, size_t bytes, const char *what,
                                void **memory_p)
{
    const sl_ops_t *cpu;
    allocations++;
    return sl_ops_find("cpu", &cpu) == SL_OK ? cpu->alloc(device, bytes, what, memory_p)
                                             : SL_ERR_UNSUPPORTED;
}

/* However much a device has, and with as many pages as fit: what is too little is refused before
 * anything is taken, and what is enough leaves the share that was not to be used. */
static void test_any_device(void **state)
{
    (void)state;
    rig_t rig;
    sl_model_t *model = NULL;
    sl_status_t status = SL_ERR_NO_MEMORY;
    uint32_t refused = 0;
    rig_open(&rig);
    sl_ops_t ops = *rig.params.ops;
    ops.host_memory = false;
    ops.memory = device_memory;
    ops.alloc = device_alloc;
    rig.params.ops = &ops;
    rig.params.page_count = 0;
    rig.params.mem_fraction = 0.8;
    for (device_bytes = 1 << 18; status == SL_ERR_NO_MEMORY; device_bytes += device_bytes / 50) {
        allocations = 0;
        status = sl_model_create(&rig.params, &model);
        refused += status == SL_ERR_NO_MEMORY;
        assert_true(status == SL_OK || allocations == 0);
    }
    assert_int_equal(status, SL_OK);
    assert_true(refused > 10 && device_bytes < (1 << 26));
    sl_model_destroy(model);
    sl_checkpoint_close(rig.checkpoint);
}

static void test_fits(void **state)
{
    (void)state;
    rig_t rig;
    sl_model_t *model = NULL;
    rig_open(&rig);
    assert_int_equal(sl_model_create(&rig.params, &model), SL_OK);
    assert_int_equal(sl_model_page_count(model), 4);
    sl_model_destroy(model);
    sl_checkpoint_close(rig.checkpoint);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_too_many_pages),
        cmocka_unit_test(test_too_many_rows),
        cmocka_unit_test(test_any_device),
        cmocka_unit_test(test_fits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
