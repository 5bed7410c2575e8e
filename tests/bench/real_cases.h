/*
 * Shapes of operations as DeepSeek-V2-Lite has them on one GPU, for bench_ops: a prefill of 8,192
 * tokens, a decode of 128, one row. Attention also with the 128 heads of the large models.
 */
#ifndef SL_BENCH_REAL_CASES_H
#define SL_BENCH_REAL_CASES_H

#include "tests/ops/cases.h"

extern const op_case_t sl_real_cases[];
extern const size_t sl_real_case_count;

#endif
