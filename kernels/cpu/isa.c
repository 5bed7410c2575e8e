/* Which of the sets of inner loops this processor can run. */
#include "kernels/cpu/isa.h"

#include <stdbool.h>

static bool runs(const sl_isa_t *isa)
{
#if defined(__x86_64__)
    if (isa == &sl_isa_avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma");
    }
    if (isa == &sl_isa_avx2) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    }
#endif
    return isa == &sl_isa_base;
}

const sl_isa_t *sl_isa_at(size_t index)
{
    static const sl_isa_t *const widest_first[] = {
#if defined(__x86_64__)
        &sl_isa_avx512,
        &sl_isa_avx2,
#endif
        &sl_isa_base,
    };
    for (size_t i = 0; i < sizeof(widest_first) / sizeof(widest_first[0]); i++) {
        if (runs(widest_first[i]) && index-- == 0) {
            return widest_first[i];
        }
    }
    return NULL;
}

const sl_isa_t *sl_isa_best(void)
{
    return sl_isa_at(0);
}
