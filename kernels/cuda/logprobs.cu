/*
 * Log-probabilities of given tokens and the best alternatives, of the raw logits' softmax; for
 * token_logprobs, and for the sampled tokens of the rows that want them. See vocab.cuh for the
 * cluster's division of work.
 *
 * The best: each thread holds the best of its own logits; a round takes the block's best of those,
 * and its thread looks for its next. The blocks' lists are merged by one warp.
 */
#include "kernels/cuda/logprobs.h"
#include "kernels/cuda/vocab.cuh"

#define RANKS SL_VOCAB_RANKS
#define THREADS SL_VOCAB_THREADS

typedef struct {
    uint64_t warps[2][SL_VOCAB_WARPS];
    double sums[SL_VOCAB_WARPS];
    uint64_t max;                       /* key of the block's largest logit; others read it */
    double sum;                         /* likewise: sum of exp(logit - max) of the block */
    uint64_t best[SL_TOP_LOGPROBS_MAX]; /* likewise: the block's list */
} shared_t;

#define FIXED_BYTES ((sizeof(shared_t) + 15) / 16 * 16)

/* NaN is never the largest, but makes the sum NaN. */
__device__ static double log_sum_exp(shared_t *shared, sl_slice_t slice)
{
    uint64_t mine = 0, max = 0;
    float part = 0;
    double sum = 0;
    for (uint32_t i = threadIdx.x; i < slice.count; i += THREADS) {
        uint64_t key = sl_key(slice.logits[i]);
        mine = key > mine ? key : mine;
    }
    mine = sl_vocab_max(mine, shared->warps[0]);
    if (threadIdx.x == 0) {
        shared->max = mine;
    }
    sl_cluster_sync();
    for (unsigned r = 0; r < RANKS; r++) {
        uint64_t other = *sl_cluster_peer(&shared->max, r);
        max = other > max ? other : max;
    }
    const float largest = sl_key_value((uint32_t)max);
    for (uint32_t i = threadIdx.x; i < slice.count; i += THREADS) {
        part += expf(slice.logits[i] - largest);
    }
    sum = sl_vocab_sum((double)part, shared->sums);
    if (threadIdx.x == 0) {
        shared->sum = sum;
    }
    sl_cluster_sync();
    sum = 0;
    for (unsigned r = 0; r < RANKS; r++) {
        sum += *sl_cluster_peer(&shared->sum, r);
    }
    return largest + log(sum);
}

/* The best of this thread's logits that comes after `last`. */
__device__ static uint64_t next_best(sl_slice_t slice, uint64_t last)
{
    uint64_t best = 0;
    for (uint32_t i = threadIdx.x; i < slice.count; i += THREADS) {
        uint64_t rank = sl_rank_of(slice.logits[i], slice.first + i);
        best = rank < last && rank > best ? rank : best;
    }
    return best;
}

/* The block's list; zeros after its last. */
__device__ static void list_best(shared_t *shared, sl_slice_t slice, uint32_t count)
{
    uint64_t mine = count > 0 ? next_best(slice, ~0ull) : 0;
    for (uint32_t j = 0; j < count; j++) {
        uint64_t best = sl_vocab_max(mine, shared->warps[j % 2]);
        if (threadIdx.x == 0) {
            shared->best[j] = best;
        }
        if (mine == best && best != 0) {
            mine = next_best(slice, best);
        }
    }
}

/* One warp of one block: lane r stands at the head of block r's list. */
__device__ static void merge_best(shared_t *shared, const float *row, uint32_t count, double lse,
                                  sl_logprobs_t *out)
{
    const unsigned lane = threadIdx.x;
    const uint64_t *list = sl_cluster_peer(shared->best, lane % RANKS);
    uint32_t at = 0;
    for (uint32_t j = 0; j < count; j++) {
        uint64_t mine = lane < RANKS && at < count ? list[at] : 0;
        uint64_t best = sl_warp_max64(mine);
        at += mine == best;
        if (lane == 0) {
            uint32_t id = sl_rank_id(best);
            out->top_ids[j] = (int32_t)id;
            out->top_logprobs[j] = (float)(row[id] - lse);
        }
    }
}

/* rules: NULL, or each row's wish, which may be none. */
__global__ static void __cluster_dims__(SL_VOCAB_RANKS, 1, 1) __launch_bounds__(SL_VOCAB_THREADS)
    logprobs_kernel(sl_token_logprobs_t p, const sl_sample_row_t *rules)
{
    extern __shared__ uint4 memory[];
    shared_t *shared = (shared_t *)memory;
    const uint32_t t = blockIdx.x / RANKS;
    uint32_t count = p.top_count;
    if (rules != NULL) {
        int32_t wanted = rules[t].logprobs;
        if (wanted < 0) {
            return; /* all blocks of the cluster */
        }
        count = (uint32_t)wanted;
    }
    count = count < SL_TOP_LOGPROBS_MAX ? count : SL_TOP_LOGPROBS_MAX;
    count = count < p.vocab ? count : p.vocab;
    const float *row = p.logits + (size_t)t * p.vocab;
    sl_slice_t slice = sl_slice_load((float *)((char *)memory + FIXED_BYTES), row, p.vocab);
    __syncthreads();
    const double lse = log_sum_exp(shared, slice);
    list_best(shared, slice, count);
    sl_cluster_sync();
    if (sl_cluster_rank() == 0 && threadIdx.x < SL_WARP) {
        merge_best(shared, row, count, lse, &p.out[t]);
        if (threadIdx.x == 0) {
            p.out[t].logprob = (float)(row[p.targets[t]] - lse);
            p.out[t].top_count = count;
        }
    }
    sl_cluster_sync();
}

sl_status_t sl_cuda_logprobs(sl_device_t *device, sl_stream_t *stream, const char *what,
                             const sl_token_logprobs_t *p, const sl_sample_row_t *rules)
{
    if (p->rows == 0) {
        return SL_OK;
    }
    size_t bytes = 0;
    cudaStream_t on = sl_cuda_enter(device, stream);
    SL_TRY(sl_vocab_shared(device, what, p->vocab, FIXED_BYTES, &bytes));
    SL_CUDA_TRY(cudaFuncSetAttribute((const void *)logprobs_kernel,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                what);
    SL_LAUNCH(what, logprobs_kernel, p->rows * RANKS, THREADS, bytes, on, *p, rules);
    return SL_OK;
}

sl_status_t sl_cuda_token_logprobs(sl_device_t *device, sl_stream_t *stream,
                                   const sl_token_logprobs_t *p)
{
    return sl_cuda_logprobs(device, stream, "token_logprobs", p, NULL);
}
