/* Limits that routing and permutation share. Host. */
#ifndef SL_KERNELS_CUDA_MOE_H
#define SL_KERNELS_CUDA_MOE_H

#include "kernels/cuda/cuda.h"

#define SL_CUDA_EXPERTS_MAX 1024u /* a block's counters stay in its shared memory */

static inline sl_status_t sl_cuda_check_experts(uint32_t experts)
{
    if (experts > SL_CUDA_EXPERTS_MAX) {
        return sl_error(SL_ERR_UNSUPPORTED, "cuda: %u experts; at most %u", experts,
                        SL_CUDA_EXPERTS_MAX);
    }
    return SL_OK;
}

#endif
