/*
 * The net thread of a node: registration, heartbeats and lease, and moving frames.
 *
 *            handshake                 welcome
 *   DOWN ---------------> HELLOING ---------------> REGISTERED
 *     ^                    |  ^  |                    |     |
 *     |     disconnect     |  |  | refused            |     | no ack within the lease
 *     +--------------------+  |  +------> REFUSED     |     |
 *     +-----------------------|-----------------------+     |
 *                             +-----------------------------+
 *
 * In HELLOING only hellos are sent, again and again at growing intervals; queued frames wait, save
 * those of attempts that the router ends when this rank registers again: these are dropped. The
 * lease begins with the first acknowledged heartbeat and is counted from the moment that heartbeat
 * was *sent*: the router counts from its arrival, so this side gives up first.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/net/node_state.h"
#include "common/net/socket.h"

#define HELLO_FIRST_US 1000000u /* between the first hellos; doubles up to the next line */
#define HELLO_MAX_US 8000000u
#define BATCH 256            /* messages moved before timers are looked at again */
#define RING_RETRY_US 5000u  /* while the engine leaves its ring full */
#define HEARTBEAT_MIN_MS 10u /* whatever the router asks for */
#define LEASE_MAX_MS 3600000u
#define BYE_US 1000000u /* to send what is queued at the end */

/* ---- registration and lease ---- */

static void wake_poster(sl_node_t *node)
{
    if (atomic_load(&node->poster_waits) && atomic_exchange(&node->poster_waits, false)) {
        sl_node_signal(node->room_fd);
    }
}

/* The frame to be sent next, or NULL: what was popped first goes first. */
static sl_node_frame_t *next_frame(sl_node_t *node)
{
    sl_node_link_t *link = &node->link;
    sl_node_frame_t *frame = link->outgoing != NULL ? link->outgoing : STAILQ_FIRST(&link->kept);
    if (frame == NULL) {
        return sl_ring_pop(node->outgoing);
    }
    if (frame == link->outgoing) {
        link->outgoing = NULL;
    } else {
        STAILQ_REMOVE_HEAD(&link->kept, link);
    }
    return frame;
}

/* Empties the ring: keeps what must arrive, drops the rest. After this the engine itself drops the
 * like at its post, save one that it may be pushing just now: see is_stale(). */
static void drop_stale(sl_node_t *node)
{
    sl_node_frame_t *frame;
    sl_node_frames_t kept = STAILQ_HEAD_INITIALIZER(kept);
    while ((frame = next_frame(node)) != NULL) {
        if (frame->stale_when_away) {
            atomic_fetch_add(&node->dropped, 1);
            sl_node_frame_free(frame);
        } else {
            STAILQ_INSERT_TAIL(&kept, frame, link);
        }
    }
    STAILQ_CONCAT(&node->link.kept, &kept);
    wake_poster(node);
}

static void leave_registration(sl_node_t *node)
{
    node->link.registered = false;
    if (atomic_exchange(&node->registered, false)) {
        drop_stale(node);
    }
}

static void hello_soon(sl_node_t *node, uint64_t now_us)
{
    leave_registration(node);
    node->link.hello_due_us = now_us;
    node->link.hello_wait_us = HELLO_FIRST_US;
}

/* Posted under an earlier registration. */
static bool is_stale(const sl_node_t *node, const sl_node_frame_t *frame)
{
    return frame->stale_when_away && frame->registration != atomic_load(&node->registrations);
}

static sl_status_t send_frame(sl_node_t *node, const sl_bytes_t *frame)
{
    sl_status_t status = sl_socket_send(node->socket, node->name, frame->data, frame->size, 0);
    if (status == SL_OK) {
        atomic_fetch_add(&node->sent, 1);
    }
    return status;
}

static void send_hello(sl_node_t *node, uint64_t now_us)
{
    sl_node_link_t *link = &node->link;
    (void)send_frame(node, &node->hello_frame); /* no room: the next one will do */
    link->hello_due_us = now_us + link->hello_wait_us;
    link->hello_wait_us =
        link->hello_wait_us * 2 < HELLO_MAX_US ? link->hello_wait_us * 2 : HELLO_MAX_US;
}

static uint64_t clamp(uint64_t value, uint64_t least, uint64_t most)
{
    return value < least ? least : value > most ? most : value;
}

static void on_welcome(sl_node_t *node, const sl_msg_welcome_t *welcome, uint64_t now_us)
{
    sl_node_link_t *link = &node->link;
    if (welcome->incarnation != node->incarnation || link->refused) {
        sl_log_warn("%s: a welcome for incarnation %llu, mine is %llu", node->name,
                    (unsigned long long)welcome->incarnation,
                    (unsigned long long)node->incarnation);
        return;
    }
    if (link->registered) {
        return; /* the answer to a repeated hello */
    }
    uint64_t heartbeat_ms = clamp(welcome->heartbeat_ms, HEARTBEAT_MIN_MS, LEASE_MAX_MS);
    link->heartbeat_us = 1000 * heartbeat_ms;
    link->lease_us = 1000 * clamp(welcome->lease_ms, heartbeat_ms, LEASE_MAX_MS);
    link->registered = true;
    atomic_store(&node->registered, true);
    link->heartbeat_due_us = now_us;
    link->ack_due_us = now_us + link->lease_us;
    atomic_store(&node->lease_us, link->lease_us);
    uint64_t before = atomic_fetch_add(&node->registrations, 1);
    sl_log_info("%s: registered%s with the router at %s, heartbeat %llu ms, lease %llu ms",
                node->name, before > 0 ? " again" : "", node->address,
                (unsigned long long)heartbeat_ms, (unsigned long long)(link->lease_us / 1000));
    if (atomic_load(&node->state) == SL_NODE_JOINING) {
        atomic_store(&node->state, SL_NODE_WELCOMED);
        sl_node_signal(node->state_fd);
    }
}

static void tell_gone(sl_node_t *node, bool left)
{
    if (node->on_group_gone != NULL) {
        node->on_group_gone(left);
    }
}

/* True if this was the answer to the first registration; a later refusal is the engine's. */
static bool on_refused(sl_node_t *node, const sl_msg_refused_t *refused)
{
    node->link.refused = true;
    leave_registration(node);
    atomic_store(&node->group_failed, true);
    atomic_store(&node->lease_until_us, 0);
    if (atomic_load(&node->state) != SL_NODE_JOINING) {
        tell_gone(node, false);
        return false;
    }
    node->refusal = *refused;
    atomic_store(&node->state, SL_NODE_REFUSED);
    sl_node_signal(node->state_fd);
    return true;
}

static void send_heartbeat(sl_node_t *node, uint64_t now_us)
{
    sl_node_link_t *link = &node->link;
    sl_node_figures_t *from = &node->figures;
    sl_message_t message = {
        .type = SL_MSG_HEARTBEAT,
        .heartbeat =
            {
                .sequence = link->sequence + 1,
                .progress = atomic_load_explicit(&from->progress, memory_order_relaxed),
                .busy = atomic_load_explicit(&from->busy, memory_order_relaxed) != 0,
                .pages_free = atomic_load_explicit(&from->pages_free, memory_order_relaxed),
                .pages_quiescing =
                    atomic_load_explicit(&from->pages_quiescing, memory_order_relaxed),
                .running = atomic_load_explicit(&from->running, memory_order_relaxed),
                .queued_tokens = atomic_load_explicit(&from->queued_tokens, memory_order_relaxed),
                .tokens_out = atomic_load_explicit(&from->tokens_out, memory_order_relaxed),
            },
    };
    sl_bytes_t frame;
    link->heartbeat_due_us = now_us + link->heartbeat_us;
    if (sl_message_encode(&message, &frame) != SL_OK) {
        return;
    }
    if (send_frame(node, &frame) == SL_OK) {
        link->sequence++;
        link->sent_times_us[link->sequence % SL_NODE_SENT_TIMES] = now_us;
    }
    free(frame.data);
}

static void on_ack(sl_node_t *node, uint64_t sequence)
{
    sl_node_link_t *link = &node->link;
    if (!link->registered || sequence == 0 || sequence > link->sequence ||
        link->sequence - sequence >= SL_NODE_SENT_TIMES) {
        return;
    }
    uint64_t until_us = link->sent_times_us[sequence % SL_NODE_SENT_TIMES] + link->lease_us;
    if (until_us > link->ack_due_us) {
        link->ack_due_us = until_us;
    }
    if (until_us > atomic_load(&node->lease_until_us)) {
        atomic_store(&node->lease_until_us, until_us);
    }
}

static void run_timers(sl_node_t *node, uint64_t now_us)
{
    sl_node_link_t *link = &node->link;
    if (link->registered && now_us >= link->ack_due_us) {
        sl_log_warn("%s: no heartbeat acknowledged by the router at %s for %llu ms, registering "
                    "again",
                    node->name, node->address, (unsigned long long)(link->lease_us / 1000));
        hello_soon(node, now_us);
    }
    if (link->up && !link->registered && !link->refused && now_us >= link->hello_due_us) {
        send_hello(node, now_us);
    }
    if (link->registered && now_us >= link->heartbeat_due_us) {
        send_heartbeat(node, now_us);
    }
}

/* ---- connection events ---- */

/* One event of the monitor: a part with its number, then a part with the address. */
static bool next_event(sl_node_t *node, uint16_t *event_p)
{
    zmq_msg_t part;
    bool more = false;
    zmq_msg_init(&part);
    bool got = sl_socket_receive(node->monitor, node->name, &part, &more) == SL_OK &&
               zmq_msg_size(&part) >= sizeof(*event_p);
    if (got) {
        memcpy(event_p, zmq_msg_data(&part), sizeof(*event_p));
    }
    zmq_msg_close(&part);
    if (more) {
        sl_socket_drop_parts(node->monitor);
    }
    return got;
}

static void handle_events(sl_node_t *node, uint64_t now_us)
{
    sl_node_link_t *link = &node->link;
    uint16_t event;
    while (next_event(node, &event)) {
        bool up = event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED;
        if (link->up && !up) {
            sl_log_warn("%s: connection to the router at %s lost", node->name, node->address);
        }
        link->up = up;
        hello_soon(node, now_us);
    }
}

/* ---- router -> engine ---- */

/* What the net thread answers itself; false: the message is for the engine. */
static bool handle_own(sl_node_t *node, const sl_message_t *message, uint64_t now_us)
{
    switch (message->type) {
    case SL_MSG_WELCOME:
        on_welcome(node, &message->welcome, now_us);
        return true;
    case SL_MSG_HEARTBEAT_ACK:
        on_ack(node, message->heartbeat_ack.sequence);
        return true;
    case SL_MSG_REFUSED:
        return on_refused(node, &message->refused);
    default:
        return false;
    }
}

static bool is_for_engine(sl_message_type_t type)
{
    return type == SL_MSG_GROUP || type == SL_MSG_PEER || type == SL_MSG_RESERVE ||
           type == SL_MSG_PREFILL || type == SL_MSG_CANCEL_ATTEMPT || type == SL_MSG_GROUP_FAILED ||
           type == SL_MSG_REFUSED;
}

static void count_bad(sl_node_t *node, const char *text, uint64_t interval_us)
{
    atomic_fetch_add(&node->undecodable, 1);
    if (sl_log_allowed(&node->link.bad_logged_us, interval_us)) {
        sl_log_warn("%s: dropped a message of the router at %s: %s", node->name, node->address,
                    text);
    }
}

static void handle_frame(sl_node_t *node, zmq_msg_t *part, uint64_t now_us)
{
    sl_message_t message;
    if (sl_message_decode(zmq_msg_data(part), zmq_msg_size(part), &sl_wire_limits_default,
                          &message) != SL_OK) {
        count_bad(node, sl_error_text(), 1000000);
        return;
    }
    atomic_fetch_add(&node->received, 1);
    if (handle_own(node, &message, now_us)) {
        sl_message_destroy(&message);
        return;
    }
    sl_message_t *kept = is_for_engine(message.type) ? malloc(sizeof(*kept)) : NULL;
    if (kept == NULL) {
        count_bad(node, sl_message_type_name(message.type), 1000000);
        sl_message_destroy(&message);
        return;
    }
    *kept = message;
    node->link.incoming = kept;
    if (message.type == SL_MSG_GROUP_FAILED) {
        atomic_store(&node->group_left, message.group_failed.left);
        atomic_store(&node->group_failed, true);
        tell_gone(node, message.group_failed.left);
    }
}

static void push_incoming(sl_node_t *node)
{
    sl_node_link_t *link = &node->link;
    if (link->incoming != NULL && sl_ring_push(node->incoming, link->incoming) == SL_OK) {
        link->incoming = NULL;
    }
}

/* While the engine leaves its ring full nothing more is read: the router's queue fills instead. */
static void move_incoming(sl_node_t *node, uint64_t now_us)
{
    push_incoming(node);
    for (int i = 0; i < BATCH && node->link.incoming == NULL; i++) {
        zmq_msg_t part;
        bool more = false;
        zmq_msg_init(&part);
        sl_status_t status = sl_socket_receive(node->socket, node->name, &part, &more);
        if (status == SL_OK && more) {
            sl_socket_drop_parts(node->socket);
            count_bad(node, "more than one part", 1000000);
        } else if (status == SL_OK) {
            handle_frame(node, &part, now_us);
        }
        zmq_msg_close(&part);
        if (status != SL_OK) {
            return;
        }
        push_incoming(node);
    }
}

/* ---- engine -> router ---- */

/* Sends queued frames until there are none (true) or the socket has no room. */
static bool move_outgoing(sl_node_t *node)
{
    sl_node_link_t *link = &node->link;
    sl_ring_clear(node->outgoing);
    for (int i = 0; i < BATCH; i++) {
        link->outgoing = next_frame(node);
        wake_poster(node);
        if (link->outgoing == NULL) {
            link->more_outgoing = false;
            return true;
        }
        if (is_stale(node, link->outgoing)) {
            atomic_fetch_add(&node->dropped, 1);
        } else if (send_frame(node, &link->outgoing->bytes) == SL_ERR_AGAIN) {
            break;
        }
        sl_node_frame_free(link->outgoing);
        link->outgoing = NULL;
    }
    link->more_outgoing = true;
    return false;
}

/* ---- the loop ---- */

static long wait_ms(const sl_node_t *node, uint64_t now_us)
{
    const sl_node_link_t *link = &node->link;
    uint64_t due_us = now_us + 1000000;
    if (link->registered && link->more_outgoing && link->outgoing == NULL) {
        return 0;
    }
    if (link->registered) {
        due_us =
            link->heartbeat_due_us < link->ack_due_us ? link->heartbeat_due_us : link->ack_due_us;
    } else if (link->up && !link->refused) {
        due_us = link->hello_due_us;
    }
    if (link->incoming != NULL && due_us > now_us + RING_RETRY_US) {
        due_us = now_us + RING_RETRY_US;
    }
    return due_us > now_us ? (long)((due_us - now_us + 999) / 1000) : 0;
}

/* Waits for work. True if the thread shall end. */
static bool wait_for_work(sl_node_t *node)
{
    const sl_node_link_t *link = &node->link;
    bool wants_room = link->registered && link->outgoing != NULL;
    zmq_pollitem_t items[] = {
        {NULL, node->stop_fd, ZMQ_POLLIN, 0},
        {node->monitor, 0, ZMQ_POLLIN, 0},
        {node->socket, 0,
         (short)((link->incoming == NULL ? ZMQ_POLLIN : 0) | (wants_room ? ZMQ_POLLOUT : 0)), 0},
        {NULL, sl_ring_fd(node->outgoing), ZMQ_POLLIN, 0},
    };
    int count = link->registered && link->outgoing == NULL ? 4 : 3;
    int ready = zmq_poll(items, count, wait_ms(node, sl_now_us()));
    return ready > 0 && items[0].revents != 0;
}

/* Sends what is queued and a goodbye, as far as that goes within BYE_US. */
static void say_goodbye(sl_node_t *node)
{
    const sl_message_t message = {.type = SL_MSG_GOODBYE};
    uint64_t until_us = sl_now_us() + BYE_US;
    sl_bytes_t frame;
    bool empty = false;
    while (node->link.registered && !(empty = move_outgoing(node)) && sl_now_us() < until_us) {
        zmq_pollitem_t item = {node->socket, 0, ZMQ_POLLOUT, 0};
        zmq_poll(&item, 1, 10);
        handle_events(node, sl_now_us());
    }
    if (empty && sl_message_encode(&message, &frame) == SL_OK) {
        if (send_frame(node, &frame) != SL_OK) {
            sl_log_warn("%s: goodbye to the router at %s not sent", node->name, node->address);
        }
        free(frame.data);
    }
}

void *sl_node_link_run(void *arg)
{
    sl_node_t *node = arg;
    bool stop = false;
    while (!stop) {
        stop = wait_for_work(node);
        uint64_t now_us = sl_now_us();
        handle_events(node, now_us);
        move_incoming(node, now_us);
        run_timers(node, now_us);
        if (node->link.registered) {
            move_outgoing(node);
        }
    }
    say_goodbye(node);
    return NULL;
}
