/*
 * The attempts a prefill rank holds, their pages, and which rows the next step takes. No network
 * and no arithmetic here, so that scheduling can be tested by itself. Engine thread.
 *
 *   QUEUED ---pages, rows---> RUNNING ---last row---> SENDING ---SENT, ABORTED, FAILED---> gone
 *      |                         |
 *      +-------- cancel ---------+----> ENDING (given up; waits until nothing is in flight)
 *
 * A prompt that fits the token budget is never split, and a longer one is cut at multiples of the
 * budget: where a prompt is cut depends on the prompt alone, so its result does not depend on its
 * neighbours. After each piece a long prompt goes to the end of the queue, behind the short ones
 * that wait.
 */
#ifndef SL_PREFILL_REQUESTS_H
#define SL_PREFILL_REQUESTS_H

#include <stdint.h>

#include "common/base/status.h"
#include "common/kv/pages.h"
#include "common/wire/messages.h"
#include "node/step.h"

typedef enum {
    SL_PREFILL_QUEUED,
    SL_PREFILL_RUNNING,
    SL_PREFILL_SENDING,
    SL_PREFILL_ENDING
} sl_prefill_state_t;

typedef struct sl_prefill_request sl_prefill_request_t;
struct sl_prefill_request {
    uint64_t attempt;
    sl_prefill_state_t state;
    sl_sampling_t sampling;
    int32_t *tokens;
    uint32_t token_count;
    uint32_t done_count; /* tokens computed in earlier steps */
    uint32_t step_count; /* tokens of the running step; 0: not in it */
    uint32_t step_index; /* its place in the running step */
    uint32_t *pages;     /* taken when it first runs */
    uint32_t page_count;
    uint64_t queued_us;
    sl_prefill_request_t *next; /* queue order */
};

typedef struct sl_prefill_requests sl_prefill_requests_t;

typedef struct {
    uint32_t page_count;   /* of the rank */
    uint32_t token_budget; /* rows of a step; a multiple of SL_PAGE_TOKENS */
    uint64_t starve_us;    /* a request waiting longer for pages stops younger ones taking any */
} sl_prefill_requests_params_t;

SL_MUST_USE sl_status_t sl_prefill_requests_create(const sl_prefill_requests_params_t *params,
                                                   sl_prefill_requests_t **requests_p);
void sl_prefill_requests_destroy(sl_prefill_requests_t *requests);

/* Uses so many pages from now on. SL_ERR_DESYNC once there are requests. */
SL_MUST_USE sl_status_t sl_prefill_requests_use_pages(sl_prefill_requests_t *requests,
                                                      uint32_t page_count);

/* Takes over the message's tokens (they are NULL afterwards). SL_ERR_INVALID for a prompt that can
 * never run here, with the figures. */
SL_MUST_USE sl_status_t sl_prefill_requests_add(sl_prefill_requests_t *requests,
                                                sl_msg_prefill_t *message, uint64_t now_us,
                                                sl_prefill_request_t **request_p);
sl_prefill_request_t *sl_prefill_requests_find(sl_prefill_requests_t *requests, uint64_t attempt);

/* Whether sl_prefill_requests_plan() would add rows. */
bool sl_prefill_requests_ready(const sl_prefill_requests_t *requests, uint64_t now_us);

/* Adds the next rows to `step` and marks the requests in it (step_count, step_index). */
void sl_prefill_requests_plan(sl_prefill_requests_t *requests, uint64_t now_us, sl_step_t *step);

/* The requests of the planned step: in step order, `count` of them. */
sl_prefill_request_t **sl_prefill_requests_in_step(sl_prefill_requests_t *requests,
                                                   uint32_t *count_p);

/* After a step: counts its rows; complete prompts become SENDING, longer ones queue again. */
void sl_prefill_requests_advance(sl_prefill_requests_t *requests);

/* Leaves the queue; pages stay until sl_prefill_requests_remove(). */
void sl_prefill_requests_end(sl_prefill_requests_t *requests, sl_prefill_request_t *request);

/* Frees pages and the request. */
void sl_prefill_requests_remove(sl_prefill_requests_t *requests, sl_prefill_request_t *request);

uint64_t sl_prefill_requests_queued_tokens(const sl_prefill_requests_t *requests);
uint32_t sl_prefill_requests_count(const sl_prefill_requests_t *requests);
const sl_pages_t *sl_prefill_requests_pages(const sl_prefill_requests_t *requests);

#endif
