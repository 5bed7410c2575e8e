/* What deferred_ops.c and deferred_group.c share: the queue of a deferred device. */
#ifndef SL_TESTS_DEFERRED_QUEUE_H
#define SL_TESTS_DEFERRED_QUEUE_H

#include "kernels/collectives.h"
#include "tests/unit/layers/deferred_ops.h"

#define DEFERRED_RANKS_MAX 4u

/* Operations whose parameters are device memory alone: they are queued as they are. */
#define DEFERRED_PLAIN_OPS(X)                                                                      \
    X(embed)                                                                                       \
    X(rms_norm)                                                                                    \
    X(linear)                                                                                      \
    X(head_linear)                                                                                 \
    X(rope_cache)                                                                                  \
    X(gather_latents)                                                                              \
    X(attn_merge)                                                                                  \
    X(route)                                                                                       \
    X(moe_permute)                                                                                 \
    X(grouped_linear)                                                                              \
    X(silu_mul)                                                                                    \
    X(moe_combine)                                                                                 \
    X(take_rows)                                                                                   \
    X(sample)                                                                                      \
    X(token_logprobs)

typedef struct {
    void *to;
    const void *from;
    size_t bytes;
    bool pinned;  /* the host's side is alloc_host() memory */
    uint64_t sum; /* upload of such: its checksum at the call */
} deferred_copy_t;

typedef struct {
    deferred_meeting_t *meeting;
    uint32_t rank, size;
    const void *in;
    void *out;
    size_t begin[DEFERRED_RANKS_MAX + 1]; /* elements: where each rank's block begins */
} deferred_exchange_t;

typedef struct deferred_command deferred_command_t;
struct deferred_command {
    sl_status_t (*run)(sl_device_t *device, const deferred_command_t *self);
    void *owned; /* freed after it has run */
    union {
        deferred_copy_t copy;
        deferred_exchange_t exchange;
        sl_attn_prefill_t attn_prefill;
        sl_attn_absorbed_t attn_absorbed;
#define DEFERRED_MEMBER(op) sl_##op##_t op;
        DEFERRED_PLAIN_OPS(DEFERRED_MEMBER)
#undef DEFERRED_MEMBER
    };
};

SL_MUST_USE sl_status_t deferred_push(sl_device_t *device, const deferred_command_t *command);
deferred_meeting_t *deferred_meeting_of(const sl_device_t *device);

/* deferred_group.c: for the entries of sl_ops_t of these names. */
sl_status_t deferred_collectives_open(sl_device_t *device, struct sl_group *group, uint32_t rank,
                                      uint32_t size, struct sl_collectives *collectives_p);
void deferred_collectives_close(sl_device_t *device, struct sl_collectives *collectives);

#endif
