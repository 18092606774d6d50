/* Reads completion requests (step 2) and their prompts (step 3): text, token ids, or lists of either.
 *
 * No encoder and no parser: special tokens in the prompt count, and the answer is returned as it is.
 * Echo with log-probabilities scores a prompt: its first token is the prompt proper, the rest are
 * written by the sampler one by one, which reports what the model thought of each. */
#include "router/api/completions_request.h"

#include "router/api/intake.h"
#include "router/api/params.h"
#include "router/api/session.h"
#include "router/parse/stream.h"
#include "router/text/detok.h"
#include "router/text/prompt.h"
#include "router/text/vocab.h"

#include <stdio.h>

#define DS4_COMPLETION_TOKENS 16 /* max_tokens of OpenAI when absent */
#define DS4_PROMPT_BYTES      ((size_t)128 << 20)

struct reader {
    struct ds4_answer *answer;
    struct ds4_api_error *error;
    struct ds4_str suffix; /* ptr NULL = none */
    bool parse_special;
    bool echo;
    bool scores; /* echo with log-probabilities */
    int32_t n;   /* choices per prompt */
    int32_t min_new_tok;
};

/* One prompt: its ids, and its text if it came as text. */
struct prompt {
    struct ds4_ids ids;
    struct ds4_str text;
};

/* ---- prompts --------------------------------------------------------------------------------------- */

static int encode_text(struct reader *r, struct ds4_str text, struct prompt *out)
{
    const struct ds4_api_context *context = r->answer->context;
    struct ds4_prompt prompt;
    struct ds4_err err = {0};
    int rc;

    out->text = text;
    ds4_prompt_init(&prompt, DS4_PROMPT_BYTES);
    ds4_prompt_completion(&prompt, text, r->suffix, r->parse_special);
    rc = ds4_prompt_check(&prompt, &err);
    if (rc == 0)
        rc = ds4_prompt_encode(&prompt, context->bpe, DS4_SPECIALS_PLAIN, &out->ids, &err);
    ds4_prompt_deinit(&prompt);
    return rc == 0 ? 0 : ds4_api_fail_err(r->error, "prompt", &err);
}

static int take_ids(struct reader *r, const struct ds4_json *list, struct prompt *out)
{
    const struct ds4_vocab *vocab = r->answer->context->vocab;

    if (r->suffix.ptr != NULL)
        return ds4_api_fail(r->error, "unsupported_value", "suffix",
                            "suffix needs a prompt of text, not of token ids");
    for (size_t i = 0; i < ds4_json_len(list); i++) {
        const struct ds4_json *item = ds4_json_at(list, i);
        int64_t id = ds4_json_int(item);

        if (ds4_json_type(item) != DS4_JSON_INT || id < 0 || id >= vocab->n_token)
            return ds4_api_fail(r->error, "invalid_value", "prompt",
                                "prompt: item %zu is no token id, ids are 0 to %d", i,
                                vocab->n_token - 1);
        if (DS4_VEC_PUSH(&out->ids, (int32_t)id) != 0)
            return ds4_api_fail(r->error, "internal_error", NULL, "no memory for the prompt");
    }
    if (out->ids.len == 0)
        return ds4_api_fail(r->error, "invalid_value", "prompt", "prompt must not be empty");
    return 0;
}

/* What echo shows of a prompt of ids. */
static int text_of_ids(struct reader *r, const struct prompt *prompt, struct ds4_arena *arena,
                       struct ds4_str *out)
{
    struct ds4_detok detok;
    struct ds4_buf text;
    struct ds4_err err = {0};
    int rc = 0;

    ds4_buf_init(&text, DS4_PROMPT_BYTES);
    ds4_detok_init(&detok, r->answer->context->vocab, true);
    for (size_t i = 0; i < prompt->ids.len && rc == 0; i++)
        rc = ds4_detok_push(&detok, prompt->ids.ptr[i], &text, &err);
    if (rc == 0)
        rc = ds4_detok_finish(&detok, &text, &err);
    *out = ds4_arena_copy(arena, ds4_buf_view(&text));
    ds4_buf_deinit(&text);
    if (rc == 0 && out->ptr == NULL)
        rc = ds4_fail(&err, DS4_E_NOMEM, "no memory for the echo");
    return rc == 0 ? 0 : ds4_api_fail_err(r->error, "prompt", &err);
}

/* ---- requests --------------------------------------------------------------------------------------- */

static int set_parser(struct reader *r, struct ds4_request *req)
{
    struct ds4_parse_config *config = ds4_arena_take(&req->arena, sizeof(*config));
    struct ds4_err err = {0};

    if (config == NULL)
        return ds4_api_fail(r->error, "internal_error", NULL, "no memory for the parser");
    *config = (struct ds4_parse_config){
        .raw = true,
        .calls_mode = DS4_CALLS_AS_TEXT,
        .stops = req->stop_text,
        .n_stops = (size_t)req->n_stop_text,
        .keep_stop = req->keep_stop_text,
        .random = ds4_intake_random,
    };
    if (ds4_request_set_parser(req, r->answer->context->vocab, config, &err) != 0)
        return ds4_api_fail_err(r->error, NULL, &err);
    return 0;
}

static bool is_stop_id(const struct ds4_request *req, int32_t id)
{
    for (int32_t i = 0; i < req->n_stop_id; i++)
        if (req->stop_id[i] == id)
            return true;
    return false;
}

/* Everything behind the first token is written by the sampler. */
static int score_prompt(struct reader *r, const struct prompt *prompt, struct ds4_request *req)
{
    int32_t n = (int32_t)prompt->ids.len - 1;
    int32_t *forced = ds4_arena_take_array(&req->arena, (size_t)n, sizeof(*forced));

    if (n > DS4_MAX_FORCED_IDS)
        return ds4_api_fail(r->error, "unsupported_value", "echo",
                            "echo with logprobs is offered for prompts of at most %d tokens, this "
                            "one has %zu",
                            DS4_MAX_FORCED_IDS + 1, prompt->ids.len);
    if (req->n_stop_text > 0)
        return ds4_api_fail(r->error, "unsupported_value", "stop",
                            "stop cannot be combined with echo and logprobs");
    if (forced == NULL)
        return ds4_api_fail(r->error, "internal_error", NULL, "no memory for the prompt");
    for (int32_t i = 0; i < n; i++) {
        forced[i] = prompt->ids.ptr[i + 1];
        if (is_stop_id(req, forced[i]))
            return ds4_api_fail(r->error, "unsupported_value", "echo",
                                "echo with logprobs: the prompt holds the stop token %d",
                                forced[i]);
    }
    req->sampling.n_forced = n;
    req->sampling.forced_id = forced;
    req->sampling.forced_after_id = -1;
    req->max_new += n;
    if (r->min_new_tok > 0)
        req->sampling.min_new_tok = r->min_new_tok + n;
    r->answer->choice[req->choice].n_echo = n;
    return 0;
}

static int fill(struct reader *r, const struct prompt *prompt, struct ds4_request *req)
{
    struct ds4_completion *state = (struct ds4_completion *)r->answer->state + req->choice;
    struct ds4_err err = {0};
    int32_t n = r->scores ? 1 : (int32_t)prompt->ids.len;

    if (prompt->ids.ptr == NULL || prompt->ids.len == 0)
        return ds4_api_fail(r->error, "invalid_value", "prompt", "prompt must not be empty");
    *state = (struct ds4_completion){.first_id = r->scores ? prompt->ids.ptr[0] : -1};
    if (ds4_request_set_prompt(req, prompt->ids.ptr, n, &err) != 0)
        return ds4_api_fail_err(r->error, NULL, &err);
    if (r->scores && score_prompt(r, prompt, req) != 0)
        return -1;
    if (r->scores && !ds4_vocab_is_hidden(r->answer->context->vocab, state->first_id))
        state->echo = ds4_vocab_piece(r->answer->context->vocab, state->first_id);
    if (r->echo && !r->scores) {
        if (prompt->text.ptr == NULL) {
            if (text_of_ids(r, prompt, &req->arena, &state->echo) != 0)
                return -1;
        } else {
            state->echo = ds4_arena_copy(&req->arena, prompt->text);
            if (state->echo.ptr == NULL)
                return ds4_api_fail(r->error, "internal_error", NULL, "no memory for the echo");
        }
    }
    req->effort.applied = DS4_STR("off");
    req->effort.source = DS4_STR("server_default");
    req->stream = r->answer->stream;
    r->answer->choice[req->choice].wants_logprobs = req->sampling.n_logprobs >= 0;
    return set_parser(r, req);
}

/* The choices of prompt number p.  `first`: choice 0 with the sampling of all. */
static int add_choices(struct reader *r, const struct ds4_json *body, const struct ds4_json *value,
                       int32_t p, const struct ds4_request *first, struct ds4_api_error *error)
{
    struct prompt prompt = {0};
    int32_t max_new =
        first->max_new_asked > 0 || r->scores ? first->max_new_asked : DS4_COMPLETION_TOKENS;
    int rc = ds4_json_type(value) == DS4_JSON_STRING ? encode_text(r, ds4_json_str(value), &prompt)
             : ds4_json_type(value) == DS4_JSON_ARRAY
                 ? take_ids(r, value, &prompt)
                 : ds4_api_fail(error, "invalid_value", "prompt",
                                "prompt must be a string, token ids, or a list of either");

    for (int32_t i = p * r->n; i < (p + 1) * r->n && rc == 0; i++) {
        struct ds4_request *req =
            i == 0 ? r->answer->choice[0].req : ds4_answer_add_request(r->answer, i, error);

        if (req == NULL || (i > 0 && (ds4_intake_model(body, r->answer->context, req, error) != 0 ||
                                      ds4_params_copy(first, req, error) != 0)))
            rc = -1;
        rc = rc == 0 ? ds4_session_read(r->answer, body, req, error) : rc;
        if (rc != 0)
            break;
        req->max_new = max_new;
        rc = fill(r, &prompt, req);
    }
    DS4_VEC_DEINIT(&prompt.ids);
    return rc;
}

/* ---- members ------------------------------------------------------------------------------------------ */

/* The old integer form; true is 0 alternatives, as some clients send it. */
static int read_logprobs(const struct ds4_json *body, struct ds4_request *req,
                         struct ds4_api_error *error)
{
    const struct ds4_json *value = ds4_json_find(body, "logprobs");
    int64_t n = -1;
    struct ds4_err err = {0};

    if (ds4_json_type(value) == DS4_JSON_BOOL)
        n = ds4_json_bool(value) ? 0 : -1;
    else if (ds4_json_get_int(body, "", "logprobs", 0, DS4_MAX_TOP_LOGPROBS, &n, &err) != 0)
        return ds4_api_fail(error, "invalid_value", "logprobs", "%s", err.msg);
    req->sampling.n_logprobs = (int32_t)n;
    return 0;
}

static int read_suffix(struct reader *r, const struct ds4_json *body)
{
    static const enum ds4_special needed[] = {DS4_SPECIAL_FIM_BEGIN, DS4_SPECIAL_FIM_HOLE,
                                              DS4_SPECIAL_FIM_END};
    struct ds4_err err = {0};

    if (ds4_json_get_str(body, "", "suffix", &r->suffix, &err) != 0)
        return ds4_api_fail(r->error, "invalid_value", "suffix", "%s", err.msg);
    for (size_t i = 0; r->suffix.ptr != NULL && i < sizeof(needed) / sizeof(needed[0]); i++)
        if (ds4_vocab_special(r->answer->context->vocab, needed[i]) < 0)
            return ds4_api_fail(r->error, "fim_unsupported", "suffix",
                                "suffix: this model's tokenizer has no %.*s",
                                DS4_STR_ARG(ds4_special_text(needed[i])));
    return 0;
}

/* max_tokens 0 scores a prompt and generates nothing; everywhere else it is an error. */
static int read_params(struct reader *r, const struct ds4_json *body, struct ds4_request *first)
{
    static const struct ds4_param_names usual = {"stop", {"max_tokens", "n_predict"}};
    static const struct ds4_param_names scoring = {"stop", {"n_predict"}};
    const struct ds4_json *limit = ds4_json_find(body, "max_tokens");
    bool none = ds4_json_type(limit) == DS4_JSON_INT && ds4_json_int(limit) == 0;

    if (read_logprobs(body, first, r->error) != 0 ||
        ds4_intake_switch(body, "", "echo", &r->echo, r->error) != 0 ||
        ds4_intake_switch(body, "", "parse_special", &r->parse_special, r->error) != 0)
        return -1;
    r->scores = r->echo && first->sampling.n_logprobs >= 0;
    if (ds4_params_read(body, r->answer->context, none && r->scores ? &scoring : &usual, first,
                        r->error) != 0)
        return -1;
    r->min_new_tok = first->sampling.min_new_tok;
    if (r->scores && limit == NULL && first->max_new_asked == 0)
        first->max_new_asked = DS4_COMPLETION_TOKENS;
    return 0;
}

/* Without an encoder nothing shows the model a schema, and without a parser nothing reads the answer. */
static int check_format(const struct ds4_json *body, struct ds4_api_error *error)
{
    const struct ds4_json *type = ds4_json_find(ds4_json_find(body, "response_format"), "type");

    if (ds4_json_find(body, "response_format") == NULL ||
        (ds4_json_type(type) == DS4_JSON_STRING &&
         ds4_str_equal(ds4_json_str(type), DS4_STR("text"))))
        return 0;
    return ds4_api_fail(error, "unsupported_value", "response_format",
                        "response_format other than text is not supported here: "
                        "/v1/chat/completions has it");
}

/* A list of ids is one prompt; any other list holds prompts. */
static bool is_list_of_prompts(const struct ds4_json *prompt)
{
    return ds4_json_type(prompt) == DS4_JSON_ARRAY &&
           ds4_json_type(ds4_json_at(prompt, 0)) != DS4_JSON_INT;
}

static int read(struct ds4_answer *answer, struct ds4_body *body, struct ds4_chat_prompt *unused,
                struct ds4_api_error *error)
{
    struct reader r = {.answer = answer, .error = error, .parse_special = true};
    const struct ds4_json *prompt = ds4_json_find(body->json, "prompt");
    struct ds4_request *first = ds4_answer_add_request(answer, 0, error);
    bool list = is_list_of_prompts(prompt);
    int32_t n_prompt = list ? (int32_t)ds4_json_len(prompt) : 1;

    (void)unused;
    if (first == NULL || ds4_intake_model(body->json, answer->context, first, error) != 0 ||
        ds4_params_refuse(body->json, answer->dialect->api, error) != 0 ||
        check_format(body->json, error) != 0 || ds4_intake_stream(body->json, answer, error) != 0 ||
        read_params(&r, body->json, first) != 0 || read_suffix(&r, body->json) != 0)
        return -1;
    if (prompt == NULL)
        return ds4_api_fail(error, "missing_field", "prompt", "prompt is required");
    if (n_prompt < 1 || ds4_json_len(prompt) > (list ? DS4_MAX_CHOICES : SIZE_MAX))
        return ds4_api_fail(error, "invalid_value", "prompt", "prompt must hold 1 to %d prompts",
                            DS4_MAX_CHOICES);
    if (ds4_intake_count(body->json, answer->context, DS4_MAX_CHOICES / n_prompt, &r.n, error) != 0)
        return -1;
    answer->n_per_prompt = r.n;
    answer->state =
        ds4_arena_take_array(&first->arena, DS4_MAX_CHOICES, sizeof(struct ds4_completion));
    if (answer->state == NULL)
        return ds4_api_fail(error, "internal_error", NULL, "no memory for the choices");
    for (int32_t p = 0; p < n_prompt; p++)
        if (add_choices(&r, body->json, list ? ds4_json_at(prompt, (size_t)p) : prompt, p, first,
                        error) != 0)
            return -1;
    for (int32_t i = 0; i < answer->n_choice; i++)
        answer->choice[i].req->n_choice = answer->n_choice;
    return 0;
}

int ds4_completions_request_parse(struct ds4_answer *answer, struct ds4_api_error *error)
{
    return ds4_intake_run(answer, read, error);
}
