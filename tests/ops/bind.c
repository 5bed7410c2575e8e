/* Buffers of a case: guard bands, poison, conversion to the backend's types, comparison. */
#include "tests/ops/bind.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/convert.h"
#include "tests/ops/bind_internal.h"

#define GUARD_BYTES 256
#define GUARD_BYTE 0xA5

void *bind_host(bind_t *b, size_t bytes)
{
    SL_ASSERT(b->host_count < BIND_HOSTS_MAX);
    void *memory = calloc(1, bytes + 1);
    SL_ASSERT(memory != NULL);
    b->hosts[b->host_count++] = memory;
    return memory;
}

uint32_t bind_random(bind_t *b)
{
    b->random ^= b->random << 13;
    b->random ^= b->random >> 7;
    b->random ^= b->random << 17;
    return (uint32_t)(b->random >> 32);
}

float *bind_floats(bind_t *b, size_t count, float scale)
{
    float *values = bind_host(b, count * sizeof(float));
    for (size_t i = 0; i < count; i++) {
        float value = scale * (float)((double)bind_random(b) / 2147483648.0 - 1);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        values[i] = sl_float_from_bits(bits & 0xffff0000u);
    }
    return values;
}

float *bind_nans(bind_t *b, size_t count)
{
    float *values = bind_host(b, count * sizeof(float));
    for (size_t i = 0; i < count; i++) {
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

/* f32 on the host to the device's type. */
static void upload(const bind_t *b, const bind_buffer_t *buffer, const void *host)
{
    char *device = buffer->memory + GUARD_BYTES;
    if (!is_bf16(b, buffer->kind)) {
        transfer(b, device, host, buffer->bytes, true);
        return;
    }
    uint16_t *halves = malloc(buffer->bytes + 1);
    SL_ASSERT(halves != NULL);
    for (size_t i = 0; i < buffer->count; i++) {
        uint32_t bits;
        memcpy(&bits, (const float *)host + i, sizeof(bits));
        halves[i] = (uint16_t)(bits >> 16); /* inputs are exact */
    }
    transfer(b, device, halves, buffer->bytes, true);
    free(halves);
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
    char *fill = malloc(whole);
    SL_ASSERT(fill != NULL);
    memset(fill, GUARD_BYTE, whole);
    transfer(b, buffer->memory, fill, whole, true);
    free(fill);
    return buffer;
}

void *bind_in(bind_t *b, kind_t kind, size_t count, const void *host)
{
    bind_buffer_t *buffer = take_buffer(b, kind, count);
    upload(b, buffer, host);
    b->bytes += (double)buffer->bytes;
    return buffer->memory + GUARD_BYTES;
}

void *bind_inout(bind_t *b, kind_t kind, size_t count, const void *host)
{
    void *device = bind_in(b, kind, count, host);
    b->buffers[b->buffer_count - 1].output = true;
    return device;
}

void *bind_out(bind_t *b, kind_t kind, size_t count)
{
    size_t words = count * (kind == KIND_LOGPROBS ? sizeof(sl_logprobs_t) / 4 : 1);
    int32_t *poison = bind_host(b, words * 4);
    for (size_t i = 0; i < words; i++) {
        const float nan = NAN;
        poison[i] = BIND_POISON_ID;
        if (kind != KIND_I32 && kind != KIND_LOGPROBS) {
            memcpy(&poison[i], &nan, sizeof(nan));
        }
    }
    return bind_inout(b, kind, count, poison);
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

bool bind_fetch(bind_t *b)
{
    for (size_t i = 0; i < b->buffer_count; i++) {
        bind_buffer_t *buffer = &b->buffers[i];
        if (!guard_intact(b, buffer->memory) ||
            !guard_intact(b, buffer->memory + GUARD_BYTES + buffer->bytes)) {
            fprintf(stderr, "buffer %zu: written outside its %zu bytes\n", i, buffer->bytes);
            return false;
        }
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

static bool floats_agree(float got, float expected, double tolerance)
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
        !floats_agree(got->logprob, expected->logprob, tolerance)) {
        return false;
    }
    uint32_t count = got->top_count <= SL_TOP_LOGPROBS_MAX ? got->top_count : 0;
    for (uint32_t j = 0; j < count; j++) {
        if (got->top_ids[j] != expected->top_ids[j] ||
            !floats_agree(got->top_logprobs[j], expected->top_logprobs[j], tolerance)) {
            return false;
        }
    }
    return true;
}

static bool element_agrees(const bind_buffer_t *got, const bind_buffer_t *expected, size_t i,
                           double tolerance, char *text, size_t size)
{
    if (got->kind == KIND_I32) {
        int32_t a = ((const int32_t *)got->host)[i], e = ((const int32_t *)expected->host)[i];
        snprintf(text, size, "got %d, expected %d", a, e);
        return a == e;
    }
    if (got->kind == KIND_LOGPROBS) {
        const sl_logprobs_t *a = (const sl_logprobs_t *)got->host + i;
        const sl_logprobs_t *e = (const sl_logprobs_t *)expected->host + i;
        snprintf(text, size, "got %g and %u, expected %g and %u", (double)a->logprob, a->top_count,
                 (double)e->logprob, e->top_count);
        return logprobs_agree(a, e, tolerance);
    }
    float a = ((const float *)got->host)[i], e = ((const float *)expected->host)[i];
    snprintf(text, size, "got %.9g, expected %.9g", (double)a, (double)e);
    return floats_agree(a, e, tolerance);
}

bool bind_agree(const bind_t *got, const bind_t *expected, double tolerance)
{
    SL_ASSERT(got->buffer_count == expected->buffer_count);
    size_t wrong = 0;
    for (size_t i = 0; i < got->buffer_count; i++) {
        const bind_buffer_t *a = &got->buffers[i], *e = &expected->buffers[i];
        for (size_t j = 0; a->output && j < a->count; j++) {
            char text[128];
            if (!element_agrees(a, e, j, tolerance, text, sizeof(text)) && wrong++ < 5) {
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
