/* The request members that mean the same in every dialect: sampling, limits, stops. */
#ifndef DS4_ROUTER_API_PARAMS_H
#define DS4_ROUTER_API_PARAMS_H

#include "common/json.h"
#include "router/api/answer.h"

/* What a dialect calls them; unused places are NULL. */
#define DS4_PARAM_LIMITS 3
struct ds4_param_names {
    const char *stop;
    const char *limits[DS4_PARAM_LIMITS];
};

/* temperature, top_p, top_k, min_p, penalties, logit_bias, seed, allowed_token_ids, min_tokens,
 * ignore_eos, stop_token_ids, stop strings and the limit of new tokens: checked for type and range,
 * written into req.  Absent members take the server's settings.  -1 with *error naming the member. */
int ds4_params_read(const struct ds4_json *body, const struct ds4_api_context *context,
                    const struct ds4_param_names *names, struct ds4_request *req,
                    struct ds4_api_error *error);
/* logprobs, a boolean, and top_logprobs. */
int ds4_params_read_logprobs(const struct ds4_json *body, struct ds4_request *req,
                             struct ds4_api_error *error);

/* Copies sampling, stops and limits of `from` into `to` for a further choice: its own arena copies,
 * its own seed (`from`'s plus the index). */
int ds4_params_copy(const struct ds4_request *from, struct ds4_request *to,
                    struct ds4_api_error *error);

/* Refuses members whose meaning we do not offer (best_of, chat_template, ...), unless their value asks
 * for nothing: false, an empty list, best_of up to n.  vLLM's names for the form
 * of an answer (guided_json, structured_outputs, ...) are left to chat's own reader. */
int ds4_params_refuse(const struct ds4_json *body, enum ds4_api api, struct ds4_api_error *error);

#endif
