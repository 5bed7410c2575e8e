/* Made-up weights, one element a thread, in a grid-stride loop. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/dummy.h"

#define THREADS 256u
#define BLOCKS_A_SM 16

__global__ static void __launch_bounds__(THREADS) dummy_kernel(sl_dummy_weight_t dummy)
{
    sl_bf16_t *out = (sl_bf16_t *)dummy.out;
    uint64_t count = dummy.rows * dummy.columns;
    uint64_t stride = (uint64_t)gridDim.x * THREADS;
    for (uint64_t e = (uint64_t)blockIdx.x * THREADS + threadIdx.x; e < count; e += stride) {
        uint64_t place = dummy.first + e / dummy.columns * dummy.row_step +
                         e % dummy.columns * dummy.column_step;
        out[e] = sl_to_bf16(dummy.mean + dummy.range * sl_dummy_uniform(dummy.seed, place));
    }
}

extern "C" sl_status_t sl_cuda_dummy_weight(sl_device_t *device, const sl_dummy_weight_t *dummy)
{
    cudaStream_t stream = sl_cuda_enter(device, NULL);
    if (dummy->rows * dummy->columns == 0) {
        return SL_OK;
    }
    SL_LAUNCH("dummy weight", dummy_kernel, device->sm_count * BLOCKS_A_SM, THREADS, 0, stream,
              *dummy);
    return SL_OK;
}
