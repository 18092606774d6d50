/* The plan of a rig as a table and as JSON.
 *
 * A column per stage, a row per use of memory in exact bytes, classes of weights that no stage has left
 * out.  Both forms are made from the same rows, so that they cannot disagree. */
#include "worker/rig.h"

#include "common/json_write.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define COLUMNS 5 /* stages side by side */
#define LABEL   24
#define CELL    17
#define GB      1e9

struct row {
    const char *label; /* of the table */
    const char *key;   /* of the JSON object */
    size_t (*bytes)(const struct ds4_rig_stage *stage);
};

static size_t weights(const struct ds4_rig_stage *s)
{
    return s->weights.device_bytes;
}

static size_t mapped(const struct ds4_rig_stage *s)
{
    return s->weights.mapped_bytes;
}

static size_t pages(const struct ds4_rig_stage *s)
{
    return s->plan.pages_bytes;
}

static size_t rings(const struct ds4_rig_stage *s)
{
    return s->plan.rings_bytes;
}

static size_t points(const struct ds4_rig_stage *s)
{
    return s->plan.points_bytes;
}

static size_t steps(const struct ds4_rig_stage *s)
{
    return s->plan.steps_bytes;
}

static size_t scratch(const struct ds4_rig_stage *s)
{
    return s->plan.scratch_bytes;
}

static size_t pipe_area(const struct ds4_rig_stage *s)
{
    return s->plan.pipe_bytes;
}

static size_t offload(const struct ds4_rig_stage *s)
{
    return s->plan.offload_bytes;
}

static size_t host_experts(const struct ds4_rig_stage *s)
{
    return s->plan.host_expert_bytes;
}

static size_t spare(const struct ds4_rig_stage *s)
{
    return s->plan.spare_bytes;
}

static size_t total(const struct ds4_rig_stage *s)
{
    return ds4_plan_total(&s->plan);
}

static size_t usable(const struct ds4_rig_stage *s)
{
    return s->plan.free_bytes;
}

static size_t card(const struct ds4_rig_stage *s)
{
    return s->total_bytes;
}

static size_t host(const struct ds4_rig_stage *s)
{
    return s->plan.host_bytes;
}

static const struct row rows[] = {
    {"weights", "weights_device", weights},
    {"weights in page cache", "weights_mapped", mapped},
    {"cache blocks", "cache_blocks", pages},
    {"cache rings", "cache_rings", rings},
    {"cache points", "cache_points", points},
    {"step buffers", "step_buffers", steps},
    {"scratch", "scratch", scratch},
    {"pipe", "pipe", pipe_area},
    {"offload buffers", "offload", offload},
    {"left free", "spare", spare},
    {"needed", "total", total},
    {"usable", "usable", usable},
    {"card", "card", card},
    {"host memory", "host", host},
    {"experts on the host", "host_experts", host_experts},
};

#define N_ROW (sizeof(rows) / sizeof(rows[0]))

static const char *class_label(int class)
{
    return class == DS4_N_CLASSES ? "rotary tables" : ds4_tensor_class_name(class);
}

/* ---- table -------------------------------------------------------------------------------------- */

/* 1234567 as "1,234,567". */
static void put_bytes(struct ds4_buf *out, size_t n)
{
    char digits[32], text[48];
    int len = snprintf(digits, sizeof(digits), "%zu", n);
    int at = 0;

    for (int i = 0; i < len; i++) {
        if (i > 0 && (len - i) % 3 == 0)
            text[at++] = ',';
        text[at++] = digits[i];
    }
    text[at] = '\0';
    (void)ds4_buf_appendf(out, "%*s", CELL, n == 0 ? "-" : text);
}

static void put_label(struct ds4_buf *out, const char *indent, const char *label)
{
    (void)ds4_buf_appendf(out, "%s%-*s", indent, LABEL - (int)strlen(indent), label);
}

static void put_words(const struct ds4_rig *rig, int32_t first, int32_t end, struct ds4_buf *out)
{
    char cell[48];

    put_label(out, "", "stage");
    for (int32_t s = first; s < end; s++)
        (void)ds4_buf_appendf(out, "%*" PRId32, CELL, rig->first_stage + s);
    (void)ds4_buf_append_byte(out, '\n');
    put_label(out, "", "memory");
    for (int32_t s = first; s < end; s++) {
        snprintf(cell, sizeof(cell), "%" PRId32 " GB", rig->stage[s].card.gib);
        (void)ds4_buf_appendf(out, "%*s", CELL, cell);
    }
    (void)ds4_buf_append_byte(out, '\n');
    put_label(out, "", "layers");
    for (int32_t s = first; s < end; s++) {
        const struct ds4_model_part *part = &rig->stage[s].plan.part;

        snprintf(cell, sizeof(cell), "%" PRId32 "-%" PRId32 "%s", part->first_layer,
                 part->end_layer - 1, part->head ? " + head" : "");
        (void)ds4_buf_appendf(out, "%*s", CELL, cell);
    }
    (void)ds4_buf_append_byte(out, '\n');
}

static void put_classes(const struct ds4_rig *rig, int32_t first, int32_t end, struct ds4_buf *out)
{
    for (int class = 0; class <= DS4_N_CLASSES; class ++) {
        size_t any = 0;

        for (int32_t s = first; s < end; s++)
            any |= rig->stage[s].weights.class_bytes[class];
        if (any == 0)
            continue;
        put_label(out, "  ", class_label(class));
        for (int32_t s = first; s < end; s++)
            put_bytes(out, rig->stage[s].weights.class_bytes[class]);
        (void)ds4_buf_append_byte(out, '\n');
    }
}

/* Experts of each layer on the card. */
static int32_t residents(const struct ds4_rig *rig, int32_t s)
{
    const struct ds4_plan *plan = &rig->stage[s].plan;

    return plan->n_resident > 0 ? plan->n_resident : rig->model.n_expert[plan->part.first_layer];
}

static void put_ends(const struct ds4_rig *rig, int32_t first, int32_t end, struct ds4_buf *out)
{
    put_label(out, "", "blocks of 256 tokens");
    for (int32_t s = first; s < end; s++)
        (void)ds4_buf_appendf(out, "%*" PRId32, CELL, rig->stage[s].plan.kv.n_block);
    (void)ds4_buf_append_byte(out, '\n');
    put_label(out, "", "experts per layer here");
    for (int32_t s = first; s < end; s++)
        (void)ds4_buf_appendf(out, "%*" PRId32, CELL, residents(rig, s));
    (void)ds4_buf_append_byte(out, '\n');
    put_label(out, "", "context");
    for (int32_t s = first; s < end; s++)
        (void)ds4_buf_appendf(out, "%*" PRId32, CELL, rig->stage[s].plan.context_tok);
    (void)ds4_buf_append_byte(out, '\n');
    if (!rig->here) {
        put_label(out, "", "ms per token (reads)");
        for (int32_t s = first; s < end; s++)
            (void)ds4_buf_appendf(out, "%*.3f", CELL, rig->stage[s].token_seconds * 1e3);
        (void)ds4_buf_append_byte(out, '\n');
    }
    put_label(out, "", "verdict");
    for (int32_t s = first; s < end; s++)
        (void)ds4_buf_appendf(out, "%*s", CELL, rig->stage[s].fits ? "fits" : "does not fit");
    (void)ds4_buf_append_text(out, "\n\n");
}

static void put_notes(const struct ds4_rig *rig, struct ds4_buf *out)
{
    size_t bytes = 0, host_bytes = 0;

    for (int32_t s = 0; s < rig->partition.n_stage; s++) {
        bytes += rig->stage[s].token_bytes;
        host_bytes += rig->stage[s].host_bytes;
    }
    (void)ds4_buf_appendf(out, "%s\n", rig->verdict);
    for (size_t i = 0; i < sizeof(rig->advice) / sizeof(rig->advice[0]); i++)
        if (rig->advice[i][0] != '\0')
            (void)ds4_buf_appendf(out, "  %s\n", rig->advice[i]);
    if (!rig->here)
        (void)ds4_buf_appendf(out,
                              "one stream reads %.2f GB per token at %" PRId32
                              " tokens: at most %.0f tokens/s, before hops and launches\n",
                              (double)bytes / GB, rig->model_tok, 1 / rig->token_seconds);
    if (host_bytes > 0)
        (void)ds4_buf_appendf(out,
                              "of these the host reads %.2f GB, at %.0f GB/s, if experts are used "
                              "evenly; favourites move to the cards\n",
                              (double)host_bytes / GB, DS4_HOST_GB_PER_S);
    if (rig->scratch_estimate)
        (void)ds4_buf_append_text(
            out, "scratch is an upper bound: this build has no CUDA code to ask\n");
}

int ds4_rig_print(const struct ds4_rig *rig, struct ds4_buf *out)
{
    int32_t n = rig->partition.n_stage;

    (void)ds4_buf_appendf(out,
                          "%s: %" PRId32 " layers; %" PRId32 " sequences, %" PRId32
                          " rows per step; all figures in bytes\n\n",
                          rig->model.name, rig->model.n_layer, rig->stage[0].plan.max_seqs,
                          rig->stage[0].plan.max_step_tok);
    for (int32_t first = 0; first < n; first += COLUMNS) {
        int32_t end = n - first < COLUMNS ? n : first + COLUMNS;

        put_words(rig, first, end, out);
        put_classes(rig, first, end, out);
        for (size_t r = 0; r < N_ROW; r++) {
            put_label(out, "", rows[r].label);
            for (int32_t s = first; s < end; s++)
                put_bytes(out, rows[r].bytes(&rig->stage[s]));
            (void)ds4_buf_append_byte(out, '\n');
        }
        put_ends(rig, first, end, out);
    }
    put_notes(rig, out);
    return out->failed ? -1 : 0;
}

/* ---- JSON --------------------------------------------------------------------------------------- */

static void json_stage(const struct ds4_rig *rig, int32_t s, struct ds4_jw *w)
{
    const struct ds4_rig_stage *stage = &rig->stage[s];

    ds4_jw_object(w);
    ds4_jw_key(w, "stage");
    ds4_jw_int(w, rig->first_stage + s);
    ds4_jw_key(w, "memory_gb");
    ds4_jw_int(w, stage->card.gib);
    ds4_jw_key(w, "first_layer");
    ds4_jw_int(w, stage->plan.part.first_layer);
    ds4_jw_key(w, "end_layer");
    ds4_jw_int(w, stage->plan.part.end_layer);
    ds4_jw_key(w, "bytes");
    ds4_jw_object(w);
    for (size_t r = 0; r < N_ROW; r++) {
        ds4_jw_key(w, rows[r].key);
        ds4_jw_int(w, (int64_t)rows[r].bytes(stage));
    }
    ds4_jw_end(w);
    ds4_jw_key(w, "weights");
    ds4_jw_object(w);
    for (int class = 0; class <= DS4_N_CLASSES; class ++) {
        ds4_jw_key(w, class_label(class));
        ds4_jw_int(w, (int64_t)stage->weights.class_bytes[class]);
    }
    ds4_jw_end(w);
    ds4_jw_key(w, "blocks");
    ds4_jw_int(w, stage->plan.kv.n_block);
    ds4_jw_key(w, "context");
    ds4_jw_int(w, stage->plan.context_tok);
    ds4_jw_key(w, "experts_per_layer");
    ds4_jw_int(w, residents(rig, s));
    ds4_jw_key(w, "host_token_bytes");
    ds4_jw_int(w, (int64_t)stage->host_bytes);
    ds4_jw_key(w, "token_bytes");
    ds4_jw_int(w, (int64_t)stage->token_bytes);
    ds4_jw_key(w, "token_seconds");
    ds4_jw_double(w, stage->token_seconds);
    ds4_jw_key(w, "fits");
    ds4_jw_bool(w, stage->fits);
    ds4_jw_end(w);
}

int ds4_rig_print_json(const struct ds4_rig *rig, struct ds4_buf *out)
{
    struct ds4_jw w;

    ds4_jw_init(&w, out);
    ds4_jw_object(&w);
    ds4_jw_key(&w, "model");
    ds4_jw_text(&w, rig->model.name);
    ds4_jw_key(&w, "fits");
    ds4_jw_bool(&w, rig->fits);
    ds4_jw_key(&w, "verdict");
    ds4_jw_text(&w, rig->verdict);
    ds4_jw_key(&w, "advice");
    ds4_jw_array(&w);
    for (size_t i = 0; i < sizeof(rig->advice) / sizeof(rig->advice[0]); i++)
        if (rig->advice[i][0] != '\0')
            ds4_jw_text(&w, rig->advice[i]);
    ds4_jw_end(&w);
    ds4_jw_key(&w, "partition");
    ds4_jw_array(&w);
    for (int32_t s = 0; s < rig->partition.n_stage; s++)
        ds4_jw_int(&w, rig->partition.n_layer[s]);
    ds4_jw_end(&w);
    ds4_jw_key(&w, "context");
    ds4_jw_int(&w, rig->context_tok);
    ds4_jw_key(&w, "cache_tokens");
    ds4_jw_int(&w, (int64_t)rig->n_block * DS4_BLOCK_TOK);
    ds4_jw_key(&w, "speed_context");
    ds4_jw_int(&w, rig->model_tok);
    ds4_jw_key(&w, "token_seconds");
    ds4_jw_double(&w, rig->token_seconds);
    ds4_jw_key(&w, "scratch_estimate");
    ds4_jw_bool(&w, rig->scratch_estimate);
    ds4_jw_key(&w, "stages");
    ds4_jw_array(&w);
    for (int32_t s = 0; s < rig->partition.n_stage; s++)
        json_stage(rig, s, &w);
    ds4_jw_end(&w);
    ds4_jw_end(&w);
    (void)ds4_buf_append_byte(out, '\n');
    return out->failed ? -1 : 0;
}
