/* Host memory the GPU copies from and to by itself. In C for the sake of kernels/host.h. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device.h"
#include "kernels/host.h"

sl_status_t sl_cuda_alloc_host(sl_device_t *device, size_t bytes, const char *what, void **memory_p)
{
    void *memory = NULL;
    (void)sl_cuda_enter(device, NULL);
    cudaError_t error = cudaMallocHost(&memory, bytes > 0 ? bytes : 1);
    if (error == cudaSuccess) {
        *memory_p = memory;
        return SL_OK;
    }
    if (error != cudaErrorMemoryAllocation) {
        return sl_cuda_check(error, what);
    }
    (void)cudaGetLastError();
    uint64_t free_now = 0, total = 0;
    (void)sl_host_memory(&free_now, &total);
    return sl_error(SL_ERR_NO_MEMORY,
                    "%s: %zu bytes asked, %" PRIu64 " free of %" PRIu64 " on the host", what, bytes,
                    free_now, total);
}

void sl_cuda_free_host(sl_device_t *device, void *memory)
{
    (void)sl_cuda_enter(device, NULL);
    (void)sl_cuda_check(cudaFreeHost(memory), "free host memory");
}
