/*
 * The ranks of one group among themselves, over UCX, in host memory: the step record that keeps
 * them in lockstep, and the collectives of the CPU backend.
 *
 * Owned by the engine thread. Every call that waits has the group's deadline: a peer that does not
 * take part in time is SL_ERR_TIMEOUT, a peer whose sequence number, operation or sizes differ is
 * SL_ERR_DESYNC (both PROCESS matters: the group is over). Waiting spins for a short while, then
 * yields, then sleeps on UCX's descriptor, so that idle or descheduled peers cost little.
 * Every message carries {operation, sequence number, bytes} and is checked against what this rank
 * is about to do.
 *
 * Sums are taken in rank order 0, 1, ..., so that a result does not depend on who computes it.
 * A group of one rank needs no UCX and every operation is a copy.
 */
#ifndef SL_TRANSFER_GROUP_H
#define SL_TRANSFER_GROUP_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/transfer/ucx.h"
#include "common/wire/messages.h"

#define SL_GROUP_RANKS_MAX 64

typedef struct sl_group sl_group_t;

typedef struct {
    uint32_t rank, size;
    uint64_t timeout_us; /* of each wait for a peer; 0: 30 s */
    uint64_t spin_us;    /* busy part of a wait; 0: 50 us */
    /* Asked now and then during a wait (at least every 100 ms): true ends it with SL_ERR_CANCELED.
     * NULL: never. */
    bool (*give_up)(void *arg);
    void *give_up_arg;
} sl_group_params_t;

SL_MUST_USE sl_status_t sl_group_create(sl_ucx_t *ucx, const sl_group_params_t *params,
                                        sl_group_t **group_p);
void sl_group_destroy(sl_group_t *group);

/* Opaque address for the peers; valid while the group lives. */
void sl_group_address(const sl_group_t *group, sl_bytes_t *borrowed);

/* Connects to all ranks (addresses in rank order, own included) and passes a first barrier. */
SL_MUST_USE sl_status_t sl_group_connect(sl_group_t *group, const sl_bytes_t *addresses,
                                         size_t count);

/* What the ranks tell each other before each step. Every choice that decides a collective is a
 * function of the exchanged records alone. 32 bytes, host byte order (one machine type). */
typedef struct {
    uint64_t sequence;   /* set by sl_group_exchange() */
    uint32_t tokens;     /* rows this rank feeds into the MoE layers; 0: idle */
    uint32_t plan_bytes; /* of the plan rank 0 broadcasts next (attention tp) */
    uint64_t leaves;     /* 1: this rank has been told to stop */
    uint64_t extra;      /* zero unless its users define it */
} sl_step_record_t;

/* Whether a peer has already posted the record of the next exchange, that is, wants a step.
 * Progresses UCX; never blocks. */
bool sl_group_peer_waits(sl_group_t *group);

/* Descriptor that becomes readable when a message of a peer may have arrived, after
 * sl_group_arm() said SL_OK. sl_group_arm() says SL_ERR_AGAIN when something is there already. -1
 * for a group of one. */
int sl_group_fd(const sl_group_t *group);
SL_MUST_USE sl_status_t sl_group_arm(sl_group_t *group);

/* All-gather of records: records[size], in rank order. */
SL_MUST_USE sl_status_t sl_group_exchange(sl_group_t *group, const sl_step_record_t *mine,
                                          sl_step_record_t *records);

/* out = the ranks' blocks one after the other; bytes[r] each, 0 allowed. `mine` may point to its
 * place in `out`. */
SL_MUST_USE sl_status_t sl_group_all_gather(sl_group_t *group, const void *mine,
                                            const size_t *bytes, void *out);

/* in: sum(counts) floats on every rank; out: counts[rank] floats, the sum over ranks of block
 * `rank`. out may alias the own block of in. */
SL_MUST_USE sl_status_t sl_group_reduce_scatter(sl_group_t *group, const float *in,
                                                const size_t *counts, float *out);

/* data: `count` floats, replaced by the sum over ranks; bitwise equal on all ranks. */
SL_MUST_USE sl_status_t sl_group_all_reduce(sl_group_t *group, float *data, size_t count);

SL_MUST_USE sl_status_t sl_group_broadcast(sl_group_t *group, uint32_t root, void *data,
                                           size_t bytes);

#endif
