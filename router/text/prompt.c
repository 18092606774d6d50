/* Prompt builder.  Step 3 of the request path.
 *
 * Invariant: `literals` covers exactly the bytes that ds4_prompt_literal appended; adjoining literal
 * pieces share one span, so a token text that two of them make up is still found. */
#include "router/text/prompt.h"

void ds4_prompt_init(struct ds4_prompt *prompt, size_t max_bytes)
{
    *prompt = (struct ds4_prompt){0};
    ds4_buf_init(&prompt->text, max_bytes);
}

void ds4_prompt_deinit(struct ds4_prompt *prompt)
{
    ds4_buf_deinit(&prompt->text);
    DS4_VEC_DEINIT(&prompt->literals);
    DS4_VEC_DEINIT(&prompt->exact);
}

void ds4_prompt_literal(struct ds4_prompt *prompt, struct ds4_str text)
{
    size_t start = prompt->text.len;
    size_t n = prompt->literals.len;

    prompt->in_reasoning = false;
    if (text.len == 0 || ds4_buf_append_str(&prompt->text, text) != 0)
        return;
    if (n > 0 && prompt->literals.ptr[n - 1].end == start)
        prompt->literals.ptr[n - 1].end = prompt->text.len;
    else if (DS4_VEC_PUSH(&prompt->literals, (struct ds4_bpe_span){start, prompt->text.len}) != 0)
        prompt->failed = true;
}

void ds4_prompt_content(struct ds4_prompt *prompt, struct ds4_str text)
{
    ds4_buf_append_str(&prompt->text, text);
}

void ds4_prompt_exact(struct ds4_prompt *prompt, struct ds4_str text, const int32_t *id,
                      int32_t n_id)
{
    size_t start = prompt->text.len;

    if (ds4_buf_append_str(&prompt->text, text) == 0 &&
        DS4_VEC_PUSH(&prompt->exact,
                     (struct ds4_prompt_exact){start, prompt->text.len, id, n_id}) != 0)
        prompt->failed = true;
}

/* Literals end where a stretch begins and go on where it ends.  In place, from a copy further up: a
 * stretch makes at most one span two, and there is room for that. */
static void cut_literals(struct ds4_prompt *prompt, const struct ds4_prompt_exact *add, size_t n)
{
    struct ds4_bpe_span *span = prompt->literals.ptr;
    size_t n_span = prompt->literals.len, at = 0;

    prompt->literals.len = 0;
    if (n_span == 0)
        return;
    memmove(span + n, span, n_span * sizeof(*span));
    for (size_t i = 0; i < n_span; i++) {
        struct ds4_bpe_span rest = span[n + i];

        while (at < n && add[at].end <= rest.start)
            at++;
        for (size_t k = at; k < n && add[k].start < rest.end; k++) {
            if (add[k].start > rest.start)
                span[prompt->literals.len++] = (struct ds4_bpe_span){rest.start, add[k].start};
            rest.start = add[k].end;
        }
        if (rest.start < rest.end)
            span[prompt->literals.len++] = rest;
    }
}

int ds4_prompt_add_exact(struct ds4_prompt *prompt, const struct ds4_prompt_exact *add, size_t n,
                         struct ds4_err *err)
{
    size_t old = prompt->exact.len, to = old + n;

    if (n == 0)
        return 0;
    if (DS4_VEC_RESERVE(&prompt->exact, to) != 0 ||
        DS4_VEC_RESERVE(&prompt->literals, prompt->literals.len + n) != 0)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the parts of the prompt");
    cut_literals(prompt, add, n);
    prompt->exact.len = to;
    while (n > 0) { /* both rise: the last goes last */
        if (old > 0 && prompt->exact.ptr[old - 1].start > add[n - 1].start)
            prompt->exact.ptr[--to] = prompt->exact.ptr[--old];
        else
            prompt->exact.ptr[--to] = add[--n];
    }
    return 0;
}

void ds4_prompt_json(struct ds4_prompt *prompt, const struct ds4_jt_node *node)
{
    (void)ds4_jt_dump(node, &prompt->text); /* a failed append sticks in the buffer */
}

void ds4_prompt_completion(struct ds4_prompt *prompt, struct ds4_str text, struct ds4_str suffix,
                           bool parse_special)
{
    void (*append)(struct ds4_prompt *, struct ds4_str) =
        parse_special ? ds4_prompt_literal : ds4_prompt_content;
    struct ds4_str bos = ds4_special_text(DS4_SPECIAL_BOS);

    if (suffix.ptr == NULL) {
        ds4_prompt_literal(prompt, bos);
        append(prompt, ds4_str_starts(text, bos) ? ds4_str_skip(text, bos.len) : text);
        return;
    }
    ds4_prompt_literal(prompt, bos);
    ds4_prompt_literal(prompt, ds4_special_text(DS4_SPECIAL_FIM_BEGIN));
    append(prompt, text);
    ds4_prompt_literal(prompt, ds4_special_text(DS4_SPECIAL_FIM_HOLE));
    append(prompt, suffix);
    ds4_prompt_literal(prompt, ds4_special_text(DS4_SPECIAL_FIM_END));
}

int ds4_prompt_check(const struct ds4_prompt *prompt, struct ds4_err *err)
{
    if (prompt->failed)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for the parts of the prompt");
    return ds4_buf_check(&prompt->text, "prompt", err);
}

/* The text [from, to), as if it were all there is; *literal is the first span in it. */
static int encode_part(const struct ds4_prompt *prompt, size_t from, size_t to, size_t *literal,
                       struct ds4_bpe *bpe, enum ds4_content_specials specials, struct ds4_ids *ids,
                       struct ds4_err *err)
{
    struct ds4_str text = ds4_str_head(ds4_str_skip(ds4_prompt_view(prompt), from), to - from);
    DS4_VEC(struct ds4_bpe_span) literals = {0};
    int rc = 0;

    if (specials == DS4_SPECIALS_REFERENCE)
        return ds4_bpe_encode(bpe, text, DS4_BPE_SPECIAL, ids, err);
    for (; *literal < prompt->literals.len && rc == 0; (*literal)++) {
        struct ds4_bpe_span span = prompt->literals.ptr[*literal];

        if (span.end > to)
            break;
        span.start -= from;
        span.end -= from;
        rc = DS4_VEC_PUSH(&literals, span);
    }
    rc = rc != 0 ? ds4_fail(err, DS4_E_NOMEM, "no memory for the parts of the prompt")
                 : ds4_bpe_encode_spans(bpe, text, literals.ptr, literals.len, ids, err);
    DS4_VEC_DEINIT(&literals);
    return rc;
}

int ds4_prompt_encode(const struct ds4_prompt *prompt, struct ds4_bpe *bpe,
                      enum ds4_content_specials specials, struct ds4_ids *ids, struct ds4_err *err)
{
    size_t from = 0, literal = 0;

    for (size_t e = 0; e < prompt->exact.len; e++) {
        const struct ds4_prompt_exact *exact = &prompt->exact.ptr[e];

        if (encode_part(prompt, from, exact->start, &literal, bpe, specials, ids, err) != 0)
            return -1;
        if (DS4_VEC_RESERVE(ids, ids->len + (size_t)exact->n_id) != 0)
            return ds4_fail(err, DS4_E_NOMEM, "no memory for the prompt's tokens");
        memcpy(ids->ptr + ids->len, exact->id, (size_t)exact->n_id * sizeof(*exact->id));
        ids->len += (size_t)exact->n_id;
        from = exact->end;
    }
    return encode_part(prompt, from, prompt->text.len, &literal, bpe, specials, ids, err);
}
