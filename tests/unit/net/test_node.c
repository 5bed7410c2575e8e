/* A node against the router's real socket: registration, lease, restarts and back-pressure. The
 * test plays the router's part by hand, so that it can also play a bad one. */
#include "tests/unit/net/net_helpers.h"

#include "common/net/node.h"

static uint8_t address_bytes[] = {1, 2, 3};

static sl_node_params_t node_params(const sl_server_t *server)
{
    sl_node_params_t params = {
        .router = sl_server_address(server),
        .hello = {.rank = {.pool = SL_POOL_DECODE, .group = 0, .rank = 1, .incarnation = 77},
                  .tp = 2,
                  .vocab_size = 100,
                  .transfer_address = {address_bytes, 3}},
        .register_timeout_us = DEADLINE_US,
    };
    strcpy(params.hello.model, "m/1");
    return params;
}

static sl_node_t *node_to(const sl_server_t *server)
{
    sl_node_params_t params = node_params(server);
    sl_node_t *node;
    assert_int_equal(sl_node_create(&params, &node), SL_OK);
    return node;
}

static void answer(sl_server_t *server, const sl_peer_key_t *peer, sl_message_t message)
{
    assert_int_equal(sl_server_send(server, peer, &message), SL_OK);
}

/* The next message of the wanted type; heartbeats before it are acknowledged if `ack`, and what
 * else comes before it is dropped. */
static received_t next_of(sl_server_t *server, sl_message_type_t type, bool ack)
{
    for (;;) {
        received_t got = server_next(server);
        assert_int_equal(got.status, SL_OK);
        if (got.message.type == SL_MSG_HEARTBEAT && ack) {
            answer(server, &got.sender,
                   (sl_message_t){.type = SL_MSG_HEARTBEAT_ACK,
                                  .heartbeat_ack = {got.message.heartbeat.sequence}});
        }
        if (got.message.type == type) {
            return got;
        }
        sl_message_destroy(&got.message);
    }
}

/* Takes the hello and answers it; returns the node's key. */
static sl_peer_key_t welcome(sl_server_t *server, uint64_t lease_ms)
{
    received_t got = next_of(server, SL_MSG_HELLO, false);
    assert_int_equal(got.message.hello.rank.incarnation, 77);
    assert_string_equal(got.message.hello.model, "m/1");
    assert_int_equal(got.message.hello.transfer_address.size, 3);
    sl_message_destroy(&got.message);
    answer(
        server, &got.sender,
        (sl_message_t){.type = SL_MSG_WELCOME,
                       .welcome = {.incarnation = 77, .heartbeat_ms = 20, .lease_ms = lease_ms}});
    return got.sender;
}

/* Takes what comes and acknowledges heartbeats, without blocking for long. */
static void serve(sl_server_t *server)
{
    received_t got;
    while (sl_server_receive(server, &got.sender, got.bad_id, &got.message) == SL_OK) {
        if (got.message.type == SL_MSG_HEARTBEAT) {
            answer(server, &got.sender,
                   (sl_message_t){.type = SL_MSG_HEARTBEAT_ACK,
                                  .heartbeat_ack = {got.message.heartbeat.sequence}});
        }
        sl_message_destroy(&got.message);
    }
    server_wait(server);
}

static void test_welcome_heartbeat_and_goodbye(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_t *node = node_to(server);
    sl_node_publish(node, &(sl_msg_heartbeat_t){.progress = 3,
                                                .busy = true,
                                                .pages_free = 4,
                                                .pages_quiescing = 5,
                                                .running = 6,
                                                .queued_tokens = 7,
                                                .tokens_out = 8});
    assert_false(sl_node_lease_valid(node));
    sl_peer_key_t key = welcome(server, 5000);
    assert_int_equal(sl_node_wait_welcome(node), SL_OK);
    assert_int_equal(sl_node_lease_us(node), 5000000);
    received_t got = next_of(server, SL_MSG_HEARTBEAT, true);
    assert_true(sl_peer_key_same(&got.sender, &key));
    const sl_msg_heartbeat_t *heartbeat = &got.message.heartbeat;
    assert_true(heartbeat->progress == 3 && heartbeat->busy && heartbeat->pages_free == 4);
    assert_true(heartbeat->pages_quiescing == 5 && heartbeat->running == 6);
    assert_true(heartbeat->queued_tokens == 7 && heartbeat->tokens_out == 8);
    uint64_t sequence = heartbeat->sequence;
    got = next_of(server, SL_MSG_HEARTBEAT, true);
    assert_int_equal(got.message.heartbeat.sequence, sequence + 1);
    UNTIL(sl_node_lease_valid(node), serve(server));
    assert_int_equal(sl_node_wait_welcome(node), SL_OK); /* once decided, at once */

    sl_message_t posted = {.type = SL_MSG_RELEASED, .attempt = {9}};
    assert_int_equal(sl_node_post(node, &posted), SL_OK);
    sl_node_destroy(node); /* what was posted still goes out, then the goodbye */
    got = next_of(server, SL_MSG_RELEASED, false);
    assert_int_equal(got.message.attempt.attempt, 9);
    next_of(server, SL_MSG_GOODBYE, false);
    sl_server_destroy(server);
}

static void test_refused(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_t *node = node_to(server);
    received_t got = next_of(server, SL_MSG_HELLO, false);
    sl_message_destroy(&got.message);
    sl_message_t refused = {.type = SL_MSG_REFUSED};
    strcpy(refused.refused.code, "refused");
    strcpy(refused.refused.message, "decode/0/1 is taken by incarnation 5");
    answer(server, &got.sender, refused);
    assert_int_equal(sl_node_wait_welcome(node), SL_ERR_REFUSED);
    assert_non_null(strstr(sl_error_text(), "decode/0/1 is taken by incarnation 5"));
    assert_non_null(strstr(sl_error_text(), sl_server_address(server)));
    assert_null(sl_node_take(node));
    assert_true(sl_node_group_failed(node));
    sl_node_destroy(node);
    sl_server_destroy(server);
}

/* A refusal after the first welcome reaches the engine. */
static void test_refused_later(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_t *node = node_to(server);
    sl_peer_key_t key = welcome(server, 5000);
    UNTIL(sl_node_lease_valid(node), serve(server));
    sl_message_t refused = {.type = SL_MSG_REFUSED, .refused = {.code = "stale"}};
    answer(server, &key, refused);
    sl_message_t *taken;
    UNTIL((taken = sl_node_take(node)) != NULL, serve(server));
    assert_int_equal(taken->type, SL_MSG_REFUSED);
    assert_string_equal(taken->refused.code, "stale");
    sl_node_message_free(taken);
    assert_false(sl_node_lease_valid(node));
    sl_node_destroy(node);
    sl_server_destroy(server);
}

static void test_no_router(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_params_t params = node_params(server);
    char address[64], expected[160];
    snprintf(address, sizeof(address), "%s", params.router);
    params.router = address;
    params.register_timeout_us = 100000;
    sl_server_destroy(server); /* now nobody listens there */
    sl_node_t *node;
    assert_int_equal(sl_node_create(&params, &node), SL_OK);
    assert_int_equal(sl_node_wait_welcome(node), SL_ERR_TIMEOUT);
    snprintf(expected, sizeof(expected),
             "decode/0/1: no welcome from the router at %s within 100 ms", address);
    assert_string_equal(sl_error_text(), expected);
    sl_node_destroy(node);
    params.router = "nonsense";
    assert_int_equal(sl_node_create(&params, &node), SL_ERR_IO);
    assert_non_null(strstr(sl_error_text(), "cannot connect to the router at nonsense"));
}

static bool always(void)
{
    return true;
}

static void test_stopped_while_waiting(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0); /* never answers */
    sl_node_params_t params = node_params(server);
    params.stopping = always;
    sl_node_t *node;
    assert_int_equal(sl_node_create(&params, &node), SL_OK);
    assert_int_equal(sl_node_wait_welcome(node), SL_ERR_CANCELED);
    sl_node_destroy(node);
    sl_server_destroy(server);
}

/* Hellos that are not answered are repeated; a welcome for another incarnation is none. */
static void test_hello_again(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_t *node = node_to(server);
    received_t got = next_of(server, SL_MSG_HELLO, false);
    sl_message_destroy(&got.message);
    answer(server, &got.sender,
           (sl_message_t){.type = SL_MSG_WELCOME, .welcome = {.incarnation = 76}});
    welcome(server, 5000);
    assert_int_equal(sl_node_wait_welcome(node), SL_OK);
    assert_int_equal(sl_node_stats(node).registrations, 1);
    sl_node_destroy(node);
    sl_server_destroy(server);
}

static void fail_gone(void *arg, const sl_peer_key_t *peer)
{
    (void)arg;
    fail_msg("a peer of %d bytes is gone", peer->size);
}

#define MANY 5000
#define BUSY_US 3000000u /* an engine's pause; longer than the time between usual heartbeats */

/* Small rings, both directions at once, more messages than fit anywhere: all arrive in order. */
static void test_many_messages_through_small_rings(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_params_t params = node_params(server);
    params.ring_items = 4;
    sl_node_t *node;
    assert_int_equal(sl_node_create(&params, &node), SL_OK);
    sl_peer_key_t key = welcome(server, 60000);
    for (uint64_t i = 0; i < MANY; i++) { /* fills the engine's ring and what lies before it */
        answer(server, &key, (sl_message_t){.type = SL_MSG_CANCEL_ATTEMPT, .attempt = {i}});
    }
    uint64_t posted = 0, taken = 0, arrived = 0;
    UNTIL(arrived == MANY && taken == MANY, {
        sl_message_t message = {.type = SL_MSG_RELEASED, .attempt = {posted}};
        if (posted < MANY) {
            assert_int_equal(sl_node_post(node, &message), SL_OK);
            posted++;
        }
        sl_message_t *got = sl_node_take(node);
        if (got != NULL) {
            assert_int_equal(got->attempt.attempt, taken);
            taken++;
            sl_node_message_free(got);
        }
        received_t in;
        while (sl_server_receive(server, &in.sender, in.bad_id, &in.message) == SL_OK) {
            if (in.message.type == SL_MSG_RELEASED) {
                assert_int_equal(in.message.attempt.attempt, arrived);
                arrived++;
            }
        }
        sl_server_flush(server, fail_gone, NULL);
    });
    assert_null(sl_node_take(node));
    sl_node_destroy(node);
    sl_server_destroy(server);
}

static void test_full_ring(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_params_t params = node_params(server);
    params.ring_items = 4;
    params.post_timeout_us = 50000;
    sl_node_t *node;
    sl_message_t message = {.type = SL_MSG_RELEASED};
    assert_int_equal(sl_node_create(&params, &node), SL_OK);
    for (int i = 0; i < 4; i++) { /* not welcomed: nothing leaves */
        assert_int_equal(sl_node_post(node, &message), SL_OK);
    }
    assert_int_equal(sl_node_post(node, &message), SL_ERR_TIMEOUT);
    assert_non_null(strstr(sl_error_text(), "no room to queue a released message"));
    welcome(server, 60000);
    UNTIL(sl_node_post(node, &message) == SL_OK, serve(server));
    sl_node_destroy(node);
    sl_server_destroy(server);
}

static sl_message_t tokens_message(void)
{
    static int32_t tokens[1000];
    return (sl_message_t){.type = SL_MSG_TOKENS, .tokens = {.tokens = tokens, .token_count = 1000}};
}

/* A router that stands still for longer than a post may wait, under load: tokens of attempts that
 * end with the next registration make room, what must arrive is kept. */
static void test_router_away_under_load(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_params_t params = node_params(server);
    params.ring_items = 4;
    params.post_timeout_us = 50000;
    sl_node_t *node;
    sl_message_t tokens = tokens_message();
    assert_int_equal(sl_node_create(&params, &node), SL_OK);
    welcome(server, 300);
    UNTIL(sl_node_lease_valid(node), serve(server));
    UNTIL(sl_node_stats(node).dropped >= 1000, /* nothing is read at the other end */
          assert_int_equal(sl_node_post(node, &tokens), SL_OK));
    assert_false(sl_node_lease_valid(node));
    for (uint64_t i = 0; i < 3; i++) {
        sl_message_t kept = {.type = SL_MSG_RELEASED, .attempt = {i}};
        assert_int_equal(sl_node_post(node, &kept), SL_OK);
        assert_int_equal(sl_node_post(node, &tokens), SL_OK);
    }
    welcome(server, 60000);
    for (uint64_t i = 0; i < 3; i++) {
        received_t got;
        do { /* no tokens after the welcome */
            got = server_next(server);
            assert_int_equal(got.status, SL_OK);
        } while (got.message.type == SL_MSG_HEARTBEAT || got.message.type == SL_MSG_HELLO);
        assert_int_equal(got.message.type, SL_MSG_RELEASED);
        assert_int_equal(got.message.attempt.attempt, i);
    }
    assert_int_equal(sl_node_post(node, &tokens), SL_OK);
    received_t got = next_of(server, SL_MSG_TOKENS, true);
    sl_message_destroy(&got.message);
    sl_node_destroy(node);
    sl_server_destroy(server);
}

static bool stop_now;
static bool stops(void)
{
    return stop_now;
}

/* Whoever waits for room leaves when the process shall stop, or its group has failed. */
static void test_stopped_while_the_ring_is_full(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_params_t params = node_params(server);
    params.ring_items = 4;
    params.stopping = stops;
    params.post_timeout_us = 4 * DEADLINE_US;
    sl_node_t *node;
    sl_message_t message = {.type = SL_MSG_FAILED, .failed = {.code = "io"}};
    memset(message.failed.message, 'x', sizeof(message.failed.message) - 1);
    assert_int_equal(sl_node_create(&params, &node), SL_OK);
    for (int i = 0; i < 4; i++) { /* not welcomed: nothing leaves */
        assert_int_equal(sl_node_post(node, &message), SL_OK);
    }
    stop_now = true;
    assert_int_equal(sl_node_post(node, &message), SL_ERR_CANCELED);
    assert_non_null(strstr(sl_error_text(), "stopped while a failed message waited"));
    stop_now = false;

    sl_peer_key_t key = welcome(server, 60000);
    answer(server, &key, (sl_message_t){.type = SL_MSG_GROUP_FAILED});
    sl_status_t status = SL_OK; /* the server reads no more, so there is room for some only */
    UNTIL(status != SL_OK, status = sl_node_post(node, &message));
    assert_int_equal(status, SL_ERR_CANCELED);
    assert_non_null(strstr(sl_error_text(), "the group failed while a failed message waited"));
    sl_node_destroy(node);
    sl_server_destroy(server);
}

static void test_router_stops_acknowledging(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_t *node = node_to(server);
    welcome(server, 300);
    UNTIL(sl_node_lease_valid(node), serve(server));
    UNTIL(!sl_node_lease_valid(node), server_wait(server)); /* unread heartbeats, no acks */
    /* After the lease it says hello again on the same connection, and is back. */
    welcome(server, 300);
    UNTIL(sl_node_lease_valid(node), serve(server));
    assert_int_equal(sl_node_stats(node).registrations, 2);
    sl_node_destroy(node);
    sl_server_destroy(server);
}

/* The router ends and comes back on its port: same incarnation, and what was posted meanwhile
 * arrives behind the new welcome. */
static void test_router_restarts(void **state)
{
    (void)state;
    char address[64];
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    snprintf(address, sizeof(address), "%s", sl_server_address(server));
    sl_node_t *node = node_to(server);
    welcome(server, 300);
    UNTIL(sl_node_lease_valid(node), serve(server));
    sl_server_destroy(server);
    UNTIL(!sl_node_lease_valid(node), poll(NULL, 0, 5));
    sl_message_t posted = {.type = SL_MSG_RELEASED, .attempt = {9}};
    assert_int_equal(sl_node_post(node, &posted), SL_OK);

    server = server_at(address, 0);
    sl_peer_key_t key = welcome(server, 5000);
    received_t got = next_of(server, SL_MSG_RELEASED, true);
    assert_int_equal(got.message.attempt.attempt, 9);
    assert_true(sl_peer_key_same(&got.sender, &key));
    UNTIL(sl_node_lease_valid(node), serve(server));
    assert_int_equal(sl_node_stats(node).registrations, 2);
    sl_node_destroy(node);
    sl_server_destroy(server);
}

/* What a rank may not get is dropped and counted; the rest goes on. */
/* The router ends while the engine is busy and everything before it is full. ZeroMQ reads on only
 * when the engine takes again, and a heartbeat of its own in between would have ended the process.
 */
static void test_router_restarts_while_all_is_full(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    char address[128];
    snprintf(address, sizeof(address), "%s", sl_server_address(server));
    sl_node_params_t params = node_params(server);
    params.ring_items = 4;
    sl_node_t *node;
    assert_int_equal(sl_node_create(&params, &node), SL_OK);
    sl_peer_key_t key = welcome(server, 60000);
    for (uint64_t i = 0; i < MANY; i++) {
        answer(server, &key, (sl_message_t){.type = SL_MSG_CANCEL_ATTEMPT, .attempt = {i}});
    }
    uint64_t busy_until_us = sl_now_us() + BUSY_US;
    UNTIL(sl_node_stats(node).received > params.ring_items, serve(server));
    sl_server_destroy(server);
    server = server_at(address, 0);
    UNTIL(sl_now_us() > busy_until_us, serve(server));

    uint64_t taken = 0;
    received_t hello = {.status = SL_ERR_AGAIN};
    UNTIL(hello.status == SL_OK, {
        for (sl_message_t *got; (got = sl_node_take(node)) != NULL; taken++) {
            assert_int_equal(got->attempt.attempt, taken);
            sl_node_message_free(got);
        }
        server_wait(server);
        hello.status = sl_server_receive(server, &hello.sender, hello.bad_id, &hello.message);
    });
    assert_int_equal(hello.message.type, SL_MSG_HELLO);
    sl_message_destroy(&hello.message);
    assert_true(taken > params.ring_items);
    sl_node_destroy(node);
    sl_server_destroy(server);
}

static void test_messages_of_the_wrong_kind(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_t *node = node_to(server);
    sl_peer_key_t key = welcome(server, 5000);
    answer(server, &key, (sl_message_t){.type = SL_MSG_STATUS});
    answer(server, &key, (sl_message_t){.type = SL_MSG_GROUP_FAILED});
    sl_message_t *taken;
    UNTIL((taken = sl_node_take(node)) != NULL, serve(server));
    assert_int_equal(taken->type, SL_MSG_GROUP_FAILED);
    assert_true(sl_node_group_failed(node));
    sl_node_message_free(taken);
    assert_int_equal(sl_node_stats(node).undecodable, 1);
    sl_node_destroy(node);
    sl_server_destroy(server);
}

static _Atomic int told_failed, told_left;

static void count_gone(bool left)
{
    if (left) {
        told_left++;
    } else {
        told_failed++;
    }
}

/* The net thread tells by itself that the group is gone, and how, whatever the engine does. */
static void test_loss_of_the_group_is_told_at_once(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_node_params_t params = node_params(server);
    sl_node_t *node;
    params.group_gone = count_gone;
    told_failed = told_left = 0;
    assert_int_equal(sl_node_create(&params, &node), SL_OK);
    sl_peer_key_t key = welcome(server, 60000);
    answer(server, &key, (sl_message_t){.type = SL_MSG_GROUP_FAILED, .group_failed.left = true});
    UNTIL(told_left > 0, serve(server));
    assert_int_equal(told_failed, 0);
    assert_true(sl_node_group_failed(node) && sl_node_group_left(node));
    answer(server, &key, (sl_message_t){.type = SL_MSG_GROUP_FAILED});
    UNTIL(told_failed > 0, serve(server));
    assert_int_equal(told_left, 1);
    sl_node_destroy(node);
    sl_server_destroy(server);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_welcome_heartbeat_and_goodbye),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_refused_later),
        cmocka_unit_test(test_loss_of_the_group_is_told_at_once),
        cmocka_unit_test(test_no_router),
        cmocka_unit_test(test_stopped_while_waiting),
        cmocka_unit_test(test_hello_again),
        cmocka_unit_test(test_many_messages_through_small_rings),
        cmocka_unit_test(test_full_ring),
        cmocka_unit_test(test_router_away_under_load),
        cmocka_unit_test(test_stopped_while_the_ring_is_full),
        cmocka_unit_test(test_router_stops_acknowledging),
        cmocka_unit_test(test_router_restarts),
        cmocka_unit_test(test_router_restarts_while_all_is_full),
        cmocka_unit_test(test_messages_of_the_wrong_kind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
