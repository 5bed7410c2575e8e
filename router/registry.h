/*
 * Who is in the cluster: ranks, their groups and the two pools.
 *
 *   group:   JOINING -- all tp ranks registered and ready --> READY
 *               |                                               |
 *               +------------ any of its ranks is lost ---------+--> FAILED (kept for `status`
 * until its place is taken again or a minute has passed)
 *
 * A rank is lost when it has been silent for dead_ms, or busy without progress for stuck_ms, or its
 * connection is gone, or it says goodbye, or its place is claimed by a new incarnation while its
 * own connection is gone. When a rank is lost its whole group fails: the others of the group are
 * told (they exit, their supervisor restarts the group), the other pool is told that these peers
 * are gone, and rank_lost() is called for each rank.
 *
 * A failed group's incarnations never come back: a rank that was only stopped for a while must not
 * slip into a new group with old state.
 *
 * Single thread (the router's loop); never blocks. Owns its groups and ranks; a rank pointer is
 * valid until rank_lost() has returned for it.
 */
#ifndef SL_ROUTER_REGISTRY_H
#define SL_ROUTER_REGISTRY_H

#include <sys/queue.h>

#include "router/map.h"
#include "router/placement.h"
#include "router/sink.h"

#define SL_GROUP_RANKS_MAX 64
#define SL_POOL_COUNT 2

typedef struct sl_registry sl_registry_t;
typedef struct sl_rank sl_rank_t;
typedef struct sl_rank_group sl_rank_group_t;
struct sl_side; /* one side of an attempt: router/request_table.h */

typedef enum { SL_GROUP_JOINING, SL_GROUP_READY, SL_GROUP_FAILED } sl_group_state_t;

struct sl_rank {
    sl_map_node_t node; /* by connection, while its group has not failed */
    sl_rank_group_t *group;
    sl_peer_key_t key;
    sl_rank_id_t id;
    sl_message_t hello;         /* owned */
    sl_msg_heartbeat_t figures; /* of the last heartbeat */
    bool ready;
    bool heard;                 /* a heartbeat has come since its last welcome */
    bool left;                  /* it has said goodbye */
    bool failed;                /* and that it cannot go on */
    bool doomed;                /* a send has failed: lost at the next settle */
    char doom[96];              /* why */
    uint64_t seen_us;           /* last sign of life */
    uint64_t probed_us;         /* last time it was asked for one */
    uint64_t progress_us;       /* last time it was idle or had moved on */
    sl_load_t load;             /* the router's account; kept by the request table */
    LIST_HEAD(, sl_side) sides; /* attempts it has a part in; kept by the request table */
};

struct sl_rank_group {
    TAILQ_ENTRY(sl_rank_group) link;
    sl_pool_t pool;
    uint32_t index;
    uint32_t tp;
    sl_attention_t attention;
    sl_group_state_t state;
    uint64_t failed_us;
    uint32_t rank_count, ready_count;
    uint64_t pages; /* attention "tp", once complete: that each rank uses; otherwise 0 */
    sl_rank_t *ranks[SL_GROUP_RANKS_MAX]; /* by rank; NULL: not registered */
};

/* What the first registered rank fixed for all; `known` is false while nobody is registered. */
typedef struct {
    bool known;
    uint64_t epoch; /* changes whenever the rest, or the targets of a pool do */
    char model[SL_NAME_BYTES];
    char layout[SL_TEXT_BYTES];
    char first[32]; /* name of the rank that fixed it */
    uint64_t layout_hash, vocab_size, page_tokens;
    uint64_t max_model_len; /* the least of all live ranks */
    char tokenizer_path[SL_TEXT_BYTES];
} sl_cluster_t;

typedef struct {
    uint64_t heartbeat_ms, dead_ms, stuck_ms, lease_ms;
    uint64_t max_ranks;
    sl_sink_t sink;
    /* The rank's attempts are lost. `gone`: its group has failed and the rank is about to be
     * forgotten; otherwise it lives on, but its connection was lost and messages with it. */
    void (*rank_lost)(void *arg, sl_rank_t *rank, bool gone, const char *reason);
    void *arg;
} sl_registry_params_t;

SL_MUST_USE sl_status_t sl_registry_create(const sl_registry_params_t *params, uint64_t now_us,
                                           sl_registry_t **registry_p);

/* Calls no hook. NULL is ignored. */
void sl_registry_destroy(sl_registry_t *registry);

/* Answers `welcome` or `refused`. Takes the message's arrays when it welcomes; the caller destroys
 * the message in any case. */
void sl_registry_hello(sl_registry_t *registry, const sl_peer_key_t *key, sl_message_t *message,
                       uint64_t now_us);

/* Answers `refused` with the code and this thread's last error text. */
void sl_registry_refuse(sl_registry_t *registry, const sl_peer_key_t *key, sl_status_t status);

/* The rank behind a connection, or NULL: not registered, or its group has failed. */
sl_rank_t *sl_registry_find(const sl_registry_t *registry, const sl_peer_key_t *key);

void sl_registry_ready(sl_registry_t *registry, sl_rank_t *rank);
void sl_registry_heartbeat(sl_registry_t *registry, sl_rank_t *rank,
                           const sl_msg_heartbeat_t *heartbeat, uint64_t now_us);
void sl_registry_goodbye(sl_registry_t *registry, sl_rank_t *rank, const sl_msg_goodbye_t *goodbye,
                         uint64_t now_us);

/* Sends to a rank. A failed send dooms it: it is lost at the next sl_registry_settle(), so that no
 * caller sees ranks vanish under its hands. */
void sl_registry_send(sl_registry_t *registry, sl_rank_t *rank, const sl_message_t *message);

/* The transport has found this connection gone. */
void sl_registry_gone(sl_registry_t *registry, const sl_peer_key_t *key);

/* Fails the groups of doomed ranks. */
void sl_registry_settle(sl_registry_t *registry, uint64_t now_us);

/* Checks silence and progress of every rank; call a few times per heartbeat. A gap since the last
 * call of over a second was our own pause and is not held against the ranks. */
void sl_registry_tick(sl_registry_t *registry, uint64_t now_us);

/* Ranks that take requests now: every rank of a ready group, or with attention "tp" its rank 0. The
 * array is valid until the next call that can change membership. */
sl_rank_t *const *sl_registry_targets(const sl_registry_t *registry, sl_pool_t pool,
                                      size_t *count_p);

/* Prompt tokens that a prefill rank can take when it is empty: its pages and its queue together. */
uint64_t sl_registry_prompt_room(const sl_registry_t *registry, const sl_rank_t *rank);

/* The target of the prefill pool that takes the longest prompt; NULL while there is none. */
const sl_rank_t *sl_registry_largest_prefill(const sl_registry_t *registry);

/* Since when the pool has had no target; meaningless while it has one. */
uint64_t sl_registry_empty_since_us(const sl_registry_t *registry, sl_pool_t pool);

/* Live groups that are not ready yet. */
size_t sl_registry_joining(const sl_registry_t *registry, sl_pool_t pool);

const sl_cluster_t *sl_registry_cluster(const sl_registry_t *registry);

/* Calls `visit` for every rank, those of failed groups included, in order of pool, group, rank. */
void sl_registry_each(const sl_registry_t *registry,
                      void (*visit)(void *arg, const sl_rank_t *rank), void *arg);
size_t sl_registry_count(const sl_registry_t *registry);

#endif
