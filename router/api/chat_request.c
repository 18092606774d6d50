/* Reads chat requests (step 2): their switches, and messages through text/chat_json. */
#include "router/api/chat_request.h"

#include "router/api/intake.h"
#include "router/api/params.h"
#include "router/text/chat_json.h"

int ds4_chat_prompt_build(const struct ds4_api_context *context, const struct ds4_jt_node *root,
                          struct ds4_arena *arena, struct ds4_chat_prompt *out,
                          struct ds4_api_error *error)
{
    struct ds4_param param = {.code = "invalid_value"};
    struct ds4_err err = {0};

    if (ds4_chat_json_read(root, context->release, (enum ds4_media)context->config->http.drop_media,
                           arena, &out->conversation, &param, &err) != 0)
        return err.code == DS4_E_INVALID
                   ? ds4_api_fail(error, param.code, param.path, "%s", err.msg)
                   : ds4_api_fail_err(error, NULL, &err);
    if (ds4_chat_prompt_check_results(out, "messages", error) != 0)
        return -1;
    return ds4_chat_prompt_render(context, arena, out, error);
}

static int read_switches(const struct ds4_json *body, struct ds4_answer *answer,
                         struct ds4_api_error *error)
{
    const struct ds4_json *reasoning = ds4_json_find(body, "reasoning");
    bool exclude = false;

    if (ds4_intake_stream(body, answer, error) != 0 ||
        ds4_intake_switch(reasoning, "reasoning", "exclude", &exclude, error) != 0 ||
        ds4_intake_switch(body, "", "include_reasoning", &answer->include_reasoning, error) != 0)
        return -1;
    answer->include_reasoning = answer->include_reasoning && !exclude;
    return ds4_intake_switch(body, "", "parallel_tool_calls", &answer->parallel_calls, error);
}

/* A strict schema is a promise about every token; until the sampler can keep it, it is refused. */
static int check_format(const struct ds4_json *body, struct ds4_api_error *error)
{
    const struct ds4_json *format = ds4_json_find(body, "response_format");
    const struct ds4_json *schema = ds4_json_find(format, "json_schema");
    bool strict = false;

    if (ds4_intake_switch(schema, "response_format.json_schema", "strict", &strict, error) != 0)
        return -1;
    if (strict)
        return ds4_api_fail(error, "schema_unsupported", "response_format.json_schema.strict",
                            "strict schemas are not enforced by this server: send the schema "
                            "without \"strict\": true");
    return 0;
}

static int read(struct ds4_answer *answer, struct ds4_body *body, struct ds4_chat_prompt *prompt,
                struct ds4_api_error *error)
{
    static const struct ds4_param_names names = {
        .stop = "stop",
        .limits = {"max_tokens", "max_completion_tokens", "n_predict"},
    };
    const struct ds4_api_context *context = answer->context;
    struct ds4_request *first = ds4_answer_add_request(answer, 0, error);
    int32_t n_choice = 1;

    if (first == NULL || ds4_intake_model(body->json, context, first, error) != 0 ||
        ds4_params_refuse(body->json, answer->dialect->api, error) != 0 ||
        check_format(body->json, error) != 0 || read_switches(body->json, answer, error) != 0 ||
        ds4_intake_count(body->json, context, DS4_MAX_CHOICES, &n_choice, error) != 0 ||
        ds4_params_read(body->json, context, &names, first, error) != 0 ||
        ds4_params_read_logprobs(body->json, first, error) != 0 ||
        ds4_chat_prompt_build(context, body->root, &body->arena, prompt, error) != 0)
        return -1;
    if (prompt->conversation.no_turn)
        return ds4_api_fail(error, "unsupported_value", "add_generation_prompt",
                            "add_generation_prompt: an answer needs a turn of its own, unless "
                            "continue_final_message goes on with the last one");
    return ds4_intake_chat(answer, body->json, prompt, n_choice, error);
}

int ds4_chat_request_parse(struct ds4_answer *answer, struct ds4_api_error *error)
{
    return ds4_intake_run(answer, read, error);
}
