/* The model list: the union of what OpenAI, Anthropic, vLLM and OpenRouter clients look for.  503 while
 * no token can be produced: discovery must not find a server that cannot serve. */
#include "router/api/models.h"

#include "common/clock.h"
#include "common/json_write.h"
#include "router/api/error.h"
#include "router/cluster.h"
#include "router/sched/sched.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define DS4_MODELS_BYTES ((size_t)256 << 10)

static void write_texts(struct ds4_jw *w, const char *const *texts, size_t n)
{
    ds4_jw_array(w);
    for (size_t i = 0; i < n; i++)
        ds4_jw_text(w, texts[i]);
    ds4_jw_end(w);
}

static void write_dates(const struct ds4_api_context *api, struct ds4_jw *w)
{
    time_t started = (time_t)api->started_unix_s;
    struct tm utc;
    char text[32] = "";

    if (gmtime_r(&started, &utc) != NULL)
        (void)strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
    ds4_jw_key(w, "created");
    ds4_jw_int(w, api->started_unix_s);
    ds4_jw_key(w, "created_at");
    ds4_jw_text(w, text);
}

static void write_model(const struct ds4_api_context *api, const char *id, int32_t context_tok,
                        struct ds4_jw *w)
{
    static const char *const text_only[] = {"text"};
    static const char *const parameters[] = {"temperature",
                                             "top_p",
                                             "top_k",
                                             "min_p",
                                             "seed",
                                             "stop",
                                             "max_tokens",
                                             "presence_penalty",
                                             "frequency_penalty",
                                             "repetition_penalty",
                                             "logit_bias",
                                             "logprobs",
                                             "top_logprobs",
                                             "tools",
                                             "tool_choice",
                                             "reasoning_effort"};

    ds4_jw_object(w);
    ds4_jw_key(w, "id");
    ds4_jw_text(w, id);
    ds4_jw_key(w, "object");
    ds4_jw_text(w, "model");
    write_dates(api, w);
    ds4_jw_key(w, "owned_by");
    ds4_jw_text(w, "ds4");
    ds4_jw_key(w, "root");
    ds4_jw_text(w, api->model_name);
    ds4_jw_key(w, "parent");
    ds4_jw_null(w);
    ds4_jw_key(w, "max_model_len");
    ds4_jw_int(w, context_tok);
    ds4_jw_key(w, "context_length");
    ds4_jw_int(w, context_tok);
    ds4_jw_key(w, "max_output_tokens");
    ds4_jw_int(w, context_tok);
    ds4_jw_key(w, "type");
    ds4_jw_text(w, "model");
    ds4_jw_key(w, "display_name");
    ds4_jw_text(w, api->shape->name[0] != '\0' ? api->shape->name : id);
    ds4_jw_key(w, "architecture");
    ds4_jw_object(w);
    ds4_jw_key(w, "input_modalities");
    write_texts(w, text_only, 1);
    ds4_jw_key(w, "output_modalities");
    write_texts(w, text_only, 1);
    ds4_jw_end(w);
    ds4_jw_key(w, "capabilities");
    ds4_jw_object(w);
    ds4_jw_key(w, "reasoning");
    ds4_jw_bool(w, true);
    ds4_jw_key(w, "tools");
    ds4_jw_bool(w, true);
    ds4_jw_end(w);
    ds4_jw_key(w, "supported_parameters");
    write_texts(w, parameters, sizeof(parameters) / sizeof(parameters[0]));
    ds4_jw_end(w);
}

static int32_t context_when_ready(const struct ds4_api_context *api, struct ds4_exchange *x)
{
    struct ds4_cluster_view *view = calloc(1, sizeof(*view));
    struct ds4_api_error error = {0};
    int32_t context_tok = 0;
    const char *code = "loading";

    if (view != NULL) {
        ds4_cluster_view(api->cluster, ds4_clock_ns(), view);
        if (view->ready)
            context_tok = view->context_tok;
        else if (view->reason != DS4_REASON_NONE)
            code = ds4_reason_text(view->reason);
    }
    if (context_tok == 0) {
        (void)ds4_api_fail(&error, code, NULL, "no token can be produced at the moment");
        error.retry_after_ms = view == NULL ? 0 : view->retry_after_ms;
        ds4_api_error_reply(&error, DS4_STYLE_OPENAI, x);
    }
    free(view);
    return context_tok;
}

void ds4_models_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    int32_t context_tok = context_when_ready(api, x);
    struct ds4_buf body;
    struct ds4_jw w;

    if (context_tok == 0)
        return;
    ds4_buf_init(&body, DS4_MODELS_BYTES);
    ds4_jw_init(&w, &body);
    ds4_jw_object(&w);
    ds4_jw_key(&w, "object");
    ds4_jw_text(&w, "list");
    ds4_jw_key(&w, "data");
    ds4_jw_array(&w);
    write_model(api, api->model_name, context_tok, &w);
    for (int32_t i = 0; i < api->config->model.aliases.n; i++)
        write_model(api, api->config->model.aliases.v[i], context_tok, &w);
    ds4_jw_end(&w);
    ds4_jw_key(&w, "first_id");
    ds4_jw_text(&w, api->model_name);
    ds4_jw_key(&w, "last_id");
    ds4_jw_text(&w, api->config->model.aliases.n > 0
                        ? api->config->model.aliases.v[api->config->model.aliases.n - 1]
                        : api->model_name);
    ds4_jw_key(&w, "has_more");
    ds4_jw_bool(&w, false);
    ds4_jw_end(&w);
    ds4_exchange_reply(x, 200, "application/json", ds4_buf_view(&body));
    ds4_buf_deinit(&body);
}

static bool is_served_name(const struct ds4_api_context *api, struct ds4_str name)
{
    if (ds4_str_equal(name, ds4_str_view(api->model_name)))
        return true;
    for (int32_t i = 0; i < api->config->model.aliases.n; i++)
        if (ds4_str_equal(name, ds4_str_view(api->config->model.aliases.v[i])))
            return true;
    return false;
}

bool ds4_models_serves(const struct ds4_api_context *api, struct ds4_str name)
{
    return name.len == 0 || api->config->http.any_model || is_served_name(api, name);
}

void ds4_model_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    struct ds4_str path = ds4_exchange_path(x);
    struct ds4_str name = path;
    struct ds4_api_error error;
    struct ds4_buf body;
    struct ds4_jw w;
    char id[256];
    int32_t context_tok;

    while (name.len > 0 && memchr(name.ptr, '/', name.len) != NULL)
        name = ds4_str_skip(name, 1);
    if (!is_served_name(api, name) || name.len >= sizeof(id)) {
        (void)ds4_api_fail(&error, "model_not_found", "model", "the model \"%.*s\" does not exist",
                           name.len > 128 ? 128 : (int)name.len, name.ptr);
        ds4_api_error_reply(&error, DS4_STYLE_OPENAI, x);
        return;
    }
    memcpy(id, name.ptr, name.len);
    id[name.len] = '\0';
    context_tok = context_when_ready(api, x);
    if (context_tok == 0)
        return;
    ds4_buf_init(&body, DS4_MODELS_BYTES);
    ds4_jw_init(&w, &body);
    write_model(api, id, context_tok, &w);
    ds4_exchange_reply(x, 200, "application/json", ds4_buf_view(&body));
    ds4_buf_deinit(&body);
}
