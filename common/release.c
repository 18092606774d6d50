/* Which release a model file is: the last section of common/model.h.
 *
 * The release picks the prompt encoder, and a wrong one degrades answers without any error, so nothing
 * is guessed.  Evidence in order of weight:
 *   1. the architecture, and the token <｜System｜> that only V4.1 has (V4 has a placeholder there);
 *   2. the words "0731" or "preview" in general.name;
 *   3. traces of the drafter that came with 0731: dspark keys or tensors, three extra compress ratios.
 * The word outweighs the traces because the preview trunk was also published with that drafter. */
#include "common/model.h"

#include "common/str.h"
#include "common/weights_file.h"

#include <stddef.h>
#include <stdio.h>

#define N_DRAFT_STAGES 3 /* of 0731; one extra ratio is the older next-token block */
#define CHOICES        "v4_preview, v4_0731 or v41"

const char *ds4_release_name(enum ds4_release release)
{
    switch (release) {
    case DS4_RELEASE_V4_PREVIEW:
        return "v4_preview";
    case DS4_RELEASE_V4_0731:
        return "v4_0731";
    case DS4_RELEASE_V41:
        return "v41";
    case DS4_RELEASE_UNSET:
        break;
    }
    return "";
}

/* Case-insensitive; `word` in lower case. */
static bool has_word(struct ds4_str text, const char *word)
{
    size_t n = strlen(word);
    size_t i;

    for (size_t at = 0; n <= text.len && at <= text.len - n; at++) {
        for (i = 0; i < n; i++) {
            char c = text.ptr[at + i];

            if ((c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c) != word[i])
                break;
        }
        if (i == n)
            return true;
    }
    return false;
}

static bool has_system_token(const struct ds4_gguf *meta)
{
    const struct ds4_gguf_kv *tokens = ds4_gguf_find(meta, "tokenizer.ggml.tokens");

    if (tokens == NULL || tokens->type != DS4_GGUF_STRING || !tokens->is_array)
        return false;
    for (uint64_t i = 0; i < tokens->n; i++) {
        if (ds4_str_equal(ds4_gguf_str_at(tokens, i), DS4_STR("<｜System｜>")))
            return true;
    }
    return false;
}

/* What in the file shows a drafter of 0731; NULL if nothing does. */
static const char *draft_trace(const struct ds4_weights_file *wf)
{
    const struct ds4_gguf *meta = ds4_weights_meta(wf);
    const struct ds4_gguf_kv *ratios =
        ds4_gguf_find(meta, DS4_MODEL_ARCH ".attention.compress_ratios");
    int64_t n_block;

    for (size_t i = 0; i < meta->n_kv; i++) {
        if (ds4_str_starts(meta->kv[i].key, DS4_STR("dspark")) ||
            ds4_str_starts(meta->kv[i].key, DS4_STR(DS4_MODEL_ARCH ".dspark")))
            return "it has dspark keys";
    }
    for (size_t i = 0; i < ds4_weights_n_tensor(wf); i++) {
        if (ds4_str_starts(ds4_str_view(ds4_weights_at(wf, i)->name), DS4_STR("dspark.")))
            return "it has dspark tensors";
    }
    if (ratios != NULL && ratios->is_array &&
        ds4_gguf_get_i64(meta, DS4_MODEL_ARCH ".block_count", 1, DS4_MAX_LAYERS, &n_block, NULL) ==
            0 &&
        ratios->n == (uint64_t)n_block + N_DRAFT_STAGES)
        return "compress_ratios has three entries more than layers";
    return NULL;
}

int ds4_model_release_of(const struct ds4_weights_file *wf, enum ds4_release *release,
                         const char **why, struct ds4_err *err)
{
    const struct ds4_gguf *meta = ds4_weights_meta(wf);
    struct ds4_str arch;
    struct ds4_str name = {NULL, 0};
    const char *trace = NULL;
    enum ds4_release found = DS4_RELEASE_UNSET;
    bool says_0731;
    bool says_preview;

    if (ds4_gguf_get_str(meta, "general.architecture", &arch, err))
        return -1;
    if (ds4_gguf_has(meta, "general.name") && ds4_gguf_get_str(meta, "general.name", &name, err))
        return -1;
    says_0731 = has_word(name, "0731");
    says_preview = has_word(name, "preview");
    if (ds4_str_equal(arch, DS4_STR(DS4_MODEL_ARCH_V41))) {
        found = DS4_RELEASE_V41;
        trace = "general.architecture is " DS4_MODEL_ARCH_V41;
    } else if (has_system_token(meta)) {
        found = DS4_RELEASE_V41;
        trace = "the vocabulary has <｜System｜>";
    } else if (says_0731 && says_preview) {
        return ds4_fail(err, DS4_E_INVALID,
                        "general.name contains both \"0731\" and \"preview\": it cannot be both");
    } else if (says_0731 || says_preview) {
        found = says_0731 ? DS4_RELEASE_V4_0731 : DS4_RELEASE_V4_PREVIEW;
        trace = says_0731 ? "general.name contains \"0731\"" : "general.name contains \"preview\"";
    } else {
        trace = draft_trace(wf);
        found = trace != NULL ? DS4_RELEASE_V4_0731 : DS4_RELEASE_UNSET;
    }
    *release = found;
    if (why != NULL)
        *why = trace;
    return 0;
}

int ds4_model_release(const struct ds4_weights_file *wf, enum ds4_release configured,
                      enum ds4_release *release, struct ds4_err *err)
{
    enum ds4_release found;
    const char *why;

    if (ds4_model_release_of(wf, &found, &why, err))
        return -1;
    if (found == DS4_RELEASE_UNSET && configured == DS4_RELEASE_UNSET)
        return ds4_fail(
            err, DS4_E_INVALID,
            "the model file does not say which release it is: set model.release to " CHOICES);
    if (found != DS4_RELEASE_UNSET && configured != DS4_RELEASE_UNSET && found != configured)
        return ds4_fail(err, DS4_E_INVALID,
                        "model.release is %s, but the model file is %s (%s); choices: " CHOICES,
                        ds4_release_name(configured), ds4_release_name(found), why);
    *release = found != DS4_RELEASE_UNSET ? found : configured;
    return 0;
}
