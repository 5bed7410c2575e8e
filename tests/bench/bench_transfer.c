/*
 * Latent transfer between two processes of this host: checks the bytes of the first attempt, then
 * times attempts one after the other (latency: grant to commit) and many at once (rate).
 *
 * In host memory, or from GPU 0 to GPU 1 (from GPU 0 to itself where there is one only).
 *
 *   bench_transfer [page bytes] [pages an attempt] [attempts] [cpu | cuda [reader's GPU
 * [shuffled]]]
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
#include "kernels/ops.h"

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
    const char *backend;
    int reader_gpu;
    bool shuffled; /* no two pages of an attempt side by side: the worst case */
    const sl_ops_t *ops;
    sl_device_t *device;
    uint8_t *pool; /* of the device */
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

/* The pool, in the device's memory, every byte the same. */
static void take_pool(bench_t *bench, uint32_t page_count)
{
    sl_device_params_t params = {.threads = 1};
    void *memory;
    size_t bytes = page_count * bench->page_bytes;
    uint8_t *fill = malloc(bytes);
    if (!bench->writer && strcmp(bench->backend, "cuda") == 0) {
        params.index = bench->reader_gpu;
    }
    check(fill != NULL && sl_ops_find(bench->backend, &bench->ops) == SL_OK, "backend");
    check(bench->ops->open(&params, &bench->device) == SL_OK, "device");
    check(bench->ops->alloc(bench->device, bytes, "pool", &memory) == SL_OK, "pool");
    memset(fill, bench->writer ? 0x5a : 0, bytes);
    check(bench->ops->upload(bench->device, NULL, memory, fill, bytes) == SL_OK &&
              bench->ops->synchronize(bench->device, NULL) == SL_OK,
          "upload");
    bench->pool = memory;
    free(fill);
}

static void check_page(bench_t *bench, uint32_t page)
{
    uint8_t *copy = malloc(bench->page_bytes);
    check(copy != NULL &&
              bench->ops->download(bench->device, NULL, copy,
                                   bench->pool + page * bench->page_bytes,
                                   bench->page_bytes) == SL_OK &&
              bench->ops->synchronize(bench->device, NULL) == SL_OK,
          "download");
    for (size_t i = 0; i < bench->page_bytes; i++) {
        check(copy[i] == 0x5a, "bytes");
    }
    free(copy);
}

static sl_status_t bind_thread(void *arg)
{
    bench_t *bench = arg;
    return bench->ops->bind_thread(bench->device);
}

static int run_side(bench_t *bench)
{
    uint32_t page_count = bench->pages * POOL_ATTEMPTS;
    take_pool(bench, page_count);
    for (uint32_t i = 0; i < page_count; i++) {
        uint32_t page = bench->shuffled ? (uint32_t)((uint64_t)i * 5 % page_count) : i;
        bench->ids[i / bench->pages][i % bench->pages] = page;
    }
    bench->self = (sl_rank_id_t){.pool = bench->writer ? SL_POOL_PREFILL : SL_POOL_DECODE};
    bench->peer = (sl_rank_id_t){.pool = bench->writer ? SL_POOL_DECODE : SL_POOL_PREFILL};
    sl_transfer_params_t params = {.self = bench->self,
                                   .base = bench->pool,
                                   .page_bytes = bench->page_bytes,
                                   .device_memory = !bench->ops->host_memory,
                                   .bind_thread = bind_thread,
                                   .bind_thread_arg = bench,
                                   .layers = LAYERS,
                                   .page_count = page_count};
    check(sl_ucx_create(&bench->ucx) == SL_OK, "ucx");
    params.ucx = bench->ucx;
    check(sl_transfer_create(&params, &bench->transfer) == SL_OK, "create");
    swap_addresses(bench);

    begin(bench, 1);
    wait_end(bench);
    for (uint32_t i = 0; !bench->writer && i < bench->pages; i++) {
        check_page(bench, bench->ids[1][i]);
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
    bench->ops->free(bench->device, bench->pool);
    bench->ops->close(bench->device);
    return 0;
}

int main(int argc, char **argv)
{
    static bench_t bench;
    bench.page_bytes = argc > 1 ? (size_t)atoi(argv[1]) : 1u << 20;
    bench.pages = argc > 2 ? (uint32_t)atoi(argv[2]) : 8;
    bench.attempts = argc > 3 ? (uint32_t)atoi(argv[3]) : 50;
    bench.backend = argc > 4 ? argv[4] : "cpu";
    bench.reader_gpu = argc > 5 ? atoi(argv[5]) : 1;
    bench.shuffled = argc > 6 && strcmp(argv[6], "shuffled") == 0;
    int pair[2], status;
    if (bench.page_bytes % LAYERS != 0 || bench.page_bytes == 0 || bench.pages == 0 ||
        bench.pages > 4096 || bench.attempts == 0 ||
        socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) {
        fprintf(stderr, "usage: bench_transfer [page bytes] [pages an attempt] [attempts] "
                        "[cpu | cuda [reader's GPU [shuffled]]]\n");
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
