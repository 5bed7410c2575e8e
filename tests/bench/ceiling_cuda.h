/* The accelerator's part of ceiling.h; in builds with CUDA only. */
#ifndef SL_BENCH_CEILING_CUDA_H
#define SL_BENCH_CEILING_CUDA_H

#include "tests/bench/ceiling.h"

sl_status_t sl_ceiling_cuda_measure(int index, sl_ceiling_t *ceiling_p);
sl_status_t sl_ceiling_cuda_peer_copy(int from, int to, size_t bytes, int repeat, double *rate_p);

#endif
