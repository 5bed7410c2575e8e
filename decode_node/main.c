/* sluice-decode: one rank of the decode pool. */
#include <stdlib.h>

#include "common/base/options.h"
#include "decode_node/decode.h"

#define SL_BUCKETS_MAX 64u

static const sl_option_t table[] = {
    SL_RANK_OPTION_ROWS(sl_decode_options_t, rank),
    {"max-batch", SL_OPTION_U64, offsetof(sl_decode_options_t, max_batch), "256",
     "Requests held at once by this rank.", 1, 65536, NULL},
    {"async-scheduling", SL_OPTION_CHOICE, offsetof(sl_decode_options_t, async_scheduling), "auto",
     "Issue a step before the last one's tokens are known; auto: on GPUs.", 0, 0, "off|on|auto"},
};

static const sl_options_t options_table = {
    .program = "sluice-decode",
    .summary = "One rank of the decode pool: takes latents from prefill and writes tokens.",
    .table = table,
    .count = sizeof(table) / sizeof(table[0]),
};

/*
 * Rows of a recorded step: 1, 2, 4, 8, then multiples of 8 to 64, of 16 to 256, of 64 beyond, and
 * `largest` itself. Fewer would compute more padding, more take longer to record.
 */
static uint32_t make_buckets(uint32_t largest, uint32_t buckets[SL_BUCKETS_MAX])
{
    uint32_t count = 0, rows = 1;
    while (rows < largest && count + 1 < SL_BUCKETS_MAX) {
        buckets[count++] = rows;
        rows += rows < 8 ? rows : rows < 64 ? 8 : rows < 256 ? 16 : 64;
    }
    buckets[count++] = largest;
    return count;
}

int main(int argc, char **argv)
{
    sl_decode_options_t options = {0};
    sl_options_action_t action;
    sl_decode_t *decode = NULL;
    if (sl_options_parse(&options_table, argc, argv, &options, &action) != SL_OK) {
        return EXIT_FAILURE;
    }
    if (action == SL_OPTIONS_EXIT) {
        return EXIT_SUCCESS;
    }
    if (sl_decode_create(&options, &decode) != SL_OK) {
        return EXIT_FAILURE;
    }
    uint32_t batch = (uint32_t)options.max_batch;
    uint32_t buckets[SL_BUCKETS_MAX];
    sl_rank_params_t params = {
        .options = &options.rank,
        .pool = SL_POOL_DECODE,
        .ops = &sl_decode_rank_ops,
        .self = decode,
        .max_rows = batch,
        .max_requests = batch,
        .max_logit_rows = batch,
        .absorbed = true,
        .buckets = buckets,
        .bucket_count = make_buckets(batch, buckets),
        .async_scheduling = (sl_async_t)options.async_scheduling,
        .max_running = options.max_batch,
    };
    int code = sl_rank_main(&params, sl_decode_attach);
    sl_decode_destroy(decode);
    return code;
}
