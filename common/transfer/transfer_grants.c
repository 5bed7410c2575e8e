/*
 * The writing side's book of grants: which belong to an attempt that is open, which wait for their
 * open, and which are answered with a release at once.
 *
 * Opens come with increasing ids, so ids at or below the highest one opened that are not held any
 * more are over, whatever happened to them, and nothing must be remembered about them. Only ids
 * above it that were aborted before their open need a tombstone, until the highest one passes them.
 * A grant of a rank that is not known yet waits for the peer to be added, because only then can it
 * be answered.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/base/log.h"
#include "common/transfer/transfer_writer.h"

#define EARLY_MAX 8192u
#define EARLY_PAGES_MAX (4u << 20)
#define TOMBS_MAX 65536u
#define LOG_INTERVAL_US 1000000u

static bool is_over(const sl_transfer_t *transfer, uint64_t attempt)
{
    return (transfer->opened_any && attempt <= transfer->highest_opened) ||
           sl_id_table_find(&transfer->tombs, attempt) != NULL;
}

static void keep(sl_transfer_t *transfer, sl_early_t *grant)
{
    sl_id_table_insert(&transfer->early, &grant->node);
    transfer->early_pages += grant->page_count;
}

static void unkeep(sl_transfer_t *transfer, sl_early_t *grant)
{
    sl_id_table_remove(&transfer->early, &grant->node);
    transfer->early_pages -= grant->page_count;
}

/* Answers a grant that will not be used, if there is somebody to answer. */
static void refuse(sl_transfer_t *transfer, sl_early_t *grant, sl_peer_t *from, const char *why)
{
    if (why != NULL && sl_log_allowed(&transfer->drop_logged_us, LOG_INTERVAL_US)) {
        char name[SL_RANK_TEXT_BYTES];
        sl_log_warn("attempt %" PRIu64 ": grant of %s refused: %s", grant->node.id,
                    sl_rank_text(&grant->from, name), why);
    }
    if (from != NULL) {
        sl_peer_send_release(transfer, from, grant->node.id, grant->generation);
    }
    free(grant);
}

static void keep_if_room(sl_transfer_t *transfer, sl_early_t *grant, sl_peer_t *from)
{
    if (sl_id_table_find(&transfer->early, grant->node.id) != NULL) {
        refuse(transfer, grant, from, "another grant for the attempt waits already");
    } else if (transfer->early.count >= EARLY_MAX ||
               transfer->early_pages + grant->page_count > EARLY_PAGES_MAX) {
        refuse(transfer, grant, from, "too many grants wait for their attempt");
    } else {
        keep(transfer, grant);
    }
}

/* Puts a grant where it belongs now; takes it. */
static void place(sl_transfer_t *transfer, sl_early_t *grant, sl_peer_t *from)
{
    sl_attempt_t *attempt = sl_id_table_find(&transfer->attempts, grant->node.id);
    if (from == NULL) {
        keep_if_room(transfer, grant, NULL);
    } else if (attempt == NULL && is_over(transfer, grant->node.id)) {
        refuse(transfer, grant, from, NULL);
    } else if (attempt == NULL) {
        keep_if_room(transfer, grant, from);
    } else if (attempt->targets[0].peer != from) {
        refuse(transfer, grant, from, "it is not the attempt's first target");
    } else if (attempt->granted) {
        bool repeated = attempt->generation == grant->generation;
        refuse(transfer, grant, repeated ? NULL : from, "the attempt has its grant already");
    } else {
        sl_attempt_set_grant(transfer, attempt, grant);
        free(grant);
    }
}

void sl_writer_on_grant(sl_transfer_t *transfer, const sl_transfer_msg_t *msg, sl_peer_t *from)
{
    sl_early_t *grant = malloc(sizeof(*grant) + msg->page_count * sizeof(grant->pages[0]));
    SL_ASSERT(grant != NULL);
    *grant = (sl_early_t){
        .node.id = msg->attempt,
        .from = msg->from,
        .generation = msg->generation,
        .page_count = msg->page_count,
    };
    for (uint32_t i = 0; i < msg->page_count; i++) {
        grant->pages[i] = sl_transfer_msg_page(msg, i);
    }
    if (msg->layout_hash != transfer->params.layout_hash) {
        char why[96];
        snprintf(why, sizeof(why), "layout %016" PRIx64 ", expected %016" PRIx64, msg->layout_hash,
                 transfer->params.layout_hash);
        refuse(transfer, grant, from, why);
        return;
    }
    place(transfer, grant, from);
}

/* ---- looking at waiting grants again ---- */

typedef struct {
    sl_transfer_t *transfer;
    uint64_t up_to;           /* those of attempts up to this one */
    const sl_rank_id_t *from; /* and of this rank, if not NULL */
    bool drop;                /* they vanish */
} review_t;

static void review_grant(void *arg, void *item)
{
    review_t *review = arg;
    sl_early_t *grant = item;
    if (grant->node.id > review->up_to ||
        (review->from != NULL && !sl_rank_same(review->from, &grant->from))) {
        return;
    }
    unkeep(review->transfer, grant);
    if (review->drop) {
        free(grant);
    } else {
        place(review->transfer, grant, sl_peer_find(review->transfer, &grant->from));
    }
}

void sl_writer_peer_added(sl_transfer_t *transfer, sl_peer_t *peer)
{
    review_t review = {.transfer = transfer, .up_to = UINT64_MAX, .from = &peer->id};
    sl_id_table_visit(&transfer->early, review_grant, &review);
}

void sl_writer_peer_gone(sl_transfer_t *transfer, const sl_rank_id_t *rank)
{
    review_t review = {.transfer = transfer, .up_to = UINT64_MAX, .from = rank, .drop = true};
    sl_id_table_visit(&transfer->early, review_grant, &review);
}

static void forget_tomb(void *arg, void *item)
{
    sl_transfer_t *transfer = arg;
    sl_id_node_t *tomb = item;
    if (tomb->id <= transfer->highest_opened) {
        sl_id_table_remove(&transfer->tombs, tomb);
        free(tomb);
    }
}

/* ---- open and abort ---- */

static void find_targets(sl_transfer_t *transfer, sl_attempt_t *attempt,
                         const sl_command_t *command)
{
    char name[SL_RANK_TEXT_BYTES], text[256];
    for (uint32_t t = 0; t < command->count; t++) {
        sl_target_t *target = &attempt->targets[t];
        target->attempt = attempt;
        target->peer = sl_peer_find(transfer, &command->targets[t]);
        if (target->peer == NULL) {
            snprintf(text, sizeof(text), "target %s is not known",
                     sl_rank_text(&command->targets[t], name));
            sl_attempt_fail_open(transfer, attempt, SL_ERR_UNREACHABLE, text);
            continue;
        }
        target->peer->references++;
        /* Now, so that the connection is made while the prompt is still being computed. A failure
         * shows when the attempt moves on. */
        bool connected = sl_peer_connect(transfer, target->peer);
        (void)connected;
    }
}

void sl_writer_open(sl_transfer_t *transfer, const sl_command_t *command)
{
    uint64_t id = command->attempt;
    if (sl_id_table_find(&transfer->attempts, id) != NULL) {
        sl_log_warn("attempt %" PRIu64 ": opened twice", id);
        return;
    }
    if (is_over(transfer, id)) {
        char text[128];
        snprintf(text, sizeof(text), "open of attempt %" PRIu64 " after %" PRIu64 " or its abort",
                 id, transfer->highest_opened);
        sl_transfer_emit(transfer, SL_TRANSFER_FAILED, id, 0, NULL, SL_ERR_STALE, text);
        return;
    }
    sl_attempt_t *attempt = sl_attempt_create(transfer, id, command->count);
    find_targets(transfer, attempt, command);
    transfer->opened_any = true;
    transfer->highest_opened = id;
    if (transfer->tombs.count > 0) {
        sl_id_table_visit(&transfer->tombs, forget_tomb, transfer);
    }
    if (transfer->early.count > 0) {
        review_t review = {.transfer = transfer, .up_to = id};
        sl_id_table_visit(&transfer->early, review_grant, &review);
    }
}

static void abort_unopened(sl_transfer_t *transfer, uint64_t id)
{
    if (transfer->tombs.count >= TOMBS_MAX) {
        sl_log_warn("attempt %" PRIu64 ": too many aborts before their open", id);
    } else {
        sl_id_node_t *tomb = calloc(1, sizeof(*tomb));
        SL_ASSERT(tomb != NULL);
        tomb->id = id;
        sl_id_table_insert(&transfer->tombs, tomb);
    }
    sl_early_t *grant = sl_id_table_find(&transfer->early, id);
    if (grant != NULL) {
        unkeep(transfer, grant);
        place(transfer, grant, sl_peer_find(transfer, &grant->from));
    }
    sl_transfer_emit(transfer, SL_TRANSFER_ABORTED, id, 0, NULL, SL_OK, NULL);
}

void sl_writer_abort(sl_transfer_t *transfer, uint64_t id)
{
    sl_attempt_t *attempt = sl_id_table_find(&transfer->attempts, id);
    if (attempt == NULL) {
        if (!is_over(transfer, id)) {
            abort_unopened(transfer, id);
        }
        return; /* otherwise its event is on the way already */
    }
    if (attempt->phase != SL_ATTEMPT_SENDING) {
        attempt->abort_wanted = true;
    }
}

static void free_early(void *arg, void *item)
{
    unkeep(arg, item);
    free(item);
}

static void free_tomb(void *arg, void *item)
{
    sl_transfer_t *transfer = arg;
    sl_id_table_remove(&transfer->tombs, item);
    free(item);
}

void sl_writer_free_all(sl_transfer_t *transfer)
{
    sl_writer_free_attempts(transfer);
    sl_id_table_visit(&transfer->early, free_early, transfer);
    sl_id_table_visit(&transfer->tombs, free_tomb, transfer);
}
