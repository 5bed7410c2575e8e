/*
 * RMSNorm, with the residual's addition in the same pass. A block a row.
 *
 * The order of roundings is that of the published models' code, whose tensors are bf16: the sum
 * with the residual is rounded; the mean of squares and the scaling are f32; the scaled value is
 * rounded before the weight multiplies it.
 */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/vec.cuh"

#define GENERIC_THREADS 256u

__device__ static inline float scaled(float x, float scale, float weight)
{
    return sl_round_bf16(x * scale) * weight;
}

/* Eight values at a time; a thread keeps its PIECES pieces in registers from the one read to the
 * one write, which also lets `out` be `x`. */
template <int PIECES> __global__ static void __launch_bounds__(1024) norm_kernel(sl_rms_norm_t p)
{
    __shared__ float shared[SL_WARP];
    const sl_bf16_t *x = (const sl_bf16_t *)p.x + (size_t)blockIdx.x * p.x_stride;
    sl_bf16_t *residual = (sl_bf16_t *)p.residual + (size_t)blockIdx.x * p.width;
    sl_bf16_t *out = (sl_bf16_t *)p.out + (size_t)blockIdx.x * p.out_stride;
    const sl_bf16_t *weight = (const sl_bf16_t *)p.weight;
    const bool add = p.residual != NULL && p.x != NULL;
    const sl_bf16_t *from = p.x != NULL ? x : residual;
    uint4 raw[PIECES], other[PIECES], weights[PIECES];
    float values[PIECES][SL_VEC], square_sum = 0;

#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        unsigned at = (i * blockDim.x + threadIdx.x) * SL_VEC;
        raw[i] = other[i] = weights[i] = make_uint4(0, 0, 0, 0);
        if (at < p.width) {
            raw[i] = sl_load16(from + at);
            if (add) {
                other[i] = sl_load16(residual + at);
            }
            weights[i] = sl_load16(weight + at);
        }
    }
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        sl_unpack8(raw[i], values[i]);
        if (add) {
            float terms[SL_VEC];
            unsigned at = (i * blockDim.x + threadIdx.x) * SL_VEC;
            sl_unpack8(other[i], terms);
#pragma unroll
            for (unsigned j = 0; j < SL_VEC; j++) {
                values[i][j] = sl_round_bf16(values[i][j] + terms[j]);
            }
            if (at < p.width) {
                sl_store16(residual + at, sl_pack8(values[i]));
            }
        }
#pragma unroll
        for (unsigned j = 0; j < SL_VEC; j++) {
            square_sum = fmaf(values[i][j], values[i][j], square_sum);
        }
    }
    const float scale = rsqrtf(sl_block_sum(square_sum, shared) / (float)p.width + p.eps);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        unsigned at = (i * blockDim.x + threadIdx.x) * SL_VEC;
        float factors[SL_VEC];
        sl_unpack8(weights[i], factors);
#pragma unroll
        for (unsigned j = 0; j < SL_VEC; j++) {
            values[i][j] = scaled(values[i][j], scale, factors[j]);
        }
        if (at < p.width) {
            sl_store16(out + at, sl_pack8(values[i]));
        }
    }
}

/* Any width, stride and alignment. */
__global__ static void __launch_bounds__(GENERIC_THREADS) norm_generic_kernel(sl_rms_norm_t p)
{
    __shared__ float shared[SL_WARP];
    const sl_bf16_t *x = (const sl_bf16_t *)p.x + (size_t)blockIdx.x * p.x_stride;
    sl_bf16_t *residual = (sl_bf16_t *)p.residual + (size_t)blockIdx.x * p.width;
    sl_bf16_t *out = (sl_bf16_t *)p.out + (size_t)blockIdx.x * p.out_stride;
    const sl_bf16_t *weight = (const sl_bf16_t *)p.weight;
    float square_sum = 0;
    for (unsigned i = threadIdx.x; i < p.width; i += GENERIC_THREADS) {
        float value = sl_to_float(p.x != NULL ? x[i] : residual[i]);
        if (p.residual != NULL && p.x != NULL) {
            value = sl_round_bf16(value + sl_to_float(residual[i]));
            residual[i] = sl_to_bf16(value);
        }
        square_sum = fmaf(value, value, square_sum);
    }
    const float scale = rsqrtf(sl_block_sum(square_sum, shared) / (float)p.width + p.eps);
    const sl_bf16_t *from = p.residual != NULL ? residual : x;
    for (unsigned i = threadIdx.x; i < p.width; i += GENERIC_THREADS) {
        out[i] = sl_to_bf16(scaled(sl_to_float(from[i]), scale, sl_to_float(weight[i])));
    }
}

static bool fits_vectors(const sl_rms_norm_t *p)
{
    return sl_vec_fits(p->out, p->out_stride) && sl_vec_fits(p->x, p->x_stride) &&
           sl_vec_fits(p->residual, p->width) && sl_vec_fits(p->weight, p->width);
}

sl_status_t sl_cuda_rms_norm(sl_device_t *device, sl_stream_t *stream, const sl_rms_norm_t *params)
{
    sl_rms_norm_t p = *params;
    SL_ASSERT(p.x != NULL || p.residual != NULL);
    if (p.rows == 0 || p.width == 0) {
        return SL_OK;
    }
    p.x_stride = p.x_stride ? p.x_stride : p.width;
    p.out_stride = p.out_stride ? p.out_stride : p.width;
    cudaStream_t on = sl_cuda_enter(device, stream);
    /* Short rows: a piece a thread, for the shortest wait. Longer ones: two, in smaller blocks. */
    uint32_t pieces = p.width / SL_VEC, each = pieces <= 512 ? 1 : pieces <= 2048 ? 2 : 4;
    uint32_t threads = sl_div_up(sl_div_up(pieces, each), SL_WARP) * SL_WARP;
    if (!fits_vectors(&p) || threads > 1024) {
        SL_LAUNCH("rms_norm", norm_generic_kernel, p.rows, GENERIC_THREADS, 0, on, p);
    } else if (each == 1) {
        SL_LAUNCH("rms_norm", norm_kernel<1>, p.rows, threads, 0, on, p);
    } else if (each == 2) {
        SL_LAUNCH("rms_norm", norm_kernel<2>, p.rows, threads, 0, on, p);
    } else {
        SL_LAUNCH("rms_norm", norm_kernel<4>, p.rows, threads, 0, on, p);
    }
    return SL_OK;
}
