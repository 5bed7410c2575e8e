/*
 * A GPU's ceilings. Times are the GPU's own (events), each the median of several samples after a
 * warm-up. The product's numbers are random: zeros switch few transistors, draw less power and let
 * the clock run higher than a model does.
 */
#include "tests/bench/ceiling_cuda.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"

#define SIDE 8192
#define COPY_BYTES ((size_t)1 << 30)
#define SAMPLES 9
#define RUNS 4 /* of a sample */

typedef struct {
    cudaStream_t stream;
    cudaEvent_t begin, end;
    cublasHandle_t cublas;
    void *buffers[4];
    int owners[4]; /* whose memory */
    int buffer_count;
} bench_t;

static sl_status_t take(bench_t *b, int index, size_t bytes, void **memory_p)
{
    SL_CUDA_TRY(cudaSetDevice(index), "ceiling: device");
    SL_CUDA_TRY(cudaMalloc(memory_p, bytes), "ceiling: memory");
    b->owners[b->buffer_count] = index;
    b->buffers[b->buffer_count++] = *memory_p;
    return SL_OK;
}

static sl_status_t prepare(bench_t *b, int index)
{
    SL_CUDA_TRY(cudaSetDevice(index), "ceiling: device");
    SL_CUDA_TRY(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking), "ceiling: stream");
    SL_CUDA_TRY(cudaEventCreate(&b->begin), "ceiling: event");
    return sl_cuda_check(cudaEventCreate(&b->end), "ceiling: event");
}

static void release(bench_t *b, int index)
{
    (void)cudaSetDevice(index);
    if (b->stream != NULL) {
        (void)cudaStreamSynchronize(b->stream);
    }
    if (b->cublas != NULL) {
        (void)cublasDestroy(b->cublas);
    }
    for (int i = 0; i < b->buffer_count; i++) {
        (void)cudaSetDevice(b->owners[i]);
        (void)cudaFree(b->buffers[i]);
    }
    (void)cudaSetDevice(index);
    if (b->begin != NULL) {
        (void)cudaEventDestroy(b->begin);
    }
    if (b->end != NULL) {
        (void)cudaEventDestroy(b->end);
    }
    if (b->stream != NULL) {
        (void)cudaStreamDestroy(b->stream);
    }
    (void)cudaGetLastError();
}

static int by_value(const void *a_p, const void *b_p)
{
    float a = *(const float *)a_p, b = *(const float *)b_p;
    return (a > b) - (a < b);
}

/* Seconds of one run of `work`, as the GPU counts them. */
static sl_status_t time_work(bench_t *b, sl_status_t (*work)(bench_t *), double *seconds_p)
{
    float samples_ms[SAMPLES];
    for (int i = -1; i < SAMPLES; i++) { /* the first warms up */
        SL_CUDA_TRY(cudaEventRecord(b->begin, b->stream), "ceiling: event");
        for (int run = 0; run < RUNS; run++) {
            SL_TRY(work(b));
        }
        SL_CUDA_TRY(cudaEventRecord(b->end, b->stream), "ceiling: event");
        SL_CUDA_TRY(cudaEventSynchronize(b->end), "ceiling: runs");
        if (i >= 0) {
            SL_CUDA_TRY(cudaEventElapsedTime(&samples_ms[i], b->begin, b->end), "ceiling: time");
        }
    }
    qsort(samples_ms, SAMPLES, sizeof(samples_ms[0]), by_value);
    *seconds_p = samples_ms[SAMPLES / 2] / 1e3 / RUNS;
    return SL_OK;
}

/* Numbers in [-1, 1) as bf16, the same in both factors. */
static sl_status_t fill(bench_t *b, void *x, void *w)
{
    size_t count = (size_t)SIDE * SIDE;
    uint16_t *host = malloc(count * sizeof(*host));
    uint64_t state = 0x9E3779B97F4A7C15ull;
    if (host == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "ceiling: no host memory for a matrix");
    }
    for (size_t i = 0; i < count; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        float value = (float)(int32_t)(state >> 32) / 2147483648.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        host[i] = (uint16_t)(bits >> 16);
    }
    size_t bytes = count * sizeof(*host);
    cudaError_t error = cudaMemcpyAsync(x, host, bytes, cudaMemcpyHostToDevice, b->stream);
    if (error == cudaSuccess) {
        error = cudaMemcpyAsync(w, host, bytes, cudaMemcpyHostToDevice, b->stream);
    }
    if (error == cudaSuccess) {
        error = cudaStreamSynchronize(b->stream);
    }
    free(host);
    return sl_cuda_check(error, "ceiling: upload");
}

/* The layout of a model's products: both factors have k innermost. */
static sl_status_t product(bench_t *b)
{
    const float one = 1, zero = 0;
    return sl_cublas_check(cublasGemmEx(b->cublas, CUBLAS_OP_T, CUBLAS_OP_N, SIDE, SIDE, SIDE, &one,
                                        b->buffers[0], CUDA_R_16BF, SIDE, b->buffers[1],
                                        CUDA_R_16BF, SIDE, &zero, b->buffers[2], CUDA_R_16BF, SIDE,
                                        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                           "ceiling: product");
}

static sl_status_t copy(bench_t *b)
{
    return sl_cuda_check(cudaMemcpyAsync(b->buffers[1], b->buffers[0], COPY_BYTES,
                                         cudaMemcpyDeviceToDevice, b->stream),
                         "ceiling: copy");
}

static sl_status_t time_product(bench_t *b, int index, double *seconds_p)
{
    size_t bytes = (size_t)SIDE * SIDE * sizeof(uint16_t);
    void *x, *w, *out, *workspace;
    SL_TRY(take(b, index, bytes, &w));
    SL_TRY(take(b, index, bytes, &x));
    SL_TRY(take(b, index, bytes, &out));
    SL_TRY(take(b, index, SL_CUDA_CUBLAS_WORKSPACE_BYTES, &workspace));
    SL_TRY(fill(b, x, w));
    SL_CUBLAS_TRY(cublasCreate(&b->cublas), "ceiling: cublas");
    SL_CUBLAS_TRY(cublasSetStream(b->cublas, b->stream), "ceiling: cublas stream");
    SL_CUBLAS_TRY(cublasSetWorkspace(b->cublas, workspace, SL_CUDA_CUBLAS_WORKSPACE_BYTES),
                  "ceiling: cublas workspace");
    return time_work(b, product, seconds_p);
}

static sl_status_t time_copy(bench_t *b, int index, double *seconds_p)
{
    void *from, *to;
    SL_TRY(take(b, index, COPY_BYTES, &from));
    SL_TRY(take(b, index, COPY_BYTES, &to));
    SL_CUDA_TRY(cudaMemsetAsync(from, 0x5a, COPY_BYTES, b->stream), "ceiling: fill");
    return time_work(b, copy, seconds_p);
}

/* Each measurement on its own buffers, given back before the next. */
static sl_status_t measure(int index, sl_status_t (*work)(bench_t *, int, double *),
                           double *seconds_p)
{
    bench_t b = {0};
    sl_status_t status = prepare(&b, index);
    if (status == SL_OK) {
        status = work(&b, index, seconds_p);
    }
    release(&b, index);
    return status;
}

sl_status_t sl_ceiling_cuda_measure(int index, sl_ceiling_t *ceiling_p)
{
    double product_s, copy_s;
    SL_TRY(measure(index, time_product, &product_s));
    SL_TRY(measure(index, time_copy, &copy_s));
    *ceiling_p = (sl_ceiling_t){
        .flops = 2.0 * SIDE * SIDE * SIDE / product_s,
        .bytes = 2.0 * (double)COPY_BYTES / copy_s,
        .description = "cuBLAS product 8192^3, bf16; copy of 1 GiB inside the GPU, read + written",
    };
    return SL_OK;
}

/* Lets GPU `from` reach the memory of GPU `to`; *enabled_p: it could not before. */
static sl_status_t enable_access(int from, int to, bool *enabled_p)
{
    int can = 0;
    SL_CUDA_TRY(cudaDeviceCanAccessPeer(&can, from, to), "ceiling: peers");
    *enabled_p = false;
    if (!can) {
        return SL_OK; /* the driver goes through the host then, and the rate tells */
    }
    SL_CUDA_TRY(cudaSetDevice(from), "ceiling: device");
    cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
        return SL_OK;
    }
    SL_CUDA_TRY(error, "ceiling: peer access");
    *enabled_p = true;
    return SL_OK;
}

static void disable_access(int from, int to, bool enabled)
{
    if (enabled) {
        (void)cudaSetDevice(from);
        (void)cudaDeviceDisablePeerAccess(to);
    }
}

static sl_status_t run_copies(bench_t *b, int from, int to, size_t bytes, int count)
{
    for (int i = 0; i < count; i++) {
        SL_CUDA_TRY(cudaMemcpyPeerAsync(b->buffers[1], to, b->buffers[0], from, bytes, b->stream),
                    "ceiling: peer copy");
    }
    return SL_OK;
}

static sl_status_t time_peer_copy(bench_t *b, int from, int to, size_t bytes, int repeat,
                                  double *rate_p)
{
    void *source, *target;
    float ms;
    SL_TRY(take(b, from, bytes, &source));
    SL_TRY(take(b, to, bytes, &target));
    SL_CUDA_TRY(cudaSetDevice(from), "ceiling: device");
    SL_CUDA_TRY(cudaMemsetAsync(source, 0x5a, bytes, b->stream), "ceiling: fill");
    SL_TRY(run_copies(b, from, to, bytes, 2)); /* warms up */
    SL_CUDA_TRY(cudaEventRecord(b->begin, b->stream), "ceiling: event");
    SL_TRY(run_copies(b, from, to, bytes, repeat));
    SL_CUDA_TRY(cudaEventRecord(b->end, b->stream), "ceiling: event");
    SL_CUDA_TRY(cudaEventSynchronize(b->end), "ceiling: peer copies");
    SL_CUDA_TRY(cudaEventElapsedTime(&ms, b->begin, b->end), "ceiling: time");
    *rate_p = (double)bytes * repeat / (ms / 1e3);
    return SL_OK;
}

sl_status_t sl_ceiling_cuda_peer_copy(int from, int to, size_t bytes, int repeat, double *rate_p)
{
    bench_t b = {0};
    bool there = false, back = false;
    sl_status_t status = prepare(&b, from);
    if (status == SL_OK && from != to) {
        status = enable_access(from, to, &there);
    }
    if (status == SL_OK && from != to) {
        status = enable_access(to, from, &back);
    }
    if (status == SL_OK) {
        status = time_peer_copy(&b, from, to, bytes, repeat, rate_p);
    }
    release(&b, from);
    disable_access(from, to, there);
    disable_access(to, from, back);
    return status;
}
