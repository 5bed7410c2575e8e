/*
 * Packing of a strided piece of a checkpoint's matrix into a dense buffer, part by part. Pure host
 * code; any thread.
 */
#ifndef SL_KERNELS_CUDA_LOAD_PACK_H
#define SL_KERNELS_CUDA_LOAD_PACK_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cuda/cuda.h"

static inline size_t sl_element_bytes(sl_dtype_t dtype)
{
    return dtype == SL_DTYPE_F32 ? 4 : 2;
}

/* Elements [first, first + count), in row-major order, of the source's [rows][columns], at `to`. */
static inline void sl_pack_rows(void *to, const sl_weight_source_t *source, uint64_t first,
                                uint64_t count)
{
    const size_t element = sl_element_bytes(source->dtype);
    const unsigned char *data = (const unsigned char *)source->data;
    unsigned char *at = (unsigned char *)to;
    uint64_t stride = source->row_stride != 0 ? source->row_stride : source->columns;
    if (stride == source->columns) {
        memcpy(at, data + first * element, count * element);
        return;
    }
    uint64_t row = first / source->columns, column = first % source->columns;
    while (count > 0) {
        uint64_t left = source->columns - column;
        uint64_t run = left < count ? left : count;
        memcpy(at, data + (row * stride + column) * element, run * element);
        at += run * element;
        count -= run;
        column = 0;
        row++;
    }
}

#endif
