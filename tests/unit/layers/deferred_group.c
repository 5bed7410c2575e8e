/* Collectives of ranks in one process. Ranks publish their input, meet, read, and meet again before
 * anybody writes over what the others read. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/layers/deferred_queue.h"

struct deferred_meeting {
    pthread_barrier_t barrier;
    const void *inputs[DEFERRED_RANKS_MAX];
};

deferred_meeting_t *deferred_meeting_create(uint32_t size)
{
    deferred_meeting_t *meeting = calloc(1, sizeof(*meeting));
    SL_ASSERT(meeting != NULL && size <= DEFERRED_RANKS_MAX);
    SL_ASSERT(pthread_barrier_init(&meeting->barrier, NULL, size) == 0);
    return meeting;
}

void deferred_meeting_destroy(deferred_meeting_t *meeting)
{
    pthread_barrier_destroy(&meeting->barrier);
    free(meeting);
}

static void meet(const deferred_exchange_t *p)
{
    int result = pthread_barrier_wait(&p->meeting->barrier);
    SL_ASSERT(result == 0 || result == PTHREAD_BARRIER_SERIAL_THREAD);
}

static void publish(const deferred_exchange_t *p)
{
    p->meeting->inputs[p->rank] = p->in;
    meet(p);
}

static sl_status_t run_gather(sl_device_t *device, const deferred_command_t *self)
{
    (void)device;
    const deferred_exchange_t *p = &self->exchange;
    publish(p);
    for (uint32_t r = 0; r < p->size; r++) {
        float *to = (float *)p->out + p->begin[r];
        size_t count = p->begin[r + 1] - p->begin[r];
        if (count > 0 && to != p->meeting->inputs[r]) {
            memcpy(to, p->meeting->inputs[r], count * sizeof(float));
        }
    }
    meet(p);
    return SL_OK;
}

/* out = the own block of the sum over ranks. */
static sl_status_t run_sum(sl_device_t *device, const deferred_command_t *self)
{
    (void)device;
    const deferred_exchange_t *p = &self->exchange;
    size_t begin = p->begin[p->rank], count = p->begin[p->rank + 1] - begin;
    float *sums = calloc(count + 1, sizeof(*sums));
    SL_ASSERT(sums != NULL);
    publish(p);
    for (uint32_t r = 0; r < p->size; r++) {
        const float *in = (const float *)p->meeting->inputs[r] + begin;
        for (size_t i = 0; i < count; i++) {
            sums[i] += in[i];
        }
    }
    meet(p);
    if (count > 0) {
        memcpy(p->out, sums, count * sizeof(*sums));
    }
    free(sums);
    return SL_OK;
}

/* The call as a command, with the rows of each rank copied. */
static deferred_command_t exchange(const sl_collectives_t *self, const void *in, void *out,
                                   const uint32_t *rank_rows, uint32_t width)
{
    deferred_command_t command = {
        .run = run_gather,
        .exchange = {.meeting = deferred_meeting_of(self->context),
                     .rank = self->rank,
                     .size = self->size,
                     .in = in,
                     .out = out},
    };
    for (uint32_t r = 0; r < self->size; r++) {
        command.exchange.begin[r + 1] = command.exchange.begin[r] + (size_t)rank_rows[r] * width;
    }
    return command;
}

static sl_status_t defer_all_gather(const sl_collectives_t *self, sl_stream_t *stream,
                                    const void *mine, const uint32_t *rank_rows, uint32_t width,
                                    void *out)
{
    (void)stream;
    deferred_command_t command = exchange(self, mine, out, rank_rows, width);
    return deferred_push(self->context, &command);
}

static sl_status_t defer_reduce_scatter(const sl_collectives_t *self, sl_stream_t *stream,
                                        const void *in, const uint32_t *rank_rows, uint32_t width,
                                        void *out)
{
    (void)stream;
    deferred_command_t command = exchange(self, in, out, rank_rows, width);
    command.run = run_sum;
    return deferred_push(self->context, &command);
}

/* Every rank's block is all of it. */
static sl_status_t defer_all_reduce(const sl_collectives_t *self, sl_stream_t *stream, void *data,
                                    size_t count)
{
    (void)stream;
    uint32_t rows[DEFERRED_RANKS_MAX] = {0};
    deferred_command_t command = exchange(self, data, data, rows, 0);
    command.run = run_sum;
    command.exchange.begin[self->rank + 1] = count;
    return deferred_push(self->context, &command);
}

sl_status_t deferred_collectives_open(sl_device_t *device, struct sl_group *group, uint32_t rank,
                                      uint32_t size, struct sl_collectives *collectives_p)
{
    SL_ASSERT(deferred_meeting_of(device) != NULL && size <= DEFERRED_RANKS_MAX);
    *collectives_p = (sl_collectives_t){
        .group = group,
        .context = device,
        .rank = rank,
        .size = size,
        .all_gather = defer_all_gather,
        .reduce_scatter = defer_reduce_scatter,
        .all_reduce = defer_all_reduce,
    };
    return SL_OK;
}

void deferred_collectives_close(sl_device_t *device, struct sl_collectives *collectives)
{
    (void)device, (void)collectives; /* the meeting is borrowed */
}
