/* What /v1/responses keeps of finished responses, and the endpoints that ask for them.
 *
 * Kept under the response's id: {"response": .., "items": [all input items]}, bounded in number, bytes
 * and age.  Output items are found by their own ids as well, which name the response. */
#ifndef DS4_ROUTER_API_RESPONSES_STORE_H
#define DS4_ROUTER_API_RESPONSES_STORE_H

#include "common/arena.h"
#include "common/json_text.h"
#include "router/api/context.h"
#include "router/api/error.h"

/* `response` and `items` are JSON: an object, comma-separated items. */
void ds4_responses_store_put(const struct ds4_api_context *context, struct ds4_str id,
                             struct ds4_str response, struct ds4_str items);

/* The input items of a kept response and behind them its output: a list in the arena.  NULL with
 * *error (response_not_found). */
const struct ds4_jt_node *ds4_responses_store_items(const struct ds4_api_context *context,
                                                    struct ds4_str id, struct ds4_arena *arena,
                                                    struct ds4_api_error *error);
/* One output item by its id. */
const struct ds4_jt_node *ds4_responses_store_item(const struct ds4_api_context *context,
                                                   struct ds4_str id, struct ds4_arena *arena,
                                                   struct ds4_api_error *error);

/* Handlers: GET and DELETE /v1/responses/ID, POST /v1/responses/ID/cancel. */
void ds4_responses_get_handle(struct ds4_exchange *x, void *context);
void ds4_responses_delete_handle(struct ds4_exchange *x, void *context);
void ds4_responses_cancel_handle(struct ds4_exchange *x, void *context);

#endif
