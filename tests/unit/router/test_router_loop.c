/*
 * The router's loop over real sockets: it runs in a thread, ranks are real sl_node_t, clients are
 * plain ZeroMQ sockets. What ranks compute is acted by the test.
 */
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/net/node.h"
#include "router/router.h"

#define WAIT_MS 20000

typedef struct {
    char folder[64], ready_file[96];
    char client_address[128], node_address[128];
    sl_router_t *router;
    sl_status_t run_status;
    pthread_t thread;
    int stop_fd;
    void *context;
} loop_t;

static void *run_router(void *arg)
{
    loop_t *loop = arg;
    loop->run_status = sl_router_run(loop->router, loop->stop_fd);
    return NULL;
}

static int setup(void **state)
{
    loop_t *loop = calloc(1, sizeof(*loop));
    assert_non_null(loop);
    snprintf(loop->folder, sizeof(loop->folder), "/tmp/sluice-router-XXXXXX");
    assert_non_null(mkdtemp(loop->folder));
    snprintf(loop->ready_file, sizeof(loop->ready_file), "%s/ready", loop->folder);
    sl_router_params_t params = {
        .client_bind = "tcp://127.0.0.1:0",
        .node_bind = "tcp://127.0.0.1:*",
        .ready_file = loop->ready_file,
        .heartbeat_ms = 50,
        .dead_ms = 10000,
        .stuck_ms = 30000,
        .lease_ms = 10000,
        .max_ranks = 16,
        .max_clients = 16,
        .max_waiting = 16,
        .max_waiting_tokens = 10000,
        .starve_ms = 2000,
        .place_timeout_ms = 30000,
        .queue_timeout_ms = 60000,
        .silence_ms = 60000,
    };
    assert_int_equal(sl_router_create(&params, &loop->router), SL_OK);
    FILE *file = fopen(loop->ready_file, "r");
    assert_non_null(file);
    assert_int_equal(
        fscanf(file, "client %127s\nnode %127s\n", loop->client_address, loop->node_address), 2);
    fclose(file);
    loop->stop_fd = eventfd(0, EFD_NONBLOCK);
    loop->context = zmq_ctx_new();
    assert_int_equal(pthread_create(&loop->thread, NULL, run_router, loop), 0);
    *state = loop;
    return 0;
}

static void stop_router(loop_t *loop)
{
    uint64_t one = 1;
    assert_int_equal(write(loop->stop_fd, &one, sizeof(one)), sizeof(one));
    assert_int_equal(pthread_join(loop->thread, NULL), 0);
    assert_int_equal(loop->run_status, SL_OK);
    sl_router_destroy(loop->router);
    loop->router = NULL;
    assert_int_not_equal(access(loop->ready_file, F_OK), 0);
}

static int teardown(void **state)
{
    loop_t *loop = *state;
    if (loop->router != NULL) {
        stop_router(loop);
    }
    close(loop->stop_fd);
    rmdir(loop->folder);
    zmq_ctx_term(loop->context);
    free(loop);
    return 0;
}

/* ---- clients ---- */

static void *connect_client(loop_t *loop)
{
    int linger_ms = 0;
    void *client = zmq_socket(loop->context, ZMQ_DEALER);
    assert_non_null(client);
    zmq_setsockopt(client, ZMQ_LINGER, &linger_ms, sizeof(linger_ms));
    assert_int_equal(zmq_connect(client, loop->client_address), 0);
    return client;
}

static void client_send(void *client, const sl_message_t *message)
{
    sl_bytes_t frame;
    assert_int_equal(sl_message_encode(message, &frame), SL_OK);
    assert_int_equal(zmq_send(client, frame.data, frame.size, 0), frame.size);
    free(frame.data);
}

/* The next message for a client, which must be of this type. */
static sl_message_t client_receive(void *client, sl_message_type_t type)
{
    sl_message_t message;
    zmq_msg_t part;
    zmq_pollitem_t item = {client, 0, ZMQ_POLLIN, 0};
    assert_int_equal(zmq_poll(&item, 1, WAIT_MS), 1);
    zmq_msg_init(&part);
    assert_true(zmq_msg_recv(&part, client, ZMQ_DONTWAIT) >= 0);
    assert_int_equal(sl_message_decode(zmq_msg_data(&part), zmq_msg_size(&part),
                                       &sl_wire_limits_default, &message),
                     SL_OK);
    zmq_msg_close(&part);
    assert_string_equal(sl_message_type_name(message.type), sl_message_type_name(type));
    return message;
}

static void generate(void *client, const char *id, uint32_t max_tokens)
{
    int32_t prompt[] = {5, 6, 7};
    sl_message_t message = {.type = SL_MSG_GENERATE,
                            .generate = {.tokens = prompt,
                                         .token_count = 3,
                                         .sampling = {.top_p = 1,
                                                      .max_tokens = max_tokens,
                                                      .logprobs = -1,
                                                      .prompt_logprobs = -1}}};
    snprintf(message.generate.id, sizeof(message.generate.id), "%s", id);
    client_send(client, &message);
}

static void expect_failed(void *client, const char *id, const char *code)
{
    sl_message_t message = client_receive(client, SL_MSG_FAILED);
    assert_string_equal(message.failed.id, id);
    assert_string_equal(message.failed.code, code);
}

/* ---- ranks ---- */

static sl_node_t *start_rank(loop_t *loop, sl_pool_t pool, uint64_t incarnation)
{
    static uint8_t address[] = {'a'};
    sl_node_t *node;
    sl_node_params_t params = {.router = loop->node_address};
    params.hello = (sl_msg_hello_t){.rank = {pool, 0, 0, incarnation},
                                    .tp = 1,
                                    .model = "tiny",
                                    .layout = "text",
                                    .layout_hash = 42,
                                    .vocab_size = 1000,
                                    .max_model_len = 4096,
                                    .page_tokens = 64,
                                    .pages_total = 20,
                                    .transfer_address = {address, 1},
                                    .group_address = {address, 1}};
    assert_int_equal(sl_node_create(&params, &node), SL_OK);
    return node;
}

/* The next message for a rank, which must be of this type; free it. */
static sl_message_t *rank_receive(sl_node_t *node, sl_message_type_t type)
{
    uint64_t until_us = sl_now_us() + WAIT_MS * 1000u;
    sl_message_t *message;
    while ((message = sl_node_take(node)) == NULL) {
        struct pollfd item = {.fd = sl_node_fd(node), .events = POLLIN};
        assert_true(sl_now_us() < until_us);
        poll(&item, 1, 1000);
        sl_node_clear(node);
    }
    assert_string_equal(sl_message_type_name(message->type), sl_message_type_name(type));
    return message;
}

static void rank_expect(sl_node_t *node, sl_message_type_t type)
{
    sl_node_message_free(rank_receive(node, type));
}

static sl_node_t *join(loop_t *loop, sl_pool_t pool, uint64_t incarnation)
{
    sl_message_t ready = {.type = SL_MSG_READY};
    sl_node_t *node = start_rank(loop, pool, incarnation);
    assert_int_equal(sl_node_wait_welcome(node), SL_OK);
    rank_expect(node, SL_MSG_GROUP);
    assert_int_equal(sl_node_post(node, &ready), SL_OK);
    return node;
}

static void post_token(sl_node_t *node, uint64_t attempt, uint32_t index, sl_finish_t finish)
{
    int32_t token = (int32_t)(100 + index);
    sl_message_t message = {.type = SL_MSG_TOKENS,
                            .tokens = {.attempt = attempt,
                                       .index = index,
                                       .tokens = &token,
                                       .token_count = 1,
                                       .finish = finish}};
    assert_int_equal(sl_node_post(node, &message), SL_OK);
}

static void post_released(sl_node_t *node, uint64_t attempt)
{
    sl_message_t message = {.type = SL_MSG_RELEASED, .attempt = {.attempt = attempt}};
    assert_int_equal(sl_node_post(node, &message), SL_OK);
}

/* Both ranks have got the next attempt; its id. */
static uint64_t attempt_started(sl_node_t *prefill, sl_node_t *decode)
{
    sl_message_t *to_prefill = rank_receive(prefill, SL_MSG_PREFILL);
    sl_message_t *to_decode = rank_receive(decode, SL_MSG_RESERVE);
    uint64_t attempt = to_prefill->prefill.attempt;
    assert_int_equal(to_decode->reserve.attempt, attempt);
    sl_node_message_free(to_prefill);
    sl_node_message_free(to_decode);
    return attempt;
}

/* ---- tests ---- */

static void request_streams_through(void **state)
{
    loop_t *loop = *state;
    void *client = connect_client(loop);
    generate(client, "a", 3); /* waits for the pools */
    sl_node_t *prefill = join(loop, SL_POOL_PREFILL, 1);
    sl_node_t *decode = join(loop, SL_POOL_DECODE, 2);
    rank_expect(prefill, SL_MSG_PEER);
    rank_expect(decode, SL_MSG_PEER);
    uint64_t attempt = attempt_started(prefill, decode);
    post_token(prefill, attempt, 0, SL_FINISH_NONE);
    post_released(prefill, attempt);
    post_token(decode, attempt, 1, SL_FINISH_NONE);
    post_token(decode, attempt, 2, SL_FINISH_LENGTH);
    post_released(decode, attempt);
    for (uint32_t i = 0; i < 3; i++) {
        sl_message_t event = client_receive(client, SL_MSG_TOKENS);
        assert_string_equal(event.tokens.id, "a");
        assert_int_equal(event.tokens.seq, i);
        assert_int_equal(event.tokens.index, i);
        assert_int_equal(event.tokens.tokens[0], 100 + i);
        assert_int_equal(event.tokens.finish, i == 2 ? SL_FINISH_LENGTH : SL_FINISH_NONE);
        sl_message_destroy(&event);
    }
    sl_message_t ask = {.type = SL_MSG_STATUS};
    client_send(client, &ask);
    sl_message_t status = client_receive(client, SL_MSG_STATUS_REPLY);
    assert_int_equal(status.status_reply.requests_finished, 1);
    assert_int_equal(status.status_reply.requests_running, 0);
    assert_int_equal(status.status_reply.rank_count, 2);
    assert_string_equal(status.status_reply.ranks[1].state, "ready");
    sl_message_destroy(&status);
    ask.type = SL_MSG_INFO;
    client_send(client, &ask);
    sl_message_t info = client_receive(client, SL_MSG_INFO_REPLY);
    assert_int_equal(info.info_reply.vocab_size, 1000);
    assert_int_equal(info.info_reply.max_prompt_len, 1280);
    zmq_close(client);
    sl_node_destroy(prefill);
    sl_node_destroy(decode);
}

static void hostile_frames_get_an_answer_and_disturb_nobody(void **state)
{
    loop_t *loop = *state;
    void *client = connect_client(loop);
    void *other = connect_client(loop);
    generate(other, "b", 3);
    const uint8_t bomb[] = {0xdd, 0xff, 0x00, 0x00, 0x00};
    assert_int_equal(zmq_send(client, bomb, sizeof(bomb), 0), sizeof(bomb));
    sl_message_t failed = client_receive(client, SL_MSG_FAILED);
    assert_string_equal(failed.failed.id, "");
    assert_int_equal(zmq_send(client, "", 0, 0), 0);
    expect_failed(client, "", "invalid");
    /* A message of the other direction, and one of the other socket. */
    sl_message_t wrong = {.type = SL_MSG_READY};
    client_send(client, &wrong);
    expect_failed(client, "", "invalid");
    /* Readable id, wrong version. */
    const char stale[] = "\x83\xa1v\x63\xa4type\xa8generate\xa2id\xa1z";
    assert_int_equal(zmq_send(client, stale, sizeof(stale) - 1, 0), sizeof(stale) - 1);
    expect_failed(client, "z", "invalid");
    sl_message_t cancel = {.type = SL_MSG_CANCEL, .cancel = {.id = "b"}};
    client_send(client, &cancel);
    expect_failed(client, "b", "not_found"); /* it is the other client's */
    client_send(other, &cancel);
    expect_failed(other, "b", "canceled");
    zmq_close(client);
    zmq_close(other);
}

/* Of clients less is taken than of ranks: who sends more is told so, and over twice as much closes
 * the connection. */
static void too_large_a_frame_of_a_client_is_refused(void **state)
{
    loop_t *loop = *state;
    const size_t limit = (size_t)16 << 20;
    uint8_t *bytes = calloc(1, 2 * limit + 1);
    assert_non_null(bytes);
    void *client = connect_client(loop);
    assert_int_equal(zmq_send(client, bytes, limit + 1, 0), limit + 1);
    sl_message_t failed = client_receive(client, SL_MSG_FAILED);
    assert_string_equal(failed.failed.code, "limit");
    assert_non_null(strstr(failed.failed.message, "16777216"));
    sl_message_t ask = {.type = SL_MSG_STATUS}, status;
    client_send(client, &ask); /* the same connection goes on */
    status = client_receive(client, SL_MSG_STATUS_REPLY);
    sl_message_destroy(&status);

    int events = ZMQ_EVENT_DISCONNECTED;
    assert_int_equal(zmq_socket_monitor(client, "inproc://client", events), 0);
    void *monitor = zmq_socket(loop->context, ZMQ_PAIR);
    assert_int_equal(zmq_connect(monitor, "inproc://client"), 0);
    assert_int_equal(zmq_send(client, bytes, 2 * limit + 1, 0), 2 * limit + 1);
    zmq_pollitem_t item = {monitor, 0, ZMQ_POLLIN, 0};
    assert_int_equal(zmq_poll(&item, 1, WAIT_MS), 1);
    zmq_socket_monitor(client, NULL, 0);
    zmq_close(monitor);
    zmq_close(client);
    free(bytes);
}

static void vanished_client_is_noticed_at_the_next_token(void **state)
{
    loop_t *loop = *state;
    void *client = connect_client(loop);
    sl_node_t *prefill = join(loop, SL_POOL_PREFILL, 1);
    sl_node_t *decode = join(loop, SL_POOL_DECODE, 2);
    rank_expect(prefill, SL_MSG_PEER);
    rank_expect(decode, SL_MSG_PEER);
    generate(client, "a", 1000);
    uint64_t attempt = attempt_started(prefill, decode);
    post_token(prefill, attempt, 0, SL_FINISH_NONE);
    sl_message_t event = client_receive(client, SL_MSG_TOKENS);
    sl_message_destroy(&event);
    zmq_close(client);
    /* The connection closes some time after; tokens go on until then. */
    sl_message_t *cancel = NULL;
    for (uint32_t index = 1; cancel == NULL && index < 1000; index++) {
        struct pollfd item = {.fd = sl_node_fd(decode), .events = POLLIN};
        post_token(decode, attempt, index, SL_FINISH_NONE);
        poll(&item, 1, 20);
        sl_node_clear(decode);
        cancel = sl_node_take(decode);
    }
    assert_non_null(cancel);
    assert_int_equal(cancel->type, SL_MSG_CANCEL_ATTEMPT);
    assert_int_equal(cancel->attempt.attempt, attempt);
    sl_node_message_free(cancel);
    rank_expect(prefill, SL_MSG_CANCEL_ATTEMPT);
    sl_node_destroy(prefill);
    sl_node_destroy(decode);
}

static void taken_place_is_refused_and_a_left_one_is_free(void **state)
{
    loop_t *loop = *state;
    sl_node_t *first = join(loop, SL_POOL_DECODE, 11);
    sl_node_t *second = start_rank(loop, SL_POOL_DECODE, 12);
    assert_int_equal(sl_node_wait_welcome(second), SL_ERR_REFUSED);
    assert_non_null(strstr(sl_error_text(), "11"));
    assert_non_null(strstr(sl_error_text(), "12"));
    sl_node_destroy(second);
    sl_node_destroy(first); /* says goodbye */
    sl_node_t *third = join(loop, SL_POOL_DECODE, 13);
    sl_node_destroy(third);
}

static void leaving_rank_fails_its_requests(void **state)
{
    loop_t *loop = *state;
    void *client = connect_client(loop);
    sl_node_t *prefill = join(loop, SL_POOL_PREFILL, 1);
    sl_node_t *decode = join(loop, SL_POOL_DECODE, 2);
    rank_expect(prefill, SL_MSG_PEER);
    generate(client, "a", 10);
    rank_expect(decode, SL_MSG_PEER);
    attempt_started(prefill, decode);
    sl_node_destroy(decode);
    expect_failed(client, "a", "unreachable");
    rank_expect(prefill, SL_MSG_PEER); /* gone */
    rank_expect(prefill, SL_MSG_CANCEL_ATTEMPT);
    sl_node_destroy(prefill);
    zmq_close(client);
}

static void stop_tells_who_waits(void **state)
{
    loop_t *loop = *state;
    void *client = connect_client(loop);
    sl_message_t ask = {.type = SL_MSG_STATUS};
    generate(client, "a", 10);
    client_send(client, &ask);
    sl_message_t status = client_receive(client, SL_MSG_STATUS_REPLY);
    assert_int_equal(status.status_reply.requests_waiting, 1);
    sl_message_destroy(&status);
    stop_router(loop);
    expect_failed(client, "a", "unreachable");
    zmq_close(client);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(request_streams_through),
        TEST(hostile_frames_get_an_answer_and_disturb_nobody),
        TEST(too_large_a_frame_of_a_client_is_refused),
        TEST(vanished_client_is_noticed_at_the_next_token),
        TEST(taken_place_is_refused_and_a_left_one_is_free),
        TEST(leaving_rank_fails_its_requests),
        TEST(stop_tells_who_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
