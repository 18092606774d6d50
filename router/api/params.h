/* The request members that mean the same in every OpenAI-shaped dialect: sampling, limits, stops. */
#ifndef DS4_ROUTER_API_PARAMS_H
#define DS4_ROUTER_API_PARAMS_H

#include "common/json.h"
#include "router/api/answer.h"

/* temperature, top_p, top_k, min_p, penalties, logit_bias, seed, allowed_token_ids, min_tokens,
 * ignore_eos, stop, stop_token_ids, max_tokens / max_completion_tokens / n_predict, logprobs,
 * top_logprobs: checked for type and range, written into req.  Absent members take the server's
 * settings.  -1 with *error naming the member. */
int ds4_params_read(const struct ds4_json *body, const struct ds4_api_context *context,
                    struct ds4_request *req, struct ds4_api_error *error);

/* Copies sampling, stops and limits of `from` into `to` for a further choice: its own arena copies,
 * its own seed (`from`'s plus the index). */
int ds4_params_copy(const struct ds4_request *from, struct ds4_request *to,
                    struct ds4_api_error *error);

/* Refuses members whose meaning we do not offer (best_of, echo, ...); counts unknown ones. */
int ds4_params_refuse(const struct ds4_json *body, struct ds4_api_error *error);

#endif
