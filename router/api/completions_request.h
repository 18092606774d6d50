/* How requests of /v1/completions are read (steps 2 and 3). */
#ifndef DS4_ROUTER_API_COMPLETIONS_REQUEST_H
#define DS4_ROUTER_API_COMPLETIONS_REQUEST_H

#include "router/api/answer.h"

/* What a choice needs beside its request; answer->state is an array of them, one per choice. */
struct ds4_completion {
    struct ds4_str echo;  /* sent in front of the answer; empty = nothing */
    int32_t first_id;     /* echo with log-probabilities: the prompt's first token, else -1 */
    int64_t n_char_text;  /* code points of text sent so far */
    int64_t n_char_token; /* of the tokens whose log-probabilities were sent */
    size_t n_token_taken; /* of choice->undecided */
};

/* Body of the answer's exchange -> one request per prompt and choice; index = prompt * n + choice.
 * -1 with *error. */
int ds4_completions_request_parse(struct ds4_answer *answer, struct ds4_api_error *error);

#endif
