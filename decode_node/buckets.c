#include "decode_node/buckets.h"

#include "common/base/status.h"

static uint32_t gap_after(uint32_t rows)
{
    if (rows < 8) {
        return rows;
    }
    if (rows < 256) {
        return rows < 64 ? 8 : 16;
    }
    return (rows / 8 + 63) / 64 * 64;
}

uint32_t sl_decode_buckets(uint32_t largest, uint32_t buckets[SL_BUCKETS_MAX])
{
    uint32_t count = 0;
    for (uint32_t rows = 1; rows < largest; rows += gap_after(rows)) {
        buckets[count++] = rows;
        SL_ASSERT(count < SL_BUCKETS_MAX);
    }
    buckets[count++] = largest;
    return count;
}
