/*
 * Any bytes as a .safetensors file: an error, or tensors that tile the data exactly. Every byte of
 * every tensor is read, so that an offset outside of the file is a crash.
 */
#include <string.h>

#include "common/base/log.h"
#include "common/model/safetensors.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    sl_safetensors_t header;
    volatile unsigned sum = 0;
    size_t bytes = 0;
    sl_log_set_level((sl_log_level_t)(SL_LOG_ERROR + 1));
    if (sl_safetensors_parse(data, size, "fuzz.safetensors", &header) != SL_OK) {
        return 0;
    }
    for (size_t i = 0; i < header.count; i++) {
        const sl_safetensors_entry_t *entry = &header.entries[i];
        SL_ASSERT(entry->begin <= entry->end && entry->end <= size);
        SL_ASSERT(entry->rank <= SL_SAFETENSORS_RANK_MAX);
        SL_ASSERT(strlen(entry->name) <= SL_SAFETENSORS_NAME_MAX);
        for (uint64_t at = entry->begin; at < entry->end; at++) {
            sum += data[at];
        }
        bytes += (size_t)(entry->end - entry->begin);
    }
    SL_ASSERT(bytes <= size);
    sl_safetensors_cleanup(&header);
    return 0;
}
