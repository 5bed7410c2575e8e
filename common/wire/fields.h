/*
 * Field tables: one table per message type says how each field of its struct travels. Encoding,
 * decoding, copying and freeing all walk the same tables. Internal to common/wire.
 *
 * Plain data, constant. A nested table (STRUCT, STRUCTS) holds no field that owns memory.
 */
#ifndef SL_WIRE_FIELDS_H
#define SL_WIRE_FIELDS_H

#include "common/wire/messages.h"

#define SL_FIELDS_MAX 32 /* fields of one table */

typedef enum {
    SL_FIELD_U32,      /* uint32_t, min_int..max_int */
    SL_FIELD_U64,      /* uint64_t, no bounds */
    SL_FIELD_I32,      /* int32_t, min_int..max_int */
    SL_FIELD_F32,      /* float, min_float..max_float; integers are accepted */
    SL_FIELD_BOOL,     /* bool */
    SL_FIELD_TEXT,     /* char[capacity], min_int bytes at least */
    SL_FIELD_WORD,     /* an enum that counts words[] from 0 */
    SL_FIELD_BYTES,    /* sl_bytes_t */
    SL_FIELD_STRUCT,   /* nested map by `table` */
    SL_FIELD_STRUCTS,  /* pointer + size_t count: array of maps by `table` */
    SL_FIELD_IDS,      /* int32_t * + size_t count: token ids */
    SL_FIELD_FEW_IDS,  /* int32_t[capacity] + uint32_t count: token ids */
    SL_FIELD_U64S,     /* uint64_t * + size_t count */
    SL_FIELD_BLOBS,    /* sl_bytes_t * + size_t count */
    SL_FIELD_LOGPROBS, /* sl_logprobs_t * + size_t count */
} sl_field_kind_t;

typedef enum {
    SL_FIELD_REQUIRED,
    SL_FIELD_OPTIONAL,    /* may be absent or nil; written always, NULL arrays excepted */
    SL_FIELD_CLIENT_FORM, /* optional; written when the message is for a client */
    SL_FIELD_RANK_FORM,   /* optional; written when it is a rank's */
} sl_field_presence_t;

typedef struct sl_field_table sl_field_table_t;

typedef struct {
    const char *name;
    sl_field_kind_t kind;
    sl_field_presence_t presence;
    size_t offset;
    size_t count_offset; /* arrays */
    size_t flag_offset;  /* 0, or a bool: whether the optional field is there */
    size_t capacity;     /* TEXT, FEW_IDS; arrays of structs, blobs and logprobs: items at most */
    int64_t min_int;     /* arrays: items at least */
    uint64_t max_int;
    double min_float, max_float;
    bool above_min;       /* F32: min_float itself is refused */
    bool shares_count;    /* the count is that of an earlier field */
    double default_value; /* of an absent optional number */
    const char *expected; /* F32: the range in words */
    const char *const *words;
    uint32_t word_count;
    const sl_field_table_t *table;
} sl_field_t;

struct sl_field_table {
    const char *name;
    const sl_field_t *fields;
    uint32_t count;
    size_t size; /* of the struct */
};

/* The table of a message type; its name is the wire's "type". */
const sl_field_table_t *sl_message_fields(sl_message_type_t type);

/* The struct of a message's own type within the union. */
static inline void *sl_message_body(sl_message_t *message)
{
    return &message->generate;
}

static inline void *sl_field_at(const sl_field_t *field, void *body)
{
    return (char *)body + field->offset;
}

static inline const void *sl_field_in(const sl_field_t *field, const void *body)
{
    return (const char *)body + field->offset;
}

/* Bytes of one item of an array kind that lives on the heap; 0 for every other kind. */
size_t sl_field_item_bytes(const sl_field_t *field);

#endif
