/*
 * Rows by index (embedding, choosing rows, cached latents of a sequence) and SiLU(gate) * up. All
 * of it moves memory and nothing else; pieces are 16 bytes, or single elements where the width or
 * an address is odd.
 */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/rows.cuh"

/* T: uint4 or one bf16. A thread's loads go out before its first store: the rows do not overlap. */
template <typename T>
__device__ static inline void copy_row(T *__restrict__ to, const T *__restrict__ from,
                                       uint32_t pieces)
{
#pragma unroll 4
    SL_TILE_LOOP(piece, pieces)
    {
        to[piece] = from[piece];
    }
}

/* An index below 0 stands for previous[-1 - index], as sl_embed_t has it. */
template <typename T>
__global__ static void __launch_bounds__(SL_TILE_THREADS)
    gather_kernel(T *out, const T *table, const int32_t *index, const int32_t *previous,
                  uint32_t rows, uint32_t pieces)
{
    uint32_t row;
    if (!sl_tile_row(rows, &row)) {
        return;
    }
    int32_t from = index[row];
    if (from < 0) {
        from = previous[-1 - from];
    }
    copy_row(out + (size_t)row * pieces, table + (size_t)from * pieces, pieces);
}

static sl_status_t gather(sl_device_t *device, sl_stream_t *stream, const char *what, void *out,
                          const void *table, const int32_t *index, const int32_t *previous,
                          uint32_t rows, uint32_t width)
{
    if (rows == 0 || width == 0) {
        return SL_OK;
    }
    cudaStream_t on = sl_cuda_enter(device, stream);
    if (sl_vec_fits(out, width) && sl_vec_fits(table, width)) {
        uint32_t pieces = width / SL_VEC;
        sl_tile_t tile = sl_tile(rows, pieces, device->sm_count);
        SL_LAUNCH(what, gather_kernel<uint4>, tile.grid, tile.block, 0, on, (uint4 *)out,
                  (const uint4 *)table, index, previous, rows, pieces);
    } else {
        sl_tile_t tile = sl_tile(rows, width, device->sm_count);
        SL_LAUNCH(what, gather_kernel<sl_bf16_t>, tile.grid, tile.block, 0, on, (sl_bf16_t *)out,
                  (const sl_bf16_t *)table, index, previous, rows, width);
    }
    return SL_OK;
}

sl_status_t sl_cuda_embed(sl_device_t *device, sl_stream_t *stream, const sl_embed_t *p)
{
    return gather(device, stream, "embed", p->out, p->table, p->ids, p->previous, p->rows,
                  p->width);
}

sl_status_t sl_cuda_take_rows(sl_device_t *device, sl_stream_t *stream, const sl_take_rows_t *p)
{
    return gather(device, stream, "take_rows", p->out, p->x, p->index, NULL, p->rows, p->width);
}

template <typename T>
__global__ static void __launch_bounds__(SL_TILE_THREADS)
    latents_kernel(sl_gather_latents_t p, uint32_t pieces)
{
    uint32_t row;
    if (!sl_tile_row(p.count, &row)) {
        return;
    }
    uint32_t token = p.first + row, page_tokens = p.cache.page_tokens;
    size_t page = (size_t)p.pages[token / page_tokens];
    size_t cached = (page * p.cache.layers + p.layer) * page_tokens + token % page_tokens;
    copy_row((T *)p.out + (size_t)row * pieces, (const T *)p.cache.base + cached * pieces, pieces);
}

sl_status_t sl_cuda_gather_latents(sl_device_t *device, sl_stream_t *stream,
                                   const sl_gather_latents_t *p)
{
    uint32_t width = p->cache.width;
    if (p->count == 0 || width == 0) {
        return SL_OK;
    }
    cudaStream_t on = sl_cuda_enter(device, stream);
    if (sl_vec_fits(p->out, width) && sl_vec_fits(p->cache.base, width)) {
        sl_tile_t tile = sl_tile(p->count, width / SL_VEC, device->sm_count);
        SL_LAUNCH("gather_latents", latents_kernel<uint4>, tile.grid, tile.block, 0, on, *p,
                  width / SL_VEC);
    } else {
        sl_tile_t tile = sl_tile(p->count, width, device->sm_count);
        SL_LAUNCH("gather_latents", latents_kernel<sl_bf16_t>, tile.grid, tile.block, 0, on, *p,
                  width);
    }
    return SL_OK;
}

/* exp(-gate) may be infinite; the quotient is then 0, as it should be. */
__device__ static inline float silu_mul(float gate, float up)
{
    return __fdividef(gate, 1 + __expf(-gate)) * up;
}

__device__ static inline uint32_t rows_of(const sl_silu_mul_t *p)
{
    uint32_t rows = p->row_count != NULL ? (uint32_t)*p->row_count : p->rows;
    return rows < p->rows ? rows : p->rows;
}

__device__ static inline void silu_mul_row(uint4 *__restrict__ out, const uint4 *__restrict__ x,
                                           uint32_t pieces)
{
#pragma unroll 2
    SL_TILE_LOOP(piece, pieces)
    {
        float gates[SL_VEC], ups[SL_VEC];
        sl_unpack8(x[piece], gates);
        sl_unpack8(x[pieces + piece], ups);
#pragma unroll
        for (unsigned j = 0; j < SL_VEC; j++) {
            gates[j] = silu_mul(gates[j], ups[j]);
        }
        out[piece] = sl_pack8(gates);
    }
}

__global__ static void __launch_bounds__(SL_TILE_THREADS) silu_mul_kernel(sl_silu_mul_t p)
{
    uint32_t row, pieces = p.width / SL_VEC;
    if (sl_tile_row(rows_of(&p), &row)) {
        silu_mul_row((uint4 *)p.out + (size_t)row * pieces,
                     (const uint4 *)p.x + (size_t)row * 2 * pieces, pieces);
    }
}

__global__ static void __launch_bounds__(SL_TILE_THREADS) silu_mul_generic_kernel(sl_silu_mul_t p)
{
    uint32_t row;
    if (!sl_tile_row(rows_of(&p), &row)) {
        return;
    }
    const sl_bf16_t *gate = (const sl_bf16_t *)p.x + (size_t)row * 2 * p.width;
    sl_bf16_t *out = (sl_bf16_t *)p.out + (size_t)row * p.width;
    SL_TILE_LOOP(i, p.width)
    {
        out[i] = sl_to_bf16(silu_mul(sl_to_float(gate[i]), sl_to_float(gate[p.width + i])));
    }
}

sl_status_t sl_cuda_silu_mul(sl_device_t *device, sl_stream_t *stream, const sl_silu_mul_t *p)
{
    if (p->rows == 0 || p->width == 0) {
        return SL_OK;
    }
    cudaStream_t on = sl_cuda_enter(device, stream);
    if (sl_vec_fits(p->out, p->width) && sl_vec_fits(p->x, p->width)) {
        sl_tile_t tile = sl_tile(p->rows, p->width / SL_VEC, device->sm_count);
        SL_LAUNCH("silu_mul", silu_mul_kernel, tile.grid, tile.block, 0, on, *p);
    } else {
        sl_tile_t tile = sl_tile(p->rows, p->width, device->sm_count);
        SL_LAUNCH("silu_mul", silu_mul_generic_kernel, tile.grid, tile.block, 0, on, *p);
    }
    return SL_OK;
}
