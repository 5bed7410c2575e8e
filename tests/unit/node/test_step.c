/* The step list, the batch made from it, and the plan as bytes. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "node/step.h"

#define STRIDE 8

static sl_step_t *make(uint32_t rows, uint32_t requests)
{
    sl_step_t *step = NULL;
    assert_int_equal(sl_step_create(rows, requests, STRIDE, 2, 64, &step), SL_OK);
    return step;
}

static void fill_two(sl_step_t *step)
{
    const int32_t first[3] = {10, 11, 12}, second[1] = {20};
    const uint32_t first_pages[3] = {7, 3, 9}, second_pages[3] = {4, 5, 6};
    sl_step_add(step, first, 3, 63, first_pages, 3);
    sl_step_add(step, second, 1, 128, second_pages, 3);
}

static void check_two(sl_step_t *step)
{
    const uint32_t rank_rows[2] = {4, 1};
    const sl_batch_t *batch = sl_step_batch(step, rank_rows, 0);
    const int32_t tokens[4] = {10, 11, 12, 20}, positions[4] = {63, 64, 65, 128};
    const int64_t slots[4] = {7 * 64 + 63, 3 * 64, 3 * 64 + 1, 6 * 64};
    assert_int_equal(batch->rows, 4);
    assert_int_equal(batch->requests, 2);
    assert_memory_equal(batch->tokens, tokens, sizeof(tokens));
    assert_memory_equal(batch->positions, positions, sizeof(positions));
    assert_memory_equal(batch->slots, slots, sizeof(slots));
    assert_int_equal(batch->row_begin[1], 3);
    assert_int_equal(batch->row_begin[2], 4);
    const int32_t pages[5] = {7, 3, 4, 5, 6}; /* 9 is not needed yet */
    assert_memory_equal(batch->pages, pages, sizeof(pages));
    assert_int_equal(batch->page_begin[0], 0);
    assert_int_equal(batch->page_begin[1], 2);
    assert_int_equal(batch->page_begin[2], 5);
    assert_int_equal(batch->rank_rows[1], 1);
    assert_int_equal(sl_step_first_row(step, 1), 3);
    assert_int_equal(sl_step_last_row(step, 0), 2);
}

static void test_batch(void **state)
{
    (void)state;
    sl_step_t *step = make(16, 2);
    fill_two(step);
    check_two(step);
    assert_true(sl_step_full(step)); /* both requests' places are taken */
    assert_int_equal(sl_step_rows_left(step), 12);
    sl_step_clear(step);
    assert_int_equal(sl_step_rows(step), 0);
    assert_false(sl_step_full(step));
    sl_step_destroy(step);
}

static void test_plan_round_trip(void **state)
{
    (void)state;
    sl_step_t *from = make(16, 4), *to = make(16, 4);
    const void *plan;
    uint32_t bytes;
    fill_two(from);
    sl_step_plan(from, &plan, &bytes);
    assert_true(bytes <= sl_step_plan_max(from));
    assert_int_equal(sl_step_set_plan(to, plan, bytes), SL_OK);
    check_two(to);
    sl_step_destroy(from);
    sl_step_destroy(to);
}

/* Whatever the bytes say, a plan that is not one is refused and leaves the step empty. */
static void test_plan_damaged(void **state)
{
    (void)state;
    sl_step_t *from = make(16, 4), *to = make(16, 4);
    const void *plan;
    uint32_t bytes;
    fill_two(from);
    sl_step_plan(from, &plan, &bytes);
    int32_t *copy = malloc(bytes);
    for (uint32_t cut = 0; cut < bytes; cut++) {
        assert_int_equal(sl_step_set_plan(to, plan, cut), SL_ERR_DESYNC);
    }
    const int32_t values[] = {-1, 0, 17, INT32_MAX, INT32_MIN};
    for (uint32_t word = 0; word < 9; word++) { /* head and both entries */
        for (size_t v = 0; v < sizeof(values) / sizeof(values[0]); v++) {
            memcpy(copy, plan, bytes);
            bool harmless = word >= 3 && (word - 3) % 3 == 0 && (values[v] == 0 || values[v] == 17);
            if (copy[word] == values[v] || harmless) {
                continue; /* an earlier first position is a plan too */
            }
            copy[word] = values[v];
            assert_int_equal(sl_step_set_plan(to, copy, bytes), SL_ERR_DESYNC);
            assert_int_equal(sl_step_rows(to), 0);
        }
    }
    uint32_t last = bytes / sizeof(int32_t) - 1; /* a page of this rank's pool, 64 of them */
    for (uint32_t page = 63; page <= 64; page++) {
        memcpy(copy, plan, bytes);
        copy[last] = (int32_t)page;
        assert_int_equal(sl_step_set_plan(to, copy, bytes), page < 64 ? SL_OK : SL_ERR_DESYNC);
    }
    uint32_t token = 3 + 2 * 3; /* the first one, of a step of 16 rows at most */
    for (int32_t row = 15; row <= 16; row++) {
        memcpy(copy, plan, bytes);
        copy[token] = -1 - row;
        assert_int_equal(sl_step_set_plan(to, copy, bytes), row < 16 ? SL_OK : SL_ERR_DESYNC);
    }
    free(copy);
    sl_step_destroy(from);
    sl_step_destroy(to);
}

/* The group's smallest rank has fewer pages than this one. */
static void test_limited_pages(void **state)
{
    (void)state;
    sl_step_t *from = make(16, 2), *to = make(16, 2);
    const void *plan;
    uint32_t bytes;
    fill_two(from); /* of pages up to 7 */
    sl_step_plan(from, &plan, &bytes);
    sl_step_limit_pages(to, 8);
    assert_int_equal(sl_step_set_plan(to, plan, bytes), SL_OK);
    sl_step_limit_pages(to, 7);
    assert_int_equal(sl_step_set_plan(to, plan, bytes), SL_ERR_DESYNC);
    assert_int_equal(sl_step_rows(to), 0);
    sl_step_destroy(from);
    sl_step_destroy(to);
}

static void test_too_large(void **state)
{
    (void)state;
    sl_step_t *step = NULL;
    assert_int_equal(sl_step_create(65536, 65536, 1u << 14, 1, 1u << 30, &step), SL_ERR_CONFIG);
    assert_null(step);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batch),
        cmocka_unit_test(test_plan_round_trip),
        cmocka_unit_test(test_plan_damaged),
        cmocka_unit_test(test_limited_pages),
        cmocka_unit_test(test_too_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
