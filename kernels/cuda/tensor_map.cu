/* Tensor maps, made by the driver's own function. */
#include "kernels/cuda/tensor_map.h"

#include <cudaTypedefs.h>

/* Through the runtime: nothing here links with the driver library. NULL if the driver has none. */
static PFN_cuTensorMapEncodeTiled_v12000 find_encoder(void)
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                         cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? (PFN_cuTensorMapEncodeTiled_v12000)function
               : NULL;
}

sl_status_t sl_cuda_tensor_map(const sl_tensor_map_t *tensor, const char *what, CUtensorMap *map_p)
{
    static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder(); /* once a process */
    if (encode == NULL) {
        (void)cudaGetLastError();
        return sl_error(SL_ERR_DEVICE, "cuda %s: this driver has no tensor maps", what);
    }
    cuuint64_t sizes[SL_TENSOR_MAP_RANK_MAX], strides_bytes[SL_TENSOR_MAP_RANK_MAX];
    cuuint32_t box[SL_TENSOR_MAP_RANK_MAX], every[SL_TENSOR_MAP_RANK_MAX];
    for (uint32_t i = 0; i < tensor->rank; i++) {
        sizes[i] = tensor->size[i];
        box[i] = i == 0 ? SL_TENSOR_MAP_BOX_COLUMNS : tensor->box[i];
        every[i] = 1;
        if (i > 0) {
            strides_bytes[i - 1] = tensor->stride[i] * 2;
        }
    }
    CUresult result = encode(map_p, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, tensor->rank,
                             const_cast<void *>(tensor->base), sizes, strides_bytes, box, every,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        return sl_error(SL_ERR_DEVICE,
                        "cuda %s: tensor map of rank %u, %llu x %llu, refused "
                        "(CUresult %d)",
                        what, tensor->rank, (unsigned long long)tensor->size[0],
                        (unsigned long long)tensor->size[1], (int)result);
    }
    return SL_OK;
}
