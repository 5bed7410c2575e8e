/*
 * The ROUTER socket and the queues of slow peers.
 *
 * ROUTER refuses the first part (the routing id) of a message for an unknown peer (EHOSTUNREACH)
 * or for one whose ZeroMQ queue is full (EAGAIN); once the first part is taken the second always
 * is. A refused frame goes to the end of the peer's own queue here, and as long as that queue
 * exists later frames go behind it, so order holds. Peers without waiting frames have no entry.
 *
 *   queues[hash(key)] -> queue (key, bytes) -> queue ...
 *                          first -> frame -> frame -> ... <- last
 */
#include "common/net/server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/net/socket.h"

#define BUCKET_COUNT 256
#define ADDRESS_BYTES 256
#define NAME_BYTES 64
#define DEFAULT_QUEUE_BYTES ((size_t)64 << 20)
#define FRAME_OVERHEAD_BYTES 64 /* counted on top of a waiting frame's bytes */

typedef struct frame {
    struct frame *next;
    sl_bytes_t bytes;
} frame_t;

typedef struct queue {
    struct queue *next; /* in the bucket */
    sl_peer_key_t key;
    frame_t *first, **last_p;
    size_t bytes;
} queue_t;

struct sl_server {
    void *context, *socket;
    char name[NAME_BYTES];
    char address[ADDRESS_BYTES];
    sl_wire_limits_t limits;
    size_t peer_queue_bytes;
    queue_t *queues[BUCKET_COUNT];
    size_t queue_count;
};

/* ---- queues ---- */

bool sl_peer_key_same(const sl_peer_key_t *a, const sl_peer_key_t *b)
{
    return a->size == b->size && memcmp(a->bytes, b->bytes, a->size) == 0;
}

static queue_t **bucket_of(sl_server_t *server, const sl_peer_key_t *key)
{
    uint32_t hash = 2166136261u;
    for (uint8_t i = 0; i < key->size; i++) {
        hash = (hash ^ key->bytes[i]) * 16777619u;
    }
    return &server->queues[hash % BUCKET_COUNT];
}

static queue_t *queue_find(sl_server_t *server, const sl_peer_key_t *key)
{
    queue_t *queue = *bucket_of(server, key);
    while (queue != NULL && !sl_peer_key_same(&queue->key, key)) {
        queue = queue->next;
    }
    return queue;
}

static queue_t *queue_add(sl_server_t *server, const sl_peer_key_t *key)
{
    queue_t **bucket = bucket_of(server, key);
    queue_t *queue = calloc(1, sizeof(*queue));
    if (queue == NULL) {
        return NULL;
    }
    queue->key = *key;
    queue->last_p = &queue->first;
    queue->next = *bucket;
    *bucket = queue;
    server->queue_count++;
    return queue;
}

static void queue_pop(queue_t *queue)
{
    frame_t *frame = queue->first;
    queue->first = frame->next;
    if (queue->first == NULL) {
        queue->last_p = &queue->first;
    }
    queue->bytes -= frame->bytes.size + FRAME_OVERHEAD_BYTES;
    free(frame->bytes.data);
    free(frame);
}

void sl_server_forget(sl_server_t *server, const sl_peer_key_t *peer)
{
    queue_t **link = bucket_of(server, peer);
    while (*link != NULL && !sl_peer_key_same(&(*link)->key, peer)) {
        link = &(*link)->next;
    }
    queue_t *queue = *link;
    if (queue == NULL) {
        return;
    }
    while (queue->first != NULL) {
        queue_pop(queue);
    }
    *link = queue->next;
    server->queue_count--;
    free(queue);
}

/* Takes over `bytes` on success only. */
static sl_status_t queue_push(sl_server_t *server, const sl_peer_key_t *peer, sl_bytes_t bytes)
{
    queue_t *queue = queue_find(server, peer);
    size_t waiting = queue != NULL ? queue->bytes : 0;
    if (waiting + bytes.size + FRAME_OVERHEAD_BYTES > server->peer_queue_bytes) {
        return sl_error(
            SL_ERR_LIMIT,
            "%s: a slow peer may have at most %zu bytes waiting, found %zu and %zu more",
            server->name, server->peer_queue_bytes, waiting, bytes.size);
    }
    frame_t *frame = calloc(1, sizeof(*frame));
    if (frame != NULL && queue == NULL) {
        queue = queue_add(server, peer);
    }
    if (frame == NULL || queue == NULL) {
        free(frame);
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory to queue %zu bytes", server->name,
                        bytes.size);
    }
    frame->bytes = bytes;
    *queue->last_p = frame;
    queue->last_p = &frame->next;
    queue->bytes += bytes.size + FRAME_OVERHEAD_BYTES;
    return SL_OK;
}

/* ---- socket ---- */

static sl_status_t bind_socket(sl_server_t *server, const char *address)
{
    size_t size = sizeof(server->address);
    SL_TRY(sl_socket_open(server->context, ZMQ_ROUTER, server->name, &server->limits,
                          &server->socket));
    SL_TRY(sl_socket_set(server->socket, server->name, ZMQ_ROUTER_MANDATORY, 1));
    if (zmq_bind(server->socket, address) != 0) {
        return sl_error(SL_ERR_IO, "%s: cannot bind %s: %s", server->name, address,
                        zmq_strerror(errno));
    }
    if (zmq_getsockopt(server->socket, ZMQ_LAST_ENDPOINT, server->address, &size) != 0) {
        return sl_error(SL_ERR_IO, "%s: cannot read the bound address: %s", server->name,
                        zmq_strerror(errno));
    }
    return SL_OK;
}

sl_status_t sl_server_create(const sl_server_params_t *params, sl_server_t **server_p)
{
    sl_server_t *server = calloc(1, sizeof(*server));
    if (server == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: no memory", params->name);
    }
    snprintf(server->name, sizeof(server->name), "%s", params->name);
    server->limits = params->limits.message_bytes != 0 ? params->limits : sl_wire_limits_default;
    server->peer_queue_bytes =
        params->peer_queue_bytes != 0 ? params->peer_queue_bytes : DEFAULT_QUEUE_BYTES;
    server->context = zmq_ctx_new();
    sl_status_t status =
        server->context != NULL
            ? bind_socket(server, params->bind)
            : sl_error(SL_ERR_IO, "%s: cannot start zeromq: %s", params->name, zmq_strerror(errno));
    if (status != SL_OK) {
        sl_server_destroy(server);
        return status;
    }
    *server_p = server;
    return SL_OK;
}

void sl_server_destroy(sl_server_t *server)
{
    if (server == NULL) {
        return;
    }
    for (size_t i = 0; i < BUCKET_COUNT; i++) {
        while (server->queues[i] != NULL) {
            sl_server_forget(server, &server->queues[i]->key);
        }
    }
    if (server->socket != NULL) {
        zmq_close(server->socket);
    }
    if (server->context != NULL) {
        zmq_ctx_term(server->context); /* at most the linger time */
    }
    free(server);
}

const char *sl_server_address(const sl_server_t *server)
{
    return server->address;
}

int sl_server_fd(const sl_server_t *server)
{
    int fd = -1;
    size_t size = sizeof(fd);
    SL_ASSERT(zmq_getsockopt(server->socket, ZMQ_FD, &fd, &size) == 0);
    return fd;
}

/* ---- receiving ---- */

static sl_status_t receive_key(sl_server_t *server, sl_peer_key_t *sender, bool *more_p)
{
    zmq_msg_t part;
    zmq_msg_init(&part);
    sl_status_t status = sl_socket_receive(server->socket, server->name, &part, more_p);
    if (status == SL_OK) {
        size_t size = zmq_msg_size(&part);
        SL_ASSERT(size <= sizeof(sender->bytes)); /* ZeroMQ's own limit of a routing id */
        sender->size = (uint8_t)size;
        memcpy(sender->bytes, zmq_msg_data(&part), size);
    }
    zmq_msg_close(&part);
    return status;
}

static sl_status_t decode_part(const sl_server_t *server, zmq_msg_t *part,
                               char bad_id[SL_REQUEST_ID_BYTES], sl_message_t *message_p)
{
    const uint8_t *data = zmq_msg_data(part);
    size_t size = zmq_msg_size(part);
    sl_status_t status = sl_message_decode(data, size, &server->limits, message_p);
    if (status != SL_OK) {
        sl_message_peek_id(data, size, &server->limits, bad_id);
    }
    return status;
}

sl_status_t sl_server_receive(sl_server_t *server, sl_peer_key_t *sender,
                              char bad_id[SL_REQUEST_ID_BYTES], sl_message_t *message_p)
{
    bool more = false;
    bad_id[0] = 0;
    SL_TRY(receive_key(server, sender, &more));
    if (!more) {
        return sl_error(SL_ERR_INVALID, "%s: expected a message of one part, found none",
                        server->name);
    }
    zmq_msg_t part;
    zmq_msg_init(&part);
    sl_status_t status = sl_socket_receive(server->socket, server->name, &part, &more);
    if (status == SL_OK && more) {
        status = sl_error(SL_ERR_INVALID, "%s: expected a message of one part, found %zu",
                          server->name, 1 + sl_socket_drop_parts(server->socket));
    } else if (status == SL_OK) {
        status = decode_part(server, &part, bad_id, message_p);
    }
    zmq_msg_close(&part);
    return status;
}

/* ---- sending ---- */

static sl_status_t send_frame(sl_server_t *server, const sl_peer_key_t *peer,
                              const sl_bytes_t *frame)
{
    SL_TRY(sl_socket_send(server->socket, server->name, peer->bytes, peer->size, ZMQ_SNDMORE));
    return sl_socket_send(server->socket, server->name, frame->data, frame->size, 0);
}

sl_status_t sl_server_send(sl_server_t *server, const sl_peer_key_t *peer,
                           const sl_message_t *message)
{
    sl_bytes_t frame;
    SL_TRY(sl_message_encode(message, &frame));
    sl_status_t status =
        queue_find(server, peer) != NULL ? SL_ERR_AGAIN : send_frame(server, peer, &frame);
    if (status == SL_ERR_AGAIN) {
        status = queue_push(server, peer, frame);
        if (status == SL_OK) {
            return SL_OK;
        }
    } else if (status == SL_ERR_UNREACHABLE) {
        /* Not sl_error(): peers come and go, and whoever sends decides whether this is one. */
        sl_log_debug("%s: the peer of a %s message is gone", server->name,
                     sl_message_type_name(message->type));
    }
    free(frame.data);
    return status;
}

/* Sends what `queue` holds, as far as it goes. */
static sl_status_t queue_send(sl_server_t *server, queue_t *queue)
{
    while (queue->first != NULL) {
        SL_TRY(send_frame(server, &queue->key, &queue->first->bytes));
        queue_pop(queue);
    }
    return SL_OK;
}

bool sl_server_flush(sl_server_t *server, void (*gone)(void *arg, const sl_peer_key_t *peer),
                     void *arg)
{
    for (size_t i = 0; server->queue_count > 0 && i < BUCKET_COUNT; i++) {
        queue_t *queue = server->queues[i];
        while (queue != NULL) {
            queue_t *next = queue->next;
            sl_peer_key_t key = queue->key;
            sl_status_t status = queue_send(server, queue);
            if (status != SL_ERR_AGAIN) {
                sl_server_forget(server, &key);
            }
            if (status != SL_OK && status != SL_ERR_AGAIN) {
                gone(arg, &key);
                next = server->queues[i]; /* the callback may have changed the bucket */
            }
            queue = next;
        }
    }
    return server->queue_count > 0;
}
