/* What a rank has comes from its last heartbeat; what waits comes from the router's own tables. */
#include "router/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    sl_rank_status_t *ranks;
    size_t count;
    uint64_t now_us;
} report_t;

static void report_rank(void *arg, const sl_rank_t *rank)
{
    static const char *const states[] = {"joining", "ready", "failed"};
    report_t *report = arg;
    sl_rank_status_t *entry = &report->ranks[report->count++];
    *entry = (sl_rank_status_t){
        .rank = rank->id,
        .tp = rank->group->tp,
        .pages_total = rank->load.pages_total,
        .pages_free = rank->figures.pages_free,
        .pages_quiescing = rank->figures.pages_quiescing,
        .running = rank->figures.running,
        .queued_tokens = rank->figures.queued_tokens,
        .progress = rank->figures.progress,
        .tokens_out = rank->figures.tokens_out,
        .heartbeat_age_ms =
            report->now_us > rank->seen_us ? (report->now_us - rank->seen_us) / 1000 : 0,
    };
    snprintf(entry->state, sizeof(entry->state), "%s", states[rank->group->state]);
}

sl_status_t sl_status_report(const sl_registry_t *registry, const sl_requests_t *requests,
                             uint64_t started_us, uint64_t now_us, sl_message_t *message_p)
{
    report_t report = {.now_us = now_us};
    size_t count = sl_registry_count(registry);
    if (count > 0) {
        report.ranks = calloc(count, sizeof(*report.ranks));
        if (report.ranks == NULL) {
            return sl_error(SL_ERR_NO_MEMORY, "no memory to report %zu ranks", count);
        }
        sl_registry_each(registry, report_rank, &report);
    }
    sl_requests_counts_t counts = sl_requests_counts(requests);
    *message_p = (sl_message_t){.type = SL_MSG_STATUS_REPLY};
    sl_msg_status_reply_t *reply = &message_p->status_reply;
    const sl_cluster_t *cluster = sl_registry_cluster(registry);
    memcpy(reply->model, cluster->model, sizeof(reply->model));
    reply->uptime_ms = (now_us - started_us) / 1000;
    reply->requests_waiting = counts.waiting;
    reply->requests_running = counts.placed;
    reply->requests_finished = counts.finished;
    reply->requests_failed = counts.failed;
    reply->requests_canceled = counts.canceled;
    reply->requests_refused = counts.refused;
    reply->ranks = report.ranks;
    reply->rank_count = count;
    return SL_OK;
}

/* The longest prompt any prefill rank could take, with one output token to follow. */
static uint64_t longest_prompt(const sl_registry_t *registry, const sl_cluster_t *cluster)
{
    const sl_rank_t *largest = sl_registry_largest_prefill(registry);
    uint64_t most = cluster->max_model_len > 0 ? cluster->max_model_len - 1 : 0;
    uint64_t longest = largest != NULL ? sl_registry_prompt_room(registry, largest) : most;
    return longest < most ? longest : most;
}

void sl_status_info(const sl_registry_t *registry, sl_message_t *message_p)
{
    const sl_cluster_t *cluster = sl_registry_cluster(registry);
    *message_p = (sl_message_t){.type = SL_MSG_INFO_REPLY};
    sl_msg_info_reply_t *reply = &message_p->info_reply;
    memcpy(reply->model, cluster->model, sizeof(reply->model));
    memcpy(reply->tokenizer_path, cluster->tokenizer_path, sizeof(reply->tokenizer_path));
    reply->vocab_size = cluster->vocab_size;
    reply->max_model_len = cluster->max_model_len;
    reply->max_prompt_len = longest_prompt(registry, cluster);
}
