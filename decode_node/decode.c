/*
 * Life of an attempt here: `reserve` takes pages and grants the prompt's ones to the prefill rank;
 * the commit makes it run from the next step on; each step gives one token, sent to the router as
 * soon as it is known, which may be when the next step is under way already. However it ends, its
 * pages come free when nobody can write to them any more, this rank's own steps included, and the
 * router then hears `released`.
 */
#include "decode_node/decode.h"

#include <stdlib.h>

#include "common/base/log.h"
#include "decode_node/forward.h"
#include "node/rules.h"

struct sl_decode {
    sl_decode_options_t options;
    sl_rank_t *rank;
    sl_decode_requests_t *requests;
    uint64_t tokens_out;
    /* Rules and results of a step, [max_batch]. */
    int32_t *tokens;
    sl_sample_row_t *rules;
    sl_logprobs_t *results;
};

sl_status_t sl_decode_create(const sl_decode_options_t *options, sl_decode_t **decode_p)
{
    sl_decode_t *decode = calloc(1, sizeof(*decode));
    if (decode == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "decode: out of memory");
    }
    decode->options = *options;
    decode->tokens = calloc(options->max_batch, sizeof(*decode->tokens));
    decode->rules = calloc(options->max_batch, sizeof(*decode->rules));
    decode->results = calloc(options->max_batch, sizeof(*decode->results));
    sl_status_t status = SL_OK;
    if (decode->tokens == NULL || decode->rules == NULL || decode->results == NULL) {
        status = sl_error(SL_ERR_NO_MEMORY, "batch of %llu: out of memory",
                          (unsigned long long)options->max_batch);
    }
    if (status != SL_OK) {
        sl_decode_destroy(decode);
        return status;
    }
    *decode_p = decode;
    return SL_OK;
}

void sl_decode_destroy(sl_decode_t *decode)
{
    if (decode == NULL) {
        return;
    }
    sl_decode_requests_destroy(decode->requests);
    free(decode->tokens);
    free(decode->rules);
    free(decode->results);
    free(decode);
}

sl_status_t sl_decode_attach(void *self, sl_rank_t *rank)
{
    sl_decode_t *decode = self;
    decode->rank = rank;
    return sl_decode_requests_create(sl_rank_page_count(rank), (uint32_t)decode->options.max_batch,
                                     &decode->requests);
}

static sl_status_t decode_use_pages(void *self, uint32_t page_count)
{
    sl_decode_t *decode = self;
    return sl_decode_requests_use_pages(decode->requests, page_count);
}

static sl_status_t remove_request(sl_decode_t *decode, sl_decode_request_t *request)
{
    uint64_t attempt = request->attempt;
    sl_decode_requests_remove(decode->requests, request);
    return sl_rank_post_attempt(decode->rank, SL_MSG_RELEASED, attempt);
}

static sl_status_t end_running(sl_decode_t *decode, sl_decode_request_t *request)
{
    if (request->under_way == 0) {
        return remove_request(decode, request);
    }
    sl_decode_request_drain(request);
    return SL_OK;
}

static sl_status_t on_reserve(sl_decode_t *decode, const sl_msg_reserve_t *message)
{
    sl_decode_request_t *request = NULL;
    if (sl_decode_requests_find(decode->requests, message->attempt) != NULL) {
        sl_log_warn("ignored a second reserve of attempt %llu",
                    (unsigned long long)message->attempt);
        return SL_OK;
    }
    sl_status_t status = sl_rule_check(sl_rank_config(decode->rank), message->attempt,
                                       message->prompt_len, &message->sampling);
    if (status != SL_OK) {
        SL_TRY(sl_rank_post_failed(decode->rank, message->attempt, status, sl_error_text()));
        return sl_rank_post_attempt(decode->rank, SL_MSG_RELEASED, message->attempt);
    }
    status = sl_decode_requests_reserve(decode->requests, message, &request);
    if (status == SL_ERR_NO_PAGES) {
        return sl_rank_post_attempt(decode->rank, SL_MSG_NO_PAGES, message->attempt);
    }
    SL_TRY(status);
    return sl_transfer_grant(sl_rank_transfer(decode->rank), request->attempt, request->generation,
                             &request->writer, request->pages, request->prompt_pages);
}

static sl_status_t on_cancel(sl_decode_t *decode, uint64_t attempt)
{
    sl_decode_request_t *request = sl_decode_requests_find(decode->requests, attempt);
    if (request == NULL || request->state == SL_DECODE_QUIESCING ||
        request->state == SL_DECODE_DRAINING) {
        return SL_OK; /* its end has been told already, or is under way */
    }
    if (request->state == SL_DECODE_RUNNING) {
        return end_running(decode, request);
    }
    sl_decode_requests_quiesce(decode->requests, request);
    return SL_OK;
}

static sl_status_t decode_on_message(void *self, const sl_message_t *message)
{
    sl_decode_t *decode = self;
    switch (message->type) {
    case SL_MSG_RESERVE:
        return on_reserve(decode, &message->reserve);
    case SL_MSG_CANCEL_ATTEMPT:
        return on_cancel(decode, message->attempt.attempt);
    default:
        sl_log_warn("ignored a %s message: this is a decode rank",
                    sl_message_type_name(message->type));
        return SL_OK;
    }
}

static sl_status_t fail_request(sl_decode_t *decode, sl_decode_request_t *request,
                                sl_status_t status, const char *text)
{
    if (request->state != SL_DECODE_QUIESCING) {
        SL_TRY(sl_rank_post_failed(decode->rank, request->attempt, status, text));
    }
    return remove_request(decode, request);
}

static sl_status_t on_commit(sl_decode_t *decode, sl_decode_request_t *request,
                             const sl_commit_t *commit)
{
    if (request->state == SL_DECODE_QUIESCING) {
        return remove_request(decode, request);
    }
    if (commit->prompt_len != request->prompt_len || commit->page_count != request->prompt_pages) {
        char text[160];
        snprintf(
            text, sizeof(text), "commit of %u tokens in %u pages: expected %u tokens in %u pages",
            commit->prompt_len, commit->page_count, request->prompt_len, request->prompt_pages);
        return fail_request(decode, request, SL_ERR_STALE, text);
    }
    sl_decode_requests_start(decode->requests, request, commit->first_token);
    return SL_OK;
}

static sl_status_t decode_on_event(void *self, const sl_transfer_event_t *event)
{
    sl_decode_t *decode = self;
    sl_decode_request_t *request = sl_decode_requests_find(decode->requests, event->attempt);
    if (request == NULL || request->generation != event->generation ||
        request->state == SL_DECODE_RUNNING || request->state == SL_DECODE_DRAINING) {
        sl_log_warn("ignored transfer event %d for attempt %llu generation %u", (int)event->type,
                    (unsigned long long)event->attempt, event->generation);
        return SL_OK;
    }
    switch (event->type) {
    case SL_TRANSFER_COMMITTED:
        return on_commit(decode, request, &event->commit);
    case SL_TRANSFER_RELEASED:
        if (event->status != SL_OK) {
            return fail_request(decode, request, event->status, event->text);
        }
        return remove_request(decode, request); /* the prefill rank has told the router why */
    default:
        return fail_request(decode, request, event->status, event->text);
    }
}

static bool decode_has_work(void *self)
{
    const sl_decode_t *decode = self;
    return sl_decode_requests_ready(decode->requests);
}

static void decode_plan(void *self, sl_step_t *step)
{
    sl_decode_t *decode = self;
    sl_decode_requests_plan(decode->requests, step);
}

/* Rules of the step's rows; those of padding are of no request. */
static void make_rules(sl_decode_t *decode, sl_decode_rows_t in_step, uint32_t rows)
{
    const sl_model_config_t *config = sl_rank_config(decode->rank);
    for (uint32_t i = 0; i < in_step.count; i++) {
        const sl_decode_request_t *request = in_step.requests[i];
        uint32_t index = request->outputs + request->under_way - 1;
        sl_rule_make(config, &request->sampling, index, &decode->rules[i]);
    }
    for (uint32_t i = in_step.count; i < rows; i++) {
        decode->rules[i] = (sl_sample_row_t){.logprobs = -1};
    }
}

static bool want_logprobs(sl_decode_rows_t rows)
{
    for (uint32_t i = 0; i < rows.count; i++) {
        if (rows.requests[i]->sampling.logprobs >= 0) {
            return true;
        }
    }
    return false;
}

static sl_status_t decode_forward(void *self, sl_model_t *model, const sl_batch_t *step_batch)
{
    sl_decode_t *decode = self;
    sl_decode_rows_t in_step = sl_decode_requests_in_step(decode->requests);
    sl_batch_t batch = *step_batch;
    bool chooses =
        decode->options.rank.attention == SL_ATTENTION_DP || decode->options.rank.rank == 0;
    if (chooses) {
        make_rules(decode, in_step, batch.rows);
        batch.rules = decode->rules;
    }
    SL_TRY(sl_decode_forward(model, sl_rank_config(decode->rank)->num_hidden_layers, &batch));
    if (!chooses || in_step.count == 0) {
        return SL_OK;
    }
    return sl_model_fetch(model, in_step.count, want_logprobs(in_step));
}

static sl_status_t give_token(sl_decode_t *decode, sl_decode_request_t *request, int32_t token,
                              const sl_logprobs_t *logprobs)
{
    const sl_sampling_t *sampling = &request->sampling;
    uint32_t index = request->outputs++;
    sl_finish_t finish = sl_rule_finish(sl_rank_config(decode->rank), sampling, index, token);
    request->last_token = token;
    decode->tokens_out++;
    SL_TRY(sl_rank_post_token(decode->rank, request->attempt, index, token,
                              sampling->logprobs >= 0 ? logprobs : NULL, finish));
    return finish == SL_FINISH_NONE ? SL_OK : end_running(decode, request);
}

static sl_status_t decode_finish(void *self, sl_step_t *step)
{
    sl_decode_t *decode = self;
    (void)step;
    sl_decode_rows_t ended = sl_decode_requests_step_ended(decode->requests);
    SL_TRY(sl_model_fetched(sl_rank_model(decode->rank), ended.count, decode->tokens,
                            want_logprobs(ended) ? decode->results : NULL));
    for (uint32_t i = 0; i < ended.count; i++) {
        sl_decode_request_t *request = ended.requests[i];
        if (request->state == SL_DECODE_RUNNING) {
            SL_TRY(give_token(decode, request, decode->tokens[i], &decode->results[i]));
        } else if (request->under_way == 0) { /* it ended before this token, which nobody gets */
            SL_TRY(remove_request(decode, request));
        }
    }
    return SL_OK;
}

static void decode_figures(void *self, sl_msg_heartbeat_t *figures)
{
    const sl_decode_t *decode = self;
    const sl_pages_t *pages = sl_decode_requests_pages(decode->requests);
    figures->pages_free = sl_pages_count(pages, SL_PAGE_FREE);
    figures->pages_quiescing = sl_pages_count(pages, SL_PAGE_QUIESCING);
    figures->running = sl_decode_requests_count(decode->requests);
    figures->tokens_out = decode->tokens_out;
}

const sl_rank_ops_t sl_decode_rank_ops = {
    .use_pages = decode_use_pages,
    .on_message = decode_on_message,
    .on_event = decode_on_event,
    .has_work = decode_has_work,
    .plan = decode_plan,
    .forward = decode_forward,
    .finish = decode_finish,
    .figures = decode_figures,
};
