/* Sizes of recorded steps: ascending, up to the largest, and none far from the next. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "decode_node/buckets.h"

static void check(uint32_t largest)
{
    uint32_t buckets[SL_BUCKETS_MAX];
    uint32_t count = sl_decode_buckets(largest, buckets);
    assert_in_range(count, 1, SL_BUCKETS_MAX);
    assert_int_equal(buckets[count - 1], largest);
    assert_int_equal(buckets[0], 1);
    for (uint32_t i = 1; i < count; i++) {
        assert_true(buckets[i] > buckets[i - 1]);
        /* One row more than a bucket holds is padded by less than a quarter, or by few rows. */
        uint32_t padding = buckets[i] - buckets[i - 1] - 1;
        assert_true(padding < 16 || padding * 4 <= buckets[i - 1]);
    }
}

static void test_sizes(void **state)
{
    (void)state;
    for (uint32_t largest = 1; largest <= 65536; largest += largest < 3000 ? 1 : 977) {
        check(largest);
    }
    check(65536);
}

static void test_few_rows(void **state)
{
    (void)state;
    const uint32_t expected[] = {1, 2, 4, 8, 16, 20};
    uint32_t buckets[SL_BUCKETS_MAX];
    assert_int_equal(sl_decode_buckets(20, buckets), 6);
    assert_memory_equal(buckets, expected, sizeof(expected));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_few_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
