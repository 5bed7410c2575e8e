/*
 * The node's memory, shared by its two sides: node.c (engine) and node_link.c (net thread).
 * Internal to common/net.
 *
 *   engine                                   net thread
 *     sl_node_post  --> outgoing ring ------>  socket (DEALER)  --> router
 *     sl_node_take  <-- incoming ring <------  socket           <-- router
 *     publish       --> figures (atomics) -->  heartbeat
 *     lease_valid   <-- lease_until_us <-----  heartbeat_ack
 */
#ifndef SL_NET_NODE_STATE_H
#define SL_NET_NODE_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

#include "common/base/ring.h"
#include "common/net/node.h"

#define SL_NODE_SENT_TIMES 64 /* heartbeats whose acks are still recognised */

typedef enum { SL_NODE_JOINING, SL_NODE_WELCOMED, SL_NODE_REFUSED } sl_node_state_t;

/* A frame on its way to the router. */
typedef struct sl_node_frame {
    STAILQ_ENTRY(sl_node_frame) link; /* in `kept` */
    bool stale_when_away;             /* of an attempt that registering again ends */
    uint64_t registration;            /* how many there had been when it was posted */
    sl_bytes_t bytes;
} sl_node_frame_t;
typedef STAILQ_HEAD(sl_node_frames, sl_node_frame) sl_node_frames_t;

typedef struct {
    _Atomic uint64_t progress, busy, pages_free, pages_quiescing, running, queued_tokens,
        tokens_out;
} sl_node_figures_t;

/* The net thread's own view of its connection. */
typedef struct {
    bool up;            /* ZeroMQ's handshake is through */
    bool registered;    /* welcomed on this connection, and the lease holds */
    bool refused;       /* no more hellos */
    bool more_outgoing; /* the ring was left before it was empty */
    uint64_t hello_due_us, hello_wait_us;
    uint64_t heartbeat_due_us, heartbeat_us, lease_us;
    uint64_t ack_due_us; /* without an ack until then: register again */
    uint64_t sequence;
    uint64_t sent_times_us[SL_NODE_SENT_TIMES]; /* by sequence, modulo the size */
    sl_node_frame_t *outgoing;                  /* popped, but the socket had no room yet */
    sl_node_frames_t kept;                      /* popped while away; before the ring's */
    sl_message_t *incoming;                     /* decoded, but the ring had no room yet */
    uint64_t bad_logged_us;
} sl_node_link_t;

struct sl_node {
    /* constant while the thread runs */
    void *context, *socket, *monitor;
    char address[256];
    char name[32];
    uint64_t incarnation;
    sl_bytes_t hello_frame;
    uint64_t register_timeout_us, post_timeout_us;
    bool (*stopping)(void);           /* may be NULL */
    void (*on_group_gone)(bool left); /* may be NULL */
    pthread_t thread;
    bool thread_started;

    /* meeting points */
    sl_ring_t *outgoing; /* sl_node_frame_t * */
    sl_ring_t *incoming; /* sl_message_t * */
    int stop_fd;         /* readable: the net thread shall end */
    int state_fd;        /* readable: `state` has left JOINING; never reset */
    int room_fd;         /* readable: the outgoing ring may have room again */
    _Atomic int state;
    sl_msg_refused_t refusal; /* written before `state` becomes REFUSED */
    _Atomic bool registered;  /* link.registered, for the engine */
    _Atomic bool poster_waits;
    _Atomic bool group_failed;
    _Atomic bool group_left; /* set before group_failed */
    _Atomic uint64_t lease_until_us, lease_us;
    _Atomic uint64_t sent, received, registrations, undecodable, dropped;
    sl_node_figures_t figures;

    sl_node_link_t link; /* net thread only */
};

/* The net thread. */
void *sl_node_link_run(void *node);

/* Frees a frame of the outgoing ring. NULL is ignored. */
void sl_node_frame_free(sl_node_frame_t *frame);

/* Adds one to an eventfd. */
void sl_node_signal(int fd);

#endif
