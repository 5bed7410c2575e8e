/*
 * Which rank gets a request: pure functions of the router's own account of every rank. Decode ranks
 * are chosen by free pages, prefill ranks by queued prompt tokens.
 *
 * The account, not the ranks' heartbeats, decides: it is exact at the moment of the choice, while
 * heartbeats lag by up to a second and would send a burst of requests to one rank.
 */
#ifndef SL_ROUTER_PLACEMENT_H
#define SL_ROUTER_PLACEMENT_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define SL_PLACE_NONE SIZE_MAX
#define SL_HOLD_NONE UINT64_MAX

/* What one rank has and what the router has given it. */
typedef struct {
    uint64_t pages_total, pages_reserved;      /* decode: from reserve until released */
    uint64_t running, max_running;             /* attempts; max 0: no limit */
    uint64_t queued_tokens, max_queued_tokens; /* prefill: prompt tokens without a first token */
    uint64_t hold_order; /* kept for the waiting request of this order; SL_HOLD_NONE */
} sl_load_t;

typedef struct {
    uint64_t pages;         /* decode: of prompt and output */
    uint64_t prompt_tokens; /* prefill */
    uint64_t prompt_pages;  /* prefill: of the prompt alone */
    uint64_t order;         /* of arrival; a rank held for an older request is not taken */
    const sl_load_t *avoid; /* taken only when no other rank fits; NULL: none */
    size_t rotation;        /* where to start looking, so that ties go round */
} sl_demand_t;

/* The rank that fits with the most free pages; ties: the fewest running, then rotation.
 * SL_PLACE_NONE when nothing fits now. */
size_t sl_place_decode(const sl_load_t *const *loads, size_t count, const sl_demand_t *demand);

/* The rank that fits with the fewest queued tokens; ties: the fewest running, then rotation. A rank
 * whose pages in all hold less than the prompt never fits; which of them are free does not matter,
 * for prompts wait for pages in the rank's queue. */
size_t sl_place_prefill(const sl_load_t *const *loads, size_t count, const sl_demand_t *demand);

/* The rank to keep for a starving request: of those that could ever take it and are not held yet,
 * the one that is likely to have room first (most free pages; fewest queued tokens). */
size_t sl_place_hold_decode(const sl_load_t *const *loads, size_t count, const sl_demand_t *demand);
size_t sl_place_hold_prefill(const sl_load_t *const *loads, size_t count,
                             const sl_demand_t *demand);

#endif
