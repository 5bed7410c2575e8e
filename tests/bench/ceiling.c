/* The host's ceilings, and the way to the accelerator's. */
#include "tests/bench/ceiling.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "kernels/cpu/isa.h"

#ifdef SLUICE_HAVE_CUDA
#include "tests/bench/ceiling_cuda.h"
#endif

#define ROUNDS 3 /* the best counts */
#define READ_FLOATS ((size_t)64 << 20)

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* A product small enough to stay in the first-level cache. */
static double measure_product(const sl_isa_t *isa)
{
    enum { ROWS = 16, COLUMNS = 16, K = 256, RUNS = 20000 };
    static float x[ROWS * K], w[COLUMNS * K], out[ROWS * COLUMNS];
    sl_dot_t dot = {.parts[0] = {x, w, K, K, K},
                    .part_count = 1,
                    .rows = ROWS,
                    .n = COLUMNS,
                    .out = out,
                    .out_stride = COLUMNS};
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t started_us = sl_now_us();
        for (int i = 0; i < RUNS; i++) {
            isa->dot(&dot);
        }
        double us = (double)(sl_now_us() - started_us);
        best = larger(best, 2e6 * ROWS * COLUMNS * K * RUNS / us);
    }
    return best;
}

static sl_status_t measure_read(const sl_isa_t *isa, double *best_p)
{
    float *data = malloc(READ_FLOATS * sizeof(*data));
    volatile float sum;
    double best = 0;
    if (data == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "ceiling: no memory for %zu floats", READ_FLOATS);
    }
    for (size_t i = 0; i < READ_FLOATS; i++) {
        data[i] = (float)(i % 7); /* zeros would be one page of the kernel's, mapped many times */
    }
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t started_us = sl_now_us();
        sum = isa->square_sum(data, READ_FLOATS);
        double us = (double)(sl_now_us() - started_us);
        best = larger(best, 1e6 * READ_FLOATS * sizeof(*data) / us);
    }
    (void)sum;
    free(data);
    *best_p = best;
    return SL_OK;
}

sl_status_t sl_ceiling_measure(const char *backend, int index, sl_ceiling_t *ceiling_p)
{
#ifdef SLUICE_HAVE_CUDA
    if (strcmp(backend, "cuda") == 0) {
        return sl_ceiling_cuda_measure(index, ceiling_p);
    }
#endif
    (void)index;
    if (strcmp(backend, "cpu") != 0 && strcmp(backend, "ref") != 0) {
        return sl_error(SL_ERR_UNSUPPORTED, "ceiling: no backend \"%s\" in this build", backend);
    }
    const sl_isa_t *isa = sl_isa_best();
    sl_ceiling_t ceiling = {.description = "one thread; f32 product in first-level cache; reading "
                                           "256 MiB"};
    SL_TRY(measure_read(isa, &ceiling.bytes));
    ceiling.flops = measure_product(isa);
    *ceiling_p = ceiling;
    return SL_OK;
}

sl_status_t sl_ceiling_peer_copy(int from, int to, size_t bytes, int repeat, double *rate_p)
{
#ifdef SLUICE_HAVE_CUDA
    return sl_ceiling_cuda_peer_copy(from, to, bytes, repeat, rate_p);
#else
    (void)bytes;
    (void)repeat;
    (void)rate_p;
    return sl_error(SL_ERR_UNSUPPORTED, "copy from GPU %d to GPU %d: this build has no CUDA", from,
                    to);
#endif
}
