/* A growing array: pools have tens of ranks, and lookups happen once a request. */
#include "node/peers.h"

#include <stdlib.h>

typedef struct {
    sl_rank_id_t rank;
    uint32_t tp;
    sl_attention_t attention;
} peer_t;

struct sl_peers {
    peer_t *items;
    size_t count, capacity;
};

sl_status_t sl_peers_create(sl_peers_t **peers_p)
{
    sl_peers_t *peers = calloc(1, sizeof(*peers));
    if (peers == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "peers: out of memory");
    }
    *peers_p = peers;
    return SL_OK;
}

void sl_peers_destroy(sl_peers_t *peers)
{
    if (peers != NULL) {
        free(peers->items);
        free(peers);
    }
}

static const peer_t *find(const sl_peers_t *peers, const sl_rank_id_t *rank)
{
    for (size_t i = 0; i < peers->count; i++) {
        if (sl_rank_same(&peers->items[i].rank, rank)) {
            return &peers->items[i];
        }
    }
    return NULL;
}

/* Whoever is known at the place: its end may have been told while this rank could not hear it. */
static void remove_place(sl_peers_t *peers, const sl_rank_id_t *rank)
{
    for (size_t i = 0; i < peers->count; i++) {
        const sl_rank_id_t *known = &peers->items[i].rank;
        if (known->pool == rank->pool && known->group == rank->group && known->rank == rank->rank) {
            peers->items[i] = peers->items[--peers->count];
            return;
        }
    }
}

sl_status_t sl_peers_add(sl_peers_t *peers, const sl_msg_peer_t *peer)
{
    remove_place(peers, &peer->rank);
    if (peers->count == peers->capacity) {
        size_t capacity = peers->capacity == 0 ? 16 : peers->capacity * 2;
        peer_t *items = realloc(peers->items, capacity * sizeof(*items));
        if (items == NULL) {
            return sl_error(SL_ERR_NO_MEMORY, "peers: out of memory");
        }
        peers->items = items;
        peers->capacity = capacity;
    }
    peers->items[peers->count++] = (peer_t){peer->rank, peer->tp, peer->attention};
    return SL_OK;
}

void sl_peers_remove(sl_peers_t *peers, const sl_rank_id_t *rank)
{
    for (size_t i = 0; i < peers->count; i++) {
        if (sl_rank_same(&peers->items[i].rank, rank)) {
            peers->items[i] = peers->items[--peers->count];
            return;
        }
    }
}

sl_status_t sl_peers_targets(const sl_peers_t *peers, const sl_rank_id_t *reader,
                             sl_rank_id_t targets[SL_GROUP_RANKS_MAX], uint32_t *count_p)
{
    char name[32];
    const peer_t *first = find(peers, reader);
    if (first == NULL) {
        return sl_error(SL_ERR_UNREACHABLE, "%s incarnation %llu is not among the known peers",
                        sl_rank_name(reader, name), (unsigned long long)reader->incarnation);
    }
    uint32_t count = 0;
    targets[count++] = *reader;
    for (size_t i = 0; first->attention == SL_ATTENTION_TP && i < peers->count; i++) {
        const peer_t *peer = &peers->items[i];
        if (peer->rank.group == reader->group && peer->rank.rank != reader->rank) {
            SL_ASSERT(count < SL_GROUP_RANKS_MAX);
            targets[count++] = peer->rank;
        }
    }
    if (first->attention == SL_ATTENTION_TP && count != first->tp) {
        return sl_error(SL_ERR_UNREACHABLE, "group of %s: %u of %u ranks are known",
                        sl_rank_name(reader, name), count, first->tp);
    }
    *count_p = count;
    return SL_OK;
}
