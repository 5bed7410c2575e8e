/* The router's socket against plain DEALERs over TCP: nothing is dropped silently. */
#include "tests/unit/net/net_helpers.h"

#include <zmq.h>

static void *context;

static int setup(void **state)
{
    (void)state;
    context = zmq_ctx_new();
    return context == NULL;
}

static int teardown(void **state)
{
    (void)state;
    return zmq_ctx_term(context);
}

static void *dealer_to(sl_server_t *server)
{
    int linger = 0, queue = 1;
    void *dealer = zmq_socket(context, ZMQ_DEALER);
    assert_non_null(dealer);
    zmq_setsockopt(dealer, ZMQ_LINGER, &linger, sizeof(linger));
    zmq_setsockopt(dealer, ZMQ_RCVHWM, &queue, sizeof(queue));
    assert_int_equal(zmq_connect(dealer, sl_server_address(server)), 0);
    return dealer;
}

static void dealer_send(void *dealer, const void *data, size_t size, int flags)
{
    assert_int_equal(zmq_send(dealer, data, size, flags), size);
}

static void dealer_send_message(void *dealer, const sl_message_t *message)
{
    sl_bytes_t frame;
    assert_int_equal(sl_message_encode(message, &frame), SL_OK);
    dealer_send(dealer, frame.data, frame.size, 0);
    free(frame.data);
}

/* Waits at most the deadline for one message, which must decode. */
static sl_message_t dealer_next(void *dealer)
{
    zmq_msg_t part;
    sl_message_t message;
    zmq_pollitem_t item = {dealer, 0, ZMQ_POLLIN, 0};
    assert_int_equal(zmq_poll(&item, 1, DEADLINE_US / 1000), 1);
    zmq_msg_init(&part);
    assert_true(zmq_msg_recv(&part, dealer, 0) >= 0);
    assert_false(zmq_msg_more(&part));
    assert_int_equal(sl_message_decode(zmq_msg_data(&part), zmq_msg_size(&part),
                                       &sl_wire_limits_default, &message),
                     SL_OK);
    zmq_msg_close(&part);
    return message;
}

static const sl_message_t status_message = {.type = SL_MSG_STATUS};

static void test_request_and_answer(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    void *first = dealer_to(server), *second = dealer_to(server);
    dealer_send_message(first, &status_message);
    received_t from_first = server_next(server);
    assert_int_equal(from_first.status, SL_OK);
    assert_int_equal(from_first.message.type, SL_MSG_STATUS);
    dealer_send_message(second, &status_message);
    received_t from_second = server_next(server);
    assert_false(sl_peer_key_same(&from_first.sender, &from_second.sender));
    sl_message_t answer = {.type = SL_MSG_HEARTBEAT_ACK, .heartbeat_ack = {5}};
    assert_int_equal(sl_server_send(server, &from_second.sender, &answer), SL_OK);
    sl_message_t got = dealer_next(second);
    assert_int_equal(got.type, SL_MSG_HEARTBEAT_ACK);
    assert_int_equal(got.heartbeat_ack.sequence, 5);
    zmq_close(first);
    zmq_close(second);
    sl_server_destroy(server);
}

static void test_port_zero_and_port_in_use(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:0", 0), *other = NULL;
    const sl_server_params_t params = {.bind = sl_server_address(server), .name = "client socket"};
    assert_int_equal(sl_server_create(&params, &other), SL_ERR_IO);
    assert_null(other);
    char expected[128];
    snprintf(expected, sizeof(expected), "client socket: cannot bind %s: Address already in use",
             sl_server_address(server));
    assert_string_equal(sl_error_text(), expected);
    sl_server_destroy(server);
}

/* Each bad frame is reported with its sender, with its id where it has one, and the next good one
 * is read as ever. */
static void test_bad_frames_can_be_answered(void **state)
{
    (void)state;
    static const char with_id[] = "\x83\xa1v\x02\xa4type\xa3"
                                  "abc\xa2id\xa2"
                                  "r7";
    const struct {
        const char *bytes;
        size_t size;
        const char *text, *id;
    } cases[] = {
        {"\xdd\xff\x00\x00\x00", 5, "does not fit", ""},
        {"hello", 5, "trailing bytes", ""},
        {"", 0, "not complete", ""},
        {with_id, sizeof(with_id) - 1, "found \"abc\"", "r7"},
    };
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    void *dealer = dealer_to(server);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        dealer_send(dealer, cases[i].bytes, cases[i].size, 0);
        received_t got = server_next(server);
        assert_int_equal(got.status, SL_ERR_INVALID);
        assert_non_null(strstr(sl_error_text(), cases[i].text));
        assert_string_equal(got.bad_id, cases[i].id);
        sl_message_t failed = {.type = SL_MSG_FAILED};
        snprintf(failed.failed.code, SL_NAME_BYTES, "%s", sl_status_name(got.status));
        snprintf(failed.failed.message, SL_TEXT_BYTES, "%s", sl_error_text());
        assert_int_equal(sl_server_send(server, &got.sender, &failed), SL_OK);
        sl_message_t answer = dealer_next(dealer);
        assert_string_equal(answer.failed.code, "invalid");
    }
    dealer_send_message(dealer, &status_message);
    assert_int_equal(server_next(server).status, SL_OK);
    zmq_close(dealer);
    sl_server_destroy(server);
}

static void test_several_parts(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    void *dealer = dealer_to(server);
    dealer_send(dealer, "", 0, ZMQ_SNDMORE);
    dealer_send(dealer, "a", 1, ZMQ_SNDMORE);
    dealer_send(dealer, "b", 1, 0);
    received_t got = server_next(server);
    assert_int_equal(got.status, SL_ERR_INVALID);
    assert_non_null(strstr(sl_error_text(), "expected a message of one part, found 3"));
    dealer_send_message(dealer, &status_message);
    assert_int_equal(server_next(server).status, SL_OK);
    zmq_close(dealer);
    sl_server_destroy(server);
}

/* Reads before each wait, as the router's loop does: else the descriptor stays readable, nothing
 * waits, and the peer's queue fills before it has had the time to go. */
static void send_until_gone(sl_server_t *server, const sl_peer_key_t *peer)
{
    received_t got;
    UNTIL(sl_server_send(server, peer, &status_message) == SL_ERR_UNREACHABLE, {
        assert_int_equal(sl_server_receive(server, &got.sender, got.bad_id, &got.message),
                         SL_ERR_AGAIN);
        server_wait(server);
    });
}

/* Over the limit: told so. Over twice the limit: cut off, while others are served. */
static void test_too_large(void **state)
{
    (void)state;
    const sl_server_params_t params = {
        .bind = "tcp://127.0.0.1:*",
        .name = "test socket",
        .limits = {.message_bytes = 1000, .depth = 6, .array_items = 1000, .map_items = 64}};
    sl_server_t *server;
    static uint8_t bytes[2001];
    assert_int_equal(sl_server_create(&params, &server), SL_OK);
    void *large = dealer_to(server), *good = dealer_to(server);
    dealer_send(large, bytes, 1500, 0);
    received_t got = server_next(server);
    assert_int_equal(got.status, SL_ERR_LIMIT);
    assert_non_null(strstr(sl_error_text(), "at most 1000 bytes, found 1500"));
    dealer_send(large, bytes, sizeof(bytes), 0);
    send_until_gone(server, &got.sender);
    dealer_send_message(good, &status_message);
    assert_int_equal(server_next(server).status, SL_OK);
    zmq_close(large);
    zmq_close(good);
    sl_server_destroy(server);
}

static void test_peer_gone(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 0);
    sl_peer_key_t nobody = {.size = 5, .bytes = {0, 1, 2, 3, 4}};
    sl_error(SL_ERR_INVALID, "the error before");
    assert_int_equal(sl_server_send(server, &nobody, &status_message), SL_ERR_UNREACHABLE);
    void *dealer = dealer_to(server);
    dealer_send_message(dealer, &status_message);
    received_t got = server_next(server);
    zmq_close(dealer);
    send_until_gone(server, &got.sender);
    /* A peer that has gone is no error of ours: sl_error() would have logged one for each message.
     */
    assert_string_equal(sl_error_text(), "the error before");
    sl_server_destroy(server);
}

/* ---- a peer that does not read ---- */

#define LARGE_TOKENS 100000

static sl_message_t large_message(uint32_t index)
{
    sl_message_t message = {.type = SL_MSG_PREFILL};
    static int32_t tokens[LARGE_TOKENS];
    message.prefill =
        (sl_msg_prefill_t){.attempt = index,
                           .tokens = tokens,
                           .token_count = LARGE_TOKENS,
                           .sampling = {.temperature = 1, .top_p = 1, .max_tokens = 1}};
    return message;
}

/* Sends numbered messages until the peer's queue is full; returns how many were taken. */
static uint32_t fill(sl_server_t *server, const sl_peer_key_t *peer)
{
    uint32_t count = 0;
    sl_status_t status = SL_OK;
    while (status == SL_OK && count < 20000) {
        sl_message_t message = large_message(count);
        status = sl_server_send(server, peer, &message);
        count += status == SL_OK;
    }
    assert_int_equal(status, SL_ERR_LIMIT);
    assert_non_null(strstr(sl_error_text(), "a slow peer may have at most 1000000 bytes waiting"));
    return count;
}

static void note_gone(void *arg, const sl_peer_key_t *peer)
{
    *(sl_peer_key_t *)arg = *peer;
}

static void test_full_queue_then_all_arrive(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 1000000);
    void *slow = dealer_to(server), *quick = dealer_to(server);
    sl_peer_key_t gone = {0};
    dealer_send_message(slow, &status_message);
    received_t got = server_next(server);
    uint32_t count = fill(server, &got.sender);
    assert_true(sl_server_flush(server, note_gone, &gone));

    dealer_send_message(quick, &status_message); /* one slow peer holds up nobody else */
    received_t other = server_next(server);
    assert_int_equal(sl_server_send(server, &other.sender, &status_message), SL_OK);
    assert_int_equal(dealer_next(quick).type, SL_MSG_STATUS);

    for (uint32_t i = 0; i < count; i++) {
        zmq_pollitem_t item = {slow, 0, ZMQ_POLLIN, 0};
        UNTIL(zmq_poll(&item, 1, 5) > 0, {
            sl_server_flush(server, note_gone, &gone);
            assert_int_equal(gone.size, 0);
        });
        sl_message_t message = dealer_next(slow);
        assert_int_equal(message.type, SL_MSG_PREFILL);
        assert_int_equal(message.prefill.attempt, i);
        sl_message_destroy(&message);
    }
    UNTIL(!sl_server_flush(server, note_gone, &gone), server_wait(server));
    assert_int_equal(gone.size, 0);
    zmq_close(slow);
    zmq_close(quick);
    sl_server_destroy(server);
}

static void test_full_queue_of_a_peer_that_goes(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 1000000);
    void *slow = dealer_to(server);
    sl_peer_key_t gone = {0};
    dealer_send_message(slow, &status_message);
    received_t got = server_next(server);
    fill(server, &got.sender);
    zmq_close(slow);
    UNTIL(gone.size > 0, {
        /* As the router's loop does: ZeroMQ lets go of a connection once its input is read. */
        assert_int_equal(sl_server_receive(server, &got.sender, got.bad_id, &got.message),
                         SL_ERR_AGAIN);
        sl_server_flush(server, note_gone, &gone);
        server_wait(server);
    });
    assert_true(sl_peer_key_same(&gone, &got.sender));
    assert_false(sl_server_flush(server, note_gone, &gone));
    sl_server_forget(server, &got.sender);
    sl_server_destroy(server);
}

static void test_forget(void **state)
{
    (void)state;
    sl_server_t *server = server_at("tcp://127.0.0.1:*", 1000000);
    void *slow = dealer_to(server);
    sl_peer_key_t gone = {0};
    dealer_send_message(slow, &status_message);
    received_t got = server_next(server);
    fill(server, &got.sender);
    sl_server_forget(server, &got.sender);
    assert_false(sl_server_flush(server, note_gone, &gone));
    fill(server, &got.sender); /* and with frames waiting the server can end */
    zmq_close(slow);
    sl_server_destroy(server);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_request_and_answer),
        cmocka_unit_test(test_port_zero_and_port_in_use),
        cmocka_unit_test(test_bad_frames_can_be_answered),
        cmocka_unit_test(test_several_parts),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_peer_gone),
        cmocka_unit_test(test_full_queue_then_all_arrive),
        cmocka_unit_test(test_full_queue_of_a_peer_that_goes),
        cmocka_unit_test(test_forget),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
