/*
 * What the machine gives at best, measured beside a benchmark in the same run: the denominators of
 * its ratios. One device at a time; blocking. Streams and memory are given back; a CUDA context
 * stays, so a process that forks ranks measures after the fork.
 *
 *   cpu    product: the backend's best kernel on data in cache; memory: reading 256 MiB; one thread
 *   cuda   product: cuBLAS, bf16, 8192 x 8192 x 8192; memory: a copy inside the GPU, read + written
 */
#ifndef SL_BENCH_CEILING_H
#define SL_BENCH_CEILING_H

#include <stddef.h>

#include "common/base/status.h"

typedef struct {
    double flops;            /* floating-point operations a second */
    double bytes;            /* bytes of memory a second, read + written */
    const char *description; /* how they were measured, for the head of a report; static */
} sl_ceiling_t;

/* `backend`: "cpu", "ref" (the CPU's ceilings) or "cuda"; `index`: which accelerator. On CUDA this
 * takes 2 GiB for the time being. */
SL_MUST_USE sl_status_t sl_ceiling_measure(const char *backend, int index, sl_ceiling_t *ceiling_p);

/* Bytes a second of plain copies of `bytes` each from GPU `from` to GPU `to` (equal: inside the
 * GPU), one after the other, `repeat` times; a byte counts once. Where the GPUs can reach each
 * other's memory the copies go straight. SL_ERR_UNSUPPORTED in a build without CUDA. */
SL_MUST_USE sl_status_t sl_ceiling_peer_copy(int from, int to, size_t bytes, int repeat,
                                             double *rate_p);

#endif
