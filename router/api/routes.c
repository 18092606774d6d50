/* The route table (step 1).  Paths that other servers offer and we do not are named, so that a client
 * learns what is missing instead of guessing. */
#include "router/api/routes.h"

#include "router/api/admin.h"
#include "router/api/answer.h"
#include "router/api/anthropic.h"
#include "router/api/error.h"
#include "router/api/health.h"
#include "router/api/models.h"
#include "router/api/openai_chat.h"
#include "router/api/openai_completions.h"
#include "router/api/openai_responses.h"
#include "router/api/page.h"
#include "router/api/responses_store.h"
#include "router/api/stats.h"
#include "router/api/tokens.h"

#include <stdio.h>

static void chat(struct ds4_exchange *x, void *context)
{
    ds4_answer_start(context, &ds4_dialect_openai_chat, x);
}

static void completions(struct ds4_exchange *x, void *context)
{
    ds4_answer_start(context, &ds4_dialect_completions, x);
}

static void responses(struct ds4_exchange *x, void *context)
{
    ds4_answer_start(context, &ds4_dialect_responses, x);
}

static void messages(struct ds4_exchange *x, void *context)
{
    ds4_answer_start(context, &ds4_dialect_anthropic, x);
}

static void not_offered(struct ds4_exchange *x, void *context)
{
    struct ds4_str path = ds4_exchange_path(x);
    struct ds4_api_error error;

    (void)context;
    (void)ds4_api_fail(&error, "endpoint_not_supported", NULL,
                       "%.*s is not offered here; this server has /v1/chat/completions, "
                       "/v1/completions, /v1/responses, /v1/messages, /v1/models, "
                       "/tokenize, /detokenize and /apply-template",
                       DS4_STR_ARG(path));
    ds4_api_error_reply(&error, DS4_STYLE_OPENAI, x);
}

#define DS4_ROUTE_METRICS 0

static struct ds4_route routes[] = {
    [DS4_ROUTE_METRICS] = {"/metrics", DS4_METHOD_GET, false, ds4_metrics_handle, "metrics"},
    {"/v1/chat/completions", DS4_METHOD_POST, false, chat, "chat"},
    {"/chat/completions", DS4_METHOD_POST, false, chat, "chat"},
    {"/v1/completions", DS4_METHOD_POST, false, completions, "completions"},
    {"/v1/responses", DS4_METHOD_POST, false, responses, "responses"},
    {"/responses", DS4_METHOD_POST, false, responses, "responses"},
    {"/v1/responses/input_tokens", DS4_METHOD_POST, false, ds4_input_tokens_handle, "count_tokens"},
    {"/v1/responses/*", DS4_METHOD_GET, false, ds4_responses_get_handle, "responses"},
    {"/v1/responses/*", DS4_METHOD_DELETE, false, ds4_responses_delete_handle, "responses"},
    {"/v1/responses/*/cancel", DS4_METHOD_POST, false, ds4_responses_cancel_handle, "responses"},
    {"/v1/messages", DS4_METHOD_POST, false, messages, "messages"},
    {"/v1/messages/count_tokens", DS4_METHOD_POST, false, ds4_count_tokens_handle, "count_tokens"},
    {"/v1/models", DS4_METHOD_GET, false, ds4_models_handle, "models"},
    {"/models", DS4_METHOD_GET, false, ds4_models_handle, "models"},
    {"/v1/models/*", DS4_METHOD_GET, false, ds4_model_handle, "models"},
    {"/tokenize", DS4_METHOD_POST, false, ds4_tokenize_handle, "tokenize"},
    {"/detokenize", DS4_METHOD_POST, false, ds4_detokenize_handle, "detokenize"},
    {"/apply-template", DS4_METHOD_POST, false, ds4_apply_template_handle, "apply_template"},
    {"/health", DS4_METHOD_GET, true, ds4_health_handle, "health"},
    {"/healthz", DS4_METHOD_GET, true, ds4_health_handle, "health"},
    {"/ready", DS4_METHOD_GET, true, ds4_ready_handle, "health"},
    {"/readyz", DS4_METHOD_GET, true, ds4_ready_handle, "health"},
    {"/v1/health", DS4_METHOD_GET, true, ds4_health_handle, "health"},
    {"/livez", DS4_METHOD_GET, true, ds4_livez_handle, "livez"},
    {"/version", DS4_METHOD_GET, true, ds4_version_handle, "version"},
    {"/", DS4_METHOD_GET, true, ds4_page_handle, "root"},
    {"/v1/stats", DS4_METHOD_GET, false, ds4_stats_handle, "stats"},
    {"/admin/drain", DS4_METHOD_POST, false, ds4_admin_drain_handle, "admin"},
    {"/admin/undrain", DS4_METHOD_POST, false, ds4_admin_undrain_handle, "admin"},
    {"/admin/stage/*/restart", DS4_METHOD_POST, false, ds4_admin_restart_handle, "admin"},
    {"/v1/embeddings", DS4_METHOD_POST, false, not_offered, "unsupported"},
    {"/v1/rerank", DS4_METHOD_POST, false, not_offered, "unsupported"},
    {"/v1/audio/*", DS4_METHOD_POST, false, not_offered, "unsupported"},
    {"/v1/images/*", DS4_METHOD_POST, false, not_offered, "unsupported"},
    {"/v1/moderations", DS4_METHOD_POST, false, not_offered, "unsupported"},
    {"/v1/realtime", DS4_METHOD_POST | DS4_METHOD_GET, false, not_offered, "unsupported"},
    {"/v1/batches", DS4_METHOD_POST | DS4_METHOD_GET, false, not_offered, "unsupported"},
    {"/v1/files", DS4_METHOD_POST | DS4_METHOD_GET, false, not_offered, "unsupported"},
};

const struct ds4_route *ds4_routes(const struct ds4_api_context *context, size_t *n)
{
    routes[DS4_ROUTE_METRICS].open =
        context->config->metrics.open || ds4_config_is_loopback(context->config->http.listen);
    *n = sizeof(routes) / sizeof(routes[0]);
    return routes;
}

const struct ds4_route *ds4_routes_metrics(void)
{
    return &routes[DS4_ROUTE_METRICS];
}

void ds4_routes_refuse(struct ds4_exchange *x, int status, const char *code, const char *message)
{
    enum ds4_error_style style = ds4_str_starts(ds4_exchange_path(x), DS4_STR("/v1/messages"))
                                     ? DS4_STYLE_ANTHROPIC
                                     : DS4_STYLE_OPENAI;
    struct ds4_api_error error;

    (void)ds4_api_fail(&error, code, NULL, "%s", message);
    error.status = status;
    ds4_api_error_reply(&error, style, x);
}
