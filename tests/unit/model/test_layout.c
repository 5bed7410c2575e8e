/* The layout hash: every part of it counts, and its text says which. */
#include "check.h"

#include "common/model/layout.h"

static const sl_layout_t base = {.model_identity = "deepseek_v2-0123456789abcdef",
                                 .dtype = SL_DTYPE_F32,
                                 .layers = 6,
                                 .page_tokens = SL_PAGE_TOKENS,
                                 .latent_width = 576,
                                 .rope_order = "interleaved",
                                 .protocol_version = 1};

static void test_text(void **state)
{
    (void)state;
    char text[256];
    sl_layout_text(&base, text, sizeof(text));
    assert_string_equal(text, "model=deepseek_v2-0123456789abcdef dtype=f32 layers=6 "
                              "page_tokens=64 width=576 rope=interleaved protocol=1");
    /* FNV-1a by its definition */
    uint64_t hash = 14695981039346656037u;
    for (const char *at = text; *at != '\0'; at++) {
        hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    }
    assert_true(sl_layout_hash(&base) == hash);
}

static void test_each_part_counts(void **state)
{
    (void)state;
    sl_layout_t other[7] = {base, base, base, base, base, base, base};
    other[0].model_identity = "deepseek_v2-0123456789abcdee";
    other[1].dtype = SL_DTYPE_BF16;
    other[2].layers = 7;
    other[3].page_tokens = 32;
    other[4].latent_width = 577;
    other[5].rope_order = "halves";
    other[6].protocol_version = 2;
    for (size_t i = 0; i < 7; i++) {
        assert_true(sl_layout_hash(&other[i]) != sl_layout_hash(&base));
    }
}

/* The sizes of DESIGN section 4: V2-Lite 2.0 MB a page, V3 4.5 MB. */
static void test_page_bytes(void **state)
{
    (void)state;
    sl_layout_t layout = base;
    layout.dtype = SL_DTYPE_BF16;
    layout.layers = 27;
    assert_int_equal(sl_layout_page_bytes(&layout), 1990656);
    layout.layers = 61;
    assert_int_equal(sl_layout_page_bytes(&layout), 4497408);
    layout.dtype = SL_DTYPE_F32;
    assert_int_equal(sl_layout_page_bytes(&layout), 2 * 4497408);
    assert_string_equal(sl_dtype_name(SL_DTYPE_F16), "f16");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_text),
                                       cmocka_unit_test(test_each_part_counts),
                                       cmocka_unit_test(test_page_bytes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
