/*
 * Waiting for the device, marks in a stream, and recorded steps (CUDA graphs).
 *
 * A wait polls instead of blocking in CUDA: a collective whose peer has died never ends, and the
 * host must be able to leave. It spins, since a step is a few milliseconds and each microsecond of
 * waking up is a microsecond a token.
 */
#include <sched.h>
#include <stdlib.h>

#include "common/base/clock.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device.h"

#define ASK_EVERY_US 1000u /* give_up() */

struct sl_graph {
    cudaGraphExec_t executable;
};

/* Until `query` says something else than "not ready". */
static sl_status_t wait_for(sl_device_t *device, cudaError_t (*query)(void *), void *on,
                            const char *what)
{
    uint64_t asked_us = sl_now_us();
    cudaError_t error;
    while ((error = query(on)) == cudaErrorNotReady) {
        uint64_t now_us = sl_now_us();
        if (now_us - asked_us < ASK_EVERY_US) {
            continue;
        }
        asked_us = now_us;
        sched_yield();
        if (device->give_up != NULL && device->give_up(device->give_up_arg)) {
            return sl_error(SL_ERR_CANCELED, "cuda %s: given up while the device was at work",
                            what);
        }
    }
    return sl_cuda_check(error, what);
}

static cudaError_t query_stream(void *stream)
{
    return cudaStreamQuery(stream);
}

static cudaError_t query_event(void *event)
{
    return cudaEventQuery(event);
}

sl_status_t sl_cuda_synchronize(sl_device_t *device, sl_stream_t *stream)
{
    return wait_for(device, query_stream, sl_cuda_enter(device, stream), "synchronize");
}

sl_status_t sl_cuda_bind_thread(sl_device_t *device)
{
    return sl_cuda_check(cudaSetDevice(device->index), "device");
}

sl_status_t sl_cuda_mark(sl_device_t *device, sl_stream_t *stream, uint32_t mark)
{
    SL_ASSERT(mark < SL_MARKS_MAX);
    cudaStream_t on = sl_cuda_enter(device, stream);
    if (device->marks[mark] == NULL) {
        SL_CUDA_TRY(cudaEventCreateWithFlags(&device->marks[mark], cudaEventDisableTiming), "mark");
    }
    return sl_cuda_check(cudaEventRecord(device->marks[mark], on), "mark");
}

sl_status_t sl_cuda_wait_mark(sl_device_t *device, uint32_t mark)
{
    SL_ASSERT(mark < SL_MARKS_MAX && device->marks[mark] != NULL);
    return wait_for(device, query_event, device->marks[mark], "wait");
}

sl_status_t sl_cuda_graph_begin(sl_device_t *device, sl_stream_t *stream)
{
    cudaStream_t on = sl_cuda_enter(device, stream);
    sl_cuda_plan_drop(device);
    return sl_cuda_check(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal),
                         "graph capture");
}

sl_status_t sl_cuda_graph_end(sl_device_t *device, sl_stream_t *stream, sl_graph_t **graph_p)
{
    cudaStream_t on = sl_cuda_enter(device, stream);
    sl_cuda_plan_drop(device);
    cudaGraph_t captured = NULL;
    SL_CUDA_TRY(cudaStreamEndCapture(on, &captured), "graph capture");
    sl_graph_t *graph = calloc(1, sizeof(*graph));
    if (graph == NULL) {
        (void)cudaGraphDestroy(captured);
        return sl_error(SL_ERR_NO_MEMORY, "cuda graph: out of host memory");
    }
    sl_status_t status =
        sl_cuda_check(cudaGraphInstantiate(&graph->executable, captured, 0), "graph");
    (void)cudaGraphDestroy(captured);
    if (status != SL_OK) {
        free(graph);
        return status;
    }
    *graph_p = graph;
    return SL_OK;
}

sl_status_t sl_cuda_graph_launch(sl_device_t *device, sl_stream_t *stream, sl_graph_t *graph)
{
    cudaStream_t on = sl_cuda_enter(device, stream);
    sl_cuda_plan_drop(device);
    return sl_cuda_check(cudaGraphLaunch(graph->executable, on), "graph launch");
}

void sl_cuda_graph_free(sl_device_t *device, sl_graph_t *graph)
{
    (void)sl_cuda_enter(device, NULL);
    (void)sl_cuda_check(cudaGraphExecDestroy(graph->executable), "graph");
    free(graph);
}
