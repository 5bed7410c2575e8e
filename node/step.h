/*
 * One step's work as a list of requests, and the batch arrays made from it. The list is also what
 * rank 0 sends to its group with TP attention: everything else follows from it.
 *
 * Owned by the engine thread; memory is taken at creation.
 */
#ifndef SL_NODE_STEP_H
#define SL_NODE_STEP_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "kernels/layers/model.h"

typedef struct sl_step sl_step_t;

/* sequence_pages: of the longest sequence. page_count: of the rank, each of them in one request at
 * most; a plan with another page is refused. SL_ERR_CONFIG where plans would pass 4 GiB. */
SL_MUST_USE sl_status_t sl_step_create(uint32_t max_rows, uint32_t max_requests,
                                       uint32_t sequence_pages, uint32_t ranks, uint32_t page_count,
                                       sl_step_t **step_p);
void sl_step_destroy(sl_step_t *step);

/* From now on a plan may only name pages below `page_count`, which is at most what the step was
 * created with. */
void sl_step_limit_pages(sl_step_t *step, uint32_t page_count);

void sl_step_clear(sl_step_t *step);
uint32_t sl_step_rows(const sl_step_t *step);
uint32_t sl_step_requests(const sl_step_t *step);
uint32_t sl_step_rows_left(const sl_step_t *step);
bool sl_step_full(const sl_step_t *step); /* no request fits any more */

/* Adds `rows` tokens of a request, at positions first_position, first_position + 1, ...; a token
 * below 0 is one that the device knows (sl_batch_t). `pages` are the request's pages in token
 * order, at least those that hold the positions. The caller has checked that rows fit (asserted).
 */
void sl_step_add(sl_step_t *step, const int32_t *tokens, uint32_t rows, uint32_t first_position,
                 const uint32_t *pages, uint32_t page_count);

/* The batch of the step, without rules; valid until the step changes. rank_rows[ranks] is copied.
 * With `padded_rows` > 0 the batch has that many rows, and rank_rows is what is real of each rank's
 * padded_rows; it must hold the step's rows, and fit max_rows. */
const sl_batch_t *sl_step_batch(sl_step_t *step, const uint32_t *rank_rows, uint32_t padded_rows);

/* Last row of request `request`. */
int32_t sl_step_last_row(const sl_step_t *step, uint32_t request);
int32_t sl_step_first_row(const sl_step_t *step, uint32_t request);

/* The list as bytes, for the group; valid until the step changes. */
void sl_step_plan(sl_step_t *step, const void **plan_p, uint32_t *bytes_p);
uint32_t sl_step_plan_max(const sl_step_t *step);

/* Rebuilds the list from a plan; SL_ERR_DESYNC if it is not one. */
SL_MUST_USE sl_status_t sl_step_set_plan(sl_step_t *step, const void *plan, uint32_t bytes);

#endif
