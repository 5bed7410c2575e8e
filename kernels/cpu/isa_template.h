/*
 * The inner loops of isa.h for one instruction set. The including file defines LANES (4, 8, 16),
 * DOT_ROWS and MIX_ROWS (rows of a tile, 1 to 4), TARGET (function attribute), MULTIPLY_ADD, ISA
 * (the table's name) and ISA_NAME.
 *
 * Products. BLAS is not used, on measurement (OpenBLAS 0.3.21, one Zen core, AVX-512, f32): its
 * sgemm takes other kernels for one, few and many rows, and most elements differ in their last bits
 * from the same row computed alone (473,014 of 524,288 at M = 512, N = 1024, K = 256), so a
 * request's tokens would depend on its neighbours; and it is slow at the few rows of a decode step:
 * with weights of 4 MB (N = 4096, K = 256) one row takes 614 us and eight 733 us, where the tile
 * below takes 148 and 251. At 512 rows both run at 85 to 100 GFLOP/s, the core's peak.
 *
 * A tile is DOT_ROWS rows by 4 columns. Both operands lie contiguous along k, so every step loads
 * one vector of each row and column and multiplies all pairs; nothing is packed:
 *
 *              w[n+0] w[n+1] w[n+2] w[n+3]     a vector of k each
 *      x[m+0]  acc    acc    acc    acc
 *      x[m+1]  acc    acc    acc    acc  ...
 *
 * An element is the sum of its lanes' sums over k = lane, lane + LANES, ... in this order, then of
 * the lanes by a fixed tree. Missing rows and columns change neither, which is the invariance the
 * contract asks for. Rows go in blocks that stay in the second-level cache while the weights pass
 * once.
 */
#include "kernels/cpu/isa.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef float vec_t __attribute__((vector_size(LANES * 4)));
typedef float vec_unaligned_t __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t bits_t __attribute__((vector_size(LANES * 4)));
typedef int32_t mask_t __attribute__((vector_size(LANES * 4)));
typedef float vec4_t __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 8")

#define DOT_BLOCK_BYTES (128 * 1024) /* of x: stays in the second-level cache */
#define STREAM_K_MAX 512             /* longer rows are streams enough of their own */

INLINE vec_t vec_set(float value)
{
    vec_t zero = {0};
    return zero + value;
}

INLINE vec_t vec_load(const float *from)
{
    return *(const vec_unaligned_t *)from;
}

/* The first `count` lanes; the rest are 0. */
INLINE vec_t vec_load_part(const float *from, size_t count)
{
    float lanes[LANES] = {0};
    memcpy(lanes, from, count * sizeof(float));
    return vec_load(lanes);
}

INLINE void vec_store(float *to, vec_t value)
{
    *(vec_unaligned_t *)to = value;
}

INLINE void vec_store_part(float *to, vec_t value, size_t count)
{
    float lanes[LANES];
    vec_store(lanes, value);
    memcpy(to, lanes, count * sizeof(float));
}

INLINE vec_t vec_select(mask_t mask, vec_t yes, vec_t no)
{
    return (vec_t)((mask & (mask_t)yes) | (~mask & (mask_t)no));
}

/* Folds the lanes in halves down to four. */
INLINE vec4_t vec_fold(vec_t value)
{
    union {
        vec_t whole;
        vec4_t quarters[LANES / 4];
    } parts = {.whole = value};
#if LANES == 16
    return (parts.quarters[0] + parts.quarters[2]) + (parts.quarters[1] + parts.quarters[3]);
#elif LANES == 8
    return parts.quarters[0] + parts.quarters[1];
#else
    return parts.quarters[0];
#endif
}

/* The lane sums of four vectors: each is (l0 + l2) + (l1 + l3) of the folded four. */
INLINE vec4_t vec_sum4(vec_t a, vec_t b, vec_t c, vec_t d)
{
    vec4_t fa = vec_fold(a), fb = vec_fold(b), fc = vec_fold(c), fd = vec_fold(d);
    vec4_t ab = __builtin_shufflevector(fa, fb, 0, 4, 1, 5) +
                __builtin_shufflevector(fa, fb, 2, 6, 3, 7);
    vec4_t cd = __builtin_shufflevector(fc, fd, 0, 4, 1, 5) +
                __builtin_shufflevector(fc, fd, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) +
           __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

INLINE float vec_sum(vec_t value)
{
    vec4_t folded = vec_fold(value);
    return (folded[0] + folded[2]) + (folded[1] + folded[3]);
}

typedef const float *rows_t[4]; /* where each row, or column, of a tile begins */

/* Adds the whole vectors of k. One column after another reads w as one stream, which the processor
 * prefetches where four streams of short rows defeat it; all columns at once loads x a quarter as
 * often. Every element sees the same additions in the same order. */
INLINE size_t dot_whole(vec_t acc[DOT_ROWS][4], rows_t x, rows_t w, size_t k_end, bool stream,
                        const size_t rows, const size_t columns)
{
    size_t k = 0;
    if (stream) {
        UNROLL for (size_t j = 0; j < columns; j++) {
            for (k = 0; k + LANES <= k_end; k += LANES) {
                vec_t column = vec_load(w[j] + k);
                UNROLL for (size_t i = 0; i < rows; i++) {
                    acc[i][j] = MULTIPLY_ADD(vec_load(x[i] + k), column, acc[i][j]);
                }
            }
        }
        return k;
    }
    for (; k + LANES <= k_end; k += LANES) {
        vec_t column[4];
        UNROLL for (size_t j = 0; j < columns; j++) {
            column[j] = vec_load(w[j] + k);
        }
        UNROLL for (size_t i = 0; i < rows; i++) {
            vec_t row = vec_load(x[i] + k);
            UNROLL for (size_t j = 0; j < columns; j++) {
                acc[i][j] = MULTIPLY_ADD(row, column[j], acc[i][j]);
            }
        }
    }
    return k;
}

/* `rows` by `columns` (constants) from row m, column n. `first`: w is not in a cache yet. */
INLINE void dot_tile(const sl_dot_t *d, size_t m, size_t n, bool first, const size_t rows,
                     const size_t columns)
{
    vec_t acc[DOT_ROWS][4] = {0};
    for (size_t part = 0; part < d->part_count; part++) {
        const sl_dot_part_t *p = &d->parts[part];
        rows_t x, w;
        UNROLL for (size_t i = 0; i < rows; i++) {
            x[i] = p->x + (m + i) * p->x_stride;
        }
        UNROLL for (size_t j = 0; j < columns; j++) {
            w[j] = p->w + (n + j) * p->w_stride;
        }
        size_t k = dot_whole(acc, x, w, p->k, first && p->k <= STREAM_K_MAX, rows, columns);
        if (k < p->k) {
            UNROLL for (size_t i = 0; i < rows; i++) {
                vec_t row = vec_load_part(x[i] + k, p->k - k);
                UNROLL for (size_t j = 0; j < columns; j++) {
                    vec_t column = vec_load_part(w[j] + k, p->k - k);
                    acc[i][j] = MULTIPLY_ADD(row, column, acc[i][j]);
                }
            }
        }
    }
    UNROLL for (size_t i = 0; i < rows; i++) {
        vec4_t sums = vec_sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
        memcpy(d->out + (m + i) * d->out_stride + n, &sums, columns * sizeof(float));
    }
}

/* Rows [begin, end) by `columns` (a constant) columns from n. */
INLINE void dot_columns(const sl_dot_t *d, size_t begin, size_t end, size_t n, const size_t columns)
{
    size_t m = begin;
    for (; m + DOT_ROWS <= end; m += DOT_ROWS) {
        dot_tile(d, m, n, m == begin, DOT_ROWS, columns);
    }
#if DOT_ROWS > 2
    if (m + 2 <= end) {
        dot_tile(d, m, n, m == begin, 2, columns);
        m += 2;
    }
#endif
    if (m < end) {
        dot_tile(d, m, n, m == begin, 1, columns);
    }
}

TARGET static void dot(const sl_dot_t *d)
{
    size_t k = d->parts[0].k + (d->part_count > 1 ? d->parts[1].k : 0);
    size_t block = DOT_BLOCK_BYTES / ((k + 1) * sizeof(float)) / DOT_ROWS * DOT_ROWS;
    block = block < 8 ? 8 : block;
    for (size_t m = 0; m < d->rows; m += block) {
        size_t end = d->rows - m < block ? d->rows : m + block;
        size_t n = 0;
        for (; n + 4 <= d->n; n += 4) {
            dot_columns(d, m, end, n, 4);
        }
        for (; n < d->n; n++) {
            dot_columns(d, m, end, n, 1);
        }
    }
}

/* `rows` (a constant) rows from m by two vectors of columns from c. */
INLINE void mix_tile(const sl_mix_t *p, size_t m, size_t c, const size_t rows)
{
    vec_t acc[MIX_ROWS][2] = {0};
    if (p->keep != NULL) {
        UNROLL for (size_t i = 0; i < rows; i++) {
            const float *out = p->out + (m + i) * p->out_stride + c;
            acc[i][0] = vec_load(out) * p->keep[m + i];
            acc[i][1] = vec_load(out + LANES) * p->keep[m + i];
        }
    }
    for (size_t k = 0; k < p->k; k++) {
        vec_t v0 = vec_load(p->v + k * p->v_stride + c);
        vec_t v1 = vec_load(p->v + k * p->v_stride + c + LANES);
        UNROLL for (size_t i = 0; i < rows; i++) {
            vec_t weight = vec_set(p->p[(m + i) * p->p_stride + k]);
            acc[i][0] = MULTIPLY_ADD(weight, v0, acc[i][0]);
            acc[i][1] = MULTIPLY_ADD(weight, v1, acc[i][1]);
        }
    }
    UNROLL for (size_t i = 0; i < rows; i++) {
        float *out = p->out + (m + i) * p->out_stride + c;
        vec_store(out, acc[i][0]);
        vec_store(out + LANES, acc[i][1]);
    }
}

/* One row by the last `count` < 2 * LANES columns. */
INLINE void mix_rest(const sl_mix_t *p, size_t m, size_t c, size_t count)
{
    for (; count > 0; c += LANES) {
        size_t part = count < LANES ? count : LANES;
        float *out = p->out + m * p->out_stride + c;
        vec_t acc = {0};
        if (p->keep != NULL) {
            acc = vec_load_part(out, part) * p->keep[m];
        }
        for (size_t k = 0; k < p->k; k++) {
            const float *v = p->v + k * p->v_stride + c;
            vec_t values = part == LANES ? vec_load(v) : vec_load_part(v, part);
            acc = MULTIPLY_ADD(vec_set(p->p[m * p->p_stride + k]), values, acc);
        }
        vec_store_part(out, acc, part);
        count -= part;
    }
}

TARGET static void mix(const sl_mix_t *p)
{
    size_t c = 0;
    for (; c + 2 * LANES <= p->width; c += 2 * LANES) {
        size_t m = 0;
        for (; m + MIX_ROWS <= p->rows; m += MIX_ROWS) {
            mix_tile(p, m, c, MIX_ROWS);
        }
        for (; m < p->rows; m++) {
            mix_tile(p, m, c, 1);
        }
    }
    for (size_t m = 0; m < p->rows; m++) {
        mix_rest(p, m, c, p->width - c);
    }
}

/*
 * e^x: x = n ln 2 + r with |r| <= ln 2 / 2, so e^x = 2^n e^r. The Taylor series of e^r up to r^7 is
 * good to 6e-9 there. n is rounded by adding 1.5 * 2^23, which leaves it in the low bits; 2^n is
 * applied in two halves, since n = 128 is no exponent of its own. Below the smallest normal number
 * the result is 0, above the largest inf; NaN stays NaN.
 */
INLINE vec_t vec_exp(vec_t x)
{
    const float shifter = 0x1.8p23f;
    const vec_t shifters = vec_set(shifter);
    vec_t shifted = MULTIPLY_ADD(x, vec_set(0x1.715476p0f), shifters);
    vec_t n = shifted - shifters;
    vec_t r = MULTIPLY_ADD(n, vec_set(-0x1.62e4p-1f), x); /* ln 2 in two pieces, the first short */
    r = MULTIPLY_ADD(n, vec_set(-0x1.7f7d1cp-20f), r);
    vec_t sum = MULTIPLY_ADD(r, vec_set(1.0f / 5040), vec_set(1.0f / 720));
    sum = MULTIPLY_ADD(r, sum, vec_set(1.0f / 120));
    sum = MULTIPLY_ADD(r, sum, vec_set(1.0f / 24));
    sum = MULTIPLY_ADD(r, sum, vec_set(1.0f / 6));
    sum = MULTIPLY_ADD(r, sum, vec_set(0.5f));
    sum = MULTIPLY_ADD(r, sum, vec_set(1.0f));
    sum = MULTIPLY_ADD(r, sum, vec_set(1.0f));
    mask_t power = (mask_t)((bits_t)shifted - (bits_t)shifters);
    mask_t half = power >> 1;
    bits_t other = (bits_t)power - (bits_t)half;
    sum = sum * (vec_t)(((bits_t)half + 127u) << 23) * (vec_t)((other + 127u) << 23);
    sum = vec_select((mask_t)(x < vec_set(-87.33654f)), vec_set(0), sum);
    return vec_select((mask_t)(x > vec_set(88.72283f)), vec_set(INFINITY), sum);
}

TARGET static float scale_max(float *x, size_t count, float scale)
{
    vec_t max = vec_set(-INFINITY);
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec_t value = vec_load(x + i) * scale;
        vec_store(x + i, value);
        max = vec_select((mask_t)(value > max), value, max);
    }
    float best = -INFINITY;
    for (size_t lane = 0; lane < LANES; lane++) {
        best = max[lane] > best ? max[lane] : best;
    }
    for (; i < count; i++) {
        x[i] *= scale;
        best = x[i] > best ? x[i] : best;
    }
    return best;
}

TARGET static float clean_max(float *out, const float *x, size_t count)
{
    vec_t max = vec_set(-INFINITY);
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec_t value = vec_load(x + i);
        value = vec_select((mask_t)(value == value), value, vec_set(-INFINITY));
        vec_store(out + i, value);
        max = vec_select((mask_t)(value > max), value, max);
    }
    float best = -INFINITY;
    for (size_t lane = 0; lane < LANES; lane++) {
        best = max[lane] > best ? max[lane] : best;
    }
    for (; i < count; i++) {
        out[i] = isnan(x[i]) ? -INFINITY : x[i];
        best = out[i] > best ? out[i] : best;
    }
    return best;
}

TARGET static float exp_sum(float *out, const float *x, size_t count, float shift, float scale)
{
    vec_t sum = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec_t value = vec_exp((vec_load(x + i) - shift) * scale);
        sum += value;
        if (out != NULL) {
            vec_store(out + i, value);
        }
    }
    if (i < count) {
        vec_t value = vec_exp((vec_load_part(x + i, count - i) - shift) * scale);
        float lanes[LANES] = {0};
        vec_store_part(lanes, value, count - i);
        sum += vec_load(lanes);
        if (out != NULL) {
            memcpy(out + i, lanes, (count - i) * sizeof(float));
        }
    }
    return vec_sum(sum);
}

TARGET static float square_sum(const float *x, size_t count)
{
    vec_t sum = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec_t value = vec_load(x + i);
        sum = MULTIPLY_ADD(value, value, sum);
    }
    vec_t rest = vec_load_part(x + i, count - i);
    return vec_sum(MULTIPLY_ADD(rest, rest, sum));
}

TARGET static void scale_by(float *out, const float *x, const float *weight, float scale,
                            size_t count)
{
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec_store(out + i, vec_load(x + i) * scale * vec_load(weight + i));
    }
    for (; i < count; i++) {
        out[i] = x[i] * scale * weight[i];
    }
}

TARGET static void add_scaled(float *out, const float *x, float factor, size_t count)
{
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec_store(out + i, MULTIPLY_ADD(vec_load(x + i), vec_set(factor), vec_load(out + i)));
    }
    vec_t rest = MULTIPLY_ADD(vec_load_part(x + i, count - i), vec_set(factor),
                              vec_load_part(out + i, count - i));
    vec_store_part(out + i, rest, count - i);
}

INLINE vec_t vec_silu_mul(vec_t gate, vec_t up)
{
    return gate / (vec_exp(-gate) + 1.0f) * up;
}

TARGET static void silu_mul(float *out, const float *gate, const float *up, size_t count)
{
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec_store(out + i, vec_silu_mul(vec_load(gate + i), vec_load(up + i)));
    }
    vec_t rest = vec_silu_mul(vec_load_part(gate + i, count - i), vec_load_part(up + i, count - i));
    vec_store_part(out + i, rest, count - i);
}

const sl_isa_t ISA = {
    .name = ISA_NAME,
    .dot = dot,
    .mix = mix,
    .scale_max = scale_max,
    .clean_max = clean_max,
    .exp_sum = exp_sum,
    .square_sum = square_sum,
    .scale_by = scale_by,
    .add_scaled = add_scaled,
    .silu_mul = silu_mul,
};
