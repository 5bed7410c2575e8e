/* Made-up prompts that have nothing in common. Pure. */
#ifndef SL_BENCH_PROMPT_H
#define SL_BENCH_PROMPT_H

#include <stdint.h>

/* Prompt `number` of `length` tokens, each below `vocab`. */
static inline void sl_bench_prompt(uint64_t number, uint32_t length, uint32_t vocab,
                                   int32_t *tokens)
{
    for (uint32_t i = 0; i < length; i++) {
        uint64_t hash = (number << 32 | i) * 0x9e3779b97f4a7c15u;
        hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9u;
        tokens[i] = (int32_t)((hash ^ hash >> 32) % vocab);
    }
}

#endif
