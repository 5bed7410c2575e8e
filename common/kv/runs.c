/*
 * A run knows its other end at both ends, so that a page that comes back finds the runs it touches.
 * Runs are listed by the power of two that their length reaches: one from a higher list fits for
 * certain, and only in the list of the length asked for is there something to compare.
 */
#include "common/kv/runs.h"

#include <stdlib.h>

#define NONE UINT32_MAX
#define LISTS 32
#define LOOKED_AT 64u /* runs of about the length asked for, while longer ones are there */

struct sl_runs {
    uint32_t total;
    uint8_t *is_free;          /* [total] */
    uint32_t *other_end;       /* [total]; of the first and the last page of a run: each other */
    uint32_t *next, *previous; /* [total]; of the first page of a run: its neighbours in its list */
    uint32_t lists[LISTS];     /* first pages, or NONE */
};

static uint32_t list_of(uint32_t length)
{
    return 31u - (uint32_t)__builtin_clz(length);
}

static uint32_t length_of(const sl_runs_t *runs, uint32_t first)
{
    return runs->other_end[first] - first + 1;
}

static void link_run(sl_runs_t *runs, uint32_t first, uint32_t last)
{
    uint32_t *list = &runs->lists[list_of(last - first + 1)];
    runs->other_end[first] = last;
    runs->other_end[last] = first;
    runs->next[first] = *list;
    runs->previous[first] = NONE;
    if (*list != NONE) {
        runs->previous[*list] = first;
    }
    *list = first;
}

static void unlink_run(sl_runs_t *runs, uint32_t first)
{
    uint32_t next = runs->next[first], previous = runs->previous[first];
    if (previous != NONE) {
        runs->next[previous] = next;
    } else {
        runs->lists[list_of(length_of(runs, first))] = next;
    }
    if (next != NONE) {
        runs->previous[next] = previous;
    }
}

sl_status_t sl_runs_create(uint32_t count, sl_runs_t **runs_p)
{
    sl_runs_t *runs = calloc(1, sizeof(*runs));
    if (runs == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "no memory for the runs of %u pages", count);
    }
    size_t room = (size_t)count + 1; /* not 0 */
    runs->total = count;
    runs->is_free = calloc(room, sizeof(*runs->is_free));
    runs->other_end = calloc(room, sizeof(*runs->other_end));
    runs->next = calloc(room, sizeof(*runs->next));
    runs->previous = calloc(room, sizeof(*runs->previous));
    if (runs->is_free == NULL || runs->other_end == NULL || runs->next == NULL ||
        runs->previous == NULL) {
        sl_runs_destroy(runs);
        return sl_error(SL_ERR_NO_MEMORY, "no memory for the runs of %u pages", count);
    }
    for (uint32_t i = 0; i < LISTS; i++) {
        runs->lists[i] = NONE;
    }
    for (uint32_t id = 0; id < count; id++) {
        runs->is_free[id] = 1;
    }
    if (count > 0) {
        link_run(runs, 0, count - 1);
    }
    *runs_p = runs;
    return SL_OK;
}

void sl_runs_destroy(sl_runs_t *runs)
{
    if (runs == NULL) {
        return;
    }
    free(runs->is_free);
    free(runs->other_end);
    free(runs->next);
    free(runs->previous);
    free(runs);
}

/* The shortest run that has `wanted` pages among the first `most` of the list, or NONE. */
static uint32_t best_of_list(const sl_runs_t *runs, uint32_t list, uint32_t wanted, uint32_t most)
{
    uint32_t best = NONE, best_length = NONE, run = runs->lists[list];
    for (uint32_t i = 0; i < most && run != NONE && best_length > wanted;
         i++, run = runs->next[run]) {
        uint32_t length = length_of(runs, run);
        if (length >= wanted && length < best_length) {
            best = run;
            best_length = length;
        }
    }
    return best;
}

static uint32_t find(const sl_runs_t *runs, uint32_t wanted)
{
    uint32_t list = list_of(wanted), run = best_of_list(runs, list, wanted, LOOKED_AT);
    for (uint32_t i = list + 1; run == NONE && i < LISTS; i++) {
        run = runs->lists[i];
    }
    if (run == NONE) {
        run = best_of_list(runs, list, wanted, NONE); /* the last that might have so many */
    }
    for (uint32_t i = LISTS; run == NONE && i-- > 0;) {
        run = runs->lists[i]; /* none is long enough */
    }
    return run;
}

uint32_t sl_runs_take(sl_runs_t *runs, uint32_t wanted, uint32_t *first_p)
{
    SL_ASSERT(wanted > 0);
    uint32_t first = find(runs, wanted);
    SL_ASSERT(first != NONE);
    uint32_t last = runs->other_end[first], length = last - first + 1;
    uint32_t taken = wanted < length ? wanted : length;
    unlink_run(runs, first);
    for (uint32_t id = first; id < first + taken; id++) {
        runs->is_free[id] = 0;
    }
    if (taken < length) {
        link_run(runs, first + taken, last);
    }
    *first_p = first;
    return taken;
}

void sl_runs_give(sl_runs_t *runs, uint32_t id)
{
    uint32_t first = id, last = id;
    SL_ASSERT(id < runs->total && !runs->is_free[id]);
    runs->is_free[id] = 1;
    if (id > 0 && runs->is_free[id - 1]) {
        first = runs->other_end[id - 1];
        unlink_run(runs, first);
    }
    if (id + 1 < runs->total && runs->is_free[id + 1]) {
        last = runs->other_end[id + 1];
        unlink_run(runs, id + 1);
    }
    link_run(runs, first, last);
}
