/*
 * A thread block cluster's own words: its blocks run at the same time and read each other's shared
 * memory. Nobody may leave while another may still read, so a kernel ends with sl_cluster_sync().
 */
#ifndef SL_KERNELS_CUDA_CLUSTER_CUH
#define SL_KERNELS_CUDA_CLUSTER_CUH

#include <cooperative_groups.h>

/* Of this block in its cluster. */
__device__ static inline unsigned sl_cluster_rank(void)
{
    return cooperative_groups::this_cluster().block_rank();
}

/* A barrier of all threads of the cluster, after which they see each other's shared memory. */
__device__ static inline void sl_cluster_sync(void)
{
    cooperative_groups::this_cluster().sync();
}

/* The same variable in the shared memory of block `rank`. */
template <typename T> __device__ static inline T *sl_cluster_peer(T *mine, unsigned rank)
{
    return cooperative_groups::this_cluster().map_shared_rank(mine, rank);
}

#endif
