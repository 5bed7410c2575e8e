/* What a backend in host memory needs besides operations: collectives, a thin fit of rows to the
 * group's bytes and counts; and nothing for marks and threads. */
#include "kernels/collectives.h"
#include "kernels/host.h"

static sl_status_t host_all_gather(const sl_collectives_t *self, sl_stream_t *stream,
                                   const void *mine, const uint32_t *rank_rows, uint32_t width,
                                   void *out)
{
    (void)stream;
    size_t bytes[SL_GROUP_RANKS_MAX];
    for (uint32_t r = 0; r < self->size; r++) {
        bytes[r] = (size_t)rank_rows[r] * width * sizeof(float);
    }
    return sl_group_all_gather(self->group, mine, bytes, out);
}

static sl_status_t host_reduce_scatter(const sl_collectives_t *self, sl_stream_t *stream,
                                       const void *in, const uint32_t *rank_rows, uint32_t width,
                                       void *out)
{
    (void)stream;
    size_t counts[SL_GROUP_RANKS_MAX];
    for (uint32_t r = 0; r < self->size; r++) {
        counts[r] = (size_t)rank_rows[r] * width;
    }
    return sl_group_reduce_scatter(self->group, in, counts, out);
}

static sl_status_t host_all_reduce(const sl_collectives_t *self, sl_stream_t *stream, void *data,
                                   size_t count)
{
    (void)stream;
    return sl_group_all_reduce(self->group, data, count);
}

sl_status_t sl_host_collectives_open(sl_device_t *device, struct sl_group *group, uint32_t rank,
                                     uint32_t size, struct sl_collectives *collectives_p)
{
    (void)device;
    *collectives_p = (sl_collectives_t){
        .group = group,
        .rank = rank,
        .size = size,
        .all_gather = host_all_gather,
        .reduce_scatter = host_reduce_scatter,
        .all_reduce = host_all_reduce,
    };
    return SL_OK;
}

void sl_host_collectives_close(sl_device_t *device, struct sl_collectives *collectives)
{
    (void)device, (void)collectives; /* the group is borrowed */
}

sl_status_t sl_host_bind_thread(sl_device_t *device)
{
    (void)device;
    return SL_OK;
}

sl_status_t sl_host_mark(sl_device_t *device, sl_stream_t *stream, uint32_t mark)
{
    (void)device, (void)stream, (void)mark; /* work is done when its call returns */
    return SL_OK;
}

sl_status_t sl_host_wait_mark(sl_device_t *device, uint32_t mark)
{
    (void)device, (void)mark;
    return SL_OK;
}
