/*
 * The loop. A turn drains both sockets (a bounded number of frames each, so that neither starves
 * the other), then settles peers found gone, runs the timers, and places waiting requests. Turns
 * repeat without polling until one has neither received nor sent anything: ZeroMQ's descriptor is
 * edge-triggered, and sending consumes edges too.
 */
#include "router/router.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/net/server.h"
#include "router/registry.h"
#include "router/requests.h"
#include "router/status.h"

#define FRAMES_PER_TURN 256
#define TICK_US 50000u
#define TICK_OVERDUE_US 500000u
#define FLUSH_RETRY_MS 2
#define LOG_INTERVAL_US 1000000u

/* The longest message of a client is a prompt of max_model_len ids, at most 5 bytes each: room for
 * three million. Ranks need more, for the logprobs of whole prompts. */
#define CLIENT_FRAME_BYTES ((size_t)16 << 20)

struct sl_router {
    sl_server_t *clients, *nodes;
    sl_registry_t *registry;
    sl_requests_t *requests;
    uint64_t started_us, ticked_us;
    uint64_t sent;    /* frames ever: tells whether a turn has sent any */
    bool backlog;     /* some peer's queue is not empty */
    char *ready_file; /* NULL: none was written */
    uint64_t unknown_log_us, bad_log_us;
};

/* ---- sink ---- */

static sl_status_t send_to_client(void *arg, const sl_peer_key_t *client,
                                  const sl_message_t *message)
{
    sl_router_t *router = arg;
    router->sent++;
    return sl_server_send(router->clients, client, message);
}

static sl_status_t send_to_rank(void *arg, const sl_peer_key_t *rank, const sl_message_t *message)
{
    sl_router_t *router = arg;
    router->sent++;
    return sl_server_send(router->nodes, rank, message);
}

static const sl_sink_ops_t socket_sink = {.to_client = send_to_client, .to_rank = send_to_rank};

static void on_rank_lost(void *arg, sl_rank_t *rank, bool gone, const char *reason)
{
    sl_requests_rank_lost(((sl_router_t *)arg)->requests, rank, gone, reason);
}

static void on_client_gone(void *arg, const sl_peer_key_t *client)
{
    sl_requests_client_gone(((sl_router_t *)arg)->requests, client);
}

static void on_node_gone(void *arg, const sl_peer_key_t *node)
{
    sl_registry_gone(((sl_router_t *)arg)->registry, node);
}

/* ---- start and end ---- */

static sl_status_t write_ready_file(sl_router_t *router, const char *path)
{
    char temporary[4096];
    int length = snprintf(temporary, sizeof(temporary), "%s.%d.tmp", path, (int)getpid());
    if (length < 0 || (size_t)length >= sizeof(temporary)) {
        return sl_error(SL_ERR_CONFIG, "--ready-file: a path of %zu characters is too long",
                        strlen(path));
    }
    FILE *file = fopen(temporary, "w");
    if (file == NULL) {
        return sl_error(SL_ERR_IO, "--ready-file: cannot create %s: %s", temporary,
                        strerror(errno));
    }
    bool written = fprintf(file, "client %s\nnode %s\n", sl_server_address(router->clients),
                           sl_server_address(router->nodes)) > 0;
    written = fclose(file) == 0 && written;
    if (!written || rename(temporary, path) != 0) {
        sl_status_t status =
            sl_error(SL_ERR_IO, "--ready-file: cannot write %s: %s", path, strerror(errno));
        unlink(temporary);
        return status;
    }
    router->ready_file = strdup(path);
    return SL_OK;
}

static sl_status_t create_sockets(sl_router_t *router, const sl_router_params_t *params)
{
    sl_server_params_t clients = {
        .bind = params->client_bind, .name = "client socket", .limits = sl_wire_limits_default};
    clients.limits.message_bytes = CLIENT_FRAME_BYTES;
    SL_TRY(sl_server_create(&clients, &router->clients));
    return sl_server_create(&(sl_server_params_t){.bind = params->node_bind, .name = "node socket"},
                            &router->nodes);
}

/* Attempt ids count on from the wall clock: 256 a microsecond are more than can ever be given out,
 * so a restarted router starts above all ids of the one before. */
static uint64_t first_attempt_id(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return ((uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u) << 8;
}

static sl_status_t create_tables(sl_router_t *router, const sl_router_params_t *params)
{
    sl_sink_t sink = {.ops = &socket_sink, .arg = router};
    sl_registry_params_t registry_params = {
        .heartbeat_ms = params->heartbeat_ms,
        .dead_ms = params->dead_ms,
        .stuck_ms = params->stuck_ms,
        /* A rank given up must not go on writing. */
        .lease_ms = params->lease_ms < params->dead_ms ? params->lease_ms : params->dead_ms,
        .max_ranks = params->max_ranks,
        .sink = sink,
        .rank_lost = on_rank_lost,
        .arg = router,
    };
    SL_TRY(sl_registry_create(&registry_params, router->started_us, &router->registry));
    sl_requests_params_t requests_params = {
        .registry = router->registry,
        .sink = sink,
        .max_clients = params->max_clients,
        .max_waiting = params->max_waiting,
        .max_waiting_tokens = params->max_waiting_tokens,
        .starve_ms = params->starve_ms,
        .place_timeout_ms = params->place_timeout_ms,
        .queue_timeout_ms = params->queue_timeout_ms,
        .silence_ms = params->silence_ms,
        .first_attempt = first_attempt_id(),
    };
    uint64_t *seed = &requests_params.hash_seed;
    if (getrandom(seed, sizeof(*seed), 0) != (ssize_t)sizeof(*seed)) {
        return sl_error(SL_ERR_IO, "getrandom: %s", strerror(errno));
    }
    return sl_requests_create(&requests_params, &router->requests);
}

sl_status_t sl_router_create(const sl_router_params_t *params, sl_router_t **router_p)
{
    sl_router_t *router = calloc(1, sizeof(*router));
    if (router == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "router: no memory");
    }
    router->started_us = router->ticked_us = sl_now_us();
    sl_status_t status = create_sockets(router, params);
    SL_TRY_GOTO(status, status, destroy_router);
    SL_TRY_GOTO(status, create_tables(router, params), destroy_router);
    sl_log_info("listening: clients %s, nodes %s", sl_server_address(router->clients),
                sl_server_address(router->nodes));
    if (params->ready_file[0] != 0) {
        SL_TRY_GOTO(status, write_ready_file(router, params->ready_file), destroy_router);
    }
    *router_p = router;
    return SL_OK;

destroy_router:
    sl_router_destroy(router);
    return status;
}

void sl_router_destroy(sl_router_t *router)
{
    if (router == NULL) {
        return;
    }
    if (router->ready_file != NULL) {
        unlink(router->ready_file); /* nobody must find addresses that lead nowhere */
        free(router->ready_file);
    }
    sl_requests_destroy(router->requests);
    sl_registry_destroy(router->registry);
    sl_server_destroy(router->nodes);
    sl_server_destroy(router->clients);
    free(router);
}

/* ---- clients ---- */

static void answer_client(sl_router_t *router, const sl_peer_key_t *client,
                          const sl_message_t *message)
{
    if (send_to_client(router, client, message) != SL_OK) {
        sl_requests_client_gone(router->requests, client);
    }
}

static void answer_status(sl_router_t *router, const sl_peer_key_t *client, uint64_t now_us)
{
    sl_message_t reply;
    sl_status_t status =
        sl_status_report(router->registry, router->requests, router->started_us, now_us, &reply);
    if (status != SL_OK) {
        sl_requests_reject(router->requests, client, "", status, sl_error_text());
        return;
    }
    answer_client(router, client, &reply);
    sl_message_destroy(&reply);
}

static void answer_info(sl_router_t *router, const sl_peer_key_t *client)
{
    sl_message_t reply;
    sl_status_info(router->registry, &reply);
    answer_client(router, client, &reply);
}

static void client_message(sl_router_t *router, const sl_peer_key_t *client, sl_message_t *message,
                           uint64_t now_us)
{
    switch (message->type) {
    case SL_MSG_GENERATE:
        sl_requests_generate(router->requests, client, message, now_us);
        break;
    case SL_MSG_CANCEL:
        sl_requests_cancel(router->requests, client, message->cancel.id);
        break;
    case SL_MSG_STATUS:
        answer_status(router, client, now_us);
        break;
    case SL_MSG_INFO:
        answer_info(router, client);
        break;
    default: {
        sl_status_t status =
            sl_error(SL_ERR_INVALID,
                     "message \"%s\" from a client, expected generate, cancel, status or info",
                     sl_message_type_name(message->type));
        sl_requests_reject(router->requests, client, "", status, sl_error_text());
    }
    }
}

/* ---- ranks ---- */

static void refuse_node(sl_router_t *router, const sl_peer_key_t *node, sl_status_t status)
{
    char name[32];
    const sl_rank_t *rank = sl_registry_find(router->registry, node);
    if (sl_log_allowed(&router->bad_log_us, LOG_INTERVAL_US)) {
        sl_log_warn("%s sent a bad frame: %s",
                    rank != NULL ? sl_rank_name(&rank->id, name) : "an unregistered node",
                    sl_error_text());
    }
    sl_registry_refuse(router->registry, node, status);
}

static void rank_message(sl_router_t *router, sl_rank_t *rank, const sl_peer_key_t *node,
                         sl_message_t *message, uint64_t now_us)
{
    switch (message->type) {
    case SL_MSG_READY:
        sl_registry_ready(router->registry, rank);
        break;
    case SL_MSG_HEARTBEAT:
        sl_registry_heartbeat(router->registry, rank, &message->heartbeat, now_us);
        break;
    case SL_MSG_GOODBYE:
        sl_registry_goodbye(router->registry, rank, &message->goodbye, now_us);
        break;
    case SL_MSG_TOKENS:
        sl_requests_tokens(router->requests, rank, message, now_us);
        break;
    case SL_MSG_PROMPT_LOGPROBS:
        sl_requests_prompt_logprobs(router->requests, rank, &message->prompt_logprobs, now_us);
        break;
    case SL_MSG_FAILED:
        sl_requests_failed(router->requests, rank, &message->failed);
        break;
    case SL_MSG_NO_PAGES:
        sl_requests_no_pages(router->requests, rank, message->attempt.attempt, now_us);
        break;
    case SL_MSG_RELEASED:
        sl_requests_released(router->requests, rank, message->attempt.attempt);
        break;
    default: {
        sl_status_t status = sl_error(SL_ERR_INVALID,
                                      "message \"%s\" from a rank is none a rank "
                                      "sends",
                                      sl_message_type_name(message->type));
        refuse_node(router, node, status);
    }
    }
}

static void node_message(sl_router_t *router, const sl_peer_key_t *node, sl_message_t *message,
                         uint64_t now_us)
{
    if (message->type == SL_MSG_HELLO) {
        sl_registry_hello(router->registry, node, message, now_us);
        return;
    }
    sl_rank_t *rank = sl_registry_find(router->registry, node);
    if (rank != NULL) {
        rank_message(router, rank, node, message, now_us);
    } else if (sl_log_allowed(&router->unknown_log_us, LOG_INTERVAL_US)) {
        /* After a restart of the router its ranks go on talking until they miss an ack and say
         * hello; a refusal here would end them. */
        sl_log_info("message \"%s\" from a node that is not registered is ignored",
                    sl_message_type_name(message->type));
    }
}

/* ---- loop ---- */

static void bad_client_frame(sl_router_t *router, const sl_peer_key_t *client, const char *id,
                             sl_status_t status)
{
    sl_requests_reject(router->requests, client, id, status, sl_error_text());
}

static void bad_node_frame(sl_router_t *router, const sl_peer_key_t *node, const char *id,
                           sl_status_t status)
{
    (void)id; /* requests have none on this socket */
    refuse_node(router, node, status);
}

/* What is done with the frames of one socket. */
typedef struct {
    void (*message)(sl_router_t *router, const sl_peer_key_t *sender, sl_message_t *message,
                    uint64_t now_us);
    void (*bad)(sl_router_t *router, const sl_peer_key_t *sender, const char *id,
                sl_status_t status);
} handlers_t;

static const handlers_t client_handlers = {client_message, bad_client_frame};
static const handlers_t node_handlers = {node_message, bad_node_frame};

static size_t drain(sl_router_t *router, sl_server_t *server, const handlers_t *handlers,
                    uint64_t now_us)
{
    size_t count = 0;
    sl_peer_key_t sender;
    char bad_id[SL_REQUEST_ID_BYTES];
    sl_message_t message;
    while (count < FRAMES_PER_TURN) {
        sl_status_t status = sl_server_receive(server, &sender, bad_id, &message);
        if (status == SL_OK) {
            handlers->message(router, &sender, &message, now_us);
            sl_message_destroy(&message);
        } else if (status == SL_ERR_INVALID || status == SL_ERR_LIMIT) {
            handlers->bad(router, &sender, bad_id, status);
        } else {
            break;
        }
        count++;
    }
    return count;
}

static void flush(sl_router_t *router)
{
    bool clients = sl_server_flush(router->clients, on_client_gone, router);
    bool nodes = sl_server_flush(router->nodes, on_node_gone, router);
    router->backlog = clients || nodes;
}

/* True: something was received or sent, so the sockets must be looked at again before polling. */
static bool turn(sl_router_t *router)
{
    uint64_t now_us = sl_now_us();
    uint64_t sent_before = router->sent;
    size_t received = drain(router, router->nodes, &node_handlers, now_us);
    received += drain(router, router->clients, &client_handlers, now_us);
    /* With the sockets empty if possible: what waits in them may be the heartbeat that is missed.
     * A flood of messages must not put the timers off for ever, though. */
    uint64_t since_us = now_us - router->ticked_us;
    if (since_us >= TICK_OVERDUE_US || (received == 0 && since_us >= TICK_US)) {
        router->ticked_us = now_us;
        sl_registry_tick(router->registry, now_us);
        sl_requests_tick(router->requests, now_us);
    }
    sl_registry_settle(router->registry, now_us);
    sl_requests_settle(router->requests);
    sl_requests_schedule(router->requests, now_us);
    return received > 0 || router->sent != sent_before;
}

sl_status_t sl_router_run(sl_router_t *router, int stop_fd)
{
    struct pollfd fds[] = {
        {.fd = stop_fd, .events = POLLIN},
        {.fd = sl_server_fd(router->clients), .events = POLLIN},
        {.fd = sl_server_fd(router->nodes), .events = POLLIN},
    };
    while ((fds[0].revents & POLLIN) == 0) {
        flush(router);
        while (turn(router)) {
            flush(router);
        }
        int timeout_ms = router->backlog ? FLUSH_RETRY_MS : (int)(TICK_US / 1000);
        if (poll(fds, 3, timeout_ms) < 0 && errno != EINTR) {
            return sl_error(SL_ERR_IO, "poll: %s", strerror(errno));
        }
    }
    sl_log_info("stopping");
    sl_requests_stop(router->requests, "the router is stopping");
    flush(router);
    return SL_OK;
}
