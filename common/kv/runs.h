/*
 * The free pages of a rank as runs of adjacent ones. A request whose pages lie side by side crosses
 * to the other pool in a few large writes instead of one a page, so what is given out is kept
 * together and what comes back is joined with its neighbours.
 *
 * Pure; one owning thread; memory is taken at creation. All calls take constant time; only where no
 * run is longer than about what is asked for are all of that length looked at.
 */
#ifndef SL_KV_RUNS_H
#define SL_KV_RUNS_H

#include <stdint.h>

#include "common/base/status.h"

typedef struct sl_runs sl_runs_t;

/* One run of all `count` pages, numbered from 0. */
SL_MUST_USE sl_status_t sl_runs_create(uint32_t count, sl_runs_t **runs_p);
void sl_runs_destroy(sl_runs_t *runs);

/* Takes at most `wanted` (> 0) adjacent pages, from first_p on, and returns how many: all of them
 * if any run has so many, from the start of one that fits about best; else a longest run, about.
 * There must be a free page. */
uint32_t sl_runs_take(sl_runs_t *runs, uint32_t wanted, uint32_t *first_p);

/* Page `id`, which is not free, is free again. */
void sl_runs_give(sl_runs_t *runs, uint32_t id);

#endif
