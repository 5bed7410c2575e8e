/*
 * Who is let in. Every refusal names the rank, what it said and what was expected, and disturbs
 * nobody: the one connection that sent the hello gets `refused`, and that is all.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/base/log.h"
#include "router/registry_internal.h"

/* Every check ends here. The text is kept by sl_error(). */
#define REFUSE(...) sl_error(SL_ERR_REFUSED, __VA_ARGS__)

void sl_registry_refuse(sl_registry_t *registry, const sl_peer_key_t *key, sl_status_t status)
{
    sl_message_t message = {.type = SL_MSG_REFUSED};
    snprintf(message.refused.code, sizeof(message.refused.code), "%s", sl_status_name(status));
    snprintf(message.refused.message, sizeof(message.refused.message), "%s", sl_error_text());
    const sl_sink_t *sink = &registry->params.sink;
    if (sink->ops->to_rank(sink->arg, key, &message) != SL_OK) {
        sl_registry_gone(registry, key);
    }
}

static sl_status_t check_figures(const sl_msg_hello_t *hello, const char *name)
{
    bool power = hello->tp != 0 && (hello->tp & (hello->tp - 1)) == 0;
    if (!power || hello->tp > SL_GROUP_RANKS_MAX) {
        return REFUSE("%s: tp %u, expected a power of two from 1 to %d", name, hello->tp,
                      SL_GROUP_RANKS_MAX);
    }
    if (hello->rank.rank >= hello->tp) {
        return REFUSE("%s: rank %u, expected less than its tp %u", name, hello->rank.rank,
                      hello->tp);
    }
    if (hello->page_tokens == 0 || hello->pages_total == 0 || hello->vocab_size == 0 ||
        hello->max_model_len == 0) {
        return REFUSE("%s: page_tokens %" PRIu64 ", pages_total %" PRIu64 ", vocab_size %" PRIu64
                      ", max_model_len %" PRIu64 ": expected none of them 0",
                      name, hello->page_tokens, hello->pages_total, hello->vocab_size,
                      hello->max_model_len);
    }
    return SL_OK;
}

/* What the pools must agree on, or pages written by one would be nonsense to the other. */
static sl_status_t check_cluster(const sl_registry_t *registry, const sl_msg_hello_t *hello,
                                 const char *name)
{
    const sl_cluster_t *cluster = &registry->cluster;
    if (!cluster->known) {
        return SL_OK;
    }
    if (hello->layout_hash != cluster->layout_hash || strcmp(hello->model, cluster->model) != 0) {
        /* The two layouts together may be longer than an error text: 360 characters each. */
        return REFUSE("%s: model \"%s\" with layout %016" PRIx64 " [%.360s], expected that of %s: "
                      "model \"%s\" with layout %016" PRIx64 " [%.360s]",
                      name, hello->model, hello->layout_hash, hello->layout, cluster->first,
                      cluster->model, cluster->layout_hash, cluster->layout);
    }
    if (hello->vocab_size != cluster->vocab_size || hello->page_tokens != cluster->page_tokens) {
        return REFUSE("%s: vocab_size %" PRIu64 " and page_tokens %" PRIu64 ", expected %" PRIu64
                      " and %" PRIu64 " as %s has",
                      name, hello->vocab_size, hello->page_tokens, cluster->vocab_size,
                      cluster->page_tokens, cluster->first);
    }
    return SL_OK;
}

/* Ranks of a group gather each other's rows into buffers of one size; a rank that was started with
 * another one would end them all. */
static sl_status_t check_rows(const sl_rank_group_t *group, const sl_msg_hello_t *hello,
                              const char *name)
{
    char other[32];
    uint32_t first = 0;
    while (group->ranks[first] == NULL) {
        first++; /* a live group has at least one */
    }
    const sl_msg_hello_t *fixed = &group->ranks[first]->hello.hello;
    sl_rank_name(&fixed->rank, other);
    if (hello->max_rows != fixed->max_rows) {
        return REFUSE("%s: max_rows %" PRIu64 ", expected %" PRIu64 " as %s of its group has", name,
                      hello->max_rows, fixed->max_rows, other);
    }
    return SL_OK;
}

static sl_status_t check_group(sl_registry_t *registry, const sl_msg_hello_t *hello,
                               const char *name)
{
    const sl_rank_group_t *group =
        sl_registry_live_group(registry, hello->rank.pool, hello->rank.group);
    if (group != NULL && (group->tp != hello->tp || group->attention != hello->attention)) {
        static const char *const attentions[] = {"dp", "tp"};
        return REFUSE("%s: tp %u and attention %s, expected tp %u and attention %s as its group "
                      "has",
                      name, hello->tp, attentions[hello->attention == SL_ATTENTION_TP], group->tp,
                      attentions[group->attention == SL_ATTENTION_TP]);
    }
    if (group != NULL) {
        SL_TRY(check_rows(group, hello, name));
    }
    if (registry->live_count >= registry->params.max_ranks) {
        return REFUSE("%s: %zu ranks are registered, which is the limit (--max-ranks)", name,
                      registry->live_count);
    }
    return SL_OK;
}

static sl_rank_t *holder_of(sl_registry_t *registry, const sl_rank_id_t *place)
{
    sl_rank_group_t *group = sl_registry_live_group(registry, place->pool, place->group);
    return group != NULL && place->rank < group->tp ? group->ranks[place->rank] : NULL;
}

/* A new incarnation claims the place of `holder`. If the holder's connection is gone it has died
 * and come back before its silence was noticed; if not, the newcomer is the intruder. */
static sl_status_t contest(sl_registry_t *registry, sl_rank_t *holder, const sl_msg_hello_t *hello,
                           const char *name, uint64_t now_us)
{
    sl_registry_acknowledge(registry, holder);
    if (!holder->doomed) {
        return REFUSE("%s: its place is held by incarnation %" PRIu64
                      ", which is alive; incarnation %" PRIu64 " cannot have it",
                      name, holder->id.incarnation, hello->rank.incarnation);
    }
    sl_registry_fail(registry, holder, "a new incarnation has taken its place", now_us);
    return SL_OK;
}

/* A known process has been away, over a new connection or for a lease over the old one: what was
 * under way may be lost in either direction, and it has dropped tokens itself. Its attempts end; it
 * keeps its place. */
static void register_again(sl_registry_t *registry, sl_rank_t *rank, const char *name,
                           const char *why, uint64_t now_us)
{
    char text[160];
    snprintf(text, sizeof(text), "%s %s", name, why);
    sl_log_warn("%s and registers again (incarnation %" PRIu64 ")", text, rank->id.incarnation);
    rank->seen_us = rank->progress_us = now_us;
    sl_registry_welcome(registry, rank);
    registry->params.rank_lost(registry->params.arg, rank, false, text);
}

/* Over a new connection it learns anew who is there. */
static void reconnect(sl_registry_t *registry, sl_rank_t *rank, const sl_peer_key_t *key,
                      const char *name, uint64_t now_us)
{
    sl_registry_rebind(registry, rank, key);
    register_again(registry, rank, name, "lost its connection to the router", now_us);
    if (rank->group->state == SL_GROUP_READY) {
        sl_registry_send_peers(registry, rank);
    } else if (rank->group->rank_count == rank->group->tp) {
        sl_registry_send_group(registry, rank->group);
    }
}

/* A known process says hello again. Over the same connection its welcome was slow, or, after
 * heartbeats, these were not acknowledged within its lease. False: it is not known. */
static bool hello_again(sl_registry_t *registry, const sl_peer_key_t *key,
                        const sl_msg_hello_t *hello, const char *name, uint64_t now_us)
{
    sl_rank_t *holder = holder_of(registry, &hello->rank);
    if (holder == NULL || !sl_rank_same(&holder->id, &hello->rank)) {
        return false;
    }
    if (!sl_peer_key_same(&holder->key, key)) {
        reconnect(registry, holder, key, name, now_us);
    } else if (holder->heard) {
        register_again(registry, holder, name, "had no heartbeat acknowledged within its lease",
                       now_us);
    } else {
        holder->seen_us = now_us;
        sl_registry_welcome(registry, holder);
    }
    return true;
}

static sl_status_t check_hello(sl_registry_t *registry, const sl_msg_hello_t *hello,
                               const char *name, uint64_t now_us)
{
    SL_TRY(check_figures(hello, name));
    sl_rank_t *holder = holder_of(registry, &hello->rank);
    if (holder != NULL) {
        SL_TRY(contest(registry, holder, hello, name, now_us));
    }
    SL_TRY(check_cluster(registry, hello, name));
    return check_group(registry, hello, name);
}

static sl_status_t admit(sl_registry_t *registry, const sl_peer_key_t *key, sl_message_t *message,
                         const char *name, uint64_t now_us)
{
    sl_rank_t *rank;
    SL_TRY(sl_registry_admit(registry, key, message, now_us, &rank));
    sl_log_info("%s: registered, %u of %u of its group (incarnation %" PRIu64 ", %" PRIu64
                " pages)",
                name, rank->group->rank_count, rank->group->tp, rank->id.incarnation,
                rank->hello.hello.pages_total);
    sl_registry_welcome(registry, rank);
    if (rank->group->rank_count == rank->group->tp) {
        sl_registry_send_group(registry, rank->group);
    }
    return SL_OK;
}

void sl_registry_hello(sl_registry_t *registry, const sl_peer_key_t *key, sl_message_t *message,
                       uint64_t now_us)
{
    char name[32];
    const sl_msg_hello_t *hello = &message->hello;
    sl_rank_name(&hello->rank, name);
    if (sl_registry_buried(registry, hello->rank.incarnation)) {
        sl_status_t status = sl_error(
            SL_ERR_STALE, "%s: incarnation %" PRIu64 " belongs to a failed group; start it again",
            name, hello->rank.incarnation);
        sl_registry_refuse(registry, key, status);
        return;
    }
    if (hello_again(registry, key, hello, name, now_us)) {
        return;
    }
    sl_rank_t *same_connection = sl_registry_find(registry, key);
    if (same_connection != NULL) {
        sl_registry_fail(registry, same_connection, "its connection registered something else",
                         now_us);
    }
    sl_status_t status = check_hello(registry, hello, name, now_us);
    if (status == SL_OK) {
        status = admit(registry, key, message, name, now_us);
    }
    if (status != SL_OK) {
        sl_registry_refuse(registry, key, status);
    }
}
