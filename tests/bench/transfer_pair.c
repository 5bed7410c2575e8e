#include "tests/bench/transfer_pair.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define WAIT_MS 120000

void sl_pair_die(void)
{
    (void)fflush(NULL);
    _exit(EXIT_FAILURE);
}

void sl_pair_require(bool good, const char *what)
{
    if (!good) {
        fprintf(stderr, "bench_transfer: %s: %s\n", what, sl_error_text());
        sl_pair_die();
    }
}

void sl_pair_require_ok(sl_status_t status, const char *what)
{
    sl_pair_require(status == SL_OK, what);
}

/* ---- between the processes ---- */

void sl_pair_tell(const sl_pair_t *pair, const void *data, size_t size)
{
    sl_pair_require(send(pair->fd, data, size, MSG_NOSIGNAL) == (ssize_t)size,
                    "telling the other process");
}

void sl_pair_hear(const sl_pair_t *pair, void *data, size_t size)
{
    sl_pair_require(recv(pair->fd, data, size, MSG_WAITALL) == (ssize_t)size,
                    "the other process has ended");
}

void sl_pair_meet(const sl_pair_t *pair)
{
    char here = 1;
    sl_pair_tell(pair, &here, 1);
    sl_pair_hear(pair, &here, 1);
}

static void swap_addresses(sl_pair_t *pair)
{
    sl_bytes_t own, other;
    sl_transfer_address(pair->transfer, &own);
    sl_pair_tell(pair, &own.size, sizeof(own.size));
    sl_pair_tell(pair, own.data, own.size);
    sl_pair_hear(pair, &other.size, sizeof(other.size));
    other.data = malloc(other.size);
    sl_pair_require(other.data != NULL, "memory");
    sl_pair_hear(pair, other.data, other.size);
    sl_pair_require_ok(sl_transfer_peer_add(pair->transfer, &pair->peer, &other), "peer");
    free(other.data);
}

/* ---- the pool ---- */

static uint8_t *page_at(const sl_pair_t *pair, uint32_t page)
{
    return pair->pool + page * pair->shape.page_bytes;
}

static void fill_pool(sl_pair_t *pair)
{
    size_t words = pair->shape.page_bytes / sizeof(uint32_t);
    uint32_t *page = calloc(words, sizeof(*page)), state = 1;
    sl_pair_require(page != NULL, "memory");
    for (uint32_t i = 0; i < pair->shape.slots * pair->shape.pages; i++) {
        for (size_t j = 0; pair->writer && j < words; j++) {
            state = state * 1664525u + 1013904223u;
            page[j] = state;
        }
        sl_pair_require_ok(
            pair->ops->upload(pair->device, NULL, page_at(pair, i), page, words * sizeof(*page)),
            "upload");
        sl_pair_require_ok(pair->ops->synchronize(pair->device, NULL), "upload");
    }
    free(page);
}

static uint64_t hash_page(const sl_pair_t *pair, uint32_t page, uint8_t *copy)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    sl_pair_require_ok(
        pair->ops->download(pair->device, NULL, copy, page_at(pair, page), pair->shape.page_bytes),
        "download");
    sl_pair_require_ok(pair->ops->synchronize(pair->device, NULL), "download");
    for (size_t i = 0; i < pair->shape.page_bytes; i++) {
        hash = (hash ^ copy[i]) * 1099511628211u;
    }
    return hash;
}

void sl_pair_check_pages(sl_pair_t *pair, uint64_t attempt)
{
    const uint32_t *ids = sl_pair_pages(pair, attempt);
    uint8_t *copy = malloc(pair->shape.page_bytes);
    sl_pair_require(copy != NULL, "memory");
    for (uint32_t i = 0; i < pair->shape.pages; i++) {
        uint64_t hash = hash_page(pair, ids[i], copy), expected;
        if (pair->writer) {
            sl_pair_tell(pair, &hash, sizeof(hash));
            continue;
        }
        sl_pair_hear(pair, &expected, sizeof(expected));
        if (hash != expected) {
            fprintf(stderr,
                    "bench_transfer: attempt %llu, page %u: hash %016llx, expected %016llx\n",
                    (unsigned long long)attempt, i, (unsigned long long)hash,
                    (unsigned long long)expected);
            sl_pair_die();
        }
    }
    free(copy);
}

static bool coprime(uint64_t a, uint64_t b)
{
    while (b != 0) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a == 1;
}

/* Shuffled: no two pages of an attempt lie side by side. */
static void lay_out_pages(sl_pair_t *pair, bool shuffled)
{
    uint64_t count = (uint64_t)pair->shape.slots * pair->shape.pages, stride = shuffled ? 5 : 1;
    while (!coprime(stride, count)) {
        stride++;
    }
    pair->page_ids = calloc(count, sizeof(*pair->page_ids));
    sl_pair_require(pair->page_ids != NULL, "memory");
    for (uint64_t i = 0; i < count; i++) {
        pair->page_ids[i] = (uint32_t)(i * stride % count);
    }
}

/* ---- the transfer engine ---- */

static sl_status_t bind_thread(void *arg)
{
    sl_pair_t *pair = arg;
    return pair->ops->bind_thread(pair->device);
}

void sl_pair_open(sl_pair_t *pair, bool shuffled)
{
    lay_out_pages(pair, shuffled);
    fill_pool(pair);
    pair->self = (sl_rank_id_t){.pool = pair->writer ? SL_POOL_PREFILL : SL_POOL_DECODE};
    pair->peer = (sl_rank_id_t){.pool = pair->writer ? SL_POOL_DECODE : SL_POOL_PREFILL};
    sl_pair_require_ok(sl_ucx_create(&pair->ucx), "ucx");
    sl_transfer_params_t params = {
        .ucx = pair->ucx,
        .self = pair->self,
        .base = pair->pool,
        .page_bytes = pair->shape.page_bytes,
        .device_memory = !pair->ops->host_memory,
        .bind_thread = bind_thread,
        .bind_thread_arg = pair,
        .layers = pair->shape.layers,
        .page_count = pair->shape.pages * pair->shape.slots,
    };
    sl_pair_require_ok(sl_transfer_create(&params, &pair->transfer), "transfer");
    swap_addresses(pair);
}

void sl_pair_close(sl_pair_t *pair)
{
    sl_pair_meet(pair);
    sl_transfer_destroy(pair->transfer);
    sl_ucx_destroy(pair->ucx);
    free(pair->page_ids);
}

/* ---- attempts ---- */

const uint32_t *sl_pair_pages(const sl_pair_t *pair, uint64_t attempt)
{
    return pair->page_ids + attempt % pair->shape.slots * pair->shape.pages;
}

void sl_pair_open_attempt(sl_pair_t *pair, uint64_t attempt)
{
    sl_pair_require_ok(sl_transfer_open(pair->transfer, attempt, &pair->peer, 1), "open");
}

void sl_pair_push(sl_pair_t *pair, uint64_t attempt, uint32_t layer_begin, uint32_t layer_end)
{
    sl_pair_require_ok(sl_transfer_push(pair->transfer, attempt, 0, sl_pair_pages(pair, attempt),
                                        pair->shape.pages, layer_begin, layer_end),
                       "push");
}

void sl_pair_commit(sl_pair_t *pair, uint64_t attempt)
{
    sl_commit_t commit = {.page_count = pair->shape.pages};
    sl_pair_require_ok(sl_transfer_commit(pair->transfer, attempt, &commit), "commit");
}

void sl_pair_grant(sl_pair_t *pair, uint64_t attempt)
{
    sl_pair_require_ok(sl_transfer_grant(pair->transfer, attempt, 1, &pair->peer,
                                         sl_pair_pages(pair, attempt), pair->shape.pages),
                       "grant");
}

void sl_pair_wait_end(sl_pair_t *pair)
{
    sl_transfer_event_type_t good = pair->writer ? SL_TRANSFER_SENT : SL_TRANSFER_COMMITTED;
    for (;;) {
        sl_transfer_clear(pair->transfer);
        sl_transfer_event_t *event = sl_transfer_take(pair->transfer);
        if (event != NULL) {
            sl_pair_require(event->type == good, event->text);
            free(event);
            return;
        }
        struct pollfd fd = {.fd = sl_transfer_fd(pair->transfer), .events = POLLIN};
        sl_pair_require(poll(&fd, 1, WAIT_MS) == 1, "no event in time");
    }
}
