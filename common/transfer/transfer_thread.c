/*
 * The transfer thread. One turn of its loop: take the engine's commands, progress UCX (whose
 * callbacks only count and copy), look at the messages that came in, move attempts and peers on,
 * hand over events. When a turn found nothing to do it sleeps on UCX's descriptor and the command
 * ring's, at most SLEEP_MAX_MS, since some of UCX's descriptors are known not to wake reliably.
 *
 * Shutdown goes through three stages, each bounded: let attempts that are committed finish; give up
 * the rest; close the endpoints.
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/transfer/transfer_engine.h"

#define SLEEP_MAX_MS 100
/* How long the thread stays awake on a GPU's host, where a copy takes microseconds and waking up as
 * long again: since a write began or ended (then it is the peer that stands still), and since
 * anything was done, because the next command or message often follows at once. */
#define WRITE_SPIN_US 2000u
#define SPIN_US 100u
#define PROGRESS_CALLS_MAX 256 /* a turn */
#define COMMANDS_MAX 256       /* a turn */
#define FINISH_WAIT_US 4000000u
#define CLOSE_WAIT_US 1000000u
#define LOG_INTERVAL_US 1000000u
#define MESSAGE_BYTES_MAX (4u * SL_TRANSFER_GRANT_PAGES_MAX + 256u)

/* ---- messages in ---- */

static ucs_status_t on_message(void *arg, const void *header, size_t header_bytes, void *data,
                               size_t bytes, const ucp_am_recv_param_t *param)
{
    sl_transfer_t *transfer = arg;
    bool whole = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 && bytes > 0;
    if (whole && header_bytes > 0) {
        sl_data_on_message(transfer, header, header_bytes, data, bytes);
        return UCS_OK;
    }
    if (!whole || bytes > MESSAGE_BYTES_MAX) {
        if (sl_log_allowed(&transfer->refusal_logged_us, LOG_INTERVAL_US)) {
            sl_log_warn("transfer: message of %zu + %zu bytes refused", header_bytes, bytes);
        }
        return UCS_OK;
    }
    sl_inbound_t *inbound = malloc(sizeof(*inbound) + bytes);
    SL_ASSERT(inbound != NULL);
    inbound->next = NULL;
    inbound->size = bytes;
    memcpy(inbound->data, data, bytes);
    *transfer->inbox_tail = inbound;
    transfer->inbox_tail = &inbound->next;
    return UCS_OK;
}

sl_status_t sl_transfer_listen(sl_transfer_t *transfer)
{
    ucp_am_handler_param_t param = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = SL_TRANSFER_AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_message,
        .arg = transfer,
    };
    ucs_status_t status = ucp_worker_set_am_recv_handler(transfer->ucx.worker, &param);
    return status == UCS_OK ? SL_OK : sl_ucx_error(status, "setting the message handler");
}

static void handle_message(sl_transfer_t *transfer, const sl_inbound_t *inbound)
{
    sl_transfer_msg_t msg;
    if (sl_transfer_msg_parse(inbound->data, inbound->size, &msg) != SL_OK) {
        if (sl_log_allowed(&transfer->refusal_logged_us, LOG_INTERVAL_US)) {
            sl_log_warn("transfer: refused: %s", sl_error_text());
        }
        return;
    }
    switch (msg.type) {
    case SL_TRANSFER_MSG_GRANT:
        sl_writer_on_grant(transfer, &msg, sl_peer_find(transfer, &msg.from));
        break;
    case SL_TRANSFER_MSG_COMMIT:
        sl_reader_on_commit(transfer, &msg);
        break;
    case SL_TRANSFER_MSG_RELEASE:
        sl_reader_on_release(transfer, &msg);
        break;
    case SL_TRANSFER_MSG_DATA_SEEN:
        sl_data_on_seen(transfer, &msg);
        break;
    case SL_TRANSFER_MSG_DATA:
        break; /* without bytes it says nothing */
    case SL_TRANSFER_MSG_BYE:
        sl_peer_on_bye(transfer, &msg);
        break;
    }
}

static bool handle_inbox(sl_transfer_t *transfer)
{
    bool any = transfer->inbox != NULL;
    for (sl_inbound_t *inbound; (inbound = transfer->inbox) != NULL;) {
        transfer->inbox = inbound->next;
        if (transfer->inbox == NULL) {
            transfer->inbox_tail = &transfer->inbox;
        }
        handle_message(transfer, inbound);
        free(inbound);
    }
    return any;
}

/* ---- commands ---- */

static void command_peer_add(sl_transfer_t *transfer, const sl_command_t *command)
{
    /* A newer incarnation in the same place tells that the older one is gone. */
    for (sl_peer_t *peer = transfer->peers; peer != NULL; peer = peer->next) {
        if (sl_rank_same_place(&peer->id, &command->rank) &&
            peer->id.incarnation != command->rank.incarnation && !peer->gone) {
            sl_peer_set_gone(peer);
            sl_writer_peer_gone(transfer, &peer->id);
        }
    }
    sl_data_forget_other_lives(transfer, &command->rank);
    if (sl_peer_add(transfer, &command->rank, command->address, command->count)) {
        sl_writer_peer_added(transfer, sl_peer_find(transfer, &command->rank));
    }
}

static void command_peer_gone(sl_transfer_t *transfer, const sl_command_t *command)
{
    sl_peer_t *peer = sl_peer_find(transfer, &command->rank);
    if (peer != NULL) {
        sl_peer_set_gone(peer);
    }
    sl_writer_peer_gone(transfer, &command->rank);
    sl_data_forget(transfer, &command->rank);
}

static void run_command(sl_transfer_t *transfer, sl_command_t *command)
{
    switch (command->type) {
    case SL_COMMAND_PEER_ADD:
        command_peer_add(transfer, command);
        break;
    case SL_COMMAND_PEER_GONE:
        command_peer_gone(transfer, command);
        break;
    case SL_COMMAND_GRANT:
        sl_reader_grant(transfer, command);
        break;
    case SL_COMMAND_OPEN:
        sl_writer_open(transfer, command);
        break;
    case SL_COMMAND_PUSH:
        sl_writer_push(transfer, command);
        return; /* it keeps the command */
    case SL_COMMAND_COMMIT:
        sl_writer_commit(transfer, command);
        break;
    case SL_COMMAND_ABORT:
        sl_writer_abort(transfer, command->attempt);
        break;
    case SL_COMMAND_WAKE:
        break;
    }
    free(command);
}

static bool run_commands(sl_transfer_t *transfer)
{
    sl_ring_clear(transfer->commands);
    sl_command_t *command;
    int count = 0;
    while (count < COMMANDS_MAX && (command = sl_ring_pop(transfer->commands)) != NULL) {
        run_command(transfer, command);
        count++;
    }
    return count > 0;
}

/* ---- events ---- */

static void flush_pending(sl_transfer_t *transfer)
{
    for (sl_pending_event_t *pending; (pending = transfer->pending) != NULL;) {
        if (sl_ring_push(transfer->events, pending->event) != SL_OK) {
            return;
        }
        transfer->pending = pending->next;
        if (transfer->pending == NULL) {
            transfer->pending_tail = &transfer->pending;
        }
        free(pending);
    }
}

void sl_transfer_emit(sl_transfer_t *transfer, sl_transfer_event_type_t type, uint64_t attempt,
                      uint32_t generation, const sl_commit_t *commit, sl_status_t status,
                      const char *text)
{
    sl_transfer_event_t *event = calloc(1, sizeof(*event));
    SL_ASSERT(event != NULL);
    event->type = type;
    event->attempt = attempt;
    event->generation = generation;
    event->status = status;
    if (commit != NULL) {
        event->commit = *commit;
    }
    if (text != NULL) {
        snprintf(event->text, sizeof(event->text), "%s", text);
    }
    if (transfer->pending == NULL && sl_ring_push(transfer->events, event) == SL_OK) {
        return;
    }
    sl_pending_event_t *pending = malloc(sizeof(*pending));
    SL_ASSERT(pending != NULL);
    *pending = (sl_pending_event_t){.event = event};
    *transfer->pending_tail = pending;
    transfer->pending_tail = &pending->next;
}

/* ---- the loop ---- */

static int progress(sl_transfer_t *transfer)
{
    int calls = 0;
    while (calls < PROGRESS_CALLS_MAX && ucp_worker_progress(transfer->ucx.worker) != 0) {
        calls++;
    }
    return calls;
}

/* One turn; true when there was something to do. */
static bool turn(sl_transfer_t *transfer, uint64_t *wake_us)
{
    bool worked = run_commands(transfer);
    int calls = progress(transfer);
    worked |= calls > 0;
    worked |= handle_inbox(transfer);
    worked |= sl_data_tell(transfer);
    uint64_t now_us = sl_now_us();
    worked |= sl_writer_drive(transfer, now_us);
    sl_peers_tend(transfer, now_us);
    /* What has arrived already, perhaps while this process did not run, counts before the lease of
     * a lost writer does. */
    if (calls < PROGRESS_CALLS_MAX) {
        sl_reader_tend(transfer, now_us, wake_us);
    }
    flush_pending(transfer);
    if (worked) {
        transfer->worked_us = now_us;
    }
    return worked;
}

static bool stay_awake(const sl_transfer_t *transfer, uint64_t now_us)
{
    if (!transfer->params.device_memory) {
        return false;
    }
    return now_us - transfer->worked_us < SPIN_US ||
           (transfer->writes > 0 && now_us - transfer->writes_changed_us < WRITE_SPIN_US);
}

static void rest(sl_transfer_t *transfer, uint64_t wake_us)
{
    uint64_t now_us = sl_now_us();
    int wait_ms = SLEEP_MAX_MS;
    if (wake_us <= now_us) {
        return;
    }
    if (wake_us - now_us < SLEEP_MAX_MS * 1000) {
        wait_ms = (int)((wake_us - now_us) / 1000 + 1);
    }
    if (stay_awake(transfer, now_us)) {
        sched_yield();
        return;
    }
    if (transfer->pending != NULL) {
        wait_ms = 1; /* the engine makes room without telling */
    }
    sl_ucx_worker_sleep(&transfer->ucx, sl_ring_fd(transfer->commands), wait_ms);
}

/* Turns until `done` or the time has passed. */
static bool run_until(sl_transfer_t *transfer, bool (*done)(const sl_transfer_t *transfer),
                      uint64_t wait_us)
{
    uint64_t deadline_us = sl_now_us() + wait_us;
    while (!done(transfer)) {
        uint64_t wake_us = deadline_us;
        if (sl_now_us() >= deadline_us) {
            return false;
        }
        if (!turn(transfer, &wake_us)) {
            rest(transfer, wake_us);
        }
    }
    return true;
}

static bool no_attempts(const sl_transfer_t *transfer)
{
    return transfer->attempts.count == 0;
}

static void shut_down(sl_transfer_t *transfer)
{
    run_commands(transfer);
    sl_writer_abort_all(transfer, false);
    bool finished = run_until(transfer, no_attempts, FINISH_WAIT_US);
    if (!finished) {
        sl_log_warn("transfer: %zu attempts unfinished at shutdown", transfer->attempts.count);
        sl_writer_abort_all(transfer, true);
    }
    sl_peers_close_all(transfer, !finished);
    if (!run_until(transfer, sl_peers_all_closed, CLOSE_WAIT_US)) {
        sl_log_warn("transfer: endpoints unfinished at shutdown");
    }
}

void *sl_transfer_thread_main(void *arg)
{
    sl_transfer_t *transfer = arg;
    if (transfer->params.bind_thread != NULL) {
        sl_status_t status = transfer->params.bind_thread(transfer->params.bind_thread_arg);
        SL_ASSERT(status == SL_OK); /* the engine has used the device before */
    }
    while (!atomic_load(&transfer->stop)) {
        uint64_t wake_us = UINT64_MAX;
        if (!turn(transfer, &wake_us)) {
            rest(transfer, wake_us);
        }
    }
    shut_down(transfer);
    return NULL;
}
