/*
 * Pages as messages. Where UCX has no hardware that writes into another host's memory (tcp), its
 * puts are messages of its own, and UCX 1.13 answers each from within the receiver's progress with
 * a send whose failure it takes for fatal: a writer that is killed while its puts lie unread in the
 * receiver's socket aborts the receiver. So over such endpoints the pages go in messages of ours,
 * which cost the same, are copied into the pool by the reader's transfer thread, and are
 * answered by how many have been copied. The answer to the last one of an attempt is its flush.
 *
 *   writer   DATA(attempt, generation, index, page, offset) + bytes      at most WINDOW unanswered
 *   reader   DATA_SEEN(count since the writer's incarnation began)       at most one a turn
 *
 * What a grant does not cover (any more) is not copied and not counted; it has no commit that would
 * be accepted, and nobody sends it but a writer that has been given up, or a forger. Ranks
 * that share the grant of another (attention tp) have none to compare with; there a message is held
 * to the pool's bounds, and to come from no older attempt than the page's last one. Data that stays
 * unanswered for long ends the connection: it may be broken in the other direction alone.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/transfer/transfer_engine.h"
#include "common/transfer/transfer_writer.h"

#define WINDOW 64u
#define DATA_BYTES_MAX 61440u /* with all headers one tcp segment of UCX */
#define SOURCES_MAX 4096u
#define LOG_INTERVAL_US 1000000u

/* ---- writer ---- */

typedef struct {
    sl_target_t *target;
    sl_bytes_t header;
    size_t bytes; /* of the page */
} data_send_t;

static void data_sent(data_send_t *send, ucs_status_t status)
{
    if (status != UCS_OK) {
        /* It will never be answered, and no later answer would tell. */
        sl_peer_give_up(send->target->peer, ucs_status_string(status));
    }
    sl_put_finished(send->target, send->bytes, status);
    free(send->header.data);
    free(send);
}

static void data_callback(void *request, ucs_status_t status, void *user_data)
{
    data_sent(user_data, status);
    ucp_request_free(request);
}

bool sl_data_window_open(const sl_peer_t *peer)
{
    return peer->data_sent - peer->data_seen < WINDOW;
}

size_t sl_data_post(sl_transfer_t *transfer, sl_target_t *target, const sl_data_place_t *place,
                    const uint8_t *bytes, size_t size)
{
    sl_attempt_t *attempt = target->attempt;
    sl_peer_t *peer = target->peer;
    size = size < DATA_BYTES_MAX ? size : DATA_BYTES_MAX;
    sl_transfer_msg_t msg = {
        .type = SL_TRANSFER_MSG_DATA,
        .from = transfer->params.self,
        .attempt = attempt->node.id,
        .generation = attempt->generation,
        .layout_hash = transfer->params.layout_hash,
        .data = *place,
    };
    msg.data.to_granter = target == &attempt->targets[0];
    data_send_t *send = calloc(1, sizeof(*send));
    SL_ASSERT(send != NULL);
    send->target = target;
    send->bytes = size;
    sl_status_t status = sl_transfer_msg_encode(&msg, NULL, &send->header);
    SL_ASSERT(status == SL_OK);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.send = data_callback,
        .user_data = send,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    sl_put_begun(target, size);
    if (peer->data_sent == peer->data_seen) {
        peer->answered_us = sl_now_us(); /* nothing was owed until now */
    }
    target->last_data = ++peer->data_sent;
    void *request = ucp_am_send_nbx(peer->endpoint, SL_TRANSFER_AM_ID, send->header.data,
                                    send->header.size, bytes, size, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        data_sent(send, UCS_PTR_STATUS(request));
    }
    return size;
}

bool sl_data_seen(const sl_target_t *target)
{
    return target->peer == NULL || !sl_peer_usable(target->peer) ||
           target->peer->data_seen >= target->last_data;
}

bool sl_data_overdue(const sl_peer_t *peer, uint64_t now_us, uint64_t wait_us)
{
    return peer->by_message && peer->data_seen < peer->data_sent && now_us > peer->answered_us &&
           now_us - peer->answered_us > wait_us;
}

void sl_data_on_seen(sl_transfer_t *transfer, const sl_transfer_msg_t *msg)
{
    sl_peer_t *peer = sl_peer_find(transfer, &msg->from);
    if (peer != NULL && msg->seen > peer->data_seen && msg->seen <= peer->data_sent) {
        peer->data_seen = msg->seen;
        peer->answered_us = sl_now_us();
    }
}

/* ---- reader ---- */

/* Counted by sender, not by peer: data may come before the router has told of its sender. */
typedef struct sl_source {
    sl_rank_id_t id;
    uint64_t copied, told;
    struct sl_source *next;
} sl_source_t;

static sl_source_t *find_source(sl_transfer_t *transfer, const sl_rank_id_t *id)
{
    size_t count = 0;
    for (sl_source_t *source = transfer->sources; source != NULL; source = source->next) {
        if (sl_rank_same(&source->id, id)) {
            return source;
        }
        count++;
    }
    if (count >= SOURCES_MAX) {
        return NULL;
    }
    sl_source_t *source = calloc(1, sizeof(*source));
    SL_ASSERT(source != NULL);
    source->id = *id;
    source->next = transfer->sources;
    transfer->sources = source;
    return source;
}

static void forget(sl_transfer_t *transfer, bool (*applies)(const sl_source_t *, const void *),
                   const void *arg)
{
    for (sl_source_t **link = &transfer->sources, *source; (source = *link) != NULL;) {
        if (applies(source, arg)) {
            *link = source->next;
            free(source);
        } else {
            link = &source->next;
        }
    }
}

static bool is_rank(const sl_source_t *source, const void *id)
{
    return sl_rank_same(&source->id, id);
}

static bool is_other_life(const sl_source_t *source, const void *id)
{
    return sl_rank_same_place(&source->id, id) && !sl_rank_same(&source->id, id);
}

static bool is_any(const sl_source_t *source, const void *unused)
{
    (void)source;
    (void)unused;
    return true;
}

void sl_data_forget(sl_transfer_t *transfer, const sl_rank_id_t *id)
{
    forget(transfer, is_rank, id);
}

void sl_data_forget_other_lives(sl_transfer_t *transfer, const sl_rank_id_t *id)
{
    forget(transfer, is_other_life, id);
}

void sl_data_forget_all(sl_transfer_t *transfer)
{
    forget(transfer, is_any, NULL);
}

/* Why the bytes must not be copied; empty if they may. */
static void check_data(const sl_transfer_t *transfer, const sl_transfer_msg_t *msg, size_t size,
                       char why[128])
{
    const sl_data_place_t *place = &msg->data;
    const sl_transfer_params_t *params = &transfer->params;
    why[0] = '\0';
    if (msg->layout_hash != params->layout_hash) {
        snprintf(why, 128, "layout %016" PRIx64 ", expected %016" PRIx64, msg->layout_hash,
                 params->layout_hash);
    } else if (params->device_memory) {
        snprintf(why, 128, "this pool is device memory");
    } else if (place->page >= params->page_count || place->offset > params->page_bytes ||
               size > params->page_bytes - place->offset) {
        snprintf(why, 128, "%zu bytes at %" PRIu64 " of page %u, expected within %zu of %u", size,
                 place->offset, place->page, params->page_bytes, params->page_count);
    }
}

/* Whether the bytes still belong there. The rank that granted knows its grants; a rank of its group
 * (attention tp) has none to compare with, but attempts have growing ids: what is older than the
 * last writer of the page comes too late. */
static bool is_due(const sl_transfer_t *transfer, const sl_transfer_msg_t *msg)
{
    return msg->data.to_granter ? sl_reader_granted(transfer, msg)
                                : msg->attempt >= transfer->page_attempts[msg->data.page];
}

void sl_data_on_message(sl_transfer_t *transfer, const void *header, size_t header_bytes,
                        const void *data, size_t size)
{
    sl_transfer_msg_t msg;
    char name[SL_RANK_TEXT_BYTES], why[128] = "";
    sl_source_t *source = NULL;
    if (sl_transfer_msg_parse(header, header_bytes, &msg) != SL_OK) {
        msg = (sl_transfer_msg_t){0};
        snprintf(why, sizeof(why), "%.100s", sl_error_text());
    } else if (msg.type != SL_TRANSFER_MSG_DATA) {
        snprintf(why, sizeof(why), "type %d with a body", (int)msg.type);
    } else {
        check_data(transfer, &msg, size, why);
    }
    if (why[0] == '\0' && !is_due(transfer, &msg)) {
        snprintf(why, sizeof(why), "page %u is not, or no more, granted to it", msg.data.page);
    }
    if (why[0] == '\0' && (source = find_source(transfer, &msg.from)) == NULL) {
        snprintf(why, sizeof(why), "more than %u senders", SOURCES_MAX);
    }
    if (why[0] != '\0') {
        if (sl_log_allowed(&transfer->refusal_logged_us, LOG_INTERVAL_US)) {
            sl_log_warn("attempt %" PRIu64 ": data of %s refused: %s", msg.attempt,
                        sl_rank_text(&msg.from, name), why);
        }
        return;
    }
    transfer->page_attempts[msg.data.page] = msg.attempt;
    memcpy((uint8_t *)transfer->params.base + msg.data.page * transfer->params.page_bytes +
               msg.data.offset,
           data, size);
    source->copied++;
}

bool sl_data_tell(sl_transfer_t *transfer)
{
    bool told = false;
    for (sl_source_t *source = transfer->sources; source != NULL; source = source->next) {
        sl_peer_t *peer =
            source->told == source->copied ? NULL : sl_peer_find(transfer, &source->id);
        if (peer == NULL) {
            continue;
        }
        sl_transfer_msg_t msg = {
            .type = SL_TRANSFER_MSG_DATA_SEEN,
            .from = transfer->params.self,
            .layout_hash = transfer->params.layout_hash,
            .seen = source->copied,
        };
        if (sl_peer_send(transfer, peer, &msg, NULL, NULL, NULL)) {
            told = true;
        }
        source->told = source->copied; /* or the peer has failed and waits for no answer */
    }
    return told;
}
