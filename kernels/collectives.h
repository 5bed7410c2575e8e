/*
 * Group collectives on device memory, the second small table of a backend: on the CPU they run over
 * common/transfer/group.h, on CUDA over NCCL. Elements are of the backend's act type. Every rank of
 * the group calls the same operations in the same order with the same `rank_rows`; that is
 * guaranteed by the step record, not checked by waiting.
 *
 * Rows: rank r owns rank_rows[r] rows of `width` elements; blocks lie in rank order. `rank_rows` is
 * host memory. With one rank all operations are copies (or nothing, when in place).
 */
#ifndef SL_KERNELS_COLLECTIVES_H
#define SL_KERNELS_COLLECTIVES_H

#include <stdint.h>

#include "common/transfer/group.h"
#include "kernels/ops.h"

typedef struct sl_collectives sl_collectives_t;
struct sl_collectives {
    uint32_t rank, size;
    sl_group_t *group;
    void *context; /* the backend's own */

    /* out[sum(rank_rows)][width] = everybody's `mine`; mine may lie at its place in out. */
    sl_status_t (*all_gather)(const sl_collectives_t *self, sl_stream_t *stream, const void *mine,
                              const uint32_t *rank_rows, uint32_t width, void *out);

    /* out[rank_rows[rank]][width] = the own block of the sum over ranks of in. */
    sl_status_t (*reduce_scatter)(const sl_collectives_t *self, sl_stream_t *stream, const void *in,
                                  const uint32_t *rank_rows, uint32_t width, void *out);

    /* data = sum over ranks, bitwise equal on all of them. */
    sl_status_t (*all_reduce)(const sl_collectives_t *self, sl_stream_t *stream, void *data,
                              size_t count);
};

#endif
