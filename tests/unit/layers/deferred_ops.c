/* The queue, the copies, the recordings, and the table. */
#include "tests/unit/layers/deferred_ops.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/layers/deferred_queue.h"

#define RUBBISH 0x7F /* as f32 and as int32 far out of any range */
#define BLOCKS_MAX 64

typedef struct {
    deferred_command_t *all;
    size_t count, capacity;
} commands_t;

struct sl_graph {
    commands_t commands;
};

typedef struct {
    const char *at;
    size_t bytes;
} block_t;

/* An ordinary download that has run, for the next synchronize(). */
typedef struct delivery {
    struct delivery *next;
    void *to;
    size_t bytes;
    char data[];
} delivery_t;

struct sl_device {
    const sl_ops_t *ops; /* what the operations are run by, on `base` */
    sl_device_t *base;
    deferred_params_t params;
    uint64_t random;
    commands_t queue;
    size_t done;                /* of the queue */
    size_t marks[SL_MARKS_MAX]; /* commands before the mark */
    sl_graph_t *recording;
    block_t pinned[BLOCKS_MAX];
    delivery_t *deliveries;
    sl_attn_absorbed_t plan; /* of the step, and the lengths it was made from */
    int32_t *plan_lengths;
};

static deferred_params_t next_params;
static _Atomic uint64_t launches;

uint64_t deferred_launches(void)
{
    return atomic_load(&launches);
}

deferred_meeting_t *deferred_meeting_of(const sl_device_t *device)
{
    return device->params.meeting;
}

static void *must_alloc(size_t bytes)
{
    void *memory = malloc(bytes + 1);
    SL_ASSERT(memory != NULL);
    return memory;
}

static void *copy_of(const void *from, size_t bytes)
{
    void *copy = must_alloc(bytes);
    return bytes > 0 ? memcpy(copy, from, bytes) : copy;
}

/* ---- the queue ---- */

static void append(commands_t *commands, const deferred_command_t *command)
{
    if (commands->count == commands->capacity) {
        commands->capacity = 2 * commands->capacity + 64;
        commands->all = realloc(commands->all, commands->capacity * sizeof(*commands->all));
        SL_ASSERT(commands->all != NULL);
    }
    commands->all[commands->count++] = *command;
}

static sl_status_t run_to(sl_device_t *device, size_t end)
{
    while (device->done < end) {
        deferred_command_t command = device->queue.all[device->done++];
        sl_status_t status = command.run(device, &command);
        free(command.owned);
        SL_TRY(status);
    }
    if (device->done == device->queue.count) {
        device->done = device->queue.count = 0;
        memset(device->marks, 0, sizeof(device->marks));
    }
    return SL_OK;
}

static sl_status_t progress(sl_device_t *device)
{
    size_t left = device->queue.count - device->done, some = 0;
    if (device->params.progress == DEFERRED_EAGER) {
        some = left;
    } else if (device->params.progress == DEFERRED_RANDOM) {
        device->random = device->random * 6364136223846793005u + 1442695040888963407u;
        some = (device->random >> 33) % 3; /* as fast as the host, about */
    }
    return run_to(device, device->done + (some < left ? some : left));
}

sl_status_t deferred_push(sl_device_t *device, const deferred_command_t *command)
{
    if (device->recording != NULL) {
        SL_ASSERT(command->owned == NULL); /* host memory that is gone when it is launched */
        append(&device->recording->commands, command);
        return SL_OK;
    }
    append(&device->queue, command);
    return progress(device);
}

static sl_status_t defer_mark(sl_device_t *device, sl_stream_t *stream, uint32_t mark)
{
    (void)stream;
    SL_ASSERT(mark < SL_MARKS_MAX && device->recording == NULL);
    device->marks[mark] = device->queue.count;
    return SL_OK;
}

static sl_status_t defer_wait_mark(sl_device_t *device, uint32_t mark)
{
    SL_ASSERT(mark < SL_MARKS_MAX && device->recording == NULL);
    return run_to(device, device->marks[mark]);
}

static sl_status_t defer_synchronize(sl_device_t *device, sl_stream_t *stream)
{
    (void)stream;
    SL_ASSERT(device->recording == NULL);
    SL_TRY(run_to(device, device->queue.count));
    while (device->deliveries != NULL) {
        delivery_t *delivery = device->deliveries;
        device->deliveries = delivery->next;
        memcpy(delivery->to, delivery->data, delivery->bytes);
        free(delivery);
    }
    return SL_OK;
}

/* ---- devices and memory ---- */

static sl_status_t defer_open(const sl_device_params_t *params, sl_device_t **device_p)
{
    sl_device_t *device = calloc(1, sizeof(*device));
    SL_ASSERT(device != NULL);
    device->params = next_params;
    device->random = next_params.seed;
    SL_ASSERT(sl_ops_find("ref", &device->ops) == SL_OK);
    sl_status_t status = device->ops->open(params, &device->base);
    if (status != SL_OK) {
        free(device);
        return status;
    }
    *device_p = device;
    return SL_OK;
}

static void defer_close(sl_device_t *device)
{
    SL_ASSERT(run_to(device, device->queue.count) == SL_OK);
    SL_ASSERT(device->deliveries == NULL);
    device->ops->close(device->base);
    free(device->queue.all);
    free(device->plan_lengths);
    free(device);
}

static sl_status_t defer_memory(sl_device_t *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    return device->ops->memory(device->base, free_bytes, total_bytes);
}

static sl_status_t defer_alloc(sl_device_t *device, size_t bytes, const char *what, void **memory_p)
{
    SL_TRY(device->ops->alloc(device->base, bytes, what, memory_p));
    memset(*memory_p, RUBBISH, bytes);
    return SL_OK;
}

static void defer_free(sl_device_t *device, void *memory)
{
    device->ops->free(device->base, memory);
}

/* The alloc_host() memory that begins at `at` (NULL: a free place) or holds it. */
static block_t *pinned_block(sl_device_t *device, const void *host)
{
    for (uint32_t i = 0; i < BLOCKS_MAX; i++) {
        block_t *block = &device->pinned[i];
        const char *at = host;
        if (at == block->at || (at > block->at && at < block->at + block->bytes)) {
            return block;
        }
    }
    return NULL;
}

static sl_status_t defer_alloc_host(sl_device_t *device, size_t bytes, const char *what,
                                    void **memory_p)
{
    block_t *block = pinned_block(device, NULL);
    SL_ASSERT(block != NULL);
    SL_TRY(defer_alloc(device, bytes, what, memory_p));
    *block = (block_t){*memory_p, bytes};
    return SL_OK;
}

static void defer_free_host(sl_device_t *device, void *memory)
{
    block_t *block = pinned_block(device, memory);
    SL_ASSERT(block != NULL && block->at == memory);
    *block = (block_t){0};
    device->ops->free(device->base, memory);
}

static sl_status_t defer_bind_thread(sl_device_t *device)
{
    return device->ops->bind_thread(device->base);
}

static sl_status_t defer_load_weight(sl_device_t *device, void *to,
                                     const sl_weight_source_t *source)
{
    return device->ops->load_weight(device->base, to, source);
}

static sl_status_t defer_dummy_weight(sl_device_t *device, const sl_dummy_weight_t *dummy)
{
    return device->ops->dummy_weight(device->base, dummy);
}

/* ---- copies ---- */

static uint64_t sum_of(const void *memory, size_t bytes)
{
    uint64_t sum = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) {
        sum = (sum ^ ((const unsigned char *)memory)[i]) * 1099511628211u;
    }
    return sum;
}

static sl_status_t run_upload(sl_device_t *device, const deferred_command_t *self)
{
    const deferred_copy_t *p = &self->copy;
    if (p->pinned && sum_of(p->from, p->bytes) != p->sum) {
        return sl_error(SL_ERR_DEVICE,
                        "upload of %zu bytes: the host has changed them before they were copied",
                        p->bytes);
    }
    return device->ops->upload(device->base, NULL, p->to, p->from, p->bytes);
}

static sl_status_t defer_upload(sl_device_t *device, sl_stream_t *stream, void *to,
                                const void *host, size_t bytes)
{
    (void)stream;
    bool pinned = pinned_block(device, host) != NULL;
    void *copy = pinned ? NULL : copy_of(host, bytes);
    deferred_command_t command = {
        .run = run_upload,
        .owned = copy,
        .copy = {to, pinned ? host : copy, bytes, pinned, pinned ? sum_of(host, bytes) : 0},
    };
    return deferred_push(device, &command);
}

static sl_status_t run_download(sl_device_t *device, const deferred_command_t *self)
{
    const deferred_copy_t *p = &self->copy;
    if (p->pinned) {
        return device->ops->download(device->base, NULL, p->to, p->from, p->bytes);
    }
    delivery_t *delivery = must_alloc(sizeof(*delivery) + p->bytes);
    *delivery = (delivery_t){device->deliveries, p->to, p->bytes};
    device->deliveries = delivery;
    return device->ops->download(device->base, NULL, delivery->data, p->from, p->bytes);
}

static sl_status_t defer_download(sl_device_t *device, sl_stream_t *stream, void *host,
                                  const void *from, size_t bytes)
{
    (void)stream;
    bool pinned = pinned_block(device, host) != NULL;
    SL_ASSERT(device->recording == NULL || pinned);
    memset(host, RUBBISH, bytes);
    deferred_command_t command = {.run = run_download, .copy = {host, from, bytes, pinned, 0}};
    return deferred_push(device, &command);
}

/* ---- recordings ---- */

static sl_status_t defer_graph_begin(sl_device_t *device, sl_stream_t *stream)
{
    (void)stream;
    SL_ASSERT(device->recording == NULL);
    device->recording = calloc(1, sizeof(*device->recording));
    SL_ASSERT(device->recording != NULL);
    return SL_OK;
}

static sl_status_t defer_graph_end(sl_device_t *device, sl_stream_t *stream, sl_graph_t **graph_p)
{
    (void)stream;
    SL_ASSERT(device->recording != NULL);
    *graph_p = device->recording;
    device->recording = NULL;
    return SL_OK;
}

static sl_status_t defer_graph_launch(sl_device_t *device, sl_stream_t *stream, sl_graph_t *graph)
{
    (void)stream;
    SL_ASSERT(device->recording == NULL);
    atomic_fetch_add(&launches, 1);
    for (size_t i = 0; i < graph->commands.count; i++) {
        SL_TRY(deferred_push(device, &graph->commands.all[i]));
    }
    return SL_OK;
}

static void defer_graph_free(sl_device_t *device, sl_graph_t *graph)
{
    (void)device;
    free(graph->commands.all);
    free(graph);
}

/* ---- operations ---- */

#define DEFER(op)                                                                                  \
    static sl_status_t run_##op(sl_device_t *device, const deferred_command_t *self)               \
    {                                                                                              \
        return device->ops->op(device->base, NULL, &self->op);                                     \
    }                                                                                              \
    static sl_status_t defer_##op(sl_device_t *device, sl_stream_t *stream, const sl_##op##_t *p)  \
    {                                                                                              \
        (void)stream;                                                                              \
        deferred_command_t command = {.run = run_##op, .op = *p};                                  \
        return deferred_push(device, &command);                                                    \
    }
DEFERRED_PLAIN_OPS(DEFER)

/* The host's copies of the offsets must say what the device's do. */
static sl_status_t run_attn_prefill(sl_device_t *device, const deferred_command_t *self)
{
    const sl_attn_prefill_t *p = &self->attn_prefill;
    size_t bytes = (p->sequences + 1) * sizeof(int32_t);
    SL_ASSERT(memcmp(p->host_q_begin, p->q_begin, bytes) == 0);
    SL_ASSERT(memcmp(p->host_k_begin, p->k_begin, bytes) == 0);
    return device->ops->attn_prefill(device->base, NULL, p);
}

static sl_status_t defer_attn_prefill(sl_device_t *device, sl_stream_t *stream,
                                      const sl_attn_prefill_t *p)
{
    (void)stream;
    size_t words = p->sequences + 1;
    int32_t *offsets = must_alloc(2 * words * sizeof(*offsets));
    memcpy(offsets, p->host_q_begin, words * sizeof(*offsets));
    memcpy(offsets + words, p->host_k_begin, words * sizeof(*offsets));
    deferred_command_t command = {.run = run_attn_prefill, .owned = offsets, .attn_prefill = *p};
    command.attn_prefill.host_q_begin = offsets;
    command.attn_prefill.host_k_begin = offsets + words;
    return deferred_push(device, &command);
}

static sl_status_t run_attn_absorbed_plan(sl_device_t *device, const deferred_command_t *self)
{
    device->plan = self->attn_absorbed;
    free(device->plan_lengths);
    device->plan_lengths = copy_of(device->plan.kv_len, device->plan.rows * sizeof(int32_t));
    return SL_OK;
}

static sl_status_t run_attn_absorbed(sl_device_t *device, const deferred_command_t *self)
{
    const sl_attn_absorbed_t *p = &self->attn_absorbed, *plan = &device->plan;
    SL_ASSERT(plan->rows == p->rows && plan->heads == p->heads && plan->pages == p->pages);
    SL_ASSERT(plan->page_begin == p->page_begin && plan->row_request == p->row_request);
    SL_ASSERT(plan->kv_len == p->kv_len);
    SL_ASSERT(memcmp(device->plan_lengths, p->kv_len, p->rows * sizeof(int32_t)) == 0);
    return device->ops->attn_absorbed(device->base, NULL, p);
}

static sl_status_t defer_attn_absorbed_plan(sl_device_t *device, sl_stream_t *stream,
                                            const sl_attn_absorbed_t *p)
{
    (void)stream;
    deferred_command_t command = {.run = run_attn_absorbed_plan, .attn_absorbed = *p};
    return deferred_push(device, &command);
}

static sl_status_t defer_attn_absorbed(sl_device_t *device, sl_stream_t *stream,
                                       const sl_attn_absorbed_t *p)
{
    (void)stream;
    deferred_command_t command = {.run = run_attn_absorbed, .attn_absorbed = *p};
    return deferred_push(device, &command);
}

#define ENTRY(op) .op = defer_##op,

static const sl_ops_t recording_table = {.name = "deferred",
                                         .act_dtype = SL_DTYPE_F32,
                                         .weight_dtype = SL_DTYPE_F32,
                                         .open = defer_open,
                                         .close = defer_close,
                                         .memory = defer_memory,
                                         .alloc = defer_alloc,
                                         .free = defer_free,
                                         .alloc_host = defer_alloc_host,
                                         .free_host = defer_free_host,
                                         .upload = defer_upload,
                                         .download = defer_download,
                                         .synchronize = defer_synchronize,
                                         .bind_thread = defer_bind_thread,
                                         .mark = defer_mark,
                                         .wait_mark = defer_wait_mark,
                                         .graph_begin = defer_graph_begin,
                                         .graph_end = defer_graph_end,
                                         .graph_launch = defer_graph_launch,
                                         .graph_free = defer_graph_free,
                                         .collectives_open = deferred_collectives_open,
                                         .collectives_close = deferred_collectives_close,
                                         .load_weight = defer_load_weight,
                                         .dummy_weight = defer_dummy_weight,
                                         .attn_prefill = defer_attn_prefill,
                                         .attn_absorbed_plan = defer_attn_absorbed_plan,
                                         .attn_absorbed = defer_attn_absorbed,
                                         DEFERRED_PLAIN_OPS(ENTRY)};

static sl_ops_t plain_table; /* the same without recordings */

const sl_ops_t *deferred_ops(const deferred_params_t *params)
{
    next_params = *params;
    plain_table = recording_table;
    plain_table.graph_begin = NULL;
    plain_table.graph_end = NULL;
    plain_table.graph_launch = NULL;
    plain_table.graph_free = NULL;
    return params->records ? &recording_table : &plain_table;
}
