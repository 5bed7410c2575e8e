/*
 * The group's collectives over NCCL, on the device's stream; they may be recorded in a graph.
 *
 * The communicator's id travels over the group's own host messages (rank 0 draws it). Blocks of
 * equal size use NCCL's own operations; unequal ones (prefill) are a broadcast or a reduction from
 * or to each rank in turn, as one NCCL group, so that nothing is padded.
 */
#include "kernels/collectives.h"

#include <nccl.h>
#include <stdlib.h>

#include "common/base/clock.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device.h"

#define INIT_WAIT_US 60000000u
#define ELEMENT_BYTES 2 /* bf16 */

typedef struct {
    sl_device_t *device;
    ncclComm_t communicator;
} state_t;

static sl_status_t check(ncclResult_t result, ncclComm_t communicator, const char *what)
{
    if (result == ncclSuccess || result == ncclInProgress) {
        return SL_OK;
    }
    (void)cudaGetLastError();
    return sl_error(SL_ERR_DEVICE, "nccl %s: %s (%s)", what, ncclGetErrorString(result),
                    communicator != NULL ? ncclGetLastError(communicator) : "no communicator");
}

/* The communicator does not block the host, so that a peer that is gone can be given up on. */
static sl_status_t wait_ready(state_t *state, const char *what)
{
    uint64_t deadline_us = sl_now_us() + INIT_WAIT_US;
    ncclResult_t result = ncclInProgress;
    while (result == ncclInProgress) {
        SL_TRY(
            check(ncclCommGetAsyncError(state->communicator, &result), state->communicator, what));
        if (state->device->give_up != NULL && state->device->give_up(state->device->give_up_arg)) {
            return sl_error(SL_ERR_CANCELED, "nccl %s: given up", what);
        }
        if (sl_now_us() > deadline_us) {
            return sl_error(SL_ERR_TIMEOUT, "nccl %s: not done within %u s", what,
                            INIT_WAIT_US / 1000000u);
        }
    }
    return check(result, state->communicator, what);
}

static bool equal_rows(const sl_collectives_t *self, const uint32_t *rank_rows)
{
    for (uint32_t r = 1; r < self->size; r++) {
        if (rank_rows[r] != rank_rows[0]) {
            return false;
        }
    }
    return true;
}

static sl_status_t cuda_all_gather(const sl_collectives_t *self, sl_stream_t *stream,
                                   const void *mine, const uint32_t *rank_rows, uint32_t width,
                                   void *out)
{
    state_t *state = self->context;
    cudaStream_t on = sl_cuda_enter(state->device, stream);
    ncclComm_t communicator = state->communicator;
    if (equal_rows(self, rank_rows)) {
        SL_TRY(check(
            ncclAllGather(mine, out, (size_t)rank_rows[0] * width, ncclBfloat16, communicator, on),
            communicator, "all-gather"));
        return wait_ready(state, "all-gather");
    }
    SL_TRY(check(ncclGroupStart(), communicator, "all-gather"));
    char *place = out;
    for (uint32_t r = 0; r < self->size; r++) {
        size_t count = (size_t)rank_rows[r] * width;
        if (count > 0) {
            SL_TRY(check(ncclBroadcast(r == self->rank ? mine : place, place, count, ncclBfloat16,
                                       (int)r, communicator, on),
                         communicator, "all-gather"));
        }
        place += count * ELEMENT_BYTES;
    }
    SL_TRY(check(ncclGroupEnd(), communicator, "all-gather"));
    return wait_ready(state, "all-gather");
}

static sl_status_t cuda_reduce_scatter(const sl_collectives_t *self, sl_stream_t *stream,
                                       const void *in, const uint32_t *rank_rows, uint32_t width,
                                       void *out)
{
    state_t *state = self->context;
    cudaStream_t on = sl_cuda_enter(state->device, stream);
    ncclComm_t communicator = state->communicator;
    if (equal_rows(self, rank_rows)) {
        SL_TRY(check(ncclReduceScatter(in, out, (size_t)rank_rows[0] * width, ncclBfloat16, ncclSum,
                                       communicator, on),
                     communicator, "reduce-scatter"));
        return wait_ready(state, "reduce-scatter");
    }
    SL_TRY(check(ncclGroupStart(), communicator, "reduce-scatter"));
    const char *place = in;
    for (uint32_t r = 0; r < self->size; r++) {
        size_t count = (size_t)rank_rows[r] * width;
        if (count > 0) {
            SL_TRY(check(
                ncclReduce(place, out, count, ncclBfloat16, ncclSum, (int)r, communicator, on),
                communicator, "reduce-scatter"));
        }
        place += count * ELEMENT_BYTES;
    }
    SL_TRY(check(ncclGroupEnd(), communicator, "reduce-scatter"));
    return wait_ready(state, "reduce-scatter");
}

static sl_status_t cuda_all_reduce(const sl_collectives_t *self, sl_stream_t *stream, void *data,
                                   size_t count)
{
    state_t *state = self->context;
    cudaStream_t on = sl_cuda_enter(state->device, stream);
    SL_TRY(check(ncclAllReduce(data, data, count, ncclBfloat16, ncclSum, state->communicator, on),
                 state->communicator, "all-reduce"));
    return wait_ready(state, "all-reduce");
}

static sl_status_t connect(state_t *state, sl_group_t *group, uint32_t rank, uint32_t size)
{
    ncclUniqueId id = {0};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (rank == 0) {
        SL_TRY(check(ncclGetUniqueId(&id), NULL, "unique id"));
    }
    SL_TRY(sl_group_broadcast(group, 0, &id, sizeof(id)));
    SL_CUDA_TRY(cudaSetDevice(state->device->index), "device");
    SL_TRY(check(ncclCommInitRankConfig(&state->communicator, (int)size, id, (int)rank, &config),
                 NULL, "communicator"));
    return wait_ready(state, "communicator");
}

sl_status_t sl_cuda_collectives_open(sl_device_t *device, struct sl_group *group, uint32_t rank,
                                     uint32_t size, struct sl_collectives *collectives_p)
{
    sl_collectives_t collectives = {.group = group, .rank = rank, .size = size};
    if (size > 1) {
        state_t *state = calloc(1, sizeof(*state));
        if (state == NULL) {
            return sl_error(SL_ERR_NO_MEMORY, "nccl: out of host memory");
        }
        state->device = device;
        collectives.context = state;
        sl_status_t status = connect(state, group, rank, size);
        if (status != SL_OK) {
            sl_cuda_collectives_close(device, &collectives);
            return status;
        }
        collectives.all_gather = cuda_all_gather;
        collectives.reduce_scatter = cuda_reduce_scatter;
        collectives.all_reduce = cuda_all_reduce;
    }
    *collectives_p = collectives;
    return SL_OK;
}

/* Aborts rather than finalises: the peers may be gone, and nothing is under way that matters. */
void sl_cuda_collectives_close(sl_device_t *device, struct sl_collectives *collectives)
{
    state_t *state = collectives->context;
    (void)device;
    if (state == NULL) {
        return;
    }
    if (state->communicator != NULL) {
        (void)ncclCommAbort(state->communicator);
    }
    free(state);
    collectives->context = NULL;
}
