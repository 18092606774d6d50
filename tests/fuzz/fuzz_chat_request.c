/* Any body of a chat request, read as the router reads it: members, messages, prompt, tokens.  Either a
 * prompt of known tokens, or a refusal with a code and a message. */
#include "common/config.h"
#include "common/json.h"
#include "router/api/chat_prompt.h"
#include "router/api/params.h"
#include "router/text/chat_json.h"
#include "router/text/vocab_load.h"

#include <stdint.h>
#include <stdlib.h>

#define MAX_BYTES ((size_t)256 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The tiny model's vocabulary and default settings, for all inputs. */
static const struct ds4_api_context *context_of_all(void)
{
    static struct ds4_model_shape shape = {.context_tok = 65536};
    static struct ds4_config config;
    static struct ds4_api_context context;
    struct ds4_err err = {0};
    struct ds4_vocab *vocab;

    if (context.vocab != NULL)
        return &context;
    vocab = ds4_vocab_load("tests/data/ds4-tiny.gguf", NULL, &err);
    if (vocab == NULL || ds4_config_init(&config, &err) != 0)
        abort();
    context.bpe = ds4_bpe_new(vocab, &err);
    if (context.bpe == NULL)
        abort();
    context.vocab = vocab;
    context.config = &config;
    context.shape = &shape;
    context.release = DS4_RELEASE_V4_PREVIEW;
    return &context;
}

static void check_refusal(const struct ds4_api_error *error)
{
    if (error->code == NULL || error->message[0] == '\0' || ds4_api_error_status(error) < 400)
        abort();
}

static void read_params(const struct ds4_json *body)
{
    static const struct ds4_param_names names = {.stop = "stop", .limits = {"max_tokens"}};
    struct ds4_request *req = ds4_request_new(DS4_API_CHAT, 1, MAX_BYTES, NULL);
    struct ds4_api_error error = {0};

    if (req == NULL)
        abort();
    if (ds4_params_refuse(body, DS4_API_CHAT, &error) != 0 ||
        ds4_params_read(body, context_of_all(), &names, req, &error) != 0 ||
        ds4_params_read_logprobs(body, req, &error) != 0)
        check_refusal(&error);
    ds4_request_free(req);
}

static void make_prompt(const struct ds4_jt_node *root, struct ds4_arena *arena)
{
    const struct ds4_api_context *context = context_of_all();
    struct ds4_chat_prompt prompt;
    struct ds4_param param = {.code = "invalid_value"};
    struct ds4_api_error error = {0};
    struct ds4_err err = {0};

    ds4_chat_prompt_init(&prompt);
    if (ds4_chat_json_read(root, context->release, DS4_MEDIA_PLACEHOLDER, arena,
                           &prompt.conversation, &param, &err) == 0) {
        if (ds4_chat_prompt_render(context, arena, &prompt, &error) != 0)
            check_refusal(&error);
        for (size_t i = 0; i < prompt.ids.len; i++)
            if (!ds4_vocab_has(context->vocab, prompt.ids.ptr[i]))
                abort();
    } else if (err.code == DS4_OK || err.code == DS4_E_BUG || err.msg[0] == '\0') {
        abort();
    }
    ds4_chat_prompt_deinit(&prompt);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ds4_str text = {(const char *)data, size};
    struct ds4_json *body = ds4_json_parse(text, NULL);
    const struct ds4_jt_node *root;
    struct ds4_arena arena;

    ds4_arena_init(&arena, MAX_BYTES);
    root = ds4_jt_parse(text, DS4_JSON_MAX_DEPTH, &arena, NULL);
    if (body != NULL)
        read_params(body);
    if (root != NULL && root->type == DS4_JT_OBJECT)
        make_prompt(root, &arena);
    ds4_arena_deinit(&arena);
    ds4_json_free(body);
    return 0;
}
