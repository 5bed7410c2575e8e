/* Shared by registry.c (life of groups) and registry_hello.c (who is let in). Not for others. */
#ifndef SL_ROUTER_REGISTRY_INTERNAL_H
#define SL_ROUTER_REGISTRY_INTERNAL_H

#include "router/registry.h"

#define SL_TOMBSTONE_COUNT 4096u

struct sl_registry {
    sl_registry_params_t params;
    TAILQ_HEAD(, sl_rank_group) groups[SL_POOL_COUNT]; /* by index; failed ones included */
    sl_map_t by_key;
    sl_cluster_t cluster;
    size_t live_count; /* ranks of groups that have not failed */
    bool settle_needed;
    uint64_t tick_us; /* of the last tick */

    sl_rank_t **targets[SL_POOL_COUNT];
    size_t target_count[SL_POOL_COUNT];
    uint64_t empty_since_us[SL_POOL_COUNT];

    uint64_t tombstones[SL_TOMBSTONE_COUNT]; /* incarnations of failed groups; a ring */
    size_t tombstone_count;                  /* ever written */
};

/* The group of this index that has not failed, or NULL. */
sl_rank_group_t *sl_registry_live_group(sl_registry_t *registry, sl_pool_t pool, uint32_t index);

/* Adds a checked rank (takes the hello) to its group, which is made if need be. The last one of a
 * group settles how many pages its ranks use. */
SL_MUST_USE sl_status_t sl_registry_admit(sl_registry_t *registry, const sl_peer_key_t *key,
                                          sl_message_t *hello, uint64_t now_us, sl_rank_t **rank_p);

/* The rank's connection was replaced by another of the same process. */
void sl_registry_rebind(sl_registry_t *registry, sl_rank_t *rank, const sl_peer_key_t *key);

/* Fails the group of `rank`, which is the one to blame. */
void sl_registry_fail(sl_registry_t *registry, sl_rank_t *rank, const char *reason,
                      uint64_t now_us);

/* Tells every rank of a complete group who is in it. */
void sl_registry_send_group(sl_registry_t *registry, sl_rank_group_t *group);

/* Tells a rank about every ready rank of the other pool. */
void sl_registry_send_peers(sl_registry_t *registry, sl_rank_t *rank);

void sl_registry_welcome(sl_registry_t *registry, sl_rank_t *rank);
bool sl_registry_buried(const sl_registry_t *registry, uint64_t incarnation);

/* Acknowledges the rank's last heartbeat. Again, it changes nothing, but where the connection is
 * gone that shows, and the rank is doomed. */
void sl_registry_acknowledge(sl_registry_t *registry, sl_rank_t *rank);

#endif
