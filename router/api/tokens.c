/* The token endpoints, in the shapes of llama-server (`content`) and vLLM (`prompt`, `messages`).
 *
 * They answer without the cluster: nothing here needs a worker, and a template bug is best looked at
 * while the rig is down. */
#include "router/api/tokens.h"

#include "common/json.h"
#include "common/json_write.h"
#include "common/utf8.h"
#include "router/api/chat_request.h"
#include "router/api/context.h"
#include "router/api/error.h"
#include "router/cluster.h"
#include "router/text/detok.h"

#define DS4_TOKENS_ARENA_BYTES  ((size_t)1 << 30)
#define DS4_TOKENS_ANSWER_BYTES ((size_t)1 << 30)

/* One call of an endpoint: body read both ways, answer under construction. */
struct call {
    const struct ds4_api_context *api;
    struct ds4_json *body;
    const struct ds4_jt_node *root;
    struct ds4_arena arena;
    struct ds4_buf answer;
    struct ds4_jw w;
    struct ds4_api_error error;
};

typedef int (*call_fn)(struct call *call);

/* Reads the body, runs `fn`, answers with what it wrote or with its error. */
static void run(struct ds4_exchange *x, const struct ds4_api_context *api, call_fn fn)
{
    struct call call = {.api = api};
    struct ds4_err err = {0};
    int rc = -1;

    ds4_arena_init(&call.arena, DS4_TOKENS_ARENA_BYTES);
    ds4_buf_init(&call.answer, DS4_TOKENS_ANSWER_BYTES);
    ds4_jw_init(&call.w, &call.answer);
    call.body = ds4_json_parse(ds4_exchange_body(x), &err);
    if (call.body != NULL)
        call.root = ds4_jt_parse(ds4_exchange_body(x), DS4_JSON_MAX_DEPTH, &call.arena, &err);
    if (call.root == NULL)
        (void)ds4_api_fail(&call.error, "invalid_json", NULL, "the body is not valid JSON: %s",
                           err.msg);
    else if (call.root->type != DS4_JT_OBJECT)
        (void)ds4_api_fail(&call.error, "invalid_json", NULL, "the body must be a JSON object");
    else
        rc = fn(&call);
    if (rc == 0 && ds4_buf_check(&call.answer, "answer", &err) != 0)
        rc = ds4_api_fail_err(&call.error, NULL, &err);
    if (rc == 0)
        ds4_exchange_reply(x, 200, "application/json", ds4_buf_view(&call.answer));
    else
        ds4_api_error_reply(&call.error, DS4_STYLE_OPENAI, x);
    ds4_json_free(call.body);
    ds4_buf_deinit(&call.answer);
    ds4_arena_deinit(&call.arena);
}

static int read_bool(struct call *call, const char *key, bool *out)
{
    struct ds4_err err = {0};

    if (ds4_json_get_bool(call->body, "", key, out, &err) == 0)
        return 0;
    return ds4_api_fail(&call->error, "invalid_value", key, "%s", err.msg);
}

/* ---- tokenize ------------------------------------------------------------------------------------------ */

static void write_piece(struct call *call, int32_t id)
{
    struct ds4_str piece = ds4_vocab_piece(call->api->vocab, id);

    ds4_jw_object(&call->w);
    ds4_jw_key(&call->w, "id");
    ds4_jw_int(&call->w, id);
    ds4_jw_key(&call->w, "piece");
    if (ds4_utf8_valid(piece)) {
        ds4_jw_str(&call->w, piece);
    } else {
        ds4_jw_array(&call->w);
        for (size_t i = 0; i < piece.len; i++)
            ds4_jw_int(&call->w, (unsigned char)piece.ptr[i]);
        ds4_jw_end(&call->w);
    }
    ds4_jw_end(&call->w);
}

static int encode(struct call *call, struct ds4_str text, bool bos, bool specials,
                  struct ds4_ids *ids)
{
    struct ds4_err err = {0};

    if (bos && DS4_VEC_PUSH(ids, ds4_vocab_special(call->api->vocab, DS4_SPECIAL_BOS)) != 0)
        return ds4_api_fail(&call->error, "internal_error", NULL, "no memory for the tokens");
    if (ds4_bpe_encode(call->api->bpe, text, specials ? DS4_BPE_SPECIAL : DS4_BPE_PLAIN, ids,
                       &err) != 0)
        return ds4_api_fail_err(&call->error, NULL, &err);
    return 0;
}

/* llama-server: {"content"} -> {"tokens"}. */
static int tokenize_content(struct call *call, struct ds4_str text)
{
    bool add_special = false, parse_special = true, with_pieces = false;
    struct ds4_ids ids = {0};

    if (read_bool(call, "add_special", &add_special) != 0 ||
        read_bool(call, "parse_special", &parse_special) != 0 ||
        read_bool(call, "with_pieces", &with_pieces) != 0)
        return -1;
    if (encode(call, text, add_special, parse_special, &ids) != 0) {
        DS4_VEC_DEINIT(&ids);
        return -1;
    }
    ds4_jw_object(&call->w);
    ds4_jw_key(&call->w, "tokens");
    ds4_jw_array(&call->w);
    for (size_t i = 0; i < ids.len; i++) {
        if (with_pieces)
            write_piece(call, ids.ptr[i]);
        else
            ds4_jw_int(&call->w, ids.ptr[i]);
    }
    ds4_jw_end(&call->w);
    ds4_jw_end(&call->w);
    DS4_VEC_DEINIT(&ids);
    return 0;
}

/* vLLM's answer. */
static int write_counted(struct call *call, const struct ds4_ids *ids)
{
    const struct ds4_api_context *api = call->api;
    bool strings = false;

    if (read_bool(call, "return_token_strs", &strings) != 0)
        return -1;
    ds4_jw_object(&call->w);
    ds4_jw_key(&call->w, "count");
    ds4_jw_int(&call->w, (int64_t)ids->len);
    ds4_jw_key(&call->w, "max_model_len");
    ds4_jw_int(&call->w, api->config->model.context > 0 ? api->config->model.context
                                                        : api->shape->context_tok);
    ds4_jw_key(&call->w, "tokens");
    ds4_jw_array(&call->w);
    for (size_t i = 0; i < ids->len; i++)
        ds4_jw_int(&call->w, ids->ptr[i]);
    ds4_jw_end(&call->w);
    ds4_jw_key(&call->w, "token_strs");
    if (strings) {
        ds4_jw_array(&call->w);
        for (size_t i = 0; i < ids->len; i++)
            ds4_jw_str(&call->w, ds4_vocab_piece(api->vocab, ids->ptr[i]));
        ds4_jw_end(&call->w);
    } else {
        ds4_jw_null(&call->w);
    }
    ds4_jw_end(&call->w);
    return 0;
}

static int tokenize_prompt(struct call *call, struct ds4_str text)
{
    bool add_special = true;
    struct ds4_ids ids = {0};
    int rc = -1;

    if (read_bool(call, "add_special_tokens", &add_special) == 0 &&
        encode(call, text, add_special, true, &ids) == 0)
        rc = write_counted(call, &ids);
    DS4_VEC_DEINIT(&ids);
    return rc;
}

static int tokenize_messages(struct call *call)
{
    struct ds4_chat_prompt prompt;
    int rc;

    ds4_chat_prompt_init(&prompt);
    rc = ds4_chat_prompt_build(call->api, call->root, &call->arena, &prompt, &call->error);
    if (rc == 0)
        rc = write_counted(call, &prompt.ids);
    ds4_chat_prompt_deinit(&prompt);
    return rc;
}

static int tokenize(struct call *call)
{
    const struct ds4_json *content = ds4_json_find(call->body, "content");
    const struct ds4_json *prompt = ds4_json_find(call->body, "prompt");

    if (ds4_json_find(call->body, "messages") != NULL)
        return tokenize_messages(call);
    if (ds4_json_type(content) == DS4_JSON_STRING)
        return tokenize_content(call, ds4_json_str(content));
    if (ds4_json_type(prompt) == DS4_JSON_STRING)
        return tokenize_prompt(call, ds4_json_str(prompt));
    if (content == NULL && prompt == NULL)
        return ds4_api_fail(&call->error, "missing_field", "content",
                            "one of content, prompt, messages is required");
    return ds4_api_fail(&call->error, "invalid_value", content != NULL ? "content" : "prompt",
                        "%s must be a string", content != NULL ? "content" : "prompt");
}

void ds4_tokenize_handle(struct ds4_exchange *x, void *context)
{
    run(x, context, tokenize);
}

/* ---- detokenize ---------------------------------------------------------------------------------------- */

static int detokenize_into(struct call *call, const struct ds4_json *list, struct ds4_buf *text)
{
    struct ds4_detok detok;
    struct ds4_err err = {0};

    ds4_detok_init(&detok, call->api->vocab, false);
    for (size_t i = 0; i < ds4_json_len(list); i++) {
        const struct ds4_json *item = ds4_json_at(list, i);
        int64_t id = ds4_json_int(item);

        if (ds4_json_type(item) != DS4_JSON_INT || id < 0 || id >= call->api->vocab->n_token)
            return ds4_api_fail(&call->error, "invalid_value", "tokens",
                                "tokens[%zu] is no token id, ids are 0 to %d", i,
                                call->api->vocab->n_token - 1);
        if (ds4_detok_push(&detok, (int32_t)id, text, &err) != 0)
            return ds4_api_fail_err(&call->error, "tokens", &err);
    }
    if (ds4_detok_finish(&detok, text, &err) != 0)
        return ds4_api_fail_err(&call->error, "tokens", &err);
    return 0;
}

static int detokenize(struct call *call)
{
    const struct ds4_json *list = NULL;
    struct ds4_err err = {0};
    struct ds4_buf text;
    int rc;

    if (ds4_json_get_array(call->body, "", "tokens", &list, &err) != 0)
        return ds4_api_fail(&call->error, "invalid_value", "tokens", "%s", err.msg);
    if (list == NULL)
        return ds4_api_fail(&call->error, "missing_field", "tokens", "tokens is required");
    ds4_buf_init(&text, DS4_TOKENS_ANSWER_BYTES);
    rc = detokenize_into(call, list, &text);
    if (rc == 0) {
        ds4_jw_object(&call->w);
        ds4_jw_key(&call->w, "content");
        ds4_jw_str(&call->w, ds4_buf_view(&text));
        ds4_jw_key(&call->w, "prompt");
        ds4_jw_str(&call->w, ds4_buf_view(&text));
        ds4_jw_end(&call->w);
    }
    ds4_buf_deinit(&text);
    return rc;
}

void ds4_detokenize_handle(struct ds4_exchange *x, void *context)
{
    run(x, context, detokenize);
}

/* ---- apply-template ------------------------------------------------------------------------------------- */

static int apply_template(struct call *call)
{
    struct ds4_chat_prompt prompt;
    bool with_tokens = false;
    int rc = -1;

    ds4_chat_prompt_init(&prompt);
    if (read_bool(call, "tokenize", &with_tokens) == 0 &&
        ds4_chat_prompt_build(call->api, call->root, &call->arena, &prompt, &call->error) == 0) {
        rc = 0;
        ds4_jw_object(&call->w);
        ds4_jw_key(&call->w, "prompt");
        ds4_jw_str(&call->w, ds4_prompt_view(&prompt.prompt));
        if (with_tokens) {
            ds4_jw_key(&call->w, "tokens");
            ds4_jw_array(&call->w);
            for (size_t i = 0; i < prompt.ids.len; i++)
                ds4_jw_int(&call->w, prompt.ids.ptr[i]);
            ds4_jw_end(&call->w);
        }
        ds4_jw_end(&call->w);
    }
    ds4_chat_prompt_deinit(&prompt);
    return rc;
}

void ds4_apply_template_handle(struct ds4_exchange *x, void *context)
{
    run(x, context, apply_template);
}
