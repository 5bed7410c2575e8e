/*
 * Choice of a token, with the rules of kernels/ref/sample.c for what kernels/ops.h leaves open.
 * Nothing is sorted. See vocab.cuh for the cluster's division of work.
 *
 * The order of choice is by logit, then by lower id, so each filter keeps a prefix of that order,
 * and a prefix is known by its last member: a cut (key of the logit, id). top_k and top_p look for
 * their cut by three rounds over the key's bits, from the top: 11, 11 and 10. A round counts (or
 * weighs) the logits that share the bits found so far, by their next bits; the bin in which the
 * running total reaches the target gives those. What is left are equal logits, of which the ids
 * decide.
 *
 * Weights, exp((logit - max) / temperature), are f32, at most 1, and are summed as fixed-point
 * integers: sums are exact, whatever their order, and all walks over them agree. A weight in a
 * histogram is two words of `word_bits` bits each, since shared memory adds 32-bit words at once
 * but 64-bit ones only by trial.
 *
 * The draw is the first kept id, in id order, whose running sum exceeds uniform * total: found
 * first among the blocks' sums, then the warps', then by a warp walking its part.
 */
#include "kernels/cuda/logprobs.h"
#include "kernels/cuda/vocab.cuh"
#include "kernels/philox.h"

#define RANKS SL_VOCAB_RANKS
#define THREADS SL_VOCAB_THREADS
#define WARPS SL_VOCAB_WARPS
#define KEEP_ALL_IDS 0xffffffffu

#define ROUNDS 3
#define BINS_MAX 2048u
#define GROUPS SL_WARP /* of bins */
#define WORD_BITS_MAX 18u
#define DRAW_ONE 0x1p44f /* weight 1 in the draw's fixed point: 2^19 of them fit 64 bits */

/* Kept: a larger key, or this key and an id up to this. */
typedef struct {
    uint32_t key, id;
} cut_t;

enum { TIES_TOP_K, TIES_TOP_P, TIES_COUNT };

/* What other blocks read is written before a cluster barrier and not again before the next but
 * one: hence two of what rounds use, in turn. */
typedef struct {
    uint32_t bins[2][2][BINS_MAX]; /* [turn][low, high word]; the low word alone where counted */
    uint64_t groups[2][GROUPS];    /* [turn] */
    uint64_t best, sum;
    uint32_t tie_id[TIES_COUNT];
    /* The block's own. */
    uint64_t warps[WARPS];
    uint64_t above, in_bin, in_bin_before; /* total above the bin; in it; in it in lower ranks */
    uint32_t bin, lowest;
} shared_t;

#define FIXED_BYTES ((sizeof(shared_t) + 15) / 16 * 16)

typedef struct {
    shared_t *shared;
    sl_slice_t slice;
    const sl_sample_row_t *rule;
    float max, temperature;
    uint32_t word_bits;
    float fixed_one; /* weight 1 of the histograms: 2^(2 * word_bits) */
    uint32_t turn;   /* of the next round */
} row_t;

__device__ static inline float weight_of(const row_t &row, float logit)
{
    return expf((logit - row.max) / row.temperature);
}

__device__ static inline bool is_within(cut_t cut, uint32_t key, uint32_t id)
{
    return key > cut.key || (key == cut.key && id <= cut.id);
}

__device__ static inline uint64_t fixed_weight(const row_t &row, float logit)
{
    return __float2ull_rn(weight_of(row, logit) * row.fixed_one);
}

__device__ static inline uint64_t bin_total(const uint32_t bins[2][BINS_MAX], uint32_t bin,
                                            uint32_t word_bits)
{
    return ((uint64_t)bins[1][bin] << word_bits) + bins[0][bin];
}

/* This block's logits within `cut` whose upper bits are `prefix`, by their next `bits` bits. */
template <bool WEIGH>
__device__ static void fill_bins(const row_t &row, uint32_t bins[2][BINS_MAX], cut_t cut,
                                 uint32_t prefix, uint32_t shift, uint32_t bits)
{
    const uint32_t count = 1u << bits, word_mask = (1u << row.word_bits) - 1;
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
        bins[0][i] = bins[1][i] = 0;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < row.slice.count; i += THREADS) {
        const float logit = row.slice.logits[i];
        const uint32_t key = sl_key(logit);
        const uint64_t upper = (uint64_t)key >> (shift + bits);
        if (upper != prefix || !is_within(cut, key, row.slice.first + i)) {
            continue;
        }
        const uint32_t bin = (key >> shift) & (count - 1);
        if (WEIGH) {
            uint64_t weight = fixed_weight(row, logit);
            if (weight != 0) {
                atomicAdd(&bins[0][bin], (uint32_t)weight & word_mask);
                atomicAdd(&bins[1][bin], (uint32_t)(weight >> row.word_bits));
            }
        } else {
            atomicAdd(&bins[0][bin], 1u);
        }
    }
    __syncthreads();
}

/* Lane i holds a total; the first lane with which the running total reaches `target`, and the total
 * before it. The last lane if none does. */
__device__ static inline unsigned reach(uint64_t mine, uint64_t target, uint64_t *before_p)
{
    const unsigned lane = threadIdx.x % SL_WARP;
    uint64_t sum = mine;
#pragma unroll
    for (unsigned offset = 1; offset < SL_WARP; offset *= 2) {
        uint64_t other = __shfl_up_sync(SL_FULL_MASK, sum, offset);
        sum += lane >= offset ? other : 0;
    }
    const unsigned reached = __ballot_sync(SL_FULL_MASK, sum >= target) | 1u << (SL_WARP - 1);
    const unsigned first = __ffs((int)reached) - 1;
    *before_p = __shfl_sync(SL_FULL_MASK, sum - mine, (int)first);
    return first;
}

/* One warp of each block, all with the same outcome: from the group totals and bins of all blocks,
 * the bin in which the total, from the highest bin down, reaches `target`. */
__device__ static void choose_bin(const row_t &row, uint32_t turn, uint32_t bits, uint64_t target)
{
    shared_t *shared = row.shared;
    const unsigned lane = threadIdx.x, own = sl_cluster_rank();
    const uint32_t size = (1u << bits) / GROUPS; /* bins of a group: 64 or 32 */
    uint64_t total = 0, before = 0, in_group_before = 0;
    for (unsigned r = 0; r < RANKS; r++) {
        total += sl_cluster_peer(shared->groups[turn], r)[GROUPS - 1 - lane];
    }
    const uint32_t group = GROUPS - 1 - reach(total, target, &before);
    /* Two bins a lane where a group has 64: the upper half first. */
    uint32_t bin = 0;
    for (uint32_t half = size / SL_WARP; half-- > 0;) {
        const uint32_t mine = group * size + half * SL_WARP + (SL_WARP - 1 - lane);
        uint64_t lower = 0;
        total = 0;
        for (unsigned r = 0; r < RANKS; r++) {
            const uint32_t(*bins)[BINS_MAX] = sl_cluster_peer(shared->bins[turn], r);
            uint64_t here = bin_total(bins, mine, row.word_bits);
            lower += r < own ? here : 0;
            total += here;
        }
        const uint64_t all = sl_warp_sum64(total);
        if (half > 0 && before + all < target) {
            before += all;
            continue;
        }
        const unsigned at = reach(total, target - before, &in_group_before);
        bin = group * size + half * SL_WARP + (SL_WARP - 1 - at);
        if (lane == at) {
            shared->in_bin = total;
            shared->in_bin_before = lower;
        }
        break;
    }
    if (lane == 0) {
        shared->bin = bin;
        shared->above = before + in_group_before;
    }
}

/* Totals of the groups of bins; a warp a group at a time. */
__device__ static void sum_groups(const row_t &row, const uint32_t bins[2][BINS_MAX],
                                  uint64_t *groups, uint32_t bits)
{
    const unsigned lane = threadIdx.x % SL_WARP;
    const uint32_t size = (1u << bits) / GROUPS;
    for (unsigned group = threadIdx.x / SL_WARP; group < GROUPS; group += WARPS) {
        uint64_t total = 0;
        for (uint32_t i = lane; i < size; i += SL_WARP) {
            total += bin_total(bins, group * size + i, row.word_bits);
        }
        total = sl_warp_sum64(total);
        if (lane == 0) {
            groups[group] = total;
        }
    }
}

/* The `nth` (from 1) of this block's logits with that key, in id order, goes to *id_p. `warps` is
 * the block's. Each warp counts, then the one that has it walks. */
__device__ static void find_tie(const row_t &row, uint32_t key, uint64_t nth, uint32_t *id_p)
{
    const unsigned lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
    const uint32_t part = sl_div_up(sl_div_up(row.slice.count, WARPS), SL_WARP) * SL_WARP;
    uint64_t seen = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < part; i += SL_WARP) {
        uint32_t at = warp * part + i + lane;
        bool tie = at < row.slice.count && sl_key(row.slice.logits[at]) == key;
        count += (uint32_t)__popc(__ballot_sync(SL_FULL_MASK, tie));
    }
    if (lane == 0) {
        row.shared->warps[warp] = count;
    }
    __syncthreads();
    for (unsigned w = 0; w < warp; w++) {
        seen += row.shared->warps[w];
    }
    for (uint32_t i = 0; i < part && seen < nth && seen + count >= nth; i += SL_WARP) {
        uint32_t at = warp * part + i + lane;
        bool tie = at < row.slice.count && sl_key(row.slice.logits[at]) == key;
        uint32_t ties = __ballot_sync(SL_FULL_MASK, tie);
        uint32_t here = (uint32_t)__popc(ties), lower = __popc(ties & ((1u << lane) - 1));
        if (tie && seen + lower + 1 == nth) {
            *id_p = row.slice.first + at;
        }
        seen += here;
        count -= here;
    }
    __syncthreads();
}

/* The cut among equal logits: `kept` of them stay, of which `total` there are, `before` in blocks
 * of lower rank and `mine` here. */
__device__ static cut_t cut_ties(const row_t &row, cut_t within, uint32_t key, uint64_t kept,
                                 uint64_t total, uint64_t before, uint64_t mine, int which)
{
    cut_t cut = {key, key == within.key ? within.id : KEEP_ALL_IDS};
    if (kept >= total) {
        return cut;
    }
    uint32_t *found = &row.shared->tie_id[which];
    const bool here = before < kept && kept <= before + mine;
    if (threadIdx.x == 0) {
        *found = 0;
    }
    __syncthreads();
    if (here) {
        find_tie(row, key, kept - before, found);
    }
    sl_cluster_sync();
    uint32_t id = 0; /* blocks without it left 0 */
    for (unsigned r = 0; r < RANKS; r++) {
        id |= *sl_cluster_peer(found, r);
    }
    cut.id = id;
    return cut;
}

__device__ static inline uint32_t round_bits(int round)
{
    return round < ROUNDS - 1 ? 11 : 10;
}

/* Counting: keeps the first `rule->top_k` in order of those within `within`, which are more.
 * Weighing: keeps, of those within, the shortest prefix that has `rule->top_p` of their weight. */
template <bool WEIGH> __device__ static cut_t select(row_t *row, cut_t within)
{
    shared_t *shared = row->shared;
    uint64_t target = row->rule->top_k;
    uint32_t prefix = 0, shift = 32;
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round++) {
        const uint32_t turn = row->turn, bits = round_bits(round);
        shift -= bits;
        fill_bins<WEIGH>(*row, shared->bins[turn], within, prefix, shift, bits);
        sum_groups(*row, shared->bins[turn], shared->groups[turn], bits);
        sl_cluster_sync();
        if (WEIGH && round == 0) {
            uint64_t total = 0;
            for (unsigned r = 0; r < RANKS; r++) {
                total += sl_cluster_peer(shared->groups[turn], r)[threadIdx.x % SL_WARP];
            }
            total = sl_warp_sum64(total);
            target = __double2ull_ru((double)row->rule->top_p * (double)total);
            target = target > 0 ? target : 1;
        }
        if (threadIdx.x < SL_WARP) {
            choose_bin(*row, turn, bits, target);
        }
        __syncthreads();
        prefix = prefix << bits | shared->bin;
        target -= shared->above;
        row->turn = turn ^ 1;
    }
    /* Equal logits weigh the same, so their number is their weight over one's. */
    uint64_t each = WEIGH ? fixed_weight(*row, sl_key_value(prefix)) : 1;
    each = each > 0 ? each : 1;
    const uint64_t before = shared->in_bin_before / each, total = shared->in_bin / each;
    const uint32_t last = row->turn ^ 1;
    const uint32_t bin = prefix & ((1u << round_bits(ROUNDS - 1)) - 1);
    const uint64_t mine = bin_total(shared->bins[last], bin, row->word_bits) / each;
    const uint64_t kept = target / each + (target % each != 0);
    return cut_ties(*row, within, prefix, kept, total, before, mine,
                    WEIGH ? TIES_TOP_P : TIES_TOP_K);
}

__device__ static inline uint64_t kept_weight(const row_t &row, cut_t cut, uint32_t at)
{
    if (at >= row.slice.count) {
        return 0;
    }
    const float logit = row.slice.logits[at];
    if (!is_within(cut, sl_key(logit), row.slice.first + at)) {
        return 0;
    }
    const float weight = weight_of(row, logit);
    return weight >= row.rule->min_p ? __float2ull_rn(weight * DRAW_ONE) : 0;
}

/* One warp: the first id of its part with which the running sum exceeds `target`. */
__device__ static void walk(const row_t &row, cut_t cut, uint32_t first, uint64_t target,
                            int32_t *token_p)
{
    const unsigned lane = threadIdx.x % SL_WARP;
    for (uint32_t i = first;; i += SL_WARP) { /* the part's sum exceeds the target */
        const uint64_t weight = kept_weight(row, cut, i + lane);
        const uint64_t sum = sl_warp_sum64(weight);
        if (sum <= target) {
            target -= sum;
            continue;
        }
        uint64_t before;
        const unsigned at = reach(weight, target + 1, &before);
        if (lane == at) {
            *token_p = (int32_t)(row.slice.first + i + lane);
        }
        return;
    }
}

/* Sums of the warps' parts, then the draw by whoever has it. */
__device__ static void draw(const row_t &row, cut_t cut, int32_t *token_p)
{
    shared_t *shared = row.shared;
    const unsigned lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
    const uint32_t part = sl_div_up(sl_div_up(row.slice.count, WARPS), SL_WARP) * SL_WARP;
    uint64_t mine = 0, total = 0, before = 0, own = 0;
    for (uint32_t i = 0; i < part; i += SL_WARP) {
        mine += kept_weight(row, cut, warp * part + i + lane);
    }
    mine = sl_warp_sum64(mine);
    if (lane == 0) {
        shared->warps[warp] = mine;
    }
    __syncthreads();
    const uint64_t sum = sl_warp_sum64(sl_vocab_lane(shared->warps));
    if (threadIdx.x == 0) {
        shared->sum = sum;
    }
    sl_cluster_sync();
    for (unsigned r = 0; r < RANKS; r++) {
        const uint64_t other = *sl_cluster_peer(&shared->sum, r);
        before += r < sl_cluster_rank() ? other : 0;
        own = r == sl_cluster_rank() ? other : own;
        total += other;
    }
    /* The best weighs 1 and is always kept, so the total is above 0. */
    const double uniform = sl_philox_uniform(row.rule->seed, row.rule->position);
    uint64_t target = __double2ull_rd(uniform * (double)total);
    target = target < total ? target : total - 1;
    if (target < before || target >= before + own) {
        return;
    }
    target -= before;
    for (unsigned w = 0; w < warp; w++) {
        const uint64_t other = shared->warps[w];
        if (target < other) {
            return; /* an earlier warp's */
        }
        target -= other;
    }
    if (target < mine) {
        walk(row, cut, warp * part, target, token_p);
    }
}

/* Where every logit that may be chosen is -inf: the lowest id that is not masked, 0 if all are. */
__device__ static void choose_lowest(const row_t &row, uint32_t vocab, int32_t *token_p)
{
    const sl_sample_row_t *rule = row.rule;
    const uint32_t id = threadIdx.x; /* one of the first masked_count + 1 is not masked */
    if (threadIdx.x == 0) {
        row.shared->lowest = vocab;
    }
    __syncthreads();
    if (id < vocab) {
        bool masked = false;
        for (uint32_t i = 0; i < rule->masked_count; i++) {
            masked = masked || rule->masked[i] == (int32_t)id;
        }
        if (!masked) {
            atomicMin(&row.shared->lowest, id);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *token_p = row.shared->lowest < vocab ? (int32_t)row.shared->lowest : 0;
    }
}

/* Masked logits become -inf; then the first in the order of choice. */
__device__ static uint64_t mask_and_find_best(const row_t &row)
{
    const sl_slice_t slice = row.slice;
    for (uint32_t i = threadIdx.x; i < row.rule->masked_count; i += THREADS) {
        const uint32_t at = (uint32_t)row.rule->masked[i] - slice.first;
        if (row.rule->masked[i] >= 0 && at < slice.count) {
            slice.logits[at] = -INFINITY;
        }
    }
    __syncthreads();
    uint64_t best = 0;
    for (uint32_t i = threadIdx.x; i < slice.count; i += THREADS) {
        const uint64_t rank = sl_rank_of(slice.logits[i], slice.first + i);
        slice.logits[i] = sl_key_value((uint32_t)(rank >> 32)); /* NaN becomes -inf */
        best = rank > best ? rank : best;
    }
    best = sl_vocab_max(best, row.shared->warps);
    if (threadIdx.x == 0) {
        row.shared->best = best;
    }
    sl_cluster_sync();
    for (unsigned r = 0; r < RANKS; r++) {
        const uint64_t other = *sl_cluster_peer(&row.shared->best, r);
        best = other > best ? other : best;
    }
    return best;
}

__device__ static void choose(row_t *row, uint32_t vocab, int32_t *token_p)
{
    const sl_sample_row_t *rule = row->rule;
    const uint64_t best = mask_and_find_best(*row);
    row->max = sl_key_value((uint32_t)(best >> 32));
    if (row->temperature == 0 || isinf(row->max)) {
        if (sl_cluster_rank() != 0) {
            return;
        }
        if (row->max == -INFINITY) {
            choose_lowest(*row, vocab, token_p);
        } else if (threadIdx.x == 0) {
            *token_p = (int32_t)sl_rank_id(best);
        }
        return;
    }
    cut_t cut = {SL_KEY_NONE, KEEP_ALL_IDS};
    if (rule->top_k > 0 && rule->top_k < vocab) {
        cut = select<false>(row, cut);
    }
    if (rule->top_p < 1) {
        cut = select<true>(row, cut);
    }
    draw(*row, cut, token_p);
}

__global__ static void __cluster_dims__(SL_VOCAB_RANKS, 1, 1) __launch_bounds__(SL_VOCAB_THREADS, 2)
    sample_kernel(sl_sample_t p)
{
    extern __shared__ uint4 memory[];
    const uint32_t t = blockIdx.x / RANKS;
    row_t row;
    row.shared = (shared_t *)memory;
    row.slice = sl_slice_load((float *)((char *)memory + FIXED_BYTES),
                              p.logits + (size_t)t * p.vocab, p.vocab);
    row.rule = &p.rules[t];
    row.temperature = row.rule->temperature;
    row.max = 0;
    row.turn = 0;
    /* A word's sum over a slice must fit 32 bits. */
    const uint32_t width = sl_slice_width(p.vocab);
    row.word_bits = (uint32_t)__clz((int)width);
    row.word_bits = row.word_bits < WORD_BITS_MAX ? row.word_bits : WORD_BITS_MAX;
    row.fixed_one = (float)(1ull << 2 * row.word_bits);
    __syncthreads();
    choose(&row, p.vocab, &p.tokens[t]);
    sl_cluster_sync();
}

sl_status_t sl_cuda_sample(sl_device_t *device, sl_stream_t *stream, const sl_sample_t *p)
{
    if (p->rows == 0) {
        return SL_OK;
    }
    size_t bytes = 0;
    cudaStream_t on = sl_cuda_enter(device, stream);
    SL_TRY(sl_vocab_shared(device, "sample", p->vocab, FIXED_BYTES, &bytes));
    SL_CUDA_TRY(cudaFuncSetAttribute((const void *)sample_kernel,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                "sample");
    SL_LAUNCH("sample", sample_kernel, p->rows * RANKS, THREADS, bytes, on, *p);
    if (p->logprobs == NULL) {
        return SL_OK;
    }
    sl_token_logprobs_t chosen;
    memset(&chosen, 0, sizeof(chosen));
    chosen.out = p->logprobs;
    chosen.logits = p->logits;
    chosen.targets = p->tokens;
    chosen.rows = p->rows;
    chosen.vocab = p->vocab;
    return sl_cuda_logprobs(device, stream, "sample", &chosen, p->rules);
}
