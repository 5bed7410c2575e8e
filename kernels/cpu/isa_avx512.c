/* 16 lanes: 4 x 4 products a tile fill 16 of the 32 registers. */
#if defined(__x86_64__)
#include <immintrin.h>

#define LANES 16
#define DOT_ROWS 4
#define MIX_ROWS 4
#define TARGET __attribute__((target("avx512f,fma")))
#define MULTIPLY_ADD(a, b, c) _mm512_fmadd_ps(a, b, c)
#define ISA sl_isa_avx512
#define ISA_NAME "avx512"
#include "kernels/cpu/isa_template.h"
#endif
typedef int sl_isa_avx512_unit_t; /* a unit may not be empty */
