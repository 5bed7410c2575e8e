/* 4 lanes, of whatever the compiler makes its vectors: every processor has this. */
#define LANES 4
#define DOT_ROWS 2
#define MIX_ROWS 4
#define TARGET
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#define ISA sl_isa_base
#define ISA_NAME "base"
#include "kernels/cpu/isa_template.h"
