/* The one function of a fuzz target, as libFuzzer calls it; replay.c calls it without libFuzzer.
 * It must stand any bytes; always returns 0. */
#ifndef SL_TESTS_FUZZ_H
#define SL_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
