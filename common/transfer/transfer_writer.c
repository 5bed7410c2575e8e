/*
 * The writing side. An attempt:
 *
 *   WRITING   pushed pages become puts once the grant is there, a bounded number in flight
 *      |      commit with everything put, abort, or a failure
 *   FLUSHING  every endpoint that was written to is flushed, or its peer has answered all data
 *      |      messages: nothing of ours is under way any more
 *   SENDING   commit, or release if it was given up, to targets[0]
 *      |
 *   (freed)   SENT, ABORTED or FAILED
 *
 * so a failure takes the same road as success, and no event comes before the last put has ended.
 * A put that UCX has taken cannot be recalled; therefore the lease (may_write) is asked before
 * each.
 *
 * Which (page, layer) blocks have been put is kept as bits, and a commit with a block missing is a
 * failure here rather than garbage on the other side.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/transfer/transfer_engine.h"
#include "common/transfer/transfer_writer.h"

/*
 * What is under way to a peer at once. The lease is asked only when posting, so all of it may still
 * be written after the lease has run out: it must take a small part of a lease (5 s) even on a slow
 * link. 512 MiB are 0.5 s at 1 GB/s, and 1.3 ms of NVLink (400 GB/s), far more than a turn of the
 * thread's loop, so a fast link is not kept waiting. The number bounds the small puts of single
 * layers, each of which costs UCX a request.
 *
 * Adjoining pages are merged into one put, of a quarter of the bytes (128 MiB) at most; a page is
 * never split. UCX makes each put a copy on one stream, and between two copies a GPU's link stands
 * still for some microseconds.
 */
#define BYTES_PER_PEER ((size_t)512 << 20)
#define BYTES_PER_PUT_DIVISOR 4u
#define PUTS_PER_PEER 32u
#define PUTS_PER_TURN 32u /* of one attempt, so that commands and messages get their turn */
#define LOG_INTERVAL_US 1000000u
#define END_LEASES 12u /* a flush and commit longer than this many leases: the peer is stuck */

static void fail(sl_transfer_t *transfer, sl_attempt_t *attempt, sl_status_t status,
                 const char *text)
{
    if (attempt->failed != SL_OK) {
        return; /* the first cause is the one that tells something */
    }
    attempt->failed = status;
    snprintf(attempt->text, sizeof(attempt->text), "%s", text);
    if (sl_log_allowed(&transfer->failure_logged_us, LOG_INTERVAL_US)) {
        sl_log_warn("attempt %" PRIu64 ": transfer failed: %s", attempt->node.id, text);
    }
}

static void fail_peer(sl_transfer_t *transfer, sl_attempt_t *attempt, const sl_peer_t *peer)
{
    char name[SL_RANK_TEXT_BYTES], text[256];
    snprintf(text, sizeof(text), "%s: %s", sl_rank_text(&peer->id, name), peer->why);
    fail(transfer, attempt, SL_ERR_UNREACHABLE, text);
}

/* ---- an attempt's life ---- */

sl_attempt_t *sl_attempt_create(sl_transfer_t *transfer, uint64_t id, uint32_t target_count)
{
    sl_attempt_t *attempt =
        calloc(1, sizeof(*attempt) + target_count * sizeof(attempt->targets[0]));
    SL_ASSERT(attempt != NULL);
    attempt->node.id = id;
    attempt->transfer = transfer;
    attempt->segments_tail = &attempt->segments;
    attempt->target_count = target_count;
    sl_id_table_insert(&transfer->attempts, &attempt->node);
    attempt->older = transfer->newest;
    *(transfer->newest == NULL ? &transfer->oldest : &transfer->newest->newer) = attempt;
    transfer->newest = attempt;
    return attempt;
}

static void drop_segments(sl_attempt_t *attempt)
{
    while (attempt->segments != NULL) {
        sl_command_t *next = attempt->segments->next;
        free(attempt->segments);
        attempt->segments = next;
    }
    attempt->segments_tail = &attempt->segments;
}

static void destroy_attempt(sl_attempt_t *attempt)
{
    sl_transfer_t *transfer = attempt->transfer;
    sl_id_table_remove(&transfer->attempts, &attempt->node);
    *(attempt->older == NULL ? &transfer->oldest : &attempt->older->newer) = attempt->newer;
    *(attempt->newer == NULL ? &transfer->newest : &attempt->newer->older) = attempt->older;
    for (uint32_t t = 0; t < attempt->target_count; t++) {
        if (attempt->targets[t].peer != NULL) {
            attempt->targets[t].peer->references--;
        }
    }
    drop_segments(attempt);
    free(attempt->pages);
    free(attempt->covered);
    free(attempt);
}

static void end_attempt(sl_transfer_t *transfer, sl_attempt_t *attempt)
{
    sl_transfer_event_type_t type = attempt->failed != SL_OK ? SL_TRANSFER_FAILED
                                    : attempt->abort_wanted  ? SL_TRANSFER_ABORTED
                                                             : SL_TRANSFER_SENT;
    sl_transfer_emit(transfer, type, attempt->node.id, attempt->generation, NULL, attempt->failed,
                     attempt->text);
    destroy_attempt(attempt);
}

void sl_attempt_set_grant(sl_transfer_t *transfer, sl_attempt_t *attempt, sl_early_t *grant)
{
    SL_ASSERT(!attempt->granted);
    attempt->granted = true;
    attempt->generation = grant->generation;
    attempt->page_count = grant->page_count;
    size_t bits = (size_t)grant->page_count * transfer->params.layers;
    attempt->pages = malloc(grant->page_count * sizeof(*attempt->pages));
    attempt->covered = calloc(bits / 64 + 1, sizeof(*attempt->covered));
    SL_ASSERT(attempt->pages != NULL && attempt->covered != NULL);
    memcpy(attempt->pages, grant->pages, grant->page_count * sizeof(*attempt->pages));
    for (uint32_t t = 0; t < attempt->target_count && attempt->failed == SL_OK; t++) {
        const sl_peer_t *peer = attempt->targets[t].peer;
        for (uint32_t i = 0; i < grant->page_count; i++) {
            if (attempt->pages[i] >= peer->blob.page_count) {
                char name[SL_RANK_TEXT_BYTES], text[256];
                snprintf(text, sizeof(text), "grant of page %u, but %s has %u", attempt->pages[i],
                         sl_rank_text(&peer->id, name), peer->blob.page_count);
                fail(transfer, attempt, SL_ERR_INVALID, text);
                break;
            }
        }
    }
}

void sl_attempt_fail_open(sl_transfer_t *transfer, sl_attempt_t *attempt, sl_status_t status,
                          const char *text)
{
    fail(transfer, attempt, status, text);
}

/* ---- coverage ---- */

static void cover(sl_transfer_t *transfer, sl_attempt_t *attempt, const sl_command_t *segment)
{
    for (uint32_t page = segment->first; page < segment->first + segment->count; page++) {
        for (uint32_t layer = segment->layer_begin; layer < segment->layer_end; layer++) {
            size_t bit = (size_t)page * transfer->params.layers + layer;
            attempt->covered[bit / 64] |= (uint64_t)1 << (bit % 64);
        }
    }
}

static void check_complete(sl_transfer_t *transfer, sl_attempt_t *attempt)
{
    char text[256] = "";
    uint32_t pages = attempt->commit.page_count;
    if (pages > attempt->page_count) {
        snprintf(text, sizeof(text), "commit of %u pages, %u are granted", pages,
                 attempt->page_count);
    }
    size_t bits = text[0] == '\0' ? (size_t)pages * transfer->params.layers : 0;
    for (size_t bit = 0; bit < bits; bit++) {
        if ((attempt->covered[bit / 64] >> (bit % 64) & 1) == 0) {
            snprintf(text, sizeof(text),
                     "commit of %u pages, but page %zu layer %zu was not pushed", pages,
                     bit / transfer->params.layers, bit % transfer->params.layers);
            break;
        }
    }
    if (text[0] != '\0') {
        fail(transfer, attempt, SL_ERR_INVALID, text);
    }
}

/* ---- puts ---- */

static void count_write(sl_transfer_t *transfer, int change)
{
    transfer->writes += (uint32_t)change;
    transfer->writes_changed_us = sl_now_us();
}

void sl_put_begun(sl_target_t *target, size_t bytes)
{
    target->written = true;
    target->peer->operations++;
    target->peer->puts++;
    target->peer->put_bytes += bytes;
    count_write(target->attempt->transfer, 1);
    target->attempt->in_flight++;
}

void sl_put_finished(sl_target_t *target, size_t bytes, ucs_status_t status)
{
    sl_attempt_t *attempt = target->attempt;
    target->peer->operations--;
    target->peer->puts--;
    target->peer->put_bytes -= bytes;
    count_write(attempt->transfer, -1);
    attempt->in_flight--;
    if (status != UCS_OK) {
        char name[SL_RANK_TEXT_BYTES], text[256];
        snprintf(text, sizeof(text), "write to %s: %s", sl_rank_text(&target->peer->id, name),
                 ucs_status_string(status));
        fail(attempt->transfer, attempt, SL_ERR_UNREACHABLE, text);
    }
}

typedef struct {
    sl_target_t *target;
    size_t bytes;
} put_t;

static void put_finished(put_t *put, ucs_status_t status)
{
    sl_put_finished(put->target, put->bytes, status);
    free(put);
}

static void put_callback(void *request, ucs_status_t status, void *user_data)
{
    put_finished(user_data, status);
    ucp_request_free(request);
}

static size_t bytes_per_peer(const sl_transfer_t *transfer)
{
    size_t bytes = transfer->params.peer_bytes_max;
    return bytes == 0 ? BYTES_PER_PEER : bytes;
}

/* The largest put. */
static size_t bytes_per_put(const sl_transfer_t *transfer)
{
    size_t bytes = bytes_per_peer(transfer) / BYTES_PER_PUT_DIVISOR;
    return bytes > transfer->params.page_bytes ? bytes : transfer->params.page_bytes;
}

/* Whether one more put or data message may be under way to the peer. Asked for the largest put
 * whatever comes next: otherwise small puts of others could keep a large one waiting for ever. */
static bool has_room(const sl_transfer_t *transfer, const sl_peer_t *peer)
{
    return peer->puts == 0 ||
           (peer->puts < PUTS_PER_PEER &&
            peer->put_bytes + bytes_per_put(transfer) <= bytes_per_peer(transfer));
}

/* Pages from the cursor on that lie side by side both here and there, and go in one put. */
static uint32_t run_length(const sl_transfer_t *transfer, const sl_attempt_t *attempt,
                           const sl_command_t *segment)
{
    uint32_t at = attempt->cursor_page, run = 1;
    size_t most = bytes_per_put(transfer);
    if (segment->layer_begin != 0 || segment->layer_end != transfer->params.layers) {
        return 1;
    }
    const uint32_t *remote = attempt->pages + segment->first;
    while (at + run < segment->count && (run + 1) * transfer->params.page_bytes <= most &&
           segment->pages[at + run] == segment->pages[at] + run &&
           remote[at + run] == remote[at] + run) {
        run++;
    }
    return run;
}

static void put(sl_transfer_t *transfer, sl_attempt_t *attempt, const sl_command_t *segment,
                sl_target_t *target, uint32_t run)
{
    size_t page_bytes = transfer->params.page_bytes, layer_bytes = transfer->layer_bytes;
    size_t within = segment->layer_begin * layer_bytes;
    size_t bytes =
        run > 1 ? run * page_bytes : (segment->layer_end - segment->layer_begin) * layer_bytes;
    uint32_t local_page = segment->pages[attempt->cursor_page];
    uint32_t remote_page = attempt->pages[segment->first + attempt->cursor_page];
    const uint8_t *local =
        (const uint8_t *)transfer->params.base + local_page * page_bytes + within;
    uint64_t remote = target->peer->blob.pool_base + remote_page * page_bytes + within;

    put_t *put = malloc(sizeof(*put));
    SL_ASSERT(put != NULL);
    *put = (put_t){.target = target, .bytes = bytes};
    ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH,
        .cb.send = put_callback,
        .user_data = put,
        .memh = transfer->memory,
    };
    sl_put_begun(target, bytes);
    void *request =
        ucp_put_nbx(target->peer->endpoint, local, bytes, remote, target->peer->rkey, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        put_finished(put, UCS_PTR_STATUS(request));
    }
}

/* One data message of the page at the cursor; true when that was its last. */
static bool post_data(sl_transfer_t *transfer, sl_attempt_t *attempt, const sl_command_t *segment,
                      sl_target_t *target)
{
    size_t bytes = (segment->layer_end - segment->layer_begin) * transfer->layer_bytes;
    size_t offset = segment->layer_begin * transfer->layer_bytes + attempt->cursor_bytes;
    uint32_t index = segment->first + attempt->cursor_page;
    sl_data_place_t place = {.index = index, .page = attempt->pages[index], .offset = offset};
    const uint8_t *local = (const uint8_t *)transfer->params.base +
                           segment->pages[attempt->cursor_page] * transfer->params.page_bytes +
                           offset;
    attempt->cursor_bytes +=
        sl_data_post(transfer, target, &place, local, bytes - attempt->cursor_bytes);
    if (attempt->cursor_bytes < bytes) {
        return false;
    }
    attempt->cursor_bytes = 0;
    return true;
}

static void pop_segment(sl_attempt_t *attempt)
{
    sl_command_t *segment = attempt->segments;
    attempt->segments = segment->next;
    if (attempt->segments == NULL) {
        attempt->segments_tail = &attempt->segments;
    }
    attempt->cursor_page = 0;
    attempt->cursor_target = 0;
    attempt->cursor_bytes = 0;
    free(segment);
}

static bool check_segment(sl_transfer_t *transfer, sl_attempt_t *attempt,
                          const sl_command_t *segment)
{
    if ((uint64_t)segment->first + segment->count <= attempt->page_count) {
        return true;
    }
    char text[256];
    snprintf(text, sizeof(text), "push of pages %u to %" PRIu64 ", %u are granted", segment->first,
             (uint64_t)segment->first + segment->count, attempt->page_count);
    fail(transfer, attempt, SL_ERR_INVALID, text);
    return false;
}

/* `pages` more of the oldest segment have been posted to the current target. */
static void advance(sl_transfer_t *transfer, sl_attempt_t *attempt, uint32_t pages)
{
    const sl_command_t *segment = attempt->segments;
    attempt->cursor_page += pages;
    if (attempt->cursor_page == segment->count) {
        attempt->cursor_page = 0;
        attempt->cursor_target++;
    }
    if (attempt->cursor_target == attempt->target_count) {
        cover(transfer, attempt, segment);
        pop_segment(attempt);
    }
}

/* Posts what the bounds allow; true when something was posted. */
static bool post_puts(sl_transfer_t *transfer, sl_attempt_t *attempt)
{
    uint32_t posted = 0;
    sl_command_t *segment;
    while (posted < PUTS_PER_TURN && attempt->failed == SL_OK &&
           (segment = attempt->segments) != NULL && check_segment(transfer, attempt, segment)) {
        sl_target_t *target = &attempt->targets[attempt->cursor_target];
        if (!has_room(transfer, target->peer) || !sl_data_window_open(target->peer)) {
            break;
        }
        if (transfer->params.may_write != NULL &&
            !transfer->params.may_write(transfer->params.may_write_arg)) {
            fail(transfer, attempt, SL_ERR_STALE, "this rank's lease to write has run out");
            break;
        }
        if (!sl_peer_connect(transfer, target->peer)) {
            fail_peer(transfer, attempt, target->peer);
            break;
        }
        uint32_t pages = 1;
        if (!target->peer->by_message) {
            pages = run_length(transfer, attempt, segment);
            put(transfer, attempt, segment, target, pages);
        } else if (!post_data(transfer, attempt, segment, target)) {
            pages = 0;
        }
        posted++;
        advance(transfer, attempt, pages);
    }
    return posted > 0;
}

/* ---- flush ---- */

static void flush_finished(sl_target_t *target, ucs_status_t status)
{
    target->peer->operations--;
    count_write(target->attempt->transfer, -1);
    target->attempt->in_flight--;
    if (status != UCS_OK) {
        char name[SL_RANK_TEXT_BYTES], text[256];
        snprintf(text, sizeof(text), "flush to %s: %s", sl_rank_text(&target->peer->id, name),
                 ucs_status_string(status));
        fail(target->attempt->transfer, target->attempt, SL_ERR_UNREACHABLE, text);
    }
}

static void flush_callback(void *request, ucs_status_t status, void *user_data)
{
    flush_finished(user_data, status);
    ucp_request_free(request);
}

static void begin_flush(sl_attempt_t *attempt, uint64_t now_us)
{
    attempt->phase = SL_ATTEMPT_FLUSHING;
    attempt->end_by_us = now_us + END_LEASES * atomic_load(&attempt->transfer->lease_us);
    for (uint32_t t = 0; t < attempt->target_count; t++) {
        sl_target_t *target = &attempt->targets[t];
        if (!target->written || target->peer->by_message || !sl_peer_usable(target->peer)) {
            /* Data messages are flushed by their answer, and a broken endpoint's puts end when it
             * is closed. */
            continue;
        }
        ucp_request_param_t param = {
            .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
            .cb.send = flush_callback,
            .user_data = target,
        };
        target->peer->operations++;
        count_write(attempt->transfer, 1);
        attempt->in_flight++;
        void *request = ucp_ep_flush_nbx(target->peer->endpoint, &param);
        if (!UCS_PTR_IS_PTR(request)) {
            flush_finished(target, UCS_PTR_STATUS(request));
        }
    }
}

/* ---- commit or release ---- */

static void message_sent(void *arg, bool ok)
{
    sl_attempt_t *attempt = arg;
    attempt->in_flight--;
    if (!ok && !attempt->abort_wanted) {
        fail_peer(attempt->transfer, attempt, attempt->targets[0].peer);
    }
}

static void send_outcome(sl_transfer_t *transfer, sl_attempt_t *attempt)
{
    attempt->phase = SL_ATTEMPT_SENDING;
    bool release = attempt->failed != SL_OK || attempt->abort_wanted;
    if (!attempt->granted || attempt->targets[0].peer == NULL) {
        return;
    }
    sl_transfer_msg_t msg = {
        .type = release ? SL_TRANSFER_MSG_RELEASE : SL_TRANSFER_MSG_COMMIT,
        .from = transfer->params.self,
        .attempt = attempt->node.id,
        .generation = attempt->generation,
        .layout_hash = transfer->params.layout_hash,
    };
    if (!release) {
        msg.commit = attempt->commit;
    }
    attempt->in_flight++;
    if (!sl_peer_send(transfer, attempt->targets[0].peer, &msg, NULL, message_sent, attempt)) {
        message_sent(attempt, false);
    }
}

/* ---- moving on ---- */

static void check_targets(sl_transfer_t *transfer, sl_attempt_t *attempt)
{
    for (uint32_t t = 0; t < attempt->target_count && attempt->failed == SL_OK; t++) {
        const sl_peer_t *peer = attempt->targets[t].peer;
        if (peer != NULL && !sl_peer_usable(peer)) {
            fail_peer(transfer, attempt, peer);
        }
    }
}

static void check_answers(sl_transfer_t *transfer, sl_attempt_t *attempt, uint64_t now_us)
{
    uint64_t wait_us = END_LEASES * atomic_load(&transfer->lease_us);
    for (uint32_t t = 0; t < attempt->target_count; t++) {
        sl_peer_t *peer = attempt->targets[t].peer;
        if (peer != NULL && sl_peer_usable(peer) && sl_data_overdue(peer, now_us, wait_us)) {
            sl_peer_give_up(peer, "pages sent to it are not answered");
        }
    }
}

static bool drive_writing(sl_transfer_t *transfer, sl_attempt_t *attempt, uint64_t now_us)
{
    bool posted = false;
    check_answers(transfer, attempt, now_us);
    check_targets(transfer, attempt);
    if (attempt->failed == SL_OK && !attempt->abort_wanted && attempt->granted) {
        posted = post_puts(transfer, attempt);
        if (attempt->failed == SL_OK && attempt->segments == NULL && attempt->commit_wanted) {
            check_complete(transfer, attempt);
            begin_flush(attempt, now_us);
            return true;
        }
    }
    if (attempt->failed != SL_OK || attempt->abort_wanted) {
        drop_segments(attempt);
        begin_flush(attempt, now_us);
        return true;
    }
    return posted;
}

/* A peer that stands still does not fail at UCX; closing its endpoint ends what is in flight. */
static void give_up_targets(sl_attempt_t *attempt)
{
    for (uint32_t t = 0; t < attempt->target_count; t++) {
        sl_peer_t *peer = attempt->targets[t].peer;
        if (peer != NULL && (peer->operations > 0 || !sl_data_seen(&attempt->targets[t]))) {
            sl_peer_give_up(peer, "writes do not complete");
        }
    }
}

static bool flushed(const sl_attempt_t *attempt)
{
    bool seen = true;
    for (uint32_t t = 0; t < attempt->target_count; t++) {
        seen &= sl_data_seen(&attempt->targets[t]);
    }
    return seen && attempt->in_flight == 0;
}

static bool drive(sl_transfer_t *transfer, sl_attempt_t *attempt, uint64_t now_us)
{
    bool worked = false;
    if (attempt->phase == SL_ATTEMPT_WRITING) {
        worked = drive_writing(transfer, attempt, now_us);
    }
    if (attempt->phase != SL_ATTEMPT_WRITING && !flushed(attempt) && now_us >= attempt->end_by_us) {
        give_up_targets(attempt);
    }
    if (attempt->phase == SL_ATTEMPT_FLUSHING && flushed(attempt)) {
        check_targets(transfer, attempt);
        send_outcome(transfer, attempt);
        worked = true;
    }
    if (attempt->phase == SL_ATTEMPT_SENDING && attempt->in_flight == 0) {
        end_attempt(transfer, attempt);
        worked = true;
    }
    return worked;
}

bool sl_writer_drive(sl_transfer_t *transfer, uint64_t now_us)
{
    bool worked = false;
    for (sl_attempt_t *attempt = transfer->oldest, *newer; attempt != NULL; attempt = newer) {
        newer = attempt->newer;
        worked |= drive(transfer, attempt, now_us);
    }
    return worked;
}

/* ---- commands of a held attempt; the rest is in transfer_grants.c ---- */

void sl_writer_push(sl_transfer_t *transfer, sl_command_t *command)
{
    sl_attempt_t *attempt = sl_id_table_find(&transfer->attempts, command->attempt);
    if (attempt == NULL || attempt->phase != SL_ATTEMPT_WRITING || attempt->commit_wanted ||
        attempt->abort_wanted || attempt->failed != SL_OK) {
        free(command); /* it has ended or is about to, and its event says so */
        return;
    }
    command->next = NULL;
    *attempt->segments_tail = command;
    attempt->segments_tail = &command->next;
}

void sl_writer_commit(sl_transfer_t *transfer, const sl_command_t *command)
{
    sl_attempt_t *attempt = sl_id_table_find(&transfer->attempts, command->attempt);
    if (attempt != NULL && attempt->phase == SL_ATTEMPT_WRITING) {
        attempt->commit = command->commit;
        attempt->commit_wanted = true;
    }
}

void sl_writer_abort_all(sl_transfer_t *transfer, bool all)
{
    for (sl_attempt_t *attempt = transfer->oldest; attempt != NULL; attempt = attempt->newer) {
        if (all || !attempt->commit_wanted || !attempt->granted) {
            attempt->abort_wanted = attempt->phase != SL_ATTEMPT_SENDING;
        }
    }
}

void sl_writer_free_attempts(sl_transfer_t *transfer)
{
    while (transfer->oldest != NULL) {
        destroy_attempt(transfer->oldest);
    }
}
