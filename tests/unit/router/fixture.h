/*
 * A router without sockets for the unit tests: a registry and a request table over a sink that
 * records every message, and short ways to act as a rank or a client. Time is a variable, moved by
 * the tests.
 */
#ifndef SL_TESTS_ROUTER_FIXTURE_H
#define SL_TESTS_ROUTER_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "router/requests.h"

#define FIXTURE_SENT_MAX 4096

typedef struct {
    bool to_client;
    sl_peer_key_t key;
    sl_message_t message; /* a deep copy */
} sent_t;

typedef struct {
    sl_registry_t *registry;
    sl_requests_t *requests;
    sent_t sent[FIXTURE_SENT_MAX];
    size_t sent_count;
    sl_peer_key_t dead[16]; /* sends to these fail */
    size_t dead_count;
    uint64_t now_us;
    uint64_t next_incarnation;
} fixture_t;

static inline sl_peer_key_t key_of(const char *name)
{
    sl_peer_key_t key = {.size = (uint8_t)strlen(name)};
    memcpy(key.bytes, name, strlen(name));
    return key;
}

static inline sl_status_t record(fixture_t *fixture, bool to_client, const sl_peer_key_t *key,
                                 const sl_message_t *message)
{
    for (size_t i = 0; i < fixture->dead_count; i++) {
        if (sl_peer_key_same(&fixture->dead[i], key)) {
            return SL_ERR_UNREACHABLE;
        }
    }
    assert_true(fixture->sent_count < FIXTURE_SENT_MAX);
    sent_t *sent = &fixture->sent[fixture->sent_count++];
    sent->to_client = to_client;
    sent->key = *key;
    assert_int_equal(sl_message_copy(message, &sent->message), SL_OK);
    return SL_OK;
}

static inline sl_status_t record_client(void *arg, const sl_peer_key_t *key,
                                        const sl_message_t *message)
{
    return record(arg, true, key, message);
}

static inline sl_status_t record_rank(void *arg, const sl_peer_key_t *key,
                                      const sl_message_t *message)
{
    return record(arg, false, key, message);
}

static inline void hook_lost(void *arg, sl_rank_t *rank, bool gone, const char *reason)
{
    sl_requests_rank_lost(((fixture_t *)arg)->requests, rank, gone, reason);
}

static inline void forget_sent(fixture_t *fixture)
{
    for (size_t i = 0; i < fixture->sent_count; i++) {
        sl_message_destroy(&fixture->sent[i].message);
    }
    fixture->sent_count = 0;
}

static inline int fixture_setup(void **state)
{
    static const sl_sink_ops_t ops = {.to_client = record_client, .to_rank = record_rank};
    fixture_t *fixture = calloc(1, sizeof(*fixture));
    assert_non_null(fixture);
    fixture->now_us = 1000000;
    fixture->next_incarnation = 100;
    sl_sink_t sink = {.ops = &ops, .arg = fixture};
    sl_registry_params_t registry = {.heartbeat_ms = 1000,
                                     .dead_ms = 5000,
                                     .stuck_ms = 30000,
                                     .lease_ms = 5000,
                                     .max_ranks = 64,
                                     .sink = sink,
                                     .rank_lost = hook_lost,
                                     .arg = fixture};
    assert_int_equal(sl_registry_create(&registry, fixture->now_us, &fixture->registry), SL_OK);
    sl_requests_params_t requests = {.registry = fixture->registry,
                                     .sink = sink,
                                     .max_clients = 3,
                                     .max_waiting = 8,
                                     .max_waiting_tokens = 4000,
                                     .starve_ms = 2000,
                                     .place_timeout_ms = 30000,
                                     .queue_timeout_ms = 600000,
                                     .silence_ms = 600000,
                                     .hash_seed = 7,
                                     .first_attempt = 1000};
    assert_int_equal(sl_requests_create(&requests, &fixture->requests), SL_OK);
    *state = fixture;
    return 0;
}

static inline int fixture_teardown(void **state)
{
    fixture_t *fixture = *state;
    forget_sent(fixture);
    sl_requests_destroy(fixture->requests);
    sl_registry_destroy(fixture->registry);
    free(fixture);
    return 0;
}

/* ---- looking at what was sent ---- */

/* The nth message of a type to a key (or to anyone: NULL), or NULL. */
__attribute__((noinline, unused)) static sl_message_t *sent_to(fixture_t *fixture, const char *name,
                                                               sl_message_type_t type, size_t nth)
{
    for (size_t i = 0; i < fixture->sent_count; i++) {
        sl_peer_key_t key = key_of(name != NULL ? name : "");
        if (fixture->sent[i].message.type == type &&
            (name == NULL || sl_peer_key_same(&fixture->sent[i].key, &key)) && nth-- == 0) {
            return &fixture->sent[i].message;
        }
    }
    return NULL;
}

static inline size_t sent_count(fixture_t *fixture, const char *name, sl_message_type_t type)
{
    size_t count = 0;
    while (sent_to(fixture, name, type, count) != NULL) {
        count++;
    }
    return count;
}

/* ---- acting ---- */

static inline void unplug(fixture_t *fixture, const char *name)
{
    assert_true(fixture->dead_count < 16);
    fixture->dead[fixture->dead_count++] = key_of(name);
}

static inline sl_message_t hello_of(sl_pool_t pool, uint32_t group, uint32_t rank, uint32_t tp,
                                    uint64_t incarnation)
{
    sl_message_t message = {.type = SL_MSG_HELLO};
    message.hello = (sl_msg_hello_t){.rank = {pool, group, rank, incarnation},
                                     .tp = tp,
                                     .model = "tiny",
                                     .layout = "bf16, 4 layers",
                                     .layout_hash = 42,
                                     .vocab_size = 1000,
                                     .max_model_len = 4096,
                                     .page_tokens = 64,
                                     .pages_total = 20};
    return message;
}

/* Sends a hello as the connection `name`; takes the message. */
static inline void say_hello(fixture_t *fixture, const char *name, sl_message_t message)
{
    sl_peer_key_t key = key_of(name);
    uint8_t *address = malloc(4);
    assert_non_null(address);
    memcpy(address, "addr", 4);
    message.hello.transfer_address = (sl_bytes_t){address, 4};
    sl_registry_hello(fixture->registry, &key, &message, fixture->now_us);
    sl_message_destroy(&message);
}

static inline sl_rank_t *rank_of(fixture_t *fixture, const char *name)
{
    sl_peer_key_t key = key_of(name);
    return sl_registry_find(fixture->registry, &key);
}

/* A ready group of one rank behind the connection `name`. */
static inline sl_rank_t *join(fixture_t *fixture, const char *name, sl_pool_t pool, uint32_t group)
{
    say_hello(fixture, name, hello_of(pool, group, 0, 1, fixture->next_incarnation++));
    sl_rank_t *rank = rank_of(fixture, name);
    assert_non_null(rank);
    sl_registry_ready(fixture->registry, rank);
    return rank;
}

static inline void run_turn(fixture_t *fixture)
{
    sl_registry_settle(fixture->registry, fixture->now_us);
    sl_requests_settle(fixture->requests);
    sl_requests_schedule(fixture->requests, fixture->now_us);
    sl_registry_settle(fixture->registry, fixture->now_us);
    sl_requests_settle(fixture->requests);
}

/* Moves the time and runs the timers, without holding it against silent ranks. */
static inline void advance_ms(fixture_t *fixture, uint64_t ms)
{
    fixture->now_us += ms * 1000;
    sl_requests_tick(fixture->requests, fixture->now_us);
    run_turn(fixture);
}

static inline void generate(fixture_t *fixture, const char *client, const char *id,
                            size_t prompt_tokens, uint32_t max_tokens)
{
    sl_peer_key_t key = key_of(client);
    sl_message_t message = {.type = SL_MSG_GENERATE};
    snprintf(message.generate.id, sizeof(message.generate.id), "%s", id);
    message.generate.tokens = calloc(prompt_tokens + 1, sizeof(int32_t));
    assert_non_null(message.generate.tokens);
    message.generate.token_count = prompt_tokens;
    message.generate.sampling = (sl_sampling_t){
        .top_p = 1, .max_tokens = max_tokens, .logprobs = -1, .prompt_logprobs = -1};
    sl_requests_generate(fixture->requests, &key, &message, fixture->now_us);
    sl_message_destroy(&message);
    run_turn(fixture);
}

static inline void cancel(fixture_t *fixture, const char *client, const char *id)
{
    sl_peer_key_t key = key_of(client);
    sl_requests_cancel(fixture->requests, &key, id);
    run_turn(fixture);
}

static inline void say_tokens(fixture_t *fixture, const char *name, uint64_t attempt,
                              uint32_t index, size_t count, sl_finish_t finish)
{
    sl_message_t message = {.type = SL_MSG_TOKENS};
    message.tokens.attempt = attempt;
    message.tokens.index = index;
    message.tokens.tokens = malloc(count * sizeof(int32_t));
    assert_non_null(message.tokens.tokens);
    for (size_t i = 0; i < count; i++) {
        message.tokens.tokens[i] = (int32_t)(index + i);
    }
    message.tokens.token_count = count;
    message.tokens.finish = finish;
    sl_requests_tokens(fixture->requests, rank_of(fixture, name), &message, fixture->now_us);
    sl_message_destroy(&message);
    run_turn(fixture);
}

static inline void say_released(fixture_t *fixture, const char *name, uint64_t attempt)
{
    sl_requests_released(fixture->requests, rank_of(fixture, name), attempt);
    run_turn(fixture);
}

static inline void say_no_pages(fixture_t *fixture, const char *name, uint64_t attempt)
{
    sl_requests_no_pages(fixture->requests, rank_of(fixture, name), attempt, fixture->now_us);
    run_turn(fixture);
}

/* The attempt id of the nth prefill message to a rank. */
static inline uint64_t attempt_of(fixture_t *fixture, const char *prefill, size_t nth)
{
    sl_message_t *message = sent_to(fixture, prefill, SL_MSG_PREFILL, nth);
    assert_non_null(message);
    return message->prefill.attempt;
}

static inline sl_requests_counts_t counts(const fixture_t *fixture)
{
    return sl_requests_counts(fixture->requests);
}

#endif
