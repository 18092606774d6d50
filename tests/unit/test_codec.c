/* proto/codec.c and proto/check.c, steps and tokens: random legal messages come back equal; each field
 * out of range is refused by name on both sides; bytes that are no message are refused. */
#include "proto/codec.h"

#include "proto/check.h"
#include "proto/frame.h"
#include "tests/support/wire.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N_RANDOM 300

/* ---- step ---- */

static void pick_sampling(struct ds4_wire_fixture *f, struct ds4_sampling *s)
{
    float *bias;

    *s = (struct ds4_sampling){
        .temperature = ds4_wire_pick_real(f, 0, 2),
        .top_k = ds4_wire_pick(f, 0, INT32_MAX),
        .top_p = ds4_wire_pick_real(f, 0, 1),
        .min_p = ds4_wire_pick_real(f, 0, 1),
        .presence_penalty = ds4_wire_pick_real(f, -2, 2),
        .frequency_penalty = ds4_wire_pick_real(f, -2, 2),
        .repetition_penalty = ds4_wire_pick_real(f, 0.5F, 2),
        .seed = ds4_wire_next(f),
        .n_logprobs = ds4_wire_pick(f, -1, DS4_MAX_TOP_LOGPROBS),
        .n_bias = ds4_wire_pick(f, 0, 9),
        .n_allowed = ds4_wire_pick(f, 0, 9),
        .min_new_tok = ds4_wire_pick(f, 0, 100),
        .think_close_id = ds4_wire_pick(f, -1, 100),
        .think_close_guard = ds4_wire_pick(f, 0, 100),
        .force_close_at = ds4_wire_pick(f, -1, 100),
        .n_forced = ds4_wire_pick(f, 0, 9),
        .forced_after_id = ds4_wire_pick(f, -1, 100),
    };
    s->bias_id = ds4_wire_pick_ids(f, s->n_bias, INT32_MAX);
    s->allowed_id = ds4_wire_pick_ids(f, s->n_allowed, INT32_MAX);
    s->forced_id = ds4_wire_pick_ids(f, s->n_forced, INT32_MAX);
    bias = ds4_arena_take_array(&f->made, (size_t)s->n_bias, sizeof(*bias));
    for (int32_t i = 0; i < s->n_bias; i++)
        bias[i] = ds4_wire_pick_real(f, -100, 100);
    s->bias = bias;
}

static void pick_step(struct ds4_wire_fixture *f, struct ds4_step *step)
{
    int32_t first_slot = ds4_wire_pick(f, 0, DS4_MAX_SLOTS - 3 * 16);
    int32_t *close_slot, n_tok = 0;

    *step = (struct ds4_step){
        .generation = (uint32_t)ds4_wire_pick(f, 1, INT32_MAX),
        .step_no = (int64_t)(ds4_wire_next(f) >> 2) + 1,
        .n_open = ds4_wire_pick(f, 0, 5),
        .n_close = ds4_wire_pick(f, 0, 5),
        .n_entry = ds4_wire_pick(f, 0, 16),
    };
    step->open = ds4_arena_take_array(&f->made, 16, sizeof(step->open[0]));
    step->entry = ds4_arena_take_array(&f->made, 16, sizeof(step->entry[0]));
    step->close_slot = close_slot = ds4_wire_pick_ids(f, step->n_close, 0);
    for (int32_t i = 0; i < step->n_close; i++)
        close_slot[i] = first_slot + 16 + i;
    for (int32_t i = 0; i < step->n_open; i++) {
        struct ds4_seq_open *open = &step->open[i];

        *open = (struct ds4_seq_open){
            .seq = ds4_wire_next(f),
            .slot = first_slot + i,
            .epoch = (uint32_t)ds4_wire_next(f),
            .n_prompt = ds4_wire_pick(f, 1, DS4_MAX_POS),
            .max_pos = ds4_wire_pick(f, 1, DS4_MAX_POS),
            .ignore_stop = ds4_wire_next(f) & 1,
            .max_draft = ds4_wire_pick(f, 0, DS4_MAX_DRAFT),
            .n_stop = ds4_wire_pick(f, 0, DS4_MAX_STOP_IDS),
        };
        for (int32_t s = 0; s < open->n_stop; s++)
            open->stop_id[s] = ds4_wire_pick(f, 0, INT32_MAX);
        pick_sampling(f, &open->sampling);
    }
    for (int32_t i = 0; i < step->n_entry; i++) {
        struct ds4_step_entry *entry = &step->entry[i];

        *entry = (struct ds4_step_entry){
            .seq = ds4_wire_next(f),
            .slot = first_slot + i,
            .epoch = (uint32_t)ds4_wire_next(f),
            .kind = (enum ds4_entry_kind)ds4_wire_pick(f, DS4_ENTRY_PREFILL, DS4_ENTRY_VERIFY),
            .n_tok = 1,
            .sample = ds4_wire_next(f) & 1,
            .from_step = -1,
            .first_tok = n_tok,
            .first_block = ds4_wire_pick(f, 0, 100),
            .n_block = ds4_wire_pick(f, 0, 40),
        };
        if (entry->kind == DS4_ENTRY_PREFILL)
            entry->n_tok = ds4_wire_pick(f, 1, 300);
        else if (entry->kind == DS4_ENTRY_VERIFY)
            entry->n_tok = ds4_wire_pick(f, 1, 1 + DS4_MAX_DRAFT);
        if (entry->kind == DS4_ENTRY_VERIFY ||
            (entry->kind == DS4_ENTRY_DECODE && (ds4_wire_next(f) & 1)))
            entry->from_step = step->step_no - ds4_wire_pick(f, 1, 2);
        if (entry->from_step < 0) { /* there is no such step: an entry that brings its token */
            entry->from_step = -1;
            entry->kind = entry->kind == DS4_ENTRY_VERIFY ? DS4_ENTRY_PREFILL : entry->kind;
        }
        entry->sample |= entry->kind == DS4_ENTRY_VERIFY;
        entry->base_pos = ds4_wire_pick(f, 0, 100000);
        entry->cap_tok = entry->base_pos + entry->n_tok + ds4_wire_pick(f, 0, 300);
        entry->block = ds4_wire_pick_ids(f, entry->n_block, 1 << 20);
        n_tok += entry->n_tok;
    }
    step->n_tok = n_tok;
    step->token = ds4_wire_pick_ids(f, n_tok, INT32_MAX);
}

static void assert_ids_equal(const int32_t *a, const int32_t *b, int32_t n)
{
    if (n > 0)
        assert_memory_equal(a, b, (size_t)n * sizeof(*a));
}

static void assert_sampling_equal(const struct ds4_sampling *a, const struct ds4_sampling *b)
{
    struct ds4_sampling x = *a, y = *b;

    assert_int_equal(a->n_bias, b->n_bias);
    assert_int_equal(a->n_allowed, b->n_allowed);
    assert_ids_equal(a->bias_id, b->bias_id, a->n_bias);
    assert_ids_equal(a->allowed_id, b->allowed_id, a->n_allowed);
    assert_int_equal(a->n_forced, b->n_forced);
    assert_ids_equal(a->forced_id, b->forced_id, a->n_forced);
    assert_int_equal(a->forced_after_id, b->forced_after_id);
    if (a->n_bias > 0)
        assert_memory_equal(a->bias, b->bias, (size_t)a->n_bias * sizeof(float));
    assert_true(x.temperature == y.temperature && x.top_k == y.top_k && x.top_p == y.top_p &&
                x.min_p == y.min_p && x.presence_penalty == y.presence_penalty &&
                x.frequency_penalty == y.frequency_penalty &&
                x.repetition_penalty == y.repetition_penalty && x.seed == y.seed &&
                x.n_logprobs == y.n_logprobs && x.min_new_tok == y.min_new_tok &&
                x.think_close_id == y.think_close_id &&
                x.think_close_guard == y.think_close_guard && x.force_close_at == y.force_close_at);
}

static void assert_step_equal(const struct ds4_step *a, const struct ds4_step *b)
{
    assert_int_equal(a->generation, b->generation);
    assert_int_equal(a->step_no, b->step_no);
    assert_int_equal(a->n_open, b->n_open);
    assert_int_equal(a->n_close, b->n_close);
    assert_int_equal(a->n_entry, b->n_entry);
    assert_int_equal(a->n_tok, b->n_tok);
    assert_ids_equal(a->token, b->token, a->n_tok);
    assert_ids_equal(a->close_slot, b->close_slot, a->n_close);
    for (int32_t i = 0; i < a->n_open; i++) {
        const struct ds4_seq_open *x = &a->open[i], *y = &b->open[i];

        assert_true(x->seq == y->seq && x->slot == y->slot && x->epoch == y->epoch &&
                    x->n_prompt == y->n_prompt && x->max_pos == y->max_pos &&
                    x->ignore_stop == y->ignore_stop && x->max_draft == y->max_draft &&
                    x->n_stop == y->n_stop);
        assert_ids_equal(x->stop_id, y->stop_id, x->n_stop);
        assert_sampling_equal(&x->sampling, &y->sampling);
    }
    for (int32_t i = 0; i < a->n_entry; i++) {
        const struct ds4_step_entry *x = &a->entry[i], *y = &b->entry[i];

        assert_true(x->seq == y->seq && x->slot == y->slot && x->epoch == y->epoch &&
                    x->kind == y->kind && x->base_pos == y->base_pos && x->n_tok == y->n_tok &&
                    x->sample == y->sample && x->from_step == y->from_step &&
                    x->first_tok == y->first_tok && x->cap_tok == y->cap_tok &&
                    x->first_block == y->first_block && x->n_block == y->n_block);
        assert_ids_equal(x->block, y->block, x->n_block);
    }
}

static void random_steps_come_back_equal(void **state)
{
    struct ds4_wire_fixture *f = *state;

    for (int i = 0; i < N_RANDOM; i++) {
        struct ds4_step in, out;
        struct ds4_err err = {0};

        ds4_wire_start_over(f);
        pick_step(f, &in);
        if (ds4_codec_encode_step(&in, &f->arena, &f->buf, &err))
            fail_msg("%s", err.msg);
        assert_int_equal(f->arena.used_bytes, 0);
        if (ds4_codec_decode_step(ds4_wire_payload(f), in.generation, &f->arena, &out, &err))
            fail_msg("%s", err.msg);
        assert_step_equal(&in, &out);
    }
}

static void the_largest_step_fits_frame_and_arena(void **state)
{
    struct ds4_wire_fixture *f = *state;
    struct ds4_step in = {.generation = 1, .step_no = 5, .n_open = 256, .n_close = DS4_MAX_SLOTS},
                    out;
    struct ds4_err err = {0};
    int32_t *close_slot;

    ds4_wire_start_over(f);
    in.n_entry = DS4_MAX_STEP_ENTRIES;
    in.n_tok = DS4_MAX_STEP_TOK;
    in.token = ds4_wire_pick_ids(f, in.n_tok, INT32_MAX);
    in.close_slot = close_slot =
        ds4_wire_pick_ids(f, DS4_MAX_SLOTS, 0); /* the cache gives way at once */
    in.open = ds4_arena_take_array(&f->made, 256, sizeof(in.open[0]));
    in.entry = ds4_arena_take_array(&f->made, 256, sizeof(in.entry[0]));
    for (int32_t i = 0; i < DS4_MAX_SLOTS; i++)
        close_slot[i] = i;
    for (int32_t i = 0; i < 256; i++) {
        pick_sampling(f, &in.open[i].sampling);
        in.open[i].slot = i;
        in.open[i].n_prompt = in.open[i].max_pos = DS4_MAX_POS;
        in.entry[i] = (struct ds4_step_entry){
            .slot = i,
            .n_tok = DS4_MAX_STEP_TOK / 256,
            .first_tok = i * (DS4_MAX_STEP_TOK / 256),
            .from_step = -1,
            .cap_tok = DS4_MAX_POS,
            .n_block = 3000,
            .block = ds4_wire_pick_ids(f, 3000, 1 << 20),
        };
    }
    if (ds4_codec_encode_step(&in, &f->arena, &f->buf, &err))
        fail_msg("%s", err.msg);
    if (ds4_codec_decode_step(ds4_wire_payload(f), 1, &f->arena, &out, &err))
        fail_msg("%s", err.msg);
    assert_step_equal(&in, &out);
}

static void a_step_above_the_frame_maximum_is_not_sent(void **state)
{
    struct ds4_wire_fixture *f = *state;
    struct ds4_step in = {.generation = 1, .n_entry = 256, .n_tok = 256};
    struct ds4_err err = {0};

    ds4_wire_start_over(f);
    in.token = ds4_wire_pick_ids(f, 256, 5);
    in.entry = ds4_arena_take_array(&f->made, 256, sizeof(in.entry[0]));
    for (int32_t i = 0; i < 256; i++)
        in.entry[i] = (struct ds4_step_entry){
            .slot = i,
            .n_tok = 1,
            .first_tok = i,
            .from_step = -1,
            .cap_tok = 9,
            .n_block = DS4_MAX_SEQ_BLOCKS,
            .block = ds4_wire_pick_ids(f, i == 0 ? DS4_MAX_SEQ_BLOCKS : 0, 1 << 24),
        };
    for (int32_t i = 1; i < 256; i++)
        in.entry[i].block = in.entry[0].block;
    assert_int_equal(ds4_codec_encode_step(&in, &f->arena, &f->buf, &err), -1);
    assert_int_equal(err.code, DS4_E_TOO_LONG);
    assert_int_equal(f->buf.len, 0);
}

/* ---- each field out of range ---- */

/* A small legal step with everything in it: two opens, two entries of 3 and 1 tokens. */
struct sample {
    struct ds4_step step;
    struct ds4_seq_open open[2];
    struct ds4_step_entry entry[2];
    int32_t token[4];
    int32_t close_slot[2];
    int32_t id[2];
    float bias[2];
    int32_t block[2];
};

static void make_sample(struct sample *s)
{
    memset(s, 0, sizeof(*s));
    s->step = (struct ds4_step){.generation = 3,
                                .step_no = 10,
                                .n_open = 2,
                                .open = s->open,
                                .n_close = 2,
                                .close_slot = s->close_slot,
                                .n_entry = 2,
                                .entry = s->entry,
                                .n_tok = 4,
                                .token = s->token};
    s->close_slot[1] = 1;
    for (int i = 0; i < 2; i++)
        s->open[i] = (struct ds4_seq_open){
            .seq = 1,
            .slot = i,
            .n_prompt = 3,
            .max_pos = 9,
            .n_stop = 1,
            .sampling = {.temperature = 1,
                         .top_p = 1,
                         .repetition_penalty = 1,
                         .n_bias = 2,
                         .bias_id = s->id,
                         .bias = s->bias,
                         .n_allowed = 2,
                         .allowed_id = s->id},
        };
    s->entry[0] = (struct ds4_step_entry){.slot = 0,
                                          .kind = DS4_ENTRY_PREFILL,
                                          .n_tok = 3,
                                          .from_step = -1,
                                          .cap_tok = 9,
                                          .n_block = 2,
                                          .block = s->block};
    s->entry[1] = (struct ds4_step_entry){.slot = 1,
                                          .kind = DS4_ENTRY_DECODE,
                                          .n_tok = 1,
                                          .from_step = 9,
                                          .first_tok = 3,
                                          .base_pos = 8,
                                          .cap_tok = 9};
}

static int check_sample(const struct sample *s, struct ds4_err *err)
{
    *err = (struct ds4_err){0};
    return ds4_check_step(&s->step, err);
}

#define REFUSED(field, value, word)                                                                \
    do {                                                                                           \
        struct sample s;                                                                           \
        struct ds4_err err;                                                                        \
                                                                                                   \
        make_sample(&s);                                                                           \
        assert_int_equal(check_sample(&s, &err), 0);                                               \
        s.field = (value);                                                                         \
        assert_int_equal(check_sample(&s, &err), -1);                                              \
        assert_int_equal(err.code, DS4_E_PROTOCOL);                                                \
        if (strstr(err.msg, word) == NULL)                                                         \
            fail_msg("%s = %s: %s", #field, #value, err.msg);                                      \
    } while (0)

static void each_step_field_out_of_range_is_named(void **state)
{
    (void)state;
    REFUSED(step.generation, 0, "generation");
    REFUSED(step.step_no, -1, "step_no");
    REFUSED(step.n_open, 257, "n_open");
    REFUSED(step.n_open, -1, "n_open");
    REFUSED(step.n_close, DS4_MAX_SLOTS + 1, "n_close");
    REFUSED(step.n_entry, 257, "n_entry");
    REFUSED(step.n_entry, 1, "tokens");
    REFUSED(step.n_tok, DS4_MAX_STEP_TOK + 1, "n_tok");
    REFUSED(step.n_tok, 3, "first_tok + n_tok");
    REFUSED(step.token, NULL, "token");
    REFUSED(step.open, NULL, "none given");
    REFUSED(step.entry, NULL, "none given");
    REFUSED(step.close_slot, NULL, "close slot");
    REFUSED(token[2], -1, "token");
    REFUSED(close_slot[0], DS4_MAX_SLOTS, "close slot");
    REFUSED(close_slot[0], 1, "twice");
    REFUSED(entry[1].slot, 0, "twice");
    REFUSED(entry[1].slot, -1, "entry slot");
    REFUSED(entry[1].slot, DS4_MAX_SLOTS, "entry slot");
    REFUSED(entry[1].kind, (enum ds4_entry_kind)3, "kind");
    REFUSED(entry[1].kind, DS4_ENTRY_PREFILL, "prefill entry");
    REFUSED(entry[0].kind, DS4_ENTRY_VERIFY, "verify entry");
    REFUSED(open[0].max_draft, DS4_MAX_DRAFT + 1, "max_draft");
    REFUSED(entry[0].kind, DS4_ENTRY_DECODE, "n_tok");
    REFUSED(entry[0].n_tok, 0, "n_tok");
    REFUSED(entry[0].n_tok, 2, "first_tok");
    REFUSED(entry[0].n_tok, INT32_MAX, "n_tok");
    REFUSED(entry[1].first_tok, 2, "first_tok");
    REFUSED(entry[1].base_pos, 9, "base_pos");
    REFUSED(entry[1].base_pos, -1, "base_pos");
    REFUSED(entry[1].base_pos, INT32_MAX, "base_pos");
    REFUSED(entry[1].from_step, 10, "from_step");
    REFUSED(entry[1].from_step, -2, "from_step");
    REFUSED(entry[0].from_step, 1, "from_step");
    REFUSED(entry[0].cap_tok, 0, "cap_tok");
    REFUSED(entry[0].cap_tok, DS4_MAX_POS + 1, "cap_tok");
    REFUSED(entry[0].first_block, -1, "first_block");
    REFUSED(entry[0].n_block, DS4_MAX_SEQ_BLOCKS + 1, "n_block");
    REFUSED(entry[0].first_block, DS4_MAX_SEQ_BLOCKS - 1, "n_block");
    REFUSED(entry[0].block, NULL, "block");
    REFUSED(block[1], -5, "block");
}

static void each_open_field_out_of_range_is_named(void **state)
{
    (void)state;
    REFUSED(open[1].slot, 0, "twice");
    REFUSED(open[1].slot, DS4_MAX_SLOTS, "open slot");
    REFUSED(open[0].n_prompt, 0, "n_prompt");
    REFUSED(open[0].max_pos, 0, "max_pos");
    REFUSED(open[0].max_pos, DS4_MAX_POS + 1, "max_pos");
    REFUSED(open[0].n_stop, DS4_MAX_STOP_IDS + 1, "n_stop");
    REFUSED(open[0].stop_id[0], -1, "stop_id");
    REFUSED(open[0].sampling.temperature, -0.5F, "temperature");
    REFUSED(open[0].sampling.temperature, NAN, "temperature");
    REFUSED(open[0].sampling.temperature, INFINITY, "temperature");
    REFUSED(open[0].sampling.top_k, -1, "top_k");
    REFUSED(open[0].sampling.top_p, 1.5F, "top_p");
    REFUSED(open[0].sampling.top_p, NAN, "top_p");
    REFUSED(open[0].sampling.min_p, -1, "min_p");
    REFUSED(open[0].sampling.min_p, NAN, "min_p");
    REFUSED(open[0].sampling.presence_penalty, NAN, "presence_penalty");
    REFUSED(open[0].sampling.frequency_penalty, -INFINITY, "frequency_penalty");
    REFUSED(open[0].sampling.repetition_penalty, 0, "repetition_penalty");
    REFUSED(open[0].sampling.repetition_penalty, NAN, "repetition_penalty");
    REFUSED(open[0].sampling.n_logprobs, DS4_MAX_TOP_LOGPROBS + 1, "n_logprobs");
    REFUSED(open[0].sampling.n_logprobs, -2, "n_logprobs");
    REFUSED(open[0].sampling.n_bias, DS4_MAX_LOGIT_BIAS + 1, "n_bias");
    REFUSED(open[0].sampling.bias, NULL, "bias");
    REFUSED(open[0].sampling.bias_id, NULL, "bias_id");
    REFUSED(bias[1], NAN, "bias");
    REFUSED(open[0].sampling.n_allowed, -1, "n_allowed");
    REFUSED(open[0].sampling.allowed_id, NULL, "allowed_id");
    REFUSED(id[1], -1, "bias_id");
    REFUSED(open[0].sampling.min_new_tok, -1, "min_new_tok");
    REFUSED(open[0].sampling.think_close_id, -2, "think_close_id");
    REFUSED(open[0].sampling.think_close_guard, -1, "think_close_guard");
    REFUSED(open[0].sampling.force_close_at, -2, "force_close_at");
    REFUSED(open[0].sampling.n_forced, -1, "n_forced");
    REFUSED(open[0].sampling.n_forced, DS4_MAX_FORCED_IDS + 1, "n_forced");
    REFUSED(open[0].sampling.forced_after_id, -2, "forced_after_id");
}

/* What the checks refuse must be refused from the wire as well: the bytes of a legal step with one
 * field raw-edited. */
static void bad_numbers_are_refused_from_the_wire(void **state)
{
    struct ds4_wire_fixture *f = *state;
    /* step_no 1; one entry {n_tok 1, from_step -1, cap_tok 1}; token 7 */
    static const uint8_t legal[] = {0x08, 1, 0x22, 6, 0x30, 1, 0x40, 1, 0x48, 1, 0x2a, 1, 7};
    static const struct {
        size_t at;
        uint8_t value;
    } edits[] = {
        {5, 2},     /* n_tok 2 of 1 token */
        {5, 0},     /* n_tok 0 */
        {7, 2},     /* from_step 1 = the step itself */
        {9, 0},     /* cap_tok 0 */
        {4, 0x20},  /* the n_tok field becomes kind 1, n_tok is missing */
        {3, 5},     /* entry ends early */
        {3, 60},    /* entry longer than the message */
        {10, 0x2d}, /* token with a wire type of fixed32 */
        {11, 2},    /* packed array longer than the message */
        {12, 0x87}, /* varint without end */
        {0, 0x00},  /* field number 0 */
    };
    uint8_t bytes[sizeof(legal)];
    struct ds4_step out;
    struct ds4_err err = {0};

    ds4_wire_start_over(f);
    assert_int_equal(ds4_codec_decode_step((struct ds4_str){(const char *)legal, sizeof(legal)}, 1,
                                           &f->arena, &out, &err),
                     0);
    assert_int_equal(out.token[0], 7);
    for (size_t i = 0; i < sizeof(edits) / sizeof(edits[0]); i++) {
        memcpy(bytes, legal, sizeof(legal));
        bytes[edits[i].at] = edits[i].value;
        err = (struct ds4_err){0};
        if (ds4_codec_decode_step((struct ds4_str){(const char *)bytes, sizeof(bytes)}, 1,
                                  &f->arena, &out, &err) != -1)
            fail_msg("edit %zu was taken", i);
        assert_int_equal(err.code, DS4_E_PROTOCOL);
    }
}

static void an_open_without_sampling_is_refused(void **state)
{
    struct ds4_wire_fixture *f = *state;
    static const char bytes[] = {0x12, 4, 0x20, 1, 0x28, 1};
    struct ds4_step out;
    struct ds4_err err = {0};

    ds4_wire_start_over(f);
    assert_int_equal(
        ds4_codec_decode_step((struct ds4_str){bytes, sizeof(bytes)}, 1, &f->arena, &out, &err),
        -1);
    assert_non_null(strstr(err.msg, "sampling"));
}

static void a_small_frame_cannot_take_much_memory(void **state)
{
    struct ds4_wire_fixture *f = *state;
    struct ds4_step out;
    struct ds4_err err = {0};
    char *at;

    ds4_wire_start_over(f);
    at = ds4_buf_reserve(&f->buf, DS4_MAX_FRAME_BYTES);
    assert_non_null(at);
    for (size_t i = 0; i < DS4_MAX_FRAME_BYTES; i += 2) {
        at[i] = 0x22; /* an empty entry: 2 bytes here, more than 100 unpacked */
        at[i + 1] = 0;
    }
    ds4_buf_commit(&f->buf, DS4_MAX_FRAME_BYTES);
    assert_int_equal(ds4_codec_decode_step(ds4_wire_payload(f), 1, &f->arena, &out, &err), -1);
    assert_int_equal(err.code, DS4_E_NOMEM);
    assert_true(f->arena.used_bytes <= DS4_CODEC_ARENA_BYTES);
}

static void frames_above_the_maximum_are_not_unpacked(void **state)
{
    struct ds4_wire_fixture *f = *state;
    struct ds4_step out;
    struct ds4_err err = {0};

    assert_int_equal(ds4_codec_decode_step((struct ds4_str){"", DS4_MAX_FRAME_BYTES + 1}, 1,
                                           &f->arena, &out, &err),
                     -1);
    assert_int_equal(err.code, DS4_E_PROTOCOL);
}

/* ---- tokens ---- */

static void pick_tokens(struct ds4_wire_fixture *f, struct ds4_tokens_out *tokens)
{
    *tokens = (struct ds4_tokens_out){
        .generation = (uint32_t)ds4_wire_pick(f, 1, INT32_MAX),
        .step_no = (int64_t)(ds4_wire_next(f) >> 1),
        .n_entry = ds4_wire_pick(f, 0, 40),
        .compute_ns = ds4_wire_pick(f, 0, INT32_MAX),
    };
    tokens->entry = ds4_arena_take_array(&f->made, 40, sizeof(tokens->entry[0]));
    for (int32_t i = 0; i < tokens->n_entry; i++) {
        struct ds4_token_entry *entry = &tokens->entry[i];

        entry->seq = ds4_wire_next(f);
        entry->epoch = (uint32_t)ds4_wire_next(f);
        entry->pos = ds4_wire_pick(f, 0, DS4_MAX_POS);
        entry->n_token = ds4_wire_pick(f, 0, 1 + DS4_MAX_DRAFT);
        entry->flags =
            (uint32_t)ds4_wire_pick(f, 0, 15) * 2 | (entry->n_token > 0 ? DS4_TOKEN_SAMPLED : 0);
        entry->n_undone = ds4_wire_pick(f, 0, DS4_MAX_DRAFT);
        entry->n_bad_draft = ds4_wire_pick(f, 0, DS4_MAX_DRAFT);
        entry->n_nan_draft = ds4_wire_pick(f, 0, entry->n_undone);
        if (entry->n_token > 0)
            entry->n_logprob = ds4_wire_pick(f, 0, 1 + DS4_MAX_TOP_LOGPROBS);
        for (int32_t t = 0; t < entry->n_token; t++)
            entry->token[t] = ds4_wire_pick(f, 0, INT32_MAX);
        for (int32_t t = 0; t < entry->n_token * entry->n_logprob; t++)
            entry->logprob[t] =
                (struct ds4_logprob){ds4_wire_pick(f, 0, INT32_MAX), ds4_wire_pick_real(f, -30, 0)};
    }
}

static void random_tokens_come_back_equal(void **state)
{
    struct ds4_wire_fixture *f = *state;

    for (int i = 0; i < N_RANDOM; i++) {
        struct ds4_tokens_out in, out = {0};
        struct ds4_err err = {0};

        ds4_wire_start_over(f);
        pick_tokens(f, &in);
        if (ds4_codec_encode_tokens(&in, &f->arena, &f->buf, &err) ||
            ds4_codec_decode_tokens(ds4_wire_payload(f), in.generation, &f->arena, &out, &err))
            fail_msg("%s", err.msg);
        assert_int_equal(in.step_no, out.step_no);
        assert_int_equal(in.generation, out.generation);
        assert_int_equal(in.compute_ns, out.compute_ns);
        assert_int_equal(in.n_entry, out.n_entry);
        if (in.n_entry > 0)
            assert_memory_equal(in.entry, out.entry, (size_t)in.n_entry * sizeof(in.entry[0]));
    }
}

static void each_token_field_out_of_range_is_named(void **state)
{
    static const struct {
        struct ds4_token_entry entry;
        const char *word;
    } rows[] = {
        {{.pos = -1}, "pos"},
        {{.flags = 32}, "flags"},
        {{.flags = DS4_TOKEN_SAMPLED}, "flags"},
        {{.n_token = 1}, "flags"},
        {{.flags = 1, .n_token = 2 + DS4_MAX_DRAFT}, "n_token"},
        {{.flags = 1, .n_token = 1, .token = {-1}}, "token"},
        {{.n_logprob = 1}, "n_logprob"},
        {{.n_undone = 1 + DS4_MAX_DRAFT}, "n_undone"},
        {{.n_undone = -1}, "n_undone"},
        {{.n_bad_draft = 1 + DS4_MAX_DRAFT}, "n_bad_draft"},
        {{.n_undone = 1, .n_nan_draft = 2}, "n_nan_draft"},
        {{.flags = 1, .n_token = 1, .n_logprob = 2 + DS4_MAX_TOP_LOGPROBS}, "n_logprob"},
        {{.flags = 1, .n_token = 1, .n_logprob = 1, .logprob = {{-1, 0}}}, "logprob token"},
        {{.flags = 1, .n_token = 2, .n_logprob = 1, .logprob = {{0, 0}, {-1, 0}}}, "logprob token"},
        {{.flags = 1, .n_token = 1, .n_logprob = 1, .logprob = {{5, NAN}}}, "logprob of token 5"},
        {{.flags = 1, .n_token = 1, .n_logprob = 1, .logprob = {{5, -INFINITY}}},
         "logprob of token 5"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct ds4_token_entry entry = rows[i].entry;
        struct ds4_tokens_out tokens = {.generation = 1, .n_entry = 1, .entry = &entry};
        struct ds4_err err = {0};

        assert_int_equal(ds4_check_tokens(&tokens, &err), -1);
        if (strstr(err.msg, rows[i].word) == NULL)
            fail_msg("row %zu: %s", i, err.msg);
    }
}

static void uneven_logprob_lists_are_refused(void **state)
{
    struct ds4_wire_fixture *f = *state;
    /* entry { logprob_token: [1, 2], logprob: [1 float] } */
    static const char bytes[] = {0x12, 10, 0x32, 2, 1, 2, 0x3a, 4, 0, 0, 0, 0};
    struct ds4_tokens_out out;
    struct ds4_err err = {0};

    ds4_wire_start_over(f);
    assert_int_equal(
        ds4_codec_decode_tokens((struct ds4_str){bytes, sizeof(bytes)}, 1, &f->arena, &out, &err),
        -1);
    assert_non_null(strstr(err.msg, "logprob"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_steps_come_back_equal),
        cmocka_unit_test(the_largest_step_fits_frame_and_arena),
        cmocka_unit_test(a_step_above_the_frame_maximum_is_not_sent),
        cmocka_unit_test(each_step_field_out_of_range_is_named),
        cmocka_unit_test(each_open_field_out_of_range_is_named),
        cmocka_unit_test(bad_numbers_are_refused_from_the_wire),
        cmocka_unit_test(an_open_without_sampling_is_refused),
        cmocka_unit_test(a_small_frame_cannot_take_much_memory),
        cmocka_unit_test(frames_above_the_maximum_are_not_unpacked),
        cmocka_unit_test(random_tokens_come_back_equal),
        cmocka_unit_test(each_token_field_out_of_range_is_named),
        cmocka_unit_test(uneven_logprob_lists_are_refused),
    };

    return cmocka_run_group_tests(tests, ds4_wire_set_up, ds4_wire_tear_down);
}
