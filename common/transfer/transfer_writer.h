/* What the files of the writing side share: transfer_writer.c (attempts being written),
 * transfer_grants.c (which grant belongs to which attempt) and transfer_data.c (pages as
 * messages). Transfer thread only. */
#ifndef SL_TRANSFER_TRANSFER_WRITER_H
#define SL_TRANSFER_TRANSFER_WRITER_H

#include "common/transfer/transfer_engine.h"

/* A grant as it came in. */
typedef struct {
    sl_id_node_t node; /* first: the attempt */
    sl_rank_id_t from;
    uint32_t generation;
    uint32_t page_count;
    uint32_t pages[];
} sl_early_t;

typedef struct {
    struct sl_attempt *attempt;
    sl_peer_t *peer;    /* NULL if it was not known at the open */
    bool written;       /* a put has been posted to it */
    uint64_t last_data; /* the peer's data_sent after the attempt's last data message; 0: none */
} sl_target_t;

typedef enum { SL_ATTEMPT_WRITING, SL_ATTEMPT_FLUSHING, SL_ATTEMPT_SENDING } sl_attempt_phase_t;

typedef struct sl_attempt {
    sl_id_node_t node; /* first: the attempt's id */
    sl_transfer_t *transfer;
    struct sl_attempt *older, *newer;
    sl_attempt_phase_t phase;
    uint32_t in_flight; /* puts, flushes and messages */
    uint64_t end_by_us; /* from FLUSHING on: then the targets are given up */

    bool granted;
    uint32_t generation;
    uint32_t page_count;
    uint32_t *pages;   /* remote page of each page of the prompt */
    uint64_t *covered; /* bit page * layers + layer: has been put to every target */

    sl_command_t *segments, **segments_tail; /* pushes that are not all put yet, oldest first */
    uint32_t cursor_page, cursor_target;     /* within the oldest */
    size_t cursor_bytes;                     /* within the page: data messages split it */

    bool commit_wanted, abort_wanted;
    sl_commit_t commit;
    sl_status_t failed;
    char text[256];

    uint32_t target_count;
    sl_target_t targets[];
} sl_attempt_t;

/* A new attempt in the tables; its targets are still empty. */
sl_attempt_t *sl_attempt_create(sl_transfer_t *transfer, uint64_t id, uint32_t target_count);
void sl_attempt_fail_open(sl_transfer_t *transfer, sl_attempt_t *attempt, sl_status_t status,
                          const char *text);
/* Copies the grant. */
void sl_attempt_set_grant(sl_transfer_t *transfer, sl_attempt_t *attempt, sl_early_t *grant);
void sl_writer_free_attempts(sl_transfer_t *transfer);

/* Accounts of a put or data message of `bytes`. */
void sl_put_begun(sl_target_t *target, size_t bytes);
void sl_put_finished(sl_target_t *target, size_t bytes, ucs_status_t status);

/* ---- transfer_data.c ---- */

bool sl_data_window_open(const sl_peer_t *peer);
/* Posts as much of the bytes as one message takes; how much that is. `place` says where they go;
 * the bytes must stay until in_flight says so. */
size_t sl_data_post(sl_transfer_t *transfer, sl_target_t *target, const sl_data_place_t *place,
                    const uint8_t *bytes, size_t size);
/* The target has copied all that the attempt sent it, or never will. */
bool sl_data_seen(const sl_target_t *target);

/* Whether the peer owes an answer for longer than `wait_us`. */
bool sl_data_overdue(const sl_peer_t *peer, uint64_t now_us, uint64_t wait_us);

#endif
