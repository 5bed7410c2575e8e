/* Ids are dense counters, so their low bits alone spread them over the buckets. */
#include "common/transfer/id_table.h"

#include "common/base/status.h"

static sl_id_node_t **bucket_of(sl_id_table_t *table, uint64_t id)
{
    return &table->buckets[id & (SL_ID_TABLE_BUCKETS - 1)];
}

void *sl_id_table_find(const sl_id_table_t *table, uint64_t id)
{
    sl_id_node_t *node = table->buckets[id & (SL_ID_TABLE_BUCKETS - 1)];
    while (node != NULL && node->id != id) {
        node = node->next;
    }
    return node;
}

void sl_id_table_insert(sl_id_table_t *table, sl_id_node_t *node)
{
    SL_ASSERT(sl_id_table_find(table, node->id) == NULL);
    sl_id_node_t **bucket = bucket_of(table, node->id);
    node->next = *bucket;
    *bucket = node;
    table->count++;
}

void sl_id_table_remove(sl_id_table_t *table, sl_id_node_t *node)
{
    sl_id_node_t **link = bucket_of(table, node->id);
    while (*link != node) {
        SL_ASSERT(*link != NULL);
        link = &(*link)->next;
    }
    *link = node->next;
    table->count--;
}

void sl_id_table_visit(sl_id_table_t *table, void (*visit)(void *arg, void *item), void *arg)
{
    for (size_t i = 0; i < SL_ID_TABLE_BUCKETS && table->count > 0; i++) {
        sl_id_node_t *node = table->buckets[i];
        while (node != NULL) {
            sl_id_node_t *next = node->next;
            visit(arg, node);
            node = next;
        }
    }
}
