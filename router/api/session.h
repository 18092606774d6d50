/* Whose request it is: tenant, cache isolation and session, out of headers and body (step 2).
 *
 * A tenant is the API key that let the request in (only if the server has keys), `cache_salt` divides a
 * tenant's cache further, and the affinity key names a session: body prompt_cache_key, else the headers
 * x-session-id, x-session-affinity, session-id, thread-id, x-claude-code-session-id, else body
 * session_id, else user.  The session is never asked for correctness: it only chooses which slot to give up. */
#ifndef DS4_ROUTER_API_SESSION_H
#define DS4_ROUTER_API_SESSION_H

#include "common/json.h"
#include "router/api/answer.h"
#include "router/request.h"

/* Sets tenant, salt and affinity.  -1 with *error if cache_salt is not a string. */
int ds4_session_read(const struct ds4_answer *answer, const struct ds4_json *body,
                     struct ds4_request *req, struct ds4_api_error *error) DS4_MUST_CHECK;

#endif
