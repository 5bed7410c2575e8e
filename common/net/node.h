/*
 * A rank's line to the router: one DEALER socket owned by a net thread that registers the rank,
 * sends heartbeats, and carries messages to and from the engine through two bounded rings.
 *
 * The engine posts messages and takes messages without blocking. The net thread answers for
 * liveness by itself: heartbeats carry the figures the engine last published. It reconnects and
 * registers again (same incarnation) when the router restarts; while the lease (time since the
 * last acknowledged heartbeat) has run out sl_node_lease_valid() is false and nothing may be
 * written to peers.
 */
#ifndef SL_NET_NODE_H
#define SL_NET_NODE_H

#include "common/base/status.h"
#include "common/wire/messages.h"

typedef struct sl_node sl_node_t;

typedef struct {
    const char *router;           /* "tcp://host:port" of the router's node socket */
    sl_msg_hello_t hello;         /* copied deeply */
    uint64_t register_timeout_us; /* without a welcome for this long sl_node_wait_welcome() fails;
                                     0: 30 s */
    bool (*stopping)(void);       /* ends waits for the welcome and for room early; NULL: never */
    /* On the net thread, when the group has left on purpose, or has failed, or the rank has lost
     * its place: the engine may be where it cannot notice. NULL: not wanted. */
    void (*group_gone)(bool left);
    uint64_t post_timeout_us; /* sl_node_post() waits a lease and this long; 0: 10 s */
    size_t ring_items;        /* 0: 4096 */
} sl_node_params_t;

typedef struct {
    uint64_t sent, received; /* messages of any type */
    uint64_t registrations;  /* welcomes after a hello of ours: 1, and 1 for each time again */
    uint64_t undecodable;    /* frames of the router that were refused here */
    uint64_t dropped;        /* tokens and prompt_logprobs that nobody waits for any more */
} sl_node_stats_t;

/* Starts the net thread and says hello. */
SL_MUST_USE sl_status_t sl_node_create(const sl_node_params_t *params, sl_node_t **node_p);

/* Sends what is queued (bounded linger 1 s), says goodbye, joins the thread. What follows is
 * sl_node_destroy(), or any thread's sl_node_lease_valid(). */
void sl_node_leave(sl_node_t *node);
/* Leaves if need be. NULL is ignored. */
void sl_node_destroy(sl_node_t *node);

/* Blocks until welcomed. SL_ERR_REFUSED carries the router's text; SL_ERR_TIMEOUT names the
 * address; SL_ERR_CANCELED: params->stopping() said so (seen at once after a signal). */
SL_MUST_USE sl_status_t sl_node_wait_welcome(sl_node_t *node);

/* Engine: queues a copy of `message` for the router, encoded here. Nothing but hellos leaves before
 * the router's welcome, and after a lost connection or a lapsed lease nothing before the next one;
 * frames on the way when a connection breaks are lost.
 *
 * The router ends the rank's attempts when it registers again, so while it is not registered
 * `tokens` and `prompt_logprobs` are dropped (SL_OK, counted in the stats), those that wait too:
 * the ring keeps its room for what must arrive, and the engine goes on however long the router is
 * away. All other messages are kept, in order.
 *
 * Blocks only while the ring is full (back-pressure). SL_ERR_CANCELED: params->stopping() says so
 * or the group has failed; looked at every 20 ms. SL_ERR_TIMEOUT: no room for a lease and
 * post_timeout_us. Not queued then. */
SL_MUST_USE sl_status_t sl_node_post(sl_node_t *node, const sl_message_t *message);

/* Engine: the next message from the router, or NULL. The caller frees it with
 * sl_node_message_free(). Types seen: GROUP, PEER, RESERVE, PREFILL, CANCEL_ATTEMPT, GROUP_FAILED,
 * and REFUSED when a later registration is refused (fatal). */
sl_message_t *sl_node_take(sl_node_t *node);
void sl_node_message_free(sl_message_t *message);

/* Readable while sl_node_take() may return something; clear before draining. */
int sl_node_fd(const sl_node_t *node);
void sl_node_clear(sl_node_t *node);

/* Engine: the figures the next heartbeats carry; `sequence` is ignored. Lock-free. */
void sl_node_publish(sl_node_t *node, const sl_msg_heartbeat_t *figures);

/* Any thread: whether GROUP_FAILED or a refusal has come, even before the engine takes it: ends a
 * wait for the group that can no longer be met. */
bool sl_node_group_failed(const sl_node_t *node);

/* Any thread, once sl_node_group_failed(): whether that is because a rank of the group has left on
 * purpose. */
bool sl_node_group_left(const sl_node_t *node);

/* Any thread: whether the router has acknowledged a heartbeat within the lease. */
bool sl_node_lease_valid(const sl_node_t *node);
uint64_t sl_node_lease_us(const sl_node_t *node);

/* Any thread: figures so far, each by itself exact. */
sl_node_stats_t sl_node_stats(const sl_node_t *node);

#endif
