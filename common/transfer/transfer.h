/*
 * Latent pages from a prefill rank to a decode rank over UCX: one-sided where the transport writes
 * into the peer's memory by itself, otherwise (tcp) as messages that the peer's transfer thread
 * copies (transfer_data.c). The rules are the same.
 *
 *   decode rank (reader)                 prefill rank (writer)
 *   grant(attempt, generation, pages) -->  kept until open() or matched with it
 *                                     <--  puts of finished pages, as push() names them
 *                                     <--  flush, then commit(attempt, generation, ...)
 *                                     or   flush, then release(attempt, generation): given up
 *
 * A transfer thread owns the UCX worker, the endpoints and the protocol state. The engine gives
 * commands and takes events through bounded rings and never blocks on the network. Commands of one
 * attempt take effect in the order given.
 *
 * Rules that keep memory safe (DESIGN section 4): a posted put cannot be recalled, so granted pages
 * come back to the reader's engine only by COMMITTED, RELEASED, or WRITER_LOST; the last is raised
 * once the writer's endpoint has failed or been closed (peer_gone) *and* the writer's lease has
 * passed since. The writer checks its own lease (may_write) before every batch of puts and gives
 * the attempt up when it has run out. A commit or release with an unknown attempt or another
 * generation is refused and logged. Attempts have increasing ids per writer: a grant for an attempt
 * at or below the highest one opened here that is no longer held is answered with a release at
 * once, and one above it waits for its open().
 *
 * A peer whose connection broke stays broken until it comes back as another incarnation. Every
 * attempt that is opened, and every grant, ends with exactly one event.
 */
#ifndef SL_TRANSFER_TRANSFER_H
#define SL_TRANSFER_TRANSFER_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/transfer/ucx.h"
#include "common/wire/messages.h"

typedef struct sl_transfer sl_transfer_t;

typedef struct {
    sl_ucx_t *ucx;
    sl_rank_id_t self;
    void *base; /* the page pool: page p at base + p * page_bytes; registered whole */
    size_t page_bytes;
    bool device_memory; /* the pool is GPU memory; creation fails where UCX does not support it */
    /* Called once on the transfer thread, before it touches the pool. NULL: nothing to do. */
    sl_status_t (*bind_thread)(void *arg);
    void *bind_thread_arg;
    size_t layers; /* a page is `layers` equal blocks, one a layer */
    uint32_t page_count;
    uint64_t layout_hash;
    bool (*may_write)(void *arg); /* any thread; NULL: always */
    void *may_write_arg;
    uint64_t lease_us; /* first value of sl_transfer_set_lease(); 0: 5 s */
    size_t ring_items; /* 0: 8192 */
    /* Under way to one peer at most (but always a page): all of it may still land after the lease
     * has run out. 0: 512 MiB. */
    size_t peer_bytes_max;
    /* Puts even where UCX carries them as messages of its own (tcp). UCX 1.13 may abort the reader
     * when such a writer dies; otherwise those pages go as messages of the transfer engine. */
    bool always_put;
} sl_transfer_params_t;

SL_MUST_USE sl_status_t sl_transfer_create(const sl_transfer_params_t *params,
                                           sl_transfer_t **transfer_p);
/* Flushes what is in flight (at most 5 s), closes the endpoints, joins the thread. What follows on
 * a stopped one is sl_transfer_destroy() alone. */
void sl_transfer_stop(sl_transfer_t *transfer);
/* Stops it if need be. UCX may wait for all of a device's work as it lets go of its memory. */
void sl_transfer_destroy(sl_transfer_t *transfer);

/* How long a writer may go on writing after the router has given it up: the lease that the router
 * grants its ranks, known once this rank is welcomed. A lost writer's pages come back no earlier.
 * Any thread. */
void sl_transfer_set_lease(sl_transfer_t *transfer, uint64_t lease_us);

/* Opaque: worker address, pool base and key. Valid while the transfer lives. */
void sl_transfer_address(const sl_transfer_t *transfer, sl_bytes_t *borrowed);

/* ---- commands; each copies its arguments. They block only while the command ring is full. ---- */

SL_MUST_USE sl_status_t sl_transfer_peer_add(sl_transfer_t *transfer, const sl_rank_id_t *peer,
                                             const sl_bytes_t *address);
/* The router says the peer is gone (dead or left): it is told so, in case that it lives, and its
 * endpoint is closed by force. */
SL_MUST_USE sl_status_t sl_transfer_peer_gone(sl_transfer_t *transfer, const sl_rank_id_t *peer);

/* Reader: tells `writer` where to write. Pages are the engine's FILLING pages, in prompt order. */
SL_MUST_USE sl_status_t sl_transfer_grant(sl_transfer_t *transfer, uint64_t attempt,
                                          uint32_t generation, const sl_rank_id_t *writer,
                                          const uint32_t *pages, uint32_t page_count);

/* Writer: begins an attempt; FAILED if a target has not been added. targets[0] grants and gets the
 * commit; with --attention tp on the reading side the other ranks of its group get the same pages
 * at the same page ids. */
SL_MUST_USE sl_status_t sl_transfer_open(sl_transfer_t *transfer, uint64_t attempt,
                                         const sl_rank_id_t *targets, uint32_t target_count);

/* Writer: pages [first, first + count) of the prompt lie finished, for layers [layer_begin,
 * layer_end), in own pages local[0..count). They must stay untouched until an event ends the
 * attempt. */
SL_MUST_USE sl_status_t sl_transfer_push(sl_transfer_t *transfer, uint64_t attempt, uint32_t first,
                                         const uint32_t *local, uint32_t count,
                                         uint32_t layer_begin, uint32_t layer_end);

/* What the reader needs to go on with the request. Little-endian on the wire. */
typedef struct {
    uint32_t page_count; /* pages pushed in all, of all layers: as many as were granted */
    uint32_t prompt_len;
    int32_t first_token; /* sampled from the prompt's last position, output index 0 */
    uint64_t seed;       /* of the request; randomness is (seed, position) */
} sl_commit_t;

/* Writer: all pages are pushed; flush every target, then commit to targets[0]. */
SL_MUST_USE sl_status_t sl_transfer_commit(sl_transfer_t *transfer, uint64_t attempt,
                                           const sl_commit_t *commit);

/* Writer: give up (cancelled, failed, or finished without decode): flush, then release. Also for
 * attempts that were not opened (ABORTED) or have ended already (no event). */
SL_MUST_USE sl_status_t sl_transfer_abort(sl_transfer_t *transfer, uint64_t attempt);

/* ---- events ---- */

typedef enum {
    SL_TRANSFER_SENT,        /* writer: committed; own pages are free to go */
    SL_TRANSFER_ABORTED,     /* writer: given up, nothing in flight, release sent or not needed */
    SL_TRANSFER_FAILED,      /* writer: a target failed or the lease ran out; nothing in flight */
    SL_TRANSFER_COMMITTED,   /* reader: pages are complete and visible */
    SL_TRANSFER_RELEASED,    /* reader: the writer has flushed and gave up, or its commit was not of
                                this layout and number of pages (status SL_ERR_REFUSED) */
    SL_TRANSFER_WRITER_LOST, /* reader: no write can land any more */
} sl_transfer_event_type_t;

typedef struct {
    sl_transfer_event_type_t type;
    uint64_t attempt;
    uint32_t generation; /* reader's events */
    sl_commit_t commit;  /* COMMITTED */
    sl_status_t status;  /* FAILED, WRITER_LOST, RELEASED */
    char text[256];      /* FAILED, WRITER_LOST: which peer and why */
} sl_transfer_event_t;

/* The next event, or NULL; free() it. */
sl_transfer_event_t *sl_transfer_take(sl_transfer_t *transfer);
int sl_transfer_fd(const sl_transfer_t *transfer);
void sl_transfer_clear(sl_transfer_t *transfer);

#endif
