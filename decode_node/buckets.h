/* The numbers of rows that a decode step may have where steps are recorded. Pure. */
#ifndef SL_DECODE_BUCKETS_H
#define SL_DECODE_BUCKETS_H

#include <stdint.h>

#define SL_BUCKETS_MAX 96u

/* 1, 2, 4, 8, then multiples of 8 to 64, of 16 to 256, and beyond that steps of an eighth, in
 * multiples of 64; the last one is `largest` itself (at most 65,536). Fewer would compute more
 * padding, more take longer to record. Returns how many there are, ascending. */
uint32_t sl_decode_buckets(uint32_t largest, uint32_t buckets[SL_BUCKETS_MAX]);

#endif
