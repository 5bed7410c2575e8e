/*
 * A test backend that behaves towards the host as an accelerator does: the operations of `ref`, but
 * put into a queue at the call and run later, so that code which does not wait where it must reads
 * or changes something too early, and a test on the CPU sees it.
 *
 *  - Parameter structs are copied at the call. Host arrays in them are copied too: they are
 * borrowed for the call alone. Ordinary host memory of uploads is copied; that of downloads is
 * filled in synchronize(), and not before.
 *  - alloc_host() memory is read and written when the copy runs. An upload whose bytes have changed
 *    by then is an error (SL_ERR_DEVICE) in whatever call runs it; the target of a download is
 *    filled with rubbish at the call.
 *  - New memory, the device's and alloc_host()'s, is filled with rubbish.
 *  - Recordings keep parameter structs as they were; what needs host memory at a launch may not be
 *    recorded (asserted).
 *  - attn_absorbed() demands the schedule: a plan of the same rows, arrays and lengths.
 *  - Nothing waits for the device when memory is given back: what is left runs in close(), where
 * the address sanitizer sees it.
 *
 * Each device is used by one thread. Ranks of a group live in one process and meet at a
 * deferred_meeting_t in place of a group.
 */
#ifndef SL_TESTS_DEFERRED_OPS_H
#define SL_TESTS_DEFERRED_OPS_H

#include "kernels/ops.h"

typedef enum {
    DEFERRED_LAZY,   /* nothing runs before somebody waits, and then only what is waited for */
    DEFERRED_RANDOM, /* a seeded number of operations runs whenever one is queued */
    DEFERRED_EAGER,  /* everything runs at once */
} deferred_progress_t;

typedef struct deferred_meeting deferred_meeting_t;

typedef struct {
    deferred_progress_t progress;
    uint64_t seed;
    bool records;                /* whether it has recordings */
    deferred_meeting_t *meeting; /* of the ranks' collectives, borrowed; NULL: none */
} deferred_params_t;

/* The table, and how devices opened from now on behave. Not while another thread opens one. */
const sl_ops_t *deferred_ops(const deferred_params_t *params);

/* Recordings launched since the process began, of all devices. */
uint64_t deferred_launches(void);

/* Where `size` ranks, a thread each, exchange rows: an all-reduce and its like begins when all have
 * come to it. */
deferred_meeting_t *deferred_meeting_create(uint32_t size);
void deferred_meeting_destroy(deferred_meeting_t *meeting);

#endif
