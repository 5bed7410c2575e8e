/*
 * Options and the non-blocking send and receive.
 *
 * Sending copies: memory that ZeroMQ's I/O thread would free for us is not worth its trouble at
 * some hundred bytes a message, and a frame that could not be sent stays with its owner.
 *
 * Broken connections are found by TCP and not by ZeroMQ's own heartbeats. Those do not go with
 * bounded queues: while a connection's queue is full ZeroMQ reads nothing from it, neither pings
 * nor the answers to its own, so that whoever is slow for a while is taken for dead. Worse, when
 * such a connection then ends, the next ping asserts that it has not and ends our process (libzmq
 * 4.3: "Assertion failed: !_io_error", or "_input_stopped" after a missed answer).
 */
#include "common/net/socket.h"

#include <errno.h>

#define LINGER_MS 1000
#define QUEUE_MESSAGES 256 /* per connection and direction, inside ZeroMQ */
#define PROBE_S 2          /* between the kernel's probes of a quiet connection */
#define PROBES_LOST 5      /* then the connection is given up */
#define HANDSHAKE_MS 10000

sl_status_t sl_socket_set(void *socket, const char *name, int option, int value)
{
    if (zmq_setsockopt(socket, option, &value, sizeof(value)) != 0) {
        return sl_error(SL_ERR_IO, "%s: cannot set zeromq option %d to %d: %s", name, option, value,
                        zmq_strerror(errno));
    }
    return SL_OK;
}

/* A frame over the wire's limit is still taken, up to twice the limit, so that its sender can be
 * told; beyond that ZeroMQ closes the connection. */
static sl_status_t set_message_size(void *socket, const char *name, const sl_wire_limits_t *limits)
{
    int64_t bytes = 2 * (int64_t)limits->message_bytes;
    if (zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &bytes, sizeof(bytes)) != 0) {
        return sl_error(SL_ERR_IO, "%s: cannot limit messages to %lld bytes: %s", name,
                        (long long)bytes, zmq_strerror(errno));
    }
    return SL_OK;
}

sl_status_t sl_socket_open(void *context, int type, const char *name,
                           const sl_wire_limits_t *limits, void **socket_p)
{
    const struct {
        int option, value;
    } options[] = {
        {ZMQ_LINGER, LINGER_MS},
        {ZMQ_SNDHWM, QUEUE_MESSAGES},
        {ZMQ_RCVHWM, QUEUE_MESSAGES},
        {ZMQ_TCP_KEEPALIVE, 1},
        {ZMQ_TCP_KEEPALIVE_IDLE, PROBE_S},
        {ZMQ_TCP_KEEPALIVE_INTVL, PROBE_S},
        {ZMQ_TCP_KEEPALIVE_CNT, PROBES_LOST},
        /* Bounds how long sent bytes stay unacknowledged; 0: the system's quarter of an hour. It
         * also ends a connection whose peer takes nothing, which a router never does for long, but
         * a slow peer of the router may. */
        {ZMQ_TCP_MAXRT, type == ZMQ_DEALER ? 1000 * PROBE_S * PROBES_LOST : 0},
        {ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS},
    };
    void *socket = zmq_socket(context, type);
    if (socket == NULL) {
        return sl_error(SL_ERR_IO, "%s: cannot open a socket: %s", name, zmq_strerror(errno));
    }
    sl_status_t status = set_message_size(socket, name, limits);
    for (size_t i = 0; status == SL_OK && i < sizeof(options) / sizeof(options[0]); i++) {
        status = sl_socket_set(socket, name, options[i].option, options[i].value);
    }
    if (status != SL_OK) {
        zmq_close(socket);
        return status;
    }
    *socket_p = socket;
    return SL_OK;
}

sl_status_t sl_socket_receive(void *socket, const char *name, zmq_msg_t *message, bool *more_p)
{
    int got;
    do {
        got = zmq_msg_recv(message, socket, ZMQ_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    if (got < 0 && errno == EAGAIN) {
        return SL_ERR_AGAIN;
    }
    if (got < 0) {
        return sl_error(SL_ERR_IO, "%s: cannot receive: %s", name, zmq_strerror(errno));
    }
    *more_p = zmq_msg_more(message) != 0;
    return SL_OK;
}

size_t sl_socket_drop_parts(void *socket)
{
    size_t count = 0;
    bool more = true;
    while (more) {
        zmq_msg_t part;
        zmq_msg_init(&part);
        /* The parts of one message arrive together, so none has to be waited for. */
        more = sl_socket_receive(socket, "rest of a message", &part, &more) == SL_OK && more;
        zmq_msg_close(&part);
        count++;
    }
    return count;
}

sl_status_t sl_socket_send(void *socket, const char *name, const void *data, size_t size, int flags)
{
    int sent;
    do {
        sent = zmq_send(socket, data, size, ZMQ_DONTWAIT | flags);
    } while (sent < 0 && errno == EINTR);
    if (sent >= 0) {
        return SL_OK;
    }
    if (errno == EAGAIN) {
        return SL_ERR_AGAIN;
    }
    if (errno == EHOSTUNREACH) {
        return SL_ERR_UNREACHABLE;
    }
    return sl_error(SL_ERR_IO, "%s: cannot send %zu bytes: %s", name, size, zmq_strerror(errno));
}
