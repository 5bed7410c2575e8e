/* 8 lanes: 2 x 4 products a tile, since there are only 16 registers. */
#if defined(__x86_64__)
#include <immintrin.h>

#define LANES 8
#define DOT_ROWS 2
#define MIX_ROWS 4
#define TARGET __attribute__((target("avx2,fma")))
#define MULTIPLY_ADD(a, b, c) _mm256_fmadd_ps(a, b, c)
#define ISA sl_isa_avx2
#define ISA_NAME "avx2"
#include "kernels/cpu/isa_template.h"
#endif
typedef int sl_isa_avx2_unit_t; /* a unit may not be empty */
