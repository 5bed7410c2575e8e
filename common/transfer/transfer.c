/*
 * The engine's side of the transfer engine: commands are copied into one allocation each and go
 * through the command ring; events come back through the event ring. What can be judged without
 * the thread's state (addresses, page ids, layer ranges) is judged here, so that the caller gets
 * the error at once.
 */
#include "common/transfer/transfer.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/clock.h"
#include "common/transfer/transfer_engine.h"

#define RING_ITEMS_DEFAULT 8192u
#define LEASE_DEFAULT_US 5000000u
#define COMMAND_WAIT_US 10000000u /* for room in the command ring */
#define COMMAND_RETRY_NS 100000

static sl_status_t check_params(const sl_transfer_params_t *params)
{
    if (params->page_count == 0 || params->layers == 0 || params->page_bytes == 0 ||
        params->page_bytes % params->layers != 0 || params->base == NULL) {
        return sl_error(SL_ERR_CONFIG, "transfer: pool of %u pages of %zu bytes in %zu layers",
                        params->page_count, params->page_bytes, params->layers);
    }
    return SL_OK;
}

#define NEEDS_CUDA                                                                                 \
    "GPU memory needs a UCX with CUDA support whose CUDA modules (libuct_cuda.so) it can load, "   \
    "such as the bundle's"

/* Asked first, because registering does not always tell: without its CUDA modules, UCX 1.13 takes
 * the memory for what it is told, and crashes at the first put; 1.22 says "Invalid parameter". */
static sl_status_t check_device_support(const sl_transfer_t *transfer, ucp_context_h context)
{
    if (!transfer->params.device_memory) {
        return SL_OK;
    }
    ucp_context_attr_t knows = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    ucs_status_t status = ucp_context_query(context, &knows);
    if (status != UCS_OK) {
        return sl_ucx_error(status, "asking for the types of memory it supports");
    }
    if ((knows.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) == 0) {
        unsigned major, minor, release;
        ucp_get_version(&major, &minor, &release);
        return sl_error(SL_ERR_DEVICE,
                        "transfer: the page pool is GPU memory, which UCX %u.%u.%u does not "
                        "support as it is here; " NEEDS_CUDA,
                        major, minor, release);
    }
    return SL_OK;
}

/* The pool must be what its owner thinks it is. */
static sl_status_t map_pool(sl_transfer_t *transfer)
{
    ucp_context_h context = sl_ucx_transfer_context(transfer->params.ucx);
    const char *hint = transfer->params.device_memory ? "; " NEEDS_CUDA : "";
    SL_TRY(check_device_support(transfer, context));
    size_t bytes = transfer->params.page_bytes * transfer->params.page_count;
    ucs_memory_type_t expected =
        transfer->params.device_memory ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
    /* The type is told rather than found out: UCX only knows of device memory that was taken after
     * its own start. */
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = transfer->params.base,
        .length = bytes,
        .memory_type = expected,
    };
    ucs_status_t status = ucp_mem_map(context, &params, &transfer->memory);
    if (status != UCS_OK) {
        transfer->memory = NULL;
        return sl_error(SL_ERR_DEVICE,
                        "ucx: registering the page pool, %zu bytes at %p, as memory of type %s: "
                        "%s%s",
                        bytes, transfer->params.base, ucs_memory_type_names[expected],
                        ucs_status_string(status), hint);
    }
    ucp_mem_attr_t found = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH |
                                          UCP_MEM_ATTR_FIELD_MEM_TYPE};
    status = ucp_mem_query(transfer->memory, &found);
    if (status != UCS_OK) {
        return sl_ucx_error(status, "querying the page pool");
    }
    uintptr_t base = (uintptr_t)transfer->params.base, found_base = (uintptr_t)found.address;
    if (found.mem_type != expected || found_base > base ||
        found_base + found.length < base + bytes) {
        return sl_error(SL_ERR_DEVICE,
                        "transfer: pool of %zu bytes at %p is registered as %zu bytes at %p of "
                        "memory type %s, expected %s%s",
                        bytes, transfer->params.base, found.length, found.address,
                        ucs_memory_type_names[found.mem_type], ucs_memory_type_names[expected],
                        hint);
    }
    return SL_OK;
}

static sl_status_t make_address(sl_transfer_t *transfer)
{
    void *rkey;
    size_t rkey_bytes;
    ucs_status_t status = ucp_rkey_pack(sl_ucx_transfer_context(transfer->params.ucx),
                                        transfer->memory, &rkey, &rkey_bytes);
    if (status != UCS_OK) {
        return sl_ucx_error(status, "packing the pool's key");
    }
    sl_transfer_blob_t blob = {
        .rank = transfer->params.self,
        .layout_hash = transfer->params.layout_hash,
        .pool_base = (uintptr_t)transfer->params.base,
        .page_bytes = transfer->params.page_bytes,
        .layers = (uint32_t)transfer->params.layers,
        .page_count = transfer->params.page_count,
        .device_memory = transfer->params.device_memory,
        .worker_address = (const uint8_t *)transfer->ucx.address,
        .worker_address_bytes = (uint32_t)transfer->ucx.address_bytes,
        .rkey = rkey,
        .rkey_bytes = (uint32_t)rkey_bytes,
    };
    sl_status_t result = sl_transfer_blob_encode(&blob, &transfer->address);
    ucp_rkey_buffer_release(rkey);
    return result;
}

static void free_transfer(sl_transfer_t *transfer)
{
    if (transfer->ucx.worker != NULL) {
        sl_ucx_worker_destroy(&transfer->ucx);
    }
    sl_writer_free_all(transfer);
    sl_reader_free_all(transfer);
    sl_data_forget_all(transfer);
    sl_peers_free_all(transfer);
    if (transfer->memory != NULL) {
        ucp_mem_unmap(sl_ucx_transfer_context(transfer->params.ucx), transfer->memory);
    }
    if (transfer->commands != NULL) {
        for (void *item; (item = sl_ring_pop(transfer->commands)) != NULL;) {
            free(item);
        }
    }
    if (transfer->events != NULL) {
        for (void *item; (item = sl_ring_pop(transfer->events)) != NULL;) {
            free(item);
        }
    }
    while (transfer->pending != NULL) {
        sl_pending_event_t *next = transfer->pending->next;
        free(transfer->pending->event);
        free(transfer->pending);
        transfer->pending = next;
    }
    while (transfer->inbox != NULL) {
        sl_inbound_t *next = transfer->inbox->next;
        free(transfer->inbox);
        transfer->inbox = next;
    }
    sl_ring_destroy(transfer->commands);
    sl_ring_destroy(transfer->events);
    free(transfer->page_attempts);
    free(transfer->address.data);
    free(transfer);
}

static sl_status_t start(sl_transfer_t *transfer)
{
    size_t ring_items = transfer->params.ring_items;
    SL_TRY(sl_ring_create(ring_items, &transfer->commands));
    SL_TRY(sl_ring_create(ring_items, &transfer->events));
    SL_TRY(sl_ucx_worker_create(sl_ucx_transfer_context(transfer->params.ucx), &transfer->ucx));
    SL_TRY(map_pool(transfer));
    SL_TRY(make_address(transfer));
    SL_TRY(sl_transfer_listen(transfer));
    int error = pthread_create(&transfer->thread, NULL, sl_transfer_thread_main, transfer);
    if (error != 0) {
        return sl_error(SL_ERR_IO, "transfer: starting the thread: %s", strerror(error));
    }
    transfer->thread_started = true;
    return SL_OK;
}

sl_status_t sl_transfer_create(const sl_transfer_params_t *params, sl_transfer_t **transfer_p)
{
    SL_TRY(check_params(params));
    sl_transfer_t *transfer = calloc(1, sizeof(*transfer));
    if (transfer == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "transfer: %zu bytes", sizeof(*transfer));
    }
    transfer->params = *params;
    atomic_init(&transfer->lease_us, params->lease_us == 0 ? LEASE_DEFAULT_US : params->lease_us);
    transfer->params.ring_items = params->ring_items == 0 ? RING_ITEMS_DEFAULT : params->ring_items;
    transfer->layer_bytes = params->page_bytes / params->layers;
    transfer->inbox_tail = &transfer->inbox;
    transfer->pending_tail = &transfer->pending;
    transfer->page_attempts = calloc(params->page_count, sizeof(*transfer->page_attempts));
    sl_status_t status =
        transfer->page_attempts != NULL
            ? start(transfer)
            : sl_error(SL_ERR_NO_MEMORY, "transfer: %u pages: out of memory", params->page_count);
    if (status != SL_OK) {
        free_transfer(transfer);
        return status;
    }
    *transfer_p = transfer;
    return SL_OK;
}

void sl_transfer_set_lease(sl_transfer_t *transfer, uint64_t lease_us)
{
    SL_ASSERT(lease_us > 0);
    atomic_store(&transfer->lease_us, lease_us);
}

void sl_transfer_address(const sl_transfer_t *transfer, sl_bytes_t *borrowed)
{
    *borrowed = transfer->address;
}

/* ---- commands ---- */

static sl_status_t new_command(sl_command_type_t type, const void *array, size_t item_bytes,
                               uint32_t count, sl_command_t **command_p)
{
    size_t bytes = sizeof(sl_command_t) + item_bytes * count;
    sl_command_t *command = malloc(bytes);
    if (command == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "transfer: command of %zu bytes", bytes);
    }
    *command = (sl_command_t){.type = type, .count = count};
    command->address = (uint8_t *)(command + 1);
    if (count > 0) {
        memcpy(command->address, array, item_bytes * count);
    }
    *command_p = command;
    return SL_OK;
}

static sl_status_t submit(sl_transfer_t *transfer, sl_command_t *command)
{
    uint64_t deadline_us = 0;
    while (sl_ring_push(transfer->commands, command) == SL_ERR_AGAIN) {
        uint64_t now_us = sl_now_us();
        deadline_us = deadline_us == 0 ? now_us + COMMAND_WAIT_US : deadline_us;
        if (now_us >= deadline_us) {
            free(command);
            return sl_error(SL_ERR_DEVICE, "transfer: no room for a command within %u ms",
                            COMMAND_WAIT_US / 1000);
        }
        nanosleep(&(struct timespec){.tv_nsec = COMMAND_RETRY_NS}, NULL);
    }
    return SL_OK;
}

sl_status_t sl_transfer_peer_add(sl_transfer_t *transfer, const sl_rank_id_t *peer,
                                 const sl_bytes_t *address)
{
    char name[SL_RANK_TEXT_BYTES];
    sl_transfer_blob_t blob;
    SL_TRY(sl_transfer_blob_parse(address->data, address->size, &blob));
    if (!sl_rank_same(&blob.rank, peer)) {
        char found[SL_RANK_TEXT_BYTES];
        return sl_error(SL_ERR_STALE, "transfer address of %s, expected %s",
                        sl_rank_text(&blob.rank, found), sl_rank_text(peer, name));
    }
    if (blob.layout_hash != transfer->params.layout_hash ||
        blob.page_bytes != transfer->params.page_bytes || blob.layers != transfer->params.layers) {
        return sl_error(SL_ERR_REFUSED,
                        "%s has layout %016llx with pages of %llu bytes in %u layers, expected "
                        "layout %016llx with pages of %zu bytes in %zu layers",
                        sl_rank_text(peer, name), (unsigned long long)blob.layout_hash,
                        (unsigned long long)blob.page_bytes, blob.layers,
                        (unsigned long long)transfer->params.layout_hash,
                        transfer->params.page_bytes, transfer->params.layers);
    }
    sl_command_t *command = NULL;
    SL_TRY(new_command(SL_COMMAND_PEER_ADD, address->data, 1, (uint32_t)address->size, &command));
    command->rank = *peer;
    return submit(transfer, command);
}

sl_status_t sl_transfer_peer_gone(sl_transfer_t *transfer, const sl_rank_id_t *peer)
{
    sl_command_t *command = NULL;
    SL_TRY(new_command(SL_COMMAND_PEER_GONE, NULL, 0, 0, &command));
    command->rank = *peer;
    return submit(transfer, command);
}

static sl_status_t check_pages(const sl_transfer_t *transfer, uint64_t attempt, const char *what,
                               const uint32_t *pages, uint32_t count)
{
    if (count == 0 || count > SL_TRANSFER_GRANT_PAGES_MAX) {
        return sl_error(SL_ERR_INVALID, "attempt %llu: %s of %u pages, expected 1 to %u",
                        (unsigned long long)attempt, what, count, SL_TRANSFER_GRANT_PAGES_MAX);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (pages[i] >= transfer->params.page_count) {
            return sl_error(SL_ERR_INVALID, "attempt %llu: %s of page %u, expected below %u",
                            (unsigned long long)attempt, what, pages[i],
                            transfer->params.page_count);
        }
    }
    return SL_OK;
}

sl_status_t sl_transfer_grant(sl_transfer_t *transfer, uint64_t attempt, uint32_t generation,
                              const sl_rank_id_t *writer, const uint32_t *pages,
                              uint32_t page_count)
{
    SL_TRY(check_pages(transfer, attempt, "grant", pages, page_count));
    sl_command_t *command = NULL;
    SL_TRY(new_command(SL_COMMAND_GRANT, pages, sizeof(*pages), page_count, &command));
    command->attempt = attempt;
    command->generation = generation;
    command->rank = *writer;
    return submit(transfer, command);
}

sl_status_t sl_transfer_open(sl_transfer_t *transfer, uint64_t attempt, const sl_rank_id_t *targets,
                             uint32_t target_count)
{
    if (target_count == 0 || target_count > SL_TRANSFER_TARGETS_MAX) {
        return sl_error(SL_ERR_INVALID, "attempt %llu: %u targets, expected 1 to %d",
                        (unsigned long long)attempt, target_count, SL_TRANSFER_TARGETS_MAX);
    }
    sl_command_t *command = NULL;
    SL_TRY(new_command(SL_COMMAND_OPEN, targets, sizeof(*targets), target_count, &command));
    command->attempt = attempt;
    return submit(transfer, command);
}

sl_status_t sl_transfer_push(sl_transfer_t *transfer, uint64_t attempt, uint32_t first,
                             const uint32_t *local, uint32_t count, uint32_t layer_begin,
                             uint32_t layer_end)
{
    SL_TRY(check_pages(transfer, attempt, "push", local, count));
    if (layer_begin >= layer_end || layer_end > transfer->params.layers) {
        return sl_error(SL_ERR_INVALID, "attempt %llu: push of layers %u to %u of %zu",
                        (unsigned long long)attempt, layer_begin, layer_end,
                        transfer->params.layers);
    }
    sl_command_t *command = NULL;
    SL_TRY(new_command(SL_COMMAND_PUSH, local, sizeof(*local), count, &command));
    command->attempt = attempt;
    command->first = first;
    command->layer_begin = layer_begin;
    command->layer_end = layer_end;
    return submit(transfer, command);
}

sl_status_t sl_transfer_commit(sl_transfer_t *transfer, uint64_t attempt, const sl_commit_t *commit)
{
    sl_command_t *command = NULL;
    SL_TRY(new_command(SL_COMMAND_COMMIT, NULL, 0, 0, &command));
    command->attempt = attempt;
    command->commit = *commit;
    return submit(transfer, command);
}

sl_status_t sl_transfer_abort(sl_transfer_t *transfer, uint64_t attempt)
{
    sl_command_t *command = NULL;
    SL_TRY(new_command(SL_COMMAND_ABORT, NULL, 0, 0, &command));
    command->attempt = attempt;
    return submit(transfer, command);
}

void sl_transfer_stop(sl_transfer_t *transfer)
{
    if (!transfer->thread_started) {
        return;
    }
    atomic_store(&transfer->stop, true);
    sl_command_t *wake = NULL;
    if (new_command(SL_COMMAND_WAKE, NULL, 0, 0, &wake) == SL_OK &&
        sl_ring_push(transfer->commands, wake) != SL_OK) {
        free(wake); /* a full ring keeps the thread awake as well */
    }
    pthread_join(transfer->thread, NULL);
    transfer->thread_started = false;
}

void sl_transfer_destroy(sl_transfer_t *transfer)
{
    if (transfer != NULL) {
        sl_transfer_stop(transfer);
        free_transfer(transfer);
    }
}

/* ---- events ---- */

sl_transfer_event_t *sl_transfer_take(sl_transfer_t *transfer)
{
    return sl_ring_pop(transfer->events);
}

int sl_transfer_fd(const sl_transfer_t *transfer)
{
    return sl_ring_fd(transfer->events);
}

void sl_transfer_clear(sl_transfer_t *transfer)
{
    sl_ring_clear(transfer->events);
}
