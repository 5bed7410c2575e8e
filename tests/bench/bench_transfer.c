/*
 * Latent transfer between two processes of this host: checks the bytes of the first attempt, then
 * times attempts one after the other (latency: grant to commit) and many at once (rate).
 *
 *   bench_transfer [page bytes] [pages an attempt] [attempts]
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/transfer/transfer.h"

#define LAYERS 4u
#define POOL_ATTEMPTS 8u /* attempts in flight at once; each has its own pages */

static void check(bool good, const char *what)
{
    if (!good) {
        fprintf(stderr, "%s: %s\n", what, sl_error_text());
        exit(1);
    }
}

typedef struct {
    bool writer;
    int fd;
    size_t page_bytes;
    uint32_t pages, attempts;
    uint8_t *pool;
    sl_ucx_t *ucx;
    sl_transfer_t *transfer;
    sl_rank_id_t self, peer;
    uint32_t ids[POOL_ATTEMPTS][4096];
} bench_t;

static void swap_addresses(bench_t *bench)
{
    sl_bytes_t own, other;
    sl_transfer_address(bench->transfer, &own);
    check(write(bench->fd, &own.size, sizeof(own.size)) == sizeof(own.size), "write");
    check(write(bench->fd, own.data, own.size) == (ssize_t)own.size, "write");
    check(read(bench->fd, &other.size, sizeof(other.size)) == sizeof(other.size), "read");
    other.data = malloc(other.size);
    check(recv(bench->fd, other.data, other.size, MSG_WAITALL) == (ssize_t)other.size, "read");
    check(sl_transfer_peer_add(bench->transfer, &bench->peer, &other) == SL_OK, "peer");
    free(other.data);
}

static void wait_end(bench_t *bench)
{
    for (;;) {
        sl_transfer_clear(bench->transfer);
        sl_transfer_event_t *event = sl_transfer_take(bench->transfer);
        if (event != NULL) {
            check(event->type == SL_TRANSFER_SENT || event->type == SL_TRANSFER_COMMITTED,
                  event->text);
            free(event);
            return;
        }
        struct pollfd fd = {.fd = sl_transfer_fd(bench->transfer), .events = POLLIN};
        check(poll(&fd, 1, 20000) == 1, "timeout");
    }
}

static void begin(bench_t *bench, uint64_t id)
{
    const uint32_t *ids = bench->ids[id % POOL_ATTEMPTS];
    if (!bench->writer) {
        check(sl_transfer_grant(bench->transfer, id, 1, &bench->peer, ids, bench->pages) == SL_OK,
              "grant");
        return;
    }
    sl_commit_t commit = {.page_count = bench->pages};
    check(sl_transfer_open(bench->transfer, id, &bench->peer, 1) == SL_OK &&
              sl_transfer_push(bench->transfer, id, 0, ids, bench->pages, 0, LAYERS) == SL_OK &&
              sl_transfer_commit(bench->transfer, id, &commit) == SL_OK,
          "write");
}

/* Attempts [first, first + attempts), `depth` of them at once. */
static double run(bench_t *bench, uint64_t first, uint32_t depth)
{
    uint64_t begin_us = sl_now_us();
    uint32_t begun = 0;
    for (uint32_t ended = 0; ended < bench->attempts; ended++) {
        while (begun < bench->attempts && begun - ended < depth) {
            begin(bench, first + begun++);
        }
        wait_end(bench);
    }
    return (double)(sl_now_us() - begin_us);
}

static int run_side(bench_t *bench)
{
    uint32_t page_count = bench->pages * POOL_ATTEMPTS;
    bench->pool = malloc(page_count * bench->page_bytes);
    memset(bench->pool, bench->writer ? 0x5a : 0, page_count * bench->page_bytes);
    for (uint32_t i = 0; i < page_count; i++) {
        bench->ids[i / bench->pages][i % bench->pages] = (i * 5) % page_count;
    }
    bench->self = (sl_rank_id_t){.pool = bench->writer ? SL_POOL_PREFILL : SL_POOL_DECODE};
    bench->peer = (sl_rank_id_t){.pool = bench->writer ? SL_POOL_DECODE : SL_POOL_PREFILL};
    sl_transfer_params_t params = {.self = bench->self,
                                   .base = bench->pool,
                                   .page_bytes = bench->page_bytes,
                                   .layers = LAYERS,
                                   .page_count = page_count};
    check(sl_ucx_create(&bench->ucx) == SL_OK, "ucx");
    params.ucx = bench->ucx;
    check(sl_transfer_create(&params, &bench->transfer) == SL_OK, "create");
    swap_addresses(bench);

    begin(bench, 1);
    wait_end(bench);
    for (uint32_t i = 0; !bench->writer && i < bench->pages; i++) {
        size_t at = bench->ids[1][i] * bench->page_bytes;
        check(bench->pool[at] == 0x5a && bench->pool[at + bench->page_bytes - 1] == 0x5a, "bytes");
    }
    double single_us = run(bench, 2, 1);
    double many_us = run(bench, 2 + bench->attempts, POOL_ATTEMPTS);
    if (!bench->writer) {
        double bytes = (double)bench->page_bytes * bench->pages * bench->attempts;
        printf("page %zu B x %u  one at a time %8.1f us an attempt %6.2f GB/s  %u at once "
               "%8.1f us %6.2f GB/s\n",
               bench->page_bytes, bench->pages, single_us / bench->attempts,
               bytes / single_us / 1e3, POOL_ATTEMPTS, many_us / bench->attempts,
               bytes / many_us / 1e3);
    }
    char done = 1;
    check(write(bench->fd, &done, 1) == 1 && read(bench->fd, &done, 1) == 1, "leave");
    sl_transfer_destroy(bench->transfer);
    sl_ucx_destroy(bench->ucx);
    free(bench->pool);
    return 0;
}

int main(int argc, char **argv)
{
    static bench_t bench;
    bench.page_bytes = argc > 1 ? (size_t)atoi(argv[1]) : 1u << 20;
    bench.pages = argc > 2 ? (uint32_t)atoi(argv[2]) : 8;
    bench.attempts = argc > 3 ? (uint32_t)atoi(argv[3]) : 50;
    int pair[2], status;
    if (bench.page_bytes % LAYERS != 0 || bench.page_bytes == 0 || bench.pages == 0 ||
        bench.pages > 4096 || bench.attempts == 0 ||
        socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) {
        fprintf(stderr, "usage: bench_transfer [page bytes] [pages an attempt] [attempts]\n");
        return 2;
    }
    pid_t reader = fork();
    bench.writer = reader != 0;
    bench.fd = pair[bench.writer];
    close(pair[!bench.writer]);
    int result = run_side(&bench);
    if (bench.writer) {
        waitpid(reader, &status, 0);
        return result != 0 || status != 0;
    }
    return result;
}
