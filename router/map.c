/* Buckets double when there are as many objects as buckets; they never shrink, since a router that
 * was once busy will be busy again. */
#include "router/map.h"

#include <stdlib.h>

#define BUCKETS_AT_START 64u

sl_status_t sl_map_init(sl_map_t *map)
{
    sl_map_node_t **buckets = calloc(BUCKETS_AT_START, sizeof(sl_map_node_t *));
    if (buckets == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "hash map of %u buckets: no memory", BUCKETS_AT_START);
    }
    *map = (sl_map_t){.buckets = buckets, .bucket_count = BUCKETS_AT_START};
    return SL_OK;
}

void sl_map_cleanup(sl_map_t *map)
{
    free(map->buckets);
    *map = (sl_map_t){0};
}

static sl_map_node_t **bucket_of(sl_map_node_t **buckets, size_t bucket_count, uint64_t hash)
{
    return &buckets[hash & (bucket_count - 1)];
}

static void map_grow(sl_map_t *map)
{
    size_t bucket_count = map->bucket_count * 2;
    sl_map_node_t **buckets = calloc(bucket_count, sizeof(sl_map_node_t *));
    if (buckets == NULL) {
        return;
    }
    for (size_t i = 0; i < map->bucket_count; i++) {
        sl_map_node_t *node = map->buckets[i];
        while (node != NULL) {
            sl_map_node_t *next = node->next;
            sl_map_node_t **bucket = bucket_of(buckets, bucket_count, node->hash);
            node->next = *bucket;
            *bucket = node;
            node = next;
        }
    }
    free(map->buckets);
    map->buckets = buckets;
    map->bucket_count = bucket_count;
}

void sl_map_add(sl_map_t *map, sl_map_node_t *node, uint64_t hash)
{
    if (map->count >= map->bucket_count) {
        map_grow(map);
    }
    sl_map_node_t **bucket = bucket_of(map->buckets, map->bucket_count, hash);
    node->hash = hash;
    node->next = *bucket;
    *bucket = node;
    map->count++;
}

void sl_map_remove(sl_map_t *map, sl_map_node_t *node)
{
    sl_map_node_t **link = bucket_of(map->buckets, map->bucket_count, node->hash);
    while (*link != node) {
        SL_ASSERT(*link != NULL);
        link = &(*link)->next;
    }
    *link = node->next;
    node->next = NULL;
    map->count--;
}

sl_map_node_t *sl_map_find(const sl_map_t *map, uint64_t hash, sl_map_same_func_t same,
                           const void *key)
{
    sl_map_node_t *node = *bucket_of(map->buckets, map->bucket_count, hash);
    while (node != NULL && !(node->hash == hash && same(node, key))) {
        node = node->next;
    }
    return node;
}

sl_map_node_t *sl_map_any(const sl_map_t *map)
{
    for (size_t i = 0; map->count > 0 && i < map->bucket_count; i++) {
        if (map->buckets[i] != NULL) {
            return map->buckets[i];
        }
    }
    return NULL;
}

uint64_t sl_map_hash(const void *bytes, size_t size, uint64_t seed)
{
    const uint8_t *next = bytes;
    uint64_t hash = 0xcbf29ce484222325u ^ seed;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ next[i]) * 0x100000001b3u;
    }
    /* The low bits choose the bucket: mix the high ones in. */
    hash ^= hash >> 32;
    hash *= 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}
