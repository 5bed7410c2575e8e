/* One array, in order of arrival: at most max_requests entries, walked once a step. */
#include "decode_node/requests.h"

#include <stdlib.h>
#include <string.h>

#include "common/model/layout.h"

struct sl_decode_requests {
    sl_pages_t *pages;
    sl_decode_request_t **all;
    uint32_t count, max_requests;
    sl_decode_rows_t steps[SL_DECODE_STEPS]; /* a ring; lists are [max_requests] */
    uint32_t first_step, steps_under_way;
    uint32_t planned; /* in `steps`: what was planned last */
    uint32_t generation;
};

sl_status_t sl_decode_requests_create(uint32_t page_count, uint32_t max_requests,
                                      sl_decode_requests_t **requests_p)
{
    sl_decode_requests_t *requests = calloc(1, sizeof(*requests));
    if (requests == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "requests: out of memory");
    }
    requests->max_requests = max_requests;
    requests->all = calloc(max_requests, sizeof(*requests->all));
    sl_status_t status = SL_OK;
    bool taken = requests->all != NULL;
    for (uint32_t i = 0; i < SL_DECODE_STEPS; i++) {
        requests->steps[i].requests = calloc(max_requests, sizeof(*requests->all));
        taken = taken && requests->steps[i].requests != NULL;
    }
    if (!taken) {
        status = sl_error(SL_ERR_NO_MEMORY, "%u requests: out of memory", max_requests);
    }
    if (status == SL_OK) {
        status = sl_pages_create(page_count, &requests->pages);
    }
    if (status != SL_OK) {
        sl_decode_requests_destroy(requests);
        return status;
    }
    *requests_p = requests;
    return SL_OK;
}

static void free_request(sl_decode_request_t *request)
{
    free(request->pages);
    free(request);
}

void sl_decode_requests_destroy(sl_decode_requests_t *requests)
{
    if (requests == NULL) {
        return;
    }
    for (uint32_t i = 0; i < requests->count; i++) {
        free_request(requests->all[i]);
    }
    free(requests->all);
    for (uint32_t i = 0; i < SL_DECODE_STEPS; i++) {
        free(requests->steps[i].requests);
    }
    sl_pages_destroy(requests->pages);
    free(requests);
}

sl_status_t sl_decode_requests_use_pages(sl_decode_requests_t *requests, uint32_t page_count)
{
    sl_pages_t *pages;
    if (requests->count > 0) {
        return sl_error(SL_ERR_DESYNC, "%u requests came before their group", requests->count);
    }
    SL_TRY(sl_pages_create(page_count, &pages));
    sl_pages_destroy(requests->pages);
    requests->pages = pages;
    return SL_OK;
}

sl_status_t sl_decode_requests_reserve(sl_decode_requests_t *requests,
                                       const sl_msg_reserve_t *message,
                                       sl_decode_request_t **request_p)
{
    if (requests->count == requests->max_requests) {
        return SL_ERR_NO_PAGES;
    }
    uint64_t tokens = (uint64_t)message->prompt_len + message->sampling.max_tokens;
    uint32_t count = sl_pages_for(tokens, SL_PAGE_TOKENS);
    if (count > sl_pages_count(requests->pages, SL_PAGE_FREE)) {
        return SL_ERR_NO_PAGES;
    }
    sl_decode_request_t *request = calloc(1, sizeof(*request));
    uint32_t *pages = calloc(count, sizeof(*pages));
    if (request == NULL || pages == NULL) {
        free(request);
        free(pages);
        return sl_error(SL_ERR_NO_MEMORY, "request of %u pages: out of memory", count);
    }
    sl_status_t status = sl_pages_take(requests->pages, message->attempt, count, pages);
    SL_ASSERT(status == SL_OK); /* counted above */
    *request = (sl_decode_request_t){
        .attempt = message->attempt,
        .generation = ++requests->generation,
        .writer = message->prefill,
        .sampling = message->sampling,
        .prompt_len = message->prompt_len,
        .pages = pages,
        .prompt_pages = sl_pages_for(message->prompt_len, SL_PAGE_TOKENS),
        .page_count = count,
    };
    sl_pages_move(requests->pages, request->attempt, pages, request->prompt_pages, SL_PAGE_RESERVED,
                  SL_PAGE_FILLING);
    requests->all[requests->count++] = request;
    *request_p = request;
    return SL_OK;
}

sl_decode_request_t *sl_decode_requests_find(sl_decode_requests_t *requests, uint64_t attempt)
{
    for (uint32_t i = 0; i < requests->count; i++) {
        if (requests->all[i]->attempt == attempt) {
            return requests->all[i];
        }
    }
    return NULL;
}

/* Moves the pages that were never granted. */
static void move_growth(sl_decode_requests_t *requests, const sl_decode_request_t *request,
                        sl_page_state_t to)
{
    sl_pages_move(requests->pages, request->attempt, request->pages + request->prompt_pages,
                  request->page_count - request->prompt_pages, SL_PAGE_RESERVED, to);
}

static void move_prompt(sl_decode_requests_t *requests, const sl_decode_request_t *request,
                        sl_page_state_t from, sl_page_state_t to)
{
    sl_pages_move(requests->pages, request->attempt, request->pages, request->prompt_pages, from,
                  to);
}

void sl_decode_requests_start(sl_decode_requests_t *requests, sl_decode_request_t *request,
                              int32_t first_token)
{
    SL_ASSERT(request->state == SL_DECODE_FILLING);
    move_prompt(requests, request, SL_PAGE_FILLING, SL_PAGE_READY);
    move_prompt(requests, request, SL_PAGE_READY, SL_PAGE_IN_USE);
    move_growth(requests, request, SL_PAGE_IN_USE);
    request->state = SL_DECODE_RUNNING;
    request->last_token = first_token;
    request->outputs = 1;
}

void sl_decode_request_drain(sl_decode_request_t *request)
{
    SL_ASSERT(request->state == SL_DECODE_RUNNING && request->under_way > 0);
    request->state = SL_DECODE_DRAINING;
}

void sl_decode_requests_quiesce(sl_decode_requests_t *requests, sl_decode_request_t *request)
{
    SL_ASSERT(request->state == SL_DECODE_FILLING);
    move_prompt(requests, request, SL_PAGE_FILLING, SL_PAGE_QUIESCING);
    move_growth(requests, request, SL_PAGE_FREE);
    request->page_count = request->prompt_pages;
    request->state = SL_DECODE_QUIESCING;
}

static void free_pages(sl_decode_requests_t *requests, sl_decode_request_t *request)
{
    if (request->state == SL_DECODE_FILLING) {
        sl_decode_requests_quiesce(requests, request);
    }
    if (request->state == SL_DECODE_QUIESCING) {
        move_prompt(requests, request, SL_PAGE_QUIESCING, SL_PAGE_FREE);
        return;
    }
    sl_pages_move(requests->pages, request->attempt, request->pages, request->page_count,
                  SL_PAGE_IN_USE, SL_PAGE_FREE);
}

void sl_decode_requests_remove(sl_decode_requests_t *requests, sl_decode_request_t *request)
{
    SL_ASSERT(request->under_way == 0);
    free_pages(requests, request);
    for (uint32_t i = 0; i < requests->count; i++) {
        if (requests->all[i] == request) {
            memmove(&requests->all[i], &requests->all[i + 1],
                    (requests->count - i - 1) * sizeof(requests->all[0]));
            requests->count--;
            break;
        }
    }
    free_request(request);
}

static bool wants_row(const sl_decode_request_t *request)
{
    return request->state == SL_DECODE_RUNNING &&
           request->outputs + request->under_way < request->sampling.max_tokens;
}

bool sl_decode_requests_ready(const sl_decode_requests_t *requests)
{
    for (uint32_t i = 0; i < requests->count; i++) {
        if (wants_row(requests->all[i])) {
            return true;
        }
    }
    return false;
}

static void add_row(sl_step_t *step, sl_decode_rows_t *rows, sl_decode_request_t *request)
{
    uint32_t position = request->prompt_len + request->outputs + request->under_way - 1;
    int32_t token = request->under_way > 0 ? -1 - (int32_t)request->row : request->last_token;
    sl_step_add(step, &token, 1, position, request->pages, request->page_count);
    request->row = rows->count;
    request->under_way++;
    rows->requests[rows->count++] = request;
}

void sl_decode_requests_plan(sl_decode_requests_t *requests, sl_step_t *step)
{
    SL_ASSERT(requests->steps_under_way < SL_DECODE_STEPS);
    requests->planned = (requests->first_step + requests->steps_under_way) % SL_DECODE_STEPS;
    sl_decode_rows_t *rows = &requests->steps[requests->planned];
    rows->count = 0;
    for (uint32_t i = 0; i < requests->count && !sl_step_full(step); i++) {
        if (wants_row(requests->all[i])) {
            add_row(step, rows, requests->all[i]);
        }
    }
    requests->steps_under_way += rows->count > 0;
}

sl_decode_rows_t sl_decode_requests_in_step(const sl_decode_requests_t *requests)
{
    return requests->steps[requests->planned];
}

sl_decode_rows_t sl_decode_requests_step_ended(sl_decode_requests_t *requests)
{
    SL_ASSERT(requests->steps_under_way > 0);
    sl_decode_rows_t rows = requests->steps[requests->first_step];
    requests->first_step = (requests->first_step + 1) % SL_DECODE_STEPS;
    requests->steps_under_way--;
    for (uint32_t i = 0; i < rows.count; i++) {
        rows.requests[i]->under_way--;
    }
    return rows;
}

uint32_t sl_decode_requests_count(const sl_decode_requests_t *requests)
{
    return requests->count;
}

const sl_pages_t *sl_decode_requests_pages(const sl_decode_requests_t *requests)
{
    return requests->pages;
}
