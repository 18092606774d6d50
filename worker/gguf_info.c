/* The reader behind `ds4-gguf info`: one line per fact, for people and for grep.
 *
 * Texts from the file are escaped: a terminal must not obey a model file. */
#include "worker/gguf_info.h"

#include "common/model.h"
#include "common/model_tensors.h"
#include "common/weights_file.h"

#include <inttypes.h>
#include <string.h>

#define TEXT_MAX  72 /* bytes of a text that are shown */
#define ARRAY_MAX 8  /* elements */
#define GIB       1073741824.0

static void print_text(FILE *out, struct ds4_str text)
{
    size_t n = text.len < TEXT_MAX ? text.len : TEXT_MAX;

    while (n < text.len && n > 0 && ((unsigned char)text.ptr[n] & 0xc0) == 0x80)
        n--; /* not inside a character */
    fputc('"', out);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text.ptr[i];

        if (c == '\n')
            fputs("\\n", out);
        else if (c < 0x20 || c == 0x7f || c == '"' || c == '\\')
            fprintf(out, "\\x%02x", c);
        else
            fputc(c, out);
    }
    fputs(n < text.len ? "\"..." : "\"", out);
}

static void print_element(FILE *out, const struct ds4_gguf_kv *kv, uint64_t i)
{
    if (kv->type == DS4_GGUF_STRING)
        print_text(out, ds4_gguf_str_at(kv, i));
    else if (kv->type == DS4_GGUF_BOOL)
        fputs(ds4_gguf_int_at(kv, i) != 0 ? "true" : "false", out);
    else if (ds4_gguf_is_float(kv->type))
        fprintf(out, "%.9g", ds4_gguf_float_at(kv, i));
    else
        fprintf(out, "%" PRId64, ds4_gguf_int_at(kv, i));
}

static void print_metadata(FILE *out, const struct ds4_gguf *meta)
{
    for (size_t i = 0; i < meta->n_kv; i++) {
        const struct ds4_gguf_kv *kv = &meta->kv[i];

        fprintf(out, "%.*s = ", DS4_STR_ARG(kv->key));
        if (kv->is_array)
            fprintf(out, "%s[%" PRIu64 "] {", ds4_gguf_type_name(kv->type), kv->n);
        for (uint64_t k = 0; k < kv->n && k < ARRAY_MAX; k++) {
            fputs(k == 0 ? "" : ", ", out);
            print_element(out, kv, k);
        }
        fputs(kv->n > ARRAY_MAX ? ", ...}\n" : kv->is_array ? "}\n" : "\n", out);
    }
}

static void print_tensors(FILE *out, const struct ds4_weights_file *wf)
{
    fprintf(out, "\n%-40s %-10s %-24s %16s %16s %5s\n", "tensor", "type", "shape", "bytes",
            "offset", "file");
    for (size_t i = 0; i < ds4_weights_n_tensor(wf); i++) {
        const struct ds4_tensor_info *t = ds4_weights_at(wf, i);
        const char *type = ds4_gguf_tensor_type_name(t->gguf_type);
        char shape[96] = "";
        char number[24];
        size_t len = 0;

        for (int32_t d = 0; d < t->n_dims && len < sizeof(shape); d++)
            len += (size_t)snprintf(shape + len, sizeof(shape) - len, "%s%" PRId64,
                                    d == 0 ? "" : "x", t->ne[d]);
        snprintf(number, sizeof(number), "type %" PRIu32, t->gguf_type);
        fprintf(out, "%-40s %-10s %-24s %16" PRIu64 " %16" PRIu64 " %5" PRId32 "%s\n", t->name,
                type != NULL ? type : number, shape, t->bytes, t->offset, t->shard + 1,
                t->usable ? "" : "  not usable");
    }
}

static void print_classes(FILE *out, const struct ds4_weights_file *wf)
{
    uint64_t bytes[DS4_N_CLASSES + 1] = {0}; /* the last one: no class */
    uint64_t n[DS4_N_CLASSES + 1] = {0};
    uint64_t total = 0;
    enum ds4_tensor_class class;

    for (size_t i = 0; i < ds4_weights_n_tensor(wf); i++) {
        const struct ds4_tensor_info *t = ds4_weights_at(wf, i);

        if (ds4_tensor_class_of(t->name, &class))
            class = DS4_N_CLASSES;
        bytes[class] += t->bytes;
        n[class]++;
        total += t->bytes;
    }
    fprintf(out, "\n%-24s %8s %20s %10s\n", "class", "tensors", "bytes", "GiB");
    for (int k = 0; k <= DS4_N_CLASSES; k++) {
        if (n[k] != 0)
            fprintf(out, "%-24s %8" PRIu64 " %20" PRIu64 " %10.3f\n",
                    k == DS4_N_CLASSES ? "other" : ds4_tensor_class_name((enum ds4_tensor_class)k),
                    n[k], bytes[k], (double)bytes[k] / GIB);
    }
    fprintf(out, "%-24s %8zu %20" PRIu64 " %10.3f\n", "total", ds4_weights_n_tensor(wf), total,
            (double)total / GIB);
}

static const char *type_of(const struct ds4_weights_file *wf, const char *name)
{
    const struct ds4_tensor_info *t = ds4_weights_find(wf, name);
    const char *type = t == NULL ? NULL : ds4_gguf_tensor_type_name(t->gguf_type);

    return t == NULL ? "-" : type == NULL ? "?" : type;
}

/* Converters agree on names and differ in what they keep in which type; the router tells them apart. */
static const char *flavour(const char *embed, const char *router)
{
    if (strcmp(embed, "F16") == 0 && strcmp(router, "F16") == 0)
        return "ds4 (F16 embedding and router)";
    if (strcmp(embed, "BF16") == 0 && strcmp(router, "BF16") == 0)
        return "llama.cpp native (BF16 embedding and router)";
    return "mixed";
}

static void print_model(FILE *out, const struct ds4_weights_file *wf)
{
    struct ds4_err err = {DS4_OK, ""};
    struct ds4_model_shape shape;
    struct ds4_model_part p;
    enum ds4_release release;
    const char *why = NULL;
    char gate[DS4_TENSOR_NAME_BYTES];
    char down[DS4_TENSOR_NAME_BYTES];
    char router[DS4_TENSOR_NAME_BYTES];

    if (ds4_model_read(wf, &shape, &err)) {
        fprintf(out, "\nmodel: %s\n", err.msg);
    } else {
        p = shape.present;
        fprintf(out,
                "\nmodel: %" PRId32 " layers, %" PRId32 " experts, %" PRId32 " used, width %" PRId32
                ", vocabulary %" PRId32 ", context %" PRId32 "\n",
                shape.n_layer, shape.n_expert[0], shape.n_expert_used, shape.d_model, shape.n_vocab,
                shape.context_tok);
        fprintf(out, "holds: layers %" PRId32 " to %" PRId32 "%s%s\n", p.first_layer,
                p.end_layer - 1, p.embed ? ", embedding" : "", p.head ? ", head" : "");
        snprintf(gate, sizeof(gate), "blk.%" PRId32 ".ffn_gate_exps.weight", p.first_layer);
        snprintf(down, sizeof(down), "blk.%" PRId32 ".ffn_down_exps.weight", p.first_layer);
        snprintf(router, sizeof(router), "blk.%" PRId32 ".ffn_gate_inp.weight", p.first_layer);
        fprintf(out, "flavour: %s; experts %s, down %s\n",
                flavour(p.embed ? type_of(wf, "token_embd.weight") : type_of(wf, router),
                        type_of(wf, router)),
                type_of(wf, gate), type_of(wf, down));
    }
    if (ds4_model_release_of(wf, &release, &why, &err))
        fprintf(out, "release: %s\n", err.msg);
    else if (release == DS4_RELEASE_UNSET)
        fputs("release: the file does not say; set model.release\n", out);
    else
        fprintf(out, "release: %s (%s)\n", ds4_release_name(release), why);
}

int ds4_gguf_print_info(const char *path, FILE *out, struct ds4_err *err)
{
    struct ds4_weights_file *wf = ds4_weights_open(path, DS4_WEIGHTS_PREAD, err);
    const struct ds4_gguf *meta;

    if (wf == NULL)
        return -1;
    meta = ds4_weights_meta(wf);
    fprintf(out, "file: GGUF version %" PRIu32 ", %" PRId32 " file(s), alignment %" PRIu32 "\n",
            meta->version, ds4_weights_n_shard(wf), meta->alignment);
    print_metadata(out, meta);
    print_tensors(out, wf);
    print_classes(out, wf);
    print_model(out, wf);
    ds4_weights_close(wf);
    return 0;
}
