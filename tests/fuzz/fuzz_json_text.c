/* JSON from arbitrary bytes, through both readers.
 *
 * What the strict reader accepts must dump to text that it accepts again and that dumps to itself; the
 * check without nodes must agree with it; and the reader of requests accepts it too, unless a limit of
 * its own is met (depth, U+0000 in a key). */
#include "common/json.h"
#include "common/json_text.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BYTES ((size_t)256 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Infinity is what Python prints on overflow; it does not read back. */
static bool has_infinity(struct ds4_str text)
{
    return ds4_str_find(text, DS4_STR("Infinity"), 0) != DS4_STR_NONE;
}

static void check_dump(const struct ds4_jt_node *root, struct ds4_arena *arena)
{
    struct ds4_buf first, second;
    const struct ds4_jt_node *again;

    ds4_buf_init(&first, ARENA_BYTES);
    ds4_buf_init(&second, ARENA_BYTES);
    if (ds4_jt_dump(root, &first) != 0)
        abort();
    if (!has_infinity(ds4_buf_view(&first))) {
        again = ds4_jt_parse(ds4_buf_view(&first), DS4_JT_MAX_DEPTH, arena, NULL);
        if (again == NULL || ds4_jt_dump(again, &second) != 0 ||
            !ds4_str_equal(ds4_buf_view(&first), ds4_buf_view(&second)))
            abort();
    }
    ds4_buf_deinit(&first);
    ds4_buf_deinit(&second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ds4_str text = {(const char *)data, size};
    struct ds4_err err = {0};
    struct ds4_arena arena;
    const struct ds4_jt_node *root;
    struct ds4_json *doc;

    ds4_arena_init(&arena, ARENA_BYTES);
    root = ds4_jt_parse(text, DS4_JT_MAX_DEPTH, &arena, &err);
    if (root == NULL && err.code == DS4_OK)
        abort();
    if ((root != NULL) != ds4_jt_valid(text, DS4_JT_MAX_DEPTH))
        abort();
    if (root != NULL)
        check_dump(root, &arena);
    doc = ds4_json_parse(text, &err);
    if (doc != NULL && root == NULL)
        abort();
    if (doc == NULL && root != NULL && strstr(err.msg, "deeper") == NULL &&
        strstr(err.msg, "NUL") == NULL)
        abort();
    ds4_json_free(doc);
    ds4_arena_deinit(&arena);
    return 0;
}
