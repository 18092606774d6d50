/* The bounded memory of texts: limits, order of leaving, age, opaque tokens. */
#include "router/api/text_store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

static struct ds4_text_store *make(size_t entries, size_t bytes, int64_t age_ns)
{
    struct ds4_err err = {0};
    struct ds4_text_store *store = ds4_text_store_new(entries, bytes, age_ns, &err);

    assert_non_null(store);
    return store;
}

static bool holds(struct ds4_text_store *store, const char *key, const char *text, int64_t now_ns)
{
    struct ds4_str got = ds4_text_store_get(store, ds4_str_view(key), now_ns);

    return got.ptr != NULL && ds4_str_equal(got, ds4_str_view(text));
}

static int put(struct ds4_text_store *store, const char *key, const char *text, int64_t now_ns)
{
    return ds4_text_store_put(store, ds4_str_view(key), ds4_str_view(text), now_ns);
}

static void what_was_put_is_found_and_replaced(void **state)
{
    struct ds4_text_store *store = make(4, 1 << 20, 0);

    (void)state;
    assert_int_equal(put(store, "a", "one", 1), 0);
    assert_int_equal(put(store, "b", "", 1), 0);
    assert_true(holds(store, "a", "one", 2));
    assert_true(holds(store, "b", "", 2));
    assert_false(holds(store, "c", "", 2));
    assert_int_equal(put(store, "a", "two", 3), 0);
    assert_true(holds(store, "a", "two", 3));
    assert_int_equal(ds4_text_store_count(store), 2);
    assert_true(ds4_text_store_remove(store, DS4_STR("a")));
    assert_false(ds4_text_store_remove(store, DS4_STR("a")));
    assert_false(holds(store, "a", "two", 3));
    assert_true(ds4_text_store_remove(store, DS4_STR("b")));
    assert_int_equal(ds4_text_store_bytes(store), 0);
    ds4_text_store_free(store);
}

static void the_least_recently_used_leaves_first(void **state)
{
    struct ds4_text_store *store = make(3, 1 << 20, 0);

    (void)state;
    put(store, "a", "1", 1);
    put(store, "b", "2", 1);
    put(store, "c", "3", 1);
    assert_true(holds(store, "a", "1", 2)); /* a use */
    put(store, "d", "4", 3);
    assert_false(holds(store, "b", "2", 4));
    assert_true(holds(store, "a", "1", 4) && holds(store, "c", "3", 4) &&
                holds(store, "d", "4", 4));
    ds4_text_store_free(store);
}

static void bytes_are_bounded(void **state)
{
    struct ds4_text_store *store = make(1000, 4096, 0);
    static char big[8192];
    char key[16];

    (void)state;
    memset(big, 'x', sizeof(big));
    for (int i = 0; i < 100; i++) {
        (void)snprintf(key, sizeof(key), "k%d", i);
        assert_int_equal(
            ds4_text_store_put(store, ds4_str_view(key), (struct ds4_str){big, 500}, i), 0);
        assert_true(ds4_text_store_bytes(store) <= 4096);
    }
    assert_true(ds4_text_store_count(store) >= 4);
    assert_int_equal(ds4_text_store_put(store, DS4_STR("k99"), (struct ds4_str){big, 8192}, 100),
                     -1);
    assert_null(ds4_text_store_get(store, DS4_STR("k99"), 100).ptr);
    assert_non_null(ds4_text_store_get(store, DS4_STR("k98"), 100).ptr);
    ds4_text_store_free(store);
}

static void old_entries_are_not_found(void **state)
{
    struct ds4_text_store *store = make(4, 1 << 20, 100);

    (void)state;
    put(store, "a", "1", 1000);
    assert_true(holds(store, "a", "1", 1100)); /* a use does not make it younger */
    assert_false(holds(store, "a", "1", 1101));
    assert_int_equal(ds4_text_store_count(store), 0);
    ds4_text_store_free(store);
}

static void a_store_of_nothing_keeps_nothing(void **state)
{
    struct ds4_text_store *store = make(0, 1 << 20, 0);

    (void)state;
    assert_int_equal(put(store, "a", "1", 1), -1);
    assert_int_equal(ds4_text_store_count(store), 0);
    ds4_text_store_free(store);
}

static void many_keys_are_all_found(void **state)
{
    struct ds4_text_store *store = make(5000, 16 << 20, 0);
    char key[16];

    (void)state;
    for (int i = 0; i < 5000; i++) {
        (void)snprintf(key, sizeof(key), "key%d", i);
        assert_int_equal(put(store, key, key, 1), 0);
    }
    for (int i = 0; i < 5000; i++) {
        (void)snprintf(key, sizeof(key), "key%d", i);
        assert_true(holds(store, key, key, 1));
    }
    ds4_text_store_free(store);
}

static void opaque_tokens_are_base64_with_a_version_and_differ(void **state)
{
    char a[DS4_OPAQUE_CHARS + 1], b[DS4_OPAQUE_CHARS + 1];

    (void)state;
    ds4_text_store_opaque(a);
    ds4_text_store_opaque(b);
    assert_string_not_equal(a, b);
    assert_int_equal(strlen(a), DS4_OPAQUE_CHARS);
    assert_int_equal(a[0], 'A'); /* the first six bits of byte 1 */
    assert_true(a[1] >= 'Q' && a[1] <= 'f');
    assert_int_equal(a[23], '=');
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_put_is_found_and_replaced),
        cmocka_unit_test(the_least_recently_used_leaves_first),
        cmocka_unit_test(bytes_are_bounded),
        cmocka_unit_test(old_entries_are_not_found),
        cmocka_unit_test(a_store_of_nothing_keeps_nothing),
        cmocka_unit_test(many_keys_are_all_found),
        cmocka_unit_test(opaque_tokens_are_base64_with_a_version_and_differ),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
