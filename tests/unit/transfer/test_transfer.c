/* Transfers that go well, between real processes: bytes, layer ranges, several targets, grants
 * before and after their opens, many attempts at once, aborts at every stage. */
#include "tests/unit/transfer/transfer_node.h"

#include <sched.h>

#include "common/transfer/transfer_engine.h"

static const uint32_t own_pages[] = {3, 4, 5, 6, 100, 9, 8};
static const uint32_t peer_pages[] = {7, 8, 9, 1, 2, 511, 0};
#define PAIR_PAGES 7u

static void check_pairs(const node_t *node)
{
    for (uint32_t i = 0; i < PAIR_PAGES; i++) {
        node_check_page(node, peer_pages[i], own_pages[i], 0, NODE_LAYERS);
    }
    node_check_untouched(node, 3);
    node_check_untouched(node, 10);
    node_check_untouched(node, 510);
}

/* The barrier says which comes first; the other order is only likely. */
static void run_pair(process_t *process)
{
    bool grant_first = *(const bool *)process->arg;
    node_t node;
    node_join(process, &node);
    if (process->rank == 0) {
        if (grant_first) {
            process_barrier(process);
        }
        node_open(&node, 5, 1);
        node_push_all(&node, 5, own_pages, PAIR_PAGES);
        node_commit(&node, 5, PAIR_PAGES);
        if (!grant_first) {
            process_barrier(process);
        }
        node_expect(&node, SL_TRANSFER_SENT, 5u);
    } else {
        if (!grant_first) {
            process_barrier(process);
        }
        node_grant(&node, 5, 77, peer_pages, PAIR_PAGES);
        if (grant_first) {
            process_barrier(process);
        }
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_COMMITTED, 5u);
        node_check_commit(&event, 77, PAIR_PAGES);
        check_pairs(&node);
    }
    node_leave(&node);
}

static void test_grant_before_open(void **state)
{
    (void)state;
    bool grant_first = true;
    run_processes(2, run_pair, &grant_first, NULL);
}

static void test_grant_after_open(void **state)
{
    (void)state;
    bool grant_first = false;
    run_processes(2, run_pair, &grant_first, NULL);
}

static void run_pair_tcp(process_t *process)
{
    setenv("UCX_TLS", "tcp,self", 1);
    run_pair(process);
}

static void test_over_tcp_alone(void **state)
{
    (void)state;
    bool grant_first = true;
    run_processes(2, run_pair_tcp, &grant_first, NULL);
}

/* As where UCX's transport can write into the reader's memory by itself. */
static void run_pair_put(process_t *process)
{
    setenv("NODE_ALWAYS_PUT", "1", 1);
    run_pair(process);
}

static void test_by_puts(void **state)
{
    (void)state;
    bool grant_first = true;
    run_processes(2, run_pair_put, &grant_first, NULL);
}

/* Pages, and layers, of more bytes than one message takes. */
static void run_big_pages(process_t *process)
{
    static const uint32_t local[] = {10, 11, 14}, remote[] = {20, 21, 3};
    node_t node;
    node_start(process, &node, NODE_LAYERS * 70000u, 0);
    node_add_peer(&node, 1 - process->rank);
    if (process->rank == 0) {
        node_open(&node, 9, 1);
        node_push_all(&node, 9, local, 2);
        CHECK_OK(sl_transfer_push(node.transfer, 9, 2, local + 2, 1, 1, NODE_LAYERS));
        CHECK_OK(sl_transfer_push(node.transfer, 9, 2, local + 2, 1, 0, 1));
        node_commit(&node, 9, 3);
        node_expect(&node, SL_TRANSFER_SENT, 9u);
    } else {
        node_grant(&node, 9, 1, remote, 3);
        node_expect(&node, SL_TRANSFER_COMMITTED, 9u);
        for (uint32_t i = 0; i < 3; i++) {
            node_check_page(&node, remote[i], local[i], 0, NODE_LAYERS);
        }
        node_check_untouched(&node, 2);
        node_check_untouched(&node, 4);
        node_check_untouched(&node, 19);
        node_check_untouched(&node, 22);
    }
    node_leave(&node);
}

static void test_big_pages(void **state)
{
    (void)state;
    run_processes(2, run_big_pages, NULL, NULL);
}

/* ---- what is under way at once ---- */

#define BOUND_PAGE_BYTES (NODE_LAYERS * 16384u)
#define BOUND_BYTES (8 * BOUND_PAGE_BYTES)
#define BOUND_PUT_BYTES (BOUND_BYTES / 4)

static _Atomic uint64_t most_under_way;

/* A put follows, and it may be of a quarter of the bound. */
static void check_under_way(node_t *node)
{
    const sl_peer_t *peer = node->transfer->peers;
    CHECK(peer->next == NULL);
    CHECK(peer->put_bytes <= BOUND_BYTES - BOUND_PUT_BYTES);
    CHECK(peer->put_bytes <= peer->puts * (uint64_t)BOUND_PUT_BYTES);
    if (peer->put_bytes > atomic_load(&most_under_way)) {
        atomic_store(&most_under_way, peer->put_bytes);
    }
}

/* The reader's process stands still and its socket is full: puts stay under way. */
static void write_to_the_stopped(node_t *node, pid_t reader, const uint32_t *pages, uint32_t count)
{
    CHECK(kill(reader, SIGSTOP) == 0);
    node_open(node, 2, 1);
    node_push_all(node, 2, pages, count);
    uint64_t deadline_us = sl_now_us() + NODE_WAIT_MS * 1000u;
    while (atomic_load(&most_under_way) < BOUND_BYTES - BOUND_PUT_BYTES) {
        CHECK(sl_now_us() < deadline_us);
        sched_yield(); /* the thread tells nobody what it has posted */
    }
    CHECK(kill(reader, SIGCONT) == 0);
    node_commit(node, 2, count);
    node_expect(node, SL_TRANSFER_SENT, 2u);
}

static void set_bound(void)
{
    char bytes[32];
    snprintf(bytes, sizeof(bytes), "%u", BOUND_BYTES);
    setenv("NODE_PEER_BYTES", bytes, 1);
    setenv("NODE_ALWAYS_PUT", "1", 1);
    setenv("UCX_TLS", "tcp,self", 1);
    setenv("UCX_TCP_SNDBUF", "64k", 1);
    setenv("UCX_TCP_RCVBUF", "64k", 1);
}

/* Pages side by side, which are merged, or with gaps between them. */
static void run_bound(process_t *process)
{
    uint32_t step = *(const uint32_t *)process->arg, count = NODE_PAGES / step;
    uint32_t pages[NODE_PAGES];
    node_t node;
    set_bound();
    node_start(process, &node, BOUND_PAGE_BYTES, 0);
    node_add_peer(&node, 1 - process->rank);
    pid_t own = getpid(), reader;
    sl_bytes_t pids[PROCESSES_MAX];
    process_meet(process, &own, sizeof(own), pids);
    memcpy(&reader, pids[1].data, sizeof(reader));
    free(pids[0].data);
    free(pids[1].data);
    for (uint32_t i = 0; i < count; i++) {
        pages[i] = i * step;
    }
    if (process->rank == 0) {
        node.before_put = check_under_way;
        node_open(&node, 1, 1);
        node_push_all(&node, 1, pages, 1);
        node_commit(&node, 1, 1);
        node_expect(&node, SL_TRANSFER_SENT, 1u);
        process_barrier(process); /* the connection stands, the second grant has come before it */
        write_to_the_stopped(&node, reader, pages, count);
    } else {
        node_grant(&node, 2, 2, pages, count);
        node_grant(&node, 1, 1, pages, 1);
        node_expect(&node, SL_TRANSFER_COMMITTED, 1u);
        process_barrier(process);
        node_expect(&node, SL_TRANSFER_COMMITTED, 2u);
        for (uint32_t i = 0; i < count; i++) {
            node_check_page(&node, pages[i], pages[i], 0, NODE_LAYERS);
        }
    }
    node_leave(&node);
}

static void test_bytes_under_way_are_bounded(void **state)
{
    (void)state;
    for (uint32_t step = 1; step <= 2; step++) {
        run_processes(2, run_bound, &step, NULL);
    }
}

/* Layers arrive one by one and in pieces, pages of a chunk at a time, some pages twice. */
static void run_layers(process_t *process)
{
    node_t node;
    node_join(process, &node);
    if (process->rank == 0) {
        node_open(&node, 9, 1);
        for (uint32_t layer = 0; layer < NODE_LAYERS; layer++) {
            CHECK_OK(sl_transfer_push(node.transfer, 9, 0, own_pages, 3, layer, layer + 1));
        }
        CHECK_OK(sl_transfer_push(node.transfer, 9, 3, own_pages + 3, 4, 0, 3));
        CHECK_OK(sl_transfer_push(node.transfer, 9, 3, own_pages + 3, 4, 3, 4));
        CHECK_OK(sl_transfer_push(node.transfer, 9, 2, own_pages + 2, 1, 0, NODE_LAYERS));
        node_commit(&node, 9, PAIR_PAGES);
        node_expect(&node, SL_TRANSFER_SENT, 9u);
    } else {
        node_grant(&node, 9, 1, peer_pages, PAIR_PAGES);
        node_expect(&node, SL_TRANSFER_COMMITTED, 9u);
        check_pairs(&node);
    }
    node_leave(&node);
}

static void test_layer_ranges(void **state)
{
    (void)state;
    run_processes(2, run_layers, NULL, NULL);
}

/* What is pushed arrives before the commit, and nothing else does. */
static void run_partial(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t page = 20;
    if (process->rank == 0) {
        node_open(&node, 1, 1);
        CHECK_OK(sl_transfer_push(node.transfer, 1, 0, &page, 1, 1, 3));
        process_barrier(process);
        CHECK_OK(sl_transfer_abort(node.transfer, 1));
        node_expect(&node, SL_TRANSFER_ABORTED, 1u);
    } else {
        node_grant(&node, 1, 4, &page, 1);
        /* Layers go in order within a put, so the last byte of layer 2 comes last. */
        _Atomic uint8_t *last =
            (_Atomic uint8_t *)&node.pool[page * NODE_PAGE_BYTES + 3 * NODE_LAYER_BYTES - 1];
        uint64_t deadline_us = sl_now_us() + NODE_WAIT_MS * 1000u;
        while (atomic_load(last) != node_byte(page, 3 * NODE_LAYER_BYTES - 1)) {
            CHECK(sl_now_us() < deadline_us);
            sched_yield(); /* a write by a peer has no descriptor to wait on */
        }
        process_barrier(process);
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_RELEASED, 1u);
        CHECK(event.generation == 4);
        node_check_page(&node, page, page, 1, 3);
        CHECK(node.pool[page * NODE_PAGE_BYTES + NODE_LAYER_BYTES - 1] == NODE_UNTOUCHED);
        CHECK(node.pool[page * NODE_PAGE_BYTES + 3 * NODE_LAYER_BYTES] == NODE_UNTOUCHED);
    }
    node_leave(&node);
}

static void test_pages_move_before_the_commit(void **state)
{
    (void)state;
    run_processes(2, run_partial, NULL, NULL);
}

/* --attention tp on the reading side: every rank of the group gets the pages, one the commit. */
static void run_targets(process_t *process)
{
    node_t node;
    node_join(process, &node);
    if (process->rank == 0) {
        sl_rank_id_t targets[] = {node_id(1), node_id(2), node_id(3)};
        CHECK_OK(sl_transfer_open(node.transfer, 3, targets, 3));
        node_push_all(&node, 3, own_pages, PAIR_PAGES);
        node_commit(&node, 3, PAIR_PAGES);
        node_expect(&node, SL_TRANSFER_SENT, 3u);
        process_barrier(process);
    } else {
        if (process->rank == 1) {
            node_grant(&node, 3, 2, peer_pages, PAIR_PAGES);
            node_expect(&node, SL_TRANSFER_COMMITTED, 3u);
        }
        process_barrier(process);
        check_pairs(&node);
        CHECK(sl_transfer_take(node.transfer) == NULL);
    }
    node_leave(&node);
}

static void test_several_targets(void **state)
{
    (void)state;
    run_processes(4, run_targets, NULL, NULL);
}

/* ---- many at once ---- */

#define MANY 200u
#define MANY_PAGES 4u /* each; reader 1 takes odd attempts, reader 2 even ones */

static uint32_t many_page(uint64_t attempt, uint32_t i)
{
    return ((uint32_t)attempt / 2 * MANY_PAGES + i) % NODE_PAGES;
}

static bool many_aborted(uint64_t attempt)
{
    return attempt % 7 == 3;
}

static void many_write(node_t *node)
{
    for (uint64_t id = 1; id <= MANY; id++) {
        node_open(node, id, 1 + (id % 2 == 0));
    }
    for (uint32_t i = 0; i < MANY_PAGES; i++) {
        for (uint64_t id = MANY; id >= 1; id--) {
            uint32_t page = ((uint32_t)id + i * 13) % NODE_PAGES;
            CHECK_OK(sl_transfer_push(node->transfer, id, i, &page, 1, 0, NODE_LAYERS));
        }
    }
    for (uint64_t id = 1; id <= MANY; id++) {
        if (many_aborted(id)) {
            CHECK_OK(sl_transfer_abort(node->transfer, id));
        } else {
            node_commit(node, id, MANY_PAGES);
        }
    }
    bool ended[MANY + 1] = {false};
    for (uint32_t count = 0; count < MANY; count++) {
        sl_transfer_event_t event = node_wait(node);
        CHECK(event.attempt >= 1 && event.attempt <= MANY && !ended[event.attempt]);
        CHECK(event.type == (many_aborted(event.attempt) ? SL_TRANSFER_ABORTED : SL_TRANSFER_SENT));
        ended[event.attempt] = true;
    }
}

static void many_read(node_t *node)
{
    uint32_t mine = 0;
    for (uint64_t id = node->process->rank; id <= MANY; id += 2, mine++) {
        uint32_t pages[MANY_PAGES];
        for (uint32_t i = 0; i < MANY_PAGES; i++) {
            pages[i] = many_page(id, i);
        }
        node_grant(node, id, (uint32_t)id * 3, pages, MANY_PAGES);
    }
    bool ended[MANY + 1] = {false};
    for (; mine > 0; mine--) {
        sl_transfer_event_t event = node_wait(node);
        CHECK(event.attempt % 2 == node->process->rank % 2 && event.attempt <= MANY);
        CHECK(!ended[event.attempt] && event.generation == (uint32_t)event.attempt * 3);
        ended[event.attempt] = true;
        if (many_aborted(event.attempt)) {
            CHECK(event.type == SL_TRANSFER_RELEASED);
            continue;
        }
        CHECK(event.type == SL_TRANSFER_COMMITTED);
        node_check_commit(&event, (uint32_t)event.attempt * 3, MANY_PAGES);
        for (uint32_t i = 0; i < MANY_PAGES; i++) {
            uint32_t source = ((uint32_t)event.attempt + i * 13) % NODE_PAGES;
            node_check_page(node, many_page(event.attempt, i), source, 0, NODE_LAYERS);
        }
    }
}

/* Small rings: commands wait for room, events for the engine, and none is lost. */
static void run_many(process_t *process)
{
    node_t node;
    node_start(process, &node, NODE_PAGE_BYTES, 16);
    for (uint32_t r = 0; r < process->size; r++) {
        if ((r == 0) != (process->rank == 0)) {
            node_add_peer(&node, r);
        }
    }
    if (process->rank == 0) {
        many_write(&node);
    } else {
        many_read(&node);
    }
    node_leave(&node);
}

static void run_many_tcp(process_t *process)
{
    setenv("UCX_TLS", "tcp,self", 1);
    run_many(process);
}

static void test_many_attempts(void **state)
{
    (void)state;
    run_processes(3, run_many, NULL, NULL);
    run_processes(3, run_many_tcp, NULL, NULL);
}

/* ---- giving up ---- */

static void run_aborts(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t pages[2] = {30, 31};
    if (process->rank == 0) {
        /* 10: never granted. 11: granted later. 12: aborted before its open and granted later. */
        node_open(&node, 10, 1);
        CHECK_OK(sl_transfer_abort(node.transfer, 10));
        node_expect(&node, SL_TRANSFER_ABORTED, 10u);
        node_open(&node, 11, 1);
        node_push_all(&node, 11, pages, 2);
        CHECK_OK(sl_transfer_abort(node.transfer, 11));
        node_expect(&node, SL_TRANSFER_ABORTED, 11u);
        CHECK_OK(sl_transfer_abort(node.transfer, 12));
        node_expect(&node, SL_TRANSFER_ABORTED, 12u);
        process_barrier(process); /* 1: readers may grant 11 and 12 */
        process_barrier(process); /* 2: they got their releases */
        /* What comes late for an attempt that has ended is nothing to anyone. */
        CHECK_OK(sl_transfer_abort(node.transfer, 10));
        CHECK_OK(sl_transfer_abort(node.transfer, 12));
        node_push_all(&node, 11, pages, 2);
        node_commit(&node, 11, 2);
        node_open(&node, 20, 1); /* 13 waits for an open that will not come any more */
        CHECK_OK(sl_transfer_abort(node.transfer, 20));
        node_expect(&node, SL_TRANSFER_ABORTED, 20u);
        node_open(&node, 19, 1);
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_FAILED, 19u);
        CHECK(event.status == SL_ERR_STALE);
    } else {
        process_barrier(process);
        node_grant(&node, 11, 5, pages, 2);
        node_expect(&node, SL_TRANSFER_RELEASED, 11u);
        node_grant(&node, 12, 6, pages, 2);
        node_expect(&node, SL_TRANSFER_RELEASED, 12u);
        node_grant(&node, 13, 7, pages, 2);
        process_barrier(process);
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_RELEASED, 13u);
        CHECK(event.generation == 7);
        node_check_untouched(&node, 30);
        node_check_untouched(&node, 31);
    }
    node_leave(&node);
}

static void test_aborts_without_a_grant(void **state)
{
    (void)state;
    run_processes(2, run_aborts, NULL, NULL);
}

/* With the grant there: at once, while pages move, and after the commit was asked for. */
static void run_late_aborts(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t pages[64];
    for (uint32_t i = 0; i < 64; i++) {
        pages[i] = 2 * i;
    }
    for (uint64_t id = 1; id <= 30; id++) {
        if (process->rank == 1) {
            node_grant(&node, id, (uint32_t)id, pages, 64);
            process_barrier(process);
            sl_transfer_event_t event = node_wait(&node);
            CHECK(event.attempt == id && event.generation == id);
            CHECK(event.type == SL_TRANSFER_RELEASED ||
                  (id % 3 == 2 && event.type == SL_TRANSFER_COMMITTED));
            process_barrier(process);
            continue;
        }
        process_barrier(process);
        node_open(&node, id, 1);
        if (id % 3 > 0) {
            node_push_all(&node, id, pages, 64);
        }
        if (id % 3 == 2) {
            node_commit(&node, id, 64);
        }
        CHECK_OK(sl_transfer_abort(node.transfer, id));
        sl_transfer_event_t event = node_wait(&node);
        CHECK(event.attempt == id);
        CHECK(event.type == SL_TRANSFER_ABORTED || (id % 3 == 2 && event.type == SL_TRANSFER_SENT));
        process_barrier(process);
        CHECK(sl_transfer_take(node.transfer) == NULL);
    }
    node_leave(&node);
}

static void test_aborts_with_a_grant(void **state)
{
    (void)state;
    run_processes(2, run_late_aborts, NULL, NULL);
}

/* ---- who is known when ---- */

/* The grant comes before the router has told the writer who the reader is. */
static void run_early_peer(process_t *process)
{
    node_t node;
    node_start(process, &node, NODE_PAGE_BYTES, 0);
    uint32_t pages[2] = {30, 31};
    if (process->rank == 1) {
        node_add_peer(&node, 0);
        node_grant(&node, 7, 1, pages, 2);
        node_grant(&node, 8, 2, pages + 1, 1);
        process_barrier(process);
        node_expect(&node, SL_TRANSFER_RELEASED, 7u);
        node_expect(&node, SL_TRANSFER_COMMITTED, 8u);
        node_check_page(&node, 31, 40, 0, NODE_LAYERS);
    } else {
        process_barrier(process);
        /* Opened too early: fails, and the grant is still answered once the reader is known. */
        node_open(&node, 7, 1);
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_FAILED, 7u);
        CHECK(event.status == SL_ERR_UNREACHABLE);
        CHECK(strstr(event.text, "decode 0/0 (incarnation 1001)") != NULL);
        node_add_peer(&node, 1);
        node_add_peer(&node, 1); /* repeated: nothing happens */
        node_open(&node, 8, 1);
        uint32_t page = 40;
        node_push_all(&node, 8, &page, 1);
        node_commit(&node, 8, 1);
        node_expect(&node, SL_TRANSFER_SENT, 8u);
    }
    node_leave(&node);
}

static void test_grant_of_a_peer_not_yet_known(void **state)
{
    (void)state;
    run_processes(2, run_early_peer, NULL, NULL);
}

/* Destroying the writer lets committed attempts through and gives up the others. */
static void run_destroy(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t pages[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    if (process->rank == 1) {
        for (uint64_t id = 1; id <= 40; id++) {
            node_grant(&node, id, 1, pages, 8);
        }
        node_grant(&node, 41, 1, pages, 8);
        process_barrier(process);
        bool ended[42] = {false};
        for (uint64_t id = 1; id <= 41; id++) {
            sl_transfer_event_t event = node_wait(&node);
            CHECK(!ended[event.attempt]);
            ended[event.attempt] = true;
            CHECK(event.type ==
                  (event.attempt == 41 ? SL_TRANSFER_RELEASED : SL_TRANSFER_COMMITTED));
        }
        process_barrier(process);
    } else {
        process_barrier(process);
        for (uint64_t id = 1; id <= 41; id++) {
            node_open(&node, id, 1);
            node_push_all(&node, id, pages, 8);
            if (id != 41) {
                node_commit(&node, id, 8);
            }
        }
        /* All grants are in: the last one has been used. */
        for (uint64_t id = 1; id <= 40; id++) {
            node_expect(&node, SL_TRANSFER_SENT, id);
        }
        uint64_t begin_us = sl_now_us();
        sl_transfer_destroy(node.transfer);
        CHECK(sl_now_us() - begin_us < 4000000);
        process_barrier(process);
        node.transfer = NULL;
    }
    node_leave(&node);
}

static void test_destroy_finishes_what_it_can(void **state)
{
    (void)state;
    run_processes(2, run_destroy, NULL, NULL);
}

int main(int argc, char **argv)
{
    (void)argc;
    restart_without_memory_hooks(argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grant_before_open),
        cmocka_unit_test(test_grant_after_open),
        cmocka_unit_test(test_over_tcp_alone),
        cmocka_unit_test(test_by_puts),
        cmocka_unit_test(test_big_pages),
        cmocka_unit_test(test_bytes_under_way_are_bounded),
        cmocka_unit_test(test_layer_ranges),
        cmocka_unit_test(test_pages_move_before_the_commit),
        cmocka_unit_test(test_several_targets),
        cmocka_unit_test(test_many_attempts),
        cmocka_unit_test(test_aborts_without_a_grant),
        cmocka_unit_test(test_aborts_with_a_grant),
        cmocka_unit_test(test_grant_of_a_peer_not_yet_known),
        cmocka_unit_test(test_destroy_finishes_what_it_can),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
