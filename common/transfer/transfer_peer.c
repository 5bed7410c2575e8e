/*
 * Peers: one per place (pool, group, rank) and incarnation, with an endpoint made at first use.
 *
 * UCX's error callback only sets `failed`. The loop (sl_peers_tend) then closes by force, which
 * completes whatever is in flight on the endpoint, and releases the key once that is done: closing
 * inside the callback would pull the endpoint from under a caller that is still using it.
 *
 * A forced close does not reach the other side: its puts would be dropped here and never complete
 * there. So a peer that the router reports gone is sent a `bye` first, in case that it lives. The
 * close then waits until that has left (LEAVE_WAIT_US at most, if the peer is dead), because UCX
 * 1.13 aborts the process of a peer whose connection is closed by force while it is being made.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/transfer/transfer_engine.h"

#define LEAVE_WAIT_US 1000000u

const char *sl_rank_text(const sl_rank_id_t *rank, char text[SL_RANK_TEXT_BYTES])
{
    snprintf(text, SL_RANK_TEXT_BYTES, "%s %u/%u (incarnation %" PRIu64 ")",
             rank->pool == SL_POOL_PREFILL ? "prefill" : "decode", rank->group, rank->rank,
             rank->incarnation);
    return text;
}

bool sl_rank_same_place(const sl_rank_id_t *left, const sl_rank_id_t *right)
{
    return left->pool == right->pool && left->group == right->group && left->rank == right->rank;
}

sl_peer_t *sl_peer_find(const sl_transfer_t *transfer, const sl_rank_id_t *rank)
{
    sl_peer_t *peer = transfer->peers;
    while (peer != NULL && (peer->gone || !sl_rank_same(&peer->id, rank))) {
        peer = peer->next;
    }
    return peer;
}

bool sl_peer_add(sl_transfer_t *transfer, const sl_rank_id_t *rank, uint8_t *address, size_t size)
{
    if (sl_peer_find(transfer, rank) != NULL) {
        return false;
    }
    sl_peer_t *peer = calloc(1, sizeof(*peer));
    uint8_t *copy = malloc(size);
    SL_ASSERT(peer != NULL && copy != NULL);
    memcpy(copy, address, size);
    peer->id = *rank;
    peer->address = copy;
    sl_status_t status = sl_transfer_blob_parse(copy, size, &peer->blob);
    SL_ASSERT(status == SL_OK); /* it was parsed when the command was given */
    peer->next = transfer->peers;
    transfer->peers = peer;
    return true;
}

void sl_peer_set_gone(sl_peer_t *peer)
{
    if (!peer->gone) {
        peer->gone = true;
        if (!peer->failed) {
            snprintf(peer->why, sizeof(peer->why), "reported gone");
        }
    }
}

static void on_endpoint_error(void *arg, ucp_ep_h endpoint, ucs_status_t status)
{
    (void)endpoint;
    sl_peer_t *peer = arg;
    if (peer->gone) {
        peer->failed = true; /* no need to wait for the bye to leave */
    } else if (!peer->failed && !peer->closing) {
        peer->failed = true;
        snprintf(peer->why, sizeof(peer->why), "%s", ucs_status_string(status));
    }
}

static void fail_connect(sl_peer_t *peer, const char *what, ucs_status_t status)
{
    char name[SL_RANK_TEXT_BYTES];
    peer->failed = true;
    snprintf(peer->why, sizeof(peer->why), "%s: %s", what, ucs_status_string(status));
    sl_log_warn("transfer: %s: %s", sl_rank_text(&peer->id, name), peer->why);
}

bool sl_peer_connect(sl_transfer_t *transfer, sl_peer_t *peer)
{
    if (!sl_peer_usable(peer)) {
        return false;
    }
    if (peer->endpoint != NULL) {
        return true;
    }
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)peer->blob.worker_address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_endpoint_error, .arg = peer},
    };
    ucs_status_t status = ucp_ep_create(transfer->ucx.worker, &params, &peer->endpoint);
    if (status != UCS_OK) {
        peer->endpoint = NULL;
        fail_connect(peer, "creating the endpoint", status);
        return false;
    }
    status = ucp_ep_rkey_unpack(peer->endpoint, peer->blob.rkey, &peer->rkey);
    if (status != UCS_OK) {
        peer->rkey = NULL;
        fail_connect(peer, "unpacking the pool's key", status);
        return false;
    }
    peer->by_message = !transfer->params.always_put && !transfer->params.device_memory &&
                       !peer->blob.device_memory && !sl_ucx_endpoint_writes(peer->endpoint);
    return true;
}

/* ---- messages ---- */

typedef struct {
    sl_peer_t *peer;
    sl_bytes_t bytes;
    sl_peer_sent_t done;
    void *arg;
} send_t;

static void send_finished(send_t *send, bool ok)
{
    send->peer->operations--;
    if (send->done != NULL) {
        send->done(send->arg, ok);
    }
    free(send->bytes.data);
    free(send);
}

static void send_callback(void *request, ucs_status_t status, void *user_data)
{
    send_finished(user_data, status == UCS_OK);
    ucp_request_free(request);
}

/* Takes the send. */
static void post_send(sl_peer_t *peer, send_t *send)
{
    /* Eager, so that the message needs nothing of the peer but to look at it, and follows the puts
     * that were flushed before. */
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.send = send_callback,
        .user_data = send,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    peer->operations++;
    void *request = ucp_am_send_nbx(peer->endpoint, SL_TRANSFER_AM_ID, NULL, 0, send->bytes.data,
                                    send->bytes.size, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        send_finished(send, UCS_PTR_STATUS(request) == UCS_OK);
    }
}

bool sl_peer_send(sl_transfer_t *transfer, sl_peer_t *peer, const sl_transfer_msg_t *msg,
                  const uint32_t *pages, sl_peer_sent_t done, void *arg)
{
    if (!sl_peer_connect(transfer, peer)) {
        return false;
    }
    send_t *send = malloc(sizeof(*send));
    SL_ASSERT(send != NULL);
    *send = (send_t){.peer = peer, .done = done, .arg = arg};
    if (sl_transfer_msg_encode(msg, pages, &send->bytes) != SL_OK) {
        free(send);
        return false;
    }
    post_send(peer, send);
    return true;
}

void sl_peer_send_release(sl_transfer_t *transfer, sl_peer_t *peer, uint64_t attempt,
                          uint32_t generation)
{
    sl_transfer_msg_t msg = {
        .type = SL_TRANSFER_MSG_RELEASE,
        .from = transfer->params.self,
        .attempt = attempt,
        .generation = generation,
        .layout_hash = transfer->params.layout_hash,
    };
    if (!sl_peer_send(transfer, peer, &msg, NULL, NULL, NULL)) {
        char name[SL_RANK_TEXT_BYTES];
        sl_log_debug("attempt %" PRIu64 ": no release to %s: %s", attempt,
                     sl_rank_text(&peer->id, name), peer->why);
    }
}

/* ---- closing ---- */

static void close_callback(void *request, ucs_status_t status, void *user_data)
{
    (void)status; /* the endpoint is released whatever it says */
    sl_peer_t *peer = user_data;
    peer->closed = true;
    peer->closed_at_us = sl_now_us();
    ucp_request_free(request);
}

static void begin_close(sl_peer_t *peer, bool force)
{
    ucp_ep_h endpoint = peer->endpoint;
    peer->closing = true;
    peer->endpoint = NULL;
    if (endpoint == NULL) {
        peer->closed = true;
        peer->closed_at_us = sl_now_us();
        return;
    }
    ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .cb.send = close_callback,
        .user_data = peer,
        .flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0,
    };
    void *request = ucp_ep_close_nbx(endpoint, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        peer->closed = true;
        peer->closed_at_us = sl_now_us();
    }
}

static void say_bye(sl_transfer_t *transfer, sl_peer_t *peer)
{
    send_t *send = calloc(1, sizeof(*send));
    SL_ASSERT(send != NULL);
    send->peer = peer;
    sl_transfer_msg_t msg = {
        .type = SL_TRANSFER_MSG_BYE,
        .from = transfer->params.self,
        .layout_hash = transfer->params.layout_hash,
    };
    if (sl_transfer_msg_encode(&msg, NULL, &send->bytes) != SL_OK) {
        free(send);
        return;
    }
    post_send(peer, send);
}

static void leave_callback(void *request, ucs_status_t status, void *user_data)
{
    (void)status; /* closed by force either way */
    sl_peer_t *peer = user_data;
    peer->operations--;
    peer->leave_by_us = 0;
    ucp_request_free(request);
}

static void begin_leave(sl_transfer_t *transfer, sl_peer_t *peer, uint64_t now_us)
{
    peer->leaving = true;
    say_bye(transfer, peer);
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = leave_callback,
        .user_data = peer,
    };
    void *request = ucp_ep_flush_nbx(peer->endpoint, &param);
    if (UCS_PTR_IS_PTR(request)) {
        peer->operations++;
        peer->leave_by_us = now_us + LEAVE_WAIT_US;
    }
}

/* Of a peer that failed or is gone: the next step towards its close. */
static void tend_ending(sl_transfer_t *transfer, sl_peer_t *peer, uint64_t now_us)
{
    if (peer->endpoint != NULL && !peer->leaving) {
        char name[SL_RANK_TEXT_BYTES];
        sl_log_info("transfer: closing %s: %s", sl_rank_text(&peer->id, name), peer->why);
    }
    if (peer->endpoint != NULL && !peer->failed && !peer->leaving) {
        begin_leave(transfer, peer, now_us);
    }
    if (!peer->leaving || peer->failed || now_us >= peer->leave_by_us) {
        begin_close(peer, true);
    }
}

static void free_peer(sl_peer_t *peer)
{
    free(peer->address);
    free(peer);
}

void sl_peer_give_up(sl_peer_t *peer, const char *why)
{
    if (sl_peer_usable(peer)) {
        peer->failed = true;
        snprintf(peer->why, sizeof(peer->why), "%s", why);
    }
}

void sl_peer_on_bye(sl_transfer_t *transfer, const sl_transfer_msg_t *msg)
{
    sl_peer_t *peer = sl_peer_find(transfer, &msg->from);
    if (peer != NULL) {
        sl_peer_give_up(peer, "it has closed the connection");
    }
}

void sl_peers_tend(sl_transfer_t *transfer, uint64_t now_us)
{
    for (sl_peer_t **link = &transfer->peers, *peer; (peer = *link) != NULL;) {
        if ((peer->failed || peer->gone) && !peer->closing) {
            tend_ending(transfer, peer, now_us);
        }
        bool idle = peer->closed && peer->operations == 0;
        if (idle && peer->rkey != NULL) {
            ucp_rkey_destroy(peer->rkey);
            peer->rkey = NULL;
        }
        if (idle && peer->gone && peer->references == 0) {
            *link = peer->next;
            free_peer(peer);
        } else {
            link = &peer->next;
        }
    }
}

void sl_peers_close_all(sl_transfer_t *transfer, bool force)
{
    for (sl_peer_t *peer = transfer->peers; peer != NULL; peer = peer->next) {
        if (!peer->closing) {
            begin_close(peer, force || peer->failed || peer->gone);
        }
    }
}

bool sl_peers_all_closed(const sl_transfer_t *transfer)
{
    for (const sl_peer_t *peer = transfer->peers; peer != NULL; peer = peer->next) {
        if (!peer->closed || peer->operations > 0 || peer->rkey != NULL) {
            return false;
        }
    }
    return true;
}

void sl_peers_free_all(sl_transfer_t *transfer)
{
    while (transfer->peers != NULL) {
        sl_peer_t *next = transfer->peers->next;
        free_peer(transfer->peers);
        transfer->peers = next;
    }
}
