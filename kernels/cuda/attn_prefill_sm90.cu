/*
 * Unabsorbed attention of variable-length sequences, keys 128 + 64 wide and values 128 wide.
 *
 * A tile is 128 queries of one head; a block goes through the keys it can see 128 at a time, from
 * the last (where the causal mask cuts) to the first. One block a multiprocessor, three warpgroups:
 *
 *     warpgroup 0, one thread    takes tiles and copies (TMA)
 *     warpgroups 1 and 2         64 queries each:
 *                                  S [64][128]  q . k          f32 registers
 *                                  P            exp(S - max)   bf16 registers
 *                                  O [64][128]  += P . v       f32 registers
 *
 *     shared memory (208 KiB)
 *     q      3 subtiles [128][64]           48 KiB
 *     keys   3 subtiles [128][64], twice    96 KiB    the third subtile is k_pe, which all heads
 *     values 2 subtiles [128][64], twice    64 KiB    share and memory holds once
 *
 * The tensor cores are to have work all the time. A warpgroup issues the next step's q . k together
 * with this step's P . v; and the two take turns: while the products of one run, the softmax of the
 * other does. (Its softmax could begin while its own P . v runs, but ptxas puts the wait for that
 * first; held back, it was no faster.)
 *
 *     warpgroup 1  | q.k j-1, P.v j |  softmax j-1  | q.k j-2, P.v j-1 |  softmax j-2 ...
 *     warpgroup 2  |   softmax j    | q.k j-1, P.v j |   softmax j-1   | q.k j-2 ...
 *
 *     q_full         the tile's description and its queries are there; 0 bytes without keys
 *     q_empty        both warpgroups have multiplied with them for the last time (8 warps arrive)
 *     keys_full[s], keys_empty[s], values_full[s], values_empty[s]    likewise, of a stage
 *
 * Tiles are taken from a counter, so that blocks with short ones take more; the copying thread runs
 * ahead over tile ends. Order: a sequence's tiles with the most keys first, so that the last ones
 * to run are short; heads in groups whose keys and values fit in the L2 cache together.
 *
 * Scores stay unscaled; the scale and log2(e) go into the exponent's multiply-add. Copies know no
 * sequences: past a tile's last visible key there are other keys or another sequence's. Their
 * scores are masked; their values are set to zero, for 0 times NaN is no zero. A NaN in a key that
 * some query of a tile sees may reach the tile's others.
 */
#include "kernels/cuda/attn_generic.cuh"
#include "kernels/cuda/attn_sm90.cuh"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/ptx_sm90.cuh"
#include "kernels/cuda/tensor_map.h"

enum {
    NOPE = 128,
    ROPE = 64,
    QK = NOPE + ROPE,
    V_DIM = 128,
    KV = NOPE + V_DIM,
    QUERIES = 128, /* of a tile */
    KEYS = 128,    /* of a step */
    STAGES = 2,
    WARPGROUP = 128,
    CONSUMERS = 2,
    CONSUMER_WARPS = CONSUMERS * WARPGROUP / 32,
    CONSUMER_ROWS = QUERIES / CONSUMERS, /* 64: wgmma's M */
    WARP_ROWS = 16,
    THREADS = (1 + CONSUMERS) * WARPGROUP,
    SEQUENCES_MAX = 500, /* of a launch: its arguments stay below 4 KiB */
};

/* 65,536 registers: 128 x 40 for the copying warpgroup, 256 x 232 for the consumers. */
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232

/* Bytes of shared memory. */
enum {
    SUBTILE = 128 * 128, /* queries, keys or values, 64 columns of them */
    Q_BYTES = QK / 64 * SUBTILE,
    KEYS_BYTES = QK / 64 * SUBTILE,
    VALUES_BYTES = V_DIM / 64 * SUBTILE,
    Q_AT = 0,
    KEYS_AT = Q_AT + Q_BYTES,
    VALUES_AT = KEYS_AT + STAGES * KEYS_BYTES,
    TILES_BYTES = VALUES_AT + STAGES * VALUES_BYTES,
};

/* Barriers of some warps. */
enum { BARRIER_CLEARED = 1, BARRIER_TURN /* and the next: one a consumer */ };

typedef struct {
    sl_bf16_t *out;
    float *lse;
    const int32_t *q_begin, *k_begin;
    uint32_t *next_tile; /* zero at the launch */
    uint32_t tiles, sequences, heads, group_heads;
    uint32_t causal;
    float scale;
    uint32_t tile_begin[SEQUENCES_MAX + 1]; /* query tiles of the sequences before */
} prefill_args_t;

/* Queries [query0, query0 + QUERIES) of a sequence, those below `queries`. */
typedef struct {
    uint32_t head, first_query, first_key; /* the latter two of the sequence */
    int32_t query0, queries;
    int32_t seen;      /* keys that query0 sees; may be below 0 */
    int32_t last_seen; /* that any of the tile's queries sees */
    uint32_t over;     /* there is no such tile, nor a further one */
} prefill_tile_t;

/* After the tiles in shared memory. */
typedef struct {
    uint64_t q_full, q_empty;
    uint64_t keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
    prefill_tile_t tile;
} prefill_shared_t;

#define SHARED_BYTES (TILES_BYTES + sizeof(prefill_shared_t) + 1024 /* alignment */)

/* A place in the rings of keys and of values, which go together. */
typedef struct {
    uint32_t stage, parity;
} place_t;

__device__ static __forceinline__ place_t place_after(place_t place)
{
    place.stage ^= 1;
    place.parity ^= place.stage == 0;
    return place;
}

__device__ static __forceinline__ int32_t steps_of(const prefill_tile_t &tile)
{
    return (tile.last_seen + KEYS - 1) / KEYS;
}

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
    tile.first_query = (uint32_t)args.q_begin[low];
    tile.first_key = (uint32_t)args.k_begin[low];
    tile.queries = args.q_begin[low + 1] - args.q_begin[low];
    const int32_t keys = args.k_begin[low + 1] - args.k_begin[low];
    tile.seen = args.causal ? keys - tile.queries + 1 + tile.query0 : keys;
    const int32_t last = args.causal ? min(QUERIES, tile.queries - tile.query0) - 1 : 0;
    tile.last_seen = max(0, min(keys, tile.seen + last));
    return tile;
}

/* ---- the copying thread ---- */

__device__ static __forceinline__ void copy_step(uint32_t at, prefill_shared_t *shared,
                                                 const prefill_tile_t &tile, uint32_t key,
                                                 place_t place, const CUtensorMap *kv_map,
                                                 const CUtensorMap *k_pe_map)
{
    const uint32_t keys_at = at + KEYS_AT + place.stage * KEYS_BYTES;
    const uint32_t values_at = at + VALUES_AT + place.stage * VALUES_BYTES;
    const uint32_t keys_full = sl_ptx_shared(&shared->keys_full[place.stage]);
    const uint32_t values_full = sl_ptx_shared(&shared->values_full[place.stage]);
    sl_ptx_barrier_wait(sl_ptx_shared(&shared->keys_empty[place.stage]), place.parity ^ 1);
    sl_ptx_barrier_arrive_expect(keys_full, KEYS_BYTES);
#pragma unroll
    for (uint32_t s = 0; s < NOPE / 64; s++) {
        sl_ptx_tma_load_3d(keys_at + s * SUBTILE, kv_map, keys_full, s * 64, tile.head, key);
    }
    sl_ptx_tma_load_2d(keys_at + NOPE / 64 * SUBTILE, k_pe_map, keys_full, 0, key);
    sl_ptx_barrier_wait(sl_ptx_shared(&shared->values_empty[place.stage]), place.parity ^ 1);
    sl_ptx_barrier_arrive_expect(values_full, VALUES_BYTES);
#pragma unroll
    for (uint32_t s = 0; s < V_DIM / 64; s++) {
        sl_ptx_tma_load_3d(values_at + s * SUBTILE, kv_map, values_full, NOPE + s * 64, tile.head,
                           key);
    }
}

__device__ static __forceinline__ void produce(const prefill_args_t &args, uint32_t at,
                                               prefill_shared_t *shared, const CUtensorMap *q_map,
                                               const CUtensorMap *kv_map,
                                               const CUtensorMap *k_pe_map)
{
    const uint32_t q_full = sl_ptx_shared(&shared->q_full);
    const uint32_t q_empty = sl_ptx_shared(&shared->q_empty);
    place_t place = {0, 0};
    for (uint32_t turn = 0;; turn++) {
        const uint32_t index = atomicAdd(args.next_tile, 1);
        const bool over = index >= args.tiles;
        prefill_tile_t tile = find_tile(args, over ? 0 : index);
        const int32_t steps = over ? 0 : steps_of(tile);
        tile.over = over;
        sl_ptx_barrier_wait(q_empty, (turn & 1) ^ 1);
        shared->tile = tile;
        if (steps == 0) {
            sl_ptx_barrier_arrive(q_full);
        } else {
            sl_ptx_barrier_arrive_expect(q_full, Q_BYTES);
#pragma unroll
            for (uint32_t s = 0; s < QK / 64; s++) {
                sl_ptx_tma_load_3d(at + Q_AT + s * SUBTILE, q_map, q_full, s * 64, tile.head,
                                   tile.first_query + (uint32_t)tile.query0);
            }
        }
        if (over) {
            return;
        }
        for (int32_t step = steps - 1; step >= 0; step--) {
            copy_step(at, shared, tile, tile.first_key + (uint32_t)(step * KEYS), place, kv_map,
                      k_pe_map);
            place = place_after(place);
        }
    }
}

/* ---- a consumer warpgroup: 64 queries, those of a warp 16 in a row ---- */

/* As sl_ptx_wgmma() says: rows l / 4 and l / 4 + 8 of the warp's, by [h]. */
typedef float scores_t[KEYS / 2];
typedef float sums_t[V_DIM / 2];
typedef uint32_t weights_t[KEYS / 4];

typedef struct {
    float max[2];  /* unscaled */
    float part[2]; /* this thread's part of the sum of weights */
} prefill_stats_t;

__device__ static __forceinline__ void multiply_keys(scores_t &s, uint32_t q_at, uint32_t keys_at)
{
    const uint64_t q = sl_ptx_wgmma_operand(q_at), keys = sl_ptx_wgmma_operand(keys_at);
#pragma unroll
    for (uint32_t k = 0; k < QK / 16; k++) {
        const uint32_t on = k / 4 * (SUBTILE / 16) + k % 4 * SL_PTX_WGMMA_K_STEP;
        sl_ptx_wgmma<KEYS>(s, q + on, keys + on, k > 0);
    }
    sl_ptx_wgmma_commit();
}

__device__ static __forceinline__ void multiply_values(sums_t &o, const weights_t &p,
                                                       uint32_t values_at)
{
    const uint64_t values = sl_ptx_wgmma_rows_operand(values_at, SUBTILE);
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; k++) {
        sl_ptx_wgmma_rows(o, &p[4 * k], values + k * SL_PTX_WGMMA_ROWS_STEP);
    }
    sl_ptx_wgmma_commit();
}

/* Of the step's keys the tile sees `left`, the warp's first query `seen`, the next one more. */
__device__ static __forceinline__ void mask(scores_t &s, int32_t left, int32_t seen)
{
    seen += (int32_t)(threadIdx.x % 32 / 4);
    const int32_t column0 = (int32_t)(threadIdx.x % 4 * 2);
#pragma unroll
    for (int32_t i = 0; i < KEYS / 2; i++) {
        const int32_t column = column0 + i / 4 * 8 + i % 2;
        if (column >= min(left, seen + i / 2 % 2 * 8)) {
            s[i] = -INFINITY;
        }
    }
}

/* Scores to weights relative to the new maximum; what sums so far must be multiplied by. */
__device__ static __forceinline__ void soften(scores_t &s, prefill_stats_t *stats,
                                              float correction[2], float scale_log2)
{
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        float max = stats->max[h];
#pragma unroll
        for (uint32_t n = 0; n < KEYS / 8; n++) {
            max = fmaxf(max, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
        }
        max = sl_quad_max(max);
        const float shift = max == -INFINITY ? 0 : max * scale_log2;
        correction[h] = sl_exp2(stats->max[h] * scale_log2 - shift);
        float part = stats->part[h] * correction[h];
#pragma unroll
        for (uint32_t n = 0; n < KEYS / 8; n++) {
            const float a = sl_exp2(s[4 * n + 2 * h] * scale_log2 - shift);
            const float b = sl_exp2(s[4 * n + 2 * h + 1] * scale_log2 - shift);
            s[4 * n + 2 * h] = a;
            s[4 * n + 2 * h + 1] = b;
            part += a + b;
        }
        stats->max[h] = max;
        stats->part[h] = part;
    }
}

__device__ static __forceinline__ void pack_weights(weights_t &p, const scores_t &s)
{
#pragma unroll
    for (uint32_t i = 0; i < KEYS / 4; i++) {
        p[i] = sl_pack2(s[2 * i], s[2 * i + 1]);
    }
}

/* As sl_ptx_wgmma_pin(): not written before products that read them have been waited for. */
__device__ static __forceinline__ void pin_weights(weights_t &p)
{
#pragma unroll
    for (uint32_t i = 0; i < KEYS / 4; i++) {
        asm volatile("" : "+r"(p[i])::"memory");
    }
}

__device__ static __forceinline__ void correct(sums_t &o, const float correction[2])
{
#pragma unroll
    for (uint32_t i = 0; i < V_DIM / 2; i++) {
        o[i] *= correction[i / 2 % 2];
    }
}

/* Zeros for the values past the first `left`, by both consumers. */
__device__ static __forceinline__ void clear_values(uint32_t values_at, int32_t left)
{
    const int32_t thread = (int32_t)threadIdx.x - WARPGROUP;
    for (int32_t i = left * 8 + thread; i < KEYS * 8; i += CONSUMERS * WARPGROUP) {
#pragma unroll
        for (uint32_t s = 0; s < V_DIM / 64; s++) {
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values_at + s * SUBTILE +
                                                                          (uint32_t)i * 16),
                         "r"(0)
                         : "memory");
        }
    }
    sl_ptx_stores_done();
    sl_ptx_named_barrier(BARRIER_CLEARED, CONSUMERS * WARPGROUP);
}

__device__ static __forceinline__ void wait_turn(uint32_t consumer)
{
    sl_ptx_named_barrier(BARRIER_TURN + consumer, CONSUMERS * WARPGROUP);
}

__device__ static __forceinline__ void pass_turn(uint32_t consumer)
{
    sl_ptx_named_arrive(BARRIER_TURN + (consumer ^ 1), CONSUMERS * WARPGROUP);
}

/* By one lane of each warp, once all of them have waited for their products. */
__device__ static __forceinline__ void release(uint64_t *barrier)
{
    if (threadIdx.x % 32 == 0) {
        sl_ptx_barrier_arrive(sl_ptx_shared(barrier));
    }
}

/* Read by the lane that will release it. */
__device__ static __forceinline__ prefill_tile_t take_tile(const prefill_shared_t *shared)
{
    enum { WORDS = sizeof(prefill_tile_t) / 4 };
    const uint32_t *from = reinterpret_cast<const uint32_t *>(&shared->tile);
    uint32_t words[WORDS];
#pragma unroll
    for (uint32_t i = 0; i < WORDS; i++) {
        words[i] = __shfl_sync(SL_FULL_MASK, threadIdx.x % 32 == 0 ? from[i] : 0, 0);
    }
    prefill_tile_t tile;
    memcpy(&tile, words, sizeof(tile));
    return tile;
}

/* 0 where no key is seen, whatever the values of other queries' keys have left there. */
__device__ static __forceinline__ uint32_t scaled_pair(const float *sums, float inverse)
{
    return inverse == 0 ? 0 : sl_pack2(sums[0] * inverse, sums[1] * inverse);
}

/* Neighbouring lanes swap so that each stores 8 bytes, and four of them 32 in one piece. */
__device__ static __forceinline__ void store_rows(const prefill_args_t &args,
                                                  const prefill_tile_t &tile, const sums_t &o,
                                                  const prefill_stats_t &stats, uint32_t row0)
{
    const uint32_t lane = threadIdx.x % 32, odd = lane % 2;
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        const float sum = sl_quad_sum(stats.part[h]);
        const float inverse = sum == 0 ? 0 : 1 / sum;
        const int32_t query = tile.query0 + (int32_t)(row0 + lane / 4 + 8 * h);
        const size_t row = ((size_t)tile.first_query + (size_t)query) * args.heads + tile.head;
        sl_bf16_t *to = args.out + row * V_DIM + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
        for (uint32_t n = 0; n < V_DIM / 8; n += 2) {
            const float *even = &o[4 * n + 2 * h], *next = even + 4;
            const uint32_t a = scaled_pair(even, inverse), b = scaled_pair(next, inverse);
            const uint32_t got = __shfl_xor_sync(SL_FULL_MASK, odd ? a : b, 1);
            if (query < tile.queries) {
                *reinterpret_cast<uint2 *>(to + n * 8) =
                    odd ? make_uint2(got, b) : make_uint2(a, got);
            }
        }
        if (args.lse != NULL && lane % 4 == 0 && query < tile.queries) {
            args.lse[row] = sum == 0 ? -INFINITY : stats.max[h] * args.scale + logf(sum);
        }
    }
}

/* The tile's steps, of which there is at least one. The warp's rows begin at `row0`. */
__device__ static __forceinline__ void attend(const prefill_args_t &args,
                                              const prefill_tile_t &tile, uint32_t at,
                                              prefill_shared_t *shared, uint32_t consumer,
                                              uint32_t row0, place_t *place_p, sums_t &o,
                                              prefill_stats_t *stats)
{
    const float scale_log2 = args.scale * SL_LOG2_E;
    const uint32_t q_at = at + Q_AT + consumer * CONSUMER_ROWS * SL_ROW_BYTES;
    const int32_t steps = steps_of(tile);
    int32_t left = tile.last_seen - (steps - 1) * KEYS; /* counted from the step's first key */
    int32_t seen = tile.seen + (int32_t)row0 - (steps - 1) * KEYS;
    place_t place = *place_p;
    scores_t s;
    weights_t p;
    float correction[2];

    sl_ptx_barrier_wait(sl_ptx_shared(&shared->keys_full[place.stage]), place.parity);
    wait_turn(consumer);
    sl_ptx_wgmma_begin();
    multiply_keys(s, q_at, at + KEYS_AT + place.stage * KEYS_BYTES);
    pass_turn(consumer);
    if (left < KEYS) {
        sl_ptx_barrier_wait(sl_ptx_shared(&shared->values_full[place.stage]), place.parity);
        clear_values(at + VALUES_AT + place.stage * VALUES_BYTES, left);
    }
    sl_ptx_wgmma_wait<0>();
    sl_ptx_wgmma_pin(s);
    release(&shared->keys_empty[place.stage]);
    if (min(left, seen) < KEYS) {
        mask(s, left, seen);
    }
    soften(s, stats, correction, scale_log2);
    pack_weights(p, s);

    for (int32_t step = steps - 2; step >= 0; step--) {
        const place_t next = place_after(place);
        left += KEYS;
        seen += KEYS;
        sl_ptx_barrier_wait(sl_ptx_shared(&shared->keys_full[next.stage]), next.parity);
        wait_turn(consumer);
        sl_ptx_wgmma_pin(s);
        sl_ptx_wgmma_pin(o);
        sl_ptx_wgmma_begin();
        multiply_keys(s, q_at, at + KEYS_AT + next.stage * KEYS_BYTES);
        sl_ptx_barrier_wait(sl_ptx_shared(&shared->values_full[place.stage]), place.parity);
        multiply_values(o, p, at + VALUES_AT + place.stage * VALUES_BYTES);
        pass_turn(consumer);
        sl_ptx_wgmma_wait<1>();
        sl_ptx_wgmma_pin(s);
        release(&shared->keys_empty[next.stage]);
        if (min(left, seen) < KEYS) {
            mask(s, left, seen);
        }
        soften(s, stats, correction, scale_log2);
        sl_ptx_wgmma_wait<0>();
        sl_ptx_wgmma_pin(o);
        pin_weights(p);
        release(&shared->values_empty[place.stage]);
        correct(o, correction);
        pack_weights(p, s);
        place = next;
    }

    release(&shared->q_empty);
    sl_ptx_barrier_wait(sl_ptx_shared(&shared->values_full[place.stage]), place.parity);
    sl_ptx_wgmma_pin(o);
    sl_ptx_wgmma_begin();
    multiply_values(o, p, at + VALUES_AT + place.stage * VALUES_BYTES);
    sl_ptx_wgmma_wait<0>();
    sl_ptx_wgmma_pin(o);
    release(&shared->values_empty[place.stage]);
    *place_p = place_after(place);
}

__device__ static __forceinline__ void consume(const prefill_args_t &args, uint32_t at,
                                               prefill_shared_t *shared)
{
    const uint32_t consumer = threadIdx.x / WARPGROUP - 1;
    const uint32_t row0 = threadIdx.x % WARPGROUP / 32 * WARP_ROWS + consumer * CONSUMER_ROWS;
    place_t place = {0, 0};
    if (consumer == 1) {
        pass_turn(consumer); /* the first turn is the other one's */
    }
    for (uint32_t turn = 0;; turn++) {
        sl_ptx_barrier_wait(sl_ptx_shared(&shared->q_full), turn & 1);
        const prefill_tile_t tile = take_tile(shared);
        if (tile.over) {
            return;
        }
        sums_t o = {};
        prefill_stats_t stats = {{-INFINITY, -INFINITY}, {0, 0}};
        if (tile.last_seen > 0) {
            attend(args, tile, at, shared, consumer, row0, &place, o, &stats);
        } else {
            release(&shared->q_empty);
        }
        store_rows(args, tile, o, stats, row0);
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap kv_map,
                   const __grid_constant__ CUtensorMap k_pe_map,
                   const __grid_constant__ prefill_args_t args)
{
    extern __shared__ unsigned char memory[];
    /* The swizzle is a function of the address: atoms start at multiples of 1,024 bytes. */
    unsigned char *base = memory + (1024 - sl_ptx_shared(memory) % 1024) % 1024;
    prefill_shared_t *shared = reinterpret_cast<prefill_shared_t *>(base + TILES_BYTES);
    const uint32_t at = sl_ptx_shared(base);
    if (threadIdx.x == 0) {
        sl_ptx_barrier_init(sl_ptx_shared(&shared->q_full), 1);
        sl_ptx_barrier_init(sl_ptx_shared(&shared->q_empty), CONSUMER_WARPS);
        for (uint32_t s = 0; s < STAGES; s++) {
            sl_ptx_barrier_init(sl_ptx_shared(&shared->keys_full[s]), 1);
            sl_ptx_barrier_init(sl_ptx_shared(&shared->values_full[s]), 1);
            sl_ptx_barrier_init(sl_ptx_shared(&shared->keys_empty[s]), CONSUMER_WARPS);
            sl_ptx_barrier_init(sl_ptx_shared(&shared->values_empty[s]), CONSUMER_WARPS);
        }
        sl_ptx_barrier_init_done();
        sl_ptx_tma_prefetch_map(&q_map);
        sl_ptx_tma_prefetch_map(&kv_map);
        sl_ptx_tma_prefetch_map(&k_pe_map);
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        sl_ptx_registers_give_back<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            produce(args, at, shared, &q_map, &kv_map, &k_pe_map);
        }
    } else {
        sl_ptx_registers_take<CONSUMER_REGISTERS>();
        consume(args, at, shared);
    }
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

/* Queries, keys with values, and rotary keys of all sequences. */
static sl_status_t make_maps(const sl_attn_prefill_t *p, CUtensorMap *q_map, CUtensorMap *kv_map,
                             CUtensorMap *k_pe_map)
{
    const uint64_t queries = (uint64_t)p->host_q_begin[p->sequences];
    const uint64_t keys = (uint64_t)p->host_k_begin[p->sequences];
    const uint64_t heads = p->heads;
    const sl_tensor_map_t q = {p->q, 3, {QK, heads, queries}, {1, QK, heads * QK}, {0, 1, QUERIES}};
    const sl_tensor_map_t kv = {p->kv, 3, {KV, heads, keys}, {1, KV, heads * KV}, {0, 1, KEYS}};
    const sl_tensor_map_t k_pe = {p->k_pe, 2, {ROPE, keys}, {1, p->k_pe_stride}, {0, KEYS}};
    SL_TRY(sl_cuda_tensor_map(&q, "attn_prefill", q_map));
    SL_TRY(sl_cuda_tensor_map(&kv, "attn_prefill", kv_map));
    return sl_cuda_tensor_map(&k_pe, "attn_prefill", k_pe_map);
}

/* Sequences [first, first + count) in one launch. */
static sl_status_t launch_sequences(sl_device_t *device, cudaStream_t on,
                                    const sl_attn_prefill_t *p, uint32_t first, uint32_t count)
{
    prefill_args_t args = {
        (sl_bf16_t *)p->out,
        p->lse,
        p->q_begin + first,
        p->k_begin + first,
        NULL,
        0,
        count,
        p->heads,
        group_heads(device, p, first, count),
        p->causal,
        p->scale,
        {0},
    };
    for (uint32_t s = 0; s < count; s++) {
        const int32_t *begin = p->host_q_begin + first + s;
        args.tile_begin[s + 1] =
            args.tile_begin[s] + sl_div_up((uint32_t)(begin[1] - begin[0]), QUERIES);
    }
    const size_t tiles = (size_t)args.tile_begin[count] * p->heads;
    if (tiles == 0) {
        return SL_OK;
    }
    SL_ASSERT(tiles <= INT32_MAX && SHARED_BYTES <= device->smem_max_bytes);
    args.tiles = (uint32_t)tiles;
    CUtensorMap q_map, kv_map, k_pe_map;
    void *next_tile = NULL;
    SL_TRY(make_maps(p, &q_map, &kv_map, &k_pe_map));
    SL_TRY(sl_cuda_scratch(device, (sl_stream_t *)on, SL_SLOT_ATTN_PREFILL, sizeof(uint32_t),
                           &next_tile));
    args.next_tile = (uint32_t *)next_tile;
    SL_CUDA_TRY(cudaMemsetAsync(next_tile, 0, sizeof(uint32_t), on), "attn_prefill");
    SL_CUDA_TRY(cudaFuncSetAttribute(prefill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     SHARED_BYTES),
                "attn_prefill");
    const uint32_t blocks = min(args.tiles, (uint32_t)device->sm_count);
    prefill_kernel<<<blocks, THREADS, SHARED_BYTES, on>>>(q_map, kv_map, k_pe_map, args);
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
    if (!fits_tiles(p) || p->host_k_begin[p->sequences] == 0) { /* no maps of no keys */
        return launch_generic(device, on, p);
    }
    for (uint32_t first = 0; first < p->sequences; first += SEQUENCES_MAX) {
        const uint32_t left = p->sequences - first;
        SL_TRY(launch_sequences(device, on, p, first,
                                left < SEQUENCES_MAX ? left : (uint32_t)SEQUENCES_MAX));
    }
    return SL_OK;
}
