/*
 * The header of one .safetensors file: 8 bytes little-endian length, that many bytes of JSON, then
 * the data that the JSON's offsets divide without hole or overlap up to the end of the file.
 * Source: the format section of the safetensors README. Any thread; never blocks; reads the header
 * bytes only.
 */
#ifndef SL_MODEL_SAFETENSORS_H
#define SL_MODEL_SAFETENSORS_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define SL_SAFETENSORS_HEADER_MAX 100000000u
#define SL_SAFETENSORS_RANK_MAX 8
#define SL_SAFETENSORS_NAME_MAX 256

typedef struct {
    const char *name;  /* owned by the header */
    const char *dtype; /* as the file spells it: "F32", "BF16", ...; static */
    uint32_t rank;
    uint64_t shape[SL_SAFETENSORS_RANK_MAX];
    uint64_t begin, end; /* bytes from the start of the file */
} sl_safetensors_entry_t;

typedef struct {
    sl_safetensors_entry_t *entries; /* by begin, empty tensors first where they share it */
    size_t count;
    json_t *root; /* holds the names */
} sl_safetensors_t;

/* Parses and checks the header of the file whose `size` bytes lie at `bytes`; `label` names it.
 * SL_ERR_INVALID, SL_ERR_LIMIT, SL_ERR_UNSUPPORTED (a dtype nobody here knows). */
SL_MUST_USE sl_status_t sl_safetensors_parse(const void *bytes, size_t size, const char *label,
                                             sl_safetensors_t *header_p);

/* Frees what parse made; harmless on a zeroed one. */
void sl_safetensors_cleanup(sl_safetensors_t *header);

#endif
