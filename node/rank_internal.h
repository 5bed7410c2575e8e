/* State shared by rank.c (start-up and services) and engine.c (the loop). */
#ifndef SL_NODE_RANK_INTERNAL_H
#define SL_NODE_RANK_INTERNAL_H

#include <stdatomic.h>

#include "node/rank.h"

struct sl_rank {
    sl_rank_params_t params;
    sl_rank_id_t id;
    sl_checkpoint_t *checkpoint;
    const sl_ops_t *ops;
    sl_model_t *model;
    sl_ucx_t *ucx;
    sl_group_t *group;
    sl_transfer_t *transfer;
    sl_node_t *node;
    sl_peers_t *peers;
    sl_step_t *step;
    void *plan;                           /* receives rank 0's plan, TP attention */
    _Atomic(sl_node_t *) lease_node;      /* for the transfer thread; NULL until registered */
    bool joined;                          /* the group is connected */
    uint64_t members[SL_GROUP_RANKS_MAX]; /* incarnations of the group's ranks, once joined */
    uint64_t group_pages;                 /* the group's `pages`, once joined */
    char fault[SL_TEXT_BYTES]; /* why the rank cannot go on; "" when it leaves on purpose */
    bool leaves;               /* with its group, as one of its ranks has been told to stop */
    uint32_t unfinished;       /* steps with own rows, issued but not finished */
    uint64_t steps, progress;
    uint64_t forward_us, step_us; /* issuing forward passes; in whole steps with rows */
};

/* node/engine.c: gives the net thread the figures of the next heartbeat. */
void sl_rank_publish(sl_rank_t *rank, bool stepping);

/* node/engine.c: why the rank cannot go on, from the thread's error, for the log and the goodbye.
 */
void sl_rank_set_fault(sl_rank_t *rank, sl_status_t status);

/* Whether SIGTERM or SIGINT has come; and a descriptor readable from then on. */
bool sl_rank_stopping(void);
int sl_rank_stop_fd(void);

#endif
