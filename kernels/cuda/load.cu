/*
 * Weights from the mapped file to the GPU.
 *
 *   mapped file --memcpy--> pinned buffer --DMA--> destination                 (bf16)
 *                                         --DMA--> staging --kernel--> destination  (f32, f16)
 *
 * A lane is two pinned buffers, two staging buffers of the same size and a stream: while one buffer
 * is on its way, the other is filled. The copy into the pinned buffer also closes the gaps between
 * strided rows and pages the file in, so it is what takes the time; threads that load at once each
 * take a lane of their own, and wait only where all lanes are taken.
 */
#include <pthread.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/load_pack.h"
#include "kernels/cuda/vec.cuh"

#include <cuda_fp16.h>

#define LANES 8
#define CHUNK_BYTES ((size_t)4 << 20)
#define CONVERT_THREADS 256u

typedef struct {
    bool taken;
    bool ready; /* buffers and stream exist */
    cudaStream_t stream;
    void *pinned[2];
    void *staging[2];
    cudaEvent_t sent[2]; /* the pinned buffer may be filled again */
} lane_t;

struct sl_cuda_loader {
    pthread_mutex_t mutex; /* over `taken` alone; a taken lane is its thread's own */
    pthread_cond_t returned;
    lane_t lanes[LANES];
};

template <typename T> __device__ static inline float to_float(T x);
template <> __device__ inline float to_float<float>(float x)
{
    return x;
}
template <> __device__ inline float to_float<__half>(__half x)
{
    return __half2float(x);
}

/* NaN stays NaN, what is too large becomes infinite: round to nearest, ties to even. */
template <typename T>
__global__ static void __launch_bounds__(CONVERT_THREADS)
    convert_kernel(sl_bf16_t *to, const T *from, uint32_t count)
{
    uint32_t i = blockIdx.x * CONVERT_THREADS + threadIdx.x;
    if (i < count) {
        to[i] = sl_to_bf16(to_float(from[i]));
    }
}

sl_status_t sl_cuda_loader_create(sl_cuda_loader_t **loader_p)
{
    sl_cuda_loader_t *loader = (sl_cuda_loader_t *)calloc(1, sizeof(*loader));
    if (loader == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "cuda loader: out of host memory");
    }
    SL_ASSERT(pthread_mutex_init(&loader->mutex, NULL) == 0);
    SL_ASSERT(pthread_cond_init(&loader->returned, NULL) == 0);
    *loader_p = loader;
    return SL_OK;
}

/* Also what a half-made lane needs. */
static void lane_cleanup(lane_t *lane)
{
    if (lane->stream != NULL) {
        (void)cudaStreamSynchronize(lane->stream);
    }
    for (int i = 0; i < 2; i++) {
        if (lane->sent[i] != NULL) {
            (void)cudaEventDestroy(lane->sent[i]);
        }
        (void)cudaFreeHost(lane->pinned[i]);
        (void)cudaFree(lane->staging[i]);
        lane->sent[i] = NULL;
        lane->pinned[i] = lane->staging[i] = NULL;
    }
    if (lane->stream != NULL) {
        (void)cudaStreamDestroy(lane->stream);
        lane->stream = NULL;
    }
    lane->ready = false;
}

void sl_cuda_loader_destroy(sl_cuda_loader_t *loader)
{
    if (loader == NULL) {
        return;
    }
    for (int i = 0; i < LANES; i++) {
        lane_cleanup(&loader->lanes[i]);
    }
    (void)pthread_cond_destroy(&loader->returned);
    (void)pthread_mutex_destroy(&loader->mutex);
    free(loader);
}

static sl_status_t lane_fill(lane_t *lane)
{
    SL_CUDA_TRY(cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking), "loader stream");
    for (int i = 0; i < 2; i++) {
        SL_CUDA_TRY(cudaMallocHost(&lane->pinned[i], CHUNK_BYTES), "loader pinned buffer");
        SL_CUDA_TRY(cudaMalloc(&lane->staging[i], CHUNK_BYTES), "loader staging buffer");
        SL_CUDA_TRY(cudaEventCreateWithFlags(&lane->sent[i], cudaEventDisableTiming),
                    "loader event");
    }
    lane->ready = true;
    return SL_OK;
}

static lane_t *lane_take(sl_cuda_loader_t *loader)
{
    lane_t *lane = NULL;
    pthread_mutex_lock(&loader->mutex);
    while (lane == NULL) {
        for (int i = 0; i < LANES && lane == NULL; i++) {
            lane = loader->lanes[i].taken ? NULL : &loader->lanes[i];
        }
        if (lane == NULL) {
            pthread_cond_wait(&loader->returned, &loader->mutex);
        }
    }
    lane->taken = true;
    pthread_mutex_unlock(&loader->mutex);
    return lane;
}

static void lane_return(sl_cuda_loader_t *loader, lane_t *lane)
{
    pthread_mutex_lock(&loader->mutex);
    lane->taken = false;
    pthread_cond_signal(&loader->returned);
    pthread_mutex_unlock(&loader->mutex);
}

/* `count` elements from the pinned buffer `side` on their way to `to`. */
static sl_status_t send(lane_t *lane, int side, sl_bf16_t *to, sl_dtype_t dtype, size_t count)
{
    size_t bytes = count * sl_element_bytes(dtype);
    void *target = dtype == SL_DTYPE_BF16 ? (void *)to : lane->staging[side];
    SL_CUDA_TRY(
        cudaMemcpyAsync(target, lane->pinned[side], bytes, cudaMemcpyHostToDevice, lane->stream),
        "load_weight");
    SL_CUDA_TRY(cudaEventRecord(lane->sent[side], lane->stream), "load_weight");
    uint32_t blocks = sl_div_up((uint32_t)count, CONVERT_THREADS);
    if (dtype == SL_DTYPE_F32) {
        SL_LAUNCH("load_weight", convert_kernel<float>, blocks, CONVERT_THREADS, 0, lane->stream,
                  to, (const float *)target, (uint32_t)count);
    } else if (dtype == SL_DTYPE_F16) {
        SL_LAUNCH("load_weight", convert_kernel<__half>, blocks, CONVERT_THREADS, 0, lane->stream,
                  to, (const __half *)target, (uint32_t)count);
    }
    return SL_OK;
}

static sl_status_t load_on(lane_t *lane, sl_bf16_t *to, const sl_weight_source_t *source)
{
    if (!lane->ready) {
        SL_TRY(lane_fill(lane));
    }
    uint64_t total = source->rows * source->columns;
    uint64_t chunk = CHUNK_BYTES / sl_element_bytes(source->dtype);
    int side = 0;
    for (uint64_t first = 0; first < total; first += chunk, side ^= 1) {
        uint64_t count = total - first < chunk ? total - first : chunk;
        SL_CUDA_TRY(cudaEventSynchronize(lane->sent[side]), "load_weight");
        sl_pack_rows(lane->pinned[side], source, first, count);
        SL_TRY(send(lane, side, to + first, source->dtype, count));
    }
    return sl_cuda_check(cudaStreamSynchronize(lane->stream), "load_weight");
}

sl_status_t sl_cuda_load_weight(sl_device_t *device, void *to, const sl_weight_source_t *source)
{
    if (source->rows == 0 || source->columns == 0) {
        return SL_OK;
    }
    (void)sl_cuda_enter(device, NULL);
    lane_t *lane = lane_take(device->loader);
    sl_status_t status = load_on(lane, (sl_bf16_t *)to, source);
    if (status != SL_OK) {
        lane_cleanup(lane); /* a later try starts afresh */
        (void)cudaGetLastError();
    }
    lane_return(device->loader, lane);
    return status;
}
