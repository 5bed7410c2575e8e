/* What parsing and printing of options share: the spellings of a name. Part of options. */
#ifndef SL_BASE_OPTIONS_TEXT_H
#define SL_BASE_OPTIONS_TEXT_H

#include "common/base/options.h"

#define SL_OPTION_NAME_BYTES 64

/* "token-budget" as "SLUICE_TOKEN_BUDGET" and as "token_budget". */
void sl_option_env_name(const sl_option_t *option, char name[SL_OPTION_NAME_BYTES]);
void sl_option_key_name(const sl_option_t *option, char name[SL_OPTION_NAME_BYTES]);

/* What a value of the option looks like, for people: "an integer from 1 to 64". */
void sl_option_expected(const sl_option_t *option, char *text, size_t size);

/* Known name nearest to `name` by edit distance, as a flag ("--token-budget", "--no-x" and the
 * built-in ones too) or as a key. */
void sl_option_nearest(const sl_options_t *options, const char *name, bool as_key,
                       char nearest[SL_OPTION_NAME_BYTES]);

#endif
