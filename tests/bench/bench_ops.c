/*
 * Times the operations of a backend on the cases of tests/ops/cases.c that are marked for it, and
 * on an accelerator also at the shapes of real_cases.c; the host leaves out what takes it seconds.
 * Each case is first checked: all its outputs against the oracle, or, where that would take long,
 * some of them as check_rows.h says; its line says "sampled" then. A case that is wrong is timed
 * all the same, and the exit status is 1.
 *
 *     bench_ops [--backend cpu] [--device-index 0] [--threads 1] [--op NAME] [--json]
 *
 * A case runs on several copies of its buffers in turn (64 MiB of them on the host, 256 MiB on an
 * accelerator, more than its caches hold), so that large weights come from memory as they do in a
 * model; cases too small to fill that with COPIES_MAX copies stay in the caches and may pass 100 %.
 *
 * Printed: median time of a run over 15 samples of at least 5 ms, the rates, and the share of the
 * ceilings of ceiling.h, measured in this run: the longer of flops at the product's rate and bytes
 * at the memory's. A sample is many runs between two synchronize() of the device, divided by their
 * number: the device's throughput. Where the backend records, the runs are recordings of at least
 * 32 of them, as in a decode step, or of 5 ms, so that the host's launches do not count. Decode
 * attention makes its schedule once a recording, as a step does for all its layers.
 */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "kernels/cpu/isa.h"
#include "tests/bench/ceiling.h"
#include "tests/bench/check_rows.h"
#include "tests/bench/real_cases.h"
#include "tests/ops/bind.h"

/* The build makes a program of each bench_*.c alone. */
#include "tests/bench/check_rows.c"
#include "tests/ops/bind.c"
#include "tests/ops/bind_ops.c"
#include "tests/ops/cases.c"

#define HOST_COPY_BYTES (64 << 20)
#define DEVICE_COPY_BYTES (256 << 20)
#define COPIES_MAX 64
#define SAMPLES 15
#define SAMPLE_US 5000
#define RECORDED_RUNS 32
#define HOST_FLOPS_MAX 20e9     /* left out on the host above this */
#define CHECK_ALL_FLOPS_MAX 5e9 /* checked by samples above this */
#define LONG_ATTENTION 2048     /* and attention over so many keys */
/* More than the plain loops of the oracle get done in good time. */
#define REF_FLOPS_MAX 0.2e9
#define REF_BYTES_MAX 16e6

typedef struct {
    const char *backend, *op;
    int threads, index;
    bool json;
} options_t;

typedef struct {
    const options_t *options;
    const sl_ops_t *ops;
    sl_ops_t queued; /* the same, but runs do not wait for the device */
    sl_device_t *device;
    sl_ceiling_t ceiling;
    size_t next; /* copy */
    size_t case_count;
    bool failed;
} bench_t;

static int by_value(const void *a_p, const void *b_p)
{
    const double *a = a_p, *b = b_p;
    return *a < *b ? -1 : *a > *b;
}

static sl_status_t do_not_wait(sl_device_t *device, sl_stream_t *stream)
{
    (void)device;
    (void)stream;
    return SL_OK;
}

/* Bytes that a run must move where the sum of the buffers says something else: a table or cache of
 * which a part is read, and memory that is read and written. */
static double moved_bytes(const bind_t *b)
{
    const op_case_t *c = b->c;
    double act = (double)sl_dtype_bytes(b->ops->act_dtype);
    double wt = (double)sl_dtype_bytes(b->ops->weight_dtype);
    double bytes = b->bytes, rows = c->rows, width = c->kv_lora + c->rope;
    switch (c->op) {
    case OP_EMBED:
        return rows * c->n * (act + wt);
    case OP_TAKE_ROWS:
        return 2 * rows * c->n * act;
    case OP_RMS_NORM:
        return c->flags & RESIDUAL ? bytes + rows * c->n * act : bytes;
    case OP_ROPE_CACHE: /* of four tokens, three are cached */
        return rows * (2 * c->heads * c->rope + 2.75 * width) * act;
    case OP_GATHER_LATENTS:
        return 2 * c->lens[1] * width * act;
    case OP_ATTN_PREFILL: /* of the latents only the rotated part */
        for (uint32_t i = 1; i < c->len_count; i += 2) {
            bytes -= (double)c->lens[i] * c->kv_lora * act;
        }
        return bytes;
    case OP_ATTN_MERGE:
        return bytes + rows * c->heads * (c->v_dim * act + sizeof(float));
    case OP_ATTN_ABSORBED:
        bytes = b->params.attn_absorbed.rows * c->heads * (2 * c->kv_lora + c->rope) * act;
        for (uint32_t i = 0; i < c->len_count; i++) {
            bytes += c->lens[i] * width * act;
        }
        return bytes;
    default:
        return bytes;
    }
}

/* What a model does once a step, before the first of its layers. */
static void plan(const bind_t *b)
{
    if (b->c->op == OP_ATTN_ABSORBED && b->ops->attn_absorbed_plan != NULL) {
        SL_ASSERT(b->ops->attn_absorbed_plan(b->device, NULL, &b->params.attn_absorbed) == SL_OK);
    }
}

/* Long attention always: its small outputs want the finer scale. */
static bool is_sampled(const op_case_t *c)
{
    bool attends = c->op == OP_ATTN_PREFILL || c->op == OP_ATTN_ABSORBED;
    for (uint32_t i = 0; attends && i < c->len_count; i++) {
        if (c->lens[i] >= LONG_ATTENTION) {
            return true;
        }
    }
    return bind_flops(c) > CHECK_ALL_FLOPS_MAX;
}

static double tolerance_of(const bench_t *bench)
{
    return bench->ops->act_dtype == SL_DTYPE_F32 ? 1e-5 : 1.2e-2;
}

/* Compares all outputs of a case that has run. Large cases on an accelerator are compared with the
 * CPU backend, which the tests compare with the oracle. */
static bool all_agree(const bench_t *bench, bind_t *got)
{
    const sl_ops_t *oracle;
    sl_device_t *host;
    bind_t expected;
    bool large = got->flops > REF_FLOPS_MAX || got->bytes > REF_BYTES_MAX;
    const char *name = large && !bench->ops->host_memory ? "cpu" : "ref";
    SL_ASSERT(sl_ops_find(name, &oracle) == SL_OK);
    sl_device_params_t params = {.threads = bind_threads()};
    SL_ASSERT(oracle->open(&params, &host) == SL_OK);
    bind_open(&expected, oracle, host, got->c);
    bind_run(&expected);
    bool good =
        bind_fetch(got) && bind_fetch(&expected) && bind_agree(got, &expected, tolerance_of(bench));
    bind_close(&expected);
    oracle->close(host);
    return good;
}

/* Runs the case once and compares. */
static bool agrees(const bench_t *bench, bind_t *got)
{
    plan(got);
    bind_run(got);
    if (is_sampled(got->c)) {
        return bind_guards_intact(got) && check_rows_agree(got, tolerance_of(bench));
    }
    return all_agree(bench, got);
}

/* Copies of a case's buffers; returns how many. */
static size_t open_copies(const bench_t *bench, const op_case_t *c, bind_t *copies)
{
    size_t count = 0, bytes = 0;
    size_t enough = bench->ops->host_memory ? HOST_COPY_BYTES : DEVICE_COPY_BYTES;
    do {
        bind_t *b = &copies[count++];
        if (b == copies) {
            bind_open(b, bench->ops, bench->device, c);
        } else {
            bind_open_like(b, copies);
        }
        for (size_t i = 0; i < b->buffer_count; i++) {
            bytes += b->buffers[i].bytes;
        }
        if (c->op == OP_ATTN_ABSORBED) { /* one schedule for all, by these pointers */
            b->params.attn_absorbed.kv_len = copies[0].params.attn_absorbed.kv_len;
            b->params.attn_absorbed.row_request = copies[0].params.attn_absorbed.row_request;
        }
    } while (bytes < enough && count < COPIES_MAX);
    return count;
}

/* `runs` runs, over the copies in turn. */
static void run_copies(bench_t *bench, bind_t *copies, size_t count, size_t runs)
{
    plan(&copies[0]);
    for (size_t i = 0; i < runs; i++) {
        bind_run(&copies[bench->next++ % count]);
    }
}

/* The runs of run_copies() as a recording; NULL where the backend has none. */
static sl_graph_t *record(bench_t *bench, bind_t *copies, size_t count, size_t runs)
{
    sl_graph_t *graph = NULL;
    if (bench->ops->graph_begin != NULL) {
        SL_ASSERT(bench->ops->graph_begin(bench->device, NULL) == SL_OK);
        run_copies(bench, copies, count, runs);
        SL_ASSERT(bench->ops->graph_end(bench->device, NULL, &graph) == SL_OK);
    }
    return graph;
}

/* Microseconds of a run: `rounds` times `runs` of them, between two waits for the device. */
static double sample_us(bench_t *bench, bind_t *copies, size_t count, size_t runs,
                        sl_graph_t *graph, size_t rounds)
{
    SL_ASSERT(bench->ops->synchronize(bench->device, NULL) == SL_OK);
    uint64_t started_us = sl_now_us();
    for (size_t round = 0; round < rounds; round++) {
        if (graph != NULL) {
            SL_ASSERT(bench->ops->graph_launch(bench->device, NULL, graph) == SL_OK);
        } else {
            run_copies(bench, copies, count, runs);
        }
    }
    SL_ASSERT(bench->ops->synchronize(bench->device, NULL) == SL_OK);
    return (double)(sl_now_us() - started_us) / (double)(runs * rounds);
}

/* Median time of one run. */
static double time_us(bench_t *bench, bind_t *copies, size_t count)
{
    double samples[SAMPLES];
    for (size_t i = 0; i < count; i++) {
        copies[i].ops = &bench->queued;
    }
    /* Warms up, and takes what memory the operation needs. */
    run_copies(bench, copies, count, count);
    double us = sample_us(bench, copies, count, count, NULL, 1);
    size_t runs = bench->ops->host_memory ? 1 : count;
    while (!bench->ops->host_memory && runs < RECORDED_RUNS && us * (double)runs < SAMPLE_US) {
        runs += count;
    }
    sl_graph_t *graph = record(bench, copies, count, runs);
    (void)sample_us(bench, copies, count, runs, graph, 1);
    us = sample_us(bench, copies, count, runs, graph, 1);
    size_t rounds = (size_t)(SAMPLE_US / (us * (double)runs + 0.01)) + 1;
    for (int i = 0; i < SAMPLES; i++) {
        samples[i] = sample_us(bench, copies, count, runs, graph, rounds);
    }
    if (graph != NULL) {
        bench->ops->graph_free(bench->device, graph);
    }
    for (size_t i = 0; i < count; i++) {
        copies[i].ops = bench->ops;
    }
    qsort(samples, SAMPLES, sizeof(samples[0]), by_value);
    return samples[SAMPLES / 2];
}

static void print_case(const bench_t *bench, const bind_t *b, double us, bool good)
{
    char text[256];
    double flops = b->flops, bytes = moved_bytes(b);
    double least_us = 1e6 * fmax(flops / bench->ceiling.flops, bytes / bench->ceiling.bytes);
    const char *checked = is_sampled(b->c) ? " sampled" : "", *verdict = good ? "" : " WRONG";
    if (bench->options->json) {
        checked = is_sampled(b->c) ? "sampled" : "all";
        verdict = good ? "true" : "false";
    }
    op_case_describe(b->c, text, sizeof(text));
    printf(bench->options->json
               ? "{\"case\": \"%s\", \"us\": %.2f, \"gflops\": %.1f, \"gbytes\": %.1f, "
                 "\"percent_of_ceiling\": %.0f, \"checked\": \"%s\", \"agrees\": %s}\n"
               : "%-80s %10.1f us %9.1f GFLOPS %7.1f GB/s %5.0f %%%s%s\n",
           text, us, flops / us * 1e-3, bytes / us * 1e-3, 100 * least_us / us, checked, verdict);
    fflush(stdout);
}

static void bench_case(bench_t *bench, const op_case_t *c)
{
    static bind_t copies[COPIES_MAX];
    size_t count = open_copies(bench, c, copies);
    bool good = agrees(bench, &copies[0]);
    bench->failed = bench->failed || !good;
    print_case(bench, copies, time_us(bench, copies, count), good);
    for (size_t i = 0; i < count; i++) {
        bind_close(&copies[i]);
    }
}

static bool is_wanted(const bench_t *bench, const op_case_t *c)
{
    const char *op = bench->options->op;
    return (op == NULL || strcmp(op, op_name(c->op)) == 0) &&
           (!bench->ops->host_memory || bind_flops(c) <= HOST_FLOPS_MAX);
}

/* Calls `visit` with the cases to time, in order. */
static void each_case(bench_t *bench, void (*visit)(bench_t *, const op_case_t *))
{
    for (size_t i = 0; i < op_case_count; i++) {
        if ((op_cases[i].flags & BENCH) && is_wanted(bench, &op_cases[i])) {
            visit(bench, &op_cases[i]);
        }
    }
    for (size_t i = 0; !bench->ops->host_memory && i < sl_real_case_count; i++) {
        if (is_wanted(bench, &sl_real_cases[i])) {
            visit(bench, &sl_real_cases[i]);
        }
    }
}

static void count_case(bench_t *bench, const op_case_t *c)
{
    (void)c;
    bench->case_count++;
}

static void print_head(const bench_t *bench)
{
    const sl_ceiling_t *ceiling = &bench->ceiling;
    printf(bench->options->json
               ? "{\"backend\": \"%s\", \"isa\": \"%s\", \"threads\": %d, "
                 "\"ceiling_gflops\": %.1f, \"ceiling_gbytes\": %.1f, \"ceilings\": \"%s\", "
                 "\"cases\": %zu}\n"
               : "backend %s, host instruction set %s, threads %d; ceilings: %.1f GFLOPS, %.1f "
                 "GB/s (%s); %zu cases\n",
           bench->ops->name, sl_isa_best()->name, bench->options->threads, ceiling->flops / 1e9,
           ceiling->bytes / 1e9, ceiling->description, bench->case_count);
}

static void fail_usage(void)
{
    fprintf(stderr, "usage: bench_ops [--backend cpu] [--device-index 0] [--threads 1] [--op NAME] "
                    "[--json]\n");
    exit(2);
}

static options_t parse(int argc, char **argv)
{
    static const struct option flags[] = {
        {"backend", required_argument, NULL, 'b'}, {"device-index", required_argument, NULL, 'i'},
        {"threads", required_argument, NULL, 't'}, {"op", required_argument, NULL, 'o'},
        {"json", no_argument, NULL, 'j'},          {NULL, 0, NULL, 0}};
    options_t options = {.backend = "cpu", .threads = 1};
    for (int flag; (flag = getopt_long(argc, argv, "", flags, NULL)) != -1;) {
        switch (flag) {
        case 'b':
            options.backend = optarg;
            break;
        case 'i':
            options.index = atoi(optarg);
            break;
        case 't':
            options.threads = atoi(optarg);
            break;
        case 'o':
            options.op = optarg;
            break;
        case 'j':
            options.json = true;
            break;
        default:
            fail_usage();
        }
    }
    return options;
}

int main(int argc, char **argv)
{
    options_t options = parse(argc, argv);
    bench_t bench = {.options = &options};
    sl_device_params_t params = {.index = options.index, .threads = options.threads};
    if (sl_ops_find(options.backend, &bench.ops) != SL_OK ||
        sl_ceiling_measure(options.backend, options.index, &bench.ceiling) != SL_OK ||
        bench.ops->open(&params, &bench.device) != SL_OK) {
        return 1;
    }
    bench.queued = *bench.ops;
    bench.queued.synchronize = do_not_wait;
    each_case(&bench, count_case);
    print_head(&bench);
    each_case(&bench, bench_case);
    bench.ops->close(bench.device);
    return bench.failed;
}
