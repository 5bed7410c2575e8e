/*
 * The decode pool's part of a rank's engine: reservations in, pages granted to the prefill rank,
 * one token a step for every running request. Engine thread.
 */
#ifndef SL_DECODE_DECODE_H
#define SL_DECODE_DECODE_H

#include "decode_node/requests.h"
#include "node/rank.h"

typedef struct {
    sl_rank_options_t rank;
    uint64_t max_batch;   /* requests at once, on this rank (TP attention: on the group) */
    int async_scheduling; /* sl_async_t */
} sl_decode_options_t;

typedef struct sl_decode sl_decode_t;

SL_MUST_USE sl_status_t sl_decode_create(const sl_decode_options_t *options,
                                         sl_decode_t **decode_p);
void sl_decode_destroy(sl_decode_t *decode);

/* Gives the pool its rank, whose pages it takes; before sl_rank_run(). */
SL_MUST_USE sl_status_t sl_decode_attach(void *decode, sl_rank_t *rank);

extern const sl_rank_ops_t sl_decode_rank_ops;

#endif
