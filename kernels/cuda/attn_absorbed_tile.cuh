/*
 * Absorbed attention of one tile over paged latents, 512 wide and 64 of rotated key.
 *
 * A tile is ROWS = 16, 32 or 64 queries: the heads of a row, or of some rows of one request. All
 * of them read the same keys, and a key's first 512 columns are its value too, so a page is copied
 * to shared memory once and used twice. Eight warps, one block a multiprocessor:
 *
 *     scores  S [ROWS][64]  = Q [ROWS][576] . page^T    warp: 16 rows x (ROWS / 2) keys
 *     weights P [ROWS][64]  = exp(S - max)              through shared memory, bf16
 *     sums    O [ROWS][512] += P . page                 warp: all rows x 64 columns, registers
 *
 *                ROWS 16                         ROWS 32, 64
 *     Q          registers (144 a thread)        shared memory, 9 subtiles [ROWS][64]
 *     pages      3 buffers of 72 KiB             2 buffers of 72 KiB
 *     a page     9 subtiles [64][64]: 0 to 7 are the latent, 8 the rotated key
 *
 * With 16 rows memory is the limit: two pages are always on their way, and every one of their bytes
 * is read from shared memory twice only. With 64 rows shared memory is (every fragment of Q is
 * loaded for two warps, of the page for four); products on warpgroups would lift that.
 *
 * A block's work is a list of entries: for each piece of its part of the schedule the queries, then
 * its pages. All threads walk the list ahead to issue copies (sl_tile_loader_t); thread 0 leaves
 * each entry in a ring for the time it is worked on. One entry, and its barriers:
 *
 *     wait for its copies
 *     ---- barrier ----     all of it is there; the buffer of the entry before is free
 *     issue copies ahead, into that buffer
 *     S; maxima of its rows over the warp's keys to shared memory
 *     ---- barrier ----     maxima of all warps are there
 *     P and the rows' corrections to shared memory
 *     ---- barrier ----     they are there; maxima are used up
 *     O times correction, += P . page
 *
 * Queries take a turn in the ring of buffers; of 32 and 64 rows they go to their own memory at
 * their turn, and the next entry's wait covers them.
 *
 * Keys at or past a row's kv_len get weight 0; those past all rows' are not read, and are zero in
 * shared memory, so that 0 times whatever was there cannot be NaN.
 */
#ifndef SL_KERNELS_CUDA_ATTN_ABSORBED_TILE_CUH
#define SL_KERNELS_CUDA_ATTN_ABSORBED_TILE_CUH

#include "kernels/cuda/attn_absorbed_plan.cuh"
#include "kernels/cuda/attn_sm90.cuh"
#include "kernels/cuda/ptx_sm90.cuh"

#define SL_TILE_LORA 512u
#define SL_TILE_WIDTH 576u
#define SL_TILE_TOKENS SL_PLAN_STEP_TOKENS
#define SL_TILE_THREADS 256u
#define SL_TILE_WARPS (SL_TILE_THREADS / SL_WARP)

typedef struct {
    sl_bf16_t *out;
    const sl_bf16_t *q_latent, *q_rope, *cache; /* cache: of the layer */
    const int32_t *pages, *page_begin, *kv_len;
    const sl_plan_t *plan;
    float *sums;   /* partial: [slot][head tile][ROWS][512] */
    float2 *stats; /* [slot][head tile][ROWS]: maximum in units of log2, sum of weights */
    size_t page_stride;
    uint32_t q_rope_row_stride, q_rope_head_stride;
    uint32_t heads, tile_heads; /* in all; of a tile and row. Tile row = row * tile_heads + head */
    float scale_log2;
} sl_tile_args_t;

template <uint32_t ROWS> struct sl_tile_shape {
    enum : uint32_t {
        BUFFERS = ROWS == 16 ? 3 : 2,
        ROW_WARPS = ROWS / 16,
        KEY_WARPS = SL_TILE_WARPS / ROW_WARPS,
        WARP_KEYS = SL_TILE_TOKENS / KEY_WARPS,
        KEY_TILES = WARP_KEYS / 8,
        CHAINS = 4 / KEY_TILES, /* sums of products that do not wait for one another */
        K_STEPS = SL_TILE_WIDTH / 16,
        Q_FRAGMENTS = ROWS == 16 ? K_STEPS : 1,

        PAGE_SUBTILE = SL_TILE_TOKENS * SL_ROW_BYTES,
        PAGE_BYTES = SL_TILE_WIDTH / 64 * PAGE_SUBTILE,
        Q_SUBTILE = ROWS * SL_ROW_BYTES,
        PAGES_AT = 0,
        Q_AT = PAGES_AT + BUFFERS * PAGE_BYTES,
        P_AT = Q_AT + (ROWS == 16 ? 0 : SL_TILE_WIDTH / 64 * Q_SUBTILE),
        MAX_AT = P_AT + Q_SUBTILE, /* f32 [KEY_WARPS][ROWS]; sums of weights at the end */
        CORRECTION_AT = MAX_AT + KEY_WARPS * ROWS * 4, /* f32 [ROWS] */
        ENTRIES_AT = CORRECTION_AT + ROWS * 4,
        SHARED_BYTES = ENTRIES_AT + BUFFERS * 16,
    };
};

enum { SL_ENTRY_NONE = 1, SL_ENTRY_LAST = 2, SL_ENTRY_WHOLE = 4, SL_ENTRY_FIRST = 8 };

/* LAST of its piece. The piece: WHOLE item, or holding the item's FIRST step. */
typedef struct {
    int32_t step; /* of the item; -1: the queries */
    int32_t row, rows;
    int32_t flags;
} sl_tile_entry_t;

/* The walk over the part's pieces. `page` is loaded one entry before it is needed. */
typedef struct {
    int32_t item, unit_begin, unit_end;    /* of the part */
    int32_t row, rows, tokens, page_begin; /* the item's */
    sl_plan_piece_t piece;
    int32_t step, page;
    bool live;
} sl_tile_loader_t;

__device__ static __forceinline__ void sl_tile_enter_item(const sl_tile_args_t &args,
                                                          sl_tile_loader_t *l)
{
    const sl_plan_t *plan = args.plan;
    const int4 item = *reinterpret_cast<const int4 *>(&plan->item[l->item]);
    const int32_t end = plan->item[l->item + 1].unit;
    l->tokens = plan->item[l->item].tokens;
    l->row = item.x;
    l->rows = item.y;
    l->piece = sl_plan_piece(item.w, end, l->unit_begin, l->unit_end);
    l->step = -1;
    l->live = item.w < l->unit_end && (l->piece.steps == 0 || l->piece.begin < l->piece.end);
    l->page_begin = l->piece.steps > 0 ? args.page_begin[item.z] : 0; /* padding may have none */
}

__device__ static __forceinline__ void sl_tile_start(const sl_tile_args_t &args, uint32_t part,
                                                     sl_tile_loader_t *l)
{
    const sl_plan_t *plan = args.plan;
    l->item = plan->part_item[part];
    l->unit_begin = (int32_t)part * plan->part_units;
    l->unit_end = min(l->unit_begin + plan->part_units, plan->units);
    l->page = 0;
    l->live = l->item < plan->items;
    if (l->live) {
        sl_tile_enter_item(args, l);
    }
}

__device__ static __forceinline__ void sl_tile_next(const sl_tile_args_t &args, sl_tile_loader_t *l)
{
    const int32_t next = l->step < 0 ? l->piece.begin : l->step + 1;
    if (next < l->piece.end) {
        l->step = next;
        l->page = args.pages[l->page_begin + next];
        return;
    }
    l->item++;
    l->live = l->item < args.plan->items;
    if (l->live) {
        sl_tile_enter_item(args, l);
    }
}

/* Eight neighbouring threads copy 128 bytes of a token: one row of a subtile. */
template <uint32_t ROWS>
__device__ static __forceinline__ void sl_tile_copy_page(const sl_tile_args_t &args,
                                                         const sl_tile_loader_t &l, uint32_t to)
{
    typedef sl_tile_shape<ROWS> shape;
    const uint32_t row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const int32_t left = l.tokens - l.step * (int32_t)SL_TILE_TOKENS;
    const sl_bf16_t *from =
        args.cache + (size_t)l.page * args.page_stride + row * SL_TILE_WIDTH + chunk * 8;
    to += row * SL_ROW_BYTES + (chunk ^ (row % 8)) * 16;
#pragma unroll
    for (uint32_t i = 0; i < SL_TILE_TOKENS / (SL_TILE_THREADS / 8); i++) {
        const uint32_t down = i * (SL_TILE_THREADS / 8);
        const bool valid = (int32_t)(row + down) < left;
#pragma unroll
        for (uint32_t s = 0; s < SL_TILE_WIDTH / 64; s++) {
            sl_copy_async(to + s * shape::PAGE_SUBTILE + down * SL_ROW_BYTES,
                          from + down * SL_TILE_WIDTH + s * 64, valid);
        }
    }
}

/* Rows of the tile without a query become zeros. */
template <uint32_t ROWS>
__device__ static __forceinline__ void
sl_tile_copy_queries(const sl_tile_args_t &args, int32_t first_row, int32_t rows, uint32_t to)
{
    typedef sl_tile_shape<ROWS> shape;
    const uint32_t chunk = threadIdx.x % 8;
#pragma unroll
    for (uint32_t i = 0; i < (ROWS * 8 + SL_TILE_THREADS - 1) / SL_TILE_THREADS; i++) {
        const uint32_t m = threadIdx.x / 8 + i * (SL_TILE_THREADS / 8);
        const uint32_t row = m / args.tile_heads;
        const uint32_t head = blockIdx.x * args.tile_heads + m % args.tile_heads;
        const bool valid = (int32_t)row < rows && head < args.heads;
        const size_t at = valid ? (size_t)first_row + row : 0, h = valid ? head : 0;
        const sl_bf16_t *latent = args.q_latent + (at * args.heads + h) * SL_TILE_LORA + chunk * 8;
        const sl_bf16_t *rope =
            args.q_rope + at * args.q_rope_row_stride + h * args.q_rope_head_stride + chunk * 8;
        const uint32_t place = to + m * SL_ROW_BYTES + (chunk ^ (m % 8)) * 16;
        if (m < ROWS) {
#pragma unroll
            for (uint32_t s = 0; s < SL_TILE_LORA / 64; s++) {
                sl_copy_async(place + s * shape::Q_SUBTILE, latent + s * 64, valid);
            }
            sl_copy_async(place + SL_TILE_LORA / 64 * shape::Q_SUBTILE, rope, valid);
        }
    }
}

/* Issues the copies of the entry the loader is at, leaves it in the ring, and goes on. */
template <uint32_t ROWS>
__device__ static __forceinline__ void sl_tile_issue(const sl_tile_args_t &args,
                                                     sl_tile_loader_t *l, unsigned char *shared,
                                                     uint32_t buffer)
{
    typedef sl_tile_shape<ROWS> shape;
    sl_tile_entry_t entry = {l->step, l->row, l->rows, SL_ENTRY_NONE};
    if (l->live) {
        const uint32_t to = sl_ptx_shared(shared) + shape::PAGES_AT + buffer * shape::PAGE_BYTES;
        const bool last = l->step < 0 ? l->piece.steps == 0 : l->step + 1 == l->piece.end;
        entry.flags = (last ? SL_ENTRY_LAST : 0) | (l->piece.begin == 0 ? SL_ENTRY_FIRST : 0) |
                      (l->piece.end - l->piece.begin == l->piece.steps ? SL_ENTRY_WHOLE : 0);
        if (l->step >= 0) {
            sl_tile_copy_page<ROWS>(args, *l, to);
        } else if (ROWS == 16) {
            sl_tile_copy_queries<ROWS>(args, l->row, l->rows, to);
        }
        sl_tile_next(args, l);
    }
    sl_copy_commit();
    if (threadIdx.x == 0) {
        *reinterpret_cast<sl_tile_entry_t *>(shared + shape::ENTRIES_AT + buffer * 16) = entry;
    }
}

/* What a thread holds of a tile. Its two rows of scores are row_at and row_at + 8. */
template <uint32_t ROWS> struct sl_tile_state {
    float sums[ROWS / 16][8][4];
    float max[2];  /* of all keys so far, unscaled */
    float part[2]; /* this thread's part of the sum of weights */
    int32_t limit[2];
    uint32_t q[sl_tile_shape<ROWS>::Q_FRAGMENTS][4];
};

template <uint32_t ROWS>
__device__ static __forceinline__ void sl_tile_begin(const sl_tile_args_t &args,
                                                     const sl_tile_entry_t &entry, uint32_t page_at,
                                                     uint32_t q_at, sl_tile_state<ROWS> *state)
{
    typedef sl_tile_shape<ROWS> shape;
    const uint32_t lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
#pragma unroll
    for (uint32_t m = 0; m < ROWS / 16; m++) {
#pragma unroll
        for (uint32_t n = 0; n < 8; n++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                state->sums[m][n][i] = 0;
            }
        }
    }
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        const uint32_t m = warp / shape::KEY_WARPS * 16 + lane / 4 + h * 8;
        const uint32_t row = m / args.tile_heads;
        state->limit[h] = (int32_t)row < entry.rows ? args.kv_len[(uint32_t)entry.row + row] : 0;
        state->max[h] = -INFINITY;
        state->part[h] = 0;
    }
    if (ROWS == 16) {
#pragma unroll
        for (uint32_t k = 0; k < shape::Q_FRAGMENTS; k++) {
            sl_load_blocks(state->q[k], (sl_lane_address_a(page_at, lane) ^ (k % 4 * 32)) +
                                            k / 4 * shape::Q_SUBTILE);
        }
    } else {
        sl_tile_copy_queries<ROWS>(args, entry.row, entry.rows, q_at);
        sl_copy_commit();
    }
}

/* s: the warp's 16 rows and KEY_TILES tiles of 8 keys */
template <uint32_t ROWS>
__device__ static __forceinline__ void
sl_tile_multiply_keys(const sl_tile_state<ROWS> &state, uint32_t page_at, uint32_t q_at,
                      float s[sl_tile_shape<ROWS>::KEY_TILES][4])
{
    typedef sl_tile_shape<ROWS> shape;
    const uint32_t lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
    const uint32_t key0 = warp % shape::KEY_WARPS * shape::WARP_KEYS;
    float chains[shape::CHAINS][shape::KEY_TILES][4];
#pragma unroll
    for (uint32_t c = 0; c < shape::CHAINS; c++) {
#pragma unroll
        for (uint32_t n = 0; n < shape::KEY_TILES; n++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                chains[c][n][i] = 0;
            }
        }
    }
    if (ROWS == 16) { /* eight keys: four chunks of columns at a time, so two steps of 16 */
        const uint32_t at =
            page_at + (key0 + lane % 8) * SL_ROW_BYTES + ((lane / 8) ^ (lane % 8)) * 16;
#pragma unroll
        for (uint32_t k = 0; k < shape::K_STEPS; k += 2) {
            uint32_t b[4];
            sl_load_blocks(b, (at ^ (k % 4 * 32)) + k / 4 * shape::PAGE_SUBTILE);
            sl_mma(chains[k % shape::CHAINS][0], state.q[k % shape::Q_FRAGMENTS], b[0], b[1]);
            sl_mma(chains[(k + 1) % shape::CHAINS][0], state.q[(k + 1) % shape::Q_FRAGMENTS], b[2],
                   b[3]);
        }
    } else {
        const uint32_t a_at =
            sl_lane_address_a(q_at + warp / shape::KEY_WARPS * 16 * SL_ROW_BYTES, lane);
        const uint32_t b_at = sl_lane_address_b(page_at + key0 * SL_ROW_BYTES, lane);
#pragma unroll
        for (uint32_t k = 0; k < shape::K_STEPS; k++) {
            uint32_t a[4];
            sl_load_blocks(a, (a_at ^ (k % 4 * 32)) + k / 4 * shape::Q_SUBTILE);
#pragma unroll
            for (uint32_t n = 0; n < shape::KEY_TILES; n += 2) {
                uint32_t b[4];
                sl_load_blocks(b, (b_at ^ (k % 4 * 32)) + k / 4 * shape::PAGE_SUBTILE +
                                      n * 8 * SL_ROW_BYTES);
                sl_mma(chains[k % shape::CHAINS][n], a, b[0], b[1]);
                sl_mma(chains[k % shape::CHAINS][(n + 1) % shape::KEY_TILES], a, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (uint32_t n = 0; n < shape::KEY_TILES; n++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            s[n][i] = chains[0][n][i];
#pragma unroll
            for (uint32_t c = 1; c < shape::CHAINS; c++) {
                s[n][i] += chains[c][n][i];
            }
        }
    }
}

/* Scores to weights in shared memory; two barriers. Rows' maxima go over all of the keys' warps. */
template <uint32_t ROWS>
__device__ static __forceinline__ void
sl_tile_soften(const sl_tile_args_t &args, int32_t key0, float s[sl_tile_shape<ROWS>::KEY_TILES][4],
               sl_tile_state<ROWS> *state, unsigned char *shared)
{
    typedef sl_tile_shape<ROWS> shape;
    const uint32_t lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
    const uint32_t key_warp = warp % shape::KEY_WARPS;
    const uint32_t row_at = warp / shape::KEY_WARPS * 16 + lane / 4;
    float *maxima = reinterpret_cast<float *>(shared + shape::MAX_AT);
    float *corrections = reinterpret_cast<float *>(shared + shape::CORRECTION_AT);
    const int32_t column = key0 + (int32_t)(key_warp * shape::WARP_KEYS + lane % 4 * 2);
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        float max = -INFINITY;
#pragma unroll
        for (uint32_t n = 0; n < shape::KEY_TILES; n++) {
#pragma unroll
            for (uint32_t i = 2 * h; i < 2 * h + 2; i++) {
                if (column + (int32_t)(n * 8 + i % 2) >= state->limit[h]) {
                    s[n][i] = -INFINITY;
                }
                max = fmaxf(max, s[n][i]);
            }
        }
        max = sl_quad_max(max);
        if (lane % 4 == 0) {
            maxima[key_warp * ROWS + row_at + h * 8] = max;
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        const uint32_t row = row_at + h * 8;
        float max = state->max[h];
#pragma unroll
        for (uint32_t w = 0; w < shape::KEY_WARPS; w++) {
            max = fmaxf(max, maxima[w * ROWS + row]);
        }
        const float shift = max == -INFINITY ? 0 : max * args.scale_log2;
        const float correction = sl_exp2(state->max[h] * args.scale_log2 - shift);
        float part = state->part[h] * correction;
#pragma unroll
        for (uint32_t n = 0; n < shape::KEY_TILES; n++) {
            const float a = sl_exp2(s[n][2 * h] * args.scale_log2 - shift);
            const float b = sl_exp2(s[n][2 * h + 1] * args.scale_log2 - shift);
            const uint32_t chunk = key_warp * shape::KEY_TILES + n;
            *reinterpret_cast<uint32_t *>(shared + shape::P_AT + row * SL_ROW_BYTES +
                                          (chunk ^ (row % 8)) * 16 + lane % 4 * 4) = sl_pack2(a, b);
            part += a + b;
        }
        state->max[h] = max;
        state->part[h] = part;
        if (key_warp == 0 && lane % 4 == 0) {
            corrections[row] = correction;
        }
    }
    __syncthreads();
}

/* The warp's columns are subtile `warp` of the page. */
template <uint32_t ROWS>
__device__ static __forceinline__ void
sl_tile_multiply_values(uint32_t page_at, unsigned char *shared, sl_tile_state<ROWS> *state)
{
    typedef sl_tile_shape<ROWS> shape;
    const uint32_t lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
    const float *corrections = reinterpret_cast<const float *>(shared + shape::CORRECTION_AT);
    const uint32_t p_at = sl_lane_address_a(sl_ptx_shared(shared) + shape::P_AT, lane);
    const uint32_t v_at = sl_lane_address_a(page_at + warp * shape::PAGE_SUBTILE, lane);
#pragma unroll
    for (uint32_t m = 0; m < ROWS / 16; m++) {
        const float low = corrections[m * 16 + lane / 4];
        const float high = corrections[m * 16 + lane / 4 + 8];
#pragma unroll
        for (uint32_t n = 0; n < 8; n++) {
            state->sums[m][n][0] *= low;
            state->sums[m][n][1] *= low;
            state->sums[m][n][2] *= high;
            state->sums[m][n][3] *= high;
        }
    }
#pragma unroll
    for (uint32_t k = 0; k < SL_TILE_TOKENS / 16; k++) {
        uint32_t a[ROWS / 16][4];
#pragma unroll
        for (uint32_t m = 0; m < ROWS / 16; m++) {
            sl_load_blocks(a[m], (p_at ^ (k * 32)) + m * 16 * SL_ROW_BYTES);
        }
#pragma unroll
        for (uint32_t n = 0; n < 8; n += 2) {
            uint32_t b[4];
            sl_load_blocks_transposed(b, (v_at ^ (n * 16)) + k * 16 * SL_ROW_BYTES);
#pragma unroll
            for (uint32_t m = 0; m < ROWS / 16; m++) {
                sl_mma(state->sums[m][n], a[m], b[0], b[1]);
                sl_mma(state->sums[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* The piece's end: bf16 results if it is the whole item, else partial sums. */
template <uint32_t ROWS>
__device__ static __forceinline__ void
sl_tile_finish(const sl_tile_args_t &args, const sl_tile_entry_t &entry,
               const sl_tile_state<ROWS> &state, unsigned char *shared)
{
    typedef sl_tile_shape<ROWS> shape;
    const uint32_t lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
    const uint32_t key_warp = warp % shape::KEY_WARPS;
    const uint32_t row_at = warp / shape::KEY_WARPS * 16 + lane / 4;
    const uint32_t slot = blockIdx.y * 2 + ((entry.flags & SL_ENTRY_FIRST) != 0 ? 1 : 0);
    const size_t partial = ((size_t)slot * gridDim.x + blockIdx.x) * ROWS;
    const bool whole = (entry.flags & SL_ENTRY_WHOLE) != 0;
    float *weights = reinterpret_cast<float *>(shared + shape::MAX_AT);
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        const float sum = sl_quad_sum(state.part[h]);
        if (lane % 4 == 0) {
            weights[key_warp * ROWS + row_at + h * 8] = sum;
        }
        if (!whole && key_warp == 0 && lane % 4 == 0) {
            args.stats[partial + row_at + h * 8].x = state.max[h] * args.scale_log2;
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < ROWS / 8; i++) {
        const uint32_t m = i * 8 + lane / 4, column = warp * 64 + lane % 4 * 2;
        const uint32_t row = m / args.tile_heads;
        const uint32_t head = blockIdx.x * args.tile_heads + m % args.tile_heads;
        float sum = 0;
        for (uint32_t w = 0; w < shape::KEY_WARPS; w++) {
            sum += weights[w * ROWS + m];
        }
        const bool valid = (int32_t)row < entry.rows && head < args.heads;
        const float inverse = sum == 0 ? 0 : 1 / sum;
        sl_bf16_t *out =
            args.out + (((size_t)entry.row + row) * args.heads + head) * SL_TILE_LORA + column;
        float *sums = args.sums + (partial + m) * SL_TILE_LORA + column;
#pragma unroll
        for (uint32_t n = 0; n < 8; n++) {
            const float *pair = &state.sums[i / 2][n][i % 2 * 2];
            if (whole && valid) {
                *reinterpret_cast<uint32_t *>(out + n * 8) =
                    sl_pack2(pair[0] * inverse, pair[1] * inverse);
            } else if (!whole && valid) {
                *reinterpret_cast<float2 *>(sums + n * 8) = make_float2(pair[0], pair[1]);
            }
        }
        if (!whole && warp == 0 && lane % 4 == 0) {
            args.stats[partial + m].y = sum;
        }
    }
}

/* Grid: [head tiles][parts]. */
template <uint32_t ROWS>
static __global__ void __launch_bounds__(SL_TILE_THREADS, 1)
    sl_tile_kernel(const __grid_constant__ sl_tile_args_t args)
{
    typedef sl_tile_shape<ROWS> shape;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t at = sl_ptx_shared(shared);
    sl_tile_loader_t loader;
    sl_tile_state<ROWS> state;
    sl_tile_start(args, blockIdx.y, &loader);
    if (!loader.live) {
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i + 1 < shape::BUFFERS; i++) {
        sl_tile_issue<ROWS>(args, &loader, shared, i);
    }
    uint32_t buffer = 0, ahead = shape::BUFFERS - 1;
    for (;;) {
        sl_copy_wait<shape::BUFFERS - 2>();
        __syncthreads();
        const sl_tile_entry_t entry =
            *reinterpret_cast<const sl_tile_entry_t *>(shared + shape::ENTRIES_AT + buffer * 16);
        if ((entry.flags & SL_ENTRY_NONE) != 0) {
            break;
        }
        sl_tile_issue<ROWS>(args, &loader, shared, ahead);
        const uint32_t page_at = at + shape::PAGES_AT + buffer * shape::PAGE_BYTES;
        if (entry.step < 0) {
            sl_tile_begin<ROWS>(args, entry, page_at, at + shape::Q_AT, &state);
        } else {
            float s[shape::KEY_TILES][4];
            sl_tile_multiply_keys<ROWS>(state, page_at, at + shape::Q_AT, s);
            sl_tile_soften<ROWS>(args, entry.step * (int32_t)SL_TILE_TOKENS, s, &state, shared);
            sl_tile_multiply_values<ROWS>(page_at, shared, &state);
        }
        if ((entry.flags & SL_ENTRY_LAST) != 0) {
            sl_tile_finish<ROWS>(args, entry, state, shared);
        }
        buffer = buffer + 1 == shape::BUFFERS ? 0 : buffer + 1;
        ahead = ahead + 1 == shape::BUFFERS ? 0 : ahead + 1;
    }
    sl_copy_wait<0>(); /* zero items of 32 and 64 rows leave queries on their way */
}

#endif
