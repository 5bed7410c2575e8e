/*
 * Checks a large product or attention by some of its outputs: computes these in double on the host,
 * from the inputs as the device holds them, and compares. Takes milliseconds where a whole oracle
 * would take minutes. Which outputs is a function of the case.
 *
 * linear, head_linear, grouped_linear: 64 rows by 64 columns (of each head; of a group: a few rows
 * of each expert), the first and the last always among them, and that rows past a group stay as
 * they are. attn_prefill, attn_absorbed: 32 pairs of a row and a head over all their keys, and the
 * log-sum-exp where it is asked for.
 */
#ifndef SL_BENCH_CHECK_ROWS_H
#define SL_BENCH_CHECK_ROWS_H

#include "tests/ops/bind.h"

/* The case has run and its inputs are unchanged. True if the sampled outputs agree within
 * tolerance * (scale + |expected|), where the scale is 1, or of attention the root mean square of
 * the row; says where not. Blocking. An operation that is none of the above is
 * a programmer's error. */
bool check_rows_agree(bind_t *b, double tolerance);

#endif
