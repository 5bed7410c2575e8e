/* A rank of the transfer tests: a small page pool with a recognisable filling, its engine, and
 * waits for events. Process 0 is the writer (prefill 0/0), process r > 0 reads (decode 0/r-1). */
#ifndef SL_TESTS_TRANSFER_NODE_H
#define SL_TESTS_TRANSFER_NODE_H

#include <poll.h>
#include <stdatomic.h>

#include "common/base/clock.h"
#include "common/transfer/transfer.h"
#include "tests/unit/transfer/processes.h"

#define NODE_LAYERS 4u
#define NODE_LAYER_BYTES 6144u
#define NODE_PAGE_BYTES ((size_t)NODE_LAYERS * NODE_LAYER_BYTES)
#define NODE_PAGES 512u
#define NODE_LAYOUT 0x1122334455667788u
#define NODE_LEASE_US 400000u
#define NODE_WAIT_MS 20000
#define NODE_UNTOUCHED 0xa5

typedef struct node {
    process_t *process;
    sl_ucx_t *ucx;
    sl_transfer_t *transfer;
    uint8_t *pool;
    size_t page_bytes;
    bool always_put;
    size_t peer_bytes_max;
    atomic_bool may_write;
    void (*before_put)(struct node *node); /* on the transfer thread; may be NULL */
    sl_bytes_t addresses[PROCESSES_MAX];
} node_t;

static inline sl_rank_id_t node_id(uint32_t rank)
{
    return (sl_rank_id_t){
        .pool = rank == 0 ? SL_POOL_PREFILL : SL_POOL_DECODE,
        .rank = rank == 0 ? 0 : rank - 1,
        .incarnation = 1000 + rank,
    };
}

static inline bool node_may_write(void *arg)
{
    node_t *node = arg;
    if (node->before_put != NULL) {
        node->before_put(node);
    }
    return atomic_load(&node->may_write);
}

static inline sl_transfer_params_t node_params(node_t *node)
{
    return (sl_transfer_params_t){
        .ucx = node->ucx,
        .self = node_id(node->process->rank),
        .base = node->pool,
        .page_bytes = node->page_bytes,
        .layers = NODE_LAYERS,
        .page_count = NODE_PAGES,
        .layout_hash = NODE_LAYOUT,
        .may_write = node_may_write,
        .may_write_arg = node,
        .lease_us = NODE_LEASE_US,
        .always_put = node->always_put,
        .peer_bytes_max = node->peer_bytes_max,
    };
}

/* Byte of the writer's page `page`; differs between pages, layers and offsets. */
static inline uint8_t node_byte(uint32_t page, size_t offset)
{
    return (uint8_t)(page * 37 + offset * 11 + offset / NODE_LAYER_BYTES * 101 + (offset >> 9));
}

static inline void node_start(process_t *process, node_t *node, size_t page_bytes,
                              size_t ring_items)
{
    const char *peer_bytes = getenv("NODE_PEER_BYTES");
    *node = (node_t){.process = process,
                     .page_bytes = page_bytes,
                     .always_put = getenv("NODE_ALWAYS_PUT") != NULL,
                     .peer_bytes_max = peer_bytes == NULL ? 0 : strtoul(peer_bytes, NULL, 10)};
    atomic_store(&node->may_write, true);
    CHECK_OK(sl_ucx_create(&node->ucx));
    node->pool = malloc(NODE_PAGES * page_bytes);
    CHECK(node->pool != NULL);
    for (uint32_t page = 0; page < NODE_PAGES; page++) {
        for (size_t i = 0; i < page_bytes; i++) {
            node->pool[page * page_bytes + i] =
                process->rank == 0 ? node_byte(page, i) : NODE_UNTOUCHED;
        }
    }
    sl_transfer_params_t params = node_params(node);
    params.ring_items = ring_items;
    CHECK_OK(sl_transfer_create(&params, &node->transfer));
    sl_bytes_t own;
    sl_transfer_address(node->transfer, &own);
    process_meet(process, own.data, own.size, node->addresses);
}

static inline void node_add_peer(node_t *node, uint32_t rank)
{
    sl_rank_id_t id = node_id(rank);
    CHECK_OK(sl_transfer_peer_add(node->transfer, &id, &node->addresses[rank]));
}

/* Started, and everyone of the other pool is known. */
static inline void node_join(process_t *process, node_t *node)
{
    node_start(process, node, NODE_PAGE_BYTES, 0);
    for (uint32_t r = 0; r < process->size; r++) {
        if ((r == 0) != (process->rank == 0)) {
            node_add_peer(node, r);
        }
    }
}

static inline void node_leave(node_t *node)
{
    process_barrier(node->process);
    sl_transfer_destroy(node->transfer);
    sl_ucx_destroy(node->ucx);
    for (uint32_t r = 0; r < node->process->size; r++) {
        free(node->addresses[r].data);
    }
    free(node->pool);
}

/* The next event, within NODE_WAIT_MS; by value, the engine's is freed. */
static inline sl_transfer_event_t node_wait(node_t *node)
{
    uint64_t deadline_us = sl_now_us() + NODE_WAIT_MS * 1000u;
    for (;;) {
        sl_transfer_clear(node->transfer);
        sl_transfer_event_t *taken = sl_transfer_take(node->transfer);
        if (taken != NULL) {
            sl_transfer_event_t event = *taken;
            free(taken);
            return event;
        }
        CHECK(sl_now_us() < deadline_us);
        struct pollfd fd = {.fd = sl_transfer_fd(node->transfer), .events = POLLIN};
        CHECK(poll(&fd, 1, NODE_WAIT_MS) == 1);
    }
}

#define node_expect(node, expected_type, expected_attempt)                                         \
    ({                                                                                             \
        sl_transfer_event_t event_ = node_wait(node);                                              \
        if (event_.type != (expected_type) || event_.attempt != (expected_attempt)) {              \
            fprintf(stderr, "%s:%d: event %d of attempt %llu (%s: %s), expected %d of %llu\n",     \
                    __FILE__, __LINE__, (int)event_.type, (unsigned long long)event_.attempt,      \
                    sl_status_name(event_.status), event_.text, (int)(expected_type),              \
                    (unsigned long long)(expected_attempt));                                       \
            exit(1);                                                                               \
        }                                                                                          \
        event_;                                                                                    \
    })

/* The engine has run all commands given so far: one that fails at once came after them. */
static inline void node_commands_run(node_t *node)
{
    sl_rank_id_t nobody = node_id(7);
    uint32_t page = 0;
    CHECK_OK(sl_transfer_grant(node->transfer, UINT64_MAX, 0, &nobody, &page, 1));
    node_expect(node, SL_TRANSFER_WRITER_LOST, UINT64_MAX);
}

/* Layers [begin, end) of own page `page` hold the writer's page `source`. */
static inline void node_check_page(const node_t *node, uint32_t page, uint32_t source,
                                   uint32_t begin, uint32_t end)
{
    size_t layer_bytes = node->page_bytes / NODE_LAYERS;
    for (size_t i = begin * layer_bytes; i < end * layer_bytes; i++) {
        CHECK(node->pool[page * node->page_bytes + i] == node_byte(source, i));
    }
}

static inline void node_check_untouched(const node_t *node, uint32_t page)
{
    for (size_t i = 0; i < node->page_bytes; i++) {
        CHECK(node->pool[page * node->page_bytes + i] == NODE_UNTOUCHED);
    }
}

static inline void node_grant(node_t *node, uint64_t attempt, uint32_t generation,
                              const uint32_t *pages, uint32_t count)
{
    sl_rank_id_t writer = node_id(0);
    CHECK_OK(sl_transfer_grant(node->transfer, attempt, generation, &writer, pages, count));
}

static inline void node_open(node_t *node, uint64_t attempt, uint32_t reader)
{
    sl_rank_id_t target = node_id(reader);
    CHECK_OK(sl_transfer_open(node->transfer, attempt, &target, 1));
}

static inline void node_push_all(node_t *node, uint64_t attempt, const uint32_t *pages,
                                 uint32_t count)
{
    CHECK_OK(sl_transfer_push(node->transfer, attempt, 0, pages, count, 0, NODE_LAYERS));
}

static inline void node_commit(node_t *node, uint64_t attempt, uint32_t page_count)
{
    sl_commit_t commit = {.page_count = page_count,
                          .prompt_len = page_count * 64 - 3,
                          .first_token = -7,
                          .seed = attempt * 0x100000001u};
    CHECK_OK(sl_transfer_commit(node->transfer, attempt, &commit));
}

static inline void node_check_commit(const sl_transfer_event_t *event, uint32_t generation,
                                     uint32_t page_count)
{
    CHECK(event->generation == generation);
    CHECK(event->commit.page_count == page_count);
    CHECK(event->commit.prompt_len == page_count * 64 - 3);
    CHECK(event->commit.first_token == -7);
    CHECK(event->commit.seed == event->attempt * 0x100000001u);
}

#endif
