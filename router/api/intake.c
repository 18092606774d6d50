/* The part of step 2 that is the same in every dialect.
 *
 * The body is read twice, for two purposes: common/json for the members whose values matter as values
 * (sampling, switches), common/json_text for what reaches the prompt, where digits and key order count.
 * Further choices of `n` share prompt and effort and differ in their seed. */
#include "router/api/intake.h"

#include "common/metrics.h"
#include "router/api/fields.h"
#include "router/api/format.h"
#include "router/api/models.h"
#include "router/api/params.h"
#include "router/api/remember.h"
#include "router/api/session.h"
#include "router/parse/stream.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#define DS4_BODY_ARENA_BYTES ((size_t)1 << 30)
#define DS4_OPENER_BYTES     ((size_t)1 << 20) /* a tool's name and fixed text */

/* ---- the body --------------------------------------------------------------------------------------- */

int ds4_body_init(struct ds4_body *body, struct ds4_str text, struct ds4_api_error *error)
{
    struct ds4_err err = {0};

    *body = (struct ds4_body){0};
    ds4_arena_init(&body->arena, DS4_BODY_ARENA_BYTES);
    body->json = ds4_json_parse(text, &err);
    if (body->json != NULL)
        body->root = ds4_jt_parse(text, DS4_JSON_MAX_DEPTH, &body->arena, &err);
    if (body->root == NULL)
        return ds4_api_fail(error, "invalid_json", NULL, "the body is not valid JSON: %s", err.msg);
    if (body->root->type != DS4_JT_OBJECT)
        return ds4_api_fail(error, "invalid_json", NULL, "the body must be a JSON object");
    return 0;
}

void ds4_body_deinit(struct ds4_body *body)
{
    ds4_arena_deinit(&body->arena);
    ds4_json_free(body->json);
}

int ds4_intake_run(struct ds4_answer *answer, ds4_intake_fn read, struct ds4_api_error *error)
{
    struct ds4_chat_prompt prompt;
    struct ds4_body body;
    int rc;

    ds4_chat_prompt_init(&prompt);
    rc = ds4_body_init(&body, ds4_exchange_body(answer->x), error);
    if (rc == 0)
        rc = read(answer, &body, &prompt, error);
    if (rc == 0)
        ds4_fields_count(answer->context->metrics, answer->dialect->api, body.json);
    ds4_chat_prompt_deinit(&prompt);
    ds4_body_deinit(&body);
    return rc;
}

/* ---- members ----------------------------------------------------------------------------------------- */

int ds4_intake_switch(const struct ds4_json *obj, const char *path, const char *key, bool *out,
                      struct ds4_api_error *error)
{
    struct ds4_err err = {0};
    char param[64];

    if (ds4_json_get_bool(obj, path, key, out, &err) == 0)
        return 0;
    (void)snprintf(param, sizeof(param), "%s%s%s", path, path[0] == '\0' ? "" : ".", key);
    return ds4_api_fail(error, "invalid_value", param, "%s", err.msg);
}

int ds4_intake_stream(const struct ds4_json *body, struct ds4_answer *answer,
                      struct ds4_api_error *error)
{
    const struct ds4_json *options = NULL;
    struct ds4_err err = {0};

    if (ds4_json_get_object(body, "", "stream_options", &options, &err) != 0)
        return ds4_api_fail(error, "invalid_value", "stream_options", "%s", err.msg);
    if (ds4_intake_switch(body, "", "stream", &answer->stream, error) != 0 ||
        ds4_intake_switch(options, "stream_options", "include_usage", &answer->include_usage,
                          error) != 0 ||
        ds4_intake_switch(options, "stream_options", "continuous_usage_stats",
                          &answer->continuous_usage, error) != 0)
        return -1;
    return ds4_intake_switch(body, "", "return_progress", &answer->return_progress, error);
}

int ds4_intake_model(const struct ds4_json *body, const struct ds4_api_context *context,
                     struct ds4_request *req, struct ds4_api_error *error)
{
    struct ds4_str name = {NULL, 0};
    struct ds4_err err = {0};

    if (ds4_json_get_str(body, "", "model", &name, &err) != 0)
        return ds4_api_fail(error, "invalid_value", "model", "%s", err.msg);
    if (!ds4_models_serves(context, name))
        return ds4_api_fail(error, "model_not_found", "model", "the model \"%.*s\" does not exist",
                            name.len > 128 ? 128 : (int)name.len, name.ptr);
    if (name.len == 0)
        name = ds4_str_view(context->model_name);
    req->model = ds4_arena_copy(&req->arena, name);
    return req->model.ptr != NULL
               ? 0
               : ds4_api_fail(error, "internal_error", NULL, "no memory for the model's name");
}

int ds4_intake_count(const struct ds4_json *body, const struct ds4_api_context *context,
                     int32_t max, int32_t *n_choice, struct ds4_api_error *error)
{
    int64_t n = 1;
    struct ds4_err err = {0};

    if (max > context->config->http.max_n)
        max = context->config->http.max_n;
    if (ds4_json_get_int(body, "", "n", 1, max, &n, &err) != 0)
        return ds4_api_fail(error, "invalid_value", "n", "%s", err.msg);
    *n_choice = (int32_t)n;
    return 0;
}

/* ---- from prompt to request --------------------------------------------------------------------------- */

void ds4_intake_random(void *ctx, void *out, size_t n)
{
    (void)ctx;
    if (getrandom(out, n, 0) != (ssize_t)n)
        abort(); /* a predictable call id would be worse; the kernel does not fail below 256 bytes */
}

static struct ds4_str effort_word(const struct ds4_effort_value *value, struct ds4_arena *arena)
{
    char text[16];

    if (value->word.len > 0)
        return ds4_arena_copy(arena, value->word);
    if (value->number == 0)
        return DS4_STR("");
    (void)snprintf(text, sizeof(text), "%d", value->number);
    return ds4_arena_copy(arena, ds4_str_view(text));
}

static void set_effort(struct ds4_request *req, const struct ds4_effort *effort)
{
    struct ds4_arena *arena = &req->arena;

    req->effort.thinking = effort->thinking;
    if (effort->is_requested)
        req->effort.requested = effort_word(&effort->requested, arena);
    req->effort.applied = effort->thinking ? effort_word(&effort->applied, arena) : DS4_STR("off");
    req->effort.source = effort->from_request ? DS4_STR("request") : DS4_STR("server_default");
    req->effort.downgraded = effort->downgraded;
    req->effort.why = ds4_arena_copy(arena, ds4_str_view(effort->why));
}

static int make_parser(const struct ds4_api_context *context, const struct ds4_chat_prompt *prompt,
                       struct ds4_request *req, struct ds4_api_error *error)
{
    const struct ds4_conversation *c = &prompt->conversation;
    struct ds4_parse_config *config = ds4_arena_take(&req->arena, sizeof(*config));
    struct ds4_parse_tool *tools = ds4_arena_take_array(&req->arena, c->n_tool, sizeof(*tools));
    struct ds4_err err = {0};

    if (config == NULL || tools == NULL)
        return ds4_api_fail(error, "internal_error", NULL, "no memory for the parser");
    for (size_t i = 0; i < c->n_tool; i++) {
        const struct ds4_jt_node *name = ds4_jt_find(c->tools[i], "name");
        const struct ds4_jt_node *parameters = ds4_jt_find(c->tools[i], "parameters");

        if (name != NULL && name->type == DS4_JT_STRING)
            tools[i].name = ds4_arena_copy(&req->arena, name->str);
        if (parameters != NULL)
            tools[i].parameters = ds4_arena_copy(&req->arena, parameters->raw);
    }
    *config = (struct ds4_parse_config){
        .starts_in_reasoning = prompt->prompt.in_reasoning,
        .spaced_tags = context->release == DS4_RELEASE_V41,
        .calls_mode = c->tool_choice == DS4_TOOL_CHOICE_NONE    ? DS4_CALLS_AS_TEXT
                      : c->tool_choice == DS4_TOOL_CHOICE_NAMED ? DS4_CALLS_NAMED
                                                                : DS4_CALLS_PARSED,
        .tools = tools,
        .n_tools = c->n_tool,
        .stops = req->stop_text,
        .n_stops = (size_t)req->n_stop_text,
        .keep_stop = req->keep_stop_text,
        .no_recovery = !context->config->parse.dsml_recovery,
        .no_plain_xml = !context->config->parse.dsml_heal_xml,
        .hold_max_bytes = (size_t)context->config->parse.dsml_hold_max,
        .random = ds4_intake_random,
    };
    if (ds4_request_set_parser(req, context->vocab, config, &err) != 0)
        return ds4_api_fail_err(error, NULL, &err);
    return 0;
}

/* tool_choice required or a name: the sampler writes the opener of a call, after the thinking if there
 * is any, and the model goes on from there. */
static int force_opener(const struct ds4_api_context *context, const struct ds4_chat_prompt *prompt,
                        struct ds4_request *req, struct ds4_api_error *error)
{
    const struct ds4_conversation *c = &prompt->conversation;
    struct ds4_prompt opener;
    struct ds4_ids ids = {0};
    struct ds4_err err = {0};
    int32_t *copy;
    int rc;

    if (c->tool_choice != DS4_TOOL_CHOICE_REQUIRED && c->tool_choice != DS4_TOOL_CHOICE_NAMED)
        return 0;
    ds4_prompt_init(&opener, DS4_OPENER_BYTES);
    ds4_template_call_opener(context->release,
                             c->tool_choice == DS4_TOOL_CHOICE_NAMED ? c->tool_name : DS4_STR(""),
                             &opener);
    rc = ds4_prompt_encode(&opener, context->bpe, DS4_SPECIALS_PLAIN, &ids, &err);
    ds4_prompt_deinit(&opener);
    copy = ds4_arena_take_array(&req->arena, ids.len, sizeof(*copy));
    if (rc == 0 && ids.len > DS4_MAX_FORCED_IDS)
        rc = ds4_fail(&err, DS4_E_INVALID, "the tool's name takes more than %d tokens",
                      DS4_MAX_FORCED_IDS);
    if (rc == 0 && copy == NULL)
        rc = ds4_fail(&err, DS4_E_NOMEM, "no memory for the call's opener");
    if (rc == 0) {
        memcpy(copy, ids.ptr, ids.len * sizeof(*copy));
        req->sampling.n_forced = (int32_t)ids.len;
        req->sampling.forced_id = copy;
        req->sampling.forced_after_id =
            prompt->prompt.in_reasoning ? req->sampling.think_close_id : -1;
    }
    DS4_VEC_DEINIT(&ids);
    return rc == 0 ? 0 : ds4_api_fail_err(error, "tool_choice", &err);
}

static int finish_request(struct ds4_answer *answer, const struct ds4_chat_prompt *prompt,
                          struct ds4_request *req, struct ds4_api_error *error)
{
    const struct ds4_conversation *c = &prompt->conversation;
    struct ds4_err err = {0};

    if (ds4_request_set_prompt(req, prompt->ids.ptr, (int32_t)prompt->ids.len, &err) != 0)
        return ds4_api_fail_err(error, NULL, &err);
    set_effort(req, &prompt->effort);
    req->stream = answer->stream;
    req->one_call = !answer->parallel_calls;
    req->must_call =
        c->tool_choice == DS4_TOOL_CHOICE_REQUIRED || c->tool_choice == DS4_TOOL_CHOICE_NAMED;
    if (!c->continue_last)
        req->turn_start = prompt->prompt.in_reasoning ? DS4_TURN_THINKING : DS4_TURN_PLAIN;
    req->sampling.think_close_id =
        ds4_vocab_special(answer->context->vocab, DS4_SPECIAL_THINK_CLOSE);
    if (c->wish.has_budget && prompt->prompt.in_reasoning &&
        c->wish.budget_tok < INT32_MAX - req->n_prompt)
        req->sampling.force_close_at = req->n_prompt + (int32_t)c->wish.budget_tok;
    if (force_opener(answer->context, prompt, req, error) != 0)
        return -1;
    answer->choice[req->choice].wants_logprobs = req->sampling.n_logprobs >= 0;
    return make_parser(answer->context, prompt, req, error);
}

/* Our own member: what only this server has a switch for. */
static int read_extras(const struct ds4_json *body, bool *tripwire, struct ds4_api_error *error)
{
    const struct ds4_json *ours = NULL;
    struct ds4_err err = {0};

    if (ds4_json_get_object(body, "", "ds4", &ours, &err) != 0)
        return ds4_api_fail(error, "invalid_value", "ds4", "%s", err.msg);
    return ds4_intake_switch(ours, "ds4", "tripwire", tripwire, error);
}

static int complete(struct ds4_answer *answer, const struct ds4_json *body,
                    const struct ds4_chat_prompt *prompt, struct ds4_request *req,
                    struct ds4_api_error *error)
{
    struct ds4_err err = {0};
    bool tripwire = true;

    if (read_extras(body, &tripwire, error) != 0 ||
        ds4_session_read(answer, body, req, error) != 0 ||
        finish_request(answer, prompt, req, error) != 0)
        return -1;
    if (tripwire && ds4_request_set_watch(req, answer->context->recovery, &err) != 0)
        return ds4_api_fail_err(error, NULL, &err);
    return 0;
}

static void count_effort(const struct ds4_answer *answer, const struct ds4_chat_prompt *prompt)
{
    const struct ds4_request *req = answer->choice[0].req;
    struct ds4_metrics *m = answer->context->metrics;
    char requested[16], applied[16];

    (void)snprintf(
        requested, sizeof(requested), "%.*s",
        DS4_STR_ARG(req->effort.requested.len > 0 ? req->effort.requested : DS4_STR("absent")));
    (void)snprintf(applied, sizeof(applied), "%.*s", DS4_STR_ARG(req->effort.applied));
    ds4_metric_add(m, DS4_M_EFFORT_REQUESTS, 1, ds4_api_text(req->api), requested, applied);
    if (prompt->effort.downgraded)
        ds4_metric_add(m, DS4_M_EFFORT_DOWNGRADES, 1, requested, applied, "context");
}

int ds4_intake_chat(struct ds4_answer *answer, const struct ds4_json *body,
                    const struct ds4_chat_prompt *prompt, int32_t n_choice,
                    struct ds4_api_error *error)
{
    struct ds4_request *first = answer->choice[0].req;

    if (complete(answer, body, prompt, first, error) != 0)
        return -1;
    if (prompt->effort.downgraded)
        ds4_answer_note(answer, "effort", "\"max\"", "\"high\"", prompt->effort.why);
    if (ds4_format_read(answer, prompt, error) != 0)
        return -1;
    count_effort(answer, prompt);
    ds4_remember_count(prompt, first->api, answer->context->metrics);
    for (int32_t i = 1; i < n_choice; i++) {
        struct ds4_request *req = ds4_answer_add_request(answer, i, error);

        if (req == NULL || ds4_intake_model(body, answer->context, req, error) != 0 ||
            ds4_params_copy(first, req, error) != 0 ||
            complete(answer, body, prompt, req, error) != 0)
            return -1;
    }
    for (int32_t i = 0; i < n_choice; i++)
        answer->choice[i].req->n_choice = n_choice;
    return 0;
}
