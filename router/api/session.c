/* Tenant, salt and session of a request (step 2).
 *
 * Clients name their session in seven places; the order is that of how deliberate each is.  What a client
 * sends is only hashed, never compared or shown. */
#include "router/api/session.h"

#include "router/api/intake.h"
#include "router/exchange.h"

#include <stdio.h>
#include <xxhash.h>

static uint64_t hash(struct ds4_str text)
{
    return text.len == 0 ? 0 : XXH3_64bits(text.ptr, text.len) | 1; /* 0 is everybody's */
}

/* A member that may be there; anything but a string is as good as none. */
static struct ds4_str text_of(const struct ds4_json *body, const char *key)
{
    const struct ds4_json *value = ds4_json_find(body, key);

    if (value == NULL || ds4_json_type(value) != DS4_JSON_STRING)
        return (struct ds4_str){NULL, 0};
    return ds4_json_str(value);
}

static struct ds4_str session_name(const struct ds4_exchange *x, const struct ds4_json *body)
{
    static const char *const header[] = {"x-session-id", "x-session-affinity", "session-id",
                                         "thread-id", "x-claude-code-session-id"};
    struct ds4_str name = text_of(body, "prompt_cache_key");

    for (size_t i = 0; name.len == 0 && i < sizeof(header) / sizeof(header[0]); i++)
        name = ds4_exchange_header(x, header[i]);
    if (name.len == 0)
        name = text_of(body, "session_id");
    return name.len == 0 ? text_of(body, "user") : name;
}

int ds4_session_read(const struct ds4_answer *answer, const struct ds4_json *body,
                     struct ds4_request *req, struct ds4_api_error *error)
{
    struct ds4_str salt = {NULL, 0};
    struct ds4_err err = {0};
    bool cache = true;

    if (ds4_intake_switch(body, "", "cache_prompt", &cache, error) != 0)
        return -1;
    req->no_cache_reads = !cache;
    if (ds4_json_get_str(body, "", "cache_salt", &salt, &err) != 0)
        return ds4_api_fail(error, "invalid_value", "cache_salt", "%s", err.msg);
    ds4_exchange_offer_id(answer->x, text_of(body, "request_id"));
    (void)snprintf(req->id, sizeof(req->id), "%s", ds4_exchange_id(answer->x));
    req->tenant = hash(ds4_exchange_key(answer->x));
    req->salt = req->tenant;
    if (salt.len > 0)
        req->salt = XXH3_64bits_withSeed(salt.ptr, salt.len, req->tenant) | 1;
    req->affinity = hash(session_name(answer->x, body));
    return 0;
}
