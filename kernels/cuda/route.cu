/*
 * Expert choice. A warp a token, its experts' keys and scores in shared memory; no barrier but the
 * warp's own. See pick.cuh for the choosing.
 *
 * Without a bias the logits themselves decide: softmax and sigmoid keep their order, and logits
 * that differ may have scores that do not. With a bias it is score + bias in f32.
 */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/pick.cuh"

#define WARPS 4u

/* Of one warp. */
typedef struct {
    uint32_t *keys;       /* [experts] */
    float *scores;        /* [experts] */
    uint32_t *group_keys; /* [n_group] */
    uint32_t *group_in;   /* [n_group] */
} route_row_t;

__host__ __device__ static uint32_t row_words(uint32_t experts, uint32_t groups)
{
    return 2 * experts + 2 * groups;
}

/* Scores of all experts, and the keys they are chosen by. Softmax scores lack their divisor, which
 * is returned (1 for sigmoid). */
__device__ static float score_experts(const sl_route_t &p, const float *logits, route_row_t row,
                                      unsigned lane)
{
    const bool biased = p.method == SL_TOPK_NOAUX_TC;
    float max = -INFINITY, sum = 0;
    for (uint32_t e = lane; e < p.experts; e += SL_WARP) {
        float logit = logits[e];
        row.scores[e] = logit;
        row.keys[e] = sl_key(logit);
        max = fmaxf(max, logit);
    }
    if (p.scoring == SL_SCORE_SOFTMAX) {
        max = sl_warp_max(max);
    }
    for (uint32_t e = lane; e < p.experts; e += SL_WARP) {
        float logit = row.scores[e];
        float score = p.scoring == SL_SCORE_SIGMOID ? 1 / (1 + expf(-logit)) : expf(logit - max);
        row.scores[e] = score;
        sum += score;
    }
    sum = p.scoring == SL_SCORE_SOFTMAX ? sl_warp_sum(sum) : 1;
    for (uint32_t e = lane; biased && e < p.experts; e += SL_WARP) {
        row.keys[e] = sl_key(row.scores[e] / sum + p.bias[e]);
    }
    return sum;
}

/* A group's score: its best, or the sum of its two best where there is a bias. */
__device__ static uint32_t group_key(const sl_route_t &p, const uint32_t *keys, uint32_t size)
{
    uint32_t best = SL_KEY_NONE, second = SL_KEY_NONE;
    for (uint32_t i = 0; i < size; i++) {
        uint32_t key = keys[i];
        second = key > best ? best : (key > second ? key : second);
        best = key > best ? key : best;
    }
    if (p.method != SL_TOPK_NOAUX_TC || size == 1) {
        return best;
    }
    return sl_key(sl_key_value(best) + sl_key_value(second));
}

__device__ static void exclude_groups(const sl_route_t &p, route_row_t row, unsigned lane)
{
    const uint32_t size = p.experts / p.n_group;
    for (uint32_t g = lane; g < p.n_group; g += SL_WARP) {
        row.group_keys[g] = group_key(p, row.keys + g * size, size);
        row.group_in[g] = 0;
    }
    __syncwarp();
    sl_lane_best_t mine = sl_lane_best(row.group_keys, p.n_group, lane);
    for (uint32_t j = 0; j < p.topk_group; j++) {
        uint32_t group = sl_warp_take(row.group_keys, p.n_group, lane, &mine);
        if (lane == 0) {
            row.group_in[group] = 1;
        }
    }
    __syncwarp();
    for (uint32_t e = lane; e < p.experts; e += SL_WARP) {
        if (!row.group_in[e / size]) {
            row.keys[e] = SL_KEY_NONE;
        }
    }
}

/* Lane j % 32 writes choice j. */
__device__ static void choose(const sl_route_t &p, route_row_t row, float divisor, int32_t *ids,
                              float *weights, unsigned lane)
{
    sl_lane_best_t mine = sl_lane_best(row.keys, p.experts, lane);
    float sum = 0;
    for (uint32_t j = 0; j < p.top_k; j++) {
        uint32_t expert = sl_warp_take(row.keys, p.experts, lane, &mine);
        float score = row.scores[expert] / divisor;
        sum += score;
        if (j % SL_WARP == lane) {
            ids[j] = (int32_t)expert;
            weights[j] = score;
        }
    }
    const bool normalise = p.norm_topk_prob && p.top_k > 1;
    const bool scale = p.method == SL_TOPK_NOAUX_TC || !normalise;
    for (uint32_t j = lane; j < p.top_k; j += SL_WARP) {
        float weight = normalise ? weights[j] / (sum + 1e-20f) : weights[j];
        weights[j] = scale ? weight * p.scaling : weight;
    }
}

__global__ static void __launch_bounds__(WARPS *SL_WARP) route_kernel(sl_route_t p)
{
    extern __shared__ uint32_t words[];
    const unsigned lane = threadIdx.x % SL_WARP, warp = threadIdx.x / SL_WARP;
    const uint32_t token = blockIdx.x * (blockDim.x / SL_WARP) + warp;
    if (token >= p.rows) {
        return;
    }
    int32_t *ids = p.ids + (size_t)token * p.top_k;
    float *weights = p.weights + (size_t)token * p.top_k;
    if (p.row_valid != NULL && !p.row_valid[token]) {
        for (uint32_t j = lane; j < p.top_k; j += SL_WARP) {
            ids[j] = -1;
            weights[j] = 0;
        }
        return;
    }
    route_row_t row;
    row.keys = words + warp * row_words(p.experts, p.n_group);
    row.scores = (float *)(row.keys + p.experts);
    row.group_keys = row.keys + 2 * p.experts;
    row.group_in = row.group_keys + p.n_group;
    float divisor = score_experts(p, p.logits + (size_t)token * p.experts, row, lane);
    __syncwarp();
    if (p.method != SL_TOPK_GREEDY) {
        exclude_groups(p, row, lane);
        __syncwarp();
    }
    choose(p, row, divisor, ids, weights, lane);
}

sl_status_t sl_cuda_route(sl_device_t *device, sl_stream_t *stream, const sl_route_t *params)
{
    sl_route_t p = *params;
    if (p.rows == 0 || p.top_k == 0) {
        return SL_OK;
    }
    p.n_group = p.method == SL_TOPK_GREEDY ? 0 : p.n_group;
    SL_ASSERT(p.top_k <= p.experts);
    SL_ASSERT(p.method == SL_TOPK_GREEDY ||
              (p.n_group > 0 && p.experts % p.n_group == 0 && p.topk_group <= p.n_group &&
               p.top_k <= p.topk_group * (p.experts / p.n_group)));
    SL_TRY(sl_cuda_check_experts(p.experts));
    cudaStream_t on = sl_cuda_enter(device, stream);
    size_t bytes = row_words(p.experts, p.n_group) * sizeof(uint32_t);
    uint32_t warps = bytes * WARPS <= 48 * 1024 ? WARPS : 1;
    SL_LAUNCH("route", route_kernel, sl_div_up(p.rows, warps), warps * SL_WARP, bytes * warps, on,
              p);
    return SL_OK;
}
