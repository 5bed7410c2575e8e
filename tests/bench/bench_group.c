/*
 * Latency of the group's collectives between processes of this host: first checked, then timed.
 *
 *   bench_group [ranks] [iterations]
 *
 * Prints one line an operation and size: median, 90th and 99th percentile of rank 0 in us.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/transfer/group.h"

#define RANKS_MAX 16

typedef struct {
    uint32_t rank, size;
    int (*pairs)[2]; /* socket pair of the parent and each rank, for the addresses */
} place_t;

static void check(sl_status_t status, const char *what)
{
    if (status != SL_OK) {
        fprintf(stderr, "%s: %s\n", what, sl_error_text());
        exit(1);
    }
}

static void read_all(int fd, void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t got = read(fd, (char *)data + done, bytes - done);
        if (got <= 0) {
            fprintf(stderr, "a rank has ended\n");
            exit(1);
        }
        done += (size_t)got;
    }
}

static void write_all(int fd, const void *data, size_t bytes)
{
    if (write(fd, data, bytes) != (ssize_t)bytes) {
        fprintf(stderr, "a rank has ended\n");
        exit(1);
    }
}

static sl_group_t *join(const place_t *place, sl_ucx_t *ucx)
{
    sl_group_params_t params = {.rank = place->rank, .size = place->size};
    sl_group_t *group;
    check(sl_group_create(ucx, &params, &group), "create");
    sl_bytes_t own, addresses[RANKS_MAX];
    sl_group_address(group, &own);
    int fd = place->pairs[place->rank][1];
    write_all(fd, &own.size, sizeof(own.size));
    write_all(fd, own.data, own.size);
    for (uint32_t r = 0; r < place->size; r++) {
        read_all(fd, &addresses[r].size, sizeof(addresses[r].size));
        addresses[r].data = malloc(addresses[r].size);
        read_all(fd, addresses[r].data, addresses[r].size);
    }
    check(sl_group_connect(group, addresses, place->size), "connect");
    for (uint32_t r = 0; r < place->size; r++) {
        free(addresses[r].data);
    }
    return group;
}

static int compare_u64(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

typedef enum { RUN_EXCHANGE, RUN_GATHER, RUN_SCATTER, RUN_REDUCE, RUN_COUNT } run_t;
static const char *const run_names[] = {"exchange", "all_gather", "reduce_scatter", "all_reduce"};

typedef struct {
    sl_group_t *group;
    uint32_t rank, size;
    size_t floats; /* a rank's block */
    float *in, *out;
    size_t counts[RANKS_MAX], bytes[RANKS_MAX];
} bench_t;

static void run_once(bench_t *bench, run_t run)
{
    sl_step_record_t record = {.tokens = bench->rank + 1}, records[RANKS_MAX];
    switch (run) {
    case RUN_EXCHANGE:
        check(sl_group_exchange(bench->group, &record, records), "exchange");
        if (records[bench->size - 1].tokens != bench->size) {
            fprintf(stderr, "exchange: %u tokens\n", records[bench->size - 1].tokens);
            exit(1);
        }
        break;
    case RUN_GATHER:
        check(sl_group_all_gather(bench->group, bench->in, bench->bytes, bench->out), "gather");
        break;
    case RUN_SCATTER:
        check(sl_group_reduce_scatter(bench->group, bench->in, bench->counts, bench->out),
              "scatter");
        break;
    default:
        check(sl_group_all_reduce(bench->group, bench->out, bench->floats), "reduce");
    }
}

/* in is rank + 1 everywhere, out is filled with it before an all-reduce. */
static void validate(bench_t *bench, run_t run)
{
    float total = (float)(bench->size * (bench->size + 1)) / 2;
    for (size_t i = 0; i < bench->floats; i++) {
        bench->out[i] = (float)(bench->rank + 1);
    }
    run_once(bench, run);
    float expected = run == RUN_GATHER ? 1 : total;
    for (size_t i = 0; run != RUN_EXCHANGE && i < bench->floats; i++) {
        if (bench->out[i] != expected) {
            fprintf(stderr, "%s: %g at %zu, expected %g\n", run_names[run], (double)bench->out[i],
                    i, (double)expected);
            exit(1);
        }
    }
}

static void time_run(bench_t *bench, run_t run, size_t iterations)
{
    uint64_t *times_ns = malloc(iterations * sizeof(*times_ns));
    for (size_t i = 0; i < iterations; i++) {
        uint64_t begin_ns = now_ns();
        run_once(bench, run);
        times_ns[i] = now_ns() - begin_ns;
    }
    qsort(times_ns, iterations, sizeof(*times_ns), compare_u64);
    if (bench->rank == 0) {
        printf("%-14s ranks %u block %7zu B  p50 %8.2f us  p90 %8.2f us  p99 %8.2f us\n",
               run_names[run], bench->size,
               run == RUN_EXCHANGE ? sizeof(sl_step_record_t) : bench->bytes[0],
               (double)times_ns[iterations / 2] / 1e3, (double)times_ns[iterations * 9 / 10] / 1e3,
               (double)times_ns[iterations * 99 / 100] / 1e3);
        fflush(stdout);
    }
    free(times_ns);
}

static int run_rank(const place_t *place, size_t iterations)
{
    static const size_t sizes[] = {256, 2048, 16384, 262144}; /* floats */
    sl_ucx_t *ucx;
    check(sl_ucx_create(&ucx), "ucx");
    bench_t bench = {.group = join(place, ucx), .rank = place->rank, .size = place->size};
    bench.in = malloc(sizes[3] * RANKS_MAX * sizeof(float));
    bench.out = malloc(sizes[3] * RANKS_MAX * sizeof(float));
    for (size_t i = 0; i < sizes[3] * RANKS_MAX; i++) {
        bench.in[i] = (float)(place->rank + 1);
        bench.out[i] = 0;
    }
    for (size_t s = 0; s < 4; s++) {
        bench.floats = sizes[s];
        for (uint32_t r = 0; r < place->size; r++) {
            bench.counts[r] = sizes[s];
            bench.bytes[r] = sizes[s] * sizeof(float);
        }
        size_t rounds = sizes[s] > 10000 ? iterations / 20 + 1 : iterations;
        for (int run = s == 0 ? RUN_EXCHANGE : RUN_GATHER; run < RUN_COUNT; run++) {
            validate(&bench, (run_t)run);
            time_run(&bench, (run_t)run, rounds);
        }
    }
    free(bench.in);
    free(bench.out);
    sl_group_destroy(bench.group);
    sl_ucx_destroy(ucx);
    return 0;
}

int main(int argc, char **argv)
{
    uint32_t size = argc > 1 ? (uint32_t)atoi(argv[1]) : 2;
    size_t iterations = argc > 2 ? (size_t)atoi(argv[2]) : 2000;
    if (size == 0 || size > RANKS_MAX || iterations == 0) {
        fprintf(stderr, "usage: bench_group [1..%d ranks] [iterations]\n", RANKS_MAX);
        return 2;
    }
    int pairs[RANKS_MAX][2];
    for (uint32_t r = 0; r < size; r++) {
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pairs[r]) != 0) {
            perror("socketpair");
            return 1;
        }
        place_t place = {.rank = r, .size = size, .pairs = pairs};
        fflush(stdout);
        if (fork() == 0) {
            return run_rank(&place, iterations);
        }
        close(pairs[r][1]);
    }
    sl_bytes_t addresses[RANKS_MAX];
    for (uint32_t r = 0; r < size; r++) {
        read_all(pairs[r][0], &addresses[r].size, sizeof(addresses[r].size));
        addresses[r].data = malloc(addresses[r].size);
        read_all(pairs[r][0], addresses[r].data, addresses[r].size);
    }
    for (uint32_t r = 0; r < size; r++) {
        for (uint32_t of = 0; of < size; of++) {
            write_all(pairs[r][0], &addresses[of].size, sizeof(addresses[of].size));
            write_all(pairs[r][0], addresses[of].data, addresses[of].size);
        }
    }
    int failures = 0;
    for (uint32_t r = 0; r < size; r++) {
        int status;
        wait(&status);
        failures += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
        free(addresses[r].data);
    }
    return failures == 0 ? 0 : 1;
}
