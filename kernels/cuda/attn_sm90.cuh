/*
 * What the attention kernels share: asynchronous copies to shared memory, matrix fragments, and
 * how tiles lie in shared memory.
 *
 * A tile of `rows` x 64·n columns of bf16 is n subtiles of [rows][64]: a row of a subtile is 128
 * bytes, all 32 banks, in eight 16-byte chunks. Chunk c of row r lies at place c ^ (r % 8), so that
 * the eight chunks that one ldmatrix phase reads (same column, eight rows), as well as the eight
 * that eight neighbouring threads copy (same row), are in different banks.
 *
 *     row 0   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
 *     row 1   | 1 | 0 | 3 | 2 | 5 | 4 | 7 | 6 |
 *     row 2   | 2 | 3 | 0 | 1 | 6 | 7 | 4 | 5 |   ...
 *
 * A thread that always has the same r % 8 walks the columns of a subtile by XOR with a constant,
 * and the rows and subtiles by adding one.
 *
 * Fragments of mma.m16n8k16, lane = 4 g + q: A holds rows g and g + 8, C too; B holds column g;
 * 2 q and 2 q + 1 (and, of the 16 deep side, 8 more) are the places along the other axis.
 */
#ifndef SL_KERNELS_CUDA_ATTN_SM90_CUH
#define SL_KERNELS_CUDA_ATTN_SM90_CUH

#include <math.h>
#include <stdint.h>

#include "kernels/cuda/vec.cuh"

#define SL_LOG2_E 1.4426950408889634f
#define SL_ROW_BYTES 128u /* of a subtile */

/* 16 bytes to shared memory; zeros, and nothing read, unless `valid`. */
__device__ static __forceinline__ void sl_copy_async(uint32_t to, const void *from, bool valid)
{
    const uint32_t bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
}

__device__ static __forceinline__ void sl_copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most PENDING of this thread's groups are on their way. Others' copies need a barrier. */
template <int PENDING> __device__ static __forceinline__ void sl_copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Four 8x8 blocks, block b's row i at the address of lane 8 b + i. Lane 4 g + q gets of each block
 * row g, columns 2 q and 2 q + 1. */
__device__ static __forceinline__ void sl_load_blocks(uint32_t r[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* Transposed: lane 4 g + q gets of each block column g, rows 2 q and 2 q + 1. */
__device__ static __forceinline__ void sl_load_blocks_transposed(uint32_t r[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* c[16][8] += a[16][16] · b[16][8], bf16 to f32 */
__device__ static __forceinline__ void sl_mma(float c[4], const uint32_t a[4], uint32_t b0,
                                              uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* 2^x; 0 for -inf */
__device__ static __forceinline__ float sl_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Where a lane's ldmatrix row begins, for A fragments (blocks: rows 0-7 and 8-15, then the same of
 * the next 8 columns; for transposed B: likewise with keys as rows) of the subtile at `tile`. The
 * chunk of columns 16 i is reached by XOR with 32 i. */
__device__ static __forceinline__ uint32_t sl_lane_address_a(uint32_t tile, uint32_t lane)
{
    return tile + (lane % 16) * SL_ROW_BYTES + (((lane / 16) ^ (lane % 8)) * 16);
}

/* For B fragments of rows = columns of B (keys): blocks: keys 0-7 at columns 0-7 and 8-15, then
 * keys 8-15. */
__device__ static __forceinline__ uint32_t sl_lane_address_b(uint32_t tile, uint32_t lane)
{
    return tile + (lane % 8 + lane / 16 * 8) * SL_ROW_BYTES + (((lane / 8 % 2) ^ (lane % 8)) * 16);
}

/* Maximum and sum over the four lanes that hold a row of a fragment. */
__device__ static __forceinline__ float sl_quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(SL_FULL_MASK, x, 1));
    return fmaxf(x, __shfl_xor_sync(SL_FULL_MASK, x, 2));
}

__device__ static __forceinline__ float sl_quad_sum(float x)
{
    x += __shfl_xor_sync(SL_FULL_MASK, x, 1);
    return x + __shfl_xor_sync(SL_FULL_MASK, x, 2);
}

#endif
