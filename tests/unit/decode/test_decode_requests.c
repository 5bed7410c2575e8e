/* Pages and states of a decode rank's requests, along every edge of the drawing in requests.h. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "decode_node/requests.h"

#define PAGES 8

static sl_decode_requests_t *make(uint32_t max_requests)
{
    sl_decode_requests_t *requests = NULL;
    assert_int_equal(sl_decode_requests_create(PAGES, max_requests, &requests), SL_OK);
    return requests;
}

static sl_status_t reserve(sl_decode_requests_t *requests, uint64_t attempt, uint32_t prompt_len,
                           uint32_t max_tokens, sl_decode_request_t **request_p)
{
    sl_msg_reserve_t message = {
        .attempt = attempt, .prompt_len = prompt_len, .sampling = {.max_tokens = max_tokens}};
    return sl_decode_requests_reserve(requests, &message, request_p);
}

static uint32_t pages_in(const sl_decode_requests_t *requests, sl_page_state_t state)
{
    return sl_pages_count(sl_decode_requests_pages(requests), state);
}

static void test_run_to_the_end(void **state)
{
    (void)state;
    sl_decode_requests_t *requests = make(4);
    sl_decode_request_t *request = NULL;
    sl_step_t *step = NULL;
    uint32_t rank_rows = 1;
    assert_int_equal(sl_step_create(4, 4, PAGES, 1, PAGES, &step), SL_OK);
    assert_int_equal(reserve(requests, 1, 65, 64, &request), SL_OK);
    assert_int_equal(request->prompt_pages, 2);
    assert_int_equal(request->page_count, 3);
    assert_int_equal(pages_in(requests, SL_PAGE_FILLING), 2);
    assert_int_equal(pages_in(requests, SL_PAGE_RESERVED), 1);
    assert_false(sl_decode_requests_ready(requests));
    sl_decode_requests_start(requests, request, 42);
    assert_int_equal(pages_in(requests, SL_PAGE_IN_USE), 3);
    assert_true(sl_decode_requests_ready(requests));
    sl_decode_requests_plan(requests, step);
    assert_int_equal(sl_decode_requests_in_step(requests).count, 1);
    assert_ptr_equal(sl_decode_requests_in_step(requests).requests[0], request);
    const sl_batch_t *batch = sl_step_batch(step, &rank_rows, 0);
    assert_int_equal(batch->positions[0], 65); /* the first token comes after 65 prompt tokens */
    assert_int_equal(batch->tokens[0], 42);
    assert_int_equal(sl_decode_requests_step_ended(requests).count, 1);
    sl_decode_requests_remove(requests, request);
    assert_int_equal(pages_in(requests, SL_PAGE_FREE), PAGES);
    assert_int_equal(sl_decode_requests_count(requests), 0);
    sl_step_destroy(step);
    sl_decode_requests_destroy(requests);
}

static const sl_batch_t *plan(sl_decode_requests_t *requests, sl_step_t *step)
{
    sl_step_clear(step);
    sl_decode_requests_plan(requests, step);
    uint32_t rank_rows = sl_step_rows(step);
    return sl_step_batch(step, &rank_rows, 0);
}

/* Two steps under way: the second one's rows refer to the first one's, a request that ends with the
 * first keeps its pages until the second is over, and nobody gets more rows than tokens. */
static void test_steps_under_way(void **state)
{
    (void)state;
    sl_decode_requests_t *requests = make(4);
    sl_decode_request_t *a = NULL, *b = NULL, *late = NULL;
    sl_step_t *step = NULL;
    assert_int_equal(sl_step_create(4, 4, PAGES, 1, PAGES, &step), SL_OK);
    assert_int_equal(reserve(requests, 1, 10, 2, &a), SL_OK); /* one more token after the first */
    assert_int_equal(reserve(requests, 2, 20, 9, &b), SL_OK);
    sl_decode_requests_start(requests, a, 41);
    sl_decode_requests_start(requests, b, 42);
    const sl_batch_t *batch = plan(requests, step);
    assert_int_equal(batch->rows, 2);
    assert_int_equal(batch->tokens[1], 42);

    assert_int_equal(reserve(requests, 3, 30, 9, &late), SL_OK);
    sl_decode_requests_start(requests, late, 43);
    batch = plan(requests, step);
    assert_int_equal(batch->rows, 2); /* a has all its tokens known or under way */
    assert_ptr_equal(sl_decode_requests_in_step(requests).requests[0], b);
    assert_int_equal(batch->tokens[0], -1 - 1); /* b was row 1 */
    assert_int_equal(batch->positions[0], 21);
    assert_int_equal(batch->tokens[1], 43);
    assert_int_equal(batch->positions[1], 30);

    sl_decode_rows_t ended = sl_decode_requests_step_ended(requests);
    assert_int_equal(ended.count, 2);
    assert_ptr_equal(ended.requests[0], a);
    assert_int_equal(a->under_way, 0);
    assert_int_equal(b->under_way, 1);
    a->outputs++;
    sl_decode_requests_remove(requests, a);
    b->outputs++; /* and it was a stop token */
    sl_decode_request_drain(b);
    uint32_t in_use = pages_in(requests, SL_PAGE_IN_USE);
    assert_int_equal(in_use, 2);

    batch = plan(requests, step);
    assert_int_equal(batch->rows, 1);
    assert_int_equal(batch->tokens[0], -1 - 1); /* late was row 1 of the step before */
    ended = sl_decode_requests_step_ended(requests);
    assert_ptr_equal(ended.requests[0], b);
    sl_decode_requests_remove(requests, b);
    assert_int_equal(pages_in(requests, SL_PAGE_IN_USE), in_use - 1);
    ended = sl_decode_requests_step_ended(requests);
    assert_ptr_equal(ended.requests[0], late);
    sl_step_destroy(step);
    sl_decode_requests_destroy(requests);
}

static void test_given_up(void **state)
{
    (void)state;
    sl_decode_requests_t *requests = make(4);
    sl_decode_request_t *request = NULL;
    assert_int_equal(reserve(requests, 1, 64, 200, &request), SL_OK);
    sl_decode_requests_quiesce(requests, request);
    /* What was never granted is free at once; what a peer may write to is not. */
    assert_int_equal(pages_in(requests, SL_PAGE_QUIESCING), 1);
    assert_int_equal(pages_in(requests, SL_PAGE_FREE), PAGES - 1);
    assert_ptr_equal(sl_decode_requests_find(requests, 1), request);
    sl_decode_requests_remove(requests, request);
    assert_int_equal(pages_in(requests, SL_PAGE_FREE), PAGES);
    assert_null(sl_decode_requests_find(requests, 1));
    assert_int_equal(reserve(requests, 2, 64, 1, &request), SL_OK);
    sl_decode_requests_remove(requests, request); /* released while FILLING */
    assert_int_equal(pages_in(requests, SL_PAGE_FREE), PAGES);
    sl_decode_requests_destroy(requests);
}

static void test_short_of_pages_or_places(void **state)
{
    (void)state;
    sl_decode_requests_t *requests = make(2);
    sl_decode_request_t *first = NULL, *second = NULL, *third = NULL;
    assert_int_equal(reserve(requests, 1, 64, 64 * 6, &first), SL_OK);
    assert_int_equal(reserve(requests, 2, 64, 1, &second), SL_ERR_NO_PAGES);
    assert_null(second);
    assert_int_equal(pages_in(requests, SL_PAGE_FREE), 1);
    assert_int_equal(reserve(requests, 3, 1, 1, &second), SL_OK);
    sl_decode_requests_remove(requests, first);
    assert_int_equal(reserve(requests, 4, 1, 1, &first), SL_OK);
    assert_int_equal(reserve(requests, 5, 1, 1, &third), SL_ERR_NO_PAGES); /* two places only */
    assert_int_not_equal(first->generation, second->generation);
    sl_decode_requests_destroy(requests);
}

static void test_fewer_pages_for_the_group(void **state)
{
    (void)state;
    sl_decode_requests_t *requests = make(2);
    sl_decode_request_t *request = NULL;
    assert_int_equal(sl_decode_requests_use_pages(requests, PAGES - 2), SL_OK);
    assert_int_equal(pages_in(requests, SL_PAGE_FREE), PAGES - 2);
    assert_int_equal(reserve(requests, 1, 64, 64 * (PAGES - 2), &request), SL_ERR_NO_PAGES);
    assert_int_equal(reserve(requests, 2, 64, 64 * (PAGES - 3), &request), SL_OK);
    for (uint32_t i = 0; i < request->page_count; i++) {
        assert_true(request->pages[i] < PAGES - 2);
    }
    assert_int_equal(sl_decode_requests_use_pages(requests, PAGES), SL_ERR_DESYNC); /* too late */
    assert_int_equal(pages_in(requests, SL_PAGE_FREE), 0);
    sl_decode_requests_destroy(requests);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_run_to_the_end),
        cmocka_unit_test(test_steps_under_way),
        cmocka_unit_test(test_given_up),
        cmocka_unit_test(test_short_of_pages_or_places),
        cmocka_unit_test(test_fewer_pages_for_the_group),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
