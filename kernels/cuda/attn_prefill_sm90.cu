/*
 * Unabsorbed attention of variable-length sequences, keys 128 + 64 wide and values 128 wide.
 *
 * One block a tile of 128 queries of one head, four warps of 32 queries each, two blocks a
 * multiprocessor: while one block's softmax runs, the other's products do. A block goes through
 * the keys it can see 64 at a time, from the last (where the causal mask cuts) to the first:
 *
 *     shared memory (88 KiB)                        per warp: 32 queries
 *     q      3 subtiles [128][64]   48 KiB          S  [32][64]   q . k, f32 registers
 *     keys   3 subtiles  [64][64]   24 KiB          P  = exp(S - max), bf16 registers
 *     values 2 subtiles  [64][64]   16 KiB          O  [32][128]  += P . v, f32 registers
 *
 * Keys and values have one buffer each, filled while the other is in use:
 *
 *     keys   j |== q.k ==|  copy j-1 ............|== q.k ==|
 *     values j | copy j  |softmax|=== P.v ===|   copy j-1  |softmax| ...
 *              ^         ^                   ^
 *              barrier   barrier             barrier: keys j-1 are there, values j are used up
 *
 * The third subtile of the keys is k_pe, which all heads share; it is never copied to every head in
 * memory. Scores stay unscaled; the scale and log2(e) go into the exponent's multiply-add.
 *
 * Order of blocks: a sequence's tiles with the most keys first, so that the last ones to run are
 * short; heads in groups whose keys and values fit in the L2 cache together.
 *
 * A query sees nothing of keys past its own, but a NaN in a key that some query of the same 32 sees
 * may reach the others: 0 times NaN.
 */
#include "kernels/cuda/attn_generic.cuh"
#include "kernels/cuda/attn_sm90.cuh"
#include "kernels/cuda/cuda.h"

enum {
    NOPE = 128,
    ROPE = 64,
    QK = NOPE + ROPE,
    V_DIM = 128,
    KV = NOPE + V_DIM,
    QUERIES = 128, /* of a tile */
    KEYS = 64,     /* of a step */
    WARP_ROWS = 32,
    THREADS = QUERIES / WARP_ROWS * 32,
    SEQUENCES_MAX = 500, /* of a launch: its arguments stay below 4 KiB */
};

/* Bytes of shared memory. */
enum {
    ROW = 128,
    Q_SUBTILE = QUERIES * ROW,
    KEY_SUBTILE = KEYS * ROW,
    Q_AT = 0,
    KEYS_AT = Q_AT + QK / 64 * Q_SUBTILE,
    VALUES_AT = KEYS_AT + QK / 64 * KEY_SUBTILE,
    SHARED_BYTES = VALUES_AT + V_DIM / 64 * KEY_SUBTILE,
};

typedef struct {
    sl_bf16_t *out;
    float *lse;
    const sl_bf16_t *q, *kv, *k_pe;
    const int32_t *q_begin, *k_begin;
    uint32_t sequences, heads, group_heads, k_pe_stride;
    uint32_t causal;
    float scale;
    uint32_t tile_begin[SEQUENCES_MAX + 1]; /* query tiles of the sequences before */
} prefill_args_t;

/* A block's work: queries [query0, query0 + QUERIES) of a sequence, those below `queries`. */
typedef struct {
    uint32_t head;
    int32_t query0, queries, keys;
    size_t first_query, first_key; /* of the sequence */
} prefill_tile_t;

__device__ static prefill_tile_t find_tile(const prefill_args_t &args, uint32_t index)
{
    uint32_t low = 0, high = args.sequences; /* tile_begin[low] <= wanted < tile_begin[high] */
    const uint32_t wanted = index / args.heads;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (args.tile_begin[middle] <= wanted) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const uint32_t tiles = args.tile_begin[low + 1] - args.tile_begin[low];
    const uint32_t local = index - args.tile_begin[low] * args.heads;
    const uint32_t head0 = local / (tiles * args.group_heads) * args.group_heads;
    const uint32_t group = min(args.group_heads, args.heads - head0);
    const uint32_t place = local - head0 * tiles;
    prefill_tile_t tile;
    tile.head = head0 + place % group;
    tile.query0 = (int32_t)((tiles - 1 - place / group) * QUERIES);
    tile.first_query = (size_t)args.q_begin[low];
    tile.first_key = (size_t)args.k_begin[low];
    tile.queries = args.q_begin[low + 1] - args.q_begin[low];
    tile.keys = args.k_begin[low + 1] - args.k_begin[low];
    return tile;
}

/* Query i of the sequence sees the first min(keys, first_seen + i) keys. */
__device__ static __forceinline__ int32_t first_seen(const prefill_args_t &args,
                                                     const prefill_tile_t &tile)
{
    return args.causal ? tile.keys - tile.queries + 1 : tile.keys;
}

/* Eight neighbouring threads copy a row of a subtile: 128 bytes of memory in one piece. */
__device__ static __forceinline__ void copy_queries(const prefill_args_t &args,
                                                    const prefill_tile_t &tile, uint32_t shared)
{
    const uint32_t row0 = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const uint32_t to = shared + Q_AT + row0 * ROW + ((chunk ^ (row0 % 8)) * 16);
#pragma unroll
    for (uint32_t i = 0; i < QUERIES * 8 / THREADS; i++) {
        const int32_t query = tile.query0 + (int32_t)(row0 + i * (THREADS / 8));
        const bool valid = query < tile.queries;
        const sl_bf16_t *from =
            args.q +
            ((tile.first_query + (size_t)(valid ? query : 0)) * args.heads + tile.head) * QK +
            chunk * 8;
#pragma unroll
        for (uint32_t s = 0; s < QK / 64; s++) {
            sl_copy_async(to + s * Q_SUBTILE + i * (THREADS / 8) * ROW, from + s * 64, valid);
        }
    }
}

/* A thread's place in the copies of keys and values: one chunk of every 16th row. Counted in
 * chunks, which 32 bits suffice for: addresses would cost registers that the products need. */
typedef struct {
    uint32_t kv, k_pe; /* 16-byte pieces from the arrays' begin to the row of the next copy */
    uint32_t to;
} copy_place_t;

__device__ static __forceinline__ copy_place_t copy_place(const prefill_args_t &args,
                                                          const prefill_tile_t &tile, int32_t key0,
                                                          uint32_t shared)
{
    const uint32_t row0 = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const size_t row = tile.first_key + (size_t)key0 + row0;
    copy_place_t place;
    place.kv = (uint32_t)((row * args.heads + tile.head) * (KV / 8) + chunk);
    place.k_pe = (uint32_t)(row * (args.k_pe_stride / 8) + chunk);
    place.to = shared + row0 * ROW + ((chunk ^ (row0 % 8)) * 16);
    return place;
}

__device__ static __forceinline__ void step_back(const prefill_args_t &args, copy_place_t *place)
{
    place->kv -= args.heads * (KV / 8 * KEYS);
    place->k_pe -= args.k_pe_stride / 8 * KEYS;
}

/* The step's keys, of which the first `left` exist: the rest become zeros, and nothing is read. */
__device__ static __forceinline__ void copy_keys(const prefill_args_t &args,
                                                 const copy_place_t &place, int32_t left)
{
#pragma unroll
    for (uint32_t i = 0; i < KEYS * 8 / THREADS; i++) {
        const uint32_t down = i * (THREADS / 8), at = place.to + KEYS_AT + down * ROW;
        const bool valid = (int32_t)(threadIdx.x / 8 + down) < left;
        const sl_bf16_t *nope = args.kv + (size_t)(place.kv + args.heads * (down * KV / 8)) * 8;
        sl_copy_async(at, nope, valid);
        sl_copy_async(at + KEY_SUBTILE, nope + 64, valid);
        sl_copy_async(at + 2 * KEY_SUBTILE,
                      args.k_pe + (size_t)(place.k_pe + args.k_pe_stride / 8 * down) * 8, valid);
    }
}

__device__ static __forceinline__ void copy_values(const prefill_args_t &args,
                                                   const copy_place_t &place, int32_t left)
{
#pragma unroll
    for (uint32_t i = 0; i < KEYS * 8 / THREADS; i++) {
        const uint32_t down = i * (THREADS / 8), at = place.to + VALUES_AT + down * ROW;
        const bool valid = (int32_t)(threadIdx.x / 8 + down) < left;
        const sl_bf16_t *value =
            args.kv + (size_t)(place.kv + args.heads * (down * KV / 8)) * 8 + NOPE;
        sl_copy_async(at, value, valid);
        sl_copy_async(at + KEY_SUBTILE, value + 64, valid);
    }
}

/* Everything below is of one warp and its 32 queries: [2] is of 16 rows, then tiles of 8 columns.
 */
typedef float scores_t[2][KEYS / 8][4];
typedef float sums_t[2][V_DIM / 8][4];

/* Of the four rows a thread holds parts of: [16-row half][row g or g + 8]. */
typedef struct {
    float max[2][2];  /* unscaled */
    float part[2][2]; /* this thread's part of the sum of weights */
} prefill_stats_t;

__device__ static __forceinline__ void multiply_keys(scores_t s, uint32_t q_at, uint32_t keys_at)
{
#pragma unroll
    for (uint32_t m = 0; m < 2; m++) {
#pragma unroll
        for (uint32_t n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                s[m][n][i] = 0;
            }
        }
    }
#pragma unroll 4 /* a subtile; unrolled altogether it spills */
    for (uint32_t k = 0; k < QK / 16; k++) {
        uint32_t a[2][4];
#pragma unroll
        for (uint32_t m = 0; m < 2; m++) {
            sl_load_blocks(a[m], ((q_at ^ (k % 4 * 32)) + k / 4 * Q_SUBTILE + m * 16 * ROW));
        }
#pragma unroll
        for (uint32_t n = 0; n < KEYS / 16; n++) {
            uint32_t b[4];
            sl_load_blocks(b, (keys_at ^ (k % 4 * 32)) + k / 4 * KEY_SUBTILE + n * 16 * ROW);
#pragma unroll
            for (uint32_t m = 0; m < 2; m++) {
                sl_mma(s[m][2 * n], a[m], b[0], b[1]);
                sl_mma(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* The step has `left` keys; the warp's first query sees `seen` of them, and so on. */
__device__ static __forceinline__ void mask(scores_t s, int32_t left, int32_t seen)
{
    seen += (int32_t)(threadIdx.x % 32 / 4);
    const int32_t column0 = (int32_t)(threadIdx.x % 4 * 2);
#pragma unroll
    for (int32_t n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (int32_t i = 0; i < 4; i++) {
#pragma unroll
            for (int32_t m = 0; m < 2; m++) {
                if (column0 + n * 8 + i % 2 >= min(left, seen + m * 16 + i / 2 * 8)) {
                    s[m][n][i] = -INFINITY;
                }
            }
        }
    }
}

/* Scores to weights relative to the new maximum; sums so far are brought to it. */
__device__ static __forceinline__ void soften(scores_t s, sums_t o, prefill_stats_t *stats,
                                              float scale_log2)
{
#pragma unroll
    for (uint32_t m = 0; m < 2; m++) {
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            float max = stats->max[m][h];
#pragma unroll
            for (uint32_t n = 0; n < KEYS / 8; n++) {
                max = fmaxf(max, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            }
            max = sl_quad_max(max);
            const float shift = max == -INFINITY ? 0 : max * scale_log2;
            const float correction = sl_exp2(stats->max[m][h] * scale_log2 - shift);
            float part = stats->part[m][h] * correction;
#pragma unroll
            for (uint32_t n = 0; n < KEYS / 8; n++) {
                const float a = sl_exp2(s[m][n][2 * h] * scale_log2 - shift);
                const float b = sl_exp2(s[m][n][2 * h + 1] * scale_log2 - shift);
                s[m][n][2 * h] = a;
                s[m][n][2 * h + 1] = b;
                part += a + b;
            }
            stats->max[m][h] = max;
            stats->part[m][h] = part;
#pragma unroll
            for (uint32_t n = 0; n < V_DIM / 8; n++) {
                o[m][n][2 * h] *= correction;
                o[m][n][2 * h + 1] *= correction;
            }
        }
    }
}

/* A C fragment of two column tiles is, in bf16, an A fragment 16 deep. */
__device__ static __forceinline__ void multiply_values(sums_t o, const scores_t p,
                                                       uint32_t values_at)
{
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; k++) {
        uint32_t a[2][4];
#pragma unroll
        for (uint32_t m = 0; m < 2; m++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const float *pair = &p[m][2 * k + i / 2][i % 2 * 2];
                a[m][i] = sl_pack2(pair[0], pair[1]);
            }
        }
#pragma unroll
        for (uint32_t n = 0; n < V_DIM / 16; n++) {
            uint32_t b[4];
            sl_load_blocks_transposed(b, (values_at ^ (n % 4 * 32)) + n / 4 * KEY_SUBTILE +
                                             k * 16 * ROW);
#pragma unroll
            for (uint32_t m = 0; m < 2; m++) {
                sl_mma(o[m][2 * n], a[m], b[0], b[1]);
                sl_mma(o[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* The warp's 32 rows of the result, through its own part of the queries' tile: in a warp's order
 * of fragments a store would be 4 bytes. */
__device__ static __forceinline__ void store_tile(const prefill_args_t &args,
                                                  const prefill_tile_t &tile, const sums_t o,
                                                  const prefill_stats_t &stats,
                                                  unsigned char *shared)
{
    const uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS;
#pragma unroll
    for (uint32_t m = 0; m < 2; m++) {
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            const uint32_t row = warp_row + m * 16 + h * 8 + lane / 4;
            const int32_t query = tile.query0 + (int32_t)row;
            const float sum = sl_quad_sum(stats.part[m][h]);
            const float inverse = sum == 0 ? 0 : 1 / sum;
#pragma unroll
            for (uint32_t n = 0; n < V_DIM / 8; n++) {
                const uint32_t at =
                    n / 8 * Q_SUBTILE + row * ROW + ((n % 8) ^ (row % 8)) * 16 + lane % 4 * 4;
                *reinterpret_cast<uint32_t *>(shared + Q_AT + at) =
                    sl_pack2(o[m][n][2 * h] * inverse, o[m][n][2 * h + 1] * inverse);
            }
            if (args.lse != NULL && lane % 4 == 0 && query < tile.queries) {
                args.lse[(tile.first_query + (size_t)query) * args.heads + tile.head] =
                    sum == 0 ? -INFINITY : stats.max[m][h] * args.scale + logf(sum);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < WARP_ROWS / 2; i++) {
        const uint32_t row = warp_row + i * 2 + lane / 16, chunk = lane % 16;
        const int32_t query = tile.query0 + (int32_t)row;
        const uint32_t at = chunk / 8 * Q_SUBTILE + row * ROW + ((chunk % 8) ^ (row % 8)) * 16;
        if (query < tile.queries) {
            sl_store16(args.out +
                           ((tile.first_query + (size_t)query) * args.heads + tile.head) * V_DIM +
                           chunk * 8,
                       sl_load16(shared + Q_AT + at));
        }
    }
}

static __global__ void __launch_bounds__(THREADS, 2)
    prefill_kernel(const __grid_constant__ prefill_args_t args)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t at = sl_shared_address(shared), lane = threadIdx.x % 32;
    const uint32_t warp_row = threadIdx.x / 32 * WARP_ROWS;
    const uint32_t q_at = sl_lane_address_a(at + Q_AT + warp_row * ROW, lane);
    const uint32_t keys_at = sl_lane_address_b(at + KEYS_AT, lane);
    const uint32_t values_at = sl_lane_address_a(at + VALUES_AT, lane);
    const prefill_tile_t tile = find_tile(args, blockIdx.x);

    sums_t o;
    prefill_stats_t stats;
#pragma unroll
    for (uint32_t m = 0; m < 2; m++) {
#pragma unroll
        for (uint32_t n = 0; n < V_DIM / 8; n++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                o[m][n][i] = 0;
            }
        }
        stats.max[m][0] = stats.max[m][1] = -INFINITY;
        stats.part[m][0] = stats.part[m][1] = 0;
    }

    /* From here on the step's first key is key0; what is counted from it moves along. */
    const int32_t seen0 = first_seen(args, tile);
    const int32_t last = min(tile.query0 + QUERIES, tile.queries) - 1;
    const int32_t tile_seen = max(0, min(tile.keys, seen0 + last));
    int32_t key0 = (tile_seen + KEYS - 1) / KEYS * KEYS - KEYS;
    int32_t left = tile.keys - key0;
    int32_t seen = seen0 + tile.query0 + (int32_t)warp_row - key0;
    copy_place_t place = copy_place(args, tile, key0, at);
    if (key0 >= 0) {
        copy_queries(args, tile, at);
        copy_keys(args, place, left);
        sl_copy_commit();
    }
    for (; key0 >= 0; key0 -= KEYS) {
        sl_copy_wait<0>();
        __syncthreads(); /* these keys are there; the values of the step before are used up */
        copy_values(args, place, left);
        sl_copy_commit();

        /* A warp whose queries all come before these keys has nothing to do with them. */
        const bool live = seen + (WARP_ROWS - 1) > 0;
        scores_t s;
        if (live) {
            multiply_keys(s, q_at, keys_at);
        }
        sl_copy_wait<0>();
        __syncthreads(); /* the values are there; the keys are used up */
        step_back(args, &place);
        if (key0 > 0) {
            copy_keys(args, place, KEYS);
            sl_copy_commit();
        }
        if (live) {
            if (min(left, seen) < KEYS) {
                mask(s, left, seen);
            }
            soften(s, o, &stats, args.scale * SL_LOG2_E);
            multiply_values(o, s, values_at);
        }
        left += KEYS;
        seen += KEYS;
    }
    store_tile(args, find_tile(args, blockIdx.x), o, stats, shared);
}

/* ---- any other geometry ---- */

typedef struct {
    sl_attn_prefill_t p;
    size_t queries;
} generic_args_t;

struct prefill_locate {
    const sl_bf16_t *kv, *k_pe;
    size_t row_stride, k_pe_stride;
    uint32_t nope;

    __device__ sl_generic_key_t operator()(uint32_t j) const
    {
        const sl_bf16_t *row = kv + j * row_stride;
        return {row, k_pe + j * k_pe_stride, row + nope};
    }
};

static __global__ void __launch_bounds__(SL_GENERIC_WARPS *SL_WARP)
    prefill_generic_kernel(const __grid_constant__ generic_args_t args)
{
    extern __shared__ __align__(1024) float shared_floats[];
    const sl_attn_prefill_t &p = args.p;
    const uint32_t warp = threadIdx.x / SL_WARP;
    const size_t item = (size_t)blockIdx.x * SL_GENERIC_WARPS + warp;
    if (item >= args.queries * p.heads) {
        return;
    }
    const int32_t query = (int32_t)(item / p.heads);
    const uint32_t head = (uint32_t)(item % p.heads);
    uint32_t low = 0, high = p.sequences; /* q_begin[low] <= query < q_begin[high] */
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (p.q_begin[middle] <= query) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const int32_t keys = p.k_begin[low + 1] - p.k_begin[low];
    const int32_t after = p.q_begin[low + 1] - query; /* this query and those after it */
    const int32_t seen = max(0, p.causal ? keys - after + 1 : keys);
    const size_t key0 = (size_t)p.k_begin[low], kv_width = p.nope + p.v_dim;
    const prefill_locate locate = {(const sl_bf16_t *)p.kv + (key0 * p.heads + head) * kv_width,
                                   (const sl_bf16_t *)p.k_pe + key0 * p.k_pe_stride,
                                   p.heads * kv_width, p.k_pe_stride, p.nope};
    const sl_bf16_t *q = (const sl_bf16_t *)p.q + item * (p.nope + p.rope);
    const sl_generic_query_t generic = {q,
                                        q + p.nope,
                                        (sl_bf16_t *)p.out + item * p.v_dim,
                                        p.lse != NULL ? p.lse + item : NULL,
                                        p.scale,
                                        p.nope,
                                        p.rope,
                                        p.v_dim,
                                        (uint32_t)seen};
    sl_generic_attend(generic, locate,
                      shared_floats + warp * sl_generic_floats(p.nope, p.rope, p.v_dim));
}

static sl_status_t launch_generic(sl_device_t *device, cudaStream_t on, const sl_attn_prefill_t *p)
{
    const generic_args_t args = {*p, (size_t)p->host_q_begin[p->sequences]};
    const size_t blocks = (args.queries * p->heads + SL_GENERIC_WARPS - 1) / SL_GENERIC_WARPS;
    const size_t bytes =
        SL_GENERIC_WARPS * sl_generic_floats(p->nope, p->rope, p->v_dim) * sizeof(float);
    if (bytes > device->smem_max_bytes) {
        return sl_error(
            SL_ERR_UNSUPPORTED,
            "cuda attn_prefill: nope %u, rope %u, v %u need %zu bytes of shared memory; "
            "a block has %zu",
            p->nope, p->rope, p->v_dim, bytes, device->smem_max_bytes);
    }
    SL_ASSERT(blocks <= INT32_MAX);
    SL_CUDA_TRY(cudaFuncSetAttribute(prefill_generic_kernel,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                "attn_prefill");
    prefill_generic_kernel<<<(uint32_t)blocks, SL_GENERIC_WARPS * SL_WARP, bytes, on>>>(args);
    SL_CUDA_LAUNCHED("attn_prefill");
    return SL_OK;
}

/* ---- launches ---- */

/* Heads whose keys and values of the longest sequence fill no more than half of the L2 cache. */
static uint32_t group_heads(const sl_device_t *device, const sl_attn_prefill_t *p, uint32_t first,
                            uint32_t count)
{
    size_t keys = 1;
    for (uint32_t s = first; s < first + count; s++) {
        const size_t length = (size_t)(p->host_k_begin[s + 1] - p->host_k_begin[s]);
        keys = length > keys ? length : keys;
    }
    const size_t fit = device->l2_bytes / 2 / (keys * KV * sizeof(sl_bf16_t));
    return fit >= p->heads ? p->heads : fit < 8 ? (p->heads < 8 ? p->heads : 8) : (uint32_t)fit;
}

/* Sequences [first, first + count) in one launch. */
static sl_status_t launch_sequences(sl_device_t *device, cudaStream_t on,
                                    const sl_attn_prefill_t *p, uint32_t first, uint32_t count)
{
    prefill_args_t args = {
        (sl_bf16_t *)p->out,
        p->lse,
        (const sl_bf16_t *)p->q,
        (const sl_bf16_t *)p->kv,
        (const sl_bf16_t *)p->k_pe,
        p->q_begin + first,
        p->k_begin + first,
        count,
        p->heads,
        group_heads(device, p, first, count),
        p->k_pe_stride,
        p->causal,
        p->scale,
        {0},
    };
    for (uint32_t s = 0; s < count; s++) {
        const int32_t *begin = p->host_q_begin + first + s;
        args.tile_begin[s + 1] =
            args.tile_begin[s] + sl_div_up((uint32_t)(begin[1] - begin[0]), QUERIES);
    }
    const size_t blocks = (size_t)args.tile_begin[count] * p->heads;
    if (blocks == 0) {
        return SL_OK;
    }
    SL_ASSERT(blocks <= INT32_MAX);
    SL_CUDA_TRY(cudaFuncSetAttribute(prefill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     SHARED_BYTES),
                "attn_prefill");
    prefill_kernel<<<(uint32_t)blocks, THREADS, SHARED_BYTES, on>>>(args);
    SL_CUDA_LAUNCHED("attn_prefill");
    return SL_OK;
}

static bool fits_tiles(const sl_attn_prefill_t *p)
{
    return p->nope == NOPE && p->rope == ROPE && p->v_dim == V_DIM && sl_vec_fits(p->q, 0) &&
           sl_vec_fits(p->kv, 0) && sl_vec_fits(p->out, 0) && sl_vec_fits(p->k_pe, p->k_pe_stride);
}

extern "C" sl_status_t sl_cuda_attn_prefill(sl_device_t *device, sl_stream_t *stream,
                                            const sl_attn_prefill_t *p)
{
    if (p->sequences == 0 || p->heads == 0 || p->host_q_begin[p->sequences] == 0) {
        return SL_OK;
    }
    SL_ASSERT(p->scale > 0);
    cudaStream_t on = sl_cuda_enter(device, stream);
    if (!fits_tiles(p)) {
        return launch_generic(device, on, p);
    }
    const uint64_t keys = (uint64_t)p->host_k_begin[p->sequences] + KEYS;
    SL_ASSERT(keys * p->heads * (KV / 8) <= UINT32_MAX && keys * p->k_pe_stride / 8 <= UINT32_MAX);
    for (uint32_t first = 0; first < p->sequences; first += SEQUENCES_MAX) {
        const uint32_t left = p->sequences - first;
        SL_TRY(launch_sequences(device, on, p, first,
                                left < SEQUENCES_MAX ? left : (uint32_t)SEQUENCES_MAX));
    }
    return SL_OK;
}
