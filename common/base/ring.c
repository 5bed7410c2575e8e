/*
 * Classic single-producer single-consumer ring: `head` is written by the consumer alone, `tail` by
 * the producer alone, each on its own cache line. Indices grow without end and are masked.
 */
#include "common/base/ring.h"

#include <errno.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct sl_ring {
    alignas(64) _Atomic size_t head;
    alignas(64) _Atomic size_t tail;
    alignas(64) size_t mask;
    int fd;
    void **items;
};

sl_status_t sl_ring_create(size_t capacity, sl_ring_t **ring_p)
{
    size_t size = 2;
    while (size < capacity) {
        size *= 2;
    }
    sl_ring_t *ring = aligned_alloc(64, sizeof(*ring));
    if (ring == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "ring of %zu items: out of memory", capacity);
    }
    memset(ring, 0, sizeof(*ring));
    ring->mask = size - 1;
    ring->items = calloc(size, sizeof(void *));
    ring->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (ring->items == NULL || ring->fd < 0) {
        sl_status_t status = sl_error(SL_ERR_NO_MEMORY, "ring of %zu items: %s", capacity,
                                      strerror(errno));
        sl_ring_destroy(ring);
        return status;
    }
    *ring_p = ring;
    return SL_OK;
}

void sl_ring_destroy(sl_ring_t *ring)
{
    if (ring == NULL) {
        return;
    }
    if (ring->fd >= 0) {
        close(ring->fd);
    }
    free(ring->items);
    free(ring);
}

sl_status_t sl_ring_push(sl_ring_t *ring, void *item)
{
    SL_ASSERT(item != NULL);
    size_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    if (tail - atomic_load_explicit(&ring->head, memory_order_acquire) > ring->mask) {
        return SL_ERR_AGAIN;
    }
    ring->items[tail & ring->mask] = item;
    atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);
    uint64_t one = 1;
    ssize_t written = write(ring->fd, &one, sizeof(one));
    (void)written; /* fails only when the counter is full, that is, already readable */
    return SL_OK;
}

void *sl_ring_pop(sl_ring_t *ring)
{
    size_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    if (head == atomic_load_explicit(&ring->tail, memory_order_acquire)) {
        return NULL;
    }
    void *item = ring->items[head & ring->mask];
    atomic_store_explicit(&ring->head, head + 1, memory_order_release);
    return item;
}

bool sl_ring_has(const sl_ring_t *ring)
{
    return atomic_load_explicit(&ring->head, memory_order_relaxed) !=
           atomic_load_explicit(&ring->tail, memory_order_acquire);
}

int sl_ring_fd(const sl_ring_t *ring)
{
    return ring->fd;
}

void sl_ring_clear(sl_ring_t *ring)
{
    uint64_t count;
    ssize_t got = read(ring->fd, &count, sizeof(count));
    (void)got; /* empty is fine */
}
