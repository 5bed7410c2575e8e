/*
 * What the operations of the CUDA backend share on the host: the device, its streams' private
 * memory, and checks that turn CUDA's and cuBLAS's errors into sl_error(). C and CUDA C++.
 *
 * A stream's context (cuBLAS handle and workspace, scratch memory) belongs to that stream, so
 * operations on two streams never share memory by accident. The first operation on a stream makes
 * its context, which is why that must happen before the stream captures a graph. Contexts and
 * scratch live until the device closes: a captured graph may hold their addresses.
 *
 * One engine thread per device, as kernels/ops.h says; load_weight alone may run on several.
 */
#ifndef SL_KERNELS_CUDA_DEVICE_H
#define SL_KERNELS_CUDA_DEVICE_H

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SL_CUDA_STREAMS_MAX 8
#define SL_CUDA_CUBLAS_WORKSPACE_BYTES (32u << 20) /* what cuBLAS advises for Hopper */

/* Scratch memory by purpose; an operation uses only its own slots. */
typedef enum {
    SL_SLOT_ATTN_ABSORBED,      /* split partial results */
    SL_SLOT_ATTN_ABSORBED_PLAN, /* their schedule, see attn.h */
    SL_SLOT_ATTN_PREFILL,       /* the counter of tiles */
    SL_SLOT_MOE_PERMUTE,
    SL_SLOT_COUNT
} sl_cuda_slot_t;

typedef struct {
    void *memory;
    size_t bytes;
} sl_cuda_scratch_t;

typedef struct {
    cudaStream_t stream;
    cublasHandle_t cublas; /* bound to `stream` and `workspace` */
    void *workspace;
    sl_cuda_scratch_t scratch[SL_SLOT_COUNT];
} sl_cuda_context_t;

/* The plan in effect, and what it was made of (attn.h). */
typedef struct {
    const void *schedule; /* NULL: none */
    cudaStream_t stream;
    const int32_t *kv_len, *row_request;
    uint32_t rows, heads;
} sl_cuda_plan_t;

typedef struct sl_cuda_retired sl_cuda_retired_t;
typedef struct sl_cuda_loader sl_cuda_loader_t; /* load.cu's own */

struct sl_device {
    int index;
    cudaStream_t stream; /* what a NULL sl_stream_t * means; not the legacy default stream */
    int sm_count;
    size_t smem_max_bytes; /* dynamic shared memory of a block after opting in */
    size_t l2_bytes;
    sl_cuda_context_t contexts[SL_CUDA_STREAMS_MAX];
    int context_count;
    sl_cuda_retired_t *retired; /* scratch that was outgrown: graphs may still point there */
    sl_cuda_loader_t *loader;
    sl_cuda_plan_t plan;
    cudaEvent_t marks[SL_MARKS_MAX]; /* made on first use */
    bool (*give_up)(void *arg);      /* of sl_device_params_t */
    void *give_up_arg;
};

/* SL_OK, or SL_ERR_DEVICE (SL_ERR_NO_MEMORY where that is what it was) with `what`, the error's
 * name and text. Clears CUDA's pending error. */
sl_status_t sl_cuda_check(cudaError_t error, const char *what);
sl_status_t sl_cublas_check(cublasStatus_t status, const char *what);

#define SL_CUDA_TRY(call, what) SL_TRY(sl_cuda_check((call), (what)))
#define SL_CUBLAS_TRY(call, what) SL_TRY(sl_cublas_check((call), (what)))

/* After a kernel launch: what became of it. Says nothing about the kernel's own run. */
#define SL_CUDA_LAUNCHED(what) SL_TRY(sl_cuda_check(cudaGetLastError(), (what)))

/* kernel<<<grid, block, shared_bytes, stream>>>(arguments), checked. Returns from the calling
 * function where it fails. */
#ifdef __CUDACC__
#define SL_LAUNCH(what, kernel, grid, block, shared_bytes, stream, ...)                            \
    do {                                                                                           \
        kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__);                        \
        SL_CUDA_LAUNCHED(what);                                                                    \
    } while (0)
#endif

/* Every operation starts here: makes the device the calling thread's current one and gives the
 * CUDA stream to launch on. */
cudaStream_t sl_cuda_enter(sl_device_t *device, sl_stream_t *stream);

/* The stream's context; made on first use. SL_ERR_DEVICE if that would be while it captures, or if
 * there are SL_CUDA_STREAMS_MAX already. */
sl_status_t sl_cuda_context(sl_device_t *device, sl_stream_t *stream,
                            sl_cuda_context_t **context_p);

/* The stream's cuBLAS handle, set to it, with a fixed workspace, host pointer mode. A
 * cublasLtHandle_t is the same pointer, cast. */
sl_status_t sl_cuda_cublas(sl_device_t *device, sl_stream_t *stream, cublasHandle_t *handle_p);

/* At least `bytes` of device memory (256-byte aligned) of this stream and slot. The same memory in
 * every call unless it has to grow; contents are not kept when it grows. Growing while the stream
 * captures is SL_ERR_DEVICE: the operation must have run at its largest size before. */
sl_status_t sl_cuda_scratch(sl_device_t *device, sl_stream_t *stream, sl_cuda_slot_t slot,
                            size_t bytes, void **memory_p);

/* The plan of the absorbed attention, if there is one, does not hold any more (attn.h). */
static inline void sl_cuda_plan_drop(sl_device_t *device)
{
    device->plan.schedule = NULL;
}

/* load.cu's part of opening and closing: takes no device memory before the first weight. */
sl_status_t sl_cuda_loader_create(sl_cuda_loader_t **loader_p);
void sl_cuda_loader_destroy(sl_cuda_loader_t *loader);

#ifdef __cplusplus
}
#endif

#endif
