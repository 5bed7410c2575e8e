/* One array, in order of arrival: at most max_requests entries, walked once a step. */
#include "decode_node/requests.h"

#include <stdlib.h>
#include <string.h>

#include "common/model/layout.h"

struct sl_decode_requests {
    sl_pages_t *pages;
    sl_decode_request_t **all, **in_step;
    uint32_t count, max_requests, running, in_step_count;
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
    requests->in_step = calloc(max_requests, sizeof(*requests->in_step));
    sl_status_t status = SL_OK;
    if (requests->all == NULL || requests->in_step == NULL) {
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
    free(requests->in_step);
    sl_pages_destroy(requests->pages);
    free(requests);
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
    requests->running++;
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
    requests->running--;
}

void sl_decode_requests_remove(sl_decode_requests_t *requests, sl_decode_request_t *request)
{
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

bool sl_decode_requests_ready(const sl_decode_requests_t *requests)
{
    return requests->running > 0;
}

void sl_decode_requests_plan(sl_decode_requests_t *requests, sl_step_t *step)
{
    requests->in_step_count = 0;
    for (uint32_t i = 0; i < requests->count && !sl_step_full(step); i++) {
        sl_decode_request_t *request = requests->all[i];
        if (request->state != SL_DECODE_RUNNING) {
            continue;
        }
        uint32_t position = request->prompt_len + request->outputs - 1;
        sl_step_add(step, &request->last_token, 1, position, request->pages, request->page_count);
        requests->in_step[requests->in_step_count++] = request;
    }
}

sl_decode_request_t **sl_decode_requests_in_step(sl_decode_requests_t *requests, uint32_t *count_p)
{
    *count_p = requests->in_step_count;
    return requests->in_step;
}

uint32_t sl_decode_requests_count(const sl_decode_requests_t *requests)
{
    return requests->count;
}

const sl_pages_t *sl_decode_requests_pages(const sl_decode_requests_t *requests)
{
    return requests->pages;
}
