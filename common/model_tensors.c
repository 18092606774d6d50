/* The tensor catalogue as one table.
 *
 * A row is a name, the layers that have it, and its shape in words of struct ds4_model_shape, so that
 * the loader, the checker and the writer of synthetic files agree by construction.  Published files mix
 * types freely, so any float or quantised type is good for any matrix; only what a kernel cannot do
 * differently is required: gate and up of one layer in one type, hash tables in i32. */
#include "common/model_tensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Which layers have a tensor. */
enum layers { ALL, COMPRESSED, CSA_ONLY, HASHED, NOT_HASHED };

/* A dimension: a number that depends on the shape and perhaps on the layer. */
enum dim {
    NONE,
    D_MODEL,
    HYPER_IN,  /* n_hyper * d_model */
    HYPER_MIX, /* (2 + n_hyper) * n_hyper */
    HYPER_SCALES,
    Q_RANK,
    HEADS,
    D_HEAD,
    HEADS_WIDE, /* n_head * d_head */
    GROUP_IN,   /* inputs of one output group */
    GROUPS_OUT, /* n_group * o_rank */
    COMPRESSOR, /* outputs of the compressor */
    RATIO,
    INDEX_HEADS,
    INDEX_WIDE, /* n_index_head * d_index */
    INDEX_COMPRESSOR,
    D_INDEX,
    EXPERTS,
    USED,
    VOCAB,
    D_EXPERT,
    SHARED_WIDE, /* n_shared * d_expert */
    HYPER,
    ONE,
};

struct row {
    const char *name;
    enum ds4_tensor_class class;
    enum layers layers;
    enum dim ne[3];
};

#define HYPER_SCALE_COUNT 3 /* pre, post, comb */

static const struct row layer_rows[] = {
    {"attn_norm.weight", DS4_CLASS_NORM, ALL, {D_MODEL}},
    {"ffn_norm.weight", DS4_CLASS_NORM, ALL, {D_MODEL}},
    {"hc_attn_fn.weight", DS4_CLASS_HYPER_FN, ALL, {HYPER_IN, HYPER_MIX}},
    {"hc_attn_base.weight", DS4_CLASS_HYPER_VEC, ALL, {HYPER_MIX}},
    {"hc_attn_scale.weight", DS4_CLASS_HYPER_VEC, ALL, {HYPER_SCALES}},
    {"hc_ffn_fn.weight", DS4_CLASS_HYPER_FN, ALL, {HYPER_IN, HYPER_MIX}},
    {"hc_ffn_base.weight", DS4_CLASS_HYPER_VEC, ALL, {HYPER_MIX}},
    {"hc_ffn_scale.weight", DS4_CLASS_HYPER_VEC, ALL, {HYPER_SCALES}},
    {"attn_q_a.weight", DS4_CLASS_ATTENTION, ALL, {D_MODEL, Q_RANK}},
    {"attn_q_a_norm.weight", DS4_CLASS_NORM, ALL, {Q_RANK}},
    {"attn_q_b.weight", DS4_CLASS_ATTENTION, ALL, {Q_RANK, HEADS_WIDE}},
    {"attn_kv.weight", DS4_CLASS_ATTENTION, ALL, {D_MODEL, D_HEAD}},
    {"attn_kv_a_norm.weight", DS4_CLASS_NORM, ALL, {D_HEAD}},
    {"attn_sinks.weight", DS4_CLASS_SINK, ALL, {HEADS}},
    {"attn_output_a.weight", DS4_CLASS_ATTENTION, ALL, {GROUP_IN, GROUPS_OUT}},
    {"attn_output_b.weight", DS4_CLASS_ATTENTION, ALL, {GROUPS_OUT, D_MODEL}},
    {"attn_compressor_kv.weight", DS4_CLASS_COMPRESSOR, COMPRESSED, {D_MODEL, COMPRESSOR}},
    {"attn_compressor_gate.weight", DS4_CLASS_COMPRESSOR, COMPRESSED, {D_MODEL, COMPRESSOR}},
    {"attn_compressor_ape.weight", DS4_CLASS_POSITION, COMPRESSED, {COMPRESSOR, RATIO}},
    {"attn_compressor_norm.weight", DS4_CLASS_NORM, COMPRESSED, {D_HEAD}},
    {"indexer.attn_q_b.weight", DS4_CLASS_INDEXER, CSA_ONLY, {Q_RANK, INDEX_WIDE}},
    {"indexer.proj.weight", DS4_CLASS_INDEXER, CSA_ONLY, {D_MODEL, INDEX_HEADS}},
    {"indexer_compressor_kv.weight", DS4_CLASS_COMPRESSOR, CSA_ONLY, {D_MODEL, INDEX_COMPRESSOR}},
    {"indexer_compressor_gate.weight", DS4_CLASS_COMPRESSOR, CSA_ONLY, {D_MODEL, INDEX_COMPRESSOR}},
    {"indexer_compressor_ape.weight", DS4_CLASS_POSITION, CSA_ONLY, {INDEX_COMPRESSOR, RATIO}},
    {"indexer_compressor_norm.weight", DS4_CLASS_NORM, CSA_ONLY, {D_INDEX}},
    {"ffn_gate_inp.weight", DS4_CLASS_ROUTER, ALL, {D_MODEL, EXPERTS}},
    {"exp_probs_b.bias", DS4_CLASS_ROUTER_BIAS, NOT_HASHED, {EXPERTS}},
    {"ffn_gate_tid2eid.weight", DS4_CLASS_HASH, HASHED, {USED, VOCAB}},
    {"ffn_gate_exps.weight", DS4_CLASS_GATE_UP, ALL, {D_MODEL, D_EXPERT, EXPERTS}},
    {"ffn_up_exps.weight", DS4_CLASS_GATE_UP, ALL, {D_MODEL, D_EXPERT, EXPERTS}},
    {"ffn_down_exps.weight", DS4_CLASS_DOWN, ALL, {D_EXPERT, D_MODEL, EXPERTS}},
    {"ffn_gate_shexp.weight", DS4_CLASS_SHARED, ALL, {D_MODEL, SHARED_WIDE}},
    {"ffn_up_shexp.weight", DS4_CLASS_SHARED, ALL, {D_MODEL, SHARED_WIDE}},
    {"ffn_down_shexp.weight", DS4_CLASS_SHARED, ALL, {SHARED_WIDE, D_MODEL}},
};

static const struct row embed_rows[] = {
    {"token_embd.weight", DS4_CLASS_EMBED, ALL, {D_MODEL, VOCAB}},
};

/* The head's mixer only reads: one weight per stream, one scale. */
static const struct row head_rows[] = {
    {"output_norm.weight", DS4_CLASS_NORM, ALL, {D_MODEL}},
    {"output_hc_fn.weight", DS4_CLASS_HYPER_FN, ALL, {HYPER_IN, HYPER}},
    {"output_hc_base.weight", DS4_CLASS_HYPER_VEC, ALL, {HYPER}},
    {"output_hc_scale.weight", DS4_CLASS_HYPER_VEC, ALL, {ONE}},
    {"output.weight", DS4_CLASS_HEAD, ALL, {D_MODEL, VOCAB}},
};

static const char *const class_names[DS4_N_CLASSES] = {
    [DS4_CLASS_EMBED] = "embedding",
    [DS4_CLASS_HEAD] = "head",
    [DS4_CLASS_NORM] = "norm",
    [DS4_CLASS_SINK] = "sinks",
    [DS4_CLASS_HYPER_FN] = "hyper mixers",
    [DS4_CLASS_HYPER_VEC] = "hyper bases",
    [DS4_CLASS_ATTENTION] = "attention",
    [DS4_CLASS_COMPRESSOR] = "compressor",
    [DS4_CLASS_POSITION] = "compressor positions",
    [DS4_CLASS_INDEXER] = "indexer",
    [DS4_CLASS_ROUTER] = "router",
    [DS4_CLASS_ROUTER_BIAS] = "router bias",
    [DS4_CLASS_HASH] = "hash table",
    [DS4_CLASS_GATE_UP] = "experts gate+up",
    [DS4_CLASS_DOWN] = "experts down",
    [DS4_CLASS_SHARED] = "shared expert",
};

const char *ds4_tensor_class_name(enum ds4_tensor_class class)
{
    return (unsigned int)class < DS4_N_CLASSES ? class_names[class] : "?";
}

/* ---- the catalogue ----------------------------------------------------------------------------- */

/* `l` is -1 at the top level, where no dimension depends on the layer. */
static int64_t dim_value(const struct ds4_model_shape *s, int32_t l, enum dim dim)
{
    switch (dim) {
    case NONE:
    case ONE:
        return 1;
    case D_MODEL:
        return s->d_model;
    case HYPER:
        return s->n_hyper;
    case HYPER_IN:
        return (int64_t)s->n_hyper * s->d_model;
    case HYPER_MIX:
        return (int64_t)(2 + s->n_hyper) * s->n_hyper;
    case HYPER_SCALES:
        return HYPER_SCALE_COUNT;
    case Q_RANK:
        return s->q_rank;
    case HEADS:
        return s->n_head;
    case D_HEAD:
        return s->d_head;
    case HEADS_WIDE:
        return (int64_t)s->n_head * s->d_head;
    case GROUP_IN:
        return (int64_t)(s->n_head / s->n_group) * s->d_head;
    case GROUPS_OUT:
        return (int64_t)s->n_group * s->o_rank;
    case COMPRESSOR:
        return (int64_t)ds4_model_compressor_width(s->ratio[l]) * s->d_head;
    case RATIO:
        return s->ratio[l];
    case INDEX_HEADS:
        return s->n_index_head;
    case INDEX_WIDE:
        return (int64_t)s->n_index_head * s->d_index;
    case INDEX_COMPRESSOR:
        return (int64_t)ds4_model_compressor_width(s->ratio[l]) * s->d_index;
    case D_INDEX:
        return s->d_index;
    case EXPERTS:
        return s->n_expert[l];
    case USED:
        return s->n_expert_used;
    case VOCAB:
        return s->n_vocab;
    case D_EXPERT:
        return s->d_expert;
    case SHARED_WIDE:
        return (int64_t)s->n_shared * s->d_expert;
    }
    return 1;
}

static bool in_layer(const struct ds4_model_shape *s, int32_t l, enum layers layers)
{
    switch (layers) {
    case ALL:
        return true;
    case COMPRESSED:
        return s->ratio[l] != DS4_RATIO_WINDOW;
    case CSA_ONLY:
        return s->ratio[l] == DS4_RATIO_CSA;
    case HASHED:
        return l < s->n_hash_layer;
    case NOT_HASHED:
        return l >= s->n_hash_layer;
    }
    return false;
}

static int visit(const struct ds4_model_shape *s, int32_t l, const struct row *rows, size_t n,
                 ds4_tensor_want_fn fn, void *arg)
{
    struct ds4_tensor_want want;
    int rc;

    for (size_t i = 0; i < n; i++) {
        const struct row *row = &rows[i];

        if (!in_layer(s, l, row->layers))
            continue;
        memset(&want, 0, sizeof(want));
        if (l < 0)
            snprintf(want.name, sizeof(want.name), "%s", row->name);
        else
            snprintf(want.name, sizeof(want.name), "blk.%" PRId32 ".%s", l, row->name);
        want.class = row->class;
        want.layer = l;
        want.n_expert = l < 0 ? 0 : s->n_expert[l];
        for (int d = 0; d < DS4_GGUF_MAX_DIMS; d++) {
            enum dim dim = d < 3 ? row->ne[d] : NONE;

            want.ne[d] = dim_value(s, l, dim);
            want.n_dims += dim != NONE;
        }
        rc = fn(arg, &want);
        if (rc != 0)
            return rc;
    }
    return 0;
}

#define VISIT(s, l, rows, fn, arg)                                                                 \
    visit((s), (l), (rows), sizeof(rows) / sizeof((rows)[0]), fn, arg)

int ds4_model_each_tensor(const struct ds4_model_shape *shape, const struct ds4_model_part *part,
                          ds4_tensor_want_fn fn, void *arg)
{
    int rc = 0;

    if (part->embed)
        rc = VISIT(shape, -1, embed_rows, fn, arg);
    for (int32_t l = part->first_layer; rc == 0 && l < part->end_layer; l++)
        rc = VISIT(shape, l, layer_rows, fn, arg);
    if (rc == 0 && part->head)
        rc = VISIT(shape, -1, head_rows, fn, arg);
    return rc;
}

static bool find_class(const char *name, const struct row *rows, size_t n,
                       enum ds4_tensor_class *out)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(rows[i].name, name) == 0) {
            *out = rows[i].class;
            return true;
        }
    }
    return false;
}

int ds4_tensor_class_of(const char *name, enum ds4_tensor_class *out)
{
    const char *rest = name + 4;

    if (strncmp(name, "blk.", 4) == 0) {
        while (*rest >= '0' && *rest <= '9')
            rest++;
        if (*rest != '.')
            return -1;
        return find_class(rest + 1, layer_rows, sizeof(layer_rows) / sizeof(layer_rows[0]), out)
                   ? 0
                   : -1;
    }
    return find_class(name, embed_rows, sizeof(embed_rows) / sizeof(embed_rows[0]), out) ||
                   find_class(name, head_rows, sizeof(head_rows) / sizeof(head_rows[0]), out)
               ? 0
               : -1;
}

/* ---- checking a file against it ---------------------------------------------------------------- */

#define TABLE_CHUNK 16384 /* hash table entries per read */

struct check {
    const struct ds4_weights_file *wf;
    const struct ds4_model_shape *shape;
    ds4_finding_fn report; /* NULL: stop at the first finding */
    void *arg;
    int32_t n_finding;
    struct ds4_err *err;
};

/* "[256, 64]" without trailing ones. */
static const char *print_ne(const int64_t ne[DS4_GGUF_MAX_DIMS], char *out, size_t cap)
{
    int last = DS4_GGUF_MAX_DIMS - 1;
    size_t len = 0;

    while (last > 0 && ne[last] == 1)
        last--;
    for (int d = 0; d <= last && len < cap; d++)
        len += (size_t)snprintf(out + len, cap - len, "%s%" PRId64, d == 0 ? "[" : ", ", ne[d]);
    if (len < cap)
        snprintf(out + len, cap - len, "]");
    return out;
}

static int check_type(const struct ds4_tensor_want *want, const struct ds4_tensor_info *info,
                      struct ds4_err *err)
{
    const char *type = ds4_gguf_tensor_type_name(info->gguf_type);
    bool is_int = info->dtype == DS4_DTYPE_I32 || info->dtype == DS4_DTYPE_I8;

    if (!info->usable)
        return ds4_fail(err, DS4_E_INVALID,
                        "tensor %s has type %" PRIu32 " (%s), which is not supported", info->name,
                        info->gguf_type, type == NULL ? "unknown" : type);
    if (want->class == DS4_CLASS_HASH && info->dtype != DS4_DTYPE_I32)
        return ds4_fail(err, DS4_E_INVALID, "tensor %s has type %s, must be I32", info->name, type);
    if (want->class != DS4_CLASS_HASH && is_int)
        return ds4_fail(err, DS4_E_INVALID, "tensor %s has type %s, must be a float or block type",
                        info->name, type);
    return 0;
}

/* The up stack shares the type of its gate stack: they are read in one pass. */
static int check_pair(const struct check *c, const struct ds4_tensor_info *info, int32_t layer,
                      struct ds4_err *err)
{
    char name[DS4_TENSOR_NAME_BYTES];
    const struct ds4_tensor_info *gate;

    snprintf(name, sizeof(name), "blk.%" PRId32 ".ffn_gate_exps.weight", layer);
    gate = ds4_weights_find(c->wf, name);
    if (gate != NULL && gate->gguf_type != info->gguf_type)
        return ds4_fail(err, DS4_E_INVALID, "tensor %s is %s, but %s is %s: they must share a type",
                        info->name, ds4_gguf_tensor_type_name(info->gguf_type), name,
                        ds4_gguf_tensor_type_name(gate->gguf_type));
    return 0;
}

/* Every entry is an index into the layer's expert stack. */
static int check_hash(const struct check *c, const struct ds4_tensor_info *info, int32_t layer,
                      struct ds4_err *err)
{
    uint8_t chunk[TABLE_CHUNK];
    size_t n;

    for (uint64_t at = 0; at < info->bytes; at += n) {
        n = info->bytes - at < sizeof(chunk) ? (size_t)(info->bytes - at) : sizeof(chunk);
        if (ds4_weights_read(c->wf, info, at, n, chunk, err))
            return -1;
        for (size_t i = 0; i < n; i += sizeof(int32_t)) {
            int32_t id = (int32_t)((uint32_t)chunk[i] | (uint32_t)chunk[i + 1] << 8 |
                                   (uint32_t)chunk[i + 2] << 16 | (uint32_t)chunk[i + 3] << 24);

            if (id < 0 || id >= c->shape->n_expert[layer])
                return ds4_fail(
                    err, DS4_E_INVALID,
                    "tensor %s: entry %" PRIu64 " is expert %" PRId32 ", the layer has %" PRId32,
                    info->name, (at + i) / sizeof(int32_t), id, c->shape->n_expert[layer]);
        }
    }
    return 0;
}

static int check_one(const struct check *c, const struct ds4_tensor_want *want, struct ds4_err *err)
{
    const struct ds4_tensor_info *info = ds4_weights_find(c->wf, want->name);
    char got[96];
    char expected[96];

    if (info == NULL)
        return ds4_fail(err, DS4_E_INVALID, "tensor %s %s is missing", want->name,
                        print_ne(want->ne, expected, sizeof(expected)));
    if (memcmp(info->ne, want->ne, sizeof(want->ne)) != 0)
        return ds4_fail(err, DS4_E_INVALID, "tensor %s is %s, expected %s", want->name,
                        print_ne(info->ne, got, sizeof(got)),
                        print_ne(want->ne, expected, sizeof(expected)));
    if (check_type(want, info, err))
        return -1;
    if (want->class == DS4_CLASS_GATE_UP)
        return check_pair(c, info, want->layer, err);
    return want->class == DS4_CLASS_HASH ? check_hash(c, info, want->layer, err) : 0;
}

static int check_wanted(void *arg, const struct ds4_tensor_want *want)
{
    struct check *c = arg;

    if (check_one(c, want, c->err) == 0)
        return 0;
    c->n_finding++;
    if (c->report == NULL)
        return -1;
    c->report(c->arg, c->err);
    return 0;
}

/* The part must lie inside the model and inside what the file says it holds. */
static int check_part(const struct ds4_model_shape *s, const struct ds4_model_part *part,
                      struct ds4_err *err)
{
    const struct ds4_model_part *has = &s->present;

    if (part->first_layer < 0 || part->first_layer > part->end_layer ||
        part->end_layer > s->n_layer)
        return ds4_fail(err, DS4_E_INVALID,
                        "layers [%" PRId32 ", %" PRId32 ") of a model of %" PRId32 " layers",
                        part->first_layer, part->end_layer, s->n_layer);
    if (part->first_layer < has->first_layer || part->end_layer > has->end_layer ||
        (part->embed && !has->embed) || (part->head && !has->head))
        return ds4_fail(err, DS4_E_INVALID,
                        "the file holds only layers [%" PRId32 ", %" PRId32 ")%s%s of the model",
                        has->first_layer, has->end_layer, has->embed ? ", the embedding" : "",
                        has->head ? ", the head" : "");
    return 0;
}

int ds4_model_require(const struct ds4_weights_file *wf, const struct ds4_model_shape *shape,
                      const struct ds4_model_part *part, struct ds4_err *err)
{
    struct check c = {wf, shape, NULL, NULL, 0, err};

    if (check_part(shape, part, err))
        return -1;
    return ds4_model_each_tensor(shape, part, check_wanted, &c);
}

int32_t ds4_model_check_tensors(const struct ds4_weights_file *wf,
                                const struct ds4_model_shape *shape,
                                const struct ds4_model_part *part, ds4_finding_fn report, void *arg)
{
    struct ds4_err err = {DS4_OK, ""};
    struct check c = {wf, shape, report, arg, 0, &err};

    if (check_part(shape, part, &err)) {
        report(arg, &err);
        return 1;
    }
    ds4_model_each_tensor(shape, part, check_wanted, &c);
    return c.n_finding;
}
