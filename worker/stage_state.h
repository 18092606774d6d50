/* struct ds4_stage as the parts of a stage see it: stage.c owns it, layer.c and what it calls use it.
 * Nobody outside these files includes this header. */
#ifndef DS4_WORKER_STAGE_STATE_H
#define DS4_WORKER_STAGE_STATE_H

#include "common/model.h"
#include "common/weights_file.h"
#include "kernels/backend.h"
#include "proto/message.h"
#include "worker/draft.h"
#include "worker/kv_cache.h"
#include "worker/kv_keep.h"
#include "worker/kv_point.h"
#include "worker/kv_tier.h"
#include "worker/offload.h"
#include "worker/plan.h"
#include "worker/sampler.h"
#include "worker/stage.h"
#include "worker/weights.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What the newest token record said about the sequence of a slot. */
struct ds4_stage_given {
    int64_t step_no; /* -1: nothing yet */
    uint32_t flags;
    int32_t pos;   /* where the sequence stands */
    int32_t token; /* the newest; -1: none */
    int32_t n_draft;
    int32_t draft[DS4_MAX_DRAFT]; /* that may follow it */
};

struct ds4_stage {
    int32_t stage;
    int32_t n_stage;
    bool first;
    bool last;
    bool sync_layers; /* wait for the device after each layer */

    struct ds4_weights_file *file; /* owned; the mapping of weights in place */
    struct ds4_model_shape model;
    uint8_t model_digest[DS4_ID_BYTES];
    const struct ds4_backend *backend;
    struct ds4_device *dev; /* owned, with everything allocated from it */
    struct ds4_probe probe; /* what the device can do */
    double link_latency_s;  /* of a word from the device; 0 where the device is the host */
    struct ds4_plan plan;
    struct ds4_offload *offload;    /* NULL: all experts are on the device */
    const struct ds4_backend *host; /* what computes the others, and its device; owned */
    struct ds4_device *host_dev;
    uint8_t *host_experts; /* of alloc_host */
    size_t host_expert_bytes;
    struct ds4_stage_weights weights;
    struct ds4_kv kv;
    struct ds4_kv_store store;   /* points */
    struct ds4_kv_keeper keeper; /* and those inside the running step */
    void *host_arena;            /* owned, plan.n_unit units */
    struct ds4_kv_tier *tier;    /* owned; stagings and the disk */
    uint8_t kv_fingerprint[DS4_ID_BYTES];
    struct ds4_step_buffers buf;
    void *pipe_area; /* the pipe's, see ds4_stage_pipe */

    /* The running generation. */
    uint32_t generation; /* 0: none formed */
    int64_t next_step;
    int64_t noted_step;            /* newest record noted, -1 none */
    struct ds4_stage_given *given; /* [n_slot] */
    int64_t *ran_step;             /* [n_slot] newest step with rows of the slot, -1 none */
    int32_t max_seqs;              /* as formed */
    int32_t max_step_tok;

    /* The step between begin and forward, as kernels see it. */
    bool begun;
    int32_t wire_tok;              /* rows as the step counts them */
    bool unfinished;               /* forward has run, finish has not */
    struct ds4_batch batch;        /* its arrays are the four below */
    int32_t *token;                /* [max_step_tok] */
    int32_t *pos;                  /* [max_step_tok] */
    int32_t *entry_of;             /* [max_step_tok] */
    struct ds4_batch_entry *entry; /* [max_seqs] */

    /* Last stage only. */
    struct ds4_sampler sampler;
    int32_t *history; /* [n_slot, table_blocks * DS4_BLOCK_TOK] ids of each sequence */
    struct ds4_draft draft;
    struct ds4_drafts *drafts;         /* [max_seqs] for the record of the running step */
    float *host_logits;                /* [head_rows, n_vocab] */
    int32_t *head_row;                 /* [head_rows] rows of the step that are sampled */
    struct ds4_token_entry *out_entry; /* [max_seqs] */

    int64_t spread_ns;                   /* when the counts below were read from the device */
    atomic_uint_fast64_t spread_steps;   /* steps counted ... */
    atomic_uint_fast64_t spread_experts; /* ... and distinct experts of the last layer in them */
    /* struct ds4_offload_stats as of then. */
    atomic_uint_fast64_t uses_on_device;
    atomic_uint_fast64_t uses_streamed;
    atomic_uint_fast64_t uses_on_host;
    atomic_uint_fast64_t experts_moved;

    atomic_int_fast64_t nonfinite_rows;
    atomic_int running_layer; /* -1: none */
};

/* The step's operations on the sequence state (stage_kv.c): before the entries, once they are begun, and
 * after they have run. */
int ds4_stage_run_ops(struct ds4_stage *st, const struct ds4_step *step,
                      struct ds4_err *err) DS4_MUST_CHECK;
int ds4_stage_find_inner(struct ds4_stage *st, const struct ds4_step *step,
                         struct ds4_err *err) DS4_MUST_CHECK;
int ds4_stage_save_points(struct ds4_stage *st, const struct ds4_step *step,
                          struct ds4_err *err) DS4_MUST_CHECK;

/* Dense f32 views of the step's first n_tok rows. */
static inline struct ds4_tensor ds4_stage_rows(const struct ds4_stage *st, float *data, int32_t d)
{
    return ds4_tensor_2d(data, DS4_DTYPE_F32, st->batch.n_tok, d);
}

static inline struct ds4_tensor ds4_stage_heads(const struct ds4_stage *st, float *data,
                                                int32_t n_head, int32_t d_head)
{
    return ds4_tensor_3d(data, DS4_DTYPE_F32, st->batch.n_tok, n_head, d_head);
}

/* Only in a build with faults: an index no correct operation makes. */
static inline void ds4_stage_break_index(struct ds4_stage *st, int32_t *dev_index)
{
    const int32_t broken = 1 << 30;

    st->backend->upload(st->dev, dev_index, &broken, sizeof(broken));
    st->backend->sync(st->dev);
}

/* The residual of the step: [n_tok, n_hyper, d_model] in the stream's dtype. */
static inline struct ds4_tensor ds4_stage_residual(const struct ds4_stage *st)
{
    return ds4_tensor_3d(st->buf.x, st->plan.stream, st->batch.n_tok, st->model.n_hyper,
                         st->model.d_model);
}

/* y = W x over the step's rows; x [n_tok, n_group * n_col], y [n_tok, n_row]. */
static inline void ds4_stage_product(struct ds4_stage *st, const struct ds4_weight *w, float *x,
                                     float *y, int32_t n_group, bool exact)
{
    struct ds4_gemm_args a = {.w = *w,
                              .n_group = n_group,
                              .exact = exact,
                              .x = ds4_stage_rows(st, x, n_group * w->n_col),
                              .y = ds4_stage_rows(st, y, w->n_row)};

    st->backend->gemm(st->dev, &a);
}

/* Two matrices of one input: y = W x, y2 = W2 x. */
static inline void ds4_stage_products(struct ds4_stage *st, const struct ds4_weight *w,
                                      const struct ds4_weight *w2, float *x, float *y, float *y2,
                                      bool exact)
{
    struct ds4_gemm_args a = {.w = *w,
                              .n_group = 1,
                              .exact = exact,
                              .x = ds4_stage_rows(st, x, w->n_col),
                              .y = ds4_stage_rows(st, y, w->n_row),
                              .w2 = *w2,
                              .y2 = ds4_stage_rows(st, y2, w2->n_row)};

    st->backend->gemm(st->dev, &a);
}

#endif
