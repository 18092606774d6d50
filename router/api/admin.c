/* Endpoints of the operator: who may use them, and what they set going.
 *
 * Nothing here waits: a drain or restart is asked for, and /health shows how far it is. */
#include "router/api/admin.h"

#include "common/clock.h"
#include "common/config.h"
#include "common/log.h"
#include "router/api/context.h"
#include "router/api/error.h"
#include "router/cluster.h"

#include <stdio.h>
#include <stdlib.h>

/* "127.0.0.1:8000" or "[::1]:8000" -> the address; a name other than localhost is foreign. */
static bool is_loopback_name(struct ds4_str authority)
{
    char name[64];
    size_t colon;

    if (ds4_str_starts(authority, DS4_STR("[")))
        colon = ds4_str_find(authority, DS4_STR("]"), 0);
    else
        colon = ds4_str_find(authority, DS4_STR(":"), 0);
    if (ds4_str_starts(authority, DS4_STR("[")))
        authority = ds4_str_skip(authority, 1), colon = colon == DS4_STR_NONE ? colon : colon - 1;
    if (colon != DS4_STR_NONE)
        authority = ds4_str_head(authority, colon);
    if (authority.len == 0 || authority.len >= sizeof(name))
        return false;
    memcpy(name, authority.ptr, authority.len);
    name[authority.len] = '\0';
    return strcmp(name, "localhost") == 0 || ds4_config_is_loopback(name);
}

/* The page a browser sent this from is our own: "http://" and then what it calls us. */
static bool is_same_origin(const struct ds4_exchange *x)
{
    struct ds4_str origin = ds4_exchange_header(x, "origin");

    if (origin.ptr == NULL)
        return true; /* no browser */
    return ds4_str_starts(origin, DS4_STR("http://")) &&
           ds4_str_equal(ds4_str_skip(origin, 7), ds4_exchange_authority(x));
}

/* A proxy on this machine is a local client, and nobody can tell one that adds nothing: INSTALL.md says
 * what it must not pass on. */
static const char *objection(const struct ds4_exchange *x)
{
    static const char *const proxied[] = {"x-forwarded-for",   "x-forwarded-host",
                                          "x-forwarded-proto", "x-real-ip",
                                          "forwarded",         "via"};

    if (!ds4_exchange_is_local(x))
        return "this path answers only on the machine the router runs on";
    for (size_t i = 0; i < sizeof(proxied) / sizeof(proxied[0]); i++)
        if (ds4_exchange_header(x, proxied[i]).ptr != NULL)
            return "this path is not offered through a proxy";
    if (!is_loopback_name(ds4_exchange_authority(x)) || !is_same_origin(x))
        return "this path is not offered to other web pages";
    return NULL;
}

static bool refused(struct ds4_exchange *x)
{
    const char *why = objection(x);
    struct ds4_api_error error;

    if (why == NULL)
        return false;
    (void)ds4_api_fail(&error, "permission_denied", NULL, "%s", why);
    ds4_api_error_reply(&error, DS4_STYLE_OPENAI, x);
    return true;
}

static void reply(struct ds4_exchange *x, int rc, const char *status, const struct ds4_err *err)
{
    struct ds4_api_error error;
    char body[64];

    if (rc != 0) {
        (void)ds4_api_fail_reason(
            &error, err->code == DS4_E_INVALID ? DS4_REASON_INVALID : DS4_REASON_STAGE_DOWN, err,
            0);
        ds4_api_error_reply(&error, DS4_STYLE_OPENAI, x);
        return;
    }
    (void)snprintf(body, sizeof(body), "{\"status\":\"%s\"}", status);
    ds4_exchange_reply(x, 202, "application/json", ds4_str_view(body));
}

void ds4_admin_drain_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    struct ds4_err err = {0};

    if (!refused(x))
        reply(x, ds4_cluster_rest(api->cluster, true, ds4_clock_ns(), &err), "draining", &err);
}

void ds4_admin_undrain_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    struct ds4_err err = {0};

    if (!refused(x))
        reply(x, ds4_cluster_rest(api->cluster, false, ds4_clock_ns(), &err), "serving", &err);
}

/* The number between "/admin/stage/" and "/restart"; -1 if it is none. */
static int32_t stage_of(struct ds4_str path)
{
    struct ds4_str digits = ds4_str_skip(path, strlen("/admin/stage/"));
    int32_t stage = 0;

    digits = ds4_str_head(digits, digits.len - strlen("/restart"));
    if (digits.len == 0 || digits.len > 4)
        return -1;
    for (size_t i = 0; i < digits.len; i++) {
        if (digits.ptr[i] < '0' || digits.ptr[i] > '9')
            return -1;
        stage = stage * 10 + (digits.ptr[i] - '0');
    }
    return stage;
}

void ds4_admin_restart_handle(struct ds4_exchange *x, void *context)
{
    const struct ds4_api_context *api = context;
    struct ds4_err err = {0};
    int rc;

    if (refused(x))
        return;
    rc = ds4_cluster_restart_stage(api->cluster, stage_of(ds4_exchange_path(x)), ds4_clock_ns(),
                                   &err);
    reply(x, rc, "restarting", &err);
}
