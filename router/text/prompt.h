/* A prompt under construction: one text, and which parts of it are ours.
 *
 * Literal text (special tokens, fixed strings) and content (what clients, tools and files supplied) lie
 * in one buffer, because merging crosses their border: "Hi." before "\n\n## Tools" shares a token with
 * it.  Only the added tokens differ: in plain encoding they are recognised in literal text alone, so
 * content cannot forge structure. */
#ifndef DS4_ROUTER_TEXT_PROMPT_H
#define DS4_ROUTER_TEXT_PROMPT_H

#include "common/buf.h"
#include "common/choices.h"
#include "common/err.h"
#include "common/json_text.h"
#include "common/vec.h"
#include "router/text/bpe.h"

#include <stdbool.h>

/* A stretch of the text whose tokens are known: they were sampled. */
struct ds4_prompt_exact {
    size_t start, end;
    const int32_t *id; /* [n_id], borrowed */
    int32_t n_id;
};

struct ds4_prompt {
    struct ds4_buf text;
    DS4_VEC(struct ds4_bpe_span) literals;  /* rising, not touching */
    DS4_VEC(struct ds4_prompt_exact) exact; /* rising, between two literals */
    size_t stable_bytes; /* end of the leading system part: the best point to cut a shared prefix */
    bool in_reasoning;   /* the text ends inside an open think block */
    bool failed;         /* a span could not be stored; reported by ds4_prompt_check */
};

/* Storage is the caller's. */
void ds4_prompt_init(struct ds4_prompt *prompt, size_t max_bytes);
void ds4_prompt_deinit(struct ds4_prompt *prompt);

/* Appending sticks when it fails, as with ds4_buf: check once at the end. */
void ds4_prompt_literal(struct ds4_prompt *prompt, struct ds4_str text);
void ds4_prompt_content(struct ds4_prompt *prompt, struct ds4_str text);
/* Sampled tokens and their text.  A special token must stand on either side, so that nothing merges
 * across the borders. */
void ds4_prompt_exact(struct ds4_prompt *prompt, struct ds4_str text, const int32_t *id,
                      int32_t n_id);
/* The same for text that is there already: n stretches, rising.  Same condition on their borders; none
 * may overlap another. */
int ds4_prompt_add_exact(struct ds4_prompt *prompt, const struct ds4_prompt_exact *add, size_t n,
                         struct ds4_err *err) DS4_MUST_CHECK;
/* A JSON value printed as Python does, as content. */
void ds4_prompt_json(struct ds4_prompt *prompt, const struct ds4_jt_node *node);
int ds4_prompt_check(const struct ds4_prompt *prompt, struct ds4_err *err) DS4_MUST_CHECK;

/* The text so far; valid until the next append. */
static inline struct ds4_str ds4_prompt_view(const struct ds4_prompt *prompt)
{
    return ds4_buf_view(&prompt->text);
}

/* The prompt of a legacy completion (R15): BOS, unless the text begins with it, and the text; or, with a
 * suffix (ptr not NULL), the fill-in-the-middle order of DeepSeek's coders.  `parse_special`: added
 * tokens in the text count, as on a raw endpoint. */
void ds4_prompt_completion(struct ds4_prompt *prompt, struct ds4_str text, struct ds4_str suffix,
                           bool parse_special);

/* Appends the ids.  PLAIN: content is never read as added tokens.  REFERENCE: the whole text is, as the
 * reference encoder's users do it. */
int ds4_prompt_encode(const struct ds4_prompt *prompt, struct ds4_bpe *bpe,
                      enum ds4_content_specials specials, struct ds4_ids *ids,
                      struct ds4_err *err) DS4_MUST_CHECK;

#endif
