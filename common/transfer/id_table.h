/*
 * Hash table of structs by a 64-bit id, chained through a node that is the first member of each
 * struct. It owns nothing but its buckets. One thread; insert never fails.
 */
#ifndef SL_TRANSFER_ID_TABLE_H
#define SL_TRANSFER_ID_TABLE_H

#include <stddef.h>
#include <stdint.h>

#define SL_ID_TABLE_BUCKETS 1024 /* a power of two; some hundred ids are held at once */

typedef struct sl_id_node {
    uint64_t id;
    struct sl_id_node *next;
} sl_id_node_t;

typedef struct {
    sl_id_node_t *buckets[SL_ID_TABLE_BUCKETS];
    size_t count;
} sl_id_table_t;

/* The struct of `id`, or NULL. */
void *sl_id_table_find(const sl_id_table_t *table, uint64_t id);

/* The id must not be there yet. */
void sl_id_table_insert(sl_id_table_t *table, sl_id_node_t *node);

/* The node must be there. */
void sl_id_table_remove(sl_id_table_t *table, sl_id_node_t *node);

/* Calls `visit` for each struct in no order; it may remove (and free) the one it is given. */
void sl_id_table_visit(sl_id_table_t *table, void (*visit)(void *arg, void *item), void *arg);

#endif
