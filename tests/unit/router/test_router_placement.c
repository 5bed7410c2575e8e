/* Which rank gets a request. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "router/placement.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static sl_load_t load(uint64_t pages_total, uint64_t pages_reserved, uint64_t running)
{
    return (sl_load_t){.pages_total = pages_total,
                       .pages_reserved = pages_reserved,
                       .running = running,
                       .hold_order = SL_HOLD_NONE};
}

static size_t place_decode(sl_load_t *loads, size_t count, sl_demand_t demand)
{
    const sl_load_t *pointers[8] = {NULL};
    for (size_t i = 0; i < count; i++) {
        pointers[i] = &loads[i];
    }
    return sl_place_decode(pointers, count, &demand);
}

static size_t place_prefill(sl_load_t *loads, size_t count, sl_demand_t demand)
{
    const sl_load_t *pointers[8] = {NULL};
    for (size_t i = 0; i < count; i++) {
        pointers[i] = &loads[i];
    }
    return sl_place_prefill(pointers, count, &demand);
}

static void no_ranks_no_place(void **state)
{
    (void)state;
    assert_int_equal(place_decode(NULL, 0, (sl_demand_t){.pages = 1}), SL_PLACE_NONE);
    assert_int_equal(place_prefill(NULL, 0, (sl_demand_t){.pages = 1}), SL_PLACE_NONE);
}

static void decode_goes_where_most_pages_are_free(void **state)
{
    (void)state;
    sl_load_t loads[] = {load(100, 60, 0), load(50, 5, 9), load(90, 50, 0)};
    assert_int_equal(place_decode(loads, COUNT(loads), (sl_demand_t){.pages = 10}), 1);
    assert_int_equal(place_decode(loads, COUNT(loads), (sl_demand_t){.pages = 45}), 1);
    assert_int_equal(place_decode(loads, COUNT(loads), (sl_demand_t){.pages = 46}), SL_PLACE_NONE);
}

static void equal_ranks_take_turns(void **state)
{
    (void)state;
    sl_load_t loads[] = {load(100, 0, 1), load(100, 0, 1), load(100, 0, 1)};
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(
            place_decode(loads, COUNT(loads), (sl_demand_t){.pages = 1, .rotation = i}), i % 3);
    }
    loads[1].running = 0;
    assert_int_equal(place_decode(loads, COUNT(loads), (sl_demand_t){.pages = 1}), 1);
}

static void full_running_batch_takes_no_more(void **state)
{
    (void)state;
    sl_load_t loads[] = {load(100, 0, 4), load(10, 0, 0)};
    loads[0].max_running = 4;
    assert_int_equal(place_decode(loads, COUNT(loads), (sl_demand_t){.pages = 5}), 1);
    assert_int_equal(place_decode(loads, COUNT(loads), (sl_demand_t){.pages = 50}), SL_PLACE_NONE);
}

static void avoided_rank_is_the_last_resort(void **state)
{
    (void)state;
    sl_load_t loads[] = {load(100, 0, 0), load(10, 0, 0)};
    sl_demand_t demand = {.pages = 5, .avoid = &loads[0]};
    assert_int_equal(place_decode(loads, COUNT(loads), demand), 1);
    demand.pages = 50;
    assert_int_equal(place_decode(loads, COUNT(loads), demand), 0);
}

static void held_rank_serves_only_older_requests(void **state)
{
    (void)state;
    sl_load_t loads[] = {load(100, 0, 0)};
    loads[0].hold_order = 7;
    assert_int_equal(place_decode(loads, 1, (sl_demand_t){.pages = 5, .order = 8}), SL_PLACE_NONE);
    assert_int_equal(place_decode(loads, 1, (sl_demand_t){.pages = 5, .order = 7}), 0);
    assert_int_equal(place_decode(loads, 1, (sl_demand_t){.pages = 5, .order = 6}), 0);
}

static void prefill_goes_where_fewest_tokens_wait(void **state)
{
    (void)state;
    sl_load_t loads[] = {load(9, 0, 0), load(9, 0, 0)};
    loads[0].queued_tokens = 500;
    loads[1].queued_tokens = 100;
    assert_int_equal(place_prefill(loads, 2, (sl_demand_t){.prompt_tokens = 50}), 1);
    loads[1].max_queued_tokens = 149;
    assert_int_equal(place_prefill(loads, 2, (sl_demand_t){.prompt_tokens = 50}), 0);
    loads[1].max_queued_tokens = 150;
    assert_int_equal(place_prefill(loads, 2, (sl_demand_t){.prompt_tokens = 50}), 1);
}

static void prefill_rank_with_too_few_pages_is_never_chosen(void **state)
{
    (void)state;
    sl_load_t loads[] = {load(4, 0, 0), load(10, 0, 9)};
    const sl_load_t *pointers[] = {&loads[0], &loads[1]};
    loads[1].queued_tokens = 5000;
    sl_demand_t demand = {.prompt_tokens = 256, .prompt_pages = 4};
    assert_int_equal(place_prefill(loads, 2, demand), 0);
    assert_int_equal(sl_place_hold_prefill(pointers, 2, &demand), 0);
    demand = (sl_demand_t){.prompt_tokens = 257, .prompt_pages = 5};
    assert_int_equal(place_prefill(loads, 2, demand), 1);
    assert_int_equal(sl_place_hold_prefill(pointers, 2, &demand), 1);
    demand = (sl_demand_t){.prompt_tokens = 641, .prompt_pages = 11};
    assert_int_equal(place_prefill(loads, 2, demand), SL_PLACE_NONE);
    assert_int_equal(sl_place_hold_prefill(pointers, 2, &demand), SL_PLACE_NONE);
}

static void hold_falls_on_the_emptiest_rank_that_is_large_enough(void **state)
{
    (void)state;
    sl_load_t loads[] = {load(40, 0, 0), load(100, 90, 0), load(100, 70, 0)};
    const sl_load_t *pointers[] = {&loads[0], &loads[1], &loads[2]};
    sl_demand_t demand = {.pages = 80, .prompt_tokens = 300};
    assert_int_equal(sl_place_hold_decode(pointers, 3, &demand), 2);
    loads[2].hold_order = 3;
    assert_int_equal(sl_place_hold_decode(pointers, 3, &demand), 1);
    demand.pages = 101;
    assert_int_equal(sl_place_hold_decode(pointers, 3, &demand), SL_PLACE_NONE);
    loads[0].max_queued_tokens = 200;
    loads[1].queued_tokens = 10;
    assert_int_equal(sl_place_hold_prefill(pointers, 3, &demand), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_ranks_no_place),
        cmocka_unit_test(decode_goes_where_most_pages_are_free),
        cmocka_unit_test(equal_ranks_take_turns),
        cmocka_unit_test(full_running_batch_takes_no_more),
        cmocka_unit_test(avoided_rank_is_the_last_resort),
        cmocka_unit_test(held_rank_serves_only_older_requests),
        cmocka_unit_test(prefill_goes_where_fewest_tokens_wait),
        cmocka_unit_test(prefill_rank_with_too_few_pages_is_never_chosen),
        cmocka_unit_test(hold_falls_on_the_emptiest_rank_that_is_large_enough),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
