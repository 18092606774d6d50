/* One pipeline stage: layers [first, last) of the model, their weights, their cache, one step at a
 * time.  Step 8 to 10 of the house list; stage.c is the file to read first.
 *
 * A stage executes and never decides.  Calls per generation:
 *
 *   ds4_stage_form
 *   per step, in step order:
 *     while (ds4_stage_needs_record(st, step) >= 0)       tokens of earlier steps, from the pipe
 *         pipe take -> ds4_stage_note_record
 *     ds4_stage_begin                                     closes, opens, truncates, checks leases
 *     (stage > 0: pipe recv into ds4_stage_handoff)
 *     ds4_stage_forward                                   rows in, rows out, or tokens
 *     (not last: pipe send from there; last: pipe publish of the record)
 *     ds4_stage_finish                                    points of the state after the step
 *
 * One thread at a time (the step thread) calls everything here; the exceptions say so.  An error of
 * begin or forward is fatal for the generation: the sequences' state is undefined until the next form.
 * Nothing is allocated after ds4_stage_new returned. */
#ifndef DS4_WORKER_STAGE_H
#define DS4_WORKER_STAGE_H

#include "common/choices.h"
#include "common/err.h"
#include "common/model.h"
#include "kernels/backend.h"
#include "proto/message.h"
#include "worker/card.h"
#include "worker/kv_disk.h"
#include "worker/pipe.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ds4_stage;
struct ds4_plan;
struct ds4_weights_size;

/* See `planned` below. */
typedef void (*ds4_planned_fn)(void *arg, const struct ds4_stage *st);

struct ds4_stage_config {
    const char *model_path; /* GGUF, first part of a split file */
    enum ds4_load load;     /* MMAP uses weights in place where the backend can */
    int32_t stage;
    int32_t n_stage;
    int32_t n_partition;      /* n_stage, or 0: cut for the cards, or even without any */
    const int32_t *partition; /* layers per stage, first stage first */
    int32_t n_card;           /* n_stage, or 0 */
    struct ds4_card card[DS4_MAX_STAGES];
    const char *backend; /* "cpu" | "cuda" */
    struct ds4_device_config device;
    /* The cache rounding of the checkpoint: FP8 rows, FP4 indexer rows, stored packed.  AUTO: on but
     * for models that were not trained with it (toy shapes). */
    enum ds4_auto_switch quant_sim;
    enum ds4_stream_dtype stream; /* residual streams; AUTO: f32 on cpu, bf16 on cuda */
    int32_t context_tok;          /* 0: the file's, or what fits */
    int32_t max_seqs;          /* entries per step, <= DS4_MAX_STEP_ENTRIES; slots = max_seqs + 2 */
    int32_t max_step_tok;      /* rows per step, <= DS4_MAX_STEP_TOK */
    int32_t n_blocks;          /* cache blocks; 0: as many as fit, at most what all slots can use */
    bool offload;              /* experts that do not fit on the device stay in host memory */
    bool self_test;            /* memory of a card is tested before it is used */
    size_t memory_limit_bytes; /* the stage plans as if the device had no more; 0: all of it */
    int64_t host_bytes;        /* host memory for points and stagings; 0: none */
    const char *disk_dir;      /* the disk tier's folder; NULL or "": no disk tier */
    int32_t disk_write_mbps;   /* MB per second; 0: no limit */
    ds4_kv_done_fn kv_done;    /* told the end of every job below; the step or the disk thread */
    void *kv_done_arg;
    int32_t hot_window_tok; /* tokens that can be taken back without a restart; 0: 120 */
    int32_t max_draft;      /* drafts per sequence and step (worker/draft.h); 0: none */
    int32_t
        draft_min_match; /* tokens that must have stood together before: of the n-gram drafter */
    bool sync_layers;    /* wait for the device after each layer: a fault's report names it */
    /* Whose device memory is part of the plan, for `depth` steps in flight; NULL: none. */
    const struct ds4_pipe_ops *pipe;
    int32_t depth;
    /* May be NULL.  Called once by ds4_stage_new when the plan stands and its memory is taken, before
     * the weights are read, which may take minutes: ds4_stage_hello may be called from here on. */
    ds4_planned_fn planned;
    void *planned_arg;
};

/* Weight bytes so far and in all; called from ds4_stage_new, at least once per layer. */
typedef void (*ds4_progress_fn)(void *arg, int64_t loaded_bytes, int64_t total_bytes);

/* Opens the model and the device, plans every byte (the table goes to the log), allocates, loads this
 * stage's layers.  Owns what it opens; borrows `config` for the call.  `progress` may be NULL.  NULL
 * with err: DS4_E_INVALID (configuration or shape), DS4_E_CORRUPT (damaged file), DS4_E_NOMEM with what
 * would fit, DS4_E_IO. */
struct ds4_stage *ds4_stage_new(const struct ds4_stage_config *config, ds4_progress_fn progress,
                                void *progress_arg, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_stage_free(struct ds4_stage *st);

/* Opens model and device and plans as ds4_stage_new would, without allocating or loading; for --plan.
 * After DS4_E_NOMEM the results hold what was decided until then. */
int ds4_stage_plan(const struct ds4_stage_config *config, struct ds4_plan *plan,
                   struct ds4_weights_size *size, struct ds4_model_shape *model,
                   size_t *total_bytes, struct ds4_err *err) DS4_MUST_CHECK;

/* What this stage can offer: stage, n_stage, layers, model_digest, max_blocks, max_slots, max_context, max_draft,
 * backend, device, kv_fingerprint, hot_tok, host_bytes, unit_bytes, block_bytes, point, disk.  Leaves the other members alone.
 * Any thread. */
void ds4_stage_hello(const struct ds4_stage *st, struct ds4_hello *hello);

/* weights_bytes, kv_bytes, expert_steps, experts_touched, nonfinite_rows and what the probe measured;
 * leaves the other members alone.  Any thread. */
void ds4_stage_health(const struct ds4_stage *st, struct ds4_health *health);

/* The PCI address of the stage's card into text, "" without one.  Any thread. */
#define DS4_CARD_ADDRESS_BYTES 32
void ds4_stage_card(const struct ds4_stage *st, char text[DS4_CARD_ADDRESS_BYTES]);

/* Bytes of one row between stages: n_hyper * d_model values of the stream type. */
size_t ds4_stage_row_bytes(const struct ds4_stage *st);
/* Fills what a pipe must know of the stage: row_bytes, backend, dev, dev_area. */
void ds4_stage_pipe(const struct ds4_stage *st, struct ds4_pipe_config *config);
/* Where the rows of a step lie, in the backend's memory: [max_step_tok, ds4_stage_row_bytes].  Those
 * of the stage before go there ahead of a forward without `rows`, those for the next stand there after
 * it. */
void *ds4_stage_handoff(struct ds4_stage *st);
/* Waits until the device has done all that was queued. */
void ds4_stage_settle(struct ds4_stage *st);
bool ds4_stage_is_first(const struct ds4_stage *st);
bool ds4_stage_is_last(const struct ds4_stage *st);
/* The model's number of the layer that is running, -1 for none; for fault reports.  Any thread. */
int32_t ds4_stage_running_layer(const struct ds4_stage *st);

/* Joins a generation: drops every sequence and expects step 0.  DS4_E_PROTOCOL if the router asks for
 * more than ds4_stage_hello offered. */
int ds4_stage_form(struct ds4_stage *st, const struct ds4_form *form,
                   struct ds4_err *err) DS4_MUST_CHECK;

/* The newest earlier step whose token record must be noted before `step` can begin, or -1.  Records
 * come in step order: take and note until this is -1.  Always -1 on the last stage, whose forward notes
 * its own records. */
int64_t ds4_stage_needs_record(const struct ds4_stage *st, const struct ds4_step *step);

/* Remembers what each sequence was given, and undoes rows of drafts that were wrong.  Checks generation, step order (the one after the newest
 * noted) and counts; the checksum is the pipe's. */
int ds4_stage_note_record(struct ds4_stage *st, const struct ds4_token_record *record,
                          struct ds4_err *err) DS4_MUST_CHECK;

/* Applies what the step says before any row runs, in this order: closes (the slot's rows are gone),
 * opens, operations on the sequence state (all but POINT_SAVE), then per entry the block table, the
 * truncation to base_pos and the lease check.
 *
 * An open of a free slot starts at position 0.  An open of a slot in use binds it to the new sequence
 * and epoch and keeps its rows, so that the next turn of a conversation starts with base_pos at the
 * common prefix: the entry truncates.  base_pos is legal when it is 0, or not above the position, not
 * below the last install, and no more than the hot window below the highest position ever written.
 *
 * An entry with from_step >= 0 takes its token and place from the record of that step, a VERIFY entry its
 * drafts as well; if the sequence ended there, the entry becomes a no-op of one row.  DS4_E_PROTOCOL naming step, entry and values for
 * everything a correct router would not send. */
int ds4_stage_begin(struct ds4_stage *st, const struct ds4_step *step,
                    struct ds4_err *err) DS4_MUST_CHECK;

/* Rows of the step that was begun: what its entries take, less the drafts that were not made. */
int32_t ds4_stage_n_row(const struct ds4_stage *st);
/* The same of a step that was not: -1 while a record is missing that says how many drafts there are. */
int32_t ds4_stage_rows_of(const struct ds4_stage *st, const struct ds4_step *step);

/* Runs the layers over the step given to the last ds4_stage_begin.
 *
 *   rows    [ds4_stage_n_row, ds4_stage_row_bytes] host    in: the previous stage's rows (unread on stage 0),
 *           out: rows for the next stage (untouched on the last).  NULL: both stay in
 *           ds4_stage_handoff, and only the last stage waits for its device
 *   record  last stage: filled, crc left 0 for the pipe; others NULL
 *   out     last stage: filled, entry[] owned by the stage and valid until the next forward; others
 *           NULL.  compute_ns is set. */
int ds4_stage_forward(struct ds4_stage *st, const struct ds4_step *step, void *rows,
                      struct ds4_token_record *record, struct ds4_tokens_out *out,
                      struct ds4_err *err) DS4_MUST_CHECK;

/* What the step says after its rows have run: saves points (queued behind the rows; nothing waits), and
 * fills *done, which may be NULL.  After every forward, before the next begin; the rows and records of the
 * step may have been sent before. */
int ds4_stage_finish(struct ds4_stage *st, const struct ds4_step *step, struct ds4_step_done *done,
                     struct ds4_err *err) DS4_MUST_CHECK;

/* Jobs of the disk tier, between two steps; answered through kv_done, at once when refused. */
void ds4_stage_kv_write(struct ds4_stage *st, const struct ds4_kv_write *write);
void ds4_stage_kv_read(struct ds4_stage *st, const struct ds4_kv_read *read);
void ds4_stage_kv_unlink(struct ds4_stage *st, const struct ds4_kv_unlink *unlink);

#endif
