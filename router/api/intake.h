/* What every dialect's parse does besides its own members (step 2): the body read both ways, the model
 * name, the choices, effort and parser of each request. */
#ifndef DS4_ROUTER_API_INTAKE_H
#define DS4_ROUTER_API_INTAKE_H

#include "common/arena.h"
#include "common/json.h"
#include "common/json_text.h"
#include "router/api/answer.h"
#include "router/api/chat_prompt.h"

/* A body as values (common/json) and as text whose digits and key order count (common/json_text). */
struct ds4_body {
    struct ds4_json *json;
    const struct ds4_jt_node *root; /* an object */
    struct ds4_arena arena;
};
/* Reads `text`, borrowed for the body's life.  ds4_body_deinit is due in either case. */
int ds4_body_init(struct ds4_body *body, struct ds4_str text, struct ds4_api_error *error);
void ds4_body_deinit(struct ds4_body *body);

/* Reads the body of the answer's exchange and calls `read`; prompt is initialised for it. */
typedef int (*ds4_intake_fn)(struct ds4_answer *answer, struct ds4_body *body,
                             struct ds4_chat_prompt *prompt, struct ds4_api_error *error);
int ds4_intake_run(struct ds4_answer *answer, ds4_intake_fn read, struct ds4_api_error *error);

/* A boolean member of obj, which stands at `path` ("" at the top). */
int ds4_intake_switch(const struct ds4_json *obj, const char *path, const char *key, bool *out,
                      struct ds4_api_error *error);
/* `stream`, `stream_options` and `return_progress` of the OpenAI dialects. */
int ds4_intake_stream(const struct ds4_json *body, struct ds4_answer *answer,
                      struct ds4_api_error *error);
/* `model` into the request: a served name, or the served one when absent. */
int ds4_intake_model(const struct ds4_json *body, const struct ds4_api_context *context,
                     struct ds4_request *req, struct ds4_api_error *error);
/* `n`, at most `max` and http.max_n. */
int ds4_intake_count(const struct ds4_json *body, const struct ds4_api_context *context,
                     int32_t max, int32_t *n_choice, struct ds4_api_error *error);

/* From a rendered prompt to complete requests: choice 0 exists with its sampling, further ones up to
 * n_choice are copies with seeds of their own.  Refuses what is not offered, notes a downgrade. */
int ds4_intake_chat(struct ds4_answer *answer, const struct ds4_json *body,
                    const struct ds4_chat_prompt *prompt, int32_t n_choice,
                    struct ds4_api_error *error);

/* ds4_parse_config.random: the kernel's random bytes. */
void ds4_intake_random(void *ctx, void *out, size_t n);

#endif
