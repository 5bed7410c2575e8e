/*
 * The attempts a decode rank holds and their pages. No network and no arithmetic here. Engine
 * thread.
 *
 *   FILLING ---commit---> RUNNING ---stop, length, cancel---> gone, or, while a step that has a
 *      |  \                                                    row of it is under way: DRAINING
 *      |   \---release, writer lost---> gone                       \---the step has ended---> gone
 *      +---cancel---> QUIESCING ---commit, release, writer lost---> gone
 *
 * A step may be planned before the tokens of the one before it are known (SL_DECODE_STEPS of them
 * under way): its rows then take their input from that step's rows, on the device. A request that
 * turns out to have ended with that token has a row too many, whose token is dropped and whose
 * latent goes to a page that is still the request's own.
 *
 * A request takes all pages it can ever need when it is reserved (prompt and max_tokens), so a
 * running request never waits for memory. Only the prompt's pages are granted to the writer; the
 * others come back at once when the request is given up.
 */
#ifndef SL_DECODE_REQUESTS_H
#define SL_DECODE_REQUESTS_H

#include <stdint.h>

#include "common/base/status.h"
#include "common/kv/pages.h"
#include "common/wire/messages.h"
#include "node/step.h"

#define SL_DECODE_STEPS 2u

typedef enum {
    SL_DECODE_FILLING,
    SL_DECODE_RUNNING,
    SL_DECODE_DRAINING,
    SL_DECODE_QUIESCING
} sl_decode_state_t;

typedef struct {
    uint64_t attempt;
    uint32_t generation;
    sl_decode_state_t state;
    sl_rank_id_t writer;
    sl_sampling_t sampling;
    uint32_t prompt_len;
    uint32_t *pages;
    uint32_t prompt_pages, page_count;
    uint32_t outputs;   /* tokens known so far; the first came with the commit */
    int32_t last_token; /* output outputs - 1 */
    uint32_t under_way; /* steps with a row of it whose tokens are not known yet */
    uint32_t row;       /* its row in the last of them */
} sl_decode_request_t;

/* The requests of one step, in the order of its rows. */
typedef struct {
    sl_decode_request_t **requests;
    uint32_t count;
} sl_decode_rows_t;

typedef struct sl_decode_requests sl_decode_requests_t;

SL_MUST_USE sl_status_t sl_decode_requests_create(uint32_t page_count, uint32_t max_requests,
                                                  sl_decode_requests_t **requests_p);
void sl_decode_requests_destroy(sl_decode_requests_t *requests);

/* Uses so many pages from now on. SL_ERR_DESYNC once there are requests. */
SL_MUST_USE sl_status_t sl_decode_requests_use_pages(sl_decode_requests_t *requests,
                                                     uint32_t page_count);

/* Takes pages; those of the prompt are FILLING afterwards. SL_ERR_NO_PAGES when pages or places are
 * short now (not logged). */
SL_MUST_USE sl_status_t sl_decode_requests_reserve(sl_decode_requests_t *requests,
                                                   const sl_msg_reserve_t *message,
                                                   sl_decode_request_t **request_p);
sl_decode_request_t *sl_decode_requests_find(sl_decode_requests_t *requests, uint64_t attempt);

/* FILLING -> RUNNING: the latents are complete. */
void sl_decode_requests_start(sl_decode_requests_t *requests, sl_decode_request_t *request,
                              int32_t first_token);

/* FILLING -> QUIESCING: given up while the writer may write. */
void sl_decode_requests_quiesce(sl_decode_requests_t *requests, sl_decode_request_t *request);

/* RUNNING -> DRAINING: over, but a step under way still writes to its pages. */
void sl_decode_request_drain(sl_decode_request_t *request);

/* Frees the request and its pages; nobody can write to them any more. */
void sl_decode_requests_remove(sl_decode_requests_t *requests, sl_decode_request_t *request);

/* Whether any request wants a row: it may have more outputs than are known or under way. */
bool sl_decode_requests_ready(const sl_decode_requests_t *requests);

/* Adds one row for each request that wants one, at most what fits, and counts the step as under way
 * if it has rows. At most SL_DECODE_STEPS may be. */
void sl_decode_requests_plan(sl_decode_requests_t *requests, sl_step_t *step);

/* The rows of the step planned last; borrowed until the next plan. */
sl_decode_rows_t sl_decode_requests_in_step(const sl_decode_requests_t *requests);

/* The oldest step under way has ended: its rows, as before; borrowed until the next plan. */
sl_decode_rows_t sl_decode_requests_step_ended(sl_decode_requests_t *requests);

uint32_t sl_decode_requests_count(const sl_decode_requests_t *requests);
const sl_pages_t *sl_decode_requests_pages(const sl_decode_requests_t *requests);

#endif
