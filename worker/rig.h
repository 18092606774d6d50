/* A rig on paper: which layers which card takes, and every byte of it, without a device.
 *
 * Figures are those of worker/plan.h and worker/weights.h, the functions that later carve the memory; a
 * card is its size and its read bandwidth.  Layers are cut by dynamic programming over (stage, last
 * layer): the slowest stage is as fast as it can be (prefill and several streams depend on it), and
 * among equals the fullest card has the most left.  Time is bytes read per token over bandwidth; the
 * last stage also reads the head. */
#ifndef DS4_WORKER_RIG_H
#define DS4_WORKER_RIG_H

#include "common/buf.h"
#include "common/err.h"
#include "common/model.h"
#include "worker/card.h"
#include "worker/plan.h"
#include "worker/stage.h"
#include "worker/weights.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ds4_rig_stage {
    struct ds4_card card;
    size_t total_bytes; /* of the card or the device */
    struct ds4_weights_size weights;
    struct ds4_plan plan; /* as far as it could be made */
    bool fits;
    double token_seconds; /* reads of one token */
    size_t token_bytes;
    size_t host_bytes; /* of those, read by the host: experts that are not on the card */
};

struct ds4_rig {
    struct ds4_model_shape model;
    struct ds4_partition partition;
    struct ds4_rig_stage *stage; /* [partition.n_stage], owned */
    bool fits;
    bool here; /* one stage of this machine, first_stage, on the device it found */
    int32_t first_stage;
    bool given;            /* the partition came from the settings */
    bool scratch_estimate; /* this build has no CUDA code to ask */
    int32_t context_tok;   /* of the whole rig: the smallest of the stages */
    int32_t n_block;       /* cache blocks of all sequences, the fewest of any stage */
    int32_t model_tok;     /* context at which speed is estimated */
    double token_seconds;  /* one token through all stages: the ceiling of a single stream */
    char verdict[320];     /* one sentence */
    char advice[4][200];   /* what would fit; "" = no more */
};

/* Plans `config`'s model on cards, one stage each, in this order: for the partition of the settings, else
 * for the best one.  A rig that cannot be is no error: *rig then says what does not fit and what would.
 * -1 for settings or a model that are wrong themselves.  Owns its stages: deinit, also after -1. */
int ds4_rig_plan(struct ds4_rig *rig, const struct ds4_stage_config *config,
                 const struct ds4_card *card, int32_t n_card, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_rig_deinit(struct ds4_rig *rig);

/* One stage as it would start on this machine, its device opened and asked for its free memory. */
int ds4_rig_plan_here(struct ds4_rig *rig, const struct ds4_stage_config *config,
                      struct ds4_err *err) DS4_MUST_CHECK;

/* The partition that ds4_rig_plan would choose; DS4_E_NOMEM with the verdict if none fits. */
int ds4_rig_propose(const struct ds4_weights_file *file, const struct ds4_model_shape *model,
                    const struct ds4_stage_config *config, struct ds4_partition *out,
                    struct ds4_err *err) DS4_MUST_CHECK;

/* The table for people, and all of it as one JSON object.  0, or -1 when out is full. */
int ds4_rig_print(const struct ds4_rig *rig, struct ds4_buf *out);
int ds4_rig_print_json(const struct ds4_rig *rig, struct ds4_buf *out);

#endif
