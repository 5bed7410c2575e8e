/*
 * The router's side of a socket: one bound ROUTER, used by the router's single thread only.
 *
 * ZeroMQ's ROUTER drops silently by default; this endpoint does not: ROUTER_MANDATORY is set, every
 * send is DONTWAIT, and what a slow peer cannot take yet waits in a bounded queue of that peer.
 * A peer over its bound, or gone, is reported to the caller, who decides what that means. One that
 * reads nothing for however long is slow, and not gone, while its host answers. ZeroMQ
 * lets go of a lost connection only while its input is read, so keep calling sl_server_receive().
 */
#ifndef SL_NET_SERVER_H
#define SL_NET_SERVER_H

#include "common/base/status.h"
#include "common/wire/messages.h"

typedef struct sl_server sl_server_t;

/* ZeroMQ routing id of a connection; unique while the socket lives. */
typedef struct {
    uint8_t size;
    uint8_t bytes[255];
} sl_peer_key_t;

typedef struct {
    const char *bind;        /* "tcp://0.0.0.0:5550"; port 0 or "*": any free one */
    const char *name;        /* in error texts: "client socket" */
    sl_wire_limits_t limits; /* zeroed: sl_wire_limits_default */
    size_t peer_queue_bytes; /* a peer's waiting bytes at most; 0: 64 MiB */
} sl_server_params_t;

/* SL_ERR_IO "client socket: cannot bind tcp://...: Address already in use". */
SL_MUST_USE sl_status_t sl_server_create(const sl_server_params_t *params, sl_server_t **server_p);
void sl_server_destroy(sl_server_t *server);

/* The address bound, with the real port. Valid while the server lives. */
const char *sl_server_address(const sl_server_t *server);

/* To poll for reading; level of ZMQ_FD is edge-like, so drain sl_server_receive() until AGAIN after
 * every poll and after every send. */
int sl_server_fd(const sl_server_t *server);

/* One frame. SL_OK: message and sender are set. SL_ERR_AGAIN: nothing waits. SL_ERR_INVALID or
 * SL_ERR_LIMIT: the frame did not decode; sender and `bad_id` (may be "") are set so that the
 * caller can answer. */
SL_MUST_USE sl_status_t sl_server_receive(sl_server_t *server, sl_peer_key_t *sender,
                                          char bad_id[SL_REQUEST_ID_BYTES],
                                          sl_message_t *message_p);

/* Sends or queues. SL_ERR_UNREACHABLE: no such peer any more; nothing is wrong here, so it is
 * logged at debug level only and leaves no error text. SL_ERR_LIMIT: its queue is full. */
SL_MUST_USE sl_status_t sl_server_send(sl_server_t *server, const sl_peer_key_t *peer,
                                       const sl_message_t *message);

/* Tries queued frames again; calls `gone` for each peer found unreachable. True if frames remain
 * (call again within some milliseconds). */
bool sl_server_flush(sl_server_t *server, void (*gone)(void *arg, const sl_peer_key_t *peer),
                     void *arg);

/* Drops a peer's queue. */
void sl_server_forget(sl_server_t *server, const sl_peer_key_t *peer);

bool sl_peer_key_same(const sl_peer_key_t *a, const sl_peer_key_t *b);

#endif
