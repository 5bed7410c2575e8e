/*
 * The inner loops of the CPU backend, one set for each instruction set, chosen once at open by what
 * the processor has: one binary runs anywhere. The sets are one source, isa_template.h, compiled
 * with 16, 8 or 4 lanes. (Chosen by a table rather than by ifunc: a sanitizer's runtime is not up
 * yet when an ifunc resolver runs.)
 *
 * Invariance: an element's sum runs over its own k in one order, whatever rows and columns are
 * computed in the same call. All memory is the caller's, f32, of any alignment. Any thread.
 */
#ifndef SL_KERNELS_CPU_ISA_H
#define SL_KERNELS_CPU_ISA_H

#include <stddef.h>

/* One part of a dot product; a product of several parts is their sum. */
typedef struct {
    const float *x; /* [rows], x_stride apart */
    const float *w; /* [n], w_stride apart */
    size_t x_stride, w_stride, k;
} sl_dot_part_t;

/* out[m][n] = sum over parts of sum_k x[m][k] * w[n][k] */
typedef struct {
    sl_dot_part_t parts[2];
    size_t part_count, rows, n;
    float *out;
    size_t out_stride;
} sl_dot_t;

/* out[m][c] = out[m][c] * keep[m] + sum_k p[m][k] * v[k][c]; with keep NULL, out is not read. */
typedef struct {
    const float *p, *v, *keep;
    float *out;
    size_t p_stride, v_stride, out_stride;
    size_t rows, k, width;
} sl_mix_t;

typedef struct {
    const char *name;
    void (*dot)(const sl_dot_t *params);
    void (*mix)(const sl_mix_t *params);
    /* x *= scale; returns the largest, ignoring NaN; -inf if there is none. */
    float (*scale_max)(float *x, size_t count, float scale);
    /* out = x, but -inf for NaN; returns the largest. */
    float (*clean_max)(float *out, const float *x, size_t count);
    /* out = exp((x - shift) * scale), out may be x or NULL; returns the sum. */
    float (*exp_sum)(float *out, const float *x, size_t count, float shift, float scale);
    float (*square_sum)(const float *x, size_t count);
    /* out = x * scale * weight */
    void (*scale_by)(float *out, const float *x, const float *weight, float scale, size_t count);
    /* out += x * factor */
    void (*add_scaled)(float *out, const float *x, float factor, size_t count);
    /* out = silu(gate) * up */
    void (*silu_mul)(float *out, const float *gate, const float *up, size_t count);
} sl_isa_t;

/* The widest set this processor can run. */
const sl_isa_t *sl_isa_best(void);

/* Set number `index` of those this processor can run, widest first; NULL past the last. For tests
 * and benchmarks. */
const sl_isa_t *sl_isa_at(size_t index);

extern const sl_isa_t sl_isa_base;
#if defined(__x86_64__)
extern const sl_isa_t sl_isa_avx2;
extern const sl_isa_t sl_isa_avx512;
#endif

#endif
