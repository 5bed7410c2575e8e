/*
 * Life of an attempt here: `prefill` opens it at the transfer engine and queues it; steps compute
 * its rows and push finished pages; the last row gives the first token, which goes to the router at
 * once, before the commit. An attempt that ends with its first token, fails or is cancelled is
 * aborted instead: the transfer engine then releases the decode rank's pages. Either way one
 * transfer event ends it, its pages come free, and the router hears `released`.
 */
#include "prefill_node/prefill.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "node/rules.h"

struct sl_prefill {
    sl_prefill_options_t options;
    sl_rank_t *rank;
    sl_prefill_requests_t *requests;
    uint32_t push_layers;
    uint64_t tokens_out;
    /* Results of a step, sized for SL_PREFILL_LOGIT_ROWS. */
    int32_t *rows, *targets, *tokens;
    sl_sample_row_t *rules;
    sl_logprobs_t *logprobs;
};

sl_status_t sl_prefill_create(const sl_prefill_options_t *options, sl_prefill_t **prefill_p)
{
    sl_prefill_t *prefill = calloc(1, sizeof(*prefill));
    if (prefill == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "prefill: out of memory");
    }
    prefill->options = *options;
    prefill->rows = calloc(SL_PREFILL_LOGIT_ROWS, sizeof(*prefill->rows));
    prefill->targets = calloc(SL_PREFILL_LOGIT_ROWS, sizeof(*prefill->targets));
    prefill->tokens = calloc(SL_PREFILL_LOGIT_ROWS, sizeof(*prefill->tokens));
    prefill->rules = calloc(SL_PREFILL_LOGIT_ROWS, sizeof(*prefill->rules));
    prefill->logprobs = calloc(SL_PREFILL_LOGIT_ROWS, sizeof(*prefill->logprobs));
    sl_status_t status = SL_OK;
    if (prefill->rows == NULL || prefill->targets == NULL || prefill->tokens == NULL ||
        prefill->rules == NULL || prefill->logprobs == NULL) {
        status = sl_error(SL_ERR_NO_MEMORY, "prefill: out of memory");
    }
    if (status != SL_OK) {
        sl_prefill_destroy(prefill);
        return status;
    }
    *prefill_p = prefill;
    return SL_OK;
}

void sl_prefill_destroy(sl_prefill_t *prefill)
{
    if (prefill == NULL) {
        return;
    }
    sl_prefill_requests_destroy(prefill->requests);
    free(prefill->rows);
    free(prefill->targets);
    free(prefill->tokens);
    free(prefill->rules);
    free(prefill->logprobs);
    free(prefill);
}

sl_status_t sl_prefill_attach(void *self, sl_rank_t *rank)
{
    sl_prefill_t *prefill = self;
    sl_prefill_requests_params_t params = {
        .page_count = sl_rank_page_count(rank),
        .token_budget = (uint32_t)prefill->options.token_budget,
        .starve_us = prefill->options.starve_ms * 1000,
    };
    prefill->rank = rank;
    prefill->push_layers = (uint32_t)prefill->options.push_layers;
    if (prefill->push_layers == 0) {
        prefill->push_layers = sl_prefill_push_layers(sl_rank_config(rank)->num_hidden_layers,
                                                      sl_model_page_bytes(sl_rank_model(rank)));
    }
    return sl_prefill_requests_create(&params, &prefill->requests);
}

static sl_status_t prefill_use_pages(void *self, uint32_t page_count)
{
    sl_prefill_t *prefill = self;
    return sl_prefill_requests_use_pages(prefill->requests, page_count);
}

/* Gives a request up: the transfer engine's ABORTED ends it. */
static sl_status_t end_request(sl_prefill_t *prefill, sl_prefill_request_t *request)
{
    sl_prefill_requests_end(prefill->requests, request);
    return sl_transfer_abort(sl_rank_transfer(prefill->rank), request->attempt);
}

static sl_status_t refuse(sl_prefill_t *prefill, uint64_t attempt, sl_status_t status)
{
    SL_TRY(sl_rank_post_failed(prefill->rank, attempt, status, sl_error_text()));
    SL_TRY(sl_rank_post_attempt(prefill->rank, SL_MSG_RELEASED, attempt));
    /* Never opened, but the decode rank's grant still wants its release. */
    return sl_transfer_abort(sl_rank_transfer(prefill->rank), attempt);
}

/* The router has checked all this; a rank does not take its word for what it would crash on. */
static sl_status_t check_prefill(const sl_prefill_t *prefill, const sl_msg_prefill_t *message)
{
    const sl_model_config_t *config = sl_rank_config(prefill->rank);
    SL_TRY(sl_rule_check(config, message->attempt, message->token_count, &message->sampling));
    for (size_t i = 0; i < message->token_count; i++) {
        if (message->tokens[i] < 0 || (uint32_t)message->tokens[i] >= config->vocab_size) {
            return sl_error(SL_ERR_INVALID,
                            "prefill.tokens[%zu]: expected an id below %u, found %d", i,
                            config->vocab_size, message->tokens[i]);
        }
    }
    return SL_OK;
}

static sl_status_t on_prefill(sl_prefill_t *prefill, const sl_msg_prefill_t *message)
{
    sl_rank_id_t targets[SL_GROUP_RANKS_MAX];
    uint32_t count = 0;
    sl_prefill_request_t *request = NULL;
    sl_msg_prefill_t copy = *message; /* whose tokens the request takes over */
    sl_transfer_t *transfer = sl_rank_transfer(prefill->rank);
    if (sl_prefill_requests_find(prefill->requests, message->attempt) != NULL) {
        sl_log_warn("ignored a second prefill of attempt %llu",
                    (unsigned long long)message->attempt);
        return SL_OK;
    }
    sl_status_t status = check_prefill(prefill, message);
    if (status == SL_OK) {
        status = sl_peers_targets(sl_rank_peers(prefill->rank), &message->decode, targets, &count);
    }
    if (status != SL_OK) {
        return refuse(prefill, message->attempt, status);
    }
    copy.tokens = malloc(message->token_count * sizeof(*copy.tokens));
    if (copy.tokens == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "prompt of %zu tokens: out of memory",
                        message->token_count);
    }
    memcpy(copy.tokens, message->tokens, message->token_count * sizeof(*copy.tokens));
    status = sl_prefill_requests_add(prefill->requests, &copy, sl_now_us(), &request);
    free(copy.tokens); /* NULL when taken over */
    if (status != SL_OK && sl_status_scope(status) == SL_SCOPE_REQUEST) {
        return refuse(prefill, message->attempt, status);
    }
    SL_TRY(status);
    return sl_transfer_open(transfer, message->attempt, targets, count);
}

static sl_status_t on_cancel(sl_prefill_t *prefill, uint64_t attempt)
{
    sl_prefill_request_t *request = sl_prefill_requests_find(prefill->requests, attempt);
    if (request == NULL || request->state == SL_PREFILL_ENDING) {
        return SL_OK; /* its end is under way or told already */
    }
    if (request->state == SL_PREFILL_SENDING) {
        /* It may be waiting for a grant that will never come. */
        return sl_transfer_abort(sl_rank_transfer(prefill->rank), attempt);
    }
    return end_request(prefill, request);
}

static sl_status_t prefill_on_message(void *self, const sl_message_t *message)
{
    sl_prefill_t *prefill = self;
    switch (message->type) {
    case SL_MSG_PREFILL:
        return on_prefill(prefill, &message->prefill);
    case SL_MSG_CANCEL_ATTEMPT:
        return on_cancel(prefill, message->attempt.attempt);
    default:
        sl_log_warn("ignored a %s message: this is a prefill rank",
                    sl_message_type_name(message->type));
        return SL_OK;
    }
}

static sl_status_t prefill_on_event(void *self, const sl_transfer_event_t *event)
{
    sl_prefill_t *prefill = self;
    sl_prefill_request_t *request = sl_prefill_requests_find(prefill->requests, event->attempt);
    if (request == NULL) {
        return SL_OK; /* refused on arrival */
    }
    if (event->type == SL_TRANSFER_FAILED) {
        SL_TRY(sl_rank_post_failed(prefill->rank, event->attempt, event->status, event->text));
        if (request->state != SL_PREFILL_SENDING && request->state != SL_PREFILL_ENDING) {
            sl_prefill_requests_end(prefill->requests, request);
        }
    }
    sl_prefill_requests_remove(prefill->requests, request);
    return sl_rank_post_attempt(prefill->rank, SL_MSG_RELEASED, event->attempt);
}

static bool prefill_has_work(void *self)
{
    sl_prefill_t *prefill = self;
    return sl_prefill_requests_ready(prefill->requests, sl_now_us());
}

static void prefill_plan(void *self, sl_step_t *step)
{
    sl_prefill_t *prefill = self;
    sl_prefill_requests_plan(prefill->requests, sl_now_us(), step);
}

/* Pushes the pages the step's rows lie in, for finished layers. Pieces begin at page boundaries. */
static sl_status_t push_layers(void *arg, uint32_t begin, uint32_t end)
{
    sl_prefill_t *prefill = arg;
    uint32_t count;
    sl_prefill_request_t **in_step = sl_prefill_requests_in_step(prefill->requests, &count);
    for (uint32_t i = 0; i < count; i++) {
        const sl_prefill_request_t *request = in_step[i];
        uint32_t first = request->done_count / SL_PAGE_TOKENS;
        uint32_t last = sl_pages_for(request->done_count + request->step_count, SL_PAGE_TOKENS);
        SL_TRY(sl_transfer_push(sl_rank_transfer(prefill->rank), request->attempt, first,
                                request->pages + first, last - first, begin, end));
    }
    return SL_OK;
}

static void layer_done(void *arg)
{
    sl_prefill_t *prefill = arg;
    sl_rank_progress(prefill->rank);
}

static sl_status_t prefill_forward(void *self, sl_model_t *model, const sl_batch_t *batch)
{
    sl_prefill_t *prefill = self;
    sl_prefill_forward_t forward = {
        .mla = (sl_mla_prefill_t)prefill->options.mla,
        .layers = sl_rank_config(prefill->rank)->num_hidden_layers,
        .push_layers = prefill->push_layers,
        .layer_done = layer_done,
        .layers_done = push_layers,
        .arg = prefill,
    };
    return sl_prefill_forward(&forward, model, batch);
}

/* Logprobs of the prompt tokens whose logits this step gives: row i predicts token i + 1. The first
 * prompt token has no prefix and is sent as an entry without a value. */
static sl_status_t post_prompt_logprobs(sl_prefill_t *prefill, const sl_step_t *step,
                                        const sl_prefill_request_t *request)
{
    sl_model_t *model = sl_rank_model(prefill->rank);
    int32_t row0 = sl_step_first_row(step, request->step_index);
    uint32_t end = request->done_count + request->step_count;
    uint32_t position = request->done_count; /* of the row whose logits come next */
    if (end == request->token_count) {
        end--; /* the last row predicts the first output */
    }
    sl_message_t message = {
        .type = SL_MSG_PROMPT_LOGPROBS,
        .prompt_logprobs = {.attempt = request->attempt, .entries = prefill->logprobs},
    };
    if (position == 0) {
        prefill->logprobs[0] = (sl_logprobs_t){.logprob = NAN};
        message.prompt_logprobs.entry_count = 1;
        SL_TRY(sl_rank_post(prefill->rank, &message));
    }
    while (position < end) {
        float *logits;
        uint32_t count = end - position;
        count = count < SL_PREFILL_LOGIT_ROWS ? count : SL_PREFILL_LOGIT_ROWS;
        for (uint32_t i = 0; i < count; i++) {
            prefill->rows[i] = row0 + (int32_t)(position - request->done_count + i);
            prefill->targets[i] = request->tokens[position + i + 1];
        }
        sl_rank_progress(prefill->rank);
        SL_TRY(sl_model_logits(model, prefill->rows, count, &logits));
        SL_TRY(sl_model_token_logprobs(model, logits, prefill->targets, count,
                                       (uint32_t)request->sampling.prompt_logprobs,
                                       prefill->logprobs));
        message.prompt_logprobs.index = position + 1;
        message.prompt_logprobs.entry_count = count;
        SL_TRY(sl_rank_post(prefill->rank, &message));
        position += count;
    }
    return SL_OK;
}

/* The client's first token, then the latents' commit; or the end, if one token was all. */
static sl_status_t post_first_token(sl_prefill_t *prefill, sl_prefill_request_t *request,
                                    int32_t token, const sl_logprobs_t *logprobs)
{
    const sl_sampling_t *sampling = &request->sampling;
    sl_finish_t finish = sl_rule_finish(sl_rank_config(prefill->rank), sampling, 0, token);
    prefill->tokens_out++;
    SL_TRY(sl_rank_post_token(prefill->rank, request->attempt, 0, token,
                              sampling->logprobs >= 0 ? logprobs : NULL, finish));
    if (finish != SL_FINISH_NONE) {
        return sl_transfer_abort(sl_rank_transfer(prefill->rank), request->attempt);
    }
    sl_commit_t commit = {
        .page_count = request->page_count,
        .prompt_len = request->token_count,
        .first_token = token,
        .seed = sampling->seed,
    };
    return sl_transfer_commit(sl_rank_transfer(prefill->rank), request->attempt, &commit);
}

/* First tokens of up to SL_PREFILL_LOGIT_ROWS requests whose prompt the step completed. */
static sl_status_t sample_first(sl_prefill_t *prefill, const sl_step_t *step,
                                sl_prefill_request_t *const *requests, uint32_t count)
{
    sl_model_t *model = sl_rank_model(prefill->rank);
    const sl_model_config_t *config = sl_rank_config(prefill->rank);
    float *logits;
    for (uint32_t i = 0; i < count; i++) {
        prefill->rows[i] = sl_step_last_row(step, requests[i]->step_index);
        sl_rule_make(config, &requests[i]->sampling, 0, &prefill->rules[i]);
    }
    SL_TRY(sl_model_logits(model, prefill->rows, count, &logits));
    SL_TRY(
        sl_model_sample(model, logits, prefill->rules, count, prefill->tokens, prefill->logprobs));
    for (uint32_t i = 0; i < count; i++) {
        SL_TRY(post_first_token(prefill, requests[i], prefill->tokens[i], &prefill->logprobs[i]));
    }
    return SL_OK;
}

static sl_status_t prefill_finish(void *self, sl_step_t *step)
{
    sl_prefill_t *prefill = self;
    sl_prefill_request_t *complete[SL_PREFILL_LOGIT_ROWS];
    uint32_t count, complete_count = 0;
    sl_prefill_request_t **in_step = sl_prefill_requests_in_step(prefill->requests, &count);
    for (uint32_t i = 0; i < count; i++) {
        if (in_step[i]->sampling.prompt_logprobs >= 0) {
            SL_TRY(post_prompt_logprobs(prefill, step, in_step[i]));
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        if (in_step[i]->done_count + in_step[i]->step_count == in_step[i]->token_count) {
            complete[complete_count++] = in_step[i];
        }
        if (complete_count > 0 && (complete_count == SL_PREFILL_LOGIT_ROWS || i + 1 == count)) {
            SL_TRY(sample_first(prefill, step, complete, complete_count));
            complete_count = 0;
        }
    }
    sl_prefill_requests_advance(prefill->requests);
    return SL_OK;
}

static void prefill_figures(void *self, sl_msg_heartbeat_t *figures)
{
    const sl_prefill_t *prefill = self;
    figures->pages_free =
        sl_pages_count(sl_prefill_requests_pages(prefill->requests), SL_PAGE_FREE);
    figures->running = sl_prefill_requests_count(prefill->requests);
    figures->queued_tokens = sl_prefill_requests_queued_tokens(prefill->requests);
    figures->tokens_out = prefill->tokens_out;
}

const sl_rank_ops_t sl_prefill_rank_ops = {
    .use_pages = prefill_use_pages,
    .on_message = prefill_on_message,
    .on_event = prefill_on_event,
    .has_work = prefill_has_work,
    .plan = prefill_plan,
    .forward = prefill_forward,
    .finish = prefill_finish,
    .figures = prefill_figures,
};
