/*
 * Life of ranks and groups. Groups hang in one list per pool, ordered by index; ranks are found by
 * connection through a hash map. The arrays of targets that placement reads are rebuilt on every
 * change of membership, which is rare, so that placing a request walks plain arrays.
 *
 * Nothing here is re-entrant by accident: a send that fails only marks the rank (doomed), and the
 * group is failed later from sl_registry_settle().
 */
#include "router/registry.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "router/registry_internal.h"

/* A longer gap between two ticks is a pause of the router; the loop never leaves half of it. */
#define PAUSE_US 1000000u

/* A failed group is shown in `status` for this long if nobody takes its place. */
#define FAILED_SHOWN_US (60u * 1000000u)

static bool rank_has_key(const sl_map_node_t *node, const void *key)
{
    return sl_peer_key_same(&((const sl_rank_t *)node)->key, key);
}

static uint64_t key_hash(const sl_peer_key_t *key)
{
    return sl_map_hash(key->bytes, key->size, 0);
}

sl_status_t sl_registry_create(const sl_registry_params_t *params, uint64_t now_us,
                               sl_registry_t **registry_p)
{
    sl_registry_t *registry = calloc(1, sizeof(*registry));
    if (registry == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "registry: no memory for %zu bytes", sizeof(*registry));
    }
    sl_status_t status = sl_map_init(&registry->by_key);
    if (status != SL_OK) {
        free(registry);
        return status;
    }
    registry->params = *params;
    registry->tick_us = now_us;
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        TAILQ_INIT(&registry->groups[pool]);
        registry->empty_since_us[pool] = now_us;
    }
    *registry_p = registry;
    return SL_OK;
}

static void group_free(sl_rank_group_t *group)
{
    for (uint32_t i = 0; i < group->tp; i++) {
        if (group->ranks[i] != NULL) {
            sl_message_destroy(&group->ranks[i]->hello);
            free(group->ranks[i]);
        }
    }
    free(group);
}

static void group_remove(sl_registry_t *registry, sl_rank_group_t *group)
{
    TAILQ_REMOVE(&registry->groups[group->pool], group, link);
    group_free(group);
}

void sl_registry_destroy(sl_registry_t *registry)
{
    if (registry == NULL) {
        return;
    }
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        while (!TAILQ_EMPTY(&registry->groups[pool])) {
            group_remove(registry, TAILQ_FIRST(&registry->groups[pool]));
        }
        free(registry->targets[pool]);
    }
    sl_map_cleanup(&registry->by_key);
    free(registry);
}

sl_rank_t *sl_registry_find(const sl_registry_t *registry, const sl_peer_key_t *key)
{
    return (sl_rank_t *)sl_map_find(&registry->by_key, key_hash(key), rank_has_key, key);
}

sl_rank_group_t *sl_registry_live_group(sl_registry_t *registry, sl_pool_t pool, uint32_t index)
{
    sl_rank_group_t *group;
    TAILQ_FOREACH(group, &registry->groups[pool], link)
    {
        if (group->index == index && group->state != SL_GROUP_FAILED) {
            return group;
        }
    }
    return NULL;
}

bool sl_registry_buried(const sl_registry_t *registry, uint64_t incarnation)
{
    size_t count = registry->tombstone_count < SL_TOMBSTONE_COUNT ? registry->tombstone_count
                                                                  : SL_TOMBSTONE_COUNT;
    for (size_t i = 0; i < count; i++) {
        if (registry->tombstones[i] == incarnation) {
            return true;
        }
    }
    return false;
}

/* ---- sending ---- */

static void rank_doom(sl_registry_t *registry, sl_rank_t *rank, const char *reason)
{
    if (!rank->doomed && rank->group->state != SL_GROUP_FAILED) {
        rank->doomed = true;
        snprintf(rank->doom, sizeof(rank->doom), "%s", reason);
        registry->settle_needed = true;
    }
}

void sl_registry_send(sl_registry_t *registry, sl_rank_t *rank, const sl_message_t *message)
{
    if (rank->doomed) {
        return;
    }
    const sl_sink_t *sink = &registry->params.sink;
    sl_status_t status = sink->ops->to_rank(sink->arg, &rank->key, message);
    if (status == SL_ERR_LIMIT) {
        rank_doom(registry, rank, "it does not read: its queue of messages is full");
    } else if (status != SL_OK) {
        rank_doom(registry, rank, "its connection is gone");
    }
}

void sl_registry_gone(sl_registry_t *registry, const sl_peer_key_t *key)
{
    sl_rank_t *rank = sl_registry_find(registry, key);
    if (rank != NULL) {
        rank_doom(registry, rank, "its connection is gone");
    }
}

void sl_registry_welcome(sl_registry_t *registry, sl_rank_t *rank)
{
    rank->heard = false;
    sl_message_t message = {
        .type = SL_MSG_WELCOME,
        .welcome = {.incarnation = rank->id.incarnation,
                    .heartbeat_ms = registry->params.heartbeat_ms,
                    .lease_ms = registry->params.lease_ms},
    };
    sl_registry_send(registry, rank, &message);
}

void sl_registry_send_group(sl_registry_t *registry, sl_rank_group_t *group)
{
    uint64_t incarnations[SL_GROUP_RANKS_MAX];
    sl_bytes_t addresses[SL_GROUP_RANKS_MAX];
    for (uint32_t i = 0; i < group->tp; i++) {
        incarnations[i] = group->ranks[i]->id.incarnation;
        addresses[i] = group->ranks[i]->hello.hello.group_address;
    }
    sl_message_t message = {
        .type = SL_MSG_GROUP,
        .group = {.incarnations = incarnations,
                  .addresses = addresses,
                  .rank_count = group->tp,
                  .pages = group->pages},
    };
    for (uint32_t i = 0; i < group->tp; i++) {
        sl_registry_send(registry, group->ranks[i], &message);
    }
}

static void send_peer(sl_registry_t *registry, sl_rank_t *to, const sl_rank_t *about, bool alive)
{
    sl_message_t message = {
        .type = SL_MSG_PEER,
        .peer = {.rank = about->id,
                 .alive = alive,
                 .tp = about->group->tp,
                 .attention = about->group->attention},
    };
    if (alive) {
        message.peer.transfer_address = about->hello.hello.transfer_address;
    }
    sl_registry_send(registry, to, &message);
}

void sl_registry_send_peers(sl_registry_t *registry, sl_rank_t *rank)
{
    sl_rank_group_t *other;
    TAILQ_FOREACH(other, &registry->groups[!rank->group->pool], link)
    {
        for (uint32_t i = 0; other->state == SL_GROUP_READY && i < other->tp; i++) {
            send_peer(registry, rank, other->ranks[i], true);
        }
    }
}

/* Tells the ready groups of the other pool that the ranks of `group` have come or gone. */
static void broadcast_group(sl_registry_t *registry, const sl_rank_group_t *group, bool alive)
{
    sl_rank_group_t *other;
    TAILQ_FOREACH(other, &registry->groups[!group->pool], link)
    {
        for (uint32_t i = 0; other->state == SL_GROUP_READY && i < other->tp; i++) {
            for (uint32_t j = 0; j < group->tp; j++) {
                send_peer(registry, other->ranks[i], group->ranks[j], alive);
            }
        }
    }
}

/* ---- membership ---- */

static uint32_t group_target_count(const sl_rank_group_t *group)
{
    if (group->state != SL_GROUP_READY) {
        return 0;
    }
    return group->attention == SL_ATTENTION_TP ? 1 : group->tp;
}

/* The array was sized for every admitted rank when it came, so this cannot fail. */
static void rebuild_targets(sl_registry_t *registry, sl_pool_t pool)
{
    size_t count = 0;
    sl_rank_group_t *group;
    TAILQ_FOREACH(group, &registry->groups[pool], link)
    {
        for (uint32_t i = 0; i < group_target_count(group); i++) {
            registry->targets[pool][count++] = group->ranks[i];
        }
    }
    registry->target_count[pool] = count;
    registry->cluster.epoch++; /* what the largest rank can take may have changed */
}

static void cluster_update(sl_registry_t *registry)
{
    uint64_t shortest = UINT64_MAX;
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        sl_rank_group_t *group;
        TAILQ_FOREACH(group, &registry->groups[pool], link)
        {
            for (uint32_t i = 0; group->state != SL_GROUP_FAILED && i < group->tp; i++) {
                const sl_rank_t *rank = group->ranks[i];
                if (rank != NULL && rank->hello.hello.max_model_len < shortest) {
                    shortest = rank->hello.hello.max_model_len;
                }
            }
        }
    }
    if (registry->live_count == 0) {
        registry->cluster = (sl_cluster_t){.epoch = registry->cluster.epoch + 1};
    } else if (registry->cluster.max_model_len != shortest) {
        registry->cluster.max_model_len = shortest;
        registry->cluster.epoch++;
    }
}

static void cluster_fix(sl_registry_t *registry, const sl_msg_hello_t *hello)
{
    sl_cluster_t *cluster = &registry->cluster;
    cluster->known = true;
    cluster->epoch++;
    sl_rank_name(&hello->rank, cluster->first);
    memcpy(cluster->model, hello->model, sizeof(cluster->model));
    memcpy(cluster->layout, hello->layout, sizeof(cluster->layout));
    memcpy(cluster->tokenizer_path, hello->tokenizer_path, sizeof(cluster->tokenizer_path));
    cluster->layout_hash = hello->layout_hash;
    cluster->vocab_size = hello->vocab_size;
    cluster->page_tokens = hello->page_tokens;
    cluster->max_model_len = hello->max_model_len;
}

static sl_status_t group_create(sl_registry_t *registry, const sl_msg_hello_t *hello,
                                sl_rank_group_t **group_p)
{
    sl_rank_group_t *group = calloc(1, sizeof(*group));
    if (group == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "no memory for a group");
    }
    group->pool = hello->rank.pool;
    group->index = hello->rank.group;
    group->tp = hello->tp;
    group->attention = hello->attention;

    sl_rank_group_t *next, *old = NULL;
    TAILQ_FOREACH(next, &registry->groups[group->pool], link)
    {
        if (next->index == group->index) {
            old = next; /* failed, and its place is taken now */
        } else if (next->index > group->index) {
            break;
        }
    }
    if (next != NULL) {
        TAILQ_INSERT_BEFORE(next, group, link);
    } else {
        TAILQ_INSERT_TAIL(&registry->groups[group->pool], group, link);
    }
    if (old != NULL) {
        group_remove(registry, old);
    }
    *group_p = group;
    return SL_OK;
}

static sl_status_t reserve_targets(sl_registry_t *registry, sl_pool_t pool)
{
    size_t size = (registry->live_count + 1) * sizeof(sl_rank_t *);
    sl_rank_t **targets = realloc(registry->targets[pool], size);
    if (targets == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "no memory for %zu ranks", registry->live_count + 1);
    }
    registry->targets[pool] = targets;
    return SL_OK;
}

/* With attention "tp" a page id holds on all ranks of the group, so it has as many as its smallest
 * rank: ranks that count pages by their own GPU's free memory differ a little. */
static void settle_pages(sl_rank_group_t *group)
{
    char name[32];
    uint64_t least = UINT64_MAX, most = 0;
    if (group->attention != SL_ATTENTION_TP) {
        return;
    }
    for (uint32_t i = 0; i < group->tp; i++) {
        uint64_t pages = group->ranks[i]->hello.hello.pages_total;
        least = pages < least ? pages : least;
        most = pages > most ? pages : most;
    }
    group->pages = least;
    for (uint32_t i = 0; i < group->tp; i++) {
        group->ranks[i]->load.pages_total = least;
    }
    if (least < most) {
        sl_log_info("group of %s: its ranks have %" PRIu64 " to %" PRIu64
                    " pages; each uses %" PRIu64 " (attention tp)",
                    sl_rank_name(&group->ranks[0]->id, name), least, most, least);
    }
}

sl_status_t sl_registry_admit(sl_registry_t *registry, const sl_peer_key_t *key,
                              sl_message_t *hello, uint64_t now_us, sl_rank_t **rank_p)
{
    const sl_msg_hello_t *fields = &hello->hello;
    SL_TRY(reserve_targets(registry, fields->rank.pool));
    sl_rank_t *rank = calloc(1, sizeof(*rank));
    if (rank == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "no memory for a rank");
    }
    sl_rank_group_t *group =
        sl_registry_live_group(registry, fields->rank.pool, fields->rank.group);
    if (group == NULL) {
        sl_status_t status = group_create(registry, fields, &group);
        if (status != SL_OK) {
            free(rank);
            return status;
        }
    }
    rank->group = group;
    rank->key = *key;
    rank->id = fields->rank;
    rank->seen_us = rank->progress_us = now_us;
    rank->figures.pages_free = fields->pages_total;
    rank->load = (sl_load_t){.pages_total = fields->pages_total,
                             .max_running = fields->max_running,
                             .max_queued_tokens = fields->max_queued_tokens,
                             .hold_order = SL_HOLD_NONE};
    LIST_INIT(&rank->sides);
    group->ranks[rank->id.rank] = rank;
    group->rank_count++;
    sl_map_add(&registry->by_key, &rank->node, key_hash(key));
    if (registry->live_count++ == 0) {
        cluster_fix(registry, fields);
    }
    rank->hello = *hello; /* its arrays move here */
    memset(hello, 0, sizeof(*hello));
    if (group->rank_count == group->tp) {
        settle_pages(group);
    }
    cluster_update(registry);
    *rank_p = rank;
    return SL_OK;
}

void sl_registry_rebind(sl_registry_t *registry, sl_rank_t *rank, const sl_peer_key_t *key)
{
    sl_map_remove(&registry->by_key, &rank->node);
    rank->key = *key;
    rank->doomed = false;
    sl_map_add(&registry->by_key, &rank->node, key_hash(key));
}

void sl_registry_ready(sl_registry_t *registry, sl_rank_t *rank)
{
    char name[32];
    sl_rank_group_t *group = rank->group;
    if (group->rank_count < group->tp || rank->ready) {
        sl_log_debug("%s: ready while %s", sl_rank_name(&rank->id, name),
                     rank->ready ? "ready already" : "its group is not complete");
        return;
    }
    rank->ready = true;
    if (++group->ready_count < group->tp) {
        return;
    }
    /* Both sides learn of each other on the sockets that later carry reserve and prefill, so no
     * rank is ever named to one that does not know it. */
    group->state = SL_GROUP_READY;
    for (uint32_t i = 0; i < group->tp; i++) {
        sl_registry_send_peers(registry, group->ranks[i]);
    }
    broadcast_group(registry, group, true);
    rebuild_targets(registry, group->pool);
    sl_rank_name(&group->ranks[0]->id, name);
    sl_log_info("group of %s is ready: tp %u, attention %s", name, group->tp,
                group->attention == SL_ATTENTION_TP ? "tp" : "dp");
}

void sl_registry_acknowledge(sl_registry_t *registry, sl_rank_t *rank)
{
    sl_message_t ack = {.type = SL_MSG_HEARTBEAT_ACK,
                        .heartbeat_ack = {.sequence = rank->figures.sequence}};
    sl_registry_send(registry, rank, &ack);
}

void sl_registry_heartbeat(sl_registry_t *registry, sl_rank_t *rank,
                           const sl_msg_heartbeat_t *heartbeat, uint64_t now_us)
{
    /* Going from idle to busy starts the clock anew: the last step may lie far back. */
    bool was_busy = rank->figures.busy;
    if (!heartbeat->busy || !was_busy || heartbeat->progress != rank->figures.progress) {
        rank->progress_us = now_us;
    }
    rank->seen_us = now_us;
    rank->heard = true;
    rank->figures = *heartbeat;
    sl_registry_acknowledge(registry, rank);
}

/* ---- losing ranks ---- */

static void bury(sl_registry_t *registry, sl_rank_t *rank)
{
    sl_map_remove(&registry->by_key, &rank->node);
    registry->tombstones[registry->tombstone_count++ % SL_TOMBSTONE_COUNT] = rank->id.incarnation;
    registry->live_count--;
}

static void tell_group_failed(sl_registry_t *registry, const sl_rank_group_t *group,
                              const char *reason, bool left)
{
    sl_message_t message = {.type = SL_MSG_GROUP_FAILED, .group_failed = {.left = left}};
    snprintf(message.group_failed.message, sizeof(message.group_failed.message), "%s", reason);
    const sl_sink_t *sink = &registry->params.sink;
    for (uint32_t i = 0; i < group->tp; i++) {
        const sl_rank_t *rank = group->ranks[i];
        /* A silent rank too: it may only have been stopped, and must exit when it goes on. */
        if (rank != NULL && !rank->left && !rank->doomed &&
            sink->ops->to_rank(sink->arg, &rank->key, &message) != SL_OK) {
            char name[32];
            sl_log_debug("%s: could not be told that its group failed",
                         sl_rank_name(&rank->id, name));
        }
    }
}

void sl_registry_fail(sl_registry_t *registry, sl_rank_t *rank, const char *reason, uint64_t now_us)
{
    char name[32], text[SL_TEXT_BYTES];
    sl_rank_group_t *group = rank->group;
    SL_ASSERT(group->state != SL_GROUP_FAILED);
    snprintf(text, sizeof(text), "%s (incarnation %" PRIu64 ") is lost: %s",
             sl_rank_name(&rank->id, name), rank->id.incarnation, reason);
    sl_log(rank->left && !rank->failed ? SL_LOG_INFO : SL_LOG_WARN, "%s; its group of %u fails",
           text, group->tp);

    bool was_ready = group->state == SL_GROUP_READY;
    bool had_targets = registry->target_count[group->pool] > 0;
    group->state = SL_GROUP_FAILED;
    group->failed_us = now_us;
    for (uint32_t i = 0; i < group->tp; i++) {
        if (group->ranks[i] != NULL) {
            bury(registry, group->ranks[i]);
        }
    }
    rebuild_targets(registry, group->pool);
    if (had_targets && registry->target_count[group->pool] == 0) {
        registry->empty_since_us[group->pool] = now_us;
    }
    cluster_update(registry);
    tell_group_failed(registry, group, text, rank->left && !rank->failed);
    if (was_ready) {
        broadcast_group(registry, group, false);
    }
    for (uint32_t i = 0; i < group->tp; i++) {
        if (group->ranks[i] != NULL) {
            registry->params.rank_lost(registry->params.arg, group->ranks[i], true, text);
        }
    }
}

void sl_registry_goodbye(sl_registry_t *registry, sl_rank_t *rank, const sl_msg_goodbye_t *goodbye,
                         uint64_t now_us)
{
    rank->left = true;
    rank->failed = goodbye->message[0] != '\0';
    sl_registry_fail(registry, rank, rank->failed ? goodbye->message : "it said goodbye", now_us);
}

/* Fails the first group for which `check` finds a rank to blame; false when there is none. */
static bool fail_one(sl_registry_t *registry, uint64_t now_us,
                     bool (*check)(const sl_registry_t *registry, const sl_rank_t *rank,
                                   uint64_t now_us, char reason[128]))
{
    char reason[128];
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        sl_rank_group_t *group;
        TAILQ_FOREACH(group, &registry->groups[pool], link)
        {
            for (uint32_t i = 0; group->state != SL_GROUP_FAILED && i < group->tp; i++) {
                if (group->ranks[i] != NULL && check(registry, group->ranks[i], now_us, reason)) {
                    sl_registry_fail(registry, group->ranks[i], reason, now_us);
                    return true;
                }
            }
        }
    }
    return false;
}

static bool is_doomed(const sl_registry_t *registry, const sl_rank_t *rank, uint64_t now_us,
                      char reason[128])
{
    (void)registry;
    (void)now_us;
    snprintf(reason, 128, "%s", rank->doom);
    return rank->doomed;
}

static bool is_silent_or_stuck(const sl_registry_t *registry, const sl_rank_t *rank,
                               uint64_t now_us, char reason[128])
{
    uint64_t silent_ms = (now_us - rank->seen_us) / 1000;
    uint64_t stuck_ms = rank->figures.busy ? (now_us - rank->progress_us) / 1000 : 0;
    if (silent_ms >= registry->params.dead_ms) {
        snprintf(reason, 128, "no heartbeat for %" PRIu64 " ms (limit %" PRIu64 " ms)", silent_ms,
                 registry->params.dead_ms);
        return true;
    }
    if (stuck_ms >= registry->params.stuck_ms) {
        snprintf(reason, 128,
                 "busy without progress beyond step %" PRIu64 " for %" PRIu64 " ms (limit %" PRIu64
                 " ms)",
                 rank->figures.progress, stuck_ms, registry->params.stuck_ms);
        return true;
    }
    return false;
}

void sl_registry_settle(sl_registry_t *registry, uint64_t now_us)
{
    while (registry->settle_needed) {
        /* Failing a group sends, which may doom further ranks. */
        registry->settle_needed = fail_one(registry, now_us, is_doomed);
    }
}

/* A time moved on by a pause, but never past now: what has been heard since the pause needs nothing
 * forgiven, and a time that lay ahead would make the age computed from it wrap. */
static uint64_t shifted(uint64_t time_us, uint64_t pause_us, uint64_t now_us)
{
    return now_us - time_us > pause_us ? time_us + pause_us : now_us;
}

/* Shifts every clock by our own pause: what waits in the sockets may be its heartbeats. */
static void forgive(sl_registry_t *registry, uint64_t pause_us, uint64_t now_us)
{
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        sl_rank_group_t *group;
        TAILQ_FOREACH(group, &registry->groups[pool], link)
        {
            for (uint32_t i = 0; i < group->tp; i++) {
                sl_rank_t *rank = group->ranks[i];
                if (rank != NULL) {
                    rank->seen_us = shifted(rank->seen_us, pause_us, now_us);
                    rank->progress_us = shifted(rank->progress_us, pause_us, now_us);
                }
            }
        }
    }
}

/* A rank whose heartbeat is overdue may have died: its connection tells at once, where waiting for
 * `dead_ms` would keep its group in a collective that never ends. */
static void probe_overdue(sl_registry_t *registry, uint64_t now_us)
{
    uint64_t heartbeat_us = registry->params.heartbeat_ms * 1000;
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        sl_rank_group_t *group;
        TAILQ_FOREACH(group, &registry->groups[pool], link)
        {
            for (uint32_t i = 0; group->state != SL_GROUP_FAILED && i < group->tp; i++) {
                sl_rank_t *rank = group->ranks[i];
                if (rank != NULL && rank->heard && now_us - rank->seen_us > 2 * heartbeat_us &&
                    now_us - rank->probed_us >= heartbeat_us) {
                    rank->probed_us = now_us;
                    sl_registry_acknowledge(registry, rank);
                }
            }
        }
    }
}

static void prune_failed(sl_registry_t *registry, uint64_t now_us)
{
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        sl_rank_group_t *group = TAILQ_FIRST(&registry->groups[pool]);
        while (group != NULL) {
            sl_rank_group_t *next = TAILQ_NEXT(group, link);
            if (group->state == SL_GROUP_FAILED && now_us - group->failed_us > FAILED_SHOWN_US) {
                group_remove(registry, group);
            }
            group = next;
        }
    }
}

void sl_registry_tick(sl_registry_t *registry, uint64_t now_us)
{
    uint64_t gap_us = now_us - registry->tick_us;
    if (gap_us > PAUSE_US) {
        sl_log_warn("the router itself paused for %" PRIu64 " ms", gap_us / 1000);
        forgive(registry, gap_us, now_us);
    }
    registry->tick_us = now_us;
    while (fail_one(registry, now_us, is_silent_or_stuck)) {
    }
    probe_overdue(registry, now_us);
    prune_failed(registry, now_us);
}

/* ---- looking ---- */

sl_rank_t *const *sl_registry_targets(const sl_registry_t *registry, sl_pool_t pool,
                                      size_t *count_p)
{
    *count_p = registry->target_count[pool];
    return registry->targets[pool];
}

uint64_t sl_registry_prompt_room(const sl_registry_t *registry, const sl_rank_t *rank)
{
    const sl_load_t *load = &rank->load;
    uint64_t page_tokens = registry->cluster.page_tokens;
    uint64_t tokens =
        load->pages_total < UINT64_MAX / page_tokens ? load->pages_total * page_tokens : UINT64_MAX;
    bool short_queue = load->max_queued_tokens != 0 && load->max_queued_tokens < tokens;
    return short_queue ? load->max_queued_tokens : tokens;
}

const sl_rank_t *sl_registry_largest_prefill(const sl_registry_t *registry)
{
    const sl_rank_t *largest = NULL;
    for (size_t i = 0; i < registry->target_count[SL_POOL_PREFILL]; i++) {
        const sl_rank_t *rank = registry->targets[SL_POOL_PREFILL][i];
        if (largest == NULL ||
            sl_registry_prompt_room(registry, rank) > sl_registry_prompt_room(registry, largest)) {
            largest = rank;
        }
    }
    return largest;
}

uint64_t sl_registry_empty_since_us(const sl_registry_t *registry, sl_pool_t pool)
{
    return registry->empty_since_us[pool];
}

size_t sl_registry_joining(const sl_registry_t *registry, sl_pool_t pool)
{
    size_t count = 0;
    const sl_rank_group_t *group;
    TAILQ_FOREACH(group, &registry->groups[pool], link)
    {
        count += group->state == SL_GROUP_JOINING;
    }
    return count;
}

const sl_cluster_t *sl_registry_cluster(const sl_registry_t *registry)
{
    return &registry->cluster;
}

void sl_registry_each(const sl_registry_t *registry,
                      void (*visit)(void *arg, const sl_rank_t *rank), void *arg)
{
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        const sl_rank_group_t *group;
        TAILQ_FOREACH(group, &registry->groups[pool], link)
        {
            for (uint32_t i = 0; i < group->tp; i++) {
                if (group->ranks[i] != NULL) {
                    visit(arg, group->ranks[i]);
                }
            }
        }
    }
}

static void count_rank(void *arg, const sl_rank_t *rank)
{
    (void)rank;
    (*(size_t *)arg)++;
}

size_t sl_registry_count(const sl_registry_t *registry)
{
    size_t count = 0;
    sl_registry_each(registry, count_rank, &count);
    return count;
}
