/* Every byte of a stage, decided before the first allocation.
 *
 * The plan is arithmetic on the model's shape, the settings and what the device has free; nothing here
 * allocates.  Sizes come from the same functions that later carve the memory, so plan and use cannot
 * differ. */
#ifndef DS4_WORKER_PLAN_H
#define DS4_WORKER_PLAN_H

#include "common/err.h"
#include "common/model.h"
#include "kernels/backend.h"
#include "worker/kv_cache.h"
#include "worker/stage.h"
#include "worker/weights.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_PLAN_SPARE_SLOTS 2 /* parked or arriving sequences beside the running ones */
/* Cards have faulted at the top of their memory, and the driver takes from it later. */
#define DS4_PLAN_CARD_SPARE  ((size_t)1 << 30)
#define DS4_PLAN_OFFLOAD_TOK 32768 /* context where memory goes to experts first */

/* Device buffers of one step; n = max_tok rows. */
struct ds4_step_buffers {
    void *x;             /* [n, n_hyper, d_model] stream dtype: the residual */
    float *h;            /* [n, d_model] input of a half */
    float *y;            /* [n, d_model] its output */
    float *post;         /* [n, n_hyper] */
    float *comb;         /* [n, n_hyper, n_hyper] */
    float *q_rank;       /* [n, q_rank] */
    float *q;            /* [n, n_head, d_head] */
    float *kv;           /* [n, d_head] */
    float *comp_k;       /* [n, 2 * d_head] */
    float *comp_g;       /* [n, 2 * d_head] */
    float *index_q;      /* [n, n_index_head, d_index] */
    float *index_w;      /* [n, n_index_head] */
    int32_t *sel;        /* [n, index_topk] */
    int32_t *n_sel;      /* [n] */
    float *o;            /* [n, n_head, d_head] */
    float *o_rank;       /* [n, n_group * o_rank] */
    float *route_logit;  /* [n, n_expert] */
    int32_t *route_id;   /* [n, n_expert_used] */
    float *route_weight; /* [n, n_expert_used] */
    uint64_t *spread;    /* [2] steps counted, distinct experts in them */
    float *head_h;       /* [head_rows, d_model]; last stage */
    float *logits;       /* [head_rows, n_vocab]; last stage */
};

/* Lays the buffers out from base on; NULL measures.  Returns the bytes. */
size_t ds4_step_buffers_carve(struct ds4_step_buffers *buf, const struct ds4_model_shape *model,
                              enum ds4_dtype stream, int32_t max_tok, int32_t head_rows, bool last,
                              void *base);

struct ds4_plan_request {
    const struct ds4_model_shape *model;
    struct ds4_model_part part;
    bool quant_sim;
    enum ds4_row_format plain_format; /* of rows without quant_sim: F32 or BF16 */
    enum ds4_dtype stream;
    int32_t context_tok; /* 0: the model's, or what fits */
    int32_t max_seqs;
    int32_t max_step_tok;
    int32_t n_blocks; /* 0: what fits, at most what all running sequences can use */
    int32_t hot_tok;
    int32_t max_draft;   /* drafts per sequence and step; 0: none */
    int64_t host_budget; /* host bytes for points and stagings */
    size_t weights_device_bytes;
    size_t weights_mapped_bytes;
    int32_t n_resident;       /* experts of a layer on the device; 0: all */
    size_t offload_bytes;     /* device buffers of worker/offload.h */
    size_t host_expert_bytes; /* experts in host memory, and its buffers there */
    size_t pipe_bytes;        /* what the pipe between stages needs on the device */
    size_t free_bytes;        /* on the device now */
    size_t total_bytes;       /* of the device */
    bool own_memory;          /* a card: DS4_PLAN_CARD_SPARE stays free */
    size_t (*scratch_bytes)(const void *arg, const struct ds4_limits *limits);
    const void *scratch_arg;
};

struct ds4_plan {
    struct ds4_model_part part;
    enum ds4_dtype stream;
    size_t row_bytes; /* one row of the residual between stages */
    int32_t context_tok;
    int32_t max_seqs;
    int32_t max_step_tok;
    int32_t max_draft;
    int32_t head_rows; /* rows of a step that may be sampled: ds4_head_rows */
    struct ds4_limits limits;

    struct ds4_kv_layer_shape layer[DS4_MAX_LAYERS];
    struct ds4_kv_shape kv; /* kv.layer points at `layer` */

    size_t weights_bytes; /* device memory */
    size_t mapped_bytes;  /* weights used in place, in the page cache */
    size_t rings_bytes;
    size_t pages_bytes;
    size_t points_bytes; /* device area where points are gathered; 0 without host memory for them */
    size_t steps_bytes;
    size_t scratch_bytes;
    int32_t n_resident; /* 0: all experts */
    size_t offload_bytes;
    size_t host_expert_bytes;
    size_t pipe_bytes;
    size_t spare_bytes; /* left alone */
    size_t host_bytes;  /* tables, histories, logits on the host */
    size_t unit_bytes;  /* of host memory for points and stagings ... */
    int32_t n_unit;     /* ... and how many */
    size_t free_bytes;
};

/* What the settings ask for, for all of the model; part, weights, memory and scratch are still to fill in.
 * own_memory: on a device that is not the host. */
void ds4_plan_request_of(const struct ds4_stage_config *config, const struct ds4_model_shape *model,
                         bool own_memory, struct ds4_plan_request *out);

/* Cache blocks of one sequence of so many tokens, and of what a step may run past them. */
int32_t ds4_plan_seq_blocks(int32_t context_tok);

/* Fills *plan, which must stay where it is (kv.layer points into it).  DS4_E_INVALID for settings out of
 * range; DS4_E_NOMEM, with the bytes needed and free and what would fit: the sizes are then filled in,
 * but for pages. */
int ds4_plan_make(struct ds4_plan *plan, const struct ds4_plan_request *request,
                  struct ds4_err *err) DS4_MUST_CHECK;

/* Tells the plan what weights take with n_resident experts of each layer on the device (0: all). */
typedef int (*ds4_plan_measure_fn)(const void *arg, int32_t n_resident,
                                   struct ds4_weights_size *size, struct ds4_err *err);

/* ds4_plan_make with weights as measured: all of them on the device, or if that does not fit and
 * `offload` allows it, as many experts per layer as fit beside a cache of the context asked for (an open
 * one: DS4_PLAN_OFFLOAD_TOK) for every sequence; never fewer than one token uses.  Fills in what *rq
 * lacked. */
int ds4_plan_fit(struct ds4_plan *plan, struct ds4_plan_request *rq, bool offload,
                 ds4_plan_measure_fn measure, const void *arg, struct ds4_weights_size *size,
                 struct ds4_err *err) DS4_MUST_CHECK;

/* One row of the residual between stages. */
size_t ds4_plan_row_bytes(const struct ds4_model_shape *model, enum ds4_dtype stream);

/* Device bytes of the plan, mapped weights included. */
size_t ds4_plan_total(const struct ds4_plan *plan);

/* What must be free beyond the total before blocks are counted: each layer's pages are rounded up. */
size_t ds4_plan_slack(const struct ds4_plan *plan);

/* The table, one info line per part. */
void ds4_plan_log(const struct ds4_plan *plan);

#endif
