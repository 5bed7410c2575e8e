/*
 * Intrusive chained hash map. The sl_map_node_t is the first member of the stored object, so a
 * node found is the object; the map owns its buckets only, never the objects. One thread; never
 * blocks.
 */
#ifndef SL_ROUTER_MAP_H
#define SL_ROUTER_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

typedef struct sl_map_node {
    struct sl_map_node *next;
    uint64_t hash;
} sl_map_node_t;

typedef bool (*sl_map_same_func_t)(const sl_map_node_t *node, const void *key);

typedef struct {
    sl_map_node_t **buckets;
    size_t bucket_count; /* a power of two */
    size_t count;
} sl_map_t;

SL_MUST_USE sl_status_t sl_map_init(sl_map_t *map);

/* Frees the buckets; objects still inside are the caller's. */
void sl_map_cleanup(sl_map_t *map);

/* The caller has checked that the key is not in the map. A failed growth only makes chains longer,
 * so adding cannot fail. */
void sl_map_add(sl_map_t *map, sl_map_node_t *node, uint64_t hash);

/* `node` must be in the map. */
void sl_map_remove(sl_map_t *map, sl_map_node_t *node);

/* The first node of `hash` for which same(node, key), or NULL. */
sl_map_node_t *sl_map_find(const sl_map_t *map, uint64_t hash, sl_map_same_func_t same,
                           const void *key);

/* Any node, or NULL when empty: for emptying the map. */
sl_map_node_t *sl_map_any(const sl_map_t *map);

/* Hash of bytes; a random `seed` keeps clients from choosing colliding names. */
uint64_t sl_map_hash(const void *bytes, size_t size, uint64_t seed);

#endif
