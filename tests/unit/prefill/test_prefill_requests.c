/* What a prefill rank takes into its steps, and where its pages are. */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>

#include "prefill_node/requests.h"

#define BUDGET 128
#define STRIDE 64

typedef struct {
    sl_prefill_requests_t *requests;
    sl_step_t *step;
} rig_t;

static rig_t rig_open(uint32_t pages)
{
    rig_t rig = {0};
    sl_prefill_requests_params_t params = {
        .page_count = pages, .token_budget = BUDGET, .starve_us = 1000};
    assert_int_equal(sl_prefill_requests_create(&params, &rig.requests), SL_OK);
    assert_int_equal(sl_step_create(BUDGET, 8, STRIDE, 1, 64, &rig.step), SL_OK);
    return rig;
}

static void rig_close(rig_t *rig)
{
    sl_prefill_requests_destroy(rig->requests);
    sl_step_destroy(rig->step);
}

static sl_prefill_request_t *add(rig_t *rig, uint64_t attempt, uint32_t tokens, uint64_t now_us)
{
    sl_prefill_request_t *request = NULL;
    sl_msg_prefill_t message = {
        .attempt = attempt, .tokens = calloc(tokens, sizeof(int32_t)), .token_count = tokens};
    assert_int_equal(sl_prefill_requests_add(rig->requests, &message, now_us, &request), SL_OK);
    assert_null(message.tokens);
    return request;
}

/* Plans a step and returns the attempts in it as one number per request. */
static uint32_t plan(rig_t *rig, uint64_t now_us, uint64_t attempts[8])
{
    uint32_t count;
    sl_step_clear(rig->step);
    sl_prefill_requests_plan(rig->requests, now_us, rig->step);
    sl_prefill_request_t **in_step = sl_prefill_requests_in_step(rig->requests, &count);
    for (uint32_t i = 0; i < count; i++) {
        attempts[i] = in_step[i]->attempt;
        assert_int_equal(in_step[i]->step_index, i);
    }
    assert_int_equal(sl_step_requests(rig->step), count);
    return count;
}

static uint32_t free_pages(const rig_t *rig)
{
    return sl_pages_count(sl_prefill_requests_pages(rig->requests), SL_PAGE_FREE);
}

static void test_batches_and_skips(void **state)
{
    (void)state;
    rig_t rig = rig_open(32);
    uint64_t in[8];
    add(&rig, 1, 100, 0);
    add(&rig, 2, 60, 0); /* does not fit beside 1, and is not split */
    add(&rig, 3, 28, 0);
    assert_true(sl_prefill_requests_ready(rig.requests, 0));
    assert_int_equal(plan(&rig, 0, in), 2);
    assert_int_equal(in[0], 1);
    assert_int_equal(in[1], 3);
    assert_int_equal(sl_step_rows(rig.step), BUDGET);
    sl_prefill_requests_advance(rig.requests);
    assert_int_equal(sl_prefill_requests_queued_tokens(rig.requests), 60);
    assert_int_equal(sl_prefill_requests_find(rig.requests, 1)->state, SL_PREFILL_SENDING);
    assert_int_equal(plan(&rig, 0, in), 1);
    assert_int_equal(in[0], 2);
    sl_prefill_requests_advance(rig.requests);
    assert_false(sl_prefill_requests_ready(rig.requests, 0));
    assert_int_equal(free_pages(&rig), 32 - 2 - 1 - 1);
    for (uint64_t a = 1; a <= 3; a++) {
        sl_prefill_requests_remove(rig.requests, sl_prefill_requests_find(rig.requests, a));
    }
    assert_int_equal(free_pages(&rig), 32);
    assert_int_equal(sl_prefill_requests_count(rig.requests), 0);
    rig_close(&rig);
}

/* A long prompt is cut at multiples of the budget and lets those that wait go between. */
static void test_long_prompt(void **state)
{
    (void)state;
    rig_t rig = rig_open(32);
    uint64_t in[8];
    sl_prefill_request_t *request = add(&rig, 1, 2 * BUDGET + 10, 0);
    add(&rig, 2, 20, 0);
    assert_int_equal(plan(&rig, 0, in), 1);
    assert_int_equal(in[0], 1);
    assert_int_equal(request->step_count, BUDGET);
    sl_prefill_requests_advance(rig.requests);
    assert_int_equal(request->state, SL_PREFILL_RUNNING);
    assert_int_equal(plan(&rig, 0, in), 1);
    assert_int_equal(in[0], 2);
    sl_prefill_requests_advance(rig.requests);
    assert_int_equal(plan(&rig, 0, in), 1);
    assert_int_equal(request->step_count, BUDGET);
    sl_prefill_requests_advance(rig.requests);
    add(&rig, 3, 30, 0);
    assert_int_equal(plan(&rig, 0, in), 2); /* the tail shares its step */
    assert_int_equal(request->step_count, 10);
    sl_prefill_requests_advance(rig.requests);
    assert_int_equal(request->state, SL_PREFILL_SENDING);
    assert_int_equal(sl_prefill_requests_queued_tokens(rig.requests), 0);
    rig_close(&rig);
}

/* Short of pages: small requests pass a large one, but not for ever. */
static void test_starvation(void **state)
{
    (void)state;
    rig_t rig = rig_open(4);
    uint64_t in[8];
    sl_prefill_request_t *holder = add(&rig, 1, 64, 0);
    assert_int_equal(plan(&rig, 0, in), 1);
    sl_prefill_requests_advance(rig.requests);
    sl_prefill_request_t *large = add(&rig, 2, 256, 10);
    add(&rig, 3, 64, 20);
    assert_int_equal(plan(&rig, 30, in), 1);
    assert_int_equal(in[0], 3);
    sl_prefill_requests_advance(rig.requests);
    add(&rig, 4, 64, 40);
    assert_false(sl_prefill_requests_ready(rig.requests, 2000)); /* 2 has waited too long */
    assert_int_equal(plan(&rig, 2000, in), 0);
    sl_prefill_requests_remove(rig.requests, holder);
    sl_prefill_requests_remove(rig.requests, sl_prefill_requests_find(rig.requests, 3));
    assert_true(sl_prefill_requests_ready(rig.requests, 2000));
    assert_int_equal(plan(&rig, 2000, in), 1);
    assert_int_equal(in[0], 2);
    assert_int_equal(large->page_count, 4);
    rig_close(&rig);
}

static void test_end_and_refusal(void **state)
{
    (void)state;
    rig_t rig = rig_open(4);
    uint64_t in[8];
    sl_prefill_request_t *queued = add(&rig, 1, 100, 0), *refused = NULL;
    sl_prefill_requests_end(rig.requests, queued);
    assert_int_equal(sl_prefill_requests_queued_tokens(rig.requests), 0);
    assert_int_equal(plan(&rig, 0, in), 0);
    sl_prefill_requests_remove(rig.requests, queued);
    sl_msg_prefill_t message = {
        .attempt = 2, .tokens = calloc(257, sizeof(int32_t)), .token_count = 257};
    assert_int_equal(sl_prefill_requests_add(rig.requests, &message, 0, &refused), SL_ERR_INVALID);
    assert_non_null(message.tokens); /* still the caller's */
    assert_null(refused);
    free(message.tokens);
    assert_int_equal(free_pages(&rig), 4);
    rig_close(&rig);
}

static void test_fewer_pages_for_the_group(void **state)
{
    (void)state;
    rig_t rig = rig_open(8);
    uint64_t attempts[8];
    assert_int_equal(sl_prefill_requests_use_pages(rig.requests, 2), SL_OK);
    assert_int_equal(free_pages(&rig), 2);
    sl_prefill_request_t *request = NULL;
    sl_msg_prefill_t message = {
        .attempt = 1, .tokens = calloc(129, sizeof(int32_t)), .token_count = 129};
    assert_int_equal(sl_prefill_requests_add(rig.requests, &message, 0, &request), SL_ERR_INVALID);
    free(message.tokens);
    request = add(&rig, 2, 128, 0);
    assert_int_equal(plan(&rig, 0, attempts), 1);
    assert_true(request->pages[0] < 2 && request->pages[1] < 2);
    assert_int_equal(sl_prefill_requests_use_pages(rig.requests, 8), SL_ERR_DESYNC); /* too late */
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batches_and_skips),
        cmocka_unit_test(test_long_prompt),
        cmocka_unit_test(test_starvation),
        cmocka_unit_test(test_end_and_refusal),
        cmocka_unit_test(test_fewer_pages_for_the_group),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
