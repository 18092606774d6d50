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

int ds4_prompt_encode(const struct ds4_prompt *prompt, struct ds4_bpe *bpe,
                      enum ds4_content_specials specials, struct ds4_ids *ids, struct ds4_err *err)
{
    if (specials == DS4_SPECIALS_REFERENCE)
        return ds4_bpe_encode(bpe, ds4_prompt_view(prompt), DS4_BPE_SPECIAL, ids, err);
    return ds4_bpe_encode_spans(bpe, ds4_prompt_view(prompt), prompt->literals.ptr,
                                prompt->literals.len, ids, err);
}
