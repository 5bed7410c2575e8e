/*
 * Times the operations of a backend on the cases of tests/ops/cases.c that are marked for it, each
 * first checked against the oracle.
 *
 *     bench_ops [--backend cpu] [--threads 1] [--op NAME] [--json]
 *
 * A case runs on several copies of its buffers in turn (64 MB of them, 32 at most), so that large
 * weights come from memory as they do in a model. Printed: median time of a run over 15 samples of
 * at least 5 ms, the rates, and the share of a ceiling measured in the same run: the longer of
 * flops at the rate of a product that stays in the first-level cache, and bytes at the rate of
 * reading 256 MB. Small cases live in caches faster than that and pass 100 %.
 */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "kernels/cpu/isa.h"
#include "tests/ops/bind.h"

/* The build makes a program of each bench_*.c alone. */
#include "tests/ops/bind.c"
#include "tests/ops/bind_ops.c"
#include "tests/ops/cases.c"

#define COPY_BYTES (64 << 20)
#define COPIES_MAX 32
#define SAMPLES 15
#define SAMPLE_US 5000
#define READ_FLOATS (64 << 20)

typedef struct {
    const char *backend, *op;
    int threads;
    bool json;
} options_t;

typedef struct {
    double gflops, gbytes; /* a second, one thread */
} ceiling_t;

static int by_value(const void *a_p, const void *b_p)
{
    const double *a = a_p, *b = b_p;
    return *a < *b ? -1 : *a > *b;
}

static ceiling_t measure_ceiling(void)
{
    enum { ROWS = 16, COLUMNS = 16, K = 256, RUNS = 20000 };
    static float x[ROWS * K], w[COLUMNS * K], out[ROWS * COLUMNS];
    const sl_isa_t *isa = sl_isa_best();
    sl_dot_t dot = {.parts[0] = {x, w, K, K, K}, .part_count = 1, .rows = ROWS, .n = COLUMNS,
                    .out = out, .out_stride = COLUMNS};
    ceiling_t ceiling = {0, 0};
    float *data = malloc((size_t)READ_FLOATS * sizeof(float));
    SL_ASSERT(data != NULL);
    for (size_t i = 0; i < READ_FLOATS; i++) {
        data[i] = (float)(i % 7); /* zeros would be one page of the kernel's, mapped many times */
    }
    for (int round = 0; round < 3; round++) {
        uint64_t start = sl_now_us();
        for (int i = 0; i < RUNS; i++) {
            isa->dot(&dot);
        }
        double us = (double)(sl_now_us() - start);
        ceiling.gflops = fmax(ceiling.gflops, 2e-3 * ROWS * COLUMNS * K * RUNS / us);
        start = sl_now_us();
        out[0] += isa->square_sum(data, READ_FLOATS);
        us = (double)(sl_now_us() - start);
        ceiling.gbytes = fmax(ceiling.gbytes, 4e-3 * READ_FLOATS / us);
    }
    free(data);
    return ceiling;
}

static void check(const sl_ops_t *ops, sl_device_t *device, const op_case_t *c)
{
    const sl_ops_t *ref;
    sl_device_t *ref_device;
    bind_t got, expected;
    SL_ASSERT(sl_ops_find("ref", &ref) == SL_OK);
    SL_ASSERT(ref->open(&(sl_device_params_t){0}, &ref_device) == SL_OK);
    bind_open(&got, ops, device, c);
    bind_open(&expected, ref, ref_device, c);
    bind_run(&got);
    bind_run(&expected);
    double tolerance = ops->act_dtype == SL_DTYPE_F32 ? 1e-5 : 1.2e-2;
    if (!bind_fetch(&got) || !bind_fetch(&expected) || !bind_agree(&got, &expected, tolerance)) {
        fprintf(stderr, "bench_ops: %s is wrong; not timed\n", op_name(c->op));
        exit(1);
    }
    bind_close(&got);
    bind_close(&expected);
    ref->close(ref_device);
}

/* Median time of one run. */
static double time_us(bind_t *copies, size_t count)
{
    double samples[SAMPLES];
    size_t next = 0;
    for (int i = -1; i < SAMPLES; i++) { /* the first warms up */
        uint64_t start = sl_now_us(), runs = 0, us;
        do {
            bind_run(&copies[next++ % count]);
            runs++;
            us = sl_now_us() - start;
        } while (us < SAMPLE_US);
        if (i >= 0) {
            samples[i] = (double)us / (double)runs;
        }
    }
    qsort(samples, SAMPLES, sizeof(samples[0]), by_value);
    return samples[SAMPLES / 2];
}

static void bench(const options_t *o, const sl_ops_t *ops, sl_device_t *device, const op_case_t *c,
                  const ceiling_t *ceiling)
{
    static bind_t copies[COPIES_MAX];
    size_t count = 0;
    double bytes = 0;
    check(ops, device, c);
    do {
        bind_open(&copies[count++], ops, device, c);
        bytes += copies[0].bytes;
    } while (bytes < COPY_BYTES && count < COPIES_MAX);
    double us = time_us(copies, count);
    double gflops = copies[0].flops / us * 1e-3, gbytes = copies[0].bytes / us * 1e-3;
    double least_us = 1e-3 * fmax(copies[0].flops / ceiling->gflops,
                                  copies[0].bytes / ceiling->gbytes);
    char text[256];
    op_case_describe(c, text, sizeof(text));
    printf(o->json ? "{\"case\": \"%s\", \"us\": %.2f, \"gflops\": %.1f, \"gbytes\": %.1f, "
                     "\"percent_of_ceiling\": %.0f}\n"
                   : "%-72s %10.1f us %8.1f GFLOP/s %7.1f GB/s %5.0f %%\n",
           text, us, gflops, gbytes, 100 * least_us / us);
    fflush(stdout);
    for (size_t i = 0; i < count; i++) {
        bind_close(&copies[i]);
    }
}

static options_t parse(int argc, char **argv)
{
    static const struct option flags[] = {{"backend", required_argument, NULL, 'b'},
                                          {"threads", required_argument, NULL, 't'},
                                          {"op", required_argument, NULL, 'o'},
                                          {"json", no_argument, NULL, 'j'},
                                          {NULL, 0, NULL, 0}};
    options_t options = {.backend = "cpu", .threads = 1};
    for (int flag; (flag = getopt_long(argc, argv, "", flags, NULL)) != -1;) {
        switch (flag) {
        case 'b':
            options.backend = optarg;
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
            fprintf(stderr,
                    "usage: bench_ops [--backend cpu] [--threads 1] [--op NAME] [--json]\n");
            exit(2);
        }
    }
    return options;
}

int main(int argc, char **argv)
{
    options_t options = parse(argc, argv);
    const sl_ops_t *ops;
    sl_device_t *device;
    if (sl_ops_find(options.backend, &ops) != SL_OK ||
        ops->open(&(sl_device_params_t){.threads = options.threads}, &device) != SL_OK) {
        return 1;
    }
    ceiling_t ceiling = measure_ceiling();
    printf(options.json ? "{\"backend\": \"%s\", \"isa\": \"%s\", \"threads\": %d, "
                          "\"ceiling_gflops\": %.1f, \"ceiling_gbytes\": %.1f}\n"
                        : "backend %s, host instruction set %s, threads %d; ceilings of one host "
                          "thread: %.1f GFLOP/s, %.1f GB/s\n",
           ops->name, sl_isa_best()->name, options.threads, ceiling.gflops, ceiling.gbytes);
    for (size_t i = 0; i < op_case_count; i++) {
        const op_case_t *c = &op_cases[i];
        if ((c->flags & BENCH) && (options.op == NULL || strcmp(options.op, op_name(c->op)) == 0)) {
            bench(&options, ops, device, c, &ceiling);
        }
    }
    ops->close(device);
    return 0;
}
