/* Transfers that go wrong: dead peers on either side, leases, wrong or forged messages, addresses
 * that do not fit, commits that are not complete. */
#include "tests/unit/transfer/transfer_node.h"

#include <sched.h>

#include "common/transfer/transfer_wire.h"
#include "common/transfer/ucx_context.h"

#define BIG_PAGE_BYTES (NODE_LAYERS * 16384u) /* 32 MiB a pool: long enough to die within */

static void all_pages(uint32_t *pages)
{
    for (uint32_t i = 0; i < NODE_PAGES; i++) {
        pages[i] = i;
    }
}

static void wait_for_page(const node_t *node, uint32_t page)
{
    const _Atomic uint8_t *last =
        (const _Atomic uint8_t *)node->pool + (page + 1) * node->page_bytes - 1;
    uint64_t deadline_us = sl_now_us() + NODE_WAIT_MS * 1000u;
    while (atomic_load(last) != node_byte(page, node->page_bytes - 1)) {
        CHECK(sl_now_us() < deadline_us);
        sched_yield();
    }
}

/* ---- the reader dies ---- */

static void run_reader_killed(process_t *process)
{
    node_t node;
    node_start(process, &node, BIG_PAGE_BYTES, 0);
    static uint32_t pages[NODE_PAGES];
    all_pages(pages);
    if (process->rank == 1) {
        node_add_peer(&node, 0);
        node_grant(&node, 1, 1, pages, NODE_PAGES);
        wait_for_page(&node, 0);
        kill(getpid(), SIGKILL);
    }
    if (process->rank == 2) {
        node_add_peer(&node, 0);
        node_grant(&node, 4, 1, pages, 3);
        node_expect(&node, SL_TRANSFER_COMMITTED, 4u);
    } else {
        node_add_peer(&node, 1);
        node_add_peer(&node, 2);
        node_open(&node, 1, 1);
        node_open(&node, 2, 1); /* never granted */
        node_push_all(&node, 1, pages, NODE_PAGES);
        node_commit(&node, 1, NODE_PAGES);
        for (int i = 0; i < 2; i++) {
            sl_transfer_event_t event = node_wait(&node);
            CHECK(event.type == SL_TRANSFER_FAILED && event.status == SL_ERR_UNREACHABLE);
            CHECK(event.attempt == 1 || event.attempt == 2);
            CHECK(strstr(event.text, "decode 0/0 (incarnation 1001)") != NULL);
        }
        /* Known to be broken: fails at once. */
        node_open(&node, 3, 1);
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_FAILED, 3u);
        CHECK(event.status == SL_ERR_UNREACHABLE);
        sl_rank_id_t gone = node_id(1);
        CHECK_OK(sl_transfer_peer_gone(node.transfer, &gone));
        /* Nothing of it touches the other reader. */
        node_open(&node, 4, 2);
        node_push_all(&node, 4, pages, 3);
        node_commit(&node, 4, 3);
        node_expect(&node, SL_TRANSFER_SENT, 4u);
    }
    node_leave(&node);
}

static void test_killed_reader_fails_its_attempts(void **state)
{
    (void)state;
    static const int expected[] = {0, PROCESS_KILLED, 0};
    run_processes(3, run_reader_killed, NULL, expected);
}

/* A target that is not the one who granted. */
static void run_target_killed(process_t *process)
{
    node_t node;
    node_start(process, &node, BIG_PAGE_BYTES, 0);
    static uint32_t pages[NODE_PAGES];
    all_pages(pages);
    if (process->rank == 2) {
        node_add_peer(&node, 0);
        wait_for_page(&node, 0);
        kill(getpid(), SIGKILL);
    }
    if (process->rank == 1) {
        node_add_peer(&node, 0);
        node_grant(&node, 1, 9, pages, NODE_PAGES);
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_RELEASED, 1u);
        CHECK(event.generation == 9);
    } else {
        node_add_peer(&node, 1);
        node_add_peer(&node, 2);
        sl_rank_id_t targets[] = {node_id(1), node_id(2)};
        CHECK_OK(sl_transfer_open(node.transfer, 1, targets, 2));
        node_push_all(&node, 1, pages, NODE_PAGES);
        node_commit(&node, 1, NODE_PAGES);
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_FAILED, 1u);
        CHECK(event.status == SL_ERR_UNREACHABLE);
        CHECK(strstr(event.text, "decode 0/1") != NULL);
    }
    node_leave(&node);
}

static void test_killed_second_target_releases_the_first(void **state)
{
    (void)state;
    static const int expected[] = {0, 0, PROCESS_KILLED};
    run_processes(3, run_target_killed, NULL, expected);
}

/* ---- the writer dies ---- */

static void run_writer_killed(process_t *process)
{
    node_t node;
    node_start(process, &node, BIG_PAGE_BYTES, 0);
    static uint32_t pages[NODE_PAGES];
    all_pages(pages);
    if (process->rank == 0) {
        node_add_peer(&node, 1);
        node_open(&node, 1, 1);
        node_push_all(&node, 1, pages, NODE_PAGES);
        process_barrier(process); /* the first bytes have arrived */
        kill(getpid(), SIGKILL);
    }
    node_add_peer(&node, 0);
    node_grant(&node, 1, 3, pages, NODE_PAGES);
    node_grant(&node, 2, 4, pages, 1);
    wait_for_page(&node, 0);
    uint64_t killed_us = sl_now_us();
    process_barrier(process);
    bool lost[3] = {false};
    for (int i = 0; i < 2; i++) {
        sl_transfer_event_t event = node_wait(&node);
        CHECK(event.type == SL_TRANSFER_WRITER_LOST && event.status == SL_ERR_UNREACHABLE);
        CHECK(event.attempt >= 1 && event.attempt <= 2 && !lost[event.attempt]);
        CHECK(event.generation == event.attempt + 2);
        CHECK(strstr(event.text, "prefill 0/0 (incarnation 1000)") != NULL);
        CHECK(sl_now_us() - killed_us >= NODE_LEASE_US);
        lost[event.attempt] = true;
    }
    /* From now on it is refused at once; nothing was sent, so no lease is waited for. */
    node_grant(&node, 3, 5, pages, 1);
    sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_WRITER_LOST, 3u);
    CHECK(event.generation == 5);
    node_leave(&node);
}

static void test_killed_writer_is_lost_after_the_lease(void **state)
{
    (void)state;
    static const int expected[] = {PROCESS_KILLED, 0};
    run_processes(2, run_writer_killed, NULL, expected);
}

/* The router says that a rank is gone while it still lives. */
static void run_gone(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t pages[2] = {1, 2};
    if (process->rank == 1) {
        sl_rank_id_t stale = node_id(0), writer = node_id(0);
        stale.incarnation--;
        CHECK_OK(sl_transfer_peer_gone(node.transfer, &stale)); /* not the one we know */
        node_grant(&node, 1, 1, pages, 2);
        process_barrier(process);
        process_barrier(process);
        uint64_t gone_us = sl_now_us();
        CHECK_OK(sl_transfer_peer_gone(node.transfer, &writer));
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_WRITER_LOST, 1u);
        CHECK(sl_now_us() - gone_us >= NODE_LEASE_US);
        CHECK(strstr(event.text, "reported gone") != NULL);
        node_grant(&node, 2, 1, pages, 2);
        node_expect(&node, SL_TRANSFER_WRITER_LOST, 2u);
        process_barrier(process);
    } else {
        node_open(&node, 1, 1);
        node_push_all(&node, 1, pages, 2);
        process_barrier(process);
        process_barrier(process);
        /* The reader's endpoint closes under us. */
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_FAILED, 1u);
        CHECK(event.status == SL_ERR_UNREACHABLE);
        process_barrier(process);
    }
    node_leave(&node);
}

static void test_reported_gone(void **state)
{
    (void)state;
    run_processes(2, run_gone, NULL, NULL);
}

/* The same while the connection is just being made, from both sides at once. */
static void run_gone_at_once(process_t *process)
{
    sl_rank_id_t writer = node_id(0);
    uint32_t page = 1;
    for (uint64_t round = 1; round <= 10; round++) {
        node_t node;
        node_join(process, &node);
        node_commands_run(&node);
        process_barrier(process); /* both know each other, and a bye has somebody to tell */
        if (process->rank == 1) {
            node_grant(&node, round, 1, &page, 1);
            CHECK_OK(sl_transfer_peer_gone(node.transfer, &writer));
            node_expect(&node, SL_TRANSFER_WRITER_LOST, round);
        } else {
            node_open(&node, round, 1);
            sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_FAILED, round);
            CHECK(event.status == SL_ERR_UNREACHABLE);
        }
        node_leave(&node);
    }
}

static void test_gone_while_connecting(void **state)
{
    (void)state;
    run_processes(2, run_gone_at_once, NULL, NULL);
}

/* ---- the reader stands still ---- */

static void run_reader_stopped(process_t *process)
{
    node_t node;
    node_start(process, &node, BIG_PAGE_BYTES, 0);
    static uint32_t pages[NODE_PAGES];
    all_pages(pages);
    pid_t own = getpid();
    sl_bytes_t pids[PROCESSES_MAX];
    process_meet(process, &own, sizeof(own), pids);
    if (process->rank == 1) {
        node_add_peer(&node, 0);
        node_grant(&node, 1, 1, pages, NODE_PAGES);
        wait_for_page(&node, 0);
        process_barrier(process);
        for (;;) { /* stopped, then killed by the writer */
            pause();
        }
    }
    node_add_peer(&node, 1);
    node_open(&node, 1, 1);
    node_push_all(&node, 1, pages, NODE_PAGES);
    process_barrier(process);
    pid_t reader;
    memcpy(&reader, pids[1].data, sizeof(reader));
    CHECK(kill(reader, SIGSTOP) == 0);
    CHECK_OK(sl_transfer_abort(node.transfer, 1));
    sl_transfer_event_t event = node_wait(&node);
    CHECK(event.attempt == 1);
    /* ABORTED if the stop came too late to matter. */
    CHECK(event.type == SL_TRANSFER_FAILED || event.type == SL_TRANSFER_ABORTED);
    CHECK(kill(reader, SIGKILL) == 0);
    free(pids[0].data);
    free(pids[1].data);
    node_leave(&node);
}

static void test_stopped_reader_is_given_up(void **state)
{
    (void)state;
    static const int expected[] = {0, PROCESS_KILLED};
    run_processes(2, run_reader_stopped, NULL, expected);
}

/* Early grants of a rank that has gone are not kept for its successor's attempts. */
static void run_writer_told_gone(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t page = 1;
    sl_rank_id_t reader = node_id(1);
    if (process->rank == 1) {
        node_grant(&node, 3, 1, &page, 1);
        node_grant(&node, 1, 1, &page, 1);
        node_expect(&node, SL_TRANSFER_RELEASED, 1u); /* so 3 has arrived as well */
        process_barrier(process);
        node_expect(&node, SL_TRANSFER_WRITER_LOST, 3u);
    } else {
        node_open(&node, 2, 1);
        process_barrier(process);
        CHECK_OK(sl_transfer_peer_gone(node.transfer, &reader));
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_FAILED, 2u);
        CHECK(event.status == SL_ERR_UNREACHABLE);
        node_open(&node, 3, 1);
        node_expect(&node, SL_TRANSFER_FAILED, 3u);
    }
    node_leave(&node);
}

static void test_writer_is_told_that_the_reader_is_gone(void **state)
{
    (void)state;
    run_processes(2, run_writer_told_gone, NULL, NULL);
}

/* ---- lease ---- */

/* Pages pushed before the lease ran out arrive; the one after it does not. */
static void run_lease_runs_out(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t pages[2] = {5, 6};
    if (process->rank == 1) {
        node_grant(&node, 1, 1, pages, 2);
        wait_for_page(&node, 5);
        process_barrier(process);
        node_expect(&node, SL_TRANSFER_RELEASED, 1u);
        node_check_page(&node, 5, 5, 0, NODE_LAYERS);
        node_check_untouched(&node, 6);
        process_barrier(process);
        node_grant(&node, 2, 2, pages, 2);
        node_expect(&node, SL_TRANSFER_COMMITTED, 2u);
        node_check_page(&node, 6, 6, 0, NODE_LAYERS);
    } else {
        node_open(&node, 1, 1);
        node_push_all(&node, 1, pages, 1);
        process_barrier(process);
        atomic_store(&node.may_write, false);
        CHECK_OK(sl_transfer_push(node.transfer, 1, 1, pages + 1, 1, 0, NODE_LAYERS));
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_FAILED, 1u);
        CHECK(event.status == SL_ERR_STALE);
        process_barrier(process);
        atomic_store(&node.may_write, true);
        node_open(&node, 2, 1);
        node_push_all(&node, 2, pages, 2);
        node_commit(&node, 2, 2);
        node_expect(&node, SL_TRANSFER_SENT, 2u);
    }
    node_leave(&node);
}

static void test_writes_end_with_the_lease(void **state)
{
    (void)state;
    run_processes(2, run_lease_runs_out, NULL, NULL);
}

/* ---- commits that do not fit ---- */

static void run_incomplete(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t pages[4] = {0, 1, 2, 3};
    if (process->rank == 1) {
        for (uint64_t id = 1; id <= 4; id++) {
            node_grant(&node, id, (uint32_t)id, pages, 3);
            sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_RELEASED, id);
            CHECK(event.generation == id);
            CHECK(event.status == (id == 4 ? SL_ERR_REFUSED : SL_OK));
        }
    } else {
        static const char *const texts[] = {"page 1 layer 2 was not pushed", "3 are granted",
                                            "commit of 4 pages", NULL};
        for (uint64_t id = 1; id <= 4; id++) {
            node_open(&node, id, 1);
            CHECK_OK(sl_transfer_push(node.transfer, id, 0, pages, 3, 0, 2));
            if (id == 1) { /* layer 2 of page 1 is missing */
                CHECK_OK(sl_transfer_push(node.transfer, id, 0, pages, 3, 3, 4));
                CHECK_OK(sl_transfer_push(node.transfer, id, 0, pages, 1, 2, 3));
                CHECK_OK(sl_transfer_push(node.transfer, id, 2, pages, 1, 2, 3));
            } else {
                CHECK_OK(sl_transfer_push(node.transfer, id, 0, pages, 3, 2, 4));
            }
            if (id == 2) {
                CHECK_OK(sl_transfer_push(node.transfer, id, 3, pages, 1, 0, 1));
            }
            node_commit(&node, id, id == 3 ? 4 : id == 4 ? 2 : 3);
            if (id == 4) { /* complete as far as it goes: the reader refuses it */
                node_expect(&node, SL_TRANSFER_SENT, id);
                continue;
            }
            sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_FAILED, id);
            CHECK(event.status == SL_ERR_INVALID);
            CHECK(strstr(event.text, texts[id - 1]) != NULL);
        }
    }
    node_leave(&node);
}

static void test_incomplete_commits(void **state)
{
    (void)state;
    run_processes(2, run_incomplete, NULL, NULL);
}

/* ---- forged messages ---- */

/* A bare UCX worker that can send any bytes to a rank. */
typedef struct {
    sl_ucx_worker_t ucx;
    ucp_ep_h endpoint;
} forger_t;

static void forger_open(forger_t *forger, sl_ucx_t *ucx, const sl_bytes_t *address)
{
    sl_transfer_blob_t blob;
    CHECK_OK(sl_transfer_blob_parse(address->data, address->size, &blob));
    CHECK_OK(sl_ucx_worker_create(sl_ucx_transfer_context(ucx), &forger->ucx));
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        .address = (const ucp_address_t *)blob.worker_address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
    };
    CHECK(ucp_ep_create(forger->ucx.worker, &params, &forger->endpoint) == UCS_OK);
}

static void forger_wait(forger_t *forger, void *request)
{
    CHECK(!UCS_PTR_IS_ERR(request));
    while (UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_INPROGRESS) {
        ucp_worker_progress(forger->ucx.worker);
    }
    if (UCS_PTR_IS_PTR(request)) {
        ucp_request_free(request);
    }
}

static void forger_send(forger_t *forger, const void *header, size_t header_bytes, const void *data,
                        size_t bytes, uint32_t flags)
{
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = flags};
    forger_wait(forger,
                ucp_am_send_nbx(forger->endpoint, 0, header, header_bytes, data, bytes, &param));
}

static void forger_send_msg(forger_t *forger, const sl_transfer_msg_t *msg)
{
    sl_bytes_t bytes;
    CHECK_OK(sl_transfer_msg_encode(msg, NULL, &bytes));
    forger_send(forger, NULL, 0, bytes.data, bytes.size, UCP_AM_SEND_FLAG_EAGER);
    free(bytes.data);
}

static void forger_close(forger_t *forger)
{
    ucp_request_param_t param = {0};
    forger_wait(forger, ucp_ep_flush_nbx(forger->endpoint, &param));
    forger_wait(forger, ucp_ep_close_nbx(forger->endpoint, &param));
    sl_ucx_worker_destroy(&forger->ucx);
}

static void send_garbage(forger_t *forger)
{
    static const uint8_t msgpack[] = {0xdd, 0xff, 0, 0, 0};
    static uint8_t big[6 << 20];
    forger_send(forger, NULL, 0, msgpack, sizeof(msgpack), UCP_AM_SEND_FLAG_EAGER);
    forger_send(forger, msgpack, sizeof(msgpack), NULL, 0, UCP_AM_SEND_FLAG_EAGER);
    forger_send(forger, NULL, 0, NULL, 0, UCP_AM_SEND_FLAG_EAGER);
    forger_send(forger, NULL, 0, big, sizeof(big), UCP_AM_SEND_FLAG_EAGER);
    forger_send(forger, NULL, 0, big, sizeof(big), UCP_AM_SEND_FLAG_RNDV);
}

/* Every ending of attempt 6 but the right one. */
static void send_forgeries(forger_t *forger)
{
    sl_transfer_msg_t msg = {
        .type = SL_TRANSFER_MSG_COMMIT,
        .from = node_id(0),
        .attempt = 6,
        .generation = 19, /* a stale one */
        .layout_hash = NODE_LAYOUT,
        .commit = {.page_count = 1},
    };
    forger_send_msg(forger, &msg);
    msg.type = SL_TRANSFER_MSG_RELEASE;
    forger_send_msg(forger, &msg);
    msg.generation = 20;
    msg.attempt = 60; /* not granted */
    forger_send_msg(forger, &msg);
    msg.attempt = 6;
    msg.from.incarnation--; /* an earlier life of the writer */
    forger_send_msg(forger, &msg);
    msg.type = SL_TRANSFER_MSG_COMMIT;
    forger_send_msg(forger, &msg);
}

/* Bytes for pages that are not granted, not to this attempt, or not there at all. */
static void send_forged_data(forger_t *forger)
{
    static const struct {
        uint64_t attempt, offset;
        uint32_t generation, index, page;
        uint64_t layout_hash;
        bool other_life;
    } forged[] = {
        {6, 0, 19, 0, 11, NODE_LAYOUT, false},
        {6, 0, 20, 0, 11, NODE_LAYOUT, true},
        {6, 0, 20, 0, 11, NODE_LAYOUT + 1, false},
        {6, 0, 20, 0, 12, NODE_LAYOUT, false},
        {6, 0, 20, 1, 11, NODE_LAYOUT, false},
        {6, 0, 20, UINT32_MAX, NODE_PAGES, NODE_LAYOUT, false},
        {6, NODE_PAGE_BYTES - 63, 20, 0, 11, NODE_LAYOUT, false},
        {6, UINT64_MAX - 31, 20, 0, 11, NODE_LAYOUT, false},
        {60, 0, 20, 0, 11, NODE_LAYOUT, false},
    };
    uint8_t bytes[64] = {1, 2, 3};
    for (size_t i = 0; i < sizeof(forged) / sizeof(forged[0]); i++) {
        sl_transfer_msg_t msg = {
            .type = SL_TRANSFER_MSG_DATA,
            .from = node_id(0),
            .attempt = forged[i].attempt,
            .generation = forged[i].generation,
            .layout_hash = forged[i].layout_hash,
            .data = {.to_granter = true,
                     .index = forged[i].index,
                     .page = forged[i].page,
                     .offset = forged[i].offset},
        };
        msg.from.incarnation -= forged[i].other_life;
        sl_bytes_t header;
        CHECK_OK(sl_transfer_msg_encode(&msg, NULL, &header));
        forger_send(forger, header.data, header.size, bytes, sizeof(bytes),
                    UCP_AM_SEND_FLAG_EAGER);
        free(header.data);
    }
}

static void run_forged(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t page = 11;
    if (process->rank == 1) {
        node_grant(&node, 6, 20, &page, 1);
        node_commands_run(&node);
        process_barrier(process); /* the forger may begin */
        process_barrier(process); /* it is done */
        node_commands_run(&node);
        node_check_untouched(&node, 11);
        node_check_untouched(&node, 12);
        process_barrier(process);
        node_expect(&node, SL_TRANSFER_COMMITTED, 6u);
        node_check_page(&node, page, page, 0, NODE_LAYERS);
        node_check_untouched(&node, 12);
    } else {
        forger_t forger;
        forger_open(&forger, node.ucx, &node.addresses[1]);
        process_barrier(process);
        send_garbage(&forger);
        send_forgeries(&forger);
        send_forged_data(&forger);
        forger_close(&forger);
        process_barrier(process);
        process_barrier(process);
        node_open(&node, 6, 1);
        node_push_all(&node, 6, &page, 1);
        node_commit(&node, 6, 1);
        node_expect(&node, SL_TRANSFER_SENT, 6u);
    }
    node_leave(&node);
}

static void test_forged_messages_are_refused(void **state)
{
    (void)state;
    run_processes(2, run_forged, NULL, NULL);
}

/* Right in all but the layout: the pages come back, but not as a prompt. */
static void run_wrong_layout(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t page = 11;
    if (process->rank == 1) {
        node_grant(&node, 7, 20, &page, 1);
        node_commands_run(&node);
        process_barrier(process);
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_RELEASED, 7u);
        CHECK(event.status == SL_ERR_REFUSED && event.generation == 20);
        CHECK(strstr(event.text, "layout 1122334455667789, expected 1122334455667788") != NULL);
    } else {
        forger_t forger;
        forger_open(&forger, node.ucx, &node.addresses[1]);
        process_barrier(process);
        sl_transfer_msg_t commit = {
            .type = SL_TRANSFER_MSG_COMMIT,
            .from = node_id(0),
            .attempt = 7,
            .generation = 20,
            .layout_hash = NODE_LAYOUT + 1,
            .commit = {.page_count = 1},
        };
        forger_send_msg(&forger, &commit);
        forger_close(&forger);
    }
    node_leave(&node);
}

static void test_commit_of_another_layout(void **state)
{
    (void)state;
    run_processes(2, run_wrong_layout, NULL, NULL);
}

/* A grant of a page that the reader does not have, in its own name: the attempt fails, nothing is
 * written outside of the pool. */
static void run_forged_grant(process_t *process)
{
    node_t node;
    node_join(process, &node);
    uint32_t pages[2] = {3, NODE_PAGES};
    if (process->rank == 1) {
        forger_t forger;
        forger_open(&forger, node.ucx, &node.addresses[0]);
        sl_transfer_msg_t grant = {
            .type = SL_TRANSFER_MSG_GRANT,
            .from = node_id(1),
            .attempt = 7,
            .generation = 20,
            .layout_hash = NODE_LAYOUT,
            .page_count = 2,
        };
        sl_bytes_t bytes;
        CHECK_OK(sl_transfer_msg_encode(&grant, pages, &bytes));
        forger_send(&forger, NULL, 0, bytes.data, bytes.size, UCP_AM_SEND_FLAG_EAGER);
        free(bytes.data);
        forger_close(&forger);
    } else {
        node_open(&node, 7, 1);
        uint32_t own[2] = {1, 2};
        node_push_all(&node, 7, own, 2);
        node_commit(&node, 7, 2);
        sl_transfer_event_t event = node_expect(&node, SL_TRANSFER_FAILED, 7u);
        CHECK(event.status == SL_ERR_INVALID && strstr(event.text, "page 512") != NULL);
    }
    node_leave(&node);
}

static void test_grant_outside_of_the_pool(void **state)
{
    (void)state;
    run_processes(2, run_forged_grant, NULL, NULL);
}

/* ---- what is refused at once ---- */

static void check_bad_addresses(node_t *node)
{
    sl_rank_id_t id = node_id(1);
    sl_bytes_t *good = &node->addresses[1];
    for (size_t size = 0; size < good->size; size++) {
        sl_bytes_t cut = {.data = good->data, .size = size};
        CHECK_STATUS(sl_transfer_peer_add(node->transfer, &id, &cut), SL_ERR_INVALID);
    }
    for (size_t at = 0; at < good->size; at++) {
        good->data[at] ^= 0x10;
        CHECK_STATUS(sl_transfer_peer_add(node->transfer, &id, good), SL_ERR_INVALID);
        good->data[at] ^= 0x10;
    }
    id.incarnation++;
    CHECK_STATUS(sl_transfer_peer_add(node->transfer, &id, good), SL_ERR_STALE);
    CHECK(strstr(sl_error_text(), "incarnation 1001") != NULL);
    CHECK(strstr(sl_error_text(), "incarnation 1002") != NULL);
}

static void run_other_layout(process_t *process)
{
    node_t node;
    node_start(process, &node, NODE_PAGE_BYTES, 0);
    if (process->rank == 0) {
        check_bad_addresses(&node);
    }
    /* A second engine with another layout. */
    sl_transfer_params_t params = node_params(&node);
    params.layout_hash ^= 0xff;
    sl_transfer_t *other;
    CHECK_OK(sl_transfer_create(&params, &other));
    sl_rank_id_t peer = node_id(1 - process->rank);
    CHECK_STATUS(sl_transfer_peer_add(other, &peer, &node.addresses[1 - process->rank]),
                 SL_ERR_REFUSED);
    CHECK(strstr(sl_error_text(), "1122334455667788") != NULL);
    CHECK(strstr(sl_error_text(), "1122334455667777") != NULL);
    sl_transfer_destroy(other);

    uint32_t page = NODE_PAGES, none = 0;
    CHECK_STATUS(sl_transfer_grant(node.transfer, 1, 1, &peer, &page, 1), SL_ERR_INVALID);
    CHECK_STATUS(sl_transfer_grant(node.transfer, 1, 1, &peer, &none, 0), SL_ERR_INVALID);
    CHECK_STATUS(sl_transfer_push(node.transfer, 1, 0, &page, 1, 0, 1), SL_ERR_INVALID);
    CHECK_STATUS(sl_transfer_push(node.transfer, 1, 0, &none, 1, 1, 1), SL_ERR_INVALID);
    CHECK_STATUS(sl_transfer_push(node.transfer, 1, 0, &none, 1, 0, NODE_LAYERS + 1),
                 SL_ERR_INVALID);
    CHECK_STATUS(sl_transfer_open(node.transfer, 1, &peer, 0), SL_ERR_INVALID);
    CHECK_STATUS(sl_transfer_open(node.transfer, 1, &peer, 65), SL_ERR_INVALID);
    params.page_bytes = 10;
    CHECK_STATUS(sl_transfer_create(&params, &other), SL_ERR_CONFIG);
    node_leave(&node);
}

/* A pool of GPU memory where UCX has no modules for it: the error says what is missing. */
static void run_without_cuda(process_t *process)
{
    node_t node;
    node_start(process, &node, NODE_PAGE_BYTES, 0);
    ucp_context_attr_t knows = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    CHECK(ucp_context_query(sl_ucx_transfer_context(node.ucx), &knows) == UCS_OK);
    if ((knows.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) == 0) {
        sl_transfer_params_t params = node_params(&node);
        params.device_memory = true;
        sl_transfer_t *other;
        CHECK_STATUS(sl_transfer_create(&params, &other), SL_ERR_DEVICE);
        CHECK(strstr(sl_error_text(), "UCX with CUDA support") != NULL);
    }
    node_leave(&node);
}

static void test_device_memory_without_cuda_support(void **state)
{
    (void)state;
    run_processes(1, run_without_cuda, NULL, NULL);
}

static void test_refused_at_once(void **state)
{
    (void)state;
    run_processes(2, run_other_layout, NULL, NULL);
}

int main(int argc, char **argv)
{
    (void)argc;
    restart_without_memory_hooks(argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed_reader_fails_its_attempts),
        cmocka_unit_test(test_killed_second_target_releases_the_first),
        cmocka_unit_test(test_killed_writer_is_lost_after_the_lease),
        cmocka_unit_test(test_reported_gone),
        cmocka_unit_test(test_gone_while_connecting),
        cmocka_unit_test(test_stopped_reader_is_given_up),
        cmocka_unit_test(test_writer_is_told_that_the_reader_is_gone),
        cmocka_unit_test(test_writes_end_with_the_lease),
        cmocka_unit_test(test_incomplete_commits),
        cmocka_unit_test(test_forged_messages_are_refused),
        cmocka_unit_test(test_commit_of_another_layout),
        cmocka_unit_test(test_grant_outside_of_the_pool),
        cmocka_unit_test(test_device_memory_without_cuda_support),
        cmocka_unit_test(test_refused_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
