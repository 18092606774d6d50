/* ds4-text tokenize, detokenize, render: one JSON line in, one JSON line out.
 *
 * These are the tool's commands as functions, so that tests run exactly what the tool runs.  Each
 * appends one JSON object to `answer` (without a newline) or fails; what it appended by then is to be
 * dropped. */
#ifndef DS4_ROUTER_TEXT_ENCODE_H
#define DS4_ROUTER_TEXT_ENCODE_H

#include "common/buf.h"
#include "common/err.h"
#include "common/str.h"
#include "router/text/bpe.h"

/* {"text": S, "parse_special": true unless given} or {"bytes_hex": H} -> {"ids": [..]} */
int ds4_text_tokenize(struct ds4_str line, struct ds4_bpe *bpe, struct ds4_buf *answer,
                      struct ds4_err *err) DS4_MUST_CHECK;

/* {"ids": [..]} -> {"text": S, "piece_hex": [..]} */
int ds4_text_detokenize(struct ds4_str line, const struct ds4_vocab *vocab, struct ds4_buf *answer,
                        struct ds4_err *err) DS4_MUST_CHECK;

/* An encoder-level case (text/case_json.h) -> {"prompt": S}, or {model, server {ctx, max_floor,
 * default_effort}, request} with an OpenAI chat request -> {"prompt": S, "effort": {..}}. */
int ds4_text_render(struct ds4_str line, struct ds4_buf *answer,
                    struct ds4_err *err) DS4_MUST_CHECK;

#endif
