/*
 * Every message of Sluice as a typed struct, and its msgpack form.
 *
 * One message is one ZeroMQ frame holding one msgpack map with string keys: "v" (protocol version),
 * "type" (a name below) and the fields of the struct under their own names. Unknown keys are
 * refused, so a typing error never passes silently. Decoding first walks the bytes without
 * allocating (depth, counts against the bytes left, string and binary sizes, total size), then
 * reads the fields; limits are in sl_wire_limits_t. router/PROTOCOL.md is the reader's version.
 *
 * Not thread-safe per message; never blocks. A decoded message owns its arrays:
 * sl_message_destroy() frees them. A message to be encoded only borrows what it points to.
 */
#ifndef SL_WIRE_MESSAGES_H
#define SL_WIRE_MESSAGES_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/wire/sampling.h"

#define SL_PROTOCOL_VERSION 2
#define SL_REQUEST_ID_BYTES 64        /* client-chosen request id, terminating 0 included */
#define SL_NAME_BYTES 128             /* model names, states, codes, terminating 0 included */
#define SL_TEXT_BYTES 1024            /* error texts, terminating 0 included */
#define SL_LOGPROBS_ENTRIES_MAX 65536 /* entries of one message; more are sent in pieces */

typedef enum { SL_POOL_PREFILL = 0, SL_POOL_DECODE = 1 } sl_pool_t;       /* "prefill", "decode" */
typedef enum { SL_ATTENTION_DP = 0, SL_ATTENTION_TP = 1 } sl_attention_t; /* "dp", "tp" */
typedef enum {
    SL_FINISH_NONE = 0,
    SL_FINISH_STOP,
    SL_FINISH_LENGTH
} sl_finish_t; /* "", "stop", "length" */

/* One process of one pool. The incarnation is drawn at start and never reused. */
typedef struct {
    sl_pool_t pool;
    uint32_t group;
    uint32_t rank; /* within the group */
    uint64_t incarnation;
} sl_rank_id_t;

typedef struct {
    uint8_t *data;
    size_t size;
} sl_bytes_t;

typedef enum {
    /* client -> router */
    SL_MSG_GENERATE,
    SL_MSG_CANCEL,
    SL_MSG_STATUS,
    SL_MSG_INFO,
    /* router -> client */
    SL_MSG_TOKENS,          /* also rank -> router */
    SL_MSG_PROMPT_LOGPROBS, /* also rank -> router */
    SL_MSG_FAILED,          /* also rank -> router */
    SL_MSG_STATUS_REPLY,
    SL_MSG_INFO_REPLY,
    /* rank -> router */
    SL_MSG_HELLO,
    SL_MSG_READY,
    SL_MSG_HEARTBEAT,
    SL_MSG_NO_PAGES,
    SL_MSG_RELEASED,
    SL_MSG_GOODBYE,
    /* router -> rank */
    SL_MSG_WELCOME,
    SL_MSG_REFUSED,
    SL_MSG_GROUP,
    SL_MSG_PEER,
    SL_MSG_HEARTBEAT_ACK,
    SL_MSG_RESERVE,
    SL_MSG_PREFILL,
    SL_MSG_CANCEL_ATTEMPT,
    SL_MSG_GROUP_FAILED,
    SL_MSG_TYPE_COUNT
} sl_message_type_t;

/* ---- client side: requests are named by the client's own id, unique per connection ---- */

typedef struct {
    char id[SL_REQUEST_ID_BYTES];
    int32_t *tokens; /* prompt, token_count >= 1 */
    size_t token_count;
    sl_sampling_t sampling; /* flattened: "temperature", "top_k", ... all optional on the wire */
    bool has_seed;          /* without: the router draws one */
} sl_msg_generate_t;

typedef struct {
    char id[SL_REQUEST_ID_BYTES];
} sl_msg_cancel_t;

/* rank -> router: by attempt. router -> client: by id. Fields of the other side are absent. */
typedef struct {
    char id[SL_REQUEST_ID_BYTES];
    uint64_t attempt;
    uint64_t seq;    /* router -> client: events of one request count 0, 1, 2, ... */
    uint32_t index;  /* output position of tokens[0]: 0 is the first token after the prompt */
    int32_t *tokens; /* token_count >= 1 */
    size_t token_count;
    sl_logprobs_t *logprobs; /* NULL, or token_count entries */
    sl_finish_t finish;      /* of the last token in this message */
} sl_msg_tokens_t;

/* Prompt logprobs travel in pieces, in order, before the first token. */
typedef struct {
    char id[SL_REQUEST_ID_BYTES];
    uint64_t attempt;
    uint64_t seq;
    uint32_t index; /* prompt position of entries[0] */
    sl_logprobs_t *entries;
    size_t entry_count;
} sl_msg_prompt_logprobs_t;

/* The end of a request that did not finish. `code` is sl_status_name(). */
typedef struct {
    char id[SL_REQUEST_ID_BYTES]; /* "" where the offending message could not be attributed */
    uint64_t attempt;
    uint64_t seq;
    char code[SL_NAME_BYTES];
    char message[SL_TEXT_BYTES];
} sl_msg_failed_t;

typedef struct {
    sl_rank_id_t rank;
    uint32_t tp;
    char state[SL_NAME_BYTES]; /* "joining", "ready", "failed" */
    uint64_t pages_total, pages_free, pages_quiescing;
    uint64_t running;       /* requests holding pages */
    uint64_t queued_tokens; /* prompt tokens not yet computed (prefill) */
    uint64_t progress;      /* engine steps so far */
    uint64_t tokens_out;    /* tokens produced so far */
    uint64_t heartbeat_age_ms;
} sl_rank_status_t;

typedef struct {
    char model[SL_NAME_BYTES];
    uint64_t uptime_ms;
    uint64_t requests_waiting, requests_running; /* not yet placed; placed */
    uint64_t requests_finished, requests_failed, requests_canceled, requests_refused;
    sl_rank_status_t *ranks;
    size_t rank_count;
} sl_msg_status_reply_t;

/* What a client must know to check a request itself. All 0 and "" while no rank has registered. */
typedef struct {
    char model[SL_NAME_BYTES];
    uint64_t vocab_size;
    uint64_t max_model_len; /* prompt + output tokens at most */
    uint64_t max_prompt_len;
    char tokenizer_path[SL_TEXT_BYTES]; /* as the ranks see it; "" if the checkpoint has none */
} sl_msg_info_reply_t;

/* ---- membership ---- */

typedef struct {
    sl_rank_id_t rank;
    uint32_t tp;
    sl_attention_t attention;
    char model[SL_NAME_BYTES];  /* identity: directory name and hash of config and weight index */
    char layout[SL_TEXT_BYTES]; /* readable form of what the layout hash covers */
    uint64_t layout_hash;
    uint64_t vocab_size, max_model_len;
    uint64_t page_tokens, pages_total;
    uint64_t max_running;       /* requests at once (decode); 0: no limit but pages */
    uint64_t max_queued_tokens; /* prompt tokens accepted at once (prefill) */
    uint64_t max_rows;          /* rows of one step on this rank; the same for the whole group */
    char tokenizer_path[SL_TEXT_BYTES];
    sl_bytes_t transfer_address; /* opaque, for sl_transfer_peer_add() of the other pool */
    sl_bytes_t group_address;    /* opaque, for sl_group_connect() of its own group */
} sl_msg_hello_t;

typedef struct {
    uint64_t incarnation;  /* of the rank that is welcomed */
    uint64_t heartbeat_ms; /* send one this often */
    uint64_t lease_ms;     /* without an ack for this long: no more writes to peers */
} sl_msg_welcome_t;

typedef struct {
    char code[SL_NAME_BYTES];
    char message[SL_TEXT_BYTES];
} sl_msg_refused_t;

/* Sent to each rank once all `tp` ranks of its group are there; in rank order. */
typedef struct {
    uint64_t *incarnations;
    sl_bytes_t *addresses; /* the ranks' group_address */
    size_t rank_count;
    uint64_t pages; /* of each rank, the first so many are used; 0: all that the rank has */
} sl_msg_group_t;

/* A rank of the other pool has come or gone. */
typedef struct {
    sl_rank_id_t rank;
    bool alive;
    uint32_t tp;
    sl_attention_t attention;
    sl_bytes_t transfer_address; /* empty when gone */
} sl_msg_peer_t;

typedef struct {
    uint64_t sequence; /* counts up; the ack repeats it */
    uint64_t progress; /* engine steps; frozen with work at hand means stuck */
    bool busy;         /* the engine has work */
    uint64_t pages_free, pages_quiescing, running, queued_tokens, tokens_out;
} sl_msg_heartbeat_t;

typedef struct {
    uint64_t sequence;
} sl_msg_heartbeat_ack_t;

/* ---- attempts ---- */

/* To the decode rank (with --attention tp: to rank 0 of the group). */
typedef struct {
    uint64_t attempt;
    sl_rank_id_t prefill; /* who will write */
    uint32_t prompt_len;
    sl_sampling_t sampling;
} sl_msg_reserve_t;

/* To the prefill rank (with --attention tp: to rank 0 of the group). */
typedef struct {
    uint64_t attempt;
    sl_rank_id_t decode; /* who will grant pages */
    int32_t *tokens;
    size_t token_count;
    sl_sampling_t sampling;
} sl_msg_prefill_t;

/* NO_PAGES: the reservation is refused for now, nothing is held. RELEASED: everything the attempt
 * held on this rank is free again; sent exactly once per attempt by both sides, however it ended
 * (after NO_PAGES it is not sent). CANCEL_ATTEMPT: give it up; RELEASED follows. */
typedef struct {
    uint64_t attempt;
} sl_msg_attempt_t;

/* `left`: a rank of the group has left on purpose, so the others leave too, without a fault. */
typedef struct {
    char message[SL_TEXT_BYTES];
    bool left;
} sl_msg_group_failed_t;

/* "": the rank leaves on purpose; else why it cannot go on. */
typedef struct {
    char message[SL_TEXT_BYTES];
} sl_msg_goodbye_t;

typedef struct {
    sl_message_type_t type;
    union {
        sl_msg_generate_t generate;
        sl_msg_cancel_t cancel;
        sl_msg_tokens_t tokens;
        sl_msg_prompt_logprobs_t prompt_logprobs;
        sl_msg_failed_t failed;
        sl_msg_status_reply_t status_reply;
        sl_msg_info_reply_t info_reply;
        sl_msg_hello_t hello;
        sl_msg_heartbeat_t heartbeat;
        sl_msg_attempt_t attempt; /* NO_PAGES, RELEASED, CANCEL_ATTEMPT */
        sl_msg_welcome_t welcome;
        sl_msg_refused_t refused;
        sl_msg_group_t group;
        sl_msg_peer_t peer;
        sl_msg_heartbeat_ack_t heartbeat_ack;
        sl_msg_reserve_t reserve;
        sl_msg_prefill_t prefill;
        sl_msg_group_failed_t group_failed;
        sl_msg_goodbye_t goodbye;
        /* STATUS, INFO and READY have no fields */
    };
} sl_message_t;

typedef struct {
    size_t message_bytes; /* whole frame */
    uint32_t depth;       /* nesting */
    uint32_t array_items; /* of one array */
    uint32_t map_items;   /* of one map */
} sl_wire_limits_t;

/* Limits for what clients and ranks may send: 64 MiB, depth 6, 4 Mi items, 64 keys. */
extern const sl_wire_limits_t sl_wire_limits_default;

/* "generate", "tokens", ... */
const char *sl_message_type_name(sl_message_type_t type);

/* Allocates the frame; free() it. Fails only on memory. */
SL_MUST_USE sl_status_t sl_message_encode(const sl_message_t *message, sl_bytes_t *frame_p);

/* SL_ERR_INVALID (not msgpack, unknown type, key or version, wrong kind, missing field, trailing
 * bytes) or SL_ERR_LIMIT; the text names field, expected and found. *message_p is untouched then.
 * Where the bytes are a map whose "id" is readable, the error can still be attributed by
 * sl_message_peek_id(). */
SL_MUST_USE sl_status_t sl_message_decode(const uint8_t *data, size_t size,
                                          const sl_wire_limits_t *limits, sl_message_t *message_p);

/* Best-effort request id of a frame that did not decode; "" if there is none. Safe on any bytes. */
void sl_message_peek_id(const uint8_t *data, size_t size, const sl_wire_limits_t *limits,
                        char id[SL_REQUEST_ID_BYTES]);

/* Frees what a decoded message owns. Zeroed messages and messages without arrays are fine. */
void sl_message_destroy(sl_message_t *message);

/* Deep copy; the copy owns its arrays. */
SL_MUST_USE sl_status_t sl_message_copy(const sl_message_t *message, sl_message_t *copy_p);

/* "decode/0/1" (pool/group/rank) into a buffer of at least 32 bytes; returns it. */
const char *sl_rank_name(const sl_rank_id_t *rank, char buffer[32]);
bool sl_rank_same(const sl_rank_id_t *a, const sl_rank_id_t *b); /* incarnation included */

#endif
