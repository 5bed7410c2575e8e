/* The engine loop of a rank: messages, events, steps, sleep. */
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "node/rank_internal.h"

#define SLEEP_MS 200 /* upper bound of one sleep; every wake-up has a descriptor of its own */

void sl_rank_publish(sl_rank_t *rank, bool stepping)
{
    sl_msg_heartbeat_t figures = {.progress = rank->progress, .busy = stepping};
    rank->params.ops->figures(rank->params.self, &figures);
    sl_node_publish(rank->node, &figures);
}

void sl_rank_progress(sl_rank_t *rank)
{
    rank->progress++;
    sl_rank_publish(rank, true);
}

/* With TP attention a page id holds on all ranks, so the group uses as many as its smallest rank
 * has; with DP attention each rank uses its own. */
static sl_status_t use_pages(sl_rank_t *rank, uint64_t pages)
{
    bool shared = rank->params.options->attention == SL_ATTENTION_TP;
    uint64_t least = shared ? 1 : 0, most = shared ? sl_model_page_count(rank->model) : 0;
    if (pages < least || pages > most) {
        return sl_error(
            SL_ERR_DESYNC, "group with %llu pages a rank: expected %llu to %llu on this one",
            (unsigned long long)pages, (unsigned long long)least, (unsigned long long)most);
    }
    rank->group_pages = pages;
    if (!shared) {
        return SL_OK;
    }
    sl_step_limit_pages(rank->step, (uint32_t)pages);
    return rank->params.ops->use_pages(rank->params.self, (uint32_t)pages);
}

/*
 * Runs and records a step of each size before the first request comes: later it would hold up the
 * streams that run. The largest comes first, so that scratch memory has its size before anything is
 * recorded. All rows are padding, and all ranks of the group do the same.
 */
static sl_status_t record_steps(sl_rank_t *rank)
{
    const sl_rank_params_t *params = &rank->params;
    const uint32_t no_rows[SL_GROUP_RANKS_MAX] = {0};
    uint64_t started_us = sl_now_us();
    if (params->buckets == NULL || !sl_model_records(rank->model)) {
        return SL_OK;
    }
    sl_step_clear(rank->step);
    for (uint32_t i = params->bucket_count; i-- > 0;) {
        const sl_batch_t *batch = sl_step_batch(rank->step, no_rows, params->buckets[i]);
        for (int run = 0; run < SL_MODEL_RUNS_TO_RECORD; run++) {
            SL_TRY(params->ops->forward(params->self, rank->model, batch));
        }
    }
    SL_TRY(sl_model_mark(rank->model, 0));
    SL_TRY(sl_model_wait_mark(rank->model, 0));
    sl_log_info("recorded steps of %u sizes, up to %u rows, in %.1f s", params->bucket_count,
                params->max_rows, (double)(sl_now_us() - started_us) / 1e6);
    return SL_OK;
}

static sl_status_t join_group(sl_rank_t *rank, const sl_msg_group_t *group)
{
    uint32_t tp = (uint32_t)rank->params.options->tp;
    sl_message_t ready = {.type = SL_MSG_READY};
    if (group->rank_count != tp) {
        return sl_error(SL_ERR_DESYNC, "group of %zu ranks: expected tp %u", group->rank_count, tp);
    }
    if (rank->joined) { /* a restarted router asks again; the group itself has not changed */
        if (memcmp(rank->members, group->incarnations, tp * sizeof(rank->members[0])) != 0 ||
            rank->group_pages != group->pages) {
            return sl_error(SL_ERR_DESYNC, "the router formed the group anew, of other processes");
        }
        return sl_rank_post(rank, &ready);
    }
    memcpy(rank->members, group->incarnations, tp * sizeof(rank->members[0]));
    SL_TRY(use_pages(rank, group->pages));
    SL_TRY(sl_group_connect(rank->group, group->addresses, group->rank_count));
    SL_TRY(sl_model_join(rank->model, rank->group));
    SL_TRY(record_steps(rank));
    rank->joined = true;
    sl_rank_publish(rank, false); /* the first heartbeat after `ready` counts these pages */
    sl_log_info("group of %u ready", tp);
    return sl_rank_post(rank, &ready);
}

static sl_status_t update_peer(sl_rank_t *rank, const sl_msg_peer_t *peer)
{
    if (!peer->alive) {
        sl_peers_remove(rank->peers, &peer->rank);
        return sl_transfer_peer_gone(rank->transfer, &peer->rank);
    }
    SL_TRY(sl_peers_add(rank->peers, peer));
    return sl_transfer_peer_add(rank->transfer, &peer->rank, &peer->transfer_address);
}

static sl_status_t handle_message(sl_rank_t *rank, const sl_message_t *message)
{
    switch (message->type) {
    case SL_MSG_GROUP:
        return join_group(rank, &message->group);
    case SL_MSG_PEER:
        return update_peer(rank, &message->peer);
    case SL_MSG_GROUP_FAILED:
        if (message->group_failed.left) {
            sl_log_info("the group leaves: %s", message->group_failed.message);
            return SL_ERR_CANCELED;
        }
        return sl_error(SL_ERR_UNREACHABLE, "group failed: %s", message->group_failed.message);
    case SL_MSG_REFUSED:
        return sl_error(SL_ERR_REFUSED, "refused by the router: %s", message->refused.message);
    case SL_MSG_RESERVE:
    case SL_MSG_PREFILL:
    case SL_MSG_CANCEL_ATTEMPT:
        return rank->params.ops->on_message(rank->params.self, message);
    default:
        sl_log_warn("ignored a %s message", sl_message_type_name(message->type));
        return SL_OK;
    }
}

static sl_status_t take_messages(sl_rank_t *rank)
{
    sl_message_t *message;
    sl_node_clear(rank->node);
    while ((message = sl_node_take(rank->node)) != NULL) {
        sl_status_t status = handle_message(rank, message);
        sl_node_message_free(message);
        SL_TRY(status);
    }
    return SL_OK;
}

static sl_status_t take_events(sl_rank_t *rank)
{
    sl_transfer_event_t *event;
    sl_transfer_clear(rank->transfer);
    while ((event = sl_transfer_take(rank->transfer)) != NULL) {
        sl_status_t status = rank->params.ops->on_event(rank->params.self, event);
        free(event);
        SL_TRY(status);
    }
    return SL_OK;
}

/* Whether this rank chooses rows: all do with DP attention, rank 0 with TP attention. */
static bool plans(const sl_rank_t *rank)
{
    return rank->params.options->attention == SL_ATTENTION_DP || rank->id.rank == 0;
}

/* TP attention: everybody gets rank 0's plan. */
static sl_status_t share_plan(sl_rank_t *rank, uint32_t bytes)
{
    const void *mine;
    uint32_t mine_bytes;
    if (bytes > sl_step_plan_max(rank->step)) {
        return sl_error(SL_ERR_DESYNC, "step plan of %u bytes: expected at most %u", bytes,
                        sl_step_plan_max(rank->step));
    }
    if (rank->id.rank == 0) {
        sl_step_plan(rank->step, &mine, &mine_bytes);
        memcpy(rank->plan, mine, mine_bytes);
    }
    SL_TRY(sl_group_broadcast(rank->group, 0, rank->plan, bytes));
    return rank->id.rank == 0 ? SL_OK : sl_step_set_plan(rank->step, rank->plan, bytes);
}

/* Fills rank_rows from the records; false when nobody has rows. */
static bool rows_of_group(const sl_rank_t *rank, const sl_step_record_t *records,
                          uint32_t *rank_rows)
{
    uint32_t tp = (uint32_t)rank->params.options->tp;
    bool any = false;
    for (uint32_t r = 0; r < tp; r++) {
        uint32_t from = rank->params.options->attention == SL_ATTENTION_DP ? r : 0;
        rank_rows[r] = records[from].tokens;
        any = any || rank_rows[r] > 0;
    }
    return any;
}

/* Rows every rank's batch is padded to: the smallest bucket that holds the largest of them; 0 where
 * steps are not padded. A function of the exchanged records alone, hence the same on all ranks. */
static uint32_t bucket_of(const sl_rank_t *rank, const uint32_t *rank_rows)
{
    const sl_rank_params_t *params = &rank->params;
    uint32_t most = 0, i = 0;
    if (params->buckets == NULL || !sl_model_records(rank->model)) {
        return 0;
    }
    for (uint32_t r = 0; r < params->options->tp; r++) {
        most = rank_rows[r] > most ? rank_rows[r] : most;
    }
    while (params->buckets[i] < most) {
        i++;
        SL_ASSERT(i < params->bucket_count);
    }
    return params->buckets[i];
}

/* Steps that may stay unfinished when the next one has been issued. */
static uint32_t steps_ahead(const sl_rank_t *rank)
{
    sl_async_t async = rank->params.async_scheduling;
    return async == SL_ASYNC_ON || (async == SL_ASYNC_AUTO && sl_model_records(rank->model));
}

static sl_status_t finish_steps(sl_rank_t *rank, uint32_t keep)
{
    for (; rank->unfinished > keep; rank->unfinished--) {
        SL_TRY(rank->params.ops->finish(rank->params.self, rank->step));
    }
    return SL_OK;
}

/* Once this rank's device is idle, and then once all ranks' devices are: until then the others may
 * read its memory. */
static sl_status_t leave_group(sl_rank_t *rank)
{
    sl_step_record_t mine = {0}, records[SL_GROUP_RANKS_MAX];
    rank->leaves = true;
    SL_TRY(sl_model_mark(rank->model, 0));
    SL_TRY(sl_model_wait_mark(rank->model, 0));
    SL_TRY(finish_steps(rank, 0));
    SL_TRY(sl_group_exchange(rank->group, &mine, records));
    return SL_ERR_CANCELED;
}

static sl_status_t make_step(sl_rank_t *rank)
{
    const sl_rank_ops_t *ops = rank->params.ops;
    void *self = rank->params.self;
    sl_step_record_t mine = {0}, records[SL_GROUP_RANKS_MAX];
    uint32_t rank_rows[SL_GROUP_RANKS_MAX];
    const void *plan;
    uint64_t started_us = sl_now_us();
    sl_rank_publish(rank, true);
    sl_step_clear(rank->step);
    mine.leaves = sl_rank_stopping();
    if (plans(rank) && mine.leaves == 0) {
        ops->plan(self, rank->step);
        sl_step_plan(rank->step, &plan, &mine.plan_bytes);
    }
    mine.tokens = sl_step_rows(rank->step);
    SL_TRY(sl_group_exchange(rank->group, &mine, records));
    for (uint32_t r = 0; r < rank->params.options->tp; r++) {
        if (records[r].leaves != 0) {
            return leave_group(rank);
        }
    }
    if (rows_of_group(rank, records, rank_rows)) {
        if (rank->params.options->attention == SL_ATTENTION_TP && rank->params.options->tp > 1) {
            SL_TRY(share_plan(rank, records[0].plan_bytes));
        }
        uint64_t forward_us = sl_now_us();
        uint32_t bucket = bucket_of(rank, rank_rows);
        SL_TRY(ops->forward(self, rank->model, sl_step_batch(rank->step, rank_rows, bucket)));
        rank->forward_us += sl_now_us() - forward_us;
        bool own = plans(rank) && sl_step_rows(rank->step) > 0;
        rank->unfinished += own;
        SL_TRY(finish_steps(rank, own ? steps_ahead(rank) : 0));
        rank->step_us += sl_now_us() - started_us;
    }
    rank->steps++;
    rank->progress++;
    sl_rank_publish(rank, false);
    return SL_OK;
}

/* Sleeps until a message, an event, a peer's record or a signal. */
static void sleep_until_work(sl_rank_t *rank)
{
    struct pollfd fds[4] = {
        {.fd = sl_rank_stop_fd(), .events = POLLIN},
        {.fd = sl_node_fd(rank->node), .events = POLLIN},
        {.fd = sl_transfer_fd(rank->transfer), .events = POLLIN},
        {.fd = -1, .events = POLLIN},
    };
    if (rank->joined && rank->params.options->tp > 1) {
        if (sl_group_arm(rank->group) != SL_OK) {
            return;
        }
        fds[3].fd = sl_group_fd(rank->group);
    }
    poll(fds, 4, SLEEP_MS);
}

void sl_rank_set_fault(sl_rank_t *rank, sl_status_t status)
{
    snprintf(rank->fault, sizeof(rank->fault), "%s: %s", sl_status_name(status), sl_error_text());
    sl_log(SL_LOG_ERROR, "stopping: %s", rank->fault);
}

/*
 * Told to stop, a rank alone leaves after a step. One of a group tells the others with its next
 * record, and all leave between the same two steps: a collective that some had started would never
 * end, and what the others still read here must stay.
 */
sl_status_t sl_rank_run(sl_rank_t *rank)
{
    const sl_rank_ops_t *ops = rank->params.ops;
    sl_status_t status = SL_OK;
    while (status == SL_OK) {
        bool stopping = sl_rank_stopping(), grouped = rank->joined && rank->params.options->tp > 1;
        if (stopping && !grouped) {
            break;
        }
        sl_rank_publish(rank, false);
        status = take_messages(rank);
        if (status == SL_OK) {
            status = take_events(rank);
        }
        if (status != SL_OK) {
            break;
        }
        bool wanted = stopping || (plans(rank) && ops->has_work(rank->params.self));
        if (rank->joined && (wanted || sl_group_peer_waits(rank->group))) {
            status = make_step(rank);
        } else if (rank->unfinished > 0) {
            sl_rank_publish(rank, true);
            status = finish_steps(rank, 0);
            rank->progress++;
        } else {
            sleep_until_work(rank);
        }
    }
    bool left = sl_rank_stopping() || rank->leaves || sl_node_group_left(rank->node);
    if (left) {
        if (status != SL_OK && status != SL_ERR_CANCELED) {
            sl_log_warn("while leaving: %s: %s", sl_status_name(status), sl_error_text());
        }
        sl_log_info("stopping after %llu steps: %.3f s issuing forward passes, %.3f s in steps",
                    (unsigned long long)rank->steps, (double)rank->forward_us / 1e6,
                    (double)rank->step_us / 1e6);
        return SL_OK;
    }
    sl_rank_set_fault(rank, status);
    return status;
}
