/*
 * The router: two bound sockets, one thread, one loop. Messages from clients and ranks are
 * dispatched to the registry and the request table; timers run from the same loop, which never
 * waits for anything but its sockets, so no peer can hold them up.
 *
 * Owning thread: the one that calls create, run and destroy.
 */
#ifndef SL_ROUTER_ROUTER_H
#define SL_ROUTER_ROUTER_H

#include "common/base/status.h"

#include <stdint.h>

typedef struct sl_router sl_router_t;

/* All fields must be set; main.c's option table holds the defaults. */
typedef struct {
    const char *client_bind, *node_bind;
    const char *ready_file; /* "": none */
    uint64_t heartbeat_ms, dead_ms, stuck_ms, lease_ms;
    uint64_t max_ranks, max_clients, max_waiting, max_waiting_tokens;
    uint64_t starve_ms, place_timeout_ms, queue_timeout_ms, silence_ms;
} sl_router_params_t;

/* Binds both sockets and, last, writes the ready file: "client tcp://..." and "node tcp://...",
 * with the real ports, one a line; it appears complete or not at all. */
SL_MUST_USE sl_status_t sl_router_create(const sl_router_params_t *params, sl_router_t **router_p);

/* Runs until `stop_fd` is readable, then fails what is under way with a clear text and returns. */
SL_MUST_USE sl_status_t sl_router_run(sl_router_t *router, int stop_fd);

/* NULL is ignored. */
void sl_router_destroy(sl_router_t *router);

#endif
