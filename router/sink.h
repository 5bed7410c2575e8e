/*
 * Where the router's state machines send to. The loop puts the two sockets behind it; the unit
 * tests put a recorder there, so that every rule can be tested without a socket.
 *
 * The functions do not block and do not keep `message`. SL_ERR_UNREACHABLE: that peer is gone.
 * SL_ERR_LIMIT: it does not read, and its bounded queue is full.
 */
#ifndef SL_ROUTER_SINK_H
#define SL_ROUTER_SINK_H

#include "common/net/server.h"
#include "common/wire/messages.h"

typedef struct {
    sl_status_t (*to_client)(void *arg, const sl_peer_key_t *client, const sl_message_t *message);
    sl_status_t (*to_rank)(void *arg, const sl_peer_key_t *rank, const sl_message_t *message);
} sl_sink_ops_t;

typedef struct {
    const sl_sink_ops_t *ops;
    void *arg;
} sl_sink_t;

#endif
