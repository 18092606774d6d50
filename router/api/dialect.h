/* One API dialect: how requests of that kind are read (step 2) and their answers written (step 15).
 *
 * The answer (api/answer.h) owns the life of an exchange; a dialect only formats.  No dialect is
 * visible between parse() and the emitters: the scheduler sees struct ds4_request alone. */
#ifndef DS4_ROUTER_API_DIALECT_H
#define DS4_ROUTER_API_DIALECT_H

#include "common/buf.h"
#include "router/api/error.h"
#include "router/request.h"

struct ds4_answer;
struct ds4_choice;
struct ds4_events;

struct ds4_dialect {
    enum ds4_api api;
    enum ds4_error_style style;
    bool raw; /* answers are text without channels: log-probabilities stay in `undecided` */

    /* Body -> answer->choice[..].req, complete but for the sink.  -1 with *error filled. */
    int (*parse)(struct ds4_answer *answer, struct ds4_api_error *error);

    /* Streams.  begin: first frames of a choice, after it was admitted.  events: new pieces.
     * choice_done: a choice ended well.  done: all did.  error: instead of what is missing. */
    void (*begin)(struct ds4_choice *choice);
    void (*events)(struct ds4_choice *choice, const struct ds4_events *events);
    void (*choice_done)(struct ds4_choice *choice);
    void (*done)(struct ds4_answer *answer);
    void (*error)(struct ds4_answer *answer, const struct ds4_api_error *error);
    /* Nothing was sent for a while. */
    void (*ping)(struct ds4_answer *answer);
    int32_t ping_ms; /* at the latest after so long, whatever http.ping_ms says; 0 = that alone */
    /* Prompt progress, only when the request asked for it; may be NULL. */
    void (*progress)(struct ds4_choice *choice, int32_t done_tok, int32_t total_tok);

    /* The whole body of an answer that is not streamed. */
    void (*whole)(struct ds4_answer *answer, struct ds4_buf *body);
};

#endif
