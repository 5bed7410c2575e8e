/* 64-bit FNV-1a, for identities that must come out equal on every host. Any thread. */
#ifndef SL_MODEL_HASH_H
#define SL_MODEL_HASH_H

#include <stddef.h>
#include <stdint.h>

#define SL_FNV1A_START 0xcbf29ce484222325u

/* Continues `hash` (SL_FNV1A_START for a new one) over `size` bytes. */
static inline uint64_t sl_fnv1a(uint64_t hash, const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ at[i]) * 0x100000001b3u;
    }
    return hash;
}

#endif
