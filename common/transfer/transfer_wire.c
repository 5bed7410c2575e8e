/*
 * A cursor writes or reads fields one after the other; it remembers that it ran out of bytes, so
 * that callers check once at the end. Layouts:
 *
 *   group address     "SLGA" version:u32 rank:u32 size:u32 n:u32 worker[n] checksum:u64
 *   transfer address  "SLTA" version:u32 pool:u32 group:u32 rank:u32 incarnation:u64
 *                     layout_hash:u64 pool_base:u64 page_bytes:u64 layers:u32 page_count:u32
 *                     device_memory:u32 n:u32 worker[n] m:u32 rkey[m] checksum:u64
 *   message           "SLTM" version:u32 type:u32 pool:u32 group:u32 rank:u32 incarnation:u64
 *                     attempt:u64 layout_hash:u64 generation:u32, then
 *       grant         page_count:u32 page:u32[page_count]
 *       commit        page_count:u32 prompt_len:u32 first_token:u32 seed:u64
 *       release, bye  nothing
 *       data          to_granter:u32 index:u32 page:u32 offset:u64
 *       data seen     count:u64
 *
 * The checksum (FNV-1a) guards UCX, which takes its own bytes on trust, against truncation and
 * corruption on the way through the router.
 */
#include "common/transfer/transfer_wire.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 1u
#define MAGIC_GROUP 0x41474c53u    /* "SLGA" */
#define MAGIC_TRANSFER 0x41544c53u /* "SLTA" */
#define MAGIC_MESSAGE 0x4d544c53u  /* "SLTM" */
#define RANK_BYTES 20
#define MESSAGE_HEADER_BYTES (12 + RANK_BYTES + 20)

typedef struct {
    uint8_t *data;
    size_t size, used;
} writer_t;

typedef struct {
    const uint8_t *data;
    size_t size, used;
    bool short_of_bytes;
} reader_t;

static void put_u32(writer_t *writer, uint32_t value)
{
    SL_ASSERT(writer->size - writer->used >= 4);
    uint32_t little = htole32(value);
    memcpy(writer->data + writer->used, &little, sizeof(little));
    writer->used += sizeof(little);
}

static void put_u64(writer_t *writer, uint64_t value)
{
    put_u32(writer, (uint32_t)value);
    put_u32(writer, (uint32_t)(value >> 32));
}

static void put_bytes(writer_t *writer, const uint8_t *bytes, uint32_t count)
{
    put_u32(writer, count);
    SL_ASSERT(writer->size - writer->used >= count);
    memcpy(writer->data + writer->used, bytes, count);
    writer->used += count;
}

static void put_rank(writer_t *writer, const sl_rank_id_t *rank)
{
    put_u32(writer, (uint32_t)rank->pool);
    put_u32(writer, rank->group);
    put_u32(writer, rank->rank);
    put_u64(writer, rank->incarnation);
}

static const uint8_t *get_raw(reader_t *reader, size_t count)
{
    if (reader->short_of_bytes || reader->size - reader->used < count) {
        reader->short_of_bytes = true;
        return NULL;
    }
    const uint8_t *raw = reader->data + reader->used;
    reader->used += count;
    return raw;
}

static uint32_t load_u32(const uint8_t *raw)
{
    return (uint32_t)raw[0] | (uint32_t)raw[1] << 8 | (uint32_t)raw[2] << 16 |
           (uint32_t)raw[3] << 24;
}

static uint32_t get_u32(reader_t *reader)
{
    const uint8_t *raw = get_raw(reader, 4);
    return raw == NULL ? 0 : load_u32(raw);
}

static uint64_t get_u64(reader_t *reader)
{
    uint64_t low = get_u32(reader);
    return low | (uint64_t)get_u32(reader) << 32;
}

/* 0 or 1; anything else counts as bytes that are not there. */
static bool get_bool(reader_t *reader)
{
    uint32_t value = get_u32(reader);
    reader->short_of_bytes |= value > 1;
    return value == 1;
}

static const uint8_t *get_bytes(reader_t *reader, uint32_t *count_p)
{
    *count_p = get_u32(reader);
    return get_raw(reader, *count_p);
}

static sl_rank_id_t get_rank(reader_t *reader, uint32_t *pool_p)
{
    sl_rank_id_t rank = {0};
    *pool_p = get_u32(reader);
    rank.pool = *pool_p == SL_POOL_PREFILL ? SL_POOL_PREFILL : SL_POOL_DECODE;
    rank.group = get_u32(reader);
    rank.rank = get_u32(reader);
    rank.incarnation = get_u64(reader);
    return rank;
}

static uint64_t checksum(const uint8_t *data, size_t size)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ data[i]) * 0x100000001b3u;
    }
    return hash;
}

static sl_status_t allocate(size_t size, writer_t *writer)
{
    *writer = (writer_t){.data = malloc(size), .size = size};
    if (writer->data == NULL) {
        return sl_error(SL_ERR_NO_MEMORY, "transfer: message of %zu bytes", size);
    }
    return SL_OK;
}

static sl_bytes_t finish(writer_t *writer)
{
    SL_ASSERT(writer->used == writer->size);
    return (sl_bytes_t){.data = writer->data, .size = writer->size};
}

static sl_status_t check_magic(reader_t *reader, const char *what, uint32_t magic)
{
    uint32_t found = get_u32(reader), version = get_u32(reader);
    if (reader->short_of_bytes || found != magic) {
        return sl_error(SL_ERR_INVALID, "%s: first word %08x of %zu bytes, expected %08x", what,
                        found, reader->size, magic);
    }
    if (version != VERSION) {
        return sl_error(SL_ERR_INVALID, "%s: version %u, expected %u", what, version, VERSION);
    }
    return SL_OK;
}

/* What every address ends with. */
static sl_status_t check_tail(reader_t *reader, const char *what)
{
    size_t covered = reader->used;
    uint64_t found = get_u64(reader);
    if (reader->short_of_bytes) {
        return sl_error(SL_ERR_INVALID, "%s: %zu bytes are too few", what, reader->size);
    }
    if (reader->used != reader->size) {
        return sl_error(SL_ERR_INVALID, "%s: %zu bytes after the end at %zu", what,
                        reader->size - reader->used, reader->used);
    }
    uint64_t expected = checksum(reader->data, covered);
    if (found != expected) {
        return sl_error(SL_ERR_INVALID, "%s: checksum %016llx, expected %016llx", what,
                        (unsigned long long)found, (unsigned long long)expected);
    }
    return SL_OK;
}

static sl_status_t check_opaque(const char *what, const char *field, uint32_t bytes)
{
    if (bytes == 0 || bytes > SL_TRANSFER_OPAQUE_BYTES_MAX) {
        return sl_error(SL_ERR_INVALID, "%s: %s of %u bytes, expected 1 to %d", what, field, bytes,
                        SL_TRANSFER_OPAQUE_BYTES_MAX);
    }
    return SL_OK;
}

sl_status_t sl_group_blob_encode(const sl_group_blob_t *blob, sl_bytes_t *bytes_p)
{
    writer_t writer;
    SL_TRY(allocate(5 * 4 + (size_t)blob->worker_address_bytes + 8, &writer));
    put_u32(&writer, MAGIC_GROUP);
    put_u32(&writer, VERSION);
    put_u32(&writer, blob->rank);
    put_u32(&writer, blob->size);
    put_bytes(&writer, blob->worker_address, blob->worker_address_bytes);
    put_u64(&writer, checksum(writer.data, writer.used));
    *bytes_p = finish(&writer);
    return SL_OK;
}

sl_status_t sl_group_blob_parse(const uint8_t *data, size_t size, sl_group_blob_t *blob_p)
{
    static const char what[] = "group address";
    reader_t reader = {.data = data, .size = size};
    SL_TRY(check_magic(&reader, what, MAGIC_GROUP));
    sl_group_blob_t blob;
    blob.rank = get_u32(&reader);
    blob.size = get_u32(&reader);
    blob.worker_address = get_bytes(&reader, &blob.worker_address_bytes);
    SL_TRY(check_tail(&reader, what));
    SL_TRY(check_opaque(what, "worker address", blob.worker_address_bytes));
    if (blob.rank >= blob.size) {
        return sl_error(SL_ERR_INVALID, "%s: rank %u of a group of %u", what, blob.rank, blob.size);
    }
    *blob_p = blob;
    return SL_OK;
}

sl_status_t sl_transfer_blob_encode(const sl_transfer_blob_t *blob, sl_bytes_t *bytes_p)
{
    writer_t writer;
    size_t fixed = 8 + RANK_BYTES + 3 * 8 + 3 * 4 + 2 * 4 + 8;
    SL_TRY(allocate(fixed + blob->worker_address_bytes + blob->rkey_bytes, &writer));
    put_u32(&writer, MAGIC_TRANSFER);
    put_u32(&writer, VERSION);
    put_rank(&writer, &blob->rank);
    put_u64(&writer, blob->layout_hash);
    put_u64(&writer, blob->pool_base);
    put_u64(&writer, blob->page_bytes);
    put_u32(&writer, blob->layers);
    put_u32(&writer, blob->page_count);
    put_u32(&writer, blob->device_memory ? 1 : 0);
    put_bytes(&writer, blob->worker_address, blob->worker_address_bytes);
    put_bytes(&writer, blob->rkey, blob->rkey_bytes);
    put_u64(&writer, checksum(writer.data, writer.used));
    *bytes_p = finish(&writer);
    return SL_OK;
}

static sl_status_t check_pool(const char *what, const sl_transfer_blob_t *blob)
{
    if (blob->page_count == 0 || blob->page_bytes == 0 || blob->layers == 0 ||
        blob->page_bytes % blob->layers != 0) {
        return sl_error(SL_ERR_INVALID, "%s: %u pages of %llu bytes in %u layers", what,
                        blob->page_count, (unsigned long long)blob->page_bytes, blob->layers);
    }
    if (blob->page_bytes > UINT64_MAX / blob->page_count ||
        blob->pool_base > UINT64_MAX - blob->page_bytes * blob->page_count) {
        return sl_error(SL_ERR_INVALID, "%s: %u pages of %llu bytes at %llx wrap around", what,
                        blob->page_count, (unsigned long long)blob->page_bytes,
                        (unsigned long long)blob->pool_base);
    }
    return SL_OK;
}

sl_status_t sl_transfer_blob_parse(const uint8_t *data, size_t size, sl_transfer_blob_t *blob_p)
{
    static const char what[] = "transfer address";
    reader_t reader = {.data = data, .size = size};
    SL_TRY(check_magic(&reader, what, MAGIC_TRANSFER));
    sl_transfer_blob_t blob;
    uint32_t pool;
    blob.rank = get_rank(&reader, &pool);
    blob.layout_hash = get_u64(&reader);
    blob.pool_base = get_u64(&reader);
    blob.page_bytes = get_u64(&reader);
    blob.layers = get_u32(&reader);
    blob.page_count = get_u32(&reader);
    blob.device_memory = get_bool(&reader);
    blob.worker_address = get_bytes(&reader, &blob.worker_address_bytes);
    blob.rkey = get_bytes(&reader, &blob.rkey_bytes);
    SL_TRY(check_tail(&reader, what));
    SL_TRY(check_opaque(what, "worker address", blob.worker_address_bytes));
    SL_TRY(check_opaque(what, "remote key", blob.rkey_bytes));
    if (pool > SL_POOL_DECODE) {
        return sl_error(SL_ERR_INVALID, "%s: pool %u, expected 0 or 1", what, pool);
    }
    SL_TRY(check_pool(what, &blob));
    *blob_p = blob;
    return SL_OK;
}

static size_t body_bytes(const sl_transfer_msg_t *msg)
{
    switch (msg->type) {
    case SL_TRANSFER_MSG_GRANT:
        return 4 + (size_t)msg->page_count * 4;
    case SL_TRANSFER_MSG_COMMIT:
        return 20;
    case SL_TRANSFER_MSG_DATA:
        return 20;
    case SL_TRANSFER_MSG_DATA_SEEN:
        return 8;
    case SL_TRANSFER_MSG_RELEASE:
    case SL_TRANSFER_MSG_BYE:
        break;
    }
    return 0;
}

sl_status_t sl_transfer_msg_encode(const sl_transfer_msg_t *msg, const uint32_t *pages,
                                   sl_bytes_t *bytes_p)
{
    writer_t writer;
    SL_TRY(allocate(MESSAGE_HEADER_BYTES + body_bytes(msg), &writer));
    put_u32(&writer, MAGIC_MESSAGE);
    put_u32(&writer, VERSION);
    put_u32(&writer, (uint32_t)msg->type);
    put_rank(&writer, &msg->from);
    put_u64(&writer, msg->attempt);
    put_u64(&writer, msg->layout_hash);
    put_u32(&writer, msg->generation);
    if (msg->type == SL_TRANSFER_MSG_GRANT) {
        put_u32(&writer, msg->page_count);
        for (uint32_t i = 0; i < msg->page_count; i++) {
            put_u32(&writer, pages[i]);
        }
    } else if (msg->type == SL_TRANSFER_MSG_COMMIT) {
        put_u32(&writer, msg->commit.page_count);
        put_u32(&writer, msg->commit.prompt_len);
        put_u32(&writer, (uint32_t)msg->commit.first_token);
        put_u64(&writer, msg->commit.seed);
    } else if (msg->type == SL_TRANSFER_MSG_DATA) {
        put_u32(&writer, msg->data.to_granter ? 1 : 0);
        put_u32(&writer, msg->data.index);
        put_u32(&writer, msg->data.page);
        put_u64(&writer, msg->data.offset);
    } else if (msg->type == SL_TRANSFER_MSG_DATA_SEEN) {
        put_u64(&writer, msg->seen);
    }
    *bytes_p = finish(&writer);
    return SL_OK;
}

static sl_status_t parse_body(reader_t *reader, sl_transfer_msg_t *msg)
{
    switch (msg->type) {
    case SL_TRANSFER_MSG_GRANT:
        msg->page_count = get_u32(reader);
        if (msg->page_count == 0 || msg->page_count > SL_TRANSFER_GRANT_PAGES_MAX) {
            return sl_error(SL_ERR_INVALID, "grant: %u pages, expected 1 to %u", msg->page_count,
                            SL_TRANSFER_GRANT_PAGES_MAX);
        }
        msg->page_bytes = get_raw(reader, (size_t)msg->page_count * 4);
        return SL_OK;
    case SL_TRANSFER_MSG_COMMIT:
        msg->commit.page_count = get_u32(reader);
        msg->commit.prompt_len = get_u32(reader);
        msg->commit.first_token = (int32_t)get_u32(reader);
        msg->commit.seed = get_u64(reader);
        return SL_OK;
    case SL_TRANSFER_MSG_DATA:
        msg->data.to_granter = get_bool(reader);
        msg->data.index = get_u32(reader);
        msg->data.page = get_u32(reader);
        msg->data.offset = get_u64(reader);
        return SL_OK;
    case SL_TRANSFER_MSG_DATA_SEEN:
        msg->seen = get_u64(reader);
        return SL_OK;
    case SL_TRANSFER_MSG_RELEASE:
    case SL_TRANSFER_MSG_BYE:
        return SL_OK;
    }
    return sl_error(SL_ERR_INVALID, "transfer message: unknown type %d", (int)msg->type);
}

sl_status_t sl_transfer_msg_parse(const uint8_t *data, size_t size, sl_transfer_msg_t *msg_p)
{
    static const char what[] = "transfer message";
    reader_t reader = {.data = data, .size = size};
    SL_TRY(check_magic(&reader, what, MAGIC_MESSAGE));
    sl_transfer_msg_t msg = {0};
    uint32_t type = get_u32(&reader), pool;
    msg.from = get_rank(&reader, &pool);
    msg.attempt = get_u64(&reader);
    msg.layout_hash = get_u64(&reader);
    msg.generation = get_u32(&reader);
    if (reader.short_of_bytes) {
        return sl_error(SL_ERR_INVALID, "%s: %zu bytes, expected at least %d", what, size,
                        MESSAGE_HEADER_BYTES);
    }
    if (pool > SL_POOL_DECODE || type < SL_TRANSFER_MSG_GRANT || type > SL_TRANSFER_MSG_DATA_SEEN) {
        return sl_error(SL_ERR_INVALID, "%s: type %u of pool %u", what, type, pool);
    }
    msg.type = (sl_transfer_msg_type_t)type;
    SL_TRY(parse_body(&reader, &msg));
    if (reader.short_of_bytes || reader.used != size) {
        return sl_error(SL_ERR_INVALID, "%s: type %u of %zu bytes, expected %zu", what, type, size,
                        MESSAGE_HEADER_BYTES + body_bytes(&msg));
    }
    *msg_p = msg;
    return SL_OK;
}

uint32_t sl_transfer_msg_page(const sl_transfer_msg_t *msg, uint32_t index)
{
    SL_ASSERT(index < msg->page_count);
    return load_u32(msg->page_bytes + (size_t)index * 4);
}
