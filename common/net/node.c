/*
 * The engine's side of a node, and its making and ending.
 *
 * The engine meets the net thread only in the two rings, in atomics, and in three eventfds: stop,
 * state (wakes whoever waits for the welcome) and room (wakes a poster that found the ring full).
 */
#include "common/net/node.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/net/node_state.h"
#include "common/net/socket.h"

#define DEFAULT_REGISTER_US 30000000u
#define DEFAULT_POST_US 10000000u
#define DEFAULT_RING_ITEMS 4096
#define RECONNECT_MS 100
#define RECONNECT_MAX_MS 1000
#define MONITOR_ADDRESS "inproc://monitor"
#define WAIT_SLICE_MS 200
#define POST_POLL_MS 20 /* between looks at the ring and at what ends the wait */

void sl_node_signal(int fd)
{
    uint64_t one = 1;
    ssize_t written = write(fd, &one, sizeof(one));
    (void)written; /* fails only when the counter is full, that is, already readable */
}

void sl_node_frame_free(sl_node_frame_t *frame)
{
    if (frame != NULL) {
        free(frame->bytes.data);
        free(frame);
    }
}

/* ---- making ---- */

/* ZMQ_IMMEDIATE: frames wait in our ring, where they are counted, and not in ZeroMQ's queue for a
 * router that may never come. The monitor tells when a connection stands or is lost. */
static sl_status_t open_socket(sl_node_t *node)
{
    const char *name = node->name;
    SL_TRY(sl_socket_open(node->context, ZMQ_DEALER, name, &sl_wire_limits_default, &node->socket));
    SL_TRY(sl_socket_set(node->socket, name, ZMQ_IMMEDIATE, 1));
    SL_TRY(sl_socket_set(node->socket, name, ZMQ_RECONNECT_IVL, RECONNECT_MS));
    SL_TRY(sl_socket_set(node->socket, name, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS));
    int events = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED;
    node->monitor = zmq_socket(node->context, ZMQ_PAIR);
    if (node->monitor == NULL || zmq_socket_monitor(node->socket, MONITOR_ADDRESS, events) != 0 ||
        zmq_connect(node->monitor, MONITOR_ADDRESS) != 0) {
        return sl_error(SL_ERR_IO, "%s: cannot watch the connection: %s", name,
                        zmq_strerror(errno));
    }
    if (zmq_connect(node->socket, node->address) != 0) {
        return sl_error(SL_ERR_IO, "%s: cannot connect to the router at %s: %s", name,
                        node->address, zmq_strerror(errno));
    }
    return SL_OK;
}

static sl_status_t encode_hello(sl_node_t *node, const sl_msg_hello_t *hello)
{
    sl_message_t message = {.type = SL_MSG_HELLO, .hello = *hello};
    return sl_message_encode(&message, &node->hello_frame);
}

static sl_status_t open_meeting_points(sl_node_t *node, size_t ring_items)
{
    ring_items = ring_items != 0 ? ring_items : DEFAULT_RING_ITEMS;
    SL_TRY(sl_ring_create(ring_items, &node->outgoing));
    SL_TRY(sl_ring_create(ring_items, &node->incoming));
    node->stop_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    node->state_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    node->room_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (node->stop_fd < 0 || node->state_fd < 0 || node->room_fd < 0) {
        return sl_error(SL_ERR_IO, "%s: cannot open an eventfd: %s", node->name, strerror(errno));
    }
    return SL_OK;
}

static sl_status_t node_start(sl_node_t *node, const sl_node_params_t *params)
{
    SL_TRY(open_meeting_points(node, params->ring_items));
    SL_TRY(encode_hello(node, &params->hello));
    node->context = zmq_ctx_new();
    if (node->context == NULL) {
        return sl_error(SL_ERR_IO, "%s: cannot start zeromq: %s", node->name, zmq_strerror(errno));
    }
    SL_TRY(open_socket(node));
    int failed = pthread_create(&node->thread, NULL, sl_node_link_run, node);
    if (failed != 0) {
        return sl_error(SL_ERR_IO, "%s: cannot start the net thread: %s", node->name,
                        strerror(failed));
    }
    node->thread_started = true;
    return SL_OK;
}

sl_status_t sl_node_create(const sl_node_params_t *params, sl_node_t **node_p)
{
    sl_node_t *node = calloc(1, sizeof(*node));
    if (node == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "node: no memory");
    }
    node->stop_fd = node->state_fd = node->room_fd = -1;
    STAILQ_INIT(&node->link.kept);
    sl_rank_name(&params->hello.rank, node->name);
    snprintf(node->address, sizeof(node->address), "%s", params->router);
    node->incarnation = params->hello.rank.incarnation;
    node->stopping = params->stopping;
    node->on_group_gone = params->group_gone;
    node->register_timeout_us =
        params->register_timeout_us != 0 ? params->register_timeout_us : DEFAULT_REGISTER_US;
    node->post_timeout_us =
        params->post_timeout_us != 0 ? params->post_timeout_us : DEFAULT_POST_US;
    sl_status_t status = node_start(node, params);
    if (status != SL_OK) {
        sl_node_destroy(node);
        return status;
    }
    *node_p = node;
    return SL_OK;
}

/* ---- ending ---- */

static void close_sockets(sl_node_t *node)
{
    if (node->socket != NULL) {
        zmq_socket_monitor(node->socket, NULL, 0);
        zmq_close(node->socket);
        node->socket = NULL;
    }
    if (node->monitor != NULL) {
        zmq_close(node->monitor);
        node->monitor = NULL;
    }
    if (node->context != NULL) {
        zmq_ctx_term(node->context); /* at most the linger time */
        node->context = NULL;
    }
}

static void close_meeting_points(sl_node_t *node)
{
    int fds[] = {node->stop_fd, node->state_fd, node->room_fd};
    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
    while (!STAILQ_EMPTY(&node->link.kept)) {
        sl_node_frame_t *frame = STAILQ_FIRST(&node->link.kept);
        STAILQ_REMOVE_HEAD(&node->link.kept, link);
        sl_node_frame_free(frame);
    }
    for (void *item; node->outgoing != NULL && (item = sl_ring_pop(node->outgoing)) != NULL;) {
        sl_node_frame_free(item);
    }
    for (void *item; node->incoming != NULL && (item = sl_ring_pop(node->incoming)) != NULL;) {
        sl_node_message_free(item);
    }
    sl_ring_destroy(node->outgoing);
    sl_ring_destroy(node->incoming);
}

void sl_node_leave(sl_node_t *node)
{
    if (node->thread_started) {
        sl_node_signal(node->stop_fd);
        pthread_join(node->thread, NULL);
        node->thread_started = false;
        sl_node_stats_t stats = sl_node_stats(node);
        sl_log_info("%s: %" PRIu64 " messages sent to the router, %" PRIu64 " received, %" PRIu64
                    " dropped while it was away; registered %" PRIu64 " times",
                    node->name, stats.sent, stats.received, stats.dropped, stats.registrations);
    }
    close_sockets(node);
}

void sl_node_destroy(sl_node_t *node)
{
    if (node == NULL) {
        return;
    }
    sl_node_leave(node);
    sl_node_frame_free(node->link.outgoing);
    sl_node_message_free(node->link.incoming);
    close_meeting_points(node);
    free(node->hello_frame.data);
    free(node);
}

/* ---- engine ---- */

static bool is_stopping(const sl_node_t *node)
{
    return node->stopping != NULL && node->stopping();
}

/* Waits until `fd` is readable (true), `until_us` is reached or the process shall stop. */
static bool wait_readable(const sl_node_t *node, int fd, uint64_t until_us)
{
    uint64_t now_us = sl_now_us();
    while (now_us < until_us && !is_stopping(node)) {
        uint64_t left_ms = (until_us - now_us + 999) / 1000;
        struct pollfd item = {.fd = fd, .events = POLLIN};
        if (poll(&item, 1, left_ms < WAIT_SLICE_MS ? (int)left_ms : WAIT_SLICE_MS) > 0) {
            return true;
        }
        now_us = sl_now_us();
    }
    return false;
}

sl_status_t sl_node_wait_welcome(sl_node_t *node)
{
    bool decided = wait_readable(node, node->state_fd, sl_now_us() + node->register_timeout_us);
    if (!decided && is_stopping(node)) {
        return sl_error(SL_ERR_CANCELED, "%s: stopped before the router at %s answered", node->name,
                        node->address);
    }
    if (!decided) {
        return sl_error(SL_ERR_TIMEOUT,
                        "%s: no welcome from the router at %s within %" PRIu64 " ms", node->name,
                        node->address, node->register_timeout_us / 1000);
    }
    if (atomic_load(&node->state) == SL_NODE_REFUSED) {
        return sl_error(SL_ERR_REFUSED, "%s: refused by the router at %s: %s: %s", node->name,
                        node->address, node->refusal.code, node->refusal.message);
    }
    return SL_OK;
}

/*
 * The flag goes up, then the ring is tried again by the caller's loop; the net thread pops, then
 * reads the flag. Without a full fence between its two steps it may read the flag too early, so
 * the wait is cut into short pieces instead of relying on the wake-up alone.
 */
static void wait_for_room(sl_node_t *node)
{
    struct pollfd item = {.fd = node->room_fd, .events = POLLIN};
    uint64_t count;
    poll(&item, 1, POST_POLL_MS);
    ssize_t got = read(node->room_fd, &count, sizeof(count));
    (void)got; /* empty is fine */
}

static bool is_stale_when_away(sl_message_type_t type)
{
    return type == SL_MSG_TOKENS || type == SL_MSG_PROMPT_LOGPROBS;
}

/* The frame is of no use: the router, once it is back, ends its attempt. The net thread raises
 * `registered` before it passes on anything of a new attempt, so none of those is dropped. */
static bool is_in_vain(const sl_node_t *node, sl_message_type_t type)
{
    return is_stale_when_away(type) && !atomic_load(&node->registered);
}

/* What ends the wait for room, or SL_OK. The router can stand still for a lease before this side
 * knows, so that much is waited on top. */
static sl_status_t check_wait(const sl_node_t *node, sl_message_type_t type, uint64_t waited_us)
{
    uint64_t most_us = node->post_timeout_us + atomic_load(&node->lease_us);
    if (is_stopping(node) || sl_node_group_failed(node)) {
        return sl_error(SL_ERR_CANCELED, "%s: %s while a %s message waited for the router at %s",
                        node->name, is_stopping(node) ? "stopped" : "the group failed",
                        sl_message_type_name(type), node->address);
    }
    if (waited_us >= most_us) {
        return sl_error(SL_ERR_TIMEOUT,
                        "%s: no room to queue a %s message for the router at %s"
                        " within %" PRIu64 " ms",
                        node->name, sl_message_type_name(type), node->address, most_us / 1000);
    }
    return SL_OK;
}

/* Takes the frame over on success only. */
static sl_status_t push_frame(sl_node_t *node, sl_node_frame_t *frame, sl_message_type_t type)
{
    uint64_t since_us = sl_now_us();
    while (sl_ring_push(node->outgoing, frame) != SL_OK) {
        SL_TRY(check_wait(node, type, sl_now_us() - since_us));
        atomic_store(&node->poster_waits, true);
        wait_for_room(node);
        if (is_in_vain(node, type)) {
            atomic_fetch_add(&node->dropped, 1);
            sl_node_frame_free(frame);
            return SL_OK;
        }
    }
    return SL_OK;
}

sl_status_t sl_node_post(sl_node_t *node, const sl_message_t *message)
{
    uint64_t registration = atomic_load(&node->registrations); /* before it is found registered */
    if (is_in_vain(node, message->type)) {
        atomic_fetch_add(&node->dropped, 1);
        return SL_OK;
    }
    sl_node_frame_t *frame = calloc(1, sizeof(*frame));
    if (frame == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory for a frame", node->name);
    }
    frame->stale_when_away = is_stale_when_away(message->type);
    frame->registration = registration;
    sl_status_t status = sl_message_encode(message, &frame->bytes);
    if (status == SL_OK) {
        status = push_frame(node, frame, message->type);
    }
    if (status != SL_OK) {
        sl_node_frame_free(frame);
    }
    return status;
}

sl_message_t *sl_node_take(sl_node_t *node)
{
    return sl_ring_pop(node->incoming);
}

void sl_node_message_free(sl_message_t *message)
{
    if (message != NULL) {
        sl_message_destroy(message);
        free(message);
    }
}

int sl_node_fd(const sl_node_t *node)
{
    return sl_ring_fd(node->incoming);
}

void sl_node_clear(sl_node_t *node)
{
    sl_ring_clear(node->incoming);
}

void sl_node_publish(sl_node_t *node, const sl_msg_heartbeat_t *figures)
{
    sl_node_figures_t *to = &node->figures;
    atomic_store_explicit(&to->progress, figures->progress, memory_order_relaxed);
    atomic_store_explicit(&to->busy, figures->busy, memory_order_relaxed);
    atomic_store_explicit(&to->pages_free, figures->pages_free, memory_order_relaxed);
    atomic_store_explicit(&to->pages_quiescing, figures->pages_quiescing, memory_order_relaxed);
    atomic_store_explicit(&to->running, figures->running, memory_order_relaxed);
    atomic_store_explicit(&to->queued_tokens, figures->queued_tokens, memory_order_relaxed);
    atomic_store_explicit(&to->tokens_out, figures->tokens_out, memory_order_relaxed);
}

bool sl_node_group_left(const sl_node_t *node)
{
    return atomic_load(&node->group_left);
}

bool sl_node_group_failed(const sl_node_t *node)
{
    return atomic_load(&node->group_failed);
}

bool sl_node_lease_valid(const sl_node_t *node)
{
    return sl_now_us() < atomic_load(&node->lease_until_us);
}

uint64_t sl_node_lease_us(const sl_node_t *node)
{
    return atomic_load(&node->lease_us);
}

sl_node_stats_t sl_node_stats(const sl_node_t *node)
{
    return (sl_node_stats_t){
        .sent = atomic_load(&node->sent),
        .received = atomic_load(&node->received),
        .registrations = atomic_load(&node->registrations),
        .undecodable = atomic_load(&node->undecodable),
        .dropped = atomic_load(&node->dropped),
    };
}
