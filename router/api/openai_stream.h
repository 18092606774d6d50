/* What chat and completions, the two OpenAI dialects with `data:` frames only, write alike: the head of
 * an object, the end of a stream, a failure inside it, the keep-alive. */
#ifndef DS4_ROUTER_API_OPENAI_STREAM_H
#define DS4_ROUTER_API_OPENAI_STREAM_H

#include "common/json_write.h"
#include "router/api/answer.h"
#include "router/api/error.h"

#include <stddef.h>

#define DS4_OPENAI_FRAME_BYTES ((size_t)64 << 20) /* limit of one frame */

/* Opens an object and writes its members up to `choices`; `object` is its type word. */
void ds4_openai_write_head(const struct ds4_answer *answer, const char *object, struct ds4_jw *w);

/* The usage chunk if it was asked for, then [DONE]. */
void ds4_openai_stream_done(struct ds4_answer *answer, const char *object);

/* The error object, then [DONE]: there is no finish chunk. */
void ds4_openai_stream_error(struct ds4_answer *answer, const struct ds4_api_error *error);

/* A comment: the progress of the prompt if known. */
void ds4_openai_stream_ping(struct ds4_answer *answer);

#endif
