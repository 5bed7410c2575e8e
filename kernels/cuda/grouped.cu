/*
 * Grouped product: out[r][n] = sum_k x[r][k] * w[e][n][k], rows sorted by expert, their counts
 * known only to the GPU.
 *
 * The weights are wgmma's M side and the rows of x its N side: what is computed is the transpose of
 * out. M comes in steps of 64 whatever one does, N in steps of 16 here, so an expert with five rows
 * costs 16 columns of arithmetic, and one with 300 costs 160 + 144. Few rows: the kernel streams
 * weights; many rows: it is an ordinary 128 x 256 product.
 *
 * One block an SM, three warpgroups, walks the tiles of grouped_tiles.h (index blockIdx.x, then
 * + gridDim.x ...), which every role computes for itself from expert_begin:
 *
 *                       K, in steps of 64 (128 bytes, swizzled by the copy engine)
 *    warpgroup 0        +------------------+  a stage of the ring:
 *    one thread copies  | w  128 x 64      |    16 KiB of weights from (e, n, k); 0 past n
 *    by TMA             +------------------+
 *                       | x  height x 64   |    boxes of 64 and 16 rows; the next expert's rows
 *                       +------------------+    come along and are not stored; 0 past max_rows
 *    warpgroup 1: w[0..64)   . x^T  -> 64 x height sums in registers
 *    warpgroup 2: w[64..128) . x^T  -> 64 x height sums in registers
 *
 *    full[s]:  the copying thread arrives with the byte count; the consumers wait.
 *    empty[s]: each of the eight consumer warps arrives when its wgmma on the stage are done, one
 *              step late, so that one group of wgmma is always in flight; the copying thread
 *              waits.
 *
 * The copying thread runs ahead over tile ends, so the next tile's weights arrive while the sums of
 * this one are stored. Storing: 64 rows of x at a time through 9 KiB of shared memory of the
 * warpgroup's own (stmatrix transposes), then 128-byte pieces of out rows.
 *
 * Two instances: tiles of up to 64 rows with eight stages where experts have few rows each, up to
 * 256 rows with four stages else; 192 KiB of ring either way. Which one is chosen by max_rows,
 * so it is fixed in a graph; either computes any counts.
 *
 * k and n need to be multiples of 8, and pointers 16-byte aligned; other shapes take plain.cu.
 */
#include "kernels/cuda/cuda.h"

#include "kernels/cuda/grouped_tiles.h"
#include "kernels/cuda/plain.h"
#include "kernels/cuda/ptx_sm90.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/vec.cuh"

#define STEP_K SL_TENSOR_MAP_BOX_COLUMNS
#define ROW_BYTES 128u /* of a stage: STEP_K bf16 */
#define W_STAGE_BYTES (SL_TILE_N * ROW_BYTES)
#define X_BOX_ROWS 64u
#define WARPGROUP 128u
#define CONSUMERS 2u
#define CONSUMER_WARPS (CONSUMERS * WARPGROUP / SL_WARP)
#define THREADS (WARPGROUP * (1 + CONSUMERS))
#define CONSUMER_N (SL_TILE_N / CONSUMERS) /* 64: wgmma's M */
#define EXPERTS_MAX 512u

/* Rows of x that are staged at a time, each with 64 outputs; the pitch keeps banks apart. */
#define STAGING_ROWS 64u
#define STAGING_PITCH (CONSUMER_N * 2 + 16)
#define STAGING_BYTES (STAGING_ROWS * STAGING_PITCH)

/* 65,536 registers: 128 x 40 for the copying warpgroup, 256 x 232 for the consumers. */
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232

#define SMALL_HEIGHT 64u
#define SMALL_STAGES 8u
#define LARGE_HEIGHT 256u
#define LARGE_STAGES 4u
#define SMALL_ROWS_PER_EXPERT 32u

typedef struct {
    sl_bf16_t *out;
    const int32_t *expert_begin;
    uint32_t experts, n, k_steps;
} grouped_args_t;

/* After the ring in shared memory. */
typedef struct {
    alignas(16) uint8_t staging[CONSUMERS][STAGING_BYTES];
    uint64_t full[SMALL_STAGES], empty[SMALL_STAGES];
    int32_t begin[EXPERTS_MAX + 1];
    uint32_t tile_end[EXPERTS_MAX];
} grouped_shared_t;

/* A place in the ring, and how often it has gone round (mod 2). */
typedef struct {
    uint32_t stage, parity;
} ring_place_t;

template <uint32_t STAGES> __device__ static __forceinline__ void ring_advance(ring_place_t *place)
{
    place->stage++;
    if (place->stage == STAGES) {
        place->stage = 0;
        place->parity ^= 1;
    }
}

/* By all threads: expert_begin into shared memory, and the experts' tiles counted up. Ends with
 * the block's barrier. */
template <uint32_t HEIGHT_MAX>
__device__ static void count_tiles(grouped_shared_t *shared, const grouped_args_t *args)
{
    for (uint32_t e = threadIdx.x; e <= args->experts; e += THREADS) {
        shared->begin[e] = args->expert_begin[e];
    }
    __syncthreads();
    if (threadIdx.x < SL_WARP) {
        const uint32_t lane = threadIdx.x, n_tiles = sl_grouped_n_tiles(args->n);
        uint32_t before = 0;
        for (uint32_t first = 0; first < args->experts; first += SL_WARP) {
            const uint32_t e = first + lane;
            uint32_t tiles = 0;
            if (e < args->experts) {
                const uint32_t rows = (uint32_t)(shared->begin[e + 1] - shared->begin[e]);
                tiles = sl_grouped_split(rows, HEIGHT_MAX).count * n_tiles;
            }
#pragma unroll
            for (uint32_t distance = 1; distance < SL_WARP; distance *= 2) {
                const uint32_t other = __shfl_up_sync(SL_FULL_MASK, tiles, distance);
                tiles += lane >= distance ? other : 0;
            }
            if (e < args->experts) {
                shared->tile_end[e] = before + tiles;
            }
            before += __shfl_sync(SL_FULL_MASK, tiles, SL_WARP - 1);
        }
    }
    __syncthreads();
}

template <uint32_t HEIGHT_MAX>
__device__ static __forceinline__ bool find_tile(const grouped_shared_t *shared,
                                                 const grouped_args_t *args, uint32_t index,
                                                 uint32_t *expert, sl_grouped_tile_t *tile)
{
    return sl_grouped_find(shared->begin, shared->tile_end, args->experts, HEIGHT_MAX, index,
                           expert, tile);
}

/* The copying thread's whole life. */
template <uint32_t HEIGHT_MAX, uint32_t STAGES>
__device__ static __forceinline__ void
produce(uint32_t ring, grouped_shared_t *shared, const grouped_args_t *args,
        const CUtensorMap *w_map, const CUtensorMap *x_map, const CUtensorMap *x_step_map)
{
    const uint32_t stage_bytes = W_STAGE_BYTES + HEIGHT_MAX * ROW_BYTES;
    ring_place_t place = {0, 0};
    sl_grouped_tile_t tile;
    uint32_t expert = 0;
    for (uint32_t index = blockIdx.x; find_tile<HEIGHT_MAX>(shared, args, index, &expert, &tile);
         index += gridDim.x) {
        for (uint32_t step = 0; step < args->k_steps; step++) {
            const uint32_t w_to = ring + place.stage * stage_bytes;
            const uint32_t x_to = w_to + W_STAGE_BYTES;
            const uint32_t full = sl_ptx_shared(&shared->full[place.stage]);
            const uint32_t k = step * STEP_K;
            sl_ptx_barrier_wait(sl_ptx_shared(&shared->empty[place.stage]), place.parity ^ 1);
            sl_ptx_barrier_arrive_expect(full, W_STAGE_BYTES + tile.height * ROW_BYTES);
            sl_ptx_tma_load_3d(w_to, w_map, full, k, tile.n, tile.expert);
            uint32_t row = 0;
            for (; row + X_BOX_ROWS <= tile.height; row += X_BOX_ROWS) {
                sl_ptx_tma_load_2d(x_to + row * ROW_BYTES, x_map, full, k, tile.row + row);
            }
            for (; row < tile.height; row += SL_TILE_ROWS_STEP) {
                sl_ptx_tma_load_2d(x_to + row * ROW_BYTES, x_step_map, full, k, tile.row + row);
            }
            ring_advance<STAGES>(&place);
        }
    }
}

/* The sums of one warpgroup, 64 outputs (from `n`) of each row of the tile, to global memory. */
template <int HEIGHT>
__device__ static __forceinline__ void store_sums(const float (&sums)[HEIGHT / 2], uint8_t *staging,
                                                  uint32_t barrier_id, const grouped_args_t *args,
                                                  const sl_grouped_tile_t *tile, uint32_t n)
{
    const uint32_t thread = threadIdx.x % WARPGROUP, warp = thread / SL_WARP;
    const uint32_t lane = threadIdx.x % SL_WARP;
    /* This lane's address of row i of block b (stmatrix): blocks 0, 1 are rows 0 to 7 of x and
     * outputs 0 to 7, 8 to 15 of the warp's 16; blocks 2, 3 the same of rows 8 to 15. */
    const uint32_t block = lane / 8, i = lane % 8;
    const uint32_t to =
        sl_ptx_shared(staging) + (block / 2 * 8 + i) * STAGING_PITCH + warp * 32 + block % 2 * 16;
    /* Reading back: eight threads a row, 16 bytes each. */
    const uint32_t piece = thread % 8, first_row = thread / 8;
    const bool in_n = n + piece * SL_VEC < args->n;
    sl_bf16_t *out = args->out + (size_t)tile->row * args->n + n + piece * SL_VEC;
#pragma unroll
    for (int chunk = 0; chunk < HEIGHT; chunk += STAGING_ROWS) {
        const int rows = HEIGHT - chunk < (int)STAGING_ROWS ? HEIGHT - chunk : (int)STAGING_ROWS;
#pragma unroll
        for (int row = 0; row < rows; row += 16) {
            const int at = (chunk + row) / 2; /* eight sums are 16 columns */
            sl_ptx_store_blocks_transposed(
                to + row * STAGING_PITCH, sl_pack2(sums[at], sums[at + 1]),
                sl_pack2(sums[at + 2], sums[at + 3]), sl_pack2(sums[at + 4], sums[at + 5]),
                sl_pack2(sums[at + 6], sums[at + 7]));
        }
        sl_ptx_named_barrier(barrier_id, WARPGROUP); /* staged, before it is read */
        for (uint32_t row = first_row; row < (uint32_t)rows; row += WARPGROUP / 8) {
            if (in_n && chunk + row < tile->rows) {
                sl_store16(out + (size_t)(chunk + row) * args->n,
                           sl_load16(staging + row * STAGING_PITCH + piece * 16));
            }
        }
        sl_ptx_named_barrier(barrier_id, WARPGROUP); /* read, before it is staged again */
    }
}

/* One tile's share of a consumer warpgroup. */
template <int HEIGHT, uint32_t HEIGHT_MAX, uint32_t STAGES>
__device__ static __forceinline__ void consume(uint32_t ring, grouped_shared_t *shared,
                                               const grouped_args_t *args,
                                               const sl_grouped_tile_t *tile, ring_place_t *place)
{
    const uint32_t stage_bytes = W_STAGE_BYTES + HEIGHT_MAX * ROW_BYTES;
    const uint32_t consumer = threadIdx.x / WARPGROUP - 1;
    const bool arrives = threadIdx.x % SL_WARP == 0;
    uint32_t last_empty = 0;
    /* Set although the first wgmma starts from nothing: registers that are never set stay taken all
     * around the tile loop, for every instance at once. */
    float sums[HEIGHT / 2] = {};
    for (uint32_t step = 0; step < args->k_steps; step++) {
        const uint32_t w_at = ring + place->stage * stage_bytes;
        const uint64_t w = sl_ptx_wgmma_operand(w_at + consumer * CONSUMER_N * ROW_BYTES);
        const uint64_t x = sl_ptx_wgmma_operand(w_at + W_STAGE_BYTES);
        sl_ptx_barrier_wait(sl_ptx_shared(&shared->full[place->stage]), place->parity);
        sl_ptx_wgmma_pin(sums);
        sl_ptx_wgmma_begin();
#pragma unroll
        for (uint32_t k = 0; k < STEP_K / 16; k++) {
            sl_ptx_wgmma<HEIGHT>(sums, w + k * SL_PTX_WGMMA_K_STEP, x + k * SL_PTX_WGMMA_K_STEP,
                                 step > 0 || k > 0);
        }
        sl_ptx_wgmma_commit();
        sl_ptx_wgmma_pin(sums);
        if (step > 0) {
            sl_ptx_wgmma_wait<1>();
            if (arrives) {
                sl_ptx_barrier_arrive(last_empty);
            }
        }
        last_empty = sl_ptx_shared(&shared->empty[place->stage]);
        ring_advance<STAGES>(place);
    }
    sl_ptx_wgmma_wait<0>();
    sl_ptx_wgmma_pin(sums);
    if (arrives) {
        sl_ptx_barrier_arrive(last_empty);
    }
    store_sums<HEIGHT>(sums, shared->staging[consumer], 1 + consumer, args, tile,
                       tile->n + consumer * CONSUMER_N);
}

#define CONSUME_CASE(HEIGHT)                                                                       \
    case HEIGHT:                                                                                   \
        if constexpr (HEIGHT <= HEIGHT_MAX) {                                                      \
            consume<HEIGHT, HEIGHT_MAX, STAGES>(ring, shared, args, &tile, &place);                \
        }                                                                                          \
        break;

/* A consumer thread's whole life. */
template <uint32_t HEIGHT_MAX, uint32_t STAGES>
__device__ static __forceinline__ void consume_all(uint32_t ring, grouped_shared_t *shared,
                                                   const grouped_args_t *args)
{
    ring_place_t place = {0, 0};
    sl_grouped_tile_t tile;
    uint32_t expert = 0;
    for (uint32_t index = blockIdx.x; find_tile<HEIGHT_MAX>(shared, args, index, &expert, &tile);
         index += gridDim.x) {
        switch (tile.height) {
            CONSUME_CASE(16)
            CONSUME_CASE(32)
            CONSUME_CASE(48)
            CONSUME_CASE(64)
            CONSUME_CASE(80)
            CONSUME_CASE(96)
            CONSUME_CASE(112)
            CONSUME_CASE(128)
            CONSUME_CASE(144)
            CONSUME_CASE(160)
            CONSUME_CASE(176)
            CONSUME_CASE(192)
            CONSUME_CASE(208)
            CONSUME_CASE(224)
            CONSUME_CASE(240)
            CONSUME_CASE(256)
        }
    }
}

template <uint32_t HEIGHT_MAX, uint32_t STAGES>
__global__ void __launch_bounds__(THREADS, 1)
    grouped_sm90(const __grid_constant__ CUtensorMap w_map,
                 const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap x_step_map, const grouped_args_t args)
{
    extern __shared__ uint8_t memory[];
    const uint32_t ring_bytes = STAGES * (W_STAGE_BYTES + HEIGHT_MAX * ROW_BYTES);
    /* The swizzle is a function of the address: atoms start at multiples of 1,024 bytes. */
    uint8_t *base = memory + (1024 - sl_ptx_shared(memory) % 1024) % 1024;
    grouped_shared_t *shared = reinterpret_cast<grouped_shared_t *>(base + ring_bytes);
    const uint32_t ring = sl_ptx_shared(base);
    if (threadIdx.x == 0) {
        for (uint32_t s = 0; s < STAGES; s++) {
            sl_ptx_barrier_init(sl_ptx_shared(&shared->full[s]), 1);
            sl_ptx_barrier_init(sl_ptx_shared(&shared->empty[s]), CONSUMER_WARPS);
        }
        sl_ptx_barrier_init_done();
        sl_ptx_tma_prefetch_map(&w_map);
        sl_ptx_tma_prefetch_map(&x_map);
        sl_ptx_tma_prefetch_map(&x_step_map);
    }
    count_tiles<HEIGHT_MAX>(shared, &args);
    if (threadIdx.x < WARPGROUP) {
        sl_ptx_registers_give_back<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            produce<HEIGHT_MAX, STAGES>(ring, shared, &args, &w_map, &x_map, &x_step_map);
        }
    } else {
        sl_ptx_registers_take<CONSUMER_REGISTERS>();
        consume_all<HEIGHT_MAX, STAGES>(ring, shared, &args);
    }
}

/* ---- host ---- */

/* A matrix [planes][rows][k], in boxes of `box_rows` x STEP_K; rank 2: without planes. */
static sl_status_t make_map(const void *matrix, uint32_t rank, uint32_t planes, uint32_t rows,
                            uint32_t k, uint32_t box_rows, CUtensorMap *map)
{
    const sl_tensor_map_t tensor = {
        matrix, rank, {k, rows, planes}, {1, k, (uint64_t)rows * k}, {STEP_K, box_rows, 1}};
    return sl_cuda_tensor_map(&tensor, "grouped_linear", map);
}

template <uint32_t HEIGHT_MAX, uint32_t STAGES>
static sl_status_t launch(sl_device_t *device, cudaStream_t stream, const sl_grouped_linear_t *p)
{
    const size_t shared_bytes = STAGES * (W_STAGE_BYTES + HEIGHT_MAX * ROW_BYTES) +
                                sizeof(grouped_shared_t) + 1024 /* alignment */;
    static_assert(STAGES <= SMALL_STAGES, "barriers");
    SL_ASSERT(shared_bytes <= device->smem_max_bytes);
    CUtensorMap w_map, x_map, x_step_map;
    SL_TRY(make_map(p->w, 3, p->experts, p->n, p->k, SL_TILE_N, &w_map));
    SL_TRY(make_map(p->x, 2, 1, p->max_rows, p->k, X_BOX_ROWS, &x_map));
    SL_TRY(make_map(p->x, 2, 1, p->max_rows, p->k, SL_TILE_ROWS_STEP, &x_step_map));
    SL_CUDA_TRY(cudaFuncSetAttribute(grouped_sm90<HEIGHT_MAX, STAGES>,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)shared_bytes),
                "grouped_linear");
    const grouped_args_t args = {(sl_bf16_t *)p->out, p->expert_begin, p->experts, p->n,
                                 sl_div_up(p->k, STEP_K)};
    uint64_t blocks = sl_grouped_tiles_max(p->max_rows, p->experts, p->n, HEIGHT_MAX);
    if (blocks > (uint64_t)device->sm_count) {
        blocks = (uint64_t)device->sm_count;
    }
    grouped_sm90<HEIGHT_MAX, STAGES>
        <<<(unsigned)blocks, THREADS, shared_bytes, stream>>>(w_map, x_map, x_step_map, args);
    SL_CUDA_LAUNCHED("grouped_linear");
    return SL_OK;
}

sl_status_t sl_cuda_grouped_linear(sl_device_t *device, sl_stream_t *stream,
                                   const sl_grouped_linear_t *p)
{
    if (p->max_rows == 0 || p->experts == 0) {
        return SL_OK;
    }
    SL_ASSERT(p->n > 0 && p->k > 0);
    cudaStream_t on = sl_cuda_enter(device, stream);
    bool fits = sl_vec_fits(p->x, p->k) && sl_vec_fits(p->w, p->k) && sl_vec_fits(p->out, p->n) &&
                p->experts <= EXPERTS_MAX;
    if (!fits) {
        sl_plain_product_t plain = {};
        plain.out = p->out;
        plain.x = p->x;
        plain.w = p->w;
        plain.row_begin = p->expert_begin;
        plain.rows = p->max_rows;
        plain.matrices = p->experts;
        plain.n = p->n;
        plain.k = p->k;
        plain.x_row_stride = p->k;
        plain.out_row_stride = p->n;
        return sl_cuda_plain_product(on, &plain, "grouped_linear");
    }
    if (p->max_rows / p->experts < SMALL_ROWS_PER_EXPERT) {
        return launch<SMALL_HEIGHT, SMALL_STAGES>(device, on, p);
    }
    return launch<LARGE_HEIGHT, LARGE_STAGES>(device, on, p);
}
