/*
 * One array of all requests (found by attempt: tens to hundreds, looked up once an event) and one
 * linked queue in scheduling order.
 */
#include "prefill_node/requests.h"

#include <stdlib.h>
#include <string.h>

#include "common/model/layout.h"

struct sl_prefill_requests {
    sl_prefill_requests_params_t params;
    sl_pages_t *pages;
    sl_prefill_request_t *head, **tail; /* the queue */
    sl_prefill_request_t **all;
    uint32_t count, capacity;
    sl_prefill_request_t **in_step;
    uint32_t in_step_count;
    uint64_t queued_tokens;
};

sl_status_t sl_prefill_requests_create(const sl_prefill_requests_params_t *params,
                                       sl_prefill_requests_t **requests_p)
{
    SL_ASSERT(params->token_budget % SL_PAGE_TOKENS == 0);
    sl_prefill_requests_t *requests = calloc(1, sizeof(*requests));
    if (requests == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "requests: out of memory");
    }
    requests->params = *params;
    requests->tail = &requests->head;
    sl_status_t status = sl_pages_create(params->page_count, &requests->pages);
    if (status != SL_OK) {
        free(requests);
        return status;
    }
    *requests_p = requests;
    return SL_OK;
}

static void free_request(sl_prefill_request_t *request)
{
    free(request->tokens);
    free(request->pages);
    free(request);
}

void sl_prefill_requests_destroy(sl_prefill_requests_t *requests)
{
    if (requests == NULL) {
        return;
    }
    for (uint32_t i = 0; i < requests->count; i++) {
        free_request(requests->all[i]);
    }
    free(requests->all);
    free(requests->in_step);
    sl_pages_destroy(requests->pages);
    free(requests);
}

sl_status_t sl_prefill_requests_use_pages(sl_prefill_requests_t *requests, uint32_t page_count)
{
    sl_pages_t *pages;
    if (requests->count > 0) {
        return sl_error(SL_ERR_DESYNC, "%u requests came before their group", requests->count);
    }
    SL_TRY(sl_pages_create(page_count, &pages));
    sl_pages_destroy(requests->pages);
    requests->pages = pages;
    requests->params.page_count = page_count;
    return SL_OK;
}

static void enqueue(sl_prefill_requests_t *requests, sl_prefill_request_t *request)
{
    request->next = NULL;
    *requests->tail = request;
    requests->tail = &request->next;
}

static void dequeue(sl_prefill_requests_t *requests, sl_prefill_request_t *request)
{
    sl_prefill_request_t **at = &requests->head;
    while (*at != NULL && *at != request) {
        at = &(*at)->next;
    }
    if (*at == NULL) {
        return;
    }
    *at = request->next;
    if (requests->tail == &request->next) {
        requests->tail = at;
    }
    request->next = NULL;
}

static sl_status_t grow(sl_prefill_requests_t *requests)
{
    if (requests->count < requests->capacity) {
        return SL_OK;
    }
    uint32_t capacity = requests->capacity == 0 ? 64 : requests->capacity * 2;
    sl_prefill_request_t **all = realloc(requests->all, capacity * sizeof(*all));
    if (all != NULL) {
        requests->all = all;
    }
    sl_prefill_request_t **in_step = realloc(requests->in_step, capacity * sizeof(*in_step));
    if (in_step != NULL) {
        requests->in_step = in_step;
    }
    if (all == NULL || in_step == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%u requests: out of memory", capacity);
    }
    requests->capacity = capacity;
    return SL_OK;
}

sl_status_t sl_prefill_requests_add(sl_prefill_requests_t *requests, sl_msg_prefill_t *message,
                                    uint64_t now_us, sl_prefill_request_t **request_p)
{
    uint32_t pages = sl_pages_for(message->token_count, SL_PAGE_TOKENS);
    if (message->token_count == 0 || pages > requests->params.page_count) {
        return sl_error(
            SL_ERR_INVALID,
            "prompt of %zu tokens needs %u pages: expected 1 to %u on this prefill rank",
            message->token_count, pages, requests->params.page_count);
    }
    SL_TRY(grow(requests));
    sl_prefill_request_t *request = calloc(1, sizeof(*request));
    uint32_t *page_ids = calloc(pages, sizeof(*page_ids));
    if (request == NULL || page_ids == NULL) {
        free(request);
        free(page_ids);
        return sl_error(SL_ERR_NO_MEMORY, "request of %zu tokens: out of memory",
                        message->token_count);
    }
    request->attempt = message->attempt;
    request->sampling = message->sampling;
    request->tokens = message->tokens;
    request->token_count = (uint32_t)message->token_count;
    request->pages = page_ids;
    request->queued_us = now_us;
    message->tokens = NULL;
    message->token_count = 0;
    requests->all[requests->count++] = request;
    requests->queued_tokens += request->token_count;
    enqueue(requests, request);
    *request_p = request;
    return SL_OK;
}

sl_prefill_request_t *sl_prefill_requests_find(sl_prefill_requests_t *requests, uint64_t attempt)
{
    for (uint32_t i = 0; i < requests->count; i++) {
        if (requests->all[i]->attempt == attempt) {
            return requests->all[i];
        }
    }
    return NULL;
}

/* Whether the request has pages or may take them now. One that has waited too long for pages keeps
 * those behind it from taking any (*may_take), so that enough come free for it. */
static bool may_start(const sl_prefill_requests_t *requests, const sl_prefill_request_t *request,
                      uint64_t now_us, bool *may_take)
{
    if (request->page_count > 0) {
        return true;
    }
    if (*may_take && sl_pages_for(request->token_count, SL_PAGE_TOKENS) <=
                         sl_pages_count(requests->pages, SL_PAGE_FREE)) {
        return true;
    }
    *may_take = *may_take && now_us - request->queued_us < requests->params.starve_us;
    return false;
}

bool sl_prefill_requests_ready(const sl_prefill_requests_t *requests, uint64_t now_us)
{
    bool may_take = true;
    for (const sl_prefill_request_t *r = requests->head; r != NULL; r = r->next) {
        if (may_start(requests, r, now_us, &may_take)) {
            return true;
        }
    }
    return false;
}

/* Rows the request takes next: all that is left, or a whole budget of it. */
static uint32_t next_rows(const sl_prefill_requests_t *requests,
                          const sl_prefill_request_t *request)
{
    uint32_t left = request->token_count - request->done_count;
    return left <= requests->params.token_budget ? left : requests->params.token_budget;
}

static void take_pages(sl_prefill_requests_t *requests, sl_prefill_request_t *request)
{
    if (request->page_count > 0) {
        return;
    }
    uint32_t count = sl_pages_for(request->token_count, SL_PAGE_TOKENS);
    sl_status_t status = sl_pages_take(requests->pages, request->attempt, count, request->pages);
    SL_ASSERT(status == SL_OK); /* may_start() has counted them */
    sl_pages_move(requests->pages, request->attempt, request->pages, count, SL_PAGE_RESERVED,
                  SL_PAGE_IN_USE);
    request->page_count = count;
}

void sl_prefill_requests_plan(sl_prefill_requests_t *requests, uint64_t now_us, sl_step_t *step)
{
    bool may_take = true;
    requests->in_step_count = 0;
    for (sl_prefill_request_t *r = requests->head; r != NULL && !sl_step_full(step); r = r->next) {
        uint32_t rows = next_rows(requests, r);
        if (rows > sl_step_rows_left(step)) {
            continue;
        }
        if (!may_start(requests, r, now_us, &may_take)) {
            continue;
        }
        take_pages(requests, r);
        r->state = SL_PREFILL_RUNNING;
        r->step_count = rows;
        r->step_index = requests->in_step_count;
        requests->in_step[requests->in_step_count++] = r;
        sl_step_add(step, r->tokens + r->done_count, rows, r->done_count, r->pages, r->page_count);
    }
}

sl_prefill_request_t **sl_prefill_requests_in_step(sl_prefill_requests_t *requests,
                                                   uint32_t *count_p)
{
    *count_p = requests->in_step_count;
    return requests->in_step;
}

void sl_prefill_requests_advance(sl_prefill_requests_t *requests)
{
    for (uint32_t i = 0; i < requests->in_step_count; i++) {
        sl_prefill_request_t *request = requests->in_step[i];
        request->done_count += request->step_count;
        requests->queued_tokens -= request->step_count;
        request->step_count = 0;
        dequeue(requests, request);
        if (request->done_count == request->token_count) {
            request->state = SL_PREFILL_SENDING;
        } else {
            enqueue(requests, request);
        }
    }
    requests->in_step_count = 0;
}

void sl_prefill_requests_end(sl_prefill_requests_t *requests, sl_prefill_request_t *request)
{
    requests->queued_tokens -= request->token_count - request->done_count;
    request->done_count = request->token_count;
    dequeue(requests, request);
    request->state = SL_PREFILL_ENDING;
}

void sl_prefill_requests_remove(sl_prefill_requests_t *requests, sl_prefill_request_t *request)
{
    SL_ASSERT(request->state == SL_PREFILL_SENDING || request->state == SL_PREFILL_ENDING);
    if (request->page_count > 0) {
        sl_pages_move(requests->pages, request->attempt, request->pages, request->page_count,
                      SL_PAGE_IN_USE, SL_PAGE_FREE);
    }
    for (uint32_t i = 0; i < requests->count; i++) {
        if (requests->all[i] == request) {
            requests->all[i] = requests->all[--requests->count];
            break;
        }
    }
    free_request(request);
}

uint64_t sl_prefill_requests_queued_tokens(const sl_prefill_requests_t *requests)
{
    return requests->queued_tokens;
}

uint32_t sl_prefill_requests_count(const sl_prefill_requests_t *requests)
{
    return requests->count;
}

const sl_pages_t *sl_prefill_requests_pages(const sl_prefill_requests_t *requests)
{
    return requests->pages;
}
