/*
 * The prefill pool's part of a rank's engine: requests in, one forward pass over many prompts,
 * first token to the router, latents to the decode rank. Engine thread.
 */
#ifndef SL_PREFILL_PREFILL_H
#define SL_PREFILL_PREFILL_H

#include "node/rank.h"
#include "prefill_node/forward.h"
#include "prefill_node/requests.h"

typedef struct {
    sl_rank_options_t rank;
    uint64_t token_budget;      /* rows of one step */
    uint64_t max_queued_tokens; /* told to the router */
    int mla;                    /* sl_mla_prefill_t */
    uint64_t push_layers;
    uint64_t starve_ms;
} sl_prefill_options_t;

typedef struct sl_prefill sl_prefill_t;

#define SL_PREFILL_LOGIT_ROWS 256u /* rows of the LM head in one go */
#define SL_PREFILL_STEP_REQUESTS 512u

SL_MUST_USE sl_status_t sl_prefill_create(const sl_prefill_options_t *options,
                                          sl_prefill_t **prefill_p);
void sl_prefill_destroy(sl_prefill_t *prefill);

/* Gives the pool its rank, whose pages it takes; before sl_rank_run(). */
SL_MUST_USE sl_status_t sl_prefill_attach(void *prefill, sl_rank_t *rank);

extern const sl_rank_ops_t sl_prefill_rank_ops;

#endif
