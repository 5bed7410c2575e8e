/* Logprobs of rows of which each may want another number of alternatives, or none. */
#ifndef SL_KERNELS_CUDA_LOGPROBS_H
#define SL_KERNELS_CUDA_LOGPROBS_H

#include "kernels/cuda/cuda.h"

/* As token_logprobs; `rules`, if given, decide per row (`logprobs`) in place of top_count. */
sl_status_t sl_cuda_logprobs(sl_device_t *device, sl_stream_t *stream, const char *what,
                             const sl_token_logprobs_t *p, const sl_sample_row_t *rules);

#endif
