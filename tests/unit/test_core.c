/* The vocabulary of the house: err, str, buf, arena, vec, clock. */
#include "common/arena.h"
#include "common/buf.h"
#include "common/clock.h"
#include "common/err.h"
#include "common/str.h"
#include "common/utf8.h"
#include "common/vec.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void a_failure_fills_code_and_message(void **state)
{
    struct ds4_err err = {0};

    (void)state;
    assert_int_equal(ds4_fail(&err, DS4_E_BUSY, "need %d, have %d", 3, 2), -1);
    assert_int_equal(err.code, DS4_E_BUSY);
    assert_string_equal(err.msg, "need 3, have 2");
    assert_int_equal(ds4_err_wrap(&err, "layer %d", 7), -1);
    assert_string_equal(err.msg, "layer 7: need 3, have 2");
    assert_int_equal(err.code, DS4_E_BUSY);
    assert_int_equal(ds4_fail(NULL, DS4_E_BUSY, "nobody %s", "listens"), -1);
    assert_int_equal(ds4_err_wrap(NULL, "nobody"), -1);
}

static void long_messages_end_at_a_character(void **state)
{
    struct ds4_err err = {0};
    char text[400];

    (void)state;
    /* 255 bytes fit; with an odd number of bytes before it the last two-byte character does not. */
    for (size_t i = 0; i < sizeof(text) - 2; i += 2) {
        text[i] = '\xc3';
        text[i + 1] = '\xa9';
    }
    text[sizeof(text) - 2] = '\0';
    (void)ds4_fail(&err, DS4_E_INVALID, "%s", text);
    assert_int_equal(strlen(err.msg), 254);
    assert_true(ds4_utf8_valid(ds4_str_view(err.msg)));
    (void)ds4_err_wrap(&err, "%s", "in");
    assert_true(ds4_utf8_valid(ds4_str_view(err.msg)));
    assert_true(strlen(err.msg) >= 253);
    (void)ds4_err_wrap(&err, "%s", text);
    assert_true(ds4_utf8_valid(ds4_str_view(err.msg)));
}

static void codes_have_texts(void **state)
{
    (void)state;
    assert_string_equal(ds4_code_text(DS4_OK), "ok");
    assert_string_equal(ds4_code_text(DS4_E_BUG), "internal error");
    assert_string_equal(ds4_code_text(DS4_N_CODES), "unknown code");
    assert_string_equal(ds4_code_text((enum ds4_code)1000000), "unknown code");
}

static void size_arithmetic_does_not_wrap(void **state)
{
    struct ds4_err err = {0};
    size_t out = 1;

    (void)state;
    assert_int_equal(ds4_mul_size(SIZE_MAX / 2, 2, "rows", &out, &err), 0);
    assert_true(out == SIZE_MAX - 1);
    assert_int_equal(ds4_mul_size(SIZE_MAX / 2 + 1, 2, "rows", &out, &err), -1);
    assert_int_equal(ds4_add_size(SIZE_MAX, 1, "rows", &out, &err), -1);
    assert_int_equal(err.code, DS4_E_INVALID);
    assert_true(out == SIZE_MAX - 1);
}

static void views_compare_find_and_trim(void **state)
{
    struct ds4_str s = DS4_STR(" \t a\0b \n");

    (void)state;
    s = ds4_str_trim(s);
    assert_true(ds4_str_equal(s, (struct ds4_str){"a\0b", 3}));
    assert_true(ds4_str_starts(s, DS4_STR("a")) && !ds4_str_starts(s, DS4_STR("ab")));
    assert_true(ds4_str_ends(s, DS4_STR("b")) && ds4_str_ends(s, DS4_STR("")));
    assert_int_equal(ds4_str_find(s, DS4_STR("b"), 0), 2);
    assert_true(ds4_str_find(s, DS4_STR("a"), 1) == DS4_STR_NONE);
    assert_int_equal(ds4_str_find(s, DS4_STR(""), 3), 3);
    assert_true(ds4_str_find(s, DS4_STR(""), 4) == DS4_STR_NONE);
    assert_true(ds4_str_find((struct ds4_str){NULL, 0}, DS4_STR("a"), 0) == DS4_STR_NONE);
    assert_int_equal(ds4_str_skip(s, 9).len, 0);
    assert_int_equal(ds4_str_head(s, 2).len, 2);
    assert_int_equal(ds4_str_trim(DS4_STR("  ")).len, 0);
    assert_int_equal(ds4_str_view(NULL).len, 0);
}

static void a_buffer_grows_to_its_maximum_and_no_further(void **state)
{
    struct ds4_buf buf;
    struct ds4_err err = {0};

    (void)state;
    ds4_buf_init(&buf, 1000);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(ds4_buf_append_byte(&buf, 'x'), 0);
    assert_int_equal(ds4_buf_check(&buf, "text", &err), 0);
    assert_int_equal(ds4_buf_append_byte(&buf, 'y'), -1);
    assert_int_equal(buf.len, 1000);
    assert_int_equal(buf.ptr[1000], '\0');
    assert_int_equal(ds4_buf_check(&buf, "text", &err), -1);
    assert_int_equal(err.code, DS4_E_TOO_LONG);
    /* Failure sticks until the buffer is cleared. */
    ds4_buf_truncate(&buf, 0);
    assert_int_equal(ds4_buf_append(&buf, "a", 1), -1);
    ds4_buf_clear(&buf);
    assert_int_equal(ds4_buf_append(&buf, "a", 1), 0);
    ds4_buf_deinit(&buf);
}

static void one_large_append_past_the_maximum_is_too_long_not_out_of_memory(void **state)
{
    struct ds4_buf buf;
    struct ds4_err err = {0};
    char large[400] = {0};

    (void)state;
    ds4_buf_init(&buf, 300);
    assert_int_equal(ds4_buf_append(&buf, "short", 5), 0);
    assert_int_equal(ds4_buf_append(&buf, large, sizeof(large)), -1);
    assert_int_equal(ds4_buf_check(&buf, "text", &err), -1);
    assert_int_equal(err.code, DS4_E_TOO_LONG);
    ds4_buf_deinit(&buf);
}

static void buffers_consume_truncate_and_give_away(void **state)
{
    struct ds4_buf buf;
    size_t len = 0;
    char *taken;

    (void)state;
    ds4_buf_init(&buf, 100);
    assert_int_equal(ds4_buf_view(&buf).len, 0);
    assert_int_equal(ds4_buf_appendf(&buf, "%s-%d", "ab", 12), 0);
    ds4_buf_consume(&buf, 2);
    assert_string_equal(buf.ptr, "-12");
    ds4_buf_truncate(&buf, 2);
    assert_string_equal(buf.ptr, "-1");
    ds4_buf_truncate(&buf, 50);
    assert_int_equal(buf.len, 2);
    taken = ds4_buf_take(&buf, &len);
    assert_string_equal(taken, "-1");
    assert_int_equal(len, 2);
    assert_null(buf.ptr);
    free(taken);
    taken = ds4_buf_take(&buf, &len);
    assert_string_equal(taken, "");
    free(taken);
    assert_int_equal(ds4_buf_append(&buf, NULL, 0), 0);
    ds4_buf_consume(&buf, 7);
    assert_int_equal(buf.len, 0);
    ds4_buf_deinit(&buf);
}

static void an_arena_is_zeroed_aligned_and_bounded(void **state)
{
    struct ds4_arena arena;
    unsigned char *p;

    (void)state;
    ds4_arena_init(&arena, 100000);
    for (size_t n = 0; n < 70; n++) {
        p = ds4_arena_take(&arena, n);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 16, 0);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(p[i], 0);
        memset(p, 0xff, n);
    }
    assert_null(ds4_arena_take(&arena, 100000));
    assert_null(ds4_arena_take(&arena, SIZE_MAX));
    assert_null(ds4_arena_take_array(&arena, SIZE_MAX / 2, 4));
    assert_null(ds4_arena_copy(&arena, (struct ds4_str){"x", SIZE_MAX}).ptr);
    assert_string_equal(ds4_arena_copy(&arena, DS4_STR("copy")).ptr, "copy");
    ds4_arena_deinit(&arena);
}

static void resetting_an_arena_frees_what_came_after_the_mark(void **state)
{
    struct ds4_arena arena;
    struct ds4_arena_mark mark;
    char *before, *after;

    (void)state;
    ds4_arena_init(&arena, (size_t)1 << 20);
    before = ds4_arena_take(&arena, 16);
    before[0] = 'b';
    mark = ds4_arena_mark(&arena);
    after = ds4_arena_take(&arena, 16);
    after[0] = 'a';
    assert_non_null(ds4_arena_take(&arena, 100000));
    ds4_arena_reset(&arena, mark);
    assert_int_equal(arena.used_bytes, 16);
    assert_int_equal(before[0], 'b');
    assert_ptr_equal(ds4_arena_take(&arena, 16), after);
    assert_int_equal(after[0], 0);
    ds4_arena_deinit(&arena);
    assert_int_equal(arena.used_bytes, 0);
}

static void vectors_grow_and_pop(void **state)
{
    DS4_VEC(int32_t) v = {0};

    (void)state;
    for (int32_t i = 0; i < 1000; i++)
        assert_int_equal(DS4_VEC_PUSH(&v, i), 0);
    assert_int_equal(v.len, 1000);
    assert_int_equal(v.ptr[999], 999);
    assert_int_equal(DS4_VEC_POP(&v), 999);
    DS4_VEC_TRUNCATE(&v, 10);
    assert_int_equal(v.len, 10);
    assert_int_equal(DS4_VEC_RESERVE(&v, SIZE_MAX / 2), -1);
    assert_int_equal(v.ptr[9], 9);
    DS4_VEC_DEINIT(&v);
    assert_null(v.ptr);
}

static void deadlines_pass_or_never_do(void **state)
{
    struct ds4_deadline never = ds4_deadline_in_ms(-1), now = ds4_deadline_in_ms(0);
    struct ds4_deadline later = ds4_deadline_in_ms(3600000);

    (void)state;
    assert_false(ds4_deadline_passed(never));
    assert_int_equal(ds4_deadline_left_ms(never), INT32_MAX);
    assert_int_equal(ds4_deadline_in_ms(INT64_MAX).at_ns, INT64_MAX);
    assert_true(ds4_deadline_passed(now));
    assert_int_equal(ds4_deadline_left_ms(now), 0);
    assert_false(ds4_deadline_passed(later));
    assert_true(ds4_deadline_left_ms(later) > 3590000 && ds4_deadline_left_ms(later) <= 3600000);
    assert_true(ds4_clock_unix_ns() > INT64_C(1700000000) * DS4_NS_PER_SEC);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failure_fills_code_and_message),
        cmocka_unit_test(long_messages_end_at_a_character),
        cmocka_unit_test(codes_have_texts),
        cmocka_unit_test(size_arithmetic_does_not_wrap),
        cmocka_unit_test(views_compare_find_and_trim),
        cmocka_unit_test(a_buffer_grows_to_its_maximum_and_no_further),
        cmocka_unit_test(one_large_append_past_the_maximum_is_too_long_not_out_of_memory),
        cmocka_unit_test(buffers_consume_truncate_and_give_away),
        cmocka_unit_test(an_arena_is_zeroed_aligned_and_bounded),
        cmocka_unit_test(resetting_an_arena_frees_what_came_after_the_mark),
        cmocka_unit_test(vectors_grow_and_pop),
        cmocka_unit_test(deadlines_pass_or_never_do),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
