/*
 * The ranks of the other pool, as the router tells them. Decides which ranks an attempt's pages go
 * to: the granting rank, and with TP attention on that side all ranks of its group. Engine thread.
 */
#ifndef SL_NODE_PEERS_H
#define SL_NODE_PEERS_H

#include "common/base/status.h"
#include "common/transfer/group.h"
#include "common/wire/messages.h"

typedef struct sl_peers sl_peers_t;

SL_MUST_USE sl_status_t sl_peers_create(sl_peers_t **peers_p);
void sl_peers_destroy(sl_peers_t *peers);

/* Takes the place of an earlier incarnation, if one is still there. */
SL_MUST_USE sl_status_t sl_peers_add(sl_peers_t *peers, const sl_msg_peer_t *peer);
void sl_peers_remove(sl_peers_t *peers, const sl_rank_id_t *rank);

/* targets[0] is `reader`. SL_ERR_UNREACHABLE names the rank that is not known. */
SL_MUST_USE sl_status_t sl_peers_targets(const sl_peers_t *peers, const sl_rank_id_t *reader,
                                         sl_rank_id_t targets[SL_GROUP_RANKS_MAX],
                                         uint32_t *count_p);

#endif
