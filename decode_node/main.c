/* sluice-decode: one rank of the decode pool. */
#include <stdlib.h>

#include "common/base/options.h"
#include "decode_node/buckets.h"
#include "decode_node/decode.h"

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
        .bucket_count = sl_decode_buckets(batch, buckets),
        .async_scheduling = (sl_async_t)options.async_scheduling,
        .max_running = options.max_batch,
    };
    int code = sl_rank_main(&params, sl_decode_attach);
    sl_decode_destroy(decode);
    return code;
}
