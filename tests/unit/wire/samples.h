/* One filled message of every type, every field different from its default. The arrays are static:
 * the messages only borrow them. */
#ifndef SL_TESTS_WIRE_SAMPLES_H
#define SL_TESTS_WIRE_SAMPLES_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/wire/messages.h"

static int32_t sample_ids[] = {0, 1, 127, 128, 65536, INT32_MAX};
#define SAMPLE_ID_COUNT (sizeof(sample_ids) / sizeof(sample_ids[0]))
static uint8_t sample_blob[] = {0, 255, 1, 254};
static uint64_t sample_incarnations[] = {7, UINT64_MAX};
static sl_bytes_t sample_blobs[] = {{sample_blob, 4}, {NULL, 0}};
static sl_logprobs_t sample_logprobs[SAMPLE_ID_COUNT];
static sl_rank_status_t sample_ranks[2];

static inline sl_rank_id_t sample_rank(sl_pool_t pool)
{
    return (sl_rank_id_t){.pool = pool, .group = 3, .rank = 1, .incarnation = 1ull << 63 | 5};
}

static inline sl_sampling_t sample_sampling(void)
{
    sl_sampling_t sampling = {.temperature = 0.5f,
                              .top_k = 40,
                              .top_p = 0.9f,
                              .min_p = 0.05f,
                              .seed = UINT64_MAX,
                              .max_tokens = 300,
                              .min_tokens = 2,
                              .stop_count = SL_STOP_TOKENS_MAX,
                              .ignore_eos = true,
                              .logprobs = 20,
                              .prompt_logprobs = 0};
    for (int i = 0; i < SL_STOP_TOKENS_MAX; i++) {
        sampling.stop_token_ids[i] = i * 1000;
    }
    return sampling;
}

static inline void sample_fill_arrays(void)
{
    for (uint32_t i = 0; i < SAMPLE_ID_COUNT; i++) {
        sl_logprobs_t *entry = &sample_logprobs[i];
        entry->logprob = i == 0 ? NAN : -0.25f * (float)i;
        entry->top_count = i == 1 ? SL_TOP_LOGPROBS_MAX : i;
        for (uint32_t k = 0; k < entry->top_count; k++) {
            entry->top_ids[k] = (int32_t)(100 * i + k);
            entry->top_logprobs[k] = -1.5f * (float)(k + 1);
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        sample_ranks[i] = (sl_rank_status_t){.rank = sample_rank((sl_pool_t)i),
                                             .tp = 2,
                                             .pages_total = 1000,
                                             .pages_free = 900 + i,
                                             .pages_quiescing = 3,
                                             .running = 4,
                                             .queued_tokens = 5,
                                             .progress = 6,
                                             .tokens_out = 1ull << 40,
                                             .heartbeat_age_ms = 8};
        strcpy(sample_ranks[i].state, i == 0 ? "ready" : "joining");
    }
}

static inline void sample_hello(sl_msg_hello_t *hello)
{
    *hello = (sl_msg_hello_t){.rank = sample_rank(SL_POOL_DECODE),
                              .tp = 4,
                              .attention = SL_ATTENTION_TP,
                              .layout_hash = 0xfeedfacecafebeefull,
                              .vocab_size = 102400,
                              .max_model_len = 163840,
                              .page_tokens = 64,
                              .pages_total = 4096,
                              .max_running = 256,
                              .max_queued_tokens = 65536,
                              .max_rows = 2048,
                              .transfer_address = {sample_blob, 4},
                              .group_address = {sample_blob, 3}};
    strcpy(hello->model, "tiny-coder/0123");
    strcpy(hello->layout, "bf16, 27 layers, page 64");
    strcpy(hello->tokenizer_path, "/models/caf\xc3\xa9/tokenizer.json");
}

/* `client`: the client's form of the messages that have two. */
static inline sl_message_t sample_message(sl_message_type_t type, bool client)
{
    sl_message_t m = {.type = type};
    sample_fill_arrays();
    switch (type) {
    case SL_MSG_GENERATE:
        strcpy(m.generate.id, "request-1");
        m.generate.tokens = sample_ids;
        m.generate.token_count = SAMPLE_ID_COUNT;
        m.generate.sampling = sample_sampling();
        m.generate.has_seed = true;
        break;
    case SL_MSG_CANCEL:
        memset(m.cancel.id, 'x', SL_REQUEST_ID_BYTES - 1);
        break;
    case SL_MSG_TOKENS:
        m.tokens = (sl_msg_tokens_t){.index = 9,
                                     .tokens = sample_ids,
                                     .token_count = SAMPLE_ID_COUNT,
                                     .logprobs = sample_logprobs,
                                     .finish = SL_FINISH_LENGTH};
        break;
    case SL_MSG_PROMPT_LOGPROBS:
        m.prompt_logprobs = (sl_msg_prompt_logprobs_t){
            .index = 64, .entries = sample_logprobs, .entry_count = SAMPLE_ID_COUNT};
        break;
    case SL_MSG_FAILED:
        strcpy(m.failed.code, "no_pages");
        memset(m.failed.message, 'm', SL_TEXT_BYTES - 1);
        break;
    case SL_MSG_STATUS_REPLY:
        m.status_reply = (sl_msg_status_reply_t){.uptime_ms = 1,
                                                 .requests_waiting = 2,
                                                 .requests_running = 3,
                                                 .requests_finished = 4,
                                                 .requests_failed = 5,
                                                 .requests_canceled = 6,
                                                 .requests_refused = 7,
                                                 .ranks = sample_ranks,
                                                 .rank_count = 2};
        strcpy(m.status_reply.model, "tiny-coder/0123");
        break;
    case SL_MSG_INFO_REPLY:
        m.info_reply = (sl_msg_info_reply_t){
            .vocab_size = 4096, .max_model_len = 2048, .max_prompt_len = 2047};
        strcpy(m.info_reply.model, "tiny-coder/0123");
        strcpy(m.info_reply.tokenizer_path, "/models/tokenizer.json");
        break;
    case SL_MSG_HELLO:
        sample_hello(&m.hello);
        break;
    case SL_MSG_HEARTBEAT:
        m.heartbeat = (sl_msg_heartbeat_t){.sequence = 1,
                                           .progress = 2,
                                           .busy = true,
                                           .pages_free = 3,
                                           .pages_quiescing = 4,
                                           .running = 5,
                                           .queued_tokens = 6,
                                           .tokens_out = 7};
        break;
    case SL_MSG_NO_PAGES:
    case SL_MSG_RELEASED:
    case SL_MSG_CANCEL_ATTEMPT:
        m.attempt.attempt = 1ull << 52;
        break;
    case SL_MSG_WELCOME:
        m.welcome = (sl_msg_welcome_t){.incarnation = 11, .heartbeat_ms = 500, .lease_ms = 5000};
        break;
    case SL_MSG_REFUSED:
        strcpy(m.refused.code, "refused");
        strcpy(m.refused.message, "decode/0/1 is taken");
        break;
    case SL_MSG_GROUP:
        m.group = (sl_msg_group_t){sample_incarnations, sample_blobs, 2, .pages = 80};
        break;
    case SL_MSG_PEER:
        m.peer = (sl_msg_peer_t){.rank = sample_rank(SL_POOL_PREFILL),
                                 .alive = true,
                                 .tp = 2,
                                 .attention = SL_ATTENTION_TP,
                                 .transfer_address = {sample_blob, 4}};
        break;
    case SL_MSG_HEARTBEAT_ACK:
        m.heartbeat_ack.sequence = 77;
        break;
    case SL_MSG_RESERVE:
        m.reserve = (sl_msg_reserve_t){.attempt = 42,
                                       .prefill = sample_rank(SL_POOL_PREFILL),
                                       .prompt_len = 6,
                                       .sampling = sample_sampling()};
        break;
    case SL_MSG_PREFILL:
        m.prefill = (sl_msg_prefill_t){.attempt = 42,
                                       .decode = sample_rank(SL_POOL_DECODE),
                                       .tokens = sample_ids,
                                       .token_count = SAMPLE_ID_COUNT,
                                       .sampling = sample_sampling()};
        break;
    case SL_MSG_GROUP_FAILED:
        strcpy(m.group_failed.message, "prefill/0/1 died");
        m.group_failed.left = true;
        break;
    default:
        break; /* no fields */
    }
    if (type == SL_MSG_TOKENS || type == SL_MSG_PROMPT_LOGPROBS || type == SL_MSG_FAILED) {
        sl_msg_failed_t *start = &m.failed; /* the three start alike */
        if (client) {
            strcpy(start->id, "request-1");
            start->seq = 4;
        } else {
            start->attempt = 42;
        }
    }
    return m;
}

#endif
