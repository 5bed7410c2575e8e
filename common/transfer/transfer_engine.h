/*
 * The transfer engine's insides, shared by its files. Everything here belongs to the transfer
 * thread unless said otherwise; UCX's callbacks run inside that thread's calls into UCX.
 *
 *   transfer.c          the engine-facing side: create, commands, events, destroy
 *   transfer_thread.c   the thread: commands, messages, progress, sleep, shutdown
 *   transfer_peer.c     peers, their endpoints and keys, sending messages
 *   transfer_writer.c   attempts on the prefill side: puts, flush, commit or release
 *   transfer_data.c     pages as messages, where UCX's puts would be messages anyway
 *   transfer_reader.c   grants on the decode side: committed, released, writer lost
 *   transfer_wire.c     bytes of messages and addresses
 */
#ifndef SL_TRANSFER_TRANSFER_ENGINE_H
#define SL_TRANSFER_TRANSFER_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>

#include "common/base/ring.h"
#include "common/transfer/id_table.h"
#include "common/transfer/transfer.h"
#include "common/transfer/transfer_wire.h"
#include "common/transfer/ucx_context.h"

#define SL_TRANSFER_TARGETS_MAX 64
#define SL_TRANSFER_AM_ID 0

/* ---- commands of the engine ---- */

typedef enum {
    SL_COMMAND_PEER_ADD,
    SL_COMMAND_PEER_GONE,
    SL_COMMAND_GRANT,
    SL_COMMAND_OPEN,
    SL_COMMAND_PUSH,
    SL_COMMAND_COMMIT,
    SL_COMMAND_ABORT,
    SL_COMMAND_WAKE, /* only to be noticed */
} sl_command_type_t;

/* One allocation; the arrays follow the struct. */
typedef struct sl_command {
    sl_command_type_t type;
    uint64_t attempt;
    uint32_t generation;
    sl_rank_id_t rank; /* PEER_ADD, PEER_GONE, GRANT */
    sl_commit_t commit;
    uint32_t first, layer_begin, layer_end; /* PUSH */
    struct sl_command *next;                /* PUSH: while it waits in its attempt */
    uint32_t count;                         /* of pages or targets, or bytes of the address */
    union {
        uint32_t *pages;       /* GRANT, PUSH */
        sl_rank_id_t *targets; /* OPEN */
        uint8_t *address;      /* PEER_ADD */
    };
} sl_command_t;

/* ---- peers ---- */

/*
 *   no endpoint --connect--> connected --UCX error-----------------> closing --completed--> closed
 *                                 \--gone--> leaving --flushed------/
 *
 * A peer never leaves `closed`: one endpoint per incarnation. It is freed once it is gone, closed
 * and nothing refers to it.
 */
typedef struct sl_peer {
    sl_rank_id_t id;
    uint8_t *address; /* what the blob borrows from */
    sl_transfer_blob_t blob;
    ucp_ep_h endpoint; /* NULL before connect and from closing on */
    ucp_rkey_h rkey;   /* kept until closed: puts in flight use it */
    bool failed;       /* set by UCX's callback; the loop closes */
    bool gone;         /* the router, or a newer incarnation, says so */
    bool leaving;      /* gone without an error: said bye, waiting for it to leave */
    uint64_t leave_by_us;
    bool closing, closed;
    uint64_t closed_at_us;
    uint32_t operations;           /* puts, flushes and messages in flight */
    uint32_t puts;                 /* of which puts and data messages */
    uint64_t put_bytes;            /* of these */
    bool by_message;               /* pages go as data messages (transfer_data.c), not as puts */
    uint64_t data_sent, data_seen; /* of them, as far as posted here and copied there */
    uint64_t answered_us;          /* last answer, or when data was first owed one */
    uint32_t references;           /* attempts and grants */
    char why[128];                 /* of the failure */
    struct sl_peer *next;
} sl_peer_t;

/* A peer that can still be talked to. */
static inline bool sl_peer_usable(const sl_peer_t *peer)
{
    return !peer->failed && !peer->gone && !peer->closing;
}

/* A message that has come in, copied out of UCX's buffer. */
typedef struct sl_inbound {
    struct sl_inbound *next;
    size_t size;
    uint8_t data[];
} sl_inbound_t;

typedef struct sl_pending_event {
    struct sl_pending_event *next;
    sl_transfer_event_t *event;
} sl_pending_event_t;

struct sl_transfer {
    sl_transfer_params_t params; /* constant */
    _Atomic uint64_t lease_us;   /* sl_transfer_set_lease() */
    uint32_t writes;             /* puts and flushes under way */
    uint64_t writes_changed_us;  /* when their number last did */
    uint64_t worked_us;          /* when a turn of the loop last found something to do */
    uint64_t *page_attempts;     /* [page_count]: who wrote it last, by data messages */
    size_t layer_bytes;
    sl_bytes_t address;
    sl_ring_t *commands, *events;
    pthread_t thread;
    bool thread_started;
    atomic_bool stop;

    sl_ucx_worker_t ucx;
    ucp_mem_h memory;

    sl_peer_t *peers;
    sl_inbound_t *inbox, **inbox_tail;
    sl_pending_event_t *pending, **pending_tail; /* events that found the ring full, oldest first */

    /* writer */
    sl_id_table_t attempts;             /* sl_attempt_t */
    struct sl_attempt *oldest, *newest; /* the same in the order of their opens */
    sl_id_table_t early;                /* grants before their open */
    uint64_t early_pages;
    sl_id_table_t tombs; /* ids above the highest opened, aborted before their open */
    bool opened_any;
    uint64_t highest_opened;

    /* reader */
    sl_id_table_t grants;
    struct sl_source *sources; /* who has sent data messages, and how many */

    uint64_t refusal_logged_us, failure_logged_us, drop_logged_us;
};

/* ---- transfer_thread.c ---- */

void *sl_transfer_thread_main(void *arg);

/* Before the thread starts: messages of peers go to the inbox from now on. */
SL_MUST_USE sl_status_t sl_transfer_listen(sl_transfer_t *transfer);

/* `text` may be NULL. */
void sl_transfer_emit(sl_transfer_t *transfer, sl_transfer_event_type_t type, uint64_t attempt,
                      uint32_t generation, const sl_commit_t *commit, sl_status_t status,
                      const char *text);

/* ---- transfer_peer.c ---- */

/* "decode 0/1 (incarnation 7)" into `text`, which is returned. */
#define SL_RANK_TEXT_BYTES 64
const char *sl_rank_text(const sl_rank_id_t *rank, char text[SL_RANK_TEXT_BYTES]);
bool sl_rank_same_place(const sl_rank_id_t *left, const sl_rank_id_t *right);

/* The peer of exactly this incarnation that is not gone, or NULL. */
sl_peer_t *sl_peer_find(const sl_transfer_t *transfer, const sl_rank_id_t *rank);

/* Takes the address. False if the peer was known already. */
bool sl_peer_add(sl_transfer_t *transfer, const sl_rank_id_t *rank, uint8_t *address, size_t size);
void sl_peer_set_gone(sl_peer_t *peer);

/* Creates endpoint and key the first time. False when the peer is not usable (now). */
bool sl_peer_connect(sl_transfer_t *transfer, sl_peer_t *peer);

/* Sends a message; `done` (may be NULL) is called once it has left or failed, unless this returns
 * false, which says that nothing was sent. */
typedef void (*sl_peer_sent_t)(void *arg, bool ok);
bool sl_peer_send(sl_transfer_t *transfer, sl_peer_t *peer, const sl_transfer_msg_t *msg,
                  const uint32_t *pages, sl_peer_sent_t done, void *arg);

/* Message of an ended attempt; best effort, since a peer that cannot be told is being closed. */
void sl_peer_send_release(sl_transfer_t *transfer, sl_peer_t *peer, uint64_t attempt,
                          uint32_t generation);

/* The peer has closed its endpoint, so ours leads nowhere any more. */
void sl_peer_on_bye(sl_transfer_t *transfer, const sl_transfer_msg_t *msg);

/* UCX has not noticed, but the peer does not answer. */
void sl_peer_give_up(sl_peer_t *peer, const char *why);

/* Closes failed and gone peers' endpoints, notices closes that have completed, frees what nothing
 * refers to. */
void sl_peers_tend(sl_transfer_t *transfer, uint64_t now_us);

/* Begins to close every endpoint, gracefully (what was sent arrives) where the peer is usable. */
void sl_peers_close_all(sl_transfer_t *transfer, bool force);
bool sl_peers_all_closed(const sl_transfer_t *transfer);
/* After the worker's destruction, or before its first use. */
void sl_peers_free_all(sl_transfer_t *transfer);

/* ---- transfer_writer.c: commands, messages and what the loop calls ---- */

void sl_writer_open(sl_transfer_t *transfer, const sl_command_t *command);
void sl_writer_push(sl_transfer_t *transfer, sl_command_t *command); /* takes the command */
void sl_writer_commit(sl_transfer_t *transfer, const sl_command_t *command);
void sl_writer_abort(sl_transfer_t *transfer, uint64_t attempt);
/* `from` is NULL when the sender is not known yet. */
void sl_writer_on_grant(sl_transfer_t *transfer, const sl_transfer_msg_t *msg, sl_peer_t *from);
/* Early grants of this rank are looked at again, now that it is known. */
void sl_writer_peer_added(sl_transfer_t *transfer, sl_peer_t *peer);
/* Early grants of this incarnation vanish. */
void sl_writer_peer_gone(sl_transfer_t *transfer, const sl_rank_id_t *rank);
/* Moves every attempt on; true when something was posted or ended. */
bool sl_writer_drive(sl_transfer_t *transfer, uint64_t now_us);
/* Shutdown: gives up what cannot finish by itself, or (all) everything. */
void sl_writer_abort_all(sl_transfer_t *transfer, bool all);
void sl_writer_free_all(sl_transfer_t *transfer);

/* ---- transfer_reader.c ---- */

void sl_reader_grant(sl_transfer_t *transfer, const sl_command_t *command);
void sl_reader_on_commit(sl_transfer_t *transfer, const sl_transfer_msg_t *msg);
void sl_reader_on_release(sl_transfer_t *transfer, const sl_transfer_msg_t *msg);
/* Whether a data message writes a page that is granted to its attempt and sender. */
bool sl_reader_granted(const sl_transfer_t *transfer, const sl_transfer_msg_t *msg);
/* Raises WRITER_LOST where due; lowers *wake_us to the next time at which one may be. */
void sl_reader_tend(sl_transfer_t *transfer, uint64_t now_us, uint64_t *wake_us);
void sl_reader_free_all(sl_transfer_t *transfer);

/* ---- transfer_data.c; the writer's part of it is in transfer_writer.h ---- */

void sl_data_on_seen(sl_transfer_t *transfer, const sl_transfer_msg_t *msg);
/* Copies the bytes into the pool if they are granted; called from within UCX. */
void sl_data_on_message(sl_transfer_t *transfer, const void *header, size_t header_bytes,
                        const void *data, size_t size);
/* Answers what has been copied since the last call; true when something was sent. */
bool sl_data_tell(sl_transfer_t *transfer);
/* What was counted of a sender that is gone; of other incarnations in its place; of everyone. */
void sl_data_forget(sl_transfer_t *transfer, const sl_rank_id_t *id);
void sl_data_forget_other_lives(sl_transfer_t *transfer, const sl_rank_id_t *id);
void sl_data_forget_all(sl_transfer_t *transfer);

#endif
