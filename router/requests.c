/*
 * The clients' side: arrival, events, cancel, and the end of a request.
 *
 * A client is remembered only while it has requests. Its connection is known to be gone when a send
 * fails; the client is then marked, and sl_requests_settle() cancels what it had, so that the
 * function that was sending still finds the tables as it left them.
 */
#include "router/requests.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "common/base/log.h"
#include "router/requests_internal.h"

/* ---- finding ---- */

typedef struct {
    const sl_client_t *client;
    const char *id;
} request_key_t;

static bool client_has_key(const sl_map_node_t *node, const void *key)
{
    return sl_peer_key_same(&((const sl_client_t *)node)->key, key);
}

static uint64_t client_hash(const sl_requests_t *requests, const sl_peer_key_t *key)
{
    return sl_map_hash(key->bytes, key->size, requests->params.hash_seed);
}

static sl_client_t *client_find(const sl_requests_t *requests, const sl_peer_key_t *key)
{
    return (sl_client_t *)sl_map_find(&requests->clients, client_hash(requests, key),
                                      client_has_key, key);
}

static bool request_has_key(const sl_map_node_t *node, const void *arg)
{
    const sl_request_t *request = (const sl_request_t *)node;
    const request_key_t *key = arg;
    return request->client == key->client && strcmp(request->generate.generate.id, key->id) == 0;
}

static uint64_t request_hash(const sl_requests_t *requests, const sl_client_t *client,
                             const char *id)
{
    return sl_map_hash(id, strlen(id), requests->params.hash_seed ^ client->node.hash);
}

static sl_request_t *request_find(const sl_requests_t *requests, const sl_peer_key_t *key,
                                  const char *id)
{
    const sl_client_t *client = client_find(requests, key);
    if (client == NULL) {
        return NULL;
    }
    return (sl_request_t *)sl_map_find(&requests->by_id, request_hash(requests, client, id),
                                       request_has_key, &(request_key_t){client, id});
}

/* ---- the table ---- */

sl_status_t sl_requests_create(const sl_requests_params_t *params, sl_requests_t **requests_p)
{
    sl_requests_t *requests = calloc(1, sizeof(*requests));
    if (requests == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "request table: no memory");
    }
    sl_status_t status = sl_map_init(&requests->clients);
    SL_TRY_GOTO(status, status, free_table);
    SL_TRY_GOTO(status, sl_map_init(&requests->by_id), free_clients);
    SL_TRY_GOTO(status, sl_map_init(&requests->attempts), free_ids);
    requests->params = *params;
    requests->next_attempt = params->first_attempt;
    requests->wake_us = UINT64_MAX;
    TAILQ_INIT(&requests->waiting);
    TAILQ_INIT(&requests->attempt_list);
    *requests_p = requests;
    return SL_OK;

free_ids:
    sl_map_cleanup(&requests->by_id);
free_clients:
    sl_map_cleanup(&requests->clients);
free_table:
    free(requests);
    return status;
}

void sl_requests_destroy(sl_requests_t *requests)
{
    if (requests == NULL) {
        return;
    }
    sl_map_node_t *node;
    while ((node = sl_map_any(&requests->by_id)) != NULL) {
        sl_request_end(requests, (sl_request_t *)node);
    }
    while (!TAILQ_EMPTY(&requests->attempt_list)) {
        sl_attempt_free(requests, TAILQ_FIRST(&requests->attempt_list));
    }
    while ((node = sl_map_any(&requests->clients)) != NULL) {
        sl_map_remove(&requests->clients, node);
        free(node);
    }
    for (int pool = 0; pool < SL_POOL_COUNT; pool++) {
        free(requests->loads[pool]);
    }
    sl_map_cleanup(&requests->attempts);
    sl_map_cleanup(&requests->by_id);
    sl_map_cleanup(&requests->clients);
    free(requests);
}

sl_requests_counts_t sl_requests_counts(const sl_requests_t *requests)
{
    sl_requests_counts_t counts = requests->counts;
    counts.attempts = requests->attempts.count;
    counts.clients = requests->clients.count;
    return counts;
}

/* ---- events ---- */

static void client_send(sl_requests_t *requests, sl_client_t *client, const sl_message_t *message)
{
    if (client->gone) {
        return;
    }
    const sl_sink_t *sink = &requests->params.sink;
    sl_status_t status = sink->ops->to_client(sink->arg, &client->key, message);
    if (status != SL_OK) {
        sl_log_debug("a client with %zu requests is gone (%s)", client->request_count,
                     sl_status_name(status));
        client->gone = true;
        requests->settle_needed = true;
    }
}

void sl_request_event(sl_requests_t *requests, sl_request_t *request, sl_message_t *message)
{
    const char *id = request->generate.generate.id;
    uint64_t seq = request->next_seq++;
    switch (message->type) {
    case SL_MSG_TOKENS:
        memcpy(message->tokens.id, id, SL_REQUEST_ID_BYTES);
        message->tokens.seq = seq;
        break;
    case SL_MSG_PROMPT_LOGPROBS:
        memcpy(message->prompt_logprobs.id, id, SL_REQUEST_ID_BYTES);
        message->prompt_logprobs.seq = seq;
        break;
    default:
        SL_ASSERT(message->type == SL_MSG_FAILED);
        memcpy(message->failed.id, id, SL_REQUEST_ID_BYTES);
        message->failed.seq = seq;
    }
    client_send(requests, request->client, message);
}

void sl_request_fail(sl_requests_t *requests, sl_request_t *request, const char *code,
                     const char *text)
{
    sl_message_t message = {.type = SL_MSG_FAILED};
    snprintf(message.failed.code, sizeof(message.failed.code), "%s", code);
    snprintf(message.failed.message, sizeof(message.failed.message), "%s", text);
    sl_request_event(requests, request, &message);
    if (strcmp(code, sl_status_name(SL_ERR_CANCELED)) == 0) {
        requests->counts.canceled++;
    } else {
        requests->counts.failed++;
        sl_log_debug("request \"%s\" failed after %" PRIu64 " tokens: %s: %s",
                     request->generate.generate.id, request->output_count, code, text);
    }
    sl_request_end(requests, request);
}

void sl_request_end(sl_requests_t *requests, sl_request_t *request)
{
    sl_client_t *client = request->client;
    if (request->attempt != NULL) {
        sl_attempt_detach(request->attempt);
        requests->counts.placed--;
    } else {
        sl_waiting_remove(requests, request);
    }
    sl_holds_release(requests, request);
    sl_map_remove(&requests->by_id, &request->node);
    TAILQ_REMOVE(&client->requests, request, client_link);
    client->request_count--;
    if (client->request_count == 0 && !client->gone) {
        sl_map_remove(&requests->clients, &client->node);
        free(client);
    }
    sl_message_destroy(&request->generate);
    free(request);
    requests->schedule_needed = true;
}

void sl_requests_reject(sl_requests_t *requests, const sl_peer_key_t *client,
                        const char *request_id, sl_status_t status, const char *text)
{
    sl_message_t message = {.type = SL_MSG_FAILED};
    if (request_find(requests, client, request_id) == NULL) {
        snprintf(message.failed.id, sizeof(message.failed.id), "%s", request_id);
    }
    snprintf(message.failed.code, sizeof(message.failed.code), "%s", sl_status_name(status));
    snprintf(message.failed.message, sizeof(message.failed.message), "%s", text);
    if (status != SL_ERR_NOT_FOUND) {
        requests->counts.refused++; /* a cancel that crossed the end of its request is no refusal */
    }
    const sl_sink_t *sink = &requests->params.sink;
    if (sink->ops->to_client(sink->arg, client, &message) != SL_OK) {
        sl_requests_client_gone(requests, client);
    }
}

/* ---- generate ---- */

static sl_status_t draw_seed(uint64_t *seed_p)
{
    uint64_t seed;
    if (getrandom(&seed, sizeof(seed), 0) != (ssize_t)sizeof(seed)) {
        return sl_error(SL_ERR_IO, "getrandom: %s", strerror(errno));
    }
    *seed_p = seed;
    return SL_OK;
}

static sl_status_t check_limits(const sl_requests_t *requests, const sl_msg_generate_t *generate)
{
    const sl_requests_params_t *params = &requests->params;
    if (requests->counts.waiting >= params->max_waiting) {
        return sl_error(SL_ERR_LIMIT,
                        "%" PRIu64 " requests are waiting, which is the limit (--max-waiting)",
                        requests->counts.waiting);
    }
    if (requests->counts.waiting_tokens + generate->token_count > params->max_waiting_tokens) {
        return sl_error(SL_ERR_LIMIT,
                        "%" PRIu64 " prompt tokens are waiting and the prompt has %zu, over the "
                        "limit of %" PRIu64 " (--max-waiting-tokens)",
                        requests->counts.waiting_tokens, generate->token_count,
                        params->max_waiting_tokens);
    }
    return SL_OK;
}

static sl_status_t client_get(sl_requests_t *requests, const sl_peer_key_t *key,
                              sl_client_t **client_p)
{
    sl_client_t *client = client_find(requests, key);
    if (client == NULL) {
        if (requests->clients.count >= requests->params.max_clients) {
            return sl_error(SL_ERR_LIMIT,
                            "%zu clients have requests, which is the limit (--max-clients)",
                            requests->clients.count);
        }
        client = calloc(1, sizeof(*client));
        if (client == NULL) {
            return sl_error(SL_ERR_NO_MEMORY, "no memory for a client");
        }
        client->key = *key;
        TAILQ_INIT(&client->requests);
        sl_map_add(&requests->clients, &client->node, client_hash(requests, key));
    }
    *client_p = client;
    return SL_OK;
}

/* Everything that can go wrong comes before the client is made, so that none is left empty. */
static sl_status_t accept_generate(sl_requests_t *requests, const sl_peer_key_t *key,
                                   sl_message_t *message, uint64_t now_us)
{
    sl_msg_generate_t *generate = &message->generate;
    if (request_find(requests, key, generate->id) != NULL) {
        return sl_error(SL_ERR_INVALID,
                        "id \"%s\" is in use by an unfinished request of this connection",
                        generate->id);
    }
    SL_TRY(sl_request_check(requests, generate));
    SL_TRY(check_limits(requests, generate));
    if (!generate->has_seed) {
        SL_TRY(draw_seed(&generate->sampling.seed));
    }
    sl_request_t *request = calloc(1, sizeof(*request));
    if (request == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "no memory for a request");
    }
    sl_client_t *client;
    sl_status_t status = client_get(requests, key, &client);
    if (status != SL_OK) {
        free(request);
        return status;
    }
    request->client = client;
    request->order = requests->next_order++;
    request->arrived_us = now_us;
    request->checked_epoch = sl_registry_cluster(requests->params.registry)->epoch;
    request->generate = *message; /* its arrays move here */
    memset(message, 0, sizeof(*message));
    sl_map_add(&requests->by_id, &request->node,
               request_hash(requests, client, request->generate.generate.id));
    TAILQ_INSERT_TAIL(&client->requests, request, client_link);
    client->request_count++;
    sl_waiting_add(requests, request);
    return SL_OK;
}

void sl_requests_generate(sl_requests_t *requests, const sl_peer_key_t *client,
                          sl_message_t *message, uint64_t now_us)
{
    sl_status_t status = accept_generate(requests, client, message, now_us);
    if (status != SL_OK) {
        sl_requests_reject(requests, client, message->generate.id, status, sl_error_text());
    }
}

/* ---- cancel ---- */

static void request_cancel(sl_requests_t *requests, sl_request_t *request, const char *text)
{
    if (request->attempt != NULL) {
        sl_attempt_cancel(requests, request->attempt);
    }
    sl_request_fail(requests, request, sl_status_name(SL_ERR_CANCELED), text);
}

void sl_requests_cancel(sl_requests_t *requests, const sl_peer_key_t *client,
                        const char *request_id)
{
    sl_request_t *request = request_find(requests, client, request_id);
    if (request == NULL) {
        char text[SL_REQUEST_ID_BYTES + 64];
        snprintf(text, sizeof(text), "id \"%s\" names no unfinished request of this connection",
                 request_id);
        sl_requests_reject(requests, client, request_id, SL_ERR_NOT_FOUND, text);
        return;
    }
    request_cancel(requests, request, "canceled by the client");
}

void sl_requests_client_gone(sl_requests_t *requests, const sl_peer_key_t *key)
{
    sl_client_t *client = client_find(requests, key);
    if (client != NULL) {
        client->gone = true;
        requests->settle_needed = true;
    }
}

static sl_client_t *find_gone(const sl_requests_t *requests)
{
    for (size_t i = 0; i < requests->clients.bucket_count; i++) {
        for (sl_map_node_t *node = requests->clients.buckets[i]; node != NULL; node = node->next) {
            if (((sl_client_t *)node)->gone) {
                return (sl_client_t *)node;
            }
        }
    }
    return NULL;
}

void sl_requests_settle(sl_requests_t *requests)
{
    sl_client_t *client;
    while (requests->settle_needed && (client = find_gone(requests)) != NULL) {
        if (client->request_count > 0) {
            sl_log_info("a client vanished with %zu unfinished requests, which are canceled",
                        client->request_count);
        }
        while (!TAILQ_EMPTY(&client->requests)) {
            request_cancel(requests, TAILQ_FIRST(&client->requests), "the client vanished");
        }
        sl_map_remove(&requests->clients, &client->node);
        free(client);
    }
    requests->settle_needed = false;
}

void sl_requests_stop(sl_requests_t *requests, const char *text)
{
    sl_map_node_t *node;
    while ((node = sl_map_any(&requests->by_id)) != NULL) {
        sl_request_t *request = (sl_request_t *)node;
        if (request->attempt != NULL) {
            sl_attempt_cancel(requests, request->attempt);
        }
        sl_request_fail(requests, request, sl_status_name(SL_ERR_UNREACHABLE), text);
    }
    sl_requests_settle(requests);
}

void sl_requests_tick(sl_requests_t *requests, uint64_t now_us)
{
    if (now_us - requests->tick_us < 200000) {
        return; /* deadlines are in seconds; walking all attempts more often buys nothing */
    }
    requests->tick_us = now_us;
    requests->schedule_needed = true; /* back-offs end and requests begin to starve */
    sl_waiting_tick(requests, now_us);
    sl_attempts_tick(requests, now_us);
}
