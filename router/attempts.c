/*
 * The ranks' side: starting attempts, their tokens, and the account of what they hold.
 *
 * Two sockets carry one stream. The prefill rank sends output position 0, the decode rank the rest,
 * and nothing orders one after the other on their way here: decode messages that come early are
 * held, in order, until position 0 is there. After that every position must be the next one; a gap
 * or a repeat means a rank is wrong, and the request fails rather than show it to the client.
 *
 * What an attempt holds on a rank is accounted from the moment it is sent until that rank says
 * `released` (decode: or `no_pages`), or is lost. A rank alone knows when a peer's writes have
 * ended, so nothing here is given back on a timer.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "router/requests_internal.h"

#define HELD_MAX 1024u /* early decode messages of one attempt */
#define LEAK_WARN_US (60u * 1000000u)

static bool attempt_has_id(const sl_map_node_t *node, const void *key)
{
    return ((const sl_attempt_t *)node)->id == *(const uint64_t *)key;
}

static uint64_t attempt_hash(uint64_t id)
{
    return sl_map_hash(&id, sizeof(id), 0);
}

static sl_side_t *side_find(const sl_requests_t *requests, const sl_rank_t *rank, uint64_t id)
{
    sl_attempt_t *attempt =
        (sl_attempt_t *)sl_map_find(&requests->attempts, attempt_hash(id), attempt_has_id, &id);
    if (attempt == NULL || attempt->sides[rank->id.pool].rank != rank) {
        return NULL;
    }
    return &attempt->sides[rank->id.pool];
}

/* ---- account ---- */

static void queue_leave(sl_attempt_t *attempt)
{
    sl_rank_t *prefill = attempt->sides[SL_POOL_PREFILL].rank;
    if (attempt->queued && prefill != NULL) {
        prefill->load.queued_tokens -= attempt->prompt_tokens;
    }
    attempt->queued = false;
}

static void side_take(sl_attempt_t *attempt, sl_pool_t pool, sl_rank_t *rank)
{
    sl_side_t *side = &attempt->sides[pool];
    side->attempt = attempt;
    side->rank = rank;
    LIST_INSERT_HEAD(&rank->sides, side, link);
    rank->load.running++;
    if (pool == SL_POOL_DECODE) {
        rank->load.pages_reserved += attempt->pages;
    } else {
        rank->load.queued_tokens += attempt->prompt_tokens;
        attempt->queued = true;
    }
}

/* Gives back what the side holds; the attempt stays. */
static void side_give(sl_requests_t *requests, sl_side_t *side)
{
    sl_attempt_t *attempt = side->attempt;
    if (side == &attempt->sides[SL_POOL_DECODE]) {
        side->rank->load.pages_reserved -= attempt->pages;
    } else {
        queue_leave(attempt);
    }
    side->rank->load.running--;
    LIST_REMOVE(side, link);
    side->rank = NULL;
    requests->schedule_needed = true;
}

static void held_drop(sl_attempt_t *attempt)
{
    while (!STAILQ_EMPTY(&attempt->held)) {
        sl_held_t *held = STAILQ_FIRST(&attempt->held);
        STAILQ_REMOVE_HEAD(&attempt->held, link);
        sl_message_destroy(&held->message);
        free(held);
    }
    attempt->held_count = 0;
}

void sl_attempt_free(sl_requests_t *requests, sl_attempt_t *attempt)
{
    SL_ASSERT(attempt->request == NULL);
    held_drop(attempt);
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        if (attempt->sides[pool].rank != NULL) {
            side_give(requests, &attempt->sides[pool]);
        }
    }
    sl_map_remove(&requests->attempts, &attempt->node);
    TAILQ_REMOVE(&requests->attempt_list, attempt, link);
    free(attempt);
}

/* Frees the attempt when nobody has to do with it any more. */
static void attempt_drop_if_over(sl_requests_t *requests, sl_attempt_t *attempt)
{
    if (attempt->request == NULL && attempt->sides[SL_POOL_PREFILL].rank == NULL &&
        attempt->sides[SL_POOL_DECODE].rank == NULL) {
        sl_attempt_free(requests, attempt);
    }
}

void sl_attempt_detach(sl_attempt_t *attempt)
{
    held_drop(attempt);
    queue_leave(attempt);
    attempt->request->attempt = NULL;
    attempt->request = NULL;
}

/* ---- starting and giving up ---- */

static void send_prefill(sl_requests_t *requests, const sl_attempt_t *attempt, sl_rank_t *prefill,
                         const sl_rank_t *decode)
{
    const sl_msg_generate_t *generate = &attempt->request->generate.generate;
    sl_message_t message = {
        .type = SL_MSG_PREFILL,
        .prefill = {.attempt = attempt->id,
                    .decode = decode->id,
                    .tokens = generate->tokens,
                    .token_count = generate->token_count,
                    .sampling = generate->sampling},
    };
    sl_registry_send(requests->params.registry, prefill, &message);
}

static void send_reserve(sl_requests_t *requests, const sl_attempt_t *attempt, sl_rank_t *decode,
                         const sl_rank_t *prefill)
{
    const sl_msg_generate_t *generate = &attempt->request->generate.generate;
    sl_message_t message = {
        .type = SL_MSG_RESERVE,
        .reserve = {.attempt = attempt->id,
                    .prefill = prefill->id,
                    .prompt_len = (uint32_t)generate->token_count,
                    .sampling = generate->sampling},
    };
    sl_registry_send(requests->params.registry, decode, &message);
}

sl_status_t sl_attempt_start(sl_requests_t *requests, sl_request_t *request, sl_rank_t *prefill,
                             sl_rank_t *decode, uint64_t pages, uint64_t now_us)
{
    sl_attempt_t *attempt = calloc(1, sizeof(*attempt));
    if (attempt == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "no memory for an attempt");
    }
    attempt->id = requests->next_attempt++;
    attempt->request = request;
    attempt->pages = pages;
    attempt->prompt_tokens = request->generate.generate.token_count;
    attempt->heard_us = now_us;
    STAILQ_INIT(&attempt->held);
    sl_map_add(&requests->attempts, &attempt->node, attempt_hash(attempt->id));
    TAILQ_INSERT_TAIL(&requests->attempt_list, attempt, link);
    side_take(attempt, SL_POOL_PREFILL, prefill);
    side_take(attempt, SL_POOL_DECODE, decode);
    request->attempt = attempt;
    send_reserve(requests, attempt, decode, prefill);
    send_prefill(requests, attempt, prefill, decode);
    return SL_OK;
}

static void send_cancel(sl_requests_t *requests, sl_rank_t *rank, uint64_t id)
{
    sl_message_t message = {.type = SL_MSG_CANCEL_ATTEMPT, .attempt = {.attempt = id}};
    sl_registry_send(requests->params.registry, rank, &message);
}

void sl_attempt_cancel(sl_requests_t *requests, sl_attempt_t *attempt)
{
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        sl_side_t *side = &attempt->sides[pool];
        if (side->rank != NULL && !side->cancel_sent) {
            side->cancel_sent = true;
            send_cancel(requests, side->rank, attempt->id);
        }
    }
}

void sl_request_attempt_lost(sl_requests_t *requests, sl_request_t *request, const char *code,
                             const char *reason)
{
    sl_attempt_t *attempt = request->attempt;
    sl_attempt_cancel(requests, attempt);
    sl_request_fail(requests, request, code, reason);
    attempt_drop_if_over(requests, attempt);
}

/* A rank has broken the rules of a stream: its fault, and worth an error line. */
__attribute__((format(printf, 4, 5))) static void attempt_broken(sl_requests_t *requests,
                                                                 sl_attempt_t *attempt,
                                                                 const sl_rank_t *rank,
                                                                 const char *format, ...)
{
    char detail[256], name[32], text[384];
    va_list args;
    va_start(args, format);
    vsnprintf(detail, sizeof(detail), format, args);
    va_end(args);
    snprintf(text, sizeof(text), "%s broke the stream of attempt %" PRIu64 ": %s",
             sl_rank_name(&rank->id, name), attempt->id, detail);
    sl_status_t status = sl_error(SL_ERR_DESYNC, "%s", text);
    sl_request_attempt_lost(requests, attempt->request, sl_status_name(status), text);
}

/* ---- streams ---- */

/* Sends on what the client has not seen yet and ends the request on a finish. False: the request
 * is over, one way or the other. */
static bool deliver(sl_requests_t *requests, sl_attempt_t *attempt, const sl_rank_t *rank,
                    const sl_msg_tokens_t *tokens)
{
    sl_request_t *request = attempt->request;
    uint64_t max_tokens = request->generate.generate.sampling.max_tokens;
    uint64_t end = (uint64_t)tokens->index + tokens->token_count;
    if (tokens->index != attempt->next_index || end > max_tokens) {
        attempt_broken(requests, attempt, rank,
                       "positions %u to %" PRIu64 ", expected %" PRIu64
                       " next and max_tokens %" PRIu64 " in all",
                       tokens->index, end - 1, attempt->next_index, max_tokens);
        return false;
    }
    attempt->next_index = end;
    if (end > request->output_count) {
        /* A second attempt computes again what the first has already shown. */
        size_t seen = request->output_count - tokens->index;
        sl_message_t event = {
            .type = SL_MSG_TOKENS,
            .tokens = {.index = tokens->index + (uint32_t)seen,
                       .tokens = tokens->tokens + seen,
                       .token_count = tokens->token_count - seen,
                       .logprobs = tokens->logprobs != NULL ? tokens->logprobs + seen : NULL,
                       .finish = tokens->finish},
        };
        request->output_count = end;
        sl_request_event(requests, request, &event);
    } else if (tokens->finish != SL_FINISH_NONE) {
        attempt_broken(requests, attempt, rank,
                       "finished at %" PRIu64 " tokens, but %" PRIu64 " were sent before", end,
                       request->output_count);
        return false;
    }
    if (tokens->finish != SL_FINISH_NONE) {
        requests->counts.finished++;
        sl_request_end(requests, request);
        return false;
    }
    return true;
}

static void hold_back(sl_requests_t *requests, sl_attempt_t *attempt, const sl_rank_t *rank,
                      sl_message_t *message)
{
    if (attempt->held_count >= HELD_MAX) {
        attempt_broken(requests, attempt, rank,
                       "%u messages and still no first token from the prefill rank",
                       attempt->held_count);
        return;
    }
    sl_held_t *held = malloc(sizeof(*held));
    if (held == NULL) {
        attempt_broken(requests, attempt, rank, "no memory to hold its message back");
        return;
    }
    held->message = *message; /* its arrays move here */
    memset(message, 0, sizeof(*message));
    STAILQ_INSERT_TAIL(&attempt->held, held, link);
    attempt->held_count++;
}

static void deliver_held(sl_requests_t *requests, sl_attempt_t *attempt, const sl_rank_t *decode)
{
    bool open = true;
    while (open && !STAILQ_EMPTY(&attempt->held)) {
        sl_held_t *held = STAILQ_FIRST(&attempt->held);
        STAILQ_REMOVE_HEAD(&attempt->held, link);
        attempt->held_count--;
        /* `held` is out of the list now: when the request ends here the rest is dropped, not it. */
        open = deliver(requests, attempt, decode, &held->message.tokens);
        sl_message_destroy(&held->message);
        free(held);
    }
}

/* Nobody is left to finish the request. A decode rank alone may release before the client has been
 * told why: the reason, a finish or a failure, then comes from the prefill rank on its own socket,
 * and before that rank's `released`. */
static void check_sides(sl_requests_t *requests, sl_attempt_t *attempt, const sl_rank_t *rank)
{
    bool decoding = attempt->next_index > 0 && attempt->sides[SL_POOL_DECODE].rank != NULL;
    if (attempt->request != NULL && attempt->sides[SL_POOL_PREFILL].rank == NULL && !decoding) {
        attempt_broken(requests, attempt, rank, "released after %" PRIu64 " tokens, unfinished",
                       attempt->next_index);
    }
}

static void first_token(sl_requests_t *requests, sl_attempt_t *attempt, sl_rank_t *rank,
                        const sl_msg_tokens_t *tokens)
{
    if (!deliver(requests, attempt, rank, tokens)) {
        return;
    }
    queue_leave(attempt);
    requests->schedule_needed = true;
    /* The decode rank may have released by now; its tokens still count. */
    const sl_rank_t *decode = attempt->sides[SL_POOL_DECODE].rank;
    deliver_held(requests, attempt, decode != NULL ? decode : rank);
}

/* The request an attempt's message is for, or NULL when there is none any more. A rank that works
 * on something this router does not know (it was restarted) is told to stop. */
static sl_attempt_t *attempt_for(sl_requests_t *requests, sl_rank_t *rank, uint64_t id,
                                 uint64_t now_us)
{
    sl_side_t *side = side_find(requests, rank, id);
    if (side == NULL) {
        char name[32];
        sl_log_debug("%s: works on attempt %" PRIu64 ", which is unknown",
                     sl_rank_name(&rank->id, name), id);
        send_cancel(requests, rank, id);
        return NULL;
    }
    side->attempt->heard_us = now_us;
    return side->attempt->request != NULL ? side->attempt : NULL;
}

void sl_requests_tokens(sl_requests_t *requests, sl_rank_t *rank, sl_message_t *message,
                        uint64_t now_us)
{
    const sl_msg_tokens_t *tokens = &message->tokens;
    sl_attempt_t *attempt = attempt_for(requests, rank, tokens->attempt, now_us);
    if (attempt == NULL) {
        return;
    }
    if (rank->id.pool == SL_POOL_PREFILL) {
        if (attempt->next_index > 0 || tokens->token_count != 1) {
            attempt_broken(requests, attempt, rank,
                           "%zu tokens at %u from a prefill rank, expected the first one once",
                           tokens->token_count, tokens->index);
            return;
        }
        first_token(requests, attempt, rank, tokens);
    } else if (attempt->next_index == 0) {
        hold_back(requests, attempt, rank, message);
    } else {
        deliver(requests, attempt, rank, tokens);
    }
}

void sl_requests_prompt_logprobs(sl_requests_t *requests, sl_rank_t *rank,
                                 const sl_msg_prompt_logprobs_t *piece, uint64_t now_us)
{
    sl_attempt_t *attempt = attempt_for(requests, rank, piece->attempt, now_us);
    if (attempt == NULL) {
        return;
    }
    sl_request_t *request = attempt->request;
    uint64_t end = (uint64_t)piece->index + piece->entry_count;
    if (rank->id.pool != SL_POOL_PREFILL || attempt->next_index > 0 ||
        piece->index != attempt->next_prompt_index || end > attempt->prompt_tokens) {
        attempt_broken(requests, attempt, rank,
                       "prompt_logprobs of positions %u to %" PRIu64 ", expected %" PRIu64
                       " next, before the first token and within %" PRIu64 " prompt tokens",
                       piece->index, end, attempt->next_prompt_index, attempt->prompt_tokens);
        return;
    }
    attempt->next_prompt_index = end;
    if (end > request->prompt_logprob_count) {
        size_t seen = request->prompt_logprob_count - piece->index;
        sl_message_t event = {
            .type = SL_MSG_PROMPT_LOGPROBS,
            .prompt_logprobs = {.index = piece->index + (uint32_t)seen,
                                .entries = piece->entries + seen,
                                .entry_count = piece->entry_count - seen},
        };
        request->prompt_logprob_count = end;
        sl_request_event(requests, request, &event);
    }
}

/* ---- ends ---- */

void sl_requests_failed(sl_requests_t *requests, sl_rank_t *rank, const sl_msg_failed_t *failed)
{
    sl_side_t *side = side_find(requests, rank, failed->attempt);
    if (side == NULL) {
        char name[32];
        sl_log_debug("%s: attempt %" PRIu64 ", which is unknown, failed: %s: %s",
                     sl_rank_name(&rank->id, name), failed->attempt, failed->code, failed->message);
        return;
    }
    sl_attempt_t *attempt = side->attempt;
    if (attempt->request == NULL) {
        return;
    }
    side->cancel_sent = true; /* it has given up by itself */
    if (sl_status_scope(sl_status_from_name(failed->code)) == SL_SCOPE_REQUEST) {
        sl_attempt_cancel(requests, attempt);
        sl_request_fail(requests, attempt->request, failed->code, failed->message);
    } else {
        sl_request_attempt_lost(requests, attempt->request, failed->code, failed->message);
    }
}

/* Back to where the request stood, to be tried again a little later and rather elsewhere. */
static void request_wait_again(sl_requests_t *requests, sl_request_t *request,
                               const sl_rank_t *refuser, uint64_t now_us)
{
    uint32_t doublings = request->refusals < 5 ? request->refusals : 5;
    request->refusals++;
    request->not_before_us = now_us + ((uint64_t)20000 << doublings);
    request->avoid_incarnation = refuser->id.incarnation;
    requests->counts.placed--;
    sl_waiting_add(requests, request);
}

void sl_requests_no_pages(sl_requests_t *requests, sl_rank_t *rank, uint64_t attempt_id,
                          uint64_t now_us)
{
    sl_side_t *side = side_find(requests, rank, attempt_id);
    if (side == NULL || rank->id.pool != SL_POOL_DECODE) {
        return;
    }
    sl_attempt_t *attempt = side->attempt;
    sl_request_t *request = attempt->request;
    side_give(requests, side);
    if (request != NULL) {
        sl_attempt_cancel(requests, attempt);
        sl_attempt_detach(attempt);
        request_wait_again(requests, request, rank, now_us);
    }
    attempt_drop_if_over(requests, attempt);
}

void sl_requests_released(sl_requests_t *requests, sl_rank_t *rank, uint64_t attempt_id)
{
    sl_side_t *side = side_find(requests, rank, attempt_id);
    if (side == NULL) {
        return; /* of an earlier router, or from before a lost connection */
    }
    sl_attempt_t *attempt = side->attempt;
    side_give(requests, side);
    if (attempt->request == NULL) {
        attempt_drop_if_over(requests, attempt);
    } else {
        check_sides(requests, attempt, rank);
    }
}

void sl_requests_rank_lost(sl_requests_t *requests, sl_rank_t *rank, bool gone, const char *reason)
{
    if (gone) {
        sl_holds_forget_rank(requests, rank);
    }
    while (!LIST_EMPTY(&rank->sides)) {
        sl_side_t *side = LIST_FIRST(&rank->sides);
        sl_attempt_t *attempt = side->attempt;
        if (!gone) {
            send_cancel(requests, rank, attempt->id); /* it may not know that it is over */
        }
        side_give(requests, side);
        if (attempt->request != NULL) {
            sl_request_attempt_lost(requests, attempt->request, sl_status_name(SL_ERR_UNREACHABLE),
                                    reason);
        } else {
            attempt_drop_if_over(requests, attempt);
        }
    }
    requests->schedule_needed = true;
}

/* ---- deadlines ---- */

static void check_silence(sl_requests_t *requests, sl_attempt_t *attempt, uint64_t silent_us)
{
    if (attempt->request != NULL && silent_us >= requests->params.silence_ms * 1000) {
        char text[160];
        snprintf(text, sizeof(text), "nothing was heard of attempt %" PRIu64 " for %" PRIu64 " ms",
                 attempt->id, silent_us / 1000);
        sl_request_attempt_lost(requests, attempt->request, sl_status_name(SL_ERR_TIMEOUT), text);
    } else if (attempt->request == NULL && silent_us >= LEAK_WARN_US &&
               sl_log_allowed(&requests->leak_log_us, LEAK_WARN_US)) {
        for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
            char name[32];
            const sl_rank_t *rank = attempt->sides[pool].rank;
            if (rank != NULL) {
                sl_log_warn("%s has not released attempt %" PRIu64 " %" PRIu64 " ms after its "
                            "last token",
                            sl_rank_name(&rank->id, name), attempt->id, silent_us / 1000);
            }
        }
    }
}

void sl_attempts_tick(sl_requests_t *requests, uint64_t now_us)
{
    sl_attempt_t *attempt = TAILQ_FIRST(&requests->attempt_list);
    while (attempt != NULL) {
        sl_attempt_t *next = TAILQ_NEXT(attempt, link);
        check_silence(requests, attempt, now_us - attempt->heard_us);
        attempt = next;
    }
}
