/* sluice-prefill: one rank of the prefill pool. */
#include <stdlib.h>

#include "common/base/options.h"
#include "prefill_node/prefill.h"

static const sl_option_t table[] = {
    SL_RANK_OPTION_ROWS(sl_prefill_options_t, rank),
    {"token-budget", SL_OPTION_U64, offsetof(sl_prefill_options_t, token_budget), "65536",
     "Prompt tokens of one forward pass, a multiple of 64; longer prompts go in pieces.", 64,
     1048576, NULL},
    {"max-queued-tokens", SL_OPTION_U64, offsetof(sl_prefill_options_t, max_queued_tokens),
     "1048576", "Prompt tokens the router may queue on this rank.", 1, 0x1p40, NULL},
    {"mla-prefill", SL_OPTION_CHOICE, offsetof(sl_prefill_options_t, mla), "unabsorbed",
     "Form of the attention; absorbed is the slower baseline.", 0, 0, "unabsorbed|absorbed"},
    {"push-layers", SL_OPTION_U64, offsetof(sl_prefill_options_t, push_layers), "0",
     "Send finished latents after every so many layers; 0: after so many as make 2 MiB of a page.",
     0, 1024, NULL},
    {"starve-ms", SL_OPTION_U64, offsetof(sl_prefill_options_t, starve_ms), "2000",
     "A prompt waiting longer for pages keeps younger ones from taking them.", 0, 86400000, NULL},
};

static const sl_options_t options_table = {
    .program = "sluice-prefill",
    .summary = "One rank of the prefill pool: reads prompts and sends their latents to decode.",
    .table = table,
    .count = sizeof(table) / sizeof(table[0]),
};

static sl_status_t check(const sl_prefill_options_t *options)
{
    if (options->token_budget % SL_PAGE_TOKENS != 0) {
        return sl_error(SL_ERR_CONFIG, "--token-budget %llu: expected a multiple of %d",
                        (unsigned long long)options->token_budget, SL_PAGE_TOKENS);
    }
    return SL_OK;
}

int main(int argc, char **argv)
{
    sl_prefill_options_t options = {0};
    sl_options_action_t action;
    sl_prefill_t *prefill = NULL;
    if (sl_options_parse(&options_table, argc, argv, &options, &action) != SL_OK) {
        return EXIT_FAILURE;
    }
    if (action == SL_OPTIONS_EXIT) {
        return EXIT_SUCCESS;
    }
    if (check(&options) != SL_OK || sl_prefill_create(&options, &prefill) != SL_OK) {
        return EXIT_FAILURE;
    }
    sl_rank_params_t params = {
        .options = &options.rank,
        .pool = SL_POOL_PREFILL,
        .ops = &sl_prefill_rank_ops,
        .self = prefill,
        .max_rows = (uint32_t)options.token_budget,
        .max_requests = SL_PREFILL_STEP_REQUESTS,
        .max_logit_rows = SL_PREFILL_LOGIT_ROWS,
        .absorbed = options.mla == SL_MLA_ABSORBED,
        .unabsorbed = options.mla == SL_MLA_UNABSORBED,
        .max_queued_tokens = options.max_queued_tokens,
    };
    int code = sl_rank_main(&params, sl_prefill_attach);
    sl_prefill_destroy(prefill);
    return code;
}
