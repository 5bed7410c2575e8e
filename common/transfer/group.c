/*
 * Collectives of one group over UCX tag messages, every rank to every rank directly.
 *
 * One operation is one round: post a receive from each peer, send to each peer, wait for all of
 * them. The tag carries what the message is for:
 *
 *      63      56 55      48 47                                            0
 *     | operation |  source  |  sequence number (counts operations)        |
 *
 * and a receive matches on the source alone, so that the next message of a peer is always looked at
 * whatever it is for. If operation, sequence number or length is not what this rank is about to do,
 * the group is out of step and says so; it never waits for a message that will not come because
 * something else came instead.
 *
 * A faster peer's message stays in UCX's queue of unexpected messages. It cannot run ahead by more
 * than one operation where each rank needs a message of every other; broadcast does not, hence the
 * barrier after BROADCAST_RUN broadcasts in a row, which bounds that queue.
 *
 * The endpoints have no peer error handling, since UCX's shared memory offers none: a peer that
 * died shows as a timeout. After any failure the group only waits to be destroyed; receives that
 * are still posted are cancelled first, so nothing is written into the caller's memory later.
 */
#include "common/transfer/group.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/transfer/transfer_wire.h"
#include "common/transfer/ucx_context.h"

#define TIMEOUT_DEFAULT_US 30000000u
#define SPIN_DEFAULT_US 50u
#define SPIN_PURE_US 4u /* of the busy part: without giving the core to whoever wants it */
#define YIELDS_MAX 8u   /* after the busy part, before sleeping */
#define SLEEP_MAX_MS 20 /* a lost wake-up costs no more than this */
#define CLOSE_WAIT_US 500000u
#define BROADCAST_RUN 32u
#define REDUCE_DIRECT_BYTES 65536u /* all-reduce in one round while size * bytes is within this */
#define SUM_TILE 512u

#define TAG_OP_SHIFT 56
#define TAG_SOURCE_SHIFT 48
#define TAG_SOURCE_MASK ((uint64_t)0xff << TAG_SOURCE_SHIFT)
#define TAG_SEQUENCE_MASK (((uint64_t)1 << TAG_SOURCE_SHIFT) - 1)

typedef enum { OP_BARRIER = 1, OP_EXCHANGE, OP_GATHER, OP_SCATTER, OP_REDUCE, OP_BROADCAST } op_t;

/* A receive of the running operation. */
typedef struct {
    sl_group_t *group;
    void *request; /* while it is posted */
    size_t bytes;  /* expected */
    size_t found_bytes;
    uint64_t found_tag;
    ucs_status_t status;
    bool waiting;
} slot_t;

struct sl_group {
    sl_group_params_t params;
    sl_ucx_worker_t ucx; /* worker NULL for a group of one */
    sl_bytes_t address;
    ucp_ep_h endpoints[SL_GROUP_RANKS_MAX];
    bool connected;
    sl_status_t failed; /* SL_OK, or what ended the group */

    op_t op;
    uint64_t sequence; /* of the running or last operation */
    uint32_t broadcasts_in_a_row;
    slot_t slots[SL_GROUP_RANKS_MAX];
    uint32_t receives_waiting, sends_waiting;
    int mismatch; /* rank whose message does not fit, or -1 */
    ucs_status_t send_status;

    float *scratch;
    size_t scratch_floats;
};

static const char *op_name(uint64_t op)
{
    static const char *const names[] = {"nothing",        "barrier",    "exchange", "all-gather",
                                        "reduce-scatter", "all-reduce", "broadcast"};
    return op < sizeof(names) / sizeof(names[0]) ? names[op] : "unknown";
}

/* ---- one round ---- */

static void receive_finished(slot_t *slot, ucs_status_t status, const ucp_tag_recv_info_t *info)
{
    sl_group_t *group = slot->group;
    slot->request = NULL;
    slot->waiting = false;
    slot->status = status;
    slot->found_tag = info->sender_tag;
    slot->found_bytes = info->length;
    group->receives_waiting--;
    uint64_t expected_tag = (uint64_t)group->op << TAG_OP_SHIFT |
                            (uint64_t)(slot - group->slots) << TAG_SOURCE_SHIFT | group->sequence;
    if (status != UCS_OK || slot->found_tag != expected_tag || slot->found_bytes != slot->bytes) {
        group->mismatch = (int)(slot - group->slots);
    }
}

static void receive_callback(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info,
                             void *user_data)
{
    receive_finished(user_data, status, info);
    ucp_request_free(request);
}

static void send_callback(void *request, ucs_status_t status, void *user_data)
{
    sl_group_t *group = user_data;
    group->sends_waiting--;
    if (status != UCS_OK) {
        group->send_status = status;
    }
    ucp_request_free(request);
}

static void post_receive(sl_group_t *group, uint32_t source, void *data, size_t bytes)
{
    slot_t *slot = &group->slots[source];
    *slot = (slot_t){.group = group, .bytes = bytes, .waiting = true};
    group->receives_waiting++;

    /* Always by the callback, within the call for a message that is here already: UCX 1.13 does not
     * tell the tag of a message that it completes at once. */
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
        .cb.recv = receive_callback,
        .user_data = slot,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    uint64_t tag = (uint64_t)source << TAG_SOURCE_SHIFT;
    void *request = ucp_tag_recv_nbx(group->ucx.worker, data, bytes, tag, TAG_SOURCE_MASK, &param);
    if (!UCS_PTR_IS_PTR(request)) {
        ucp_tag_recv_info_t unknown = {0};
        receive_finished(slot, UCS_PTR_STATUS(request), &unknown);
    } else if (slot->waiting) {
        slot->request = request;
    }
}

static void post_send(sl_group_t *group, uint32_t target, const void *data, size_t bytes)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.send = send_callback,
        .user_data = group,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    uint64_t tag = (uint64_t)group->op << TAG_OP_SHIFT |
                   (uint64_t)group->params.rank << TAG_SOURCE_SHIFT | group->sequence;
    void *request = ucp_tag_send_nbx(group->endpoints[target], data, bytes, tag, &param);
    if (UCS_PTR_IS_PTR(request)) {
        group->sends_waiting++;
    } else if (UCS_PTR_STATUS(request) != UCS_OK) {
        group->send_status = UCS_PTR_STATUS(request);
    }
}

static void cancel_receives(sl_group_t *group)
{
    for (uint32_t r = 0; r < group->params.size; r++) {
        if (group->slots[r].request != NULL) {
            ucp_request_cancel(group->ucx.worker, group->slots[r].request);
        }
    }
    /* A cancelled receive that had not begun completes within the call or the next progress. */
    for (int i = 0; i < 100 && group->receives_waiting > 0; i++) {
        ucp_worker_progress(group->ucx.worker);
    }
}

static sl_status_t fail(sl_group_t *group, sl_status_t status)
{
    group->failed = status;
    cancel_receives(group);
    return status;
}

static sl_status_t fail_mismatch(sl_group_t *group)
{
    uint32_t rank = group->params.rank;
    const slot_t *slot = &group->slots[group->mismatch];
    if (slot->status != UCS_OK && slot->status != UCS_ERR_MESSAGE_TRUNCATED) {
        return fail(group, sl_error(SL_ERR_DEVICE, "group rank %u: %s %llu from rank %d: %s", rank,
                                    op_name(group->op), (unsigned long long)group->sequence,
                                    group->mismatch, ucs_status_string(slot->status)));
    }
    return fail(group,
                sl_error(SL_ERR_DESYNC,
                         "group rank %u is at %s %llu with %zu bytes from rank %d, which sent "
                         "%s %llu with %zu bytes%s",
                         rank, op_name(group->op), (unsigned long long)group->sequence, slot->bytes,
                         group->mismatch, op_name(slot->found_tag >> TAG_OP_SHIFT),
                         (unsigned long long)(slot->found_tag & TAG_SEQUENCE_MASK),
                         slot->found_bytes,
                         slot->status == UCS_ERR_MESSAGE_TRUNCATED ? " (too long)" : ""));
}

static sl_status_t fail_timeout(sl_group_t *group)
{
    char missing[128] = "";
    size_t used = 0;
    for (uint32_t r = 0; r < group->params.size && used < sizeof(missing) - 8; r++) {
        if (r != group->params.rank && group->slots[r].waiting) {
            used += (size_t)snprintf(missing + used, sizeof(missing) - used, " %u", r);
        }
    }
    return fail(group, sl_error(SL_ERR_TIMEOUT,
                                "group rank %u at %s %llu: no message within %llu ms from rank%s "
                                "(%u sends unfinished)",
                                group->params.rank, op_name(group->op),
                                (unsigned long long)group->sequence,
                                (unsigned long long)(group->params.timeout_us / 1000),
                                used == 0 ? "s: none missing" : missing, group->sends_waiting));
}

/* First busy, since a peer is often only microseconds behind; then giving way, since on a host
 * with more ranks than cores it may be the peer that needs this core; then asleep. */
static void idle(sl_group_t *group, uint64_t waited_us, uint32_t *yields)
{
    if (waited_us < SPIN_PURE_US && waited_us < group->params.spin_us) {
        return;
    }
    if (waited_us < group->params.spin_us || *yields < YIELDS_MAX) {
        *yields += waited_us >= group->params.spin_us;
        sched_yield();
        return;
    }
    uint64_t left_ms = (group->params.timeout_us - waited_us) / 1000 + 1;
    sl_ucx_worker_sleep(&group->ucx, -1, left_ms < SLEEP_MAX_MS ? (int)left_ms : SLEEP_MAX_MS);
}

static sl_status_t wait_all(sl_group_t *group)
{
    uint64_t started_us = sl_now_us();
    uint32_t yields = 0;
    while (group->mismatch < 0 && group->send_status == UCS_OK &&
           group->receives_waiting + group->sends_waiting > 0) {
        if (ucp_worker_progress(group->ucx.worker) != 0) {
            continue;
        }
        uint64_t waited_us = sl_now_us() - started_us;
        if (waited_us >= group->params.timeout_us) {
            return fail_timeout(group);
        }
        if (yields == YIELDS_MAX && group->params.give_up != NULL &&
            group->params.give_up(group->params.give_up_arg)) {
            return fail(group, sl_error(SL_ERR_CANCELED, "group rank %u at %s %llu: given up",
                                        group->params.rank, op_name(group->op),
                                        (unsigned long long)group->sequence));
        }
        idle(group, waited_us, &yields);
    }
    if (group->mismatch >= 0) {
        return fail_mismatch(group);
    }
    if (group->send_status != UCS_OK) {
        return fail(group, sl_error(SL_ERR_DEVICE, "group rank %u: sending %s %llu: %s",
                                    group->params.rank, op_name(group->op),
                                    (unsigned long long)group->sequence,
                                    ucs_status_string(group->send_status)));
    }
    return SL_OK;
}

static sl_status_t begin(sl_group_t *group, op_t op)
{
    if (group->failed != SL_OK) {
        return group->failed;
    }
    SL_ASSERT(group->connected);
    SL_ASSERT(group->receives_waiting == 0 && group->sends_waiting == 0);
    group->op = op;
    group->sequence = (group->sequence + 1) & TAG_SEQUENCE_MASK;
    group->mismatch = -1;
    group->send_status = UCS_OK;
    if (op != OP_BROADCAST) {
        group->broadcasts_in_a_row = 0;
    }
    return SL_OK;
}

/* The i-th peer to talk to: each rank begins with its right neighbour, so that not all of them
 * begin with rank 0. */
static uint32_t peer_at(const sl_group_t *group, uint32_t i)
{
    return (group->params.rank + i) % group->params.size;
}

/* Own block in `mine`; block r of all goes to out + sum of bytes before r. */
static sl_status_t gather_round(sl_group_t *group, op_t op, const void *mine, const size_t *bytes,
                                void *out)
{
    uint32_t rank = group->params.rank, size = group->params.size;
    SL_TRY(begin(group, op));
    uint8_t *place = out;
    for (uint32_t r = 0; r < size; place += bytes[r], r++) {
        if (r != rank) {
            post_receive(group, r, place, bytes[r]);
        } else if (place != mine && bytes[r] > 0) {
            memcpy(place, mine, bytes[r]);
        }
    }
    for (uint32_t i = 1; i < size; i++) {
        post_send(group, peer_at(group, i), mine, bytes[rank]);
    }
    return wait_all(group);
}

static sl_status_t barrier(sl_group_t *group)
{
    size_t none[SL_GROUP_RANKS_MAX] = {0};
    uint8_t nothing = 0;
    return gather_round(group, OP_BARRIER, &nothing, none, &nothing);
}

/* ---- create, connect, destroy ---- */

sl_status_t sl_group_create(sl_ucx_t *ucx, const sl_group_params_t *params, sl_group_t **group_p)
{
    if (params->size == 0 || params->size > SL_GROUP_RANKS_MAX || params->rank >= params->size) {
        return sl_error(SL_ERR_CONFIG, "group: rank %u of %u, expected below 1 to %d", params->rank,
                        params->size, SL_GROUP_RANKS_MAX);
    }
    sl_group_t *group = calloc(1, sizeof(*group));
    if (group == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "group: %zu bytes", sizeof(*group));
    }
    group->params = *params;
    group->params.timeout_us = params->timeout_us == 0 ? TIMEOUT_DEFAULT_US : params->timeout_us;
    group->params.spin_us = params->spin_us == 0 ? SPIN_DEFAULT_US : params->spin_us;
    group->mismatch = -1;

    sl_status_t status;
    sl_group_blob_t blob = {.rank = params->rank, .size = params->size};
    uint8_t no_worker = 0;
    if (params->size > 1) {
        SL_TRY_GOTO(status, sl_ucx_worker_create(sl_ucx_group_context(ucx), &group->ucx), destroy);
        blob.worker_address = (const uint8_t *)group->ucx.address;
        blob.worker_address_bytes = (uint32_t)group->ucx.address_bytes;
    } else {
        blob.worker_address = &no_worker;
        blob.worker_address_bytes = 1;
    }
    SL_TRY_GOTO(status, sl_group_blob_encode(&blob, &group->address), destroy);
    *group_p = group;
    return SL_OK;

destroy:
    sl_group_destroy(group);
    return status;
}

/* Lets what was sent last reach its peers; a peer that is gone holds this up only shortly. */
static void close_endpoints(sl_group_t *group)
{
    void *requests[SL_GROUP_RANKS_MAX] = {0};
    uint32_t waiting = 0;
    ucp_request_param_t param = {0};
    for (uint32_t r = 0; r < group->params.size; r++) {
        if (group->endpoints[r] != NULL) {
            void *request = ucp_ep_close_nbx(group->endpoints[r], &param);
            if (UCS_PTR_IS_PTR(request)) {
                requests[waiting++] = request;
            }
        }
    }
    uint64_t deadline_us = sl_now_us() + CLOSE_WAIT_US;
    while (waiting > 0 && sl_now_us() < deadline_us) {
        if (ucp_request_check_status(requests[waiting - 1]) != UCS_INPROGRESS) {
            ucp_request_free(requests[--waiting]);
        } else if (ucp_worker_progress(group->ucx.worker) == 0) {
            sl_ucx_worker_sleep(&group->ucx, -1, 1);
        }
    }
}

void sl_group_destroy(sl_group_t *group)
{
    if (group == NULL) {
        return;
    }
    if (group->ucx.worker != NULL) {
        if (group->failed == SL_OK) {
            close_endpoints(group);
        }
        sl_ucx_worker_destroy(&group->ucx);
    }
    free(group->address.data);
    free(group->scratch);
    free(group);
}

void sl_group_address(const sl_group_t *group, sl_bytes_t *borrowed)
{
    *borrowed = group->address;
}

static sl_status_t connect_rank(sl_group_t *group, uint32_t rank, const sl_bytes_t *address)
{
    sl_group_blob_t blob;
    SL_TRY(sl_group_blob_parse(address->data, address->size, &blob));
    if (blob.rank != rank || blob.size != group->params.size) {
        return sl_error(SL_ERR_DESYNC,
                        "group rank %u: address %u is of rank %u of %u, expected rank %u of %u",
                        group->params.rank, rank, blob.rank, blob.size, rank, group->params.size);
    }
    if (rank == group->params.rank) {
        return SL_OK;
    }
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
        .address = (const ucp_address_t *)blob.worker_address,
    };
    ucs_status_t status = ucp_ep_create(group->ucx.worker, &params, &group->endpoints[rank]);
    if (status != UCS_OK) {
        group->endpoints[rank] = NULL;
        return sl_error(SL_ERR_UNREACHABLE, "group rank %u: connecting to rank %u: %s",
                        group->params.rank, rank, ucs_status_string(status));
    }
    return SL_OK;
}

sl_status_t sl_group_connect(sl_group_t *group, const sl_bytes_t *addresses, size_t count)
{
    SL_ASSERT(!group->connected);
    if (count != group->params.size) {
        return sl_error(SL_ERR_DESYNC, "group rank %u: %zu addresses, expected %u",
                        group->params.rank, count, group->params.size);
    }
    for (uint32_t r = 0; r < group->params.size; r++) {
        SL_TRY(connect_rank(group, r, &addresses[r]));
    }
    group->connected = true;
    return group->params.size == 1 ? SL_OK : barrier(group);
}

/* ---- sleeping groups ---- */

bool sl_group_peer_waits(sl_group_t *group)
{
    if (group->params.size == 1 || group->failed != SL_OK) {
        return false;
    }
    while (ucp_worker_progress(group->ucx.worker) != 0) {
    }
    /* Whatever it is for: what does not fit is found by the exchange that follows. */
    ucp_tag_recv_info_t info;
    return ucp_tag_probe_nb(group->ucx.worker, 0, 0, 0, &info) != NULL;
}

int sl_group_fd(const sl_group_t *group)
{
    return group->params.size == 1 ? -1 : group->ucx.fd;
}

sl_status_t sl_group_arm(sl_group_t *group)
{
    if (group->params.size == 1) {
        return SL_OK;
    }
    if (group->failed != SL_OK) {
        return group->failed;
    }
    if (sl_group_peer_waits(group)) {
        return SL_ERR_AGAIN;
    }
    ucs_status_t status = ucp_worker_arm(group->ucx.worker);
    if (status == UCS_ERR_BUSY) {
        return SL_ERR_AGAIN;
    }
    return status == UCS_OK ? SL_OK : sl_ucx_error(status, "arming the group's worker");
}

/* ---- collectives ---- */

sl_status_t sl_group_exchange(sl_group_t *group, const sl_step_record_t *mine,
                              sl_step_record_t *records)
{
    uint32_t rank = group->params.rank, size = group->params.size;
    sl_step_record_t record = *mine;
    if (size == 1) {
        SL_TRY(begin(group, OP_EXCHANGE));
        record.sequence = group->sequence;
        records[0] = record;
        return SL_OK;
    }
    size_t bytes[SL_GROUP_RANKS_MAX] = {0};
    for (uint32_t r = 0; r < size; r++) {
        bytes[r] = sizeof(record);
    }
    record.sequence = (group->sequence + 1) & TAG_SEQUENCE_MASK;
    SL_TRY(gather_round(group, OP_EXCHANGE, &record, bytes, records));
    for (uint32_t r = 0; r < size; r++) {
        if (records[r].sequence != record.sequence) {
            return fail(group, sl_error(SL_ERR_DESYNC,
                                        "group rank %u: record of rank %u has sequence %llu, "
                                        "expected %llu",
                                        rank, r, (unsigned long long)records[r].sequence,
                                        (unsigned long long)record.sequence));
        }
    }
    return SL_OK;
}

sl_status_t sl_group_all_gather(sl_group_t *group, const void *mine, const size_t *bytes, void *out)
{
    if (group->params.size == 1) {
        if (out != mine && bytes[0] > 0) {
            memcpy(out, mine, bytes[0]);
        }
        return group->failed;
    }
    return gather_round(group, OP_GATHER, mine, bytes, out);
}

static sl_status_t need_scratch(sl_group_t *group, size_t floats)
{
    if (floats <= group->scratch_floats) {
        return SL_OK;
    }
    float *grown = realloc(group->scratch, floats * sizeof(float));
    if (grown == NULL) {
        return fail(group, sl_error(SL_ERR_NO_MEMORY, "group rank %u: scratch of %zu floats",
                                    group->params.rank, floats));
    }
    group->scratch = grown;
    group->scratch_floats = floats;
    return SL_OK;
}

/* out[i] = blocks[0][i] + blocks[1][i] + ... in this order; out may be one of the blocks. */
static void sum_blocks(const float *const *blocks, uint32_t block_count, size_t count, float *out)
{
    float tile[SUM_TILE];
    for (size_t begin_at = 0; begin_at < count; begin_at += SUM_TILE) {
        size_t tile_count = count - begin_at < SUM_TILE ? count - begin_at : SUM_TILE;
        memcpy(tile, blocks[0] + begin_at, tile_count * sizeof(float));
        for (uint32_t b = 1; b < block_count; b++) {
            const float *block = blocks[b] + begin_at;
            for (size_t i = 0; i < tile_count; i++) {
                tile[i] += block[i];
            }
        }
        memcpy(out + begin_at, tile, tile_count * sizeof(float));
    }
}

sl_status_t sl_group_reduce_scatter(sl_group_t *group, const float *in, const size_t *counts,
                                    float *out)
{
    uint32_t rank = group->params.rank, size = group->params.size;
    if (size == 1) {
        memmove(out, in, counts[0] * sizeof(float));
        return group->failed;
    }
    SL_TRY(begin(group, OP_SCATTER));
    SL_TRY(need_scratch(group, (size - 1) * counts[rank] + 1));

    const float *blocks[SL_GROUP_RANKS_MAX];
    size_t offsets[SL_GROUP_RANKS_MAX], offset = 0;
    float *place = group->scratch;
    for (uint32_t r = 0; r < size; offset += counts[r], r++) {
        offsets[r] = offset;
        if (r == rank) {
            blocks[r] = in + offset;
            continue;
        }
        blocks[r] = place;
        post_receive(group, r, place, counts[rank] * sizeof(float));
        place += counts[rank];
    }
    for (uint32_t i = 1; i < size; i++) {
        uint32_t target = peer_at(group, i);
        post_send(group, target, in + offsets[target], counts[target] * sizeof(float));
    }
    SL_TRY(wait_all(group));
    sum_blocks(blocks, size, counts[rank], out);
    return SL_OK;
}

/* One round: everyone gets everything and adds it up alike. */
static sl_status_t all_reduce_direct(sl_group_t *group, float *data, size_t count)
{
    uint32_t size = group->params.size;
    const float *blocks[SL_GROUP_RANKS_MAX];
    size_t bytes[SL_GROUP_RANKS_MAX] = {0};
    SL_TRY(need_scratch(group, size * count + 1));
    for (uint32_t r = 0; r < size; r++) {
        blocks[r] = group->scratch + r * count;
        bytes[r] = count * sizeof(float);
    }
    SL_TRY(gather_round(group, OP_REDUCE, data, bytes, group->scratch));
    sum_blocks(blocks, size, count, data);
    return SL_OK;
}

sl_status_t sl_group_all_reduce(sl_group_t *group, float *data, size_t count)
{
    uint32_t rank = group->params.rank, size = group->params.size;
    if (group->failed != SL_OK || size == 1) {
        return group->failed;
    }
    if (count * sizeof(float) * size <= REDUCE_DIRECT_BYTES) {
        return all_reduce_direct(group, data, count);
    }
    size_t counts[SL_GROUP_RANKS_MAX], bytes[SL_GROUP_RANKS_MAX], own_offset = 0;
    for (uint32_t r = 0; r < size; r++) {
        counts[r] = count / size + (r < count % size);
        bytes[r] = counts[r] * sizeof(float);
        own_offset += r < rank ? counts[r] : 0;
    }
    float *own = data + own_offset;
    SL_TRY(sl_group_reduce_scatter(group, data, counts, own));
    return gather_round(group, OP_REDUCE, own, bytes, data);
}

sl_status_t sl_group_broadcast(sl_group_t *group, uint32_t root, void *data, size_t bytes)
{
    SL_ASSERT(root < group->params.size);
    if (group->params.size == 1) {
        return group->failed;
    }
    if (group->broadcasts_in_a_row == BROADCAST_RUN) {
        SL_TRY(barrier(group));
    }
    SL_TRY(begin(group, OP_BROADCAST));
    group->broadcasts_in_a_row++;
    if (group->params.rank != root) {
        post_receive(group, root, data, bytes);
        return wait_all(group);
    }
    for (uint32_t i = 1; i < group->params.size; i++) {
        post_send(group, peer_at(group, i), data, bytes);
    }
    return wait_all(group);
}
