/* How many layers of a prompt's latents leave at once. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "prefill_node/forward.h"

#define PAGE(layers) ((size_t)(layers)*64 * 576 * 2) /* bf16, DeepSeek's latent width */

static void test_published_models(void **state)
{
    (void)state;
    assert_int_equal(sl_prefill_push_layers(27, PAGE(27)), 27); /* V2-Lite: 1.9 MiB, all at once */
    assert_int_equal(sl_prefill_push_layers(60, PAGE(60)), 30); /* V2: 4.2 MiB, two halves */
    assert_int_equal(sl_prefill_push_layers(61, PAGE(61)), 31); /* V3 */
}

/* Runs cover the layers, nearly equal, and no page's part of one is far below 2 MiB. */
static void test_any_shape(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers < 200; layers++) {
        for (size_t layer_bytes = 64; layer_bytes < (8u << 20); layer_bytes *= 3) {
            uint32_t push = sl_prefill_push_layers(layers, layers * layer_bytes);
            assert_in_range(push, 1, layers);
            assert_true(push == layers || push * layer_bytes >= (2u << 20));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_published_models),
        cmocka_unit_test(test_any_shape),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
