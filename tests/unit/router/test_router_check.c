/* What is refused at the door, and that the text names the value and the limit. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "router/check.h"

static const sl_check_limits_t limits = {.vocab_size = 1000,
                                         .max_model_len = 4096,
                                         .page_tokens = 64,
                                         .decode_pages = 40,
                                         .prefill_pages = 30,
                                         .prefill_queue_tokens = 1900};
static int32_t prompt[4096];

static sl_msg_generate_t good(void)
{
    return (sl_msg_generate_t){
        .id = "a",
        .tokens = prompt,
        .token_count = 100,
        .sampling = {.temperature = 0.5f,
                     .top_p = 1,
                     .max_tokens = 100,
                     .logprobs = -1,
                     .prompt_logprobs = -1},
    };
}

static void expect(sl_msg_generate_t generate, sl_status_t status, const char *part)
{
    assert_int_equal(sl_check_generate(&generate, &limits), status);
    if (strstr(sl_error_text(), part) == NULL) {
        fail_msg("\"%s\" does not hold \"%s\"", sl_error_text(), part);
    }
}

static void good_request_passes(void **state)
{
    (void)state;
    sl_msg_generate_t generate = good();
    assert_int_equal(sl_check_generate(&generate, &limits), SL_OK);
    /* Before any rank is there only the message itself can be checked. */
    assert_int_equal(sl_check_generate(&generate, &(sl_check_limits_t){0}), SL_OK);
}

static void bad_message_is_named(void **state)
{
    (void)state;
    sl_msg_generate_t generate = good();
    generate.token_count = 0;
    expect(generate, SL_ERR_INVALID, "prompt is empty");
    generate = good();
    generate.id[0] = 0;
    expect(generate, SL_ERR_INVALID, "id is empty");
    generate = good();
    generate.sampling.temperature = NAN;
    expect(generate, SL_ERR_INVALID, "temperature is nan");
    generate.sampling.temperature = -1;
    expect(generate, SL_ERR_INVALID, "temperature is -1");
    generate.sampling.temperature = INFINITY;
    expect(generate, SL_ERR_INVALID, "temperature is inf");
    generate = good();
    generate.sampling.top_p = 0;
    expect(generate, SL_ERR_INVALID, "top_p is 0");
    generate = good();
    generate.sampling.min_p = 1.5f;
    expect(generate, SL_ERR_INVALID, "min_p is 1.5");
    generate = good();
    generate.sampling.max_tokens = 0;
    expect(generate, SL_ERR_INVALID, "max_tokens is 0");
    generate = good();
    generate.sampling.min_tokens = 101;
    expect(generate, SL_ERR_INVALID, "min_tokens is 101");
    generate = good();
    generate.sampling.logprobs = 21;
    expect(generate, SL_ERR_INVALID, "logprobs is 21");
    generate = good();
    generate.sampling.prompt_logprobs = -2;
    expect(generate, SL_ERR_INVALID, "prompt_logprobs is -2");
}

static void token_outside_the_vocabulary_is_named(void **state)
{
    (void)state;
    int32_t tokens[] = {1, 2, 1000, 3};
    sl_msg_generate_t generate = good();
    generate.tokens = tokens;
    generate.token_count = 4;
    expect(generate, SL_ERR_INVALID, "tokens[2] is 1000, outside the vocabulary (1000 ids");
    tokens[2] = -5;
    expect(generate, SL_ERR_INVALID, "tokens[2] is -5");
    generate = good();
    generate.sampling.stop_count = 1;
    generate.sampling.stop_token_ids[0] = 1001;
    expect(generate, SL_ERR_INVALID, "stop_token_ids[0] is 1001");
}

static void too_long_is_named(void **state)
{
    (void)state;
    sl_msg_generate_t generate = good();
    generate.sampling.max_tokens = 3997;
    expect(generate, SL_ERR_LIMIT, "make 4097, expected at most max_model_len, which is 4096");
    generate.sampling.max_tokens = 40 * 64 - 100 + 1;
    expect(generate, SL_ERR_LIMIT, "need 41 pages, expected at most the 40");
    generate.sampling.max_tokens = 40 * 64 - 100;
    assert_int_equal(sl_check_generate(&generate, &limits), SL_OK);
    generate = good();
    generate.token_count = 1921;
    expect(generate, SL_ERR_LIMIT, "needs 31 pages, expected at most the 30");
    generate.token_count = 1901;
    expect(generate, SL_ERR_LIMIT, "expected at most 1900");
    generate.token_count = 1900;
    assert_int_equal(sl_check_generate(&generate, &limits), SL_OK);
    generate.sampling.max_tokens = UINT32_MAX; /* no overflow on the way */
    expect(generate, SL_ERR_LIMIT, "max_model_len");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_request_passes),
        cmocka_unit_test(bad_message_is_named),
        cmocka_unit_test(token_outside_the_vocabulary_is_named),
        cmocka_unit_test(too_long_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
