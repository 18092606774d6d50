/* The table of refusals: code -> status and type words of both error dialects.
 *
 * Wordings of context overflow are an interface: clients find them by regular expression and start
 * compaction, so they are written here once and nowhere else.  A shortage of resources never uses
 * them. */
#include "router/api/error.h"

#include "common/json_write.h"
#include "common/log.h"

#include <stdarg.h>
#include <stdio.h>

#define DS4_RETRY_MIN_S 1
#define DS4_RETRY_MAX_S 120

struct row {
    const char *code;
    int status;
    const char *openai_type;
    const char *anthropic_type;
};

static const struct row table[] = {
    {"invalid_json", 400, "invalid_request_error", "invalid_request_error"},
    {"invalid_value", 400, "invalid_request_error", "invalid_request_error"},
    {"missing_field", 400, "invalid_request_error", "invalid_request_error"},
    {"unsupported_value", 400, "invalid_request_error", "invalid_request_error"},
    {"fim_unsupported", 400, "invalid_request_error", "invalid_request_error"},
    {"unknown_tool_call_id", 400, "invalid_request_error", "invalid_request_error"},
    {"context_length_exceeded", 400, "invalid_request_error", "invalid_request_error"},
    {"invalid_api_key", 401, "authentication_error", "authentication_error"},
    {"permission_denied", 403, "permission_error", "permission_error"},
    {"model_not_found", 404, "not_found_error", "not_found_error"},
    {"endpoint_not_supported", 404, "not_found_error", "not_found_error"},
    {"response_not_found", 404, "not_found_error", "not_found_error"},
    {"method_not_allowed", 405, "invalid_request_error", "invalid_request_error"},
    {"queue_timeout", 408, "timeout_error", "timeout_error"},
    {"request_too_large", 413, "invalid_request_error", "request_too_large"},
    {"unsupported_encoding", 415, "invalid_request_error", "invalid_request_error"},
    {"schema_unsupported", 422, "invalid_request_error", "invalid_request_error"},
    {"queue_full", 429, "rate_limit_error", "rate_limit_error"},
    {"rate_limited", 429, "rate_limit_error", "rate_limit_error"},
    {"kv_capacity", 429, "rate_limit_error", "rate_limit_error"},
    {"internal_error", 500, "server_error", "api_error"},
    {"nonfinite_logits", 500, "server_error", "api_error"},
    {"tool_choice_unsatisfied", 500, "server_error", "api_error"},
    {"loading", 503, "server_error", "overloaded_error"},
    {"draining", 503, "server_error", "overloaded_error"},
    {"pipeline_restarted", 503, "server_error", "overloaded_error"},
    {"stage_down", 503, "server_error", "overloaded_error"},
    {"poisoned_request", 503, "server_error", "overloaded_error"},
};

static const struct row *find_row(const char *code)
{
    const size_t n = sizeof(table) / sizeof(table[0]);

    for (size_t i = 0; i < n; i++)
        if (strcmp(table[i].code, code) == 0)
            return &table[i];
    return find_row("internal_error");
}

int ds4_api_fail(struct ds4_api_error *error, const char *code, const char *param, const char *fmt,
                 ...)
{
    va_list args;

    *error = (struct ds4_api_error){.code = code};
    va_start(args, fmt);
    (void)vsnprintf(error->message, sizeof(error->message), fmt, args);
    va_end(args);
    if (param != NULL)
        (void)snprintf(error->param, sizeof(error->param), "%s", param);
    return -1;
}

static const char *code_of_err(enum ds4_code code)
{
    switch (code) {
    case DS4_E_INVALID:
        return "invalid_value";
    case DS4_E_TOO_LONG:
        return "request_too_large";
    case DS4_E_BUSY:
        return "kv_capacity";
    case DS4_E_UNAVAILABLE:
        return "pipeline_restarted";
    case DS4_E_TIMEOUT:
        return "queue_timeout";
    case DS4_OK:
    case DS4_E_CANCELLED:
    case DS4_E_NOMEM:
    case DS4_E_IO:
    case DS4_E_CORRUPT:
    case DS4_E_PROTOCOL:
    case DS4_E_BUG:
    case DS4_N_CODES:
        break;
    }
    return "internal_error";
}

int ds4_api_fail_reason(struct ds4_api_error *error, enum ds4_reason reason,
                        const struct ds4_err *err, int32_t retry_after_ms)
{
    const char *code = reason == DS4_REASON_NONE ? code_of_err(err->code) : ds4_reason_text(reason);

    if (strcmp(code, "internal_error") == 0) {
        /* What went wrong inside is for the operator; the client gets the request's id. */
        ds4_log(DS4_LOG_ERROR, "api.internal", "error=\"%s\"", err->msg);
        return ds4_api_fail(error, code, NULL, "internal error, see the server's log");
    }
    (void)ds4_api_fail(error, code, NULL, "%s",
                       err->msg[0] != '\0' ? err->msg : ds4_code_text(err->code));
    if (reason == DS4_REASON_KV_CAPACITY && err->code == DS4_E_INVALID)
        error->status = 400; /* can never fit: waiting would not help */
    error->retry_after_ms = retry_after_ms;
    return -1;
}

int ds4_api_fail_err(struct ds4_api_error *error, const char *param, const struct ds4_err *err)
{
    (void)ds4_api_fail_reason(error, DS4_REASON_NONE, err, 0);
    if (param != NULL)
        (void)snprintf(error->param, sizeof(error->param), "%s", param);
    return -1;
}

int ds4_api_fail_context(struct ds4_api_error *error, enum ds4_error_style style,
                         int32_t n_prompt_tok, int32_t n_context_tok)
{
    if (style == DS4_STYLE_ANTHROPIC)
        (void)ds4_api_fail(error, "context_length_exceeded", NULL,
                           "prompt is too long: %d tokens > %d maximum", n_prompt_tok,
                           n_context_tok);
    else
        (void)ds4_api_fail(error, "context_length_exceeded", "messages",
                           "This model's maximum context length is %d tokens. However, your prompt "
                           "has %d tokens.",
                           n_context_tok, n_prompt_tok);
    error->n_prompt_tok = n_prompt_tok;
    error->n_context_tok = n_context_tok;
    return -1;
}

static void write_openai(const struct ds4_api_error *error, const struct row *row, struct ds4_jw *w)
{
    ds4_jw_object(w);
    ds4_jw_key(w, "error");
    ds4_jw_object(w);
    ds4_jw_key(w, "message");
    ds4_jw_text(w, error->message);
    ds4_jw_key(w, "type");
    ds4_jw_text(w, row->openai_type);
    ds4_jw_key(w, "param");
    ds4_jw_text(w, error->param[0] == '\0' ? NULL : error->param);
    ds4_jw_key(w, "code");
    ds4_jw_text(w, row->code);
    if (error->n_context_tok > 0) {
        ds4_jw_key(w, "n_prompt_tokens");
        ds4_jw_int(w, error->n_prompt_tok);
        ds4_jw_key(w, "n_ctx");
        ds4_jw_int(w, error->n_context_tok);
    }
    ds4_jw_end(w);
    ds4_jw_end(w);
}

static void write_anthropic(const struct ds4_api_error *error, const struct row *row,
                            const char *request_id, struct ds4_jw *w)
{
    ds4_jw_object(w);
    ds4_jw_key(w, "type");
    ds4_jw_text(w, "error");
    ds4_jw_key(w, "error");
    ds4_jw_object(w);
    ds4_jw_key(w, "type");
    ds4_jw_text(w, row->anthropic_type);
    ds4_jw_key(w, "message");
    ds4_jw_text(w, error->message);
    ds4_jw_end(w);
    ds4_jw_key(w, "request_id");
    ds4_jw_text(w, request_id);
    ds4_jw_end(w);
}

void ds4_api_error_write(const struct ds4_api_error *error, enum ds4_error_style style,
                         const char *request_id, struct ds4_buf *out)
{
    const struct row *row = find_row(error->code);
    struct ds4_jw w;

    ds4_jw_init(&w, out);
    if (style == DS4_STYLE_ANTHROPIC)
        write_anthropic(error, row, request_id, &w);
    else
        write_openai(error, row, &w);
}

int ds4_api_error_status(const struct ds4_api_error *error)
{
    return error->status != 0 ? error->status : find_row(error->code)->status;
}

static void set_retry_headers(const struct ds4_api_error *error, int status, struct ds4_exchange *x)
{
    int64_t ms = error->retry_after_ms;
    int64_t seconds;
    char text[32];

    if (status != 429 && status != 503)
        return;
    if (ms < DS4_RETRY_MIN_S * 1000)
        ms = DS4_RETRY_MIN_S * 1000;
    if (ms > DS4_RETRY_MAX_S * 1000)
        ms = DS4_RETRY_MAX_S * 1000;
    seconds = (ms + 999) / 1000;
    (void)snprintf(text, sizeof(text), "%lld", (long long)seconds);
    ds4_exchange_set_header(x, "retry-after", text);
    (void)snprintf(text, sizeof(text), "%lld", (long long)ms);
    ds4_exchange_set_header(x, "retry-after-ms", text);
}

void ds4_api_error_reply(const struct ds4_api_error *error, enum ds4_error_style style,
                         struct ds4_exchange *x)
{
    int status = ds4_api_error_status(error);
    struct ds4_buf body;

    ds4_buf_init(&body, SIZE_MAX / 2);
    ds4_api_error_write(error, style, ds4_exchange_id(x), &body);
    set_retry_headers(error, status, x);
    if (error->code != NULL && strcmp(error->code, "draining") == 0)
        ds4_exchange_end_connection(x); /* the client's next one may reach another server */
    if (style == DS4_STYLE_ANTHROPIC)
        ds4_exchange_set_header(x, "request-id", ds4_exchange_id(x));
    ds4_exchange_reply(x, status, "application/json", ds4_buf_view(&body));
    ds4_buf_deinit(&body);
}
