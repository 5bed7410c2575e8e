/* What bind_ops.c and sampled checks need of bind.c. Host memory lives as long as the binding;
 * counts of elements. */
#ifndef SL_TESTS_OPS_BIND_INTERNAL_H
#define SL_TESTS_OPS_BIND_INTERNAL_H

#include "tests/ops/bind.h"

void *bind_host(bind_t *b, size_t bytes); /* zeros */
uint32_t bind_random(bind_t *b);
float *bind_floats(bind_t *b, size_t count, float scale); /* in (-scale, scale), exact in bf16 */
float *bind_nans(bind_t *b, size_t count);
int32_t *bind_shuffled(bind_t *b, size_t count); /* 0 .. count - 1 */

/* Device memory. `in` is read only; `out` starts poisoned; `inout` starts as given. */
void *bind_in(bind_t *b, kind_t kind, size_t count, const void *host);
void *bind_out(bind_t *b, kind_t kind, size_t count);
void *bind_inout(bind_t *b, kind_t kind, size_t count, const void *host);

/* `in` and `inout` of what bind_floats() gives, without its host memory. */
void *bind_random_in(bind_t *b, kind_t kind, size_t count, float scale);
void *bind_random_inout(bind_t *b, kind_t kind, size_t count, float scale);

#endif
