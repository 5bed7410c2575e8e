/*
 * Kernels over one row of logits of the vocabulary. A cluster of SL_VOCAB_RANKS blocks a row; each
 * block reads its slice of the row once, into shared memory:
 *
 *     row      | slice 0 | slice 1 | ... | slice 7 |     whole multiples of 4 floats
 *     block        0         1              7
 *
 * so that what follows (maximum, sums, thresholds, the walk in id order) costs no more memory
 * traffic. Blocks put partial results into their own shared memory and read the others' after a
 * cluster barrier, in rank order; sums that decide anything are of integers. So results do not
 * depend on scheduling, and all blocks take the same branches.
 */
#ifndef SL_KERNELS_CUDA_VOCAB_CUH
#define SL_KERNELS_CUDA_VOCAB_CUH

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/pick.cuh"

#define SL_VOCAB_RANKS 8u
#define SL_VOCAB_THREADS 512u /* two blocks an SM: one reads while the other thinks */
#define SL_VOCAB_WARPS (SL_VOCAB_THREADS / SL_WARP)

typedef struct {
    float *logits;  /* shared: [count] */
    uint32_t first; /* id of logits[0] */
    uint32_t count; /* 0 in the last blocks of a tiny vocabulary */
} sl_slice_t;

/* (key of the logit, complement of the id): larger comes first in the order of choice. 0 is
 * nobody's. */
__device__ static inline uint64_t sl_rank_of(float logit, uint32_t id)
{
    return (uint64_t)sl_key(logit) << 32 | (uint32_t)~id;
}

__device__ static inline uint32_t sl_rank_id(uint64_t rank)
{
    return ~(uint32_t)rank;
}

__host__ __device__ static inline uint32_t sl_slice_width(uint32_t vocab)
{
    uint32_t share = vocab / SL_VOCAB_RANKS + (vocab % SL_VOCAB_RANKS != 0);
    return (share + 3) / 4 * 4;
}

/* Every thread of the block; a barrier must follow. */
__device__ static inline sl_slice_t sl_slice_load(float *memory, const float *row, uint32_t vocab)
{
    const uint32_t width = sl_slice_width(vocab), first = sl_cluster_rank() * width;
    sl_slice_t slice = {memory, first, 0};
    if (first < vocab) {
        slice.count = vocab - first < width ? vocab - first : width;
    }
    const float *from = row + first;
    uint32_t whole = (uintptr_t)from % 16 == 0 ? slice.count / 4 : 0;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < whole; i += SL_VOCAB_THREADS) {
        ((float4 *)memory)[i] = ((const float4 *)from)[i];
    }
    for (uint32_t i = 4 * whole + threadIdx.x; i < slice.count; i += SL_VOCAB_THREADS) {
        memory[i] = from[i];
    }
    return slice;
}

__device__ static inline uint64_t sl_warp_max64(uint64_t x)
{
    uint32_t high = __reduce_max_sync(SL_FULL_MASK, (uint32_t)(x >> 32));
    uint32_t low = __reduce_max_sync(SL_FULL_MASK, (uint32_t)(x >> 32) == high ? (uint32_t)x : 0u);
    return (uint64_t)high << 32 | low;
}

template <typename T> __device__ static inline T sl_warp_sum64(T x)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(SL_FULL_MASK, x, offset);
    }
    return x;
}

/* A lane's of SL_VOCAB_WARPS values. */
template <typename T> __device__ static inline T sl_vocab_lane(const T *values)
{
    const unsigned lane = threadIdx.x % SL_WARP;
    return lane < SL_VOCAB_WARPS ? values[lane] : 0;
}

/* Of the block. `shared` holds SL_VOCAB_WARPS values that nobody else touches until the next
 * barrier but one. */
__device__ static inline uint64_t sl_vocab_max(uint64_t x, uint64_t *shared)
{
    x = sl_warp_max64(x);
    if (threadIdx.x % SL_WARP == 0) {
        shared[threadIdx.x / SL_WARP] = x;
    }
    __syncthreads();
    return sl_warp_max64(sl_vocab_lane(shared));
}

template <typename T> __device__ static inline T sl_vocab_sum(T x, T *shared)
{
    x = sl_warp_sum64(x);
    if (threadIdx.x % SL_WARP == 0) {
        shared[threadIdx.x / SL_WARP] = x;
    }
    __syncthreads();
    return sl_warp_sum64(sl_vocab_lane(shared));
}

/* Dynamic shared memory for `fixed` bytes and a slice; more than the GPU has is an error that says
 * what vocabulary would fit. */
static inline sl_status_t sl_vocab_shared(sl_device_t *device, const char *what, uint32_t vocab,
                                          size_t fixed, size_t *bytes_p)
{
    size_t bytes = fixed + (size_t)sl_slice_width(vocab) * sizeof(float);
    if (bytes > device->smem_max_bytes) {
        return sl_error(SL_ERR_UNSUPPORTED, "cuda %s: vocabulary of %u; at most %zu", what, vocab,
                        (device->smem_max_bytes - fixed) / sizeof(float) / 4 * 4 * SL_VOCAB_RANKS);
    }
    *bytes_p = bytes;
    return SL_OK;
}

#endif
