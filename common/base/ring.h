/*
 * Bounded ring of pointers between exactly one producer and one consumer thread, with an eventfd
 * that is readable while items may be waiting. The only place where threads of a node meet.
 *
 * Push and pop never block. Ownership of the pointer moves with it. A full ring is back-pressure:
 * push says SL_ERR_AGAIN and the producer keeps the item.
 */
#ifndef SL_BASE_RING_H
#define SL_BASE_RING_H

#include <stddef.h>

#include "common/base/status.h"

typedef struct sl_ring sl_ring_t;

/* `capacity` is rounded up to a power of two. */
SL_MUST_USE sl_status_t sl_ring_create(size_t capacity, sl_ring_t **ring_p);

/* Items still inside are the caller's to drain first. NULL is ignored. */
void sl_ring_destroy(sl_ring_t *ring);

/* Producer: adds `item` and wakes the consumer. SL_ERR_AGAIN when full. */
SL_MUST_USE sl_status_t sl_ring_push(sl_ring_t *ring, void *item);

/* Consumer: the oldest item, or NULL when empty. */
void *sl_ring_pop(sl_ring_t *ring);

/* Consumer: whether an item is waiting. */
bool sl_ring_has(const sl_ring_t *ring);

/* Descriptor to poll for reading. */
int sl_ring_fd(const sl_ring_t *ring);

/* Consumer: resets the descriptor. Call before draining with sl_ring_pop() until NULL. */
void sl_ring_clear(sl_ring_t *ring);

#endif
