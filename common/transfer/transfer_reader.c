/*
 * The reading side: what this rank has granted and to whom.
 *
 *   granted --commit--> COMMITTED      --release--> RELEASED
 *      |
 *      +--writer failed or gone--> lost --closed, and a lease later--> WRITER_LOST
 *
 * While a grant is held its pages may be written at any moment. A commit or release still ends a
 * lost grant: it proves that its writer had flushed.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/transfer/transfer_engine.h"

#define LOG_INTERVAL_US 1000000u

typedef struct {
    sl_id_node_t node; /* first: the attempt */
    uint32_t generation;
    uint32_t page_count;
    sl_peer_t *writer;
    uint32_t pages[];
} sl_grant_t;

static void remove_grant(sl_transfer_t *transfer, sl_grant_t *grant)
{
    sl_id_table_remove(&transfer->grants, &grant->node);
    grant->writer->references--;
    free(grant);
}

/* Nothing was told to the writer, so nothing can be written. */
static void refuse_grant(sl_transfer_t *transfer, const sl_command_t *command, sl_status_t status,
                         const char *why)
{
    char name[SL_RANK_TEXT_BYTES], text[256];
    snprintf(text, sizeof(text), "no grant to %s: %s", sl_rank_text(&command->rank, name), why);
    sl_transfer_emit(transfer, SL_TRANSFER_WRITER_LOST, command->attempt, command->generation, NULL,
                     status, text);
}

void sl_reader_grant(sl_transfer_t *transfer, const sl_command_t *command)
{
    sl_peer_t *writer = sl_peer_find(transfer, &command->rank);
    if (writer == NULL) {
        refuse_grant(transfer, command, SL_ERR_UNREACHABLE, "this incarnation is not known");
        return;
    }
    if (sl_id_table_find(&transfer->grants, command->attempt) != NULL) {
        refuse_grant(transfer, command, SL_ERR_INVALID, "the attempt holds a grant already");
        return;
    }
    sl_transfer_msg_t msg = {
        .type = SL_TRANSFER_MSG_GRANT,
        .from = transfer->params.self,
        .attempt = command->attempt,
        .generation = command->generation,
        .layout_hash = transfer->params.layout_hash,
        .page_count = command->count,
    };
    sl_grant_t *grant = malloc(sizeof(*grant) + command->count * sizeof(grant->pages[0]));
    SL_ASSERT(grant != NULL);
    *grant = (sl_grant_t){
        .node.id = command->attempt,
        .generation = command->generation,
        .page_count = command->count,
        .writer = writer,
    };
    memcpy(grant->pages, command->pages, command->count * sizeof(grant->pages[0]));
    if (!sl_peer_send(transfer, writer, &msg, command->pages, NULL, NULL)) {
        free(grant);
        refuse_grant(transfer, command, SL_ERR_UNREACHABLE, writer->why);
        return;
    }
    sl_id_table_insert(&transfer->grants, &grant->node);
    writer->references++;
}

/* The grant that a commit or release ends, or NULL with the reason logged. */
static sl_grant_t *match(sl_transfer_t *transfer, const sl_transfer_msg_t *msg, const char *what)
{
    char name[SL_RANK_TEXT_BYTES], why[128] = "";
    sl_grant_t *grant = sl_id_table_find(&transfer->grants, msg->attempt);
    if (grant == NULL) {
        snprintf(why, sizeof(why), "no such grant is held");
    } else if (grant->generation != msg->generation) {
        snprintf(why, sizeof(why), "generation %u, expected %u", msg->generation,
                 grant->generation);
    } else if (!sl_rank_same(&grant->writer->id, &msg->from)) {
        char expected[SL_RANK_TEXT_BYTES];
        snprintf(why, sizeof(why), "expected from %s", sl_rank_text(&grant->writer->id, expected));
    }
    if (why[0] == '\0') {
        return grant;
    }
    if (sl_log_allowed(&transfer->refusal_logged_us, LOG_INTERVAL_US)) {
        sl_log_warn("attempt %" PRIu64 ": %s of %s refused: %s", msg->attempt, what,
                    sl_rank_text(&msg->from, name), why);
    }
    return NULL;
}

void sl_reader_on_commit(sl_transfer_t *transfer, const sl_transfer_msg_t *msg)
{
    sl_grant_t *grant = match(transfer, msg, "commit");
    if (grant == NULL) {
        return;
    }
    /* The writer has flushed and will not write again, so even a commit that cannot be used gives
     * the pages back; it only must not be decoded from. */
    char text[256] = "";
    if (msg->layout_hash != transfer->params.layout_hash) {
        snprintf(text, sizeof(text), "commit with layout %016" PRIx64 ", expected %016" PRIx64,
                 msg->layout_hash, transfer->params.layout_hash);
    } else if (msg->commit.page_count != grant->page_count) {
        snprintf(text, sizeof(text), "commit of %u pages, expected the %u granted",
                 msg->commit.page_count, grant->page_count);
    }
    if (text[0] != '\0') {
        sl_log_warn("attempt %" PRIu64 ": %s", msg->attempt, text);
        sl_transfer_emit(transfer, SL_TRANSFER_RELEASED, msg->attempt, msg->generation, NULL,
                         SL_ERR_REFUSED, text);
    } else {
        sl_transfer_emit(transfer, SL_TRANSFER_COMMITTED, msg->attempt, msg->generation,
                         &msg->commit, SL_OK, NULL);
    }
    remove_grant(transfer, grant);
}

void sl_reader_on_release(sl_transfer_t *transfer, const sl_transfer_msg_t *msg)
{
    sl_grant_t *grant = match(transfer, msg, "release");
    if (grant != NULL) {
        sl_transfer_emit(transfer, SL_TRANSFER_RELEASED, msg->attempt, msg->generation, NULL, SL_OK,
                         NULL);
        remove_grant(transfer, grant);
    }
}

bool sl_reader_granted(const sl_transfer_t *transfer, const sl_transfer_msg_t *msg)
{
    const sl_grant_t *grant = sl_id_table_find(&transfer->grants, msg->attempt);
    return grant != NULL && grant->generation == msg->generation &&
           sl_rank_same(&grant->writer->id, &msg->from) && msg->data.index < grant->page_count &&
           grant->pages[msg->data.index] == msg->data.page;
}

typedef struct {
    sl_transfer_t *transfer;
    uint64_t now_us;
    uint64_t *wake_us;
} tend_t;

static void tend_grant(void *arg, void *item)
{
    tend_t *tend = arg;
    sl_grant_t *grant = item;
    sl_peer_t *writer = grant->writer;
    if (!writer->closed) {
        return;
    }
    uint64_t due_us = writer->closed_at_us + atomic_load(&tend->transfer->lease_us);
    if (tend->now_us < due_us) {
        *tend->wake_us = due_us < *tend->wake_us ? due_us : *tend->wake_us;
        return;
    }
    char name[SL_RANK_TEXT_BYTES], text[256];
    snprintf(text, sizeof(text), "%s: %s", sl_rank_text(&writer->id, name), writer->why);
    sl_transfer_emit(tend->transfer, SL_TRANSFER_WRITER_LOST, grant->node.id, grant->generation,
                     NULL, SL_ERR_UNREACHABLE, text);
    remove_grant(tend->transfer, grant);
}

void sl_reader_tend(sl_transfer_t *transfer, uint64_t now_us, uint64_t *wake_us)
{
    if (transfer->grants.count > 0) {
        tend_t tend = {.transfer = transfer, .now_us = now_us, .wake_us = wake_us};
        sl_id_table_visit(&transfer->grants, tend_grant, &tend);
    }
}

static void free_grant(void *arg, void *item)
{
    remove_grant(arg, item);
}

void sl_reader_free_all(sl_transfer_t *transfer)
{
    sl_id_table_visit(&transfer->grants, free_grant, transfer);
}
