/*
 * What the two CPU backends (ref, cpu) share because their device memory is host memory: memory
 * with an honest error, its size, and weights converted to f32. Header-only, since both backends
 * are separate libraries below this folder's.
 */
#ifndef SL_KERNELS_HOST_H
#define SL_KERNELS_HOST_H

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/base/status.h"
#include "kernels/convert.h"
#include "kernels/dummy.h"
#include "kernels/ops.h"

#define SL_HOST_ALIGN 256
#define SL_HOST_HUGE_PAGE (2u << 20)

/* MemAvailable and MemTotal of /proc/meminfo. SL_ERR_IO. */
static inline sl_status_t sl_host_memory(uint64_t *free_bytes, uint64_t *total_bytes)
{
    FILE *file = fopen("/proc/meminfo", "r");
    if (file == NULL) {
        return sl_error(SL_ERR_IO, "/proc/meminfo: %s", strerror(errno));
    }
    char line[256];
    uint64_t available_kib = 0, total_kib = 0;
    while (fgets(line, sizeof(line), file) != NULL) {
        (void)sscanf(line, "MemAvailable: %" SCNu64, &available_kib);
        (void)sscanf(line, "MemTotal: %" SCNu64, &total_kib);
    }
    fclose(file);
    if (total_kib == 0) {
        return sl_error(SL_ERR_IO, "/proc/meminfo: no MemTotal line");
    }
    *free_bytes = available_kib * 1024;
    *total_bytes = total_kib * 1024;
    return SL_OK;
}

/* Memory is checked against what is available first: Linux would grant it, and kill later. Large
 * pieces ask for huge pages: reading weights is then up to a quarter faster. */
static inline sl_status_t sl_host_alloc(size_t bytes, const char *what, void **memory_p)
{
    uint64_t free_bytes = 0, total_bytes = 0;
    SL_TRY(sl_host_memory(&free_bytes, &total_bytes));
    void *memory = NULL;
    if (bytes <= free_bytes) {
        size_t align = bytes < 4 * SL_HOST_HUGE_PAGE ? SL_HOST_ALIGN : SL_HOST_HUGE_PAGE;
        size_t rounded = (bytes + align) / align * align; /* never 0 */
        memory = aligned_alloc(align, rounded);
        if (memory != NULL && align == SL_HOST_HUGE_PAGE) {
            (void)madvise(memory, rounded, MADV_HUGEPAGE); /* a wish */
        }
    }
    if (memory == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "%s: %zu bytes asked, %" PRIu64 " free of %" PRIu64, what,
                        bytes, free_bytes, total_bytes);
    }
    *memory_p = memory;
    return SL_OK;
}

static inline void sl_host_load_weight(float *to, const sl_weight_source_t *source)
{
    const unsigned char *from = source->data;
    size_t row_bytes = source->row_stride * sl_dtype_bytes(source->dtype);
    if (source->row_stride == 0) {
        row_bytes = source->columns * sl_dtype_bytes(source->dtype);
    }
    for (uint64_t row = 0; row < source->rows; row++) {
        sl_convert_to_f32(to + row * source->columns, from + row * row_bytes, source->dtype,
                          source->columns);
    }
}

/* First element of a cached token of one layer. Latent cache: [page][layer][page_tokens][width]. */
static inline float *sl_host_cached_token(const sl_cache_t *cache, uint32_t layer, uint64_t page,
                                          uint32_t offset)
{
    return (float *)cache->base +
           ((page * cache->layers + layer) * cache->page_tokens + offset) * cache->width;
}

/* Made-up weights in f32, for the entry `dummy_weight` of sl_ops_t. */
static inline sl_status_t sl_host_dummy_weight(sl_device_t *device, const sl_dummy_weight_t *dummy)
{
    float *out = (float *)dummy->out;
    (void)device;
    for (uint64_t i = 0; i < dummy->rows; i++) {
        for (uint64_t j = 0; j < dummy->columns; j++) {
            uint64_t place = dummy->first + i * dummy->row_step + j * dummy->column_step;
            *out++ = dummy->mean + dummy->range * sl_dummy_uniform(dummy->seed, place);
        }
    }
    return SL_OK;
}

/* What the host-memory backends (ref, cpu) share for the entries of sl_ops_t of these names:
 * collectives over common/transfer/group.h in f32; marks and threads need nothing. */
sl_status_t sl_host_collectives_open(sl_device_t *device, struct sl_group *group, uint32_t rank,
                                     uint32_t size, struct sl_collectives *collectives_p);
void sl_host_collectives_close(sl_device_t *device, struct sl_collectives *collectives);
sl_status_t sl_host_bind_thread(sl_device_t *device);
sl_status_t sl_host_mark(sl_device_t *device, sl_stream_t *stream, uint32_t mark);
sl_status_t sl_host_wait_mark(sl_device_t *device, uint32_t mark);

#endif
