/*
 * Hopper's instructions that CUDA C++ has no words for, each behind a function: barriers in shared
 * memory (mbarrier), the tensor copy engine (TMA), products of a warpgroup (wgmma) and register
 * quotas. Shared memory is named by its 32-bit address, as the instructions want it. Source: the
 * PTX ISA, sections on mbarrier, cp.async.bulk.tensor, wgmma, stmatrix and setmaxnreg.
 *
 * Order of things: what the copy engine writes is visible to a thread (and to its wgmma) once that
 * thread has seen the barrier's phase end. A buffer may be written again by the copy engine once
 * its readers' wgmma have been waited for and the readers have arrived at a barrier the issuing
 * thread waits on. A proxy fence is needed only after ordinary stores to the buffer.
 */
#ifndef SL_KERNELS_CUDA_PTX_SM90_CUH
#define SL_KERNELS_CUDA_PTX_SM90_CUH

#include <cuda.h>
#include <stdint.h>

__device__ static __forceinline__ uint32_t sl_ptx_shared(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* ---- mbarrier: 8 bytes; phases alternate 0, 1, 0, ... ---- */

__device__ static __forceinline__ void sl_ptx_barrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

/* After the inits, by the thread that made them, before the block's barrier: makes them known to
 * the copy engine. */
__device__ static __forceinline__ void sl_ptx_barrier_init_done(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ static __forceinline__ void sl_ptx_barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and lets the phase end only when that many bytes more have been copied. */
__device__ static __forceinline__ void sl_ptx_barrier_arrive_expect(uint32_t barrier,
                                                                    uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* Waits for the end of the phase of that parity. On a new barrier, parity 1 counts as ended. */
__device__ static __forceinline__ void sl_ptx_barrier_wait(uint32_t barrier, uint32_t parity)
{
    uint32_t done = 0;
    do {
        asm volatile("{\n"
                     ".reg .pred ended;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, ended;\n"
                     "}\n"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (done == 0);
}

/* ---- barrier of some warps of a block; ids 1 to 15 (0 is __syncthreads) ---- */

__device__ static __forceinline__ void sl_ptx_named_barrier(uint32_t id, uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Counts among the barrier's threads without waiting for the others. */
__device__ static __forceinline__ void sl_ptx_named_arrive(uint32_t id, uint32_t threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- tensor copies, global to shared. One thread issues; innermost coordinate first. ---- */

__device__ static __forceinline__ void sl_ptx_tma_prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ static __forceinline__ void
sl_ptx_tma_load_2d(uint32_t to, const CUtensorMap *map, uint32_t barrier, uint32_t c0, uint32_t c1)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1)
                 : "memory");
}

__device__ static __forceinline__ void sl_ptx_tma_load_3d(uint32_t to, const CUtensorMap *map,
                                                          uint32_t barrier, uint32_t c0,
                                                          uint32_t c1, uint32_t c2)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

/* After ordinary stores to shared memory, by the threads that made them: what the copy engine and
 * wgmma do there next comes after. */
__device__ static __forceinline__ void sl_ptx_stores_done(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- register quotas of a warpgroup; every warp of it executes the same one ---- */

template <int REGISTERS> __device__ static __forceinline__ void sl_ptx_registers_give_back(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ static __forceinline__ void sl_ptx_registers_take(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* ---- transposed store of four 8x8 blocks of 16-bit elements ----
 *
 * Lane l holds, of each block, elements (column l / 4; rows 2 (l % 4) and the next), the lower row
 * in the lower half. Row i of block b goes to the 16 bytes at the address lane 8 b + i gives. */
__device__ static __forceinline__ void
sl_ptx_store_blocks_transposed(uint32_t to, uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(b0), "r"(b1), "r"(b2), "r"(b3)
                 : "memory");
}

/* An operand of wgmma in 128-byte swizzle: atoms of 8 rows follow one another; `leading_bytes` lie
 * between those that are side by side. */
__device__ static __forceinline__ uint64_t sl_ptx_wgmma_descriptor(uint32_t shared,
                                                                   uint32_t leading_bytes)
{
    const uint64_t atom_rows_bytes = 1024, swizzle_128 = 1;
    return (uint64_t)((shared & 0x3ffffu) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 |
           atom_rows_bytes >> 4 << 32 | swizzle_128 << 62;
}

/* ---- wgmma: 64 x N += (64 x 16) (N x 16)^T, both in shared memory, K contiguous ----
 *
 * The operands lie as the copy engine leaves boxes of 64 bf16 (128 bytes) a row in 128-byte
 * swizzle:
 *
 *          128 bytes of K
 *   row 0  |0|1|2|3|4|5|6|7|   eight pieces of 16 bytes, piece p of row r lies at p xor (r % 8).
 *   row 1  |1|0|3|2|5|4|7|6|   8 rows are an atom of 1,024 bytes (aligned so), and the next 8 rows
 *   ...                        follow at once. 16 of K are two pieces: the next 16 start 32 bytes
 *   row 7  |7|6|5|4|3|2|1|0|   on, since the swizzle is a function of the address itself.
 */
__device__ static __forceinline__ uint64_t sl_ptx_wgmma_operand(uint32_t shared)
{
    return sl_ptx_wgmma_descriptor(shared, 16 /* unused in this layout */);
}

/* Steps of 16 in K, in the descriptor's units of 16 bytes. */
#define SL_PTX_WGMMA_K_STEP 2u

/*
 * The B operand of sl_ptx_wgmma_rows(): rows are K, and N is contiguous, 64 columns in a subtile
 * (rows of 128 bytes, swizzled as above) and the next 64 in the next one, `subtile_bytes` on.
 */
__device__ static __forceinline__ uint64_t sl_ptx_wgmma_rows_operand(uint32_t shared,
                                                                     uint32_t subtile_bytes)
{
    return sl_ptx_wgmma_descriptor(shared, subtile_bytes);
}

/* Steps of 16 in K: 16 rows, in the descriptor's units. */
#define SL_PTX_WGMMA_ROWS_STEP 128u

/* Before the first wgmma, and whenever ordinary code has touched its registers. */
__device__ static __forceinline__ void sl_ptx_wgmma_begin(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ static __forceinline__ void sl_ptx_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most PENDING committed groups of this warp are unfinished. */
template <int PENDING> __device__ static __forceinline__ void sl_ptx_wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Keeps the compiler from reading sums before a wait, or moving them while wgmma writes them. */
template <int COUNT> __device__ static __forceinline__ void sl_ptx_wgmma_pin(float (&d)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

/* Eight registers are 16 columns of the result. Names and operands of the first 16, 32, ... 256. */
#define SL_WG_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SL_WG_NAMES_32 SL_WG_NAMES_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SL_WG_NAMES_48 SL_WG_NAMES_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define SL_WG_NAMES_64 SL_WG_NAMES_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define SL_WG_NAMES_80 SL_WG_NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define SL_WG_NAMES_96 SL_WG_NAMES_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define SL_WG_NAMES_112 SL_WG_NAMES_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define SL_WG_NAMES_128 SL_WG_NAMES_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define SL_WG_NAMES_144 SL_WG_NAMES_128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define SL_WG_NAMES_160 SL_WG_NAMES_144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define SL_WG_NAMES_176 SL_WG_NAMES_160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define SL_WG_NAMES_192 SL_WG_NAMES_176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define SL_WG_NAMES_208 SL_WG_NAMES_192 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define SL_WG_NAMES_224 SL_WG_NAMES_208 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define SL_WG_NAMES_240 SL_WG_NAMES_224 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define SL_WG_NAMES_256 SL_WG_NAMES_240 ",%120,%121,%122,%123,%124,%125,%126,%127"

#define SL_WG_EIGHT(d, i)                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define SL_WG_SUMS_16(d) SL_WG_EIGHT(d, 0)
#define SL_WG_SUMS_32(d) SL_WG_SUMS_16(d), SL_WG_EIGHT(d, 8)
#define SL_WG_SUMS_48(d) SL_WG_SUMS_32(d), SL_WG_EIGHT(d, 16)
#define SL_WG_SUMS_64(d) SL_WG_SUMS_48(d), SL_WG_EIGHT(d, 24)
#define SL_WG_SUMS_80(d) SL_WG_SUMS_64(d), SL_WG_EIGHT(d, 32)
#define SL_WG_SUMS_96(d) SL_WG_SUMS_80(d), SL_WG_EIGHT(d, 40)
#define SL_WG_SUMS_112(d) SL_WG_SUMS_96(d), SL_WG_EIGHT(d, 48)
#define SL_WG_SUMS_128(d) SL_WG_SUMS_112(d), SL_WG_EIGHT(d, 56)
#define SL_WG_SUMS_144(d) SL_WG_SUMS_128(d), SL_WG_EIGHT(d, 64)
#define SL_WG_SUMS_160(d) SL_WG_SUMS_144(d), SL_WG_EIGHT(d, 72)
#define SL_WG_SUMS_176(d) SL_WG_SUMS_160(d), SL_WG_EIGHT(d, 80)
#define SL_WG_SUMS_192(d) SL_WG_SUMS_176(d), SL_WG_EIGHT(d, 88)
#define SL_WG_SUMS_208(d) SL_WG_SUMS_192(d), SL_WG_EIGHT(d, 96)
#define SL_WG_SUMS_224(d) SL_WG_SUMS_208(d), SL_WG_EIGHT(d, 104)
#define SL_WG_SUMS_240(d) SL_WG_SUMS_224(d), SL_WG_EIGHT(d, 112)
#define SL_WG_SUMS_256(d) SL_WG_SUMS_240(d), SL_WG_EIGHT(d, 120)

/* A, B, P: the operand numbers after N / 2 sums. */
#define SL_WG_INSTANCE(N, A, B, P)                                                                 \
    if constexpr (COLUMNS == N) {                                                                  \
        asm volatile("{\n"                                                                         \
                     ".reg .pred keep;\n"                                                          \
                     "setp.ne.b32 keep, %" #P ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "                   \
                     "{" SL_WG_NAMES_##N "}, %" #A ", %" #B ", keep, 1, 1, 0, 0;\n"                \
                                         "}\n"                                                     \
                     : SL_WG_SUMS_##N(d)                                                           \
                     : "l"(a), "l"(b), "r"(keep_sums));                                            \
    }

/*
 * By all four warps of a warpgroup; asynchronous until committed and waited for. The sums start at
 * zero where keep_sums is 0. Lane l of warp w holds of the 64 x N result: d[4 j + 2 h + i] is row
 * 16 w + l / 4 + 8 h, column 8 j + 2 (l % 4) + i.
 */
template <int COLUMNS>
__device__ static __forceinline__ void sl_ptx_wgmma(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b,
                                                    uint32_t keep_sums)
{
    static_assert(COLUMNS % 16 == 0 && COLUMNS >= 16 && COLUMNS <= 256, "no such instance");
    SL_WG_INSTANCE(16, 8, 9, 10)
    SL_WG_INSTANCE(32, 16, 17, 18)
    SL_WG_INSTANCE(48, 24, 25, 26)
    SL_WG_INSTANCE(64, 32, 33, 34)
    SL_WG_INSTANCE(80, 40, 41, 42)
    SL_WG_INSTANCE(96, 48, 49, 50)
    SL_WG_INSTANCE(112, 56, 57, 58)
    SL_WG_INSTANCE(128, 64, 65, 66)
    SL_WG_INSTANCE(144, 72, 73, 74)
    SL_WG_INSTANCE(160, 80, 81, 82)
    SL_WG_INSTANCE(176, 88, 89, 90)
    SL_WG_INSTANCE(192, 96, 97, 98)
    SL_WG_INSTANCE(208, 104, 105, 106)
    SL_WG_INSTANCE(224, 112, 113, 114)
    SL_WG_INSTANCE(240, 120, 121, 122)
    SL_WG_INSTANCE(256, 128, 129, 130)
}

/*
 * 64 x 128 += (64 x 16) (16 x 128): A in registers, B as sl_ptx_wgmma_rows_operand() says. Sums lie
 * as above. Lane l of warp w holds of A: a[2 j + h] is row 16 w + l / 4 + 8 h, columns
 * 8 j + 2 (l % 4) and the next, the lower column in the lower half: the sums of 16 columns, packed
 * in their order.
 */
__device__ static __forceinline__ void sl_ptx_wgmma_rows(float (&d)[64], const uint32_t *a,
                                                         uint64_t b)
{
    asm volatile("{\n"
                 ".reg .pred keep;\n"
                 "setp.ne.b32 keep, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{" SL_WG_NAMES_128 "}, {%64, %65, %66, %67}, %68, keep, 1, 1, 1;\n"
                 "}\n"
                 : SL_WG_SUMS_128(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

#endif
