/* ds4-text tokenize, detokenize, render.
 *
 * A thin layer: read the line, call router/text, write the answer.  Text on a line is JSON, so it is
 * valid UTF-8 already; bytes_hex is how a caller hands over text that is not. */
#include "router/text_encode.h"

#include "common/arena.h"
#include "common/json_text.h"
#include "common/json_write.h"
#include "common/utf8.h"
#include "router/text/case_json.h"
#include "router/text/chat_json.h"
#include "router/text/detok.h"
#include "router/text/normalise.h"
#include "router/text/template.h"

#include <inttypes.h>

#define ARENA_BYTES       ((size_t)1 << 30)
#define PROMPT_BYTES      ((size_t)512 << 20)
#define DEFAULT_CONTEXT   1048576
#define DEFAULT_MAX_FLOOR 393216
#define MAX_CONTEXT       1e15
#define MAX_ID            2147483647.0

static const struct ds4_jt_node *read_line(struct ds4_str line, struct ds4_arena *arena,
                                           struct ds4_err *err)
{
    const struct ds4_jt_node *root = ds4_jt_parse(line, DS4_JT_MAX_DEPTH, arena, err);

    if (root != NULL && root->type != DS4_JT_OBJECT) {
        ds4_fail(err, DS4_E_INVALID, "the line must be a JSON object");
        return NULL;
    }
    return root;
}

static bool is_type(const struct ds4_jt_node *node, enum ds4_jt_type type)
{
    return node != NULL && node->type == type;
}

/* ---- tokenize ------------------------------------------------------------------------------------ */

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int append_unhexed(struct ds4_buf *out, struct ds4_str hex, struct ds4_err *err)
{
    if (hex.len % 2 != 0)
        return ds4_fail(err, DS4_E_INVALID, "bytes_hex has an odd number of digits");
    for (size_t i = 0; i < hex.len; i += 2) {
        int high = hex_digit(hex.ptr[i]), low = hex_digit(hex.ptr[i + 1]);

        if (high < 0 || low < 0)
            return ds4_fail(err, DS4_E_INVALID, "bytes_hex has no hexadecimal digit at %zu", i);
        ds4_buf_append_byte(out, (char)(high << 4 | low));
    }
    return ds4_buf_check(out, "bytes_hex", err);
}

/* The text to tokenise into `text`, and whether added tokens count. */
static int read_text(const struct ds4_jt_node *root, struct ds4_buf *text,
                     enum ds4_bpe_specials *specials, struct ds4_err *err)
{
    const struct ds4_jt_node *plain = ds4_jt_find(root, "text");
    const struct ds4_jt_node *hex = ds4_jt_find(root, "bytes_hex");
    const struct ds4_jt_node *flag = ds4_jt_find(root, "parse_special");
    struct ds4_buf bytes;
    int rc;

    *specials = is_type(flag, DS4_JT_FALSE) ? DS4_BPE_PLAIN : DS4_BPE_SPECIAL;
    if (is_type(plain, DS4_JT_STRING)) {
        ds4_buf_append_str(text, plain->str);
        return ds4_buf_check(text, "text", err);
    }
    if (!is_type(hex, DS4_JT_STRING))
        return ds4_fail(err, DS4_E_INVALID, "the line needs a string \"text\" or \"bytes_hex\"");
    ds4_buf_init(&bytes, PROMPT_BYTES);
    rc = append_unhexed(&bytes, hex->str, err);
    if (rc == 0) {
        ds4_utf8_append_replaced(text, ds4_buf_view(&bytes));
        rc = ds4_buf_check(text, "text", err);
    }
    ds4_buf_deinit(&bytes);
    return rc;
}

static int write_ids(const struct ds4_ids *ids, struct ds4_buf *answer, struct ds4_err *err)
{
    struct ds4_jw w;

    ds4_jw_init(&w, answer);
    ds4_jw_object(&w);
    ds4_jw_key(&w, "ids");
    ds4_jw_array(&w);
    for (size_t i = 0; i < ids->len; i++)
        ds4_jw_int(&w, ids->ptr[i]);
    ds4_jw_end(&w);
    ds4_jw_end(&w);
    return ds4_buf_check(answer, "answer", err);
}

int ds4_text_tokenize(struct ds4_str line, struct ds4_bpe *bpe, struct ds4_buf *answer,
                      struct ds4_err *err)
{
    enum ds4_bpe_specials specials;
    struct ds4_ids ids = {0};
    const struct ds4_jt_node *root;
    struct ds4_arena arena;
    struct ds4_buf text;
    int rc = -1;

    ds4_arena_init(&arena, ARENA_BYTES);
    ds4_buf_init(&text, PROMPT_BYTES);
    root = read_line(line, &arena, err);
    if (root != NULL && read_text(root, &text, &specials, err) == 0 &&
        ds4_bpe_encode(bpe, ds4_buf_view(&text), specials, &ids, err) == 0)
        rc = write_ids(&ids, answer, err);
    DS4_VEC_DEINIT(&ids);
    ds4_buf_deinit(&text);
    ds4_arena_deinit(&arena);
    return rc;
}

/* ---- detokenize ---------------------------------------------------------------------------------- */

/* The id of a list element, or -1 for anything but a whole number in range. */
static int32_t read_id(const struct ds4_jt_node *node)
{
    double value = node->type == DS4_JT_NUMBER ? ds4_jt_double(node) : -1;

    return value >= 0 && value <= MAX_ID && value == (double)(int32_t)value ? (int32_t)value : -1;
}

static void write_hex(struct ds4_jw *w, struct ds4_str bytes)
{
    static const char digits[] = "0123456789abcdef";
    struct ds4_buf hex;

    ds4_buf_init(&hex, 2 * bytes.len + 1);
    for (size_t i = 0; i < bytes.len; i++) {
        ds4_buf_append_byte(&hex, digits[(uint8_t)bytes.ptr[i] >> 4]);
        ds4_buf_append_byte(&hex, digits[bytes.ptr[i] & 0xF]);
    }
    ds4_jw_str(w, ds4_buf_view(&hex));
    ds4_buf_deinit(&hex);
}

static int decode_ids(const struct ds4_jt_node *ids, const struct ds4_vocab *vocab,
                      struct ds4_buf *text, struct ds4_err *err)
{
    struct ds4_detok detok;

    if (!is_type(ids, DS4_JT_ARRAY))
        return ds4_fail(err, DS4_E_INVALID, "the line needs a list \"ids\"");
    ds4_detok_init(&detok, vocab, false);
    for (const struct ds4_jt_node *node = ids->first; node != NULL; node = node->next) {
        int32_t id = read_id(node);

        if (!ds4_vocab_has(vocab, id))
            return ds4_fail(err, DS4_E_INVALID, "%.*s is no token id of this vocabulary",
                            (int)(node->raw.len < 32 ? node->raw.len : 32), node->raw.ptr);
        if (ds4_detok_push(&detok, id, text, err))
            return -1;
    }
    return ds4_detok_finish(&detok, text, err);
}

int ds4_text_detokenize(struct ds4_str line, const struct ds4_vocab *vocab, struct ds4_buf *answer,
                        struct ds4_err *err)
{
    const struct ds4_jt_node *root, *ids;
    struct ds4_arena arena;
    struct ds4_buf text;
    struct ds4_jw w;
    int rc = -1;

    ds4_arena_init(&arena, ARENA_BYTES);
    ds4_buf_init(&text, PROMPT_BYTES);
    root = read_line(line, &arena, err);
    ids = ds4_jt_find(root, "ids");
    if (root != NULL && decode_ids(ids, vocab, &text, err) == 0) {
        ds4_jw_init(&w, answer);
        ds4_jw_object(&w);
        ds4_jw_key(&w, "text");
        ds4_jw_str(&w, ds4_buf_view(&text));
        ds4_jw_key(&w, "piece_hex");
        ds4_jw_array(&w);
        for (const struct ds4_jt_node *node = ids->first; node != NULL; node = node->next)
            write_hex(&w, ds4_vocab_piece(vocab, read_id(node)));
        ds4_jw_end(&w);
        ds4_jw_end(&w);
        rc = ds4_buf_check(answer, "answer", err);
    }
    ds4_buf_deinit(&text);
    ds4_arena_deinit(&arena);
    return rc;
}

/* ---- render -------------------------------------------------------------------------------------- */

static int read_count(const struct ds4_jt_node *server, const char *key, int64_t *out,
                      struct ds4_err *err)
{
    const struct ds4_jt_node *node = ds4_jt_find(server, key);

    if (node == NULL || node->type == DS4_JT_NULL)
        return 0;
    if (node->type != DS4_JT_NUMBER || !(ds4_jt_double(node) >= 0) ||
        ds4_jt_double(node) > MAX_CONTEXT)
        return ds4_fail(err, DS4_E_INVALID, "server.%s must be a count of tokens", key);
    *out = (int64_t)ds4_jt_double(node);
    return 0;
}

/* The server's side of an effort: {ctx, max_floor, default_effort}. */
static int read_policy(const struct ds4_jt_node *root, struct ds4_effort_policy *policy,
                       struct ds4_err *err)
{
    const struct ds4_jt_node *server = ds4_jt_find(root, "server");
    const struct ds4_jt_node *model = ds4_jt_find(root, "model");
    const struct ds4_jt_node *effort = ds4_jt_find(server, "default_effort");

    *policy = (struct ds4_effort_policy){
        .release =
            is_type(model, DS4_JT_STRING) ? ds4_release_parse(model->str) : DS4_RELEASE_UNSET,
        .default_effort = DS4_THINK_HIGH,
        .context_tok = DEFAULT_CONTEXT,
        .max_min_context = DEFAULT_MAX_FLOOR,
    };
    if (policy->release == DS4_RELEASE_UNSET)
        return ds4_fail(err, DS4_E_INVALID, "model must be v4_preview, v4_0731 or v41");
    if (effort != NULL && effort->type != DS4_JT_NULL &&
        (effort->type != DS4_JT_STRING ||
         ds4_effort_parse_setting(effort->str, &policy->default_effort)))
        return ds4_fail(err, DS4_E_INVALID, "server.default_effort must be an effort's name");
    if (read_count(server, "ctx", &policy->context_tok, err))
        return -1;
    return read_count(server, "max_floor", &policy->max_min_context, err);
}

static void write_value(struct ds4_jw *w, const struct ds4_effort_value *value)
{
    if (value->number > 0)
        ds4_jw_int(w, value->number);
    else
        ds4_jw_str(w, value->word);
}

static void write_effort(struct ds4_jw *w, const struct ds4_effort *effort)
{
    ds4_jw_key(w, "effort");
    ds4_jw_object(w);
    ds4_jw_key(w, "mode");
    ds4_jw_text(w, effort->thinking ? "thinking" : "chat");
    ds4_jw_key(w, "requested");
    if (effort->is_requested)
        write_value(w, &effort->requested);
    else
        ds4_jw_null(w);
    ds4_jw_key(w, "applied");
    write_value(w, &effort->applied);
    ds4_jw_key(w, "source");
    ds4_jw_text(w, effort->from_request ? "request" : "server_default");
    ds4_jw_key(w, "downgraded");
    ds4_jw_bool(w, effort->downgraded);
    ds4_jw_end(w);
}

/* Renders and writes; effort is NULL for an encoder-level case. */
static int answer_prompt(struct ds4_chat *chat, const struct ds4_effort *effort,
                         struct ds4_arena *arena, struct ds4_buf *answer, struct ds4_err *err)
{
    struct ds4_prompt prompt;
    struct ds4_jw w;
    int rc;

    ds4_prompt_init(&prompt, PROMPT_BYTES);
    rc = ds4_template_render(chat, arena, &prompt, err);
    if (rc == 0) {
        ds4_jw_init(&w, answer);
        ds4_jw_object(&w);
        ds4_jw_key(&w, "prompt");
        ds4_jw_str(&w, ds4_prompt_view(&prompt));
        if (effort != NULL)
            write_effort(&w, effort);
        ds4_jw_end(&w);
        rc = ds4_buf_check(answer, "answer", err);
    }
    ds4_prompt_deinit(&prompt);
    return rc;
}

static int render_request(const struct ds4_jt_node *root, struct ds4_arena *arena,
                          struct ds4_buf *answer, struct ds4_err *err)
{
    struct ds4_effort_policy policy;
    struct ds4_conversation conversation;
    struct ds4_effort effort;
    struct ds4_param param;

    if (read_policy(root, &policy, err) ||
        ds4_chat_json_read(ds4_jt_find(root, "request"), policy.release, DS4_MEDIA_REFUSE, arena,
                           &conversation, &param, err))
        return -1;
    effort = ds4_effort_resolve(&conversation.wish, &policy);
    if (ds4_normalise(&conversation, &effort, arena, err))
        return -1;
    return answer_prompt(&conversation.chat, &effort, arena, answer, err);
}

int ds4_text_render(struct ds4_str line, struct ds4_buf *answer, struct ds4_err *err)
{
    const struct ds4_jt_node *root;
    struct ds4_arena arena;
    struct ds4_chat chat;
    int rc = -1;

    ds4_arena_init(&arena, ARENA_BYTES);
    root = read_line(line, &arena, err);
    if (root != NULL && ds4_jt_find(root, "request") != NULL)
        rc = render_request(root, &arena, answer, err);
    else if (root != NULL && ds4_case_json_read(root, &arena, &chat, err) == 0)
        rc = answer_prompt(&chat, NULL, &arena, answer, err);
    ds4_arena_deinit(&arena);
    return rc;
}
