/* The tables themselves: this file is the machine's form of router/PROTOCOL.md. */
#include "common/wire/fields.h"

#include <float.h>
#include <stddef.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define RANKS_MAX 4096 /* ranks of one status reply or group */

/* ---- shorthands; each makes one sl_field_t ---- */

#define U32_FROM(type, field, least)                                                               \
    {                                                                                              \
        .name = #field, .kind = SL_FIELD_U32, .offset = offsetof(type, field), .min_int = (least), \
        .max_int = UINT32_MAX                                                                      \
    }
#define U32(type, field) U32_FROM(type, field, 0)
#define U64(type, field)                                                                           \
    {                                                                                              \
        .name = #field, .kind = SL_FIELD_U64, .offset = offsetof(type, field)                      \
    }
#define BOOL(type, field)                                                                          \
    {                                                                                              \
        .name = #field, .kind = SL_FIELD_BOOL, .offset = offsetof(type, field)                     \
    }
#define TEXT_FROM(type, field, least)                                                              \
    {                                                                                              \
        .name = #field, .kind = SL_FIELD_TEXT, .offset = offsetof(type, field),                    \
        .capacity = sizeof(((type *)0)->field), .min_int = (least)                                 \
    }
#define TEXT(type, field) TEXT_FROM(type, field, 0)
#define BYTES(type, field)                                                                         \
    {                                                                                              \
        .name = #field, .kind = SL_FIELD_BYTES, .offset = offsetof(type, field)                    \
    }
#define WORD(type, field, list)                                                                    \
    {                                                                                              \
        .name = #field, .kind = SL_FIELD_WORD, .offset = offsetof(type, field), .words = (list),   \
        .word_count = COUNT(list)                                                                  \
    }
#define RANK(type, field)                                                                          \
    {                                                                                              \
        .name = #field, .kind = SL_FIELD_STRUCT, .offset = offsetof(type, field),                  \
        .table = &rank_table                                                                       \
    }
#define TOKENS(type)                                                                               \
    {                                                                                              \
        .name = "tokens", .kind = SL_FIELD_IDS, .offset = offsetof(type, tokens),                  \
        .count_offset = offsetof(type, token_count), .min_int = 1                                  \
    }

/* The three messages that exist in a client's and in a rank's form start alike. */
#define EITHER_FORM(type)                                                                          \
    {.name = "id",                                                                                 \
     .kind = SL_FIELD_TEXT,                                                                        \
     .presence = SL_FIELD_CLIENT_FORM,                                                             \
     .offset = offsetof(type, id),                                                                 \
     .capacity = SL_REQUEST_ID_BYTES},                                                             \
        {.name = "attempt",                                                                        \
         .kind = SL_FIELD_U64,                                                                     \
         .presence = SL_FIELD_RANK_FORM,                                                           \
         .offset = offsetof(type, attempt)},                                                       \
    {                                                                                              \
        .name = "seq", .kind = SL_FIELD_U64, .presence = SL_FIELD_CLIENT_FORM,                     \
        .offset = offsetof(type, seq)                                                              \
    }

#define SAMPLING_F32(type, field, standard, least, most, above, words_)                            \
    {                                                                                              \
        .name = #field, .kind = SL_FIELD_F32, .presence = SL_FIELD_OPTIONAL,                       \
        .offset = offsetof(type, sampling.field), .min_float = (least), .max_float = (most),       \
        .above_min = (above), .default_value = (standard), .expected = (words_)                    \
    }
#define SAMPLING_U32(type, field, standard, least)                                                 \
    {                                                                                              \
        .name = #field, .kind = SL_FIELD_U32, .presence = SL_FIELD_OPTIONAL,                       \
        .offset = offsetof(type, sampling.field), .min_int = (least), .max_int = UINT32_MAX,       \
        .default_value = (standard)                                                                \
    }
#define SAMPLING_TOP(type, field)                                                                  \
    {                                                                                              \
        .name = #field, .kind = SL_FIELD_I32, .presence = SL_FIELD_OPTIONAL,                       \
        .offset = offsetof(type, sampling.field), .min_int = -1, .max_int = SL_TOP_LOGPROBS_MAX,   \
        .default_value = -1                                                                        \
    }

/* sl_sampling_t, flattened into the message; only the seed differs between messages. */
#define SAMPLING(type)                                                                             \
    SAMPLING_F32(type, temperature, 1.0, 0.0, FLT_MAX, false, "a finite number >= 0"),             \
        SAMPLING_U32(type, top_k, 0, 0),                                                           \
        SAMPLING_F32(type, top_p, 1.0, 0.0, 1.0, true, "a number above 0 and at most 1"),          \
        SAMPLING_F32(type, min_p, 0.0, 0.0, 1.0, false, "a number from 0 to 1"),                   \
        SAMPLING_U32(type, max_tokens, 16, 1), SAMPLING_U32(type, min_tokens, 0, 0),               \
        {.name = "stop_token_ids",                                                                 \
         .kind = SL_FIELD_FEW_IDS,                                                                 \
         .presence = SL_FIELD_OPTIONAL,                                                            \
         .offset = offsetof(type, sampling.stop_token_ids),                                        \
         .count_offset = offsetof(type, sampling.stop_count),                                      \
         .capacity = SL_STOP_TOKENS_MAX},                                                          \
        {.name = "ignore_eos",                                                                     \
         .kind = SL_FIELD_BOOL,                                                                    \
         .presence = SL_FIELD_OPTIONAL,                                                            \
         .offset = offsetof(type, sampling.ignore_eos)},                                           \
        SAMPLING_TOP(type, logprobs), SAMPLING_TOP(type, prompt_logprobs)

#define SEED(type)                                                                                 \
    {                                                                                              \
        .name = "seed", .kind = SL_FIELD_U64, .offset = offsetof(type, sampling.seed)              \
    }

/* ---- nested structs ---- */

static const char *const pool_words[] = {"prefill", "decode"};
static const char *const attention_words[] = {"dp", "tp"};
static const char *const finish_words[] = {"", "stop", "length"};

static const sl_field_t rank_fields[] = {
    WORD(sl_rank_id_t, pool, pool_words),
    U32(sl_rank_id_t, group),
    U32(sl_rank_id_t, rank),
    U64(sl_rank_id_t, incarnation),
};
static const sl_field_table_t rank_table = {"rank", rank_fields, COUNT(rank_fields),
                                            sizeof(sl_rank_id_t)};

static const sl_field_t rank_status_fields[] = {
    RANK(sl_rank_status_t, rank),
    U32(sl_rank_status_t, tp),
    TEXT(sl_rank_status_t, state),
    U64(sl_rank_status_t, pages_total),
    U64(sl_rank_status_t, pages_free),
    U64(sl_rank_status_t, pages_quiescing),
    U64(sl_rank_status_t, running),
    U64(sl_rank_status_t, queued_tokens),
    U64(sl_rank_status_t, progress),
    U64(sl_rank_status_t, tokens_out),
    U64(sl_rank_status_t, heartbeat_age_ms),
};
static const sl_field_table_t rank_status_table = {
    "rank_status", rank_status_fields, COUNT(rank_status_fields), sizeof(sl_rank_status_t)};

/* ---- client side ---- */

static const sl_field_t generate_fields[] = {
    TEXT_FROM(sl_msg_generate_t, id, 1),
    TOKENS(sl_msg_generate_t),
    SAMPLING(sl_msg_generate_t),
    {.name = "seed",
     .kind = SL_FIELD_U64,
     .presence = SL_FIELD_OPTIONAL,
     .offset = offsetof(sl_msg_generate_t, sampling.seed),
     .flag_offset = offsetof(sl_msg_generate_t, has_seed)},
};
static const sl_field_t cancel_fields[] = {TEXT_FROM(sl_msg_cancel_t, id, 1)};

static const sl_field_t tokens_fields[] = {
    EITHER_FORM(sl_msg_tokens_t),
    U32(sl_msg_tokens_t, index),
    TOKENS(sl_msg_tokens_t),
    {.name = "logprobs",
     .kind = SL_FIELD_LOGPROBS,
     .presence = SL_FIELD_OPTIONAL,
     .offset = offsetof(sl_msg_tokens_t, logprobs),
     .count_offset = offsetof(sl_msg_tokens_t, token_count),
     .shares_count = true,
     .capacity = SL_LOGPROBS_ENTRIES_MAX},
    {.name = "finish_reason",
     .kind = SL_FIELD_WORD,
     .presence = SL_FIELD_OPTIONAL,
     .offset = offsetof(sl_msg_tokens_t, finish),
     .words = finish_words,
     .word_count = COUNT(finish_words)},
};
static const sl_field_t prompt_logprobs_fields[] = {
    EITHER_FORM(sl_msg_prompt_logprobs_t),
    U32(sl_msg_prompt_logprobs_t, index),
    {.name = "entries",
     .kind = SL_FIELD_LOGPROBS,
     .offset = offsetof(sl_msg_prompt_logprobs_t, entries),
     .count_offset = offsetof(sl_msg_prompt_logprobs_t, entry_count),
     .min_int = 1,
     .capacity = SL_LOGPROBS_ENTRIES_MAX},
};
static const sl_field_t failed_fields[] = {
    EITHER_FORM(sl_msg_failed_t),
    TEXT_FROM(sl_msg_failed_t, code, 1),
    TEXT(sl_msg_failed_t, message),
};
static const sl_field_t status_reply_fields[] = {
    TEXT(sl_msg_status_reply_t, model),
    U64(sl_msg_status_reply_t, uptime_ms),
    U64(sl_msg_status_reply_t, requests_waiting),
    U64(sl_msg_status_reply_t, requests_running),
    U64(sl_msg_status_reply_t, requests_finished),
    U64(sl_msg_status_reply_t, requests_failed),
    U64(sl_msg_status_reply_t, requests_canceled),
    U64(sl_msg_status_reply_t, requests_refused),
    {.name = "ranks",
     .kind = SL_FIELD_STRUCTS,
     .offset = offsetof(sl_msg_status_reply_t, ranks),
     .count_offset = offsetof(sl_msg_status_reply_t, rank_count),
     .capacity = RANKS_MAX,
     .table = &rank_status_table},
};
static const sl_field_t info_reply_fields[] = {
    TEXT(sl_msg_info_reply_t, model),          U64(sl_msg_info_reply_t, vocab_size),
    U64(sl_msg_info_reply_t, max_model_len),   U64(sl_msg_info_reply_t, max_prompt_len),
    TEXT(sl_msg_info_reply_t, tokenizer_path),
};

/* ---- membership ---- */

static const sl_field_t hello_fields[] = {
    RANK(sl_msg_hello_t, rank),
    U32_FROM(sl_msg_hello_t, tp, 1),
    WORD(sl_msg_hello_t, attention, attention_words),
    TEXT_FROM(sl_msg_hello_t, model, 1),
    TEXT(sl_msg_hello_t, layout),
    U64(sl_msg_hello_t, layout_hash),
    U64(sl_msg_hello_t, vocab_size),
    U64(sl_msg_hello_t, max_model_len),
    U64(sl_msg_hello_t, page_tokens),
    U64(sl_msg_hello_t, pages_total),
    U64(sl_msg_hello_t, max_running),
    U64(sl_msg_hello_t, max_queued_tokens),
    U64(sl_msg_hello_t, max_rows),
    TEXT(sl_msg_hello_t, tokenizer_path),
    BYTES(sl_msg_hello_t, transfer_address),
    BYTES(sl_msg_hello_t, group_address),
};
static const sl_field_t heartbeat_fields[] = {
    U64(sl_msg_heartbeat_t, sequence),        U64(sl_msg_heartbeat_t, progress),
    BOOL(sl_msg_heartbeat_t, busy),           U64(sl_msg_heartbeat_t, pages_free),
    U64(sl_msg_heartbeat_t, pages_quiescing), U64(sl_msg_heartbeat_t, running),
    U64(sl_msg_heartbeat_t, queued_tokens),   U64(sl_msg_heartbeat_t, tokens_out),
};
static const sl_field_t attempt_fields[] = {U64(sl_msg_attempt_t, attempt)};
static const sl_field_t welcome_fields[] = {
    U64(sl_msg_welcome_t, incarnation),
    U64(sl_msg_welcome_t, heartbeat_ms),
    U64(sl_msg_welcome_t, lease_ms),
};
static const sl_field_t refused_fields[] = {
    TEXT_FROM(sl_msg_refused_t, code, 1),
    TEXT(sl_msg_refused_t, message),
};
static const sl_field_t group_fields[] = {
    {.name = "incarnations",
     .kind = SL_FIELD_U64S,
     .offset = offsetof(sl_msg_group_t, incarnations),
     .count_offset = offsetof(sl_msg_group_t, rank_count),
     .min_int = 1,
     .capacity = RANKS_MAX},
    {.name = "addresses",
     .kind = SL_FIELD_BLOBS,
     .offset = offsetof(sl_msg_group_t, addresses),
     .count_offset = offsetof(sl_msg_group_t, rank_count),
     .shares_count = true,
     .capacity = RANKS_MAX},
    U64(sl_msg_group_t, pages),
};
static const sl_field_t peer_fields[] = {
    RANK(sl_msg_peer_t, rank),
    BOOL(sl_msg_peer_t, alive),
    U32_FROM(sl_msg_peer_t, tp, 1),
    WORD(sl_msg_peer_t, attention, attention_words),
    BYTES(sl_msg_peer_t, transfer_address),
};
static const sl_field_t heartbeat_ack_fields[] = {U64(sl_msg_heartbeat_ack_t, sequence)};

/* ---- attempts ---- */

static const sl_field_t reserve_fields[] = {
    U64(sl_msg_reserve_t, attempt),
    RANK(sl_msg_reserve_t, prefill),
    U32_FROM(sl_msg_reserve_t, prompt_len, 1),
    SAMPLING(sl_msg_reserve_t),
    SEED(sl_msg_reserve_t),
};
static const sl_field_t prefill_fields[] = {
    U64(sl_msg_prefill_t, attempt), RANK(sl_msg_prefill_t, decode), TOKENS(sl_msg_prefill_t),
    SAMPLING(sl_msg_prefill_t),     SEED(sl_msg_prefill_t),
};
static const sl_field_t group_failed_fields[] = {TEXT(sl_msg_group_failed_t, message),
                                                 BOOL(sl_msg_group_failed_t, left)};
static const sl_field_t goodbye_fields[] = {TEXT(sl_msg_goodbye_t, message)};

#define MESSAGE(upper, lower)                                                                      \
    [SL_MSG_##upper] = {#lower, lower##_fields, COUNT(lower##_fields), sizeof(sl_msg_##lower##_t)}
#define ATTEMPT_ONLY(upper, lower)                                                                 \
    [SL_MSG_##upper] = {#lower, attempt_fields, COUNT(attempt_fields), sizeof(sl_msg_attempt_t)}
#define EMPTY(upper, lower) [SL_MSG_##upper] = {#lower, NULL, 0, 0}

static const sl_field_table_t message_tables[SL_MSG_TYPE_COUNT] = {
    MESSAGE(GENERATE, generate),
    MESSAGE(CANCEL, cancel),
    EMPTY(STATUS, status),
    EMPTY(INFO, info),
    MESSAGE(TOKENS, tokens),
    MESSAGE(PROMPT_LOGPROBS, prompt_logprobs),
    MESSAGE(FAILED, failed),
    MESSAGE(STATUS_REPLY, status_reply),
    MESSAGE(INFO_REPLY, info_reply),
    MESSAGE(HELLO, hello),
    EMPTY(READY, ready),
    MESSAGE(HEARTBEAT, heartbeat),
    ATTEMPT_ONLY(NO_PAGES, no_pages),
    ATTEMPT_ONLY(RELEASED, released),
    MESSAGE(GOODBYE, goodbye),
    MESSAGE(WELCOME, welcome),
    MESSAGE(REFUSED, refused),
    MESSAGE(GROUP, group),
    MESSAGE(PEER, peer),
    MESSAGE(HEARTBEAT_ACK, heartbeat_ack),
    MESSAGE(RESERVE, reserve),
    MESSAGE(PREFILL, prefill),
    ATTEMPT_ONLY(CANCEL_ATTEMPT, cancel_attempt),
    MESSAGE(GROUP_FAILED, group_failed),
};

const sl_field_table_t *sl_message_fields(sl_message_type_t type)
{
    SL_ASSERT((unsigned)type < SL_MSG_TYPE_COUNT);
    return &message_tables[type];
}

size_t sl_field_item_bytes(const sl_field_t *field)
{
    switch (field->kind) {
    case SL_FIELD_STRUCTS:
        return field->table->size;
    case SL_FIELD_IDS:
        return sizeof(int32_t);
    case SL_FIELD_U64S:
        return sizeof(uint64_t);
    case SL_FIELD_BLOBS:
        return sizeof(sl_bytes_t);
    case SL_FIELD_LOGPROBS:
        return sizeof(sl_logprobs_t);
    default:
        return 0;
    }
}
