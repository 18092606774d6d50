/* One table: what went wrong -> HTTP status, type words, the dialect's error body (api step of every
 * refusal).  Nothing else in the house knows HTTP statuses.  Messages never hold a path or a pointer. */
#ifndef DS4_ROUTER_API_ERROR_H
#define DS4_ROUTER_API_ERROR_H

#include "common/buf.h"
#include "common/err.h"
#include "router/exchange.h"
#include "router/request.h"

#include <stdint.h>

enum ds4_error_style { DS4_STYLE_OPENAI, DS4_STYLE_ANTHROPIC };

#define DS4_API_PARAM_BYTES 160

struct ds4_api_error {
    const char *code; /* a code of the table, static */
    int status;       /* 0: the table's */
    char message[512];
    char param[DS4_API_PARAM_BYTES]; /* JSON path of the field, "" = none */
    int32_t retry_after_ms;          /* > 0: Retry-After is sent */
    int32_t n_prompt_tok;            /* with context_length_exceeded, else 0 */
    int32_t n_context_tok;
};

/* Fills *error and returns -1, so that a parser ends with `return ds4_api_fail(...)`. */
int ds4_api_fail(struct ds4_api_error *error, const char *code, const char *param, const char *fmt,
                 ...) __attribute__((format(printf, 4, 5)));

/* From the house's own errors: a reason where the scheduler or cluster gave one, else by err->code.
 * Internal errors keep their text for the log only.  Returns -1. */
int ds4_api_fail_reason(struct ds4_api_error *error, enum ds4_reason reason,
                        const struct ds4_err *err, int32_t retry_after_ms);
int ds4_api_fail_err(struct ds4_api_error *error, const char *param, const struct ds4_err *err);
/* The wording clients match by regular expression (style decides which).  Returns -1. */
int ds4_api_fail_context(struct ds4_api_error *error, enum ds4_error_style style,
                         int32_t n_prompt_tok, int32_t n_context_tok);

/* The body, without a line break. */
void ds4_api_error_write(const struct ds4_api_error *error, enum ds4_error_style style,
                         const char *request_id, struct ds4_buf *out);
int ds4_api_error_status(const struct ds4_api_error *error);
/* Answers the exchange with it, Retry-After included.  Ends the exchange. */
void ds4_api_error_reply(const struct ds4_api_error *error, enum ds4_error_style style,
                         struct ds4_exchange *x);

#endif
