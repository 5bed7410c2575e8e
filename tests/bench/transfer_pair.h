/*
 * Two processes of this host: one writes latents (a prefill rank), the other reads (a decode rank).
 * Both make the same calls in the same order; the socket between them carries what one must know of
 * the other. What goes wrong ends the process with a message, which ends the other one too.
 * Main thread; blocking.
 */
#ifndef SL_BENCH_TRANSFER_PAIR_H
#define SL_BENCH_TRANSFER_PAIR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/transfer/transfer.h"
#include "kernels/ops.h"

/* Attempts take the slots of the pool in turn, by id. */
typedef struct {
    uint64_t page_bytes;           /* a multiple of 4 */
    uint32_t layers, pages, slots; /* `slots` times the `pages` of an attempt */
} sl_pair_shape_t;

typedef struct {
    bool writer;
    int fd; /* to the other process */
    sl_pair_shape_t shape;
    const sl_ops_t *ops;
    sl_device_t *device;
    uint8_t *pool; /* of the device */
    sl_ucx_t *ucx;
    sl_transfer_t *transfer;
    sl_rank_id_t self, peer;
    uint32_t *page_ids;    /* [slots][pages] */
    uint64_t next_attempt; /* the caller's; ids must grow */
} sl_pair_t;

/* Ends the process at once: the transfer thread may be at work, and UCX's and the driver's exit
 * handlers would take away what it uses. */
_Noreturn void sl_pair_die(void);
/* Dies with `what` and the thread's last error. */
void sl_pair_require(bool good, const char *what);
void sl_pair_require_ok(sl_status_t status, const char *what);

void sl_pair_tell(const sl_pair_t *pair, const void *data, size_t size);
void sl_pair_hear(const sl_pair_t *pair, void *data, size_t size);
void sl_pair_meet(const sl_pair_t *pair);

/* Fills the pool (the writer's bytes differ everywhere, the reader's are zero) and connects. The
 * caller has set writer, fd, shape, ops, device and pool. */
void sl_pair_open(sl_pair_t *pair, bool shuffled);
/* Leaves device and pool to the caller. */
void sl_pair_close(sl_pair_t *pair);

/* The reader's pages of an attempt hold the writer's bytes. */
void sl_pair_check_pages(sl_pair_t *pair, uint64_t attempt);

const uint32_t *sl_pair_pages(const sl_pair_t *pair, uint64_t attempt);

/* Writer. */
void sl_pair_open_attempt(sl_pair_t *pair, uint64_t attempt);
void sl_pair_push(sl_pair_t *pair, uint64_t attempt, uint32_t layer_begin, uint32_t layer_end);
void sl_pair_commit(sl_pair_t *pair, uint64_t attempt);

/* Reader. */
void sl_pair_grant(sl_pair_t *pair, uint64_t attempt);

/* Until the next attempt has ended, and well: SENT for the writer, COMMITTED for the reader. */
void sl_pair_wait_end(sl_pair_t *pair);

#endif
