/*
 * The device: opening, memory, copies, the streams' private contexts, and errors.
 *
 * The device's own stream is a non-blocking one: the legacy default stream cannot be captured, and
 * would wait for (and hold up) whatever libraries put on it.
 */
#include <stdlib.h>

#include "kernels/cuda/cuda.h"

#define ARCHITECTURE_MAJOR 9
#define ARCHITECTURE_MINOR 0

struct sl_cuda_retired {
    void *memory;
    sl_cuda_retired_t *next;
};

sl_status_t sl_cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) {
        return SL_OK;
    }
    (void)cudaGetLastError(); /* or the next check would report it again */
    sl_status_t status = error == cudaErrorMemoryAllocation ? SL_ERR_NO_MEMORY : SL_ERR_DEVICE;
    return sl_error(status, "cuda %s: %s (%s)", what, cudaGetErrorString(error),
                    cudaGetErrorName(error));
}

sl_status_t sl_cublas_check(cublasStatus_t status, const char *what)
{
    if (status == CUBLAS_STATUS_SUCCESS) {
        return SL_OK;
    }
    cudaError_t pending = cudaGetLastError();
    return sl_error(SL_ERR_DEVICE, "cuda %s: %s (%s; cuda: %s)", what,
                    cublasGetStatusString(status), cublasGetStatusName(status),
                    cudaGetErrorName(pending));
}

/* The GPU must be there and be one this code was compiled for. */
static sl_status_t check_gpu(int index)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return sl_error(SL_ERR_DEVICE, "cuda device %d: %s (%s)", index, cudaGetErrorString(error),
                        cudaGetErrorName(error));
    }
    if (index < 0 || index >= count) {
        return sl_error(SL_ERR_CONFIG, "cuda device %d: this machine has %d, numbered from 0",
                        index, count);
    }
    cudaDeviceProp properties;
    SL_CUDA_TRY(cudaGetDeviceProperties(&properties, index), "device properties");
    if (properties.major != ARCHITECTURE_MAJOR || properties.minor != ARCHITECTURE_MINOR) {
        return sl_error(SL_ERR_UNSUPPORTED,
                        "cuda device %d (%s) has compute capability %d.%d; expected %d.%d", index,
                        properties.name, properties.major, properties.minor, ARCHITECTURE_MAJOR,
                        ARCHITECTURE_MINOR);
    }
    return SL_OK;
}

static sl_status_t read_attribute(int index, cudaDeviceAttr attribute, int *value_p)
{
    return sl_cuda_check(cudaDeviceGetAttribute(value_p, attribute, index), "device attribute");
}

static sl_status_t open_into(sl_device_t *device)
{
    int smem = 0, l2 = 0;
    SL_TRY(check_gpu(device->index));
    SL_CUDA_TRY(cudaSetDevice(device->index), "device");
    SL_TRY(read_attribute(device->index, cudaDevAttrMultiProcessorCount, &device->sm_count));
    SL_TRY(read_attribute(device->index, cudaDevAttrMaxSharedMemoryPerBlockOptin, &smem));
    SL_TRY(read_attribute(device->index, cudaDevAttrL2CacheSize, &l2));
    device->smem_max_bytes = (size_t)smem;
    device->l2_bytes = (size_t)l2;
    SL_CUDA_TRY(cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking), "stream");
    SL_TRY(sl_cuda_loader_create(&device->loader));
    cublasHandle_t cublas;
    return sl_cuda_cublas(device, NULL, &cublas);
}

sl_status_t sl_cuda_open(const sl_device_params_t *params, sl_device_t **device_p)
{
    sl_device_t *device = (sl_device_t *)calloc(1, sizeof(*device));
    if (device == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "cuda device %d: out of host memory", params->index);
    }
    device->index = params->index;
    device->give_up = params->give_up;
    device->give_up_arg = params->give_up_arg;
    sl_status_t status = open_into(device);
    if (status != SL_OK) {
        sl_cuda_close(device);
        return status;
    }
    *device_p = device;
    return SL_OK;
}

static void free_context(sl_cuda_context_t *context)
{
    if (context->cublas != NULL) {
        (void)cublasDestroy(context->cublas);
    }
    (void)cudaFree(context->workspace);
    for (int i = 0; i < SL_SLOT_COUNT; i++) {
        (void)cudaFree(context->scratch[i].memory);
    }
    memset(context, 0, sizeof(*context));
}

void sl_cuda_close(sl_device_t *device)
{
    if (device == NULL) {
        return;
    }
    if (device->stream != NULL) {
        (void)cudaSetDevice(device->index);
        (void)cudaStreamSynchronize(device->stream);
        sl_cuda_loader_destroy(device->loader);
        for (int i = 0; i < device->context_count; i++) {
            free_context(&device->contexts[i]);
        }
        while (device->retired != NULL) {
            sl_cuda_retired_t *retired = device->retired;
            device->retired = retired->next;
            (void)cudaFree(retired->memory);
            free(retired);
        }
        for (int i = 0; i < SL_MARKS_MAX; i++) {
            if (device->marks[i] != NULL) {
                (void)cudaEventDestroy(device->marks[i]);
            }
        }
        (void)cudaStreamDestroy(device->stream);
    }
    (void)cudaGetLastError();
    free(device);
}

sl_status_t sl_cuda_memory(sl_device_t *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    size_t free_now = 0, total = 0;
    (void)sl_cuda_enter(device, NULL);
    SL_CUDA_TRY(cudaMemGetInfo(&free_now, &total), "memory");
    *free_bytes = free_now;
    *total_bytes = total;
    return SL_OK;
}

/* cudaMalloc's blocks are 256-byte aligned. */
static sl_status_t take(size_t bytes, const char *what, void **memory_p)
{
    void *memory = NULL;
    cudaError_t error = cudaMalloc(&memory, bytes > 0 ? bytes : 1);
    if (error == cudaSuccess) {
        *memory_p = memory;
        return SL_OK;
    }
    if (error != cudaErrorMemoryAllocation) {
        return sl_cuda_check(error, what);
    }
    (void)cudaGetLastError();
    size_t free_now = 0, total = 0;
    (void)cudaMemGetInfo(&free_now, &total);
    return sl_error(SL_ERR_NO_MEMORY, "%s: %zu bytes asked, %zu free of %zu on the GPU", what,
                    bytes, free_now, total);
}

sl_status_t sl_cuda_alloc(sl_device_t *device, size_t bytes, const char *what, void **memory_p)
{
    (void)sl_cuda_enter(device, NULL);
    return take(bytes, what, memory_p);
}

void sl_cuda_free(sl_device_t *device, void *memory)
{
    (void)sl_cuda_enter(device, NULL);
    (void)sl_cuda_check(cudaFree(memory), "free");
}

cudaStream_t sl_cuda_enter(sl_device_t *device, sl_stream_t *stream)
{
    /* Cheap where it changes nothing; an error would be sticky, and seen by the launch's check. */
    (void)cudaSetDevice(device->index);
    return stream != NULL ? (cudaStream_t)stream : device->stream;
}

static sl_status_t check_not_capturing(cudaStream_t stream, const char *what, size_t bytes)
{
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    SL_CUDA_TRY(cudaStreamIsCapturing(stream, &capture), what);
    if (capture != cudaStreamCaptureStatusNone) {
        return sl_error(SL_ERR_DEVICE,
                        "cuda %s: %zu bytes needed while a graph is captured; expected the "
                        "operation to have run before on this stream at its largest size",
                        what, bytes);
    }
    return SL_OK;
}

sl_status_t sl_cuda_context(sl_device_t *device, sl_stream_t *stream, sl_cuda_context_t **context_p)
{
    cudaStream_t wanted = sl_cuda_enter(device, stream);
    for (int i = 0; i < device->context_count; i++) {
        if (device->contexts[i].stream == wanted) {
            *context_p = &device->contexts[i];
            return SL_OK;
        }
    }
    if (device->context_count == SL_CUDA_STREAMS_MAX) {
        return sl_error(SL_ERR_DEVICE, "cuda device %d: more than %d streams", device->index,
                        SL_CUDA_STREAMS_MAX);
    }
    sl_cuda_context_t *context = &device->contexts[device->context_count++];
    memset(context, 0, sizeof(*context));
    context->stream = wanted;
    *context_p = context;
    return SL_OK;
}

/* Setting the stream takes a handle's workspace away, so the order matters. */
static sl_status_t make_cublas(sl_cuda_context_t *context)
{
    SL_TRY(
        check_not_capturing(context->stream, "cublas workspace", SL_CUDA_CUBLAS_WORKSPACE_BYTES));
    if (context->workspace == NULL) {
        SL_TRY(take(SL_CUDA_CUBLAS_WORKSPACE_BYTES, "cublas workspace", &context->workspace));
    }
    cublasHandle_t cublas = NULL;
    SL_CUBLAS_TRY(cublasCreate(&cublas), "cublas handle");
    cublasStatus_t result = cublasSetStream(cublas, context->stream);
    if (result == CUBLAS_STATUS_SUCCESS) {
        result = cublasSetWorkspace(cublas, context->workspace, SL_CUDA_CUBLAS_WORKSPACE_BYTES);
    }
    if (result != CUBLAS_STATUS_SUCCESS) {
        (void)cublasDestroy(cublas);
        return sl_cublas_check(result, "cublas handle");
    }
    context->cublas = cublas;
    return SL_OK;
}

sl_status_t sl_cuda_cublas(sl_device_t *device, sl_stream_t *stream, cublasHandle_t *handle_p)
{
    sl_cuda_context_t *context = NULL;
    SL_TRY(sl_cuda_context(device, stream, &context));
    if (context->cublas == NULL) {
        SL_TRY(make_cublas(context));
    }
    *handle_p = context->cublas;
    return SL_OK;
}

/* Kept until the device closes: work that is queued, and graphs, may use it. */
static sl_status_t retire(sl_device_t *device, sl_cuda_scratch_t *scratch)
{
    if (scratch->memory == NULL) {
        return SL_OK;
    }
    sl_cuda_retired_t *retired = (sl_cuda_retired_t *)malloc(sizeof(*retired));
    if (retired == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "cuda scratch: out of host memory");
    }
    retired->memory = scratch->memory;
    retired->next = device->retired;
    device->retired = retired;
    scratch->memory = NULL;
    scratch->bytes = 0;
    return SL_OK;
}

sl_status_t sl_cuda_scratch(sl_device_t *device, sl_stream_t *stream, sl_cuda_slot_t slot,
                            size_t bytes, void **memory_p)
{
    sl_cuda_context_t *context = NULL;
    SL_TRY(sl_cuda_context(device, stream, &context));
    sl_cuda_scratch_t *scratch = &context->scratch[slot];
    if (scratch->memory == NULL || scratch->bytes < bytes) {
        /* By half at least, so that what is retired stays below twice what is in use. */
        size_t grown = scratch->bytes + scratch->bytes / 2;
        size_t wanted = bytes > grown ? bytes : grown;
        void *memory = NULL;
        SL_TRY(check_not_capturing(context->stream, "scratch memory", bytes));
        SL_TRY(take(wanted, "scratch memory", &memory));
        sl_status_t status = retire(device, scratch);
        if (status != SL_OK) {
            (void)cudaFree(memory);
            return status;
        }
        scratch->memory = memory;
        scratch->bytes = wanted;
    }
    *memory_p = scratch->memory;
    return SL_OK;
}

/* Pageable host memory is free for reuse when this returns; pinned memory once the stream has come
 * that far. */
sl_status_t sl_cuda_upload(sl_device_t *device, sl_stream_t *stream, void *to, const void *host,
                           size_t bytes)
{
    if (bytes == 0) {
        return SL_OK;
    }
    cudaStream_t on = sl_cuda_enter(device, stream);
    sl_cuda_plan_drop(device);
    return sl_cuda_check(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, on), "upload");
}

sl_status_t sl_cuda_download(sl_device_t *device, sl_stream_t *stream, void *host, const void *from,
                             size_t bytes)
{
    if (bytes == 0) {
        return SL_OK;
    }
    cudaStream_t on = sl_cuda_enter(device, stream);
    return sl_cuda_check(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, on),
                         "download");
}
