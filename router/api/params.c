/* Sampling, limits and stops of a request (step 2).
 *
 * Every refusal names the member and the value's range; null always means absent; texts like "5" are
 * not numbers.  What we do not offer is refused rather than ignored when ignoring it would change the
 * answer. */
#include "router/api/params.h"

#include "router/text/vocab.h"

#include <float.h>
#include <stdio.h>
#include <sys/random.h>

#define DS4_MAX_STOP_BYTES  ((size_t)4096)
#define DS4_MAX_TOP_K       INT32_MAX
#define DS4_BIAS_LIMIT      100.0
#define DS4_TOKEN_COUNT_MAX ((int64_t)1 << 30)

static int fail(struct ds4_api_error *error, const char *key, const struct ds4_err *err)
{
    return ds4_api_fail(error, "invalid_value", key, "%s", err->msg);
}

static int read_float(const struct ds4_json *body, const char *key, double min, double max,
                      float *out, struct ds4_api_error *error)
{
    struct ds4_err err = {0};
    double value = (double)*out;

    if (ds4_json_get_double(body, "", key, min, max, &value, &err) != 0)
        return fail(error, key, &err);
    *out = (float)value;
    return 0;
}

static int read_int(const struct ds4_json *body, const char *key, int64_t min, int64_t max,
                    int64_t *out, struct ds4_api_error *error)
{
    struct ds4_err err = {0};

    if (ds4_json_get_int(body, "", key, min, max, out, &err) != 0)
        return fail(error, key, &err);
    return 0;
}

static int read_bool(const struct ds4_json *body, const char *key, bool *out,
                     struct ds4_api_error *error)
{
    struct ds4_err err = {0};

    if (ds4_json_get_bool(body, "", key, out, &err) != 0)
        return fail(error, key, &err);
    return 0;
}

static int read_filters(const struct ds4_json *body, struct ds4_sampling *s,
                        struct ds4_api_error *error)
{
    int64_t top_k = s->top_k;

    if (read_float(body, "temperature", 0.0, 2.0, &s->temperature, error) != 0 ||
        read_float(body, "top_p", FLT_MIN, 1.0, &s->top_p, error) != 0 ||
        read_float(body, "min_p", 0.0, 1.0 - FLT_EPSILON, &s->min_p, error) != 0 ||
        read_float(body, "presence_penalty", -2.0, 2.0, &s->presence_penalty, error) != 0 ||
        read_float(body, "frequency_penalty", -2.0, 2.0, &s->frequency_penalty, error) != 0 ||
        read_float(body, "repetition_penalty", FLT_MIN, 2.0, &s->repetition_penalty, error) != 0 ||
        read_int(body, "top_k", -1, DS4_MAX_TOP_K, &top_k, error) != 0)
        return -1;
    s->top_k = top_k < 0 ? 0 : (int32_t)top_k;
    return 0;
}

static int read_seed(const struct ds4_json *body, struct ds4_sampling *s,
                     struct ds4_api_error *error)
{
    const struct ds4_json *value = ds4_json_find(body, "seed");
    int64_t seed = 0;

    if (value == NULL) {
        /* 48 bits: the seed we report must survive a client that keeps numbers as doubles. */
        (void)getrandom(&seed, 6, 0);
    } else if (read_int(body, "seed", INT64_MIN, INT64_MAX, &seed, error) != 0) {
        return -1;
    }
    s->seed = (uint64_t)seed;
    return 0;
}

/* ---- token id lists ----------------------------------------------------------------------------- */

static int check_id(int64_t id, const struct ds4_vocab *vocab, const char *key,
                    struct ds4_api_error *error)
{
    if (id >= 0 && id < vocab->n_token)
        return 0;
    return ds4_api_fail(error, "invalid_value", key, "%s: %lld is no token id, ids are 0 to %d",
                        key, (long long)id, vocab->n_token - 1);
}

/* Parses a key of logit_bias: decimal digits only. */
static int64_t id_of_key(struct ds4_str key)
{
    int64_t id = 0;

    if (key.len == 0 || key.len > 9)
        return -1;
    for (size_t i = 0; i < key.len; i++) {
        if (key.ptr[i] < '0' || key.ptr[i] > '9')
            return -1;
        id = id * 10 + (key.ptr[i] - '0');
    }
    return id;
}

static int read_bias(const struct ds4_json *body, const struct ds4_vocab *vocab,
                     struct ds4_request *req, struct ds4_api_error *error)
{
    const struct ds4_json *map = NULL;
    struct ds4_err err = {0};
    int32_t *ids;
    float *values;
    int32_t n = 0;

    if (ds4_json_get_object(body, "", "logit_bias", &map, &err) != 0)
        return fail(error, "logit_bias", &err);
    if (map == NULL || ds4_json_len(map) == 0)
        return 0;
    if (ds4_json_len(map) > DS4_MAX_LOGIT_BIAS)
        return ds4_api_fail(error, "invalid_value", "logit_bias",
                            "logit_bias has %zu entries, at most %d", ds4_json_len(map),
                            DS4_MAX_LOGIT_BIAS);
    ids = ds4_arena_take_array(&req->arena, ds4_json_len(map), sizeof(*ids));
    values = ds4_arena_take_array(&req->arena, ds4_json_len(map), sizeof(*values));
    if (ids == NULL || values == NULL)
        return ds4_api_fail(error, "internal_error", NULL, "no memory for logit_bias");
    for (struct ds4_json_member m = ds4_json_first(map); m.value != NULL; m = ds4_json_next(m)) {
        int64_t id = id_of_key(m.key);
        double value = ds4_json_double(m.value);
        bool number =
            ds4_json_type(m.value) == DS4_JSON_INT || ds4_json_type(m.value) == DS4_JSON_DOUBLE;

        if (id < 0)
            return ds4_api_fail(error, "invalid_value", "logit_bias",
                                "logit_bias: \"%.*s\" is no token id", DS4_STR_ARG(m.key));
        if (check_id(id, vocab, "logit_bias", error) != 0)
            return -1;
        if (!number || value < -DS4_BIAS_LIMIT || value > DS4_BIAS_LIMIT)
            return ds4_api_fail(error, "invalid_value", "logit_bias",
                                "logit_bias.%lld must be a number from -100 to 100", (long long)id);
        ids[n] = (int32_t)id;
        values[n++] = (float)value;
    }
    req->sampling.n_bias = n;
    req->sampling.bias_id = ids;
    req->sampling.bias = values;
    return 0;
}

/* An array of token ids; *out is NULL when absent or empty. */
static int read_ids(const struct ds4_json *body, const char *key, size_t max,
                    const struct ds4_vocab *vocab, struct ds4_arena *arena, const int32_t **out,
                    int32_t *n, struct ds4_api_error *error)
{
    const struct ds4_json *list = NULL;
    struct ds4_err err = {0};
    int32_t *ids;

    *n = 0;
    if (ds4_json_get_array(body, "", key, &list, &err) != 0)
        return fail(error, key, &err);
    if (list == NULL || ds4_json_len(list) == 0)
        return 0;
    if (ds4_json_len(list) > max)
        return ds4_api_fail(error, "invalid_value", key, "%s has %zu entries, at most %zu", key,
                            ds4_json_len(list), max);
    ids = ds4_arena_take_array(arena, ds4_json_len(list), sizeof(*ids));
    if (ids == NULL)
        return ds4_api_fail(error, "internal_error", NULL, "no memory for %s", key);
    for (size_t i = 0; i < ds4_json_len(list); i++) {
        if (ds4_json_type(ds4_json_at(list, i)) != DS4_JSON_INT)
            return ds4_api_fail(error, "invalid_value", key, "%s[%zu] must be an integer", key, i);
        if (check_id(ds4_json_int(ds4_json_at(list, i)), vocab, key, error) != 0)
            return -1;
        ids[i] = (int32_t)ds4_json_int(ds4_json_at(list, i));
    }
    *out = ids;
    *n = (int32_t)ds4_json_len(list);
    return 0;
}

/* ---- stops --------------------------------------------------------------------------------------- */

static int add_stop_text(struct ds4_request *req, const struct ds4_json *value, const char *key,
                         struct ds4_api_error *error)
{
    struct ds4_str text;

    if (ds4_json_type(value) != DS4_JSON_STRING)
        return ds4_api_fail(error, "invalid_value", key, "%s must be a string or a list of strings",
                            key);
    text = ds4_json_str(value);
    if (text.len == 0)
        return 0;
    if (text.len > DS4_MAX_STOP_BYTES)
        return ds4_api_fail(error, "invalid_value", key, "a stop string is %zu bytes, at most %zu",
                            text.len, DS4_MAX_STOP_BYTES);
    if (req->n_stop_text == DS4_MAX_STOP_TEXTS)
        return ds4_api_fail(error, "invalid_value", key, "%s has more than %d strings", key,
                            DS4_MAX_STOP_TEXTS);
    text = ds4_arena_copy(&req->arena, text);
    if (text.ptr == NULL)
        return ds4_api_fail(error, "internal_error", NULL, "no memory for %s", key);
    req->stop_text[req->n_stop_text++] = text;
    return 0;
}

static int read_stops(const struct ds4_json *body, const char *key, const struct ds4_vocab *vocab,
                      struct ds4_request *req, struct ds4_api_error *error)
{
    const struct ds4_json *stop = ds4_json_find(body, key);
    const size_t room = (size_t)(DS4_MAX_STOP_IDS - req->n_stop_id);
    const int32_t *ids = NULL;
    int32_t n = 0;

    if (ds4_json_type(stop) == DS4_JSON_ARRAY) {
        for (size_t i = 0; i < ds4_json_len(stop); i++)
            if (add_stop_text(req, ds4_json_at(stop, i), key, error) != 0)
                return -1;
    } else if (stop != NULL && add_stop_text(req, stop, key, error) != 0) {
        return -1;
    }
    if (read_ids(body, "stop_token_ids", room, vocab, &req->arena, &ids, &n, error) != 0)
        return -1;
    for (int32_t i = 0; i < n; i++)
        req->stop_id[req->n_stop_id++] = ids[i];
    if (read_bool(body, "include_stop_str_in_output", &req->keep_stop_text, error) != 0)
        return -1;
    return read_bool(body, "ignore_eos", &req->ignore_stop, error);
}

/* The model's own stop ids: the end of a turn, and the openers of a turn it must not imagine. */
static void add_model_stops(const struct ds4_vocab *vocab, struct ds4_request *req)
{
    static const enum ds4_special stops[] = {DS4_SPECIAL_EOS,
                                             DS4_SPECIAL_BOS,
                                             DS4_SPECIAL_USER,
                                             DS4_SPECIAL_ASSISTANT,
                                             DS4_SPECIAL_LATEST_REMINDER,
                                             DS4_SPECIAL_SYSTEM};

    for (size_t i = 0; i < sizeof(stops) / sizeof(stops[0]); i++) {
        int32_t id = ds4_vocab_special(vocab, stops[i]);

        if (id >= 0)
            req->stop_id[req->n_stop_id++] = id;
    }
    req->n_model_stop_id = req->n_stop_id;
}

/* ---- limits and log-probabilities ------------------------------------------------------------------ */

static int read_limits(const struct ds4_json *body, const struct ds4_param_names *names,
                       struct ds4_request *req, struct ds4_api_error *error)
{
    int64_t value, min_new = 0;

    for (size_t i = 0; i < DS4_PARAM_LIMITS; i++) {
        value = 0;
        if (names->limits[i] == NULL || ds4_json_find(body, names->limits[i]) == NULL)
            continue;
        if (read_int(body, names->limits[i], 1, DS4_TOKEN_COUNT_MAX, &value, error) != 0)
            return -1;
        if (req->max_new_asked == 0 || value < req->max_new_asked)
            req->max_new_asked = (int32_t)value;
    }
    req->max_new = req->max_new_asked;
    if (read_int(body, "min_tokens", 0, DS4_TOKEN_COUNT_MAX, &min_new, error) != 0)
        return -1;
    if (req->max_new_asked > 0 && min_new > req->max_new_asked)
        return ds4_api_fail(error, "invalid_value", "min_tokens",
                            "min_tokens is %lld, more than %s %d", (long long)min_new,
                            names->limits[0], req->max_new_asked);
    req->sampling.min_new_tok = (int32_t)min_new;
    return 0;
}

int ds4_params_read(const struct ds4_json *body, const struct ds4_api_context *context,
                    const struct ds4_param_names *names, struct ds4_request *req,
                    struct ds4_api_error *error)
{
    struct ds4_sampling *s = &req->sampling;

    s->temperature = (float)context->config->sampling.temperature;
    s->top_p = (float)context->config->sampling.top_p;
    add_model_stops(context->vocab, req);
    if (read_filters(body, s, error) != 0 || read_seed(body, s, error) != 0 ||
        read_bias(body, context->vocab, req, error) != 0 ||
        read_ids(body, "allowed_token_ids", DS4_MAX_ALLOWED_IDS, context->vocab, &req->arena,
                 &s->allowed_id, &s->n_allowed, error) != 0 ||
        read_stops(body, names->stop, context->vocab, req, error) != 0)
        return -1;
    return read_limits(body, names, req, error);
}

int ds4_params_read_logprobs(const struct ds4_json *body, struct ds4_request *req,
                             struct ds4_api_error *error)
{
    bool wanted = false;
    int64_t top = 0;

    if (read_bool(body, "logprobs", &wanted, error) != 0 ||
        read_int(body, "top_logprobs", 0, DS4_MAX_TOP_LOGPROBS, &top, error) != 0)
        return -1;
    if (top > 0 && !wanted)
        return ds4_api_fail(error, "invalid_value", "top_logprobs",
                            "top_logprobs needs logprobs to be true");
    req->sampling.n_logprobs = wanted ? (int32_t)top : -1;
    return 0;
}

static const void *copy_array(struct ds4_arena *arena, const void *from, int32_t n, size_t size)
{
    void *to = n == 0 ? NULL : ds4_arena_take_array(arena, (size_t)n, size);

    if (to != NULL)
        memcpy(to, from, (size_t)n * size);
    return to;
}

int ds4_params_copy(const struct ds4_request *from, struct ds4_request *to,
                    struct ds4_api_error *error)
{
    struct ds4_sampling *s = &to->sampling;

    *s = from->sampling;
    s->seed += (uint64_t)to->choice;
    s->bias_id = copy_array(&to->arena, s->bias_id, s->n_bias, sizeof(*s->bias_id));
    s->bias = copy_array(&to->arena, s->bias, s->n_bias, sizeof(*s->bias));
    s->allowed_id = copy_array(&to->arena, s->allowed_id, s->n_allowed, sizeof(*s->allowed_id));
    if ((s->n_bias > 0 && (s->bias_id == NULL || s->bias == NULL)) ||
        (s->n_allowed > 0 && s->allowed_id == NULL))
        return ds4_api_fail(error, "internal_error", NULL, "no memory for a further choice");
    to->max_new = from->max_new;
    to->max_new_asked = from->max_new_asked;
    to->ignore_stop = from->ignore_stop;
    to->keep_stop_text = from->keep_stop_text;
    to->n_stop_id = from->n_stop_id;
    to->n_model_stop_id = from->n_model_stop_id;
    memcpy(to->stop_id, from->stop_id, sizeof(to->stop_id));
    for (int32_t i = 0; i < from->n_stop_text; i++) {
        to->stop_text[i] = ds4_arena_copy(&to->arena, from->stop_text[i]);
        if (to->stop_text[i].ptr == NULL)
            return ds4_api_fail(error, "internal_error", NULL, "no memory for a further choice");
        to->n_stop_text++;
    }
    return 0;
}

/* A value that asks for nothing: false, and what is empty. */
static bool is_idle(const struct ds4_json *value)
{
    switch (ds4_json_type(value)) {
    case DS4_JSON_BOOL:
        return !ds4_json_bool(value);
    case DS4_JSON_STRING:
        return ds4_json_str(value).len == 0;
    case DS4_JSON_ARRAY:
    case DS4_JSON_OBJECT:
        return ds4_json_len(value) == 0;
    default:
        return false;
    }
}

/* Values of members not offered that say what happens anyway; whole parameter sets come with them. */
static bool is_usual(const struct ds4_json *body, const char *name, const struct ds4_json *value)
{
    const struct ds4_json *n = ds4_json_find(body, "n");
    int64_t n_choice = ds4_json_type(n) == DS4_JSON_INT ? ds4_json_int(n) : 1;

    if (strcmp(name, "best_of") == 0)
        return ds4_json_type(value) == DS4_JSON_INT && ds4_json_int(value) >= 1 &&
               ds4_json_int(value) <= n_choice;
    if (strcmp(name, "length_penalty") == 0)
        return ds4_json_type(value) != DS4_JSON_STRING && ds4_json_double(value) == 1.0;
    return false;
}

/* Text is all there is to hear of this model. */
static int check_modalities(const struct ds4_json *body, struct ds4_api_error *error)
{
    const struct ds4_json *list = NULL;
    struct ds4_err err = {0};

    if (ds4_json_get_array(body, "", "modalities", &list, &err) != 0)
        return fail(error, "modalities", &err);
    for (size_t i = 0; i < ds4_json_len(list); i++) {
        const struct ds4_json *item = ds4_json_at(list, i);

        if (ds4_json_type(item) != DS4_JSON_STRING ||
            !ds4_str_equal(ds4_json_str(item), DS4_STR("text")))
            return ds4_api_fail(error, "unsupported_value", "modalities",
                                "modalities[%zu] must be \"text\": this model writes text only", i);
    }
    return 0;
}

int ds4_params_refuse(const struct ds4_json *body, enum ds4_api api, struct ds4_api_error *error)
{
    enum { CHAT = 1 << DS4_API_CHAT, COMPLETIONS = 1 << DS4_API_COMPLETIONS, EVERY = 15 };
    static const struct {
        const char *name;
        int in; /* the dialects that refuse it; the others read it themselves */
    } refused[] = {
        {"best_of", EVERY},
        {"use_beam_search", EVERY},
        {"length_penalty", EVERY},
        {"bad_words", EVERY},
        {"chat_template", EVERY},
        {"audio", EVERY},
        {"prompt_logprobs", EVERY},
        {"grammar", EVERY},
        {"echo", EVERY - COMPLETIONS},
        {"guided_grammar", EVERY - CHAT},
        {"guided_json", EVERY - CHAT},
        {"guided_regex", EVERY - CHAT},
        {"guided_choice", EVERY - CHAT},
        {"structured_outputs", EVERY - CHAT},
    };

    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        const struct ds4_json *value = ds4_json_find(body, refused[i].name);

        if (value == NULL || (refused[i].in & 1 << api) == 0 || is_idle(value) ||
            is_usual(body, refused[i].name, value))
            continue;
        return ds4_api_fail(error, "unsupported_value", refused[i].name,
                            "%s is not supported by this server", refused[i].name);
    }
    return api == DS4_API_CHAT ? check_modalities(body, error) : 0;
}
