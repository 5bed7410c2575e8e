/* Buffers of a case: guard bands, poison, conversion to the backend's types, comparison. */
#include "tests/ops/bind.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/convert.h"
#include "kernels/cpu/pool.h"
#include "tests/ops/bind_internal.h"

#define GUARD_BYTES 256
#define GUARD_BYTE 0xA5
#define BLOCK_FLOATS ((size_t)1 << 20)
#define THREADS_MAX 16
#define CHUNK_ELEMENTS (THREADS_MAX * BLOCK_FLOATS)
#define OTHER_STREAM 0x9E3779B97F4A7C15ull

/* Jobs on many elements, for bind_threads(). */
typedef struct {
    float *values; /* [count]: from the beginning of block `block` on */
    size_t count, block;
    float scale;
    uint64_t random;        /* where block 0 starts */
    uint64_t *random_after; /* where it ended */
} fill_job_t;

typedef struct {
    uint16_t *halves;
    const float *values;
    size_t count;
} halve_job_t;

/* Where a buffer's elements come from: `host`, of f32 for ACT and WT; or random floats within
 * `scale`; or, without either, poison. */
typedef struct {
    const void *host;
    float scale;
} source_t;

void *bind_host(bind_t *b, size_t bytes)
{
    SL_ASSERT(b->host_count < BIND_HOSTS_MAX);
    void *memory = calloc(1, bytes + 1);
    SL_ASSERT(memory != NULL);
    b->hosts[b->host_count++] = memory;
    return memory;
}

static uint32_t next_random(uint64_t *random)
{
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return (uint32_t)(*random >> 32);
}

uint32_t bind_random(bind_t *b)
{
    return next_random(&b->random);
}

int bind_threads(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores < 1 ? 1 : cores > THREADS_MAX ? THREADS_MAX : (int)cores;
}

static void on_all_cores(size_t elements, sl_pool_job_t job, const void *context)
{
    if (elements <= BLOCK_FLOATS) {
        job(context, 0, 1);
        return;
    }
    sl_pool_t *pool;
    SL_ASSERT(sl_pool_create((size_t)bind_threads(), &pool) == SL_OK);
    sl_pool_run(pool, (double)elements, job, context);
    sl_pool_destroy(pool);
}

static void fill_random(float *values, size_t count, float scale, uint64_t *random)
{
    for (size_t i = 0; i < count; i++) {
        float value = scale * (float)((double)next_random(random) / 2147483648.0 - 1);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        values[i] = sl_float_from_bits(bits & 0xffff0000u);
    }
}

/* Every block has a stream of its own, so that the number of threads changes no value. */
static void fill_blocks(const void *context, size_t part, size_t parts)
{
    const fill_job_t *job = context;
    size_t begin, end;
    sl_pool_part(job->count, BLOCK_FLOATS, part, parts, &begin, &end);
    for (size_t i = begin; i < end; i += BLOCK_FLOATS) {
        size_t block = job->block + i / BLOCK_FLOATS;
        size_t count = end - i < BLOCK_FLOATS ? end - i : BLOCK_FLOATS;
        uint64_t random = job->random ^ block * OTHER_STREAM;
        fill_random(job->values + i, count, job->scale, &random);
        if (block == 0) {
            *job->random_after = random;
        }
    }
}

float *bind_floats(bind_t *b, size_t count, float scale)
{
    float *values = bind_host(b, count * sizeof(float));
    if (b->like == NULL) {
        fill_job_t job = {values, count, 0, scale, b->random, &b->random};
        on_all_cores(count, fill_blocks, &job);
    }
    return values;
}

float *bind_nans(bind_t *b, size_t count)
{
    float *values = bind_host(b, count * sizeof(float));
    for (size_t i = 0; b->like == NULL && i < count; i++) {
        values[i] = NAN;
    }
    return values;
}

int32_t *bind_shuffled(bind_t *b, size_t count)
{
    int32_t *ids = bind_host(b, count * sizeof(int32_t));
    for (size_t i = 0; i < count; i++) {
        size_t j = bind_random(b) % (i + 1);
        ids[i] = ids[j];
        ids[j] = (int32_t)i;
    }
    return ids;
}

static size_t element_bytes(const bind_t *b, kind_t kind)
{
    switch (kind) {
    case KIND_ACT:
        return sl_dtype_bytes(b->ops->act_dtype);
    case KIND_WT:
        return sl_dtype_bytes(b->ops->weight_dtype);
    case KIND_RAW:
        return 1;
    case KIND_LOGPROBS:
        return sizeof(sl_logprobs_t);
    default:
        return 4;
    }
}

static bool is_bf16(const bind_t *b, kind_t kind)
{
    return (kind == KIND_ACT || kind == KIND_WT) && element_bytes(b, kind) == 2;
}

static void transfer(const bind_t *b, char *to, const void *from, size_t bytes, bool up)
{
    sl_status_t status = up ? b->ops->upload(b->device, NULL, to, from, bytes)
                            : b->ops->download(b->device, NULL, to, from, bytes);
    SL_ASSERT(status == SL_OK);
    SL_ASSERT(b->ops->synchronize(b->device, NULL) == SL_OK);
}

static size_t host_bytes(kind_t kind)
{
    return kind == KIND_RAW ? 1 : kind == KIND_LOGPROBS ? sizeof(sl_logprobs_t) : 4;
}

static void halve(const void *context, size_t part, size_t parts)
{
    const halve_job_t *job = context;
    size_t begin, end;
    sl_pool_part(job->count, 1, part, parts, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        uint32_t bits;
        memcpy(&bits, job->values + i, sizeof(bits));
        job->halves[i] = (uint16_t)(bits >> 16); /* inputs are exact */
    }
}

static void poison(kind_t kind, void *memory, size_t bytes)
{
    const float nan = NAN;
    const int32_t id = BIND_POISON_ID;
    bool ids = kind == KIND_I32 || kind == KIND_LOGPROBS;
    for (size_t i = 0; i + 4 <= bytes; i += 4) {
        memcpy((char *)memory + i, ids ? (const void *)&id : &nan, 4);
    }
}

/* Fills a buffer chunk by chunk: memory as large as the largest would cost the host more time than
 * what it writes there. Where the binding is like another, what that has. */
static void fill_buffer(bind_t *b, const bind_buffer_t *buffer, const source_t *source)
{
    size_t wide = host_bytes(buffer->kind), narrow = element_bytes(b, buffer->kind);
    size_t chunk = buffer->count < CHUNK_ELEMENTS ? buffer->count : CHUNK_ELEMENTS;
    uint64_t random = b->random;
    char *made = malloc(chunk * wide + 1), *raw = malloc(chunk * narrow + 1);
    SL_ASSERT(made != NULL && raw != NULL);
    if (b->like == NULL && source->host == NULL && source->scale == 0) {
        poison(buffer->kind, made, chunk * wide);
    }
    for (size_t done = 0, count; done < buffer->count; done += count) {
        count = buffer->count - done < chunk ? buffer->count - done : chunk;
        const void *values = source->host != NULL ? (const char *)source->host + done * wide : made;
        if (b->like != NULL) {
            const char *like = b->like->buffers[buffer - b->buffers].memory + GUARD_BYTES;
            transfer(b, raw, like + done * narrow, count * narrow, false);
            values = raw;
        } else if (source->host == NULL && source->scale != 0) {
            fill_job_t job = {.values = (float *)(void *)made,
                              .count = count,
                              .block = done / BLOCK_FLOATS,
                              .scale = source->scale,
                              .random = random,
                              .random_after = &b->random};
            on_all_cores(count, fill_blocks, &job);
        }
        if (b->like == NULL && is_bf16(b, buffer->kind)) {
            halve_job_t job = {(uint16_t *)(void *)raw, values, count};
            on_all_cores(count, halve, &job);
            values = raw;
        }
        transfer(b, buffer->memory + GUARD_BYTES + done * narrow, values, count * narrow, true);
    }
    free(made);
    free(raw);
}

static bind_buffer_t *take_buffer(bind_t *b, kind_t kind, size_t count)
{
    SL_ASSERT(b->buffer_count < BIND_BUFFERS_MAX);
    bind_buffer_t *buffer = &b->buffers[b->buffer_count++];
    *buffer = (bind_buffer_t){.kind = kind, .count = count};
    buffer->bytes = count * element_bytes(b, kind);
    void *memory;
    size_t whole = buffer->bytes + 2 * GUARD_BYTES;
    SL_ASSERT(b->ops->alloc(b->device, whole, "test buffer", &memory) == SL_OK);
    buffer->memory = memory;
    char guard[GUARD_BYTES];
    memset(guard, GUARD_BYTE, sizeof(guard));
    transfer(b, buffer->memory, guard, sizeof(guard), true);
    transfer(b, buffer->memory + GUARD_BYTES + buffer->bytes, guard, sizeof(guard), true);
    return buffer;
}

static void *bind_buffer(bind_t *b, kind_t kind, size_t count, source_t source, bool output)
{
    bind_buffer_t *buffer = take_buffer(b, kind, count);
    fill_buffer(b, buffer, &source);
    buffer->output = output;
    b->bytes += (double)buffer->bytes;
    return buffer->memory + GUARD_BYTES;
}

void *bind_in(bind_t *b, kind_t kind, size_t count, const void *host)
{
    SL_ASSERT(host != NULL);
    return bind_buffer(b, kind, count, (source_t){.host = host}, false);
}

void *bind_inout(bind_t *b, kind_t kind, size_t count, const void *host)
{
    SL_ASSERT(host != NULL);
    return bind_buffer(b, kind, count, (source_t){.host = host}, true);
}

void *bind_random_in(bind_t *b, kind_t kind, size_t count, float scale)
{
    return bind_buffer(b, kind, count, (source_t){.scale = scale}, false);
}

void *bind_random_inout(bind_t *b, kind_t kind, size_t count, float scale)
{
    return bind_buffer(b, kind, count, (source_t){.scale = scale}, true);
}

void *bind_out(bind_t *b, kind_t kind, size_t count)
{
    return bind_buffer(b, kind, count, (source_t){0}, true);
}

static bool guard_intact(const bind_t *b, const char *device)
{
    char guard[GUARD_BYTES];
    transfer(b, guard, device, sizeof(guard), false);
    for (size_t i = 0; i < sizeof(guard); i++) {
        if ((unsigned char)guard[i] != GUARD_BYTE) {
            return false;
        }
    }
    return true;
}

bool bind_guards_intact(const bind_t *b)
{
    for (size_t i = 0; i < b->buffer_count; i++) {
        const bind_buffer_t *buffer = &b->buffers[i];
        if (!guard_intact(b, buffer->memory) ||
            !guard_intact(b, buffer->memory + GUARD_BYTES + buffer->bytes)) {
            fprintf(stderr, "buffer %zu: written outside its %zu bytes\n", i, buffer->bytes);
            return false;
        }
    }
    return true;
}

bool bind_fetch(bind_t *b)
{
    if (!bind_guards_intact(b)) {
        return false;
    }
    for (size_t i = 0; i < b->buffer_count; i++) {
        bind_buffer_t *buffer = &b->buffers[i];
        if (!buffer->output) {
            continue;
        }
        void *raw = bind_host(b, buffer->bytes);
        transfer(b, raw, buffer->memory + GUARD_BYTES, buffer->bytes, false);
        buffer->host = raw;
        if (is_bf16(b, buffer->kind)) {
            buffer->host = bind_host(b, buffer->count * sizeof(float));
            sl_convert_to_f32(buffer->host, raw, SL_DTYPE_BF16, buffer->count);
        }
    }
    return true;
}

bool bind_floats_agree(float got, float expected, double tolerance)
{
    if (isnan(got) || isnan(expected) || isinf(got) || isinf(expected)) {
        return (isnan(got) && isnan(expected)) || got == expected;
    }
    return fabs((double)got - expected) <= tolerance * (1 + fabs((double)expected));
}

static bool logprobs_agree(const sl_logprobs_t *got, const sl_logprobs_t *expected,
                           double tolerance)
{
    if (got->top_count != expected->top_count ||
        !bind_floats_agree(got->logprob, expected->logprob, tolerance)) {
        return false;
    }
    uint32_t count = got->top_count <= SL_TOP_LOGPROBS_MAX ? got->top_count : 0;
    for (uint32_t j = 0; j < count; j++) {
        if (got->top_ids[j] != expected->top_ids[j] ||
            !bind_floats_agree(got->top_logprobs[j], expected->top_logprobs[j], tolerance)) {
            return false;
        }
    }
    return true;
}

static bool element_agrees(const bind_buffer_t *got, const bind_buffer_t *expected, size_t i,
                           double tolerance)
{
    if (got->kind == KIND_I32) {
        return ((const int32_t *)got->host)[i] == ((const int32_t *)expected->host)[i];
    }
    if (got->kind == KIND_LOGPROBS) {
        return logprobs_agree((const sl_logprobs_t *)got->host + i,
                              (const sl_logprobs_t *)expected->host + i, tolerance);
    }
    return bind_floats_agree(((const float *)got->host)[i], ((const float *)expected->host)[i],
                             tolerance);
}

static void describe_element(const bind_buffer_t *got, const bind_buffer_t *expected, size_t i,
                             char *text, size_t size)
{
    if (got->kind == KIND_I32) {
        int32_t a = ((const int32_t *)got->host)[i], e = ((const int32_t *)expected->host)[i];
        (void)snprintf(text, size, "got %d, expected %d", a, e);
    } else if (got->kind == KIND_LOGPROBS) {
        const sl_logprobs_t *a = (const sl_logprobs_t *)got->host + i;
        const sl_logprobs_t *e = (const sl_logprobs_t *)expected->host + i;
        (void)snprintf(text, size, "got %g and %u, expected %g and %u", (double)a->logprob,
                       a->top_count, (double)e->logprob, e->top_count);
    } else {
        float a = ((const float *)got->host)[i], e = ((const float *)expected->host)[i];
        (void)snprintf(text, size, "got %.9g, expected %.9g", (double)a, (double)e);
    }
}

bool bind_agree(const bind_t *got, const bind_t *expected, double tolerance)
{
    SL_ASSERT(got->buffer_count == expected->buffer_count);
    size_t wrong = 0;
    for (size_t i = 0; i < got->buffer_count; i++) {
        const bind_buffer_t *a = &got->buffers[i], *e = &expected->buffers[i];
        for (size_t j = 0; a->output && j < a->count; j++) {
            char text[128];
            if (!element_agrees(a, e, j, tolerance) && wrong++ < 5) {
                describe_element(a, e, j, text, sizeof(text));
                fprintf(stderr, "buffer %zu, element %zu of %zu: %s\n", i, j, a->count, text);
            }
        }
    }
    return wrong == 0;
}

bool bind_equal(const bind_t *a, const bind_t *b)
{
    SL_ASSERT(a->buffer_count == b->buffer_count);
    for (size_t i = 0; i < a->buffer_count; i++) {
        if (a->buffers[i].output &&
            memcmp(a->buffers[i].host, b->buffers[i].host, a->buffers[i].bytes) != 0) {
            fprintf(stderr, "buffer %zu differs\n", i);
            return false;
        }
    }
    return true;
}

void bind_close(bind_t *b)
{
    for (size_t i = 0; i < b->buffer_count; i++) {
        b->ops->free(b->device, b->buffers[i].memory);
    }
    for (size_t i = 0; i < b->host_count; i++) {
        free(b->hosts[i]);
    }
}
