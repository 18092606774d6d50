/* What ranges of layers cost on cards, and the best cut of a model over them; the arithmetic of
 * worker/rig.h. */
#ifndef DS4_WORKER_RIG_CUT_H
#define DS4_WORKER_RIG_CUT_H

#include "common/err.h"
#include "common/model.h"
#include "worker/card.h"
#include "worker/plan.h"
#include "worker/stage.h"
#include "worker/weights.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS4_CUT_MODEL_TOK 16384 /* context at which reads are counted, if the rig has so much */

struct ds4_cut;

/* Measures every layer.  Borrows all three until ds4_cut_free.  n_card: how many the pipe joins. */
struct ds4_cut *ds4_cut_new(const struct ds4_weights_file *file,
                            const struct ds4_model_shape *model,
                            const struct ds4_stage_config *config, int32_t n_card,
                            struct ds4_err *err) DS4_MUST_CHECK;
void ds4_cut_free(struct ds4_cut *c);

const struct ds4_model_shape *ds4_cut_model(const struct ds4_cut *c);
const struct ds4_stage_config *ds4_cut_config(const struct ds4_cut *c);
/* True where scratch is an upper bound, because this build has no CUDA code to ask. */
bool ds4_cut_guesses(const struct ds4_cut *c);
int32_t ds4_cut_model_tok(const struct ds4_cut *c);

/* Weights of a part, and the bytes that one token reads in layers [first, end): weights, the experts it
 * uses, the cache at ds4_cut_model_tok, and the head behind the last layer. */
struct ds4_weights_size ds4_cut_size(const struct ds4_cut *c, const struct ds4_model_part *part);
size_t ds4_cut_read_bytes(const struct ds4_cut *c, int32_t first, int32_t end);

/* Of those bytes, the routed experts'. */
size_t ds4_cut_expert_bytes(const struct ds4_cut *c, int32_t first, int32_t end);

/* One stage as ds4_stage_new would plan it on a card with so much memory. */
int ds4_cut_plan(const struct ds4_cut *c, const struct ds4_model_part *part, size_t total_bytes,
                 size_t free_bytes, struct ds4_plan *plan, struct ds4_weights_size *size,
                 struct ds4_err *err) DS4_MUST_CHECK;

/* Works out what every range needs at that context: with one sequence and all experts on the card, or
 * with as few experts as offload allows.  What ds4_cut_layers goes by. */
int ds4_cut_at(struct ds4_cut *c, int32_t context_tok, bool offloads,
               struct ds4_err *err) DS4_MUST_CHECK;
/* The best cut at that context; false: none fits. */
bool ds4_cut_layers(struct ds4_cut *c, const struct ds4_card *card, int32_t n_card,
                    struct ds4_partition *out);

/* Half as long, in whole blocks. */
int32_t ds4_cut_half(int32_t context_tok);
/* The longest context from `context_tok` down, halved each time, at which a cut exists, and that cut.
 * 0: none fits; -1 with err. */
int32_t ds4_cut_find(struct ds4_cut *c, const struct ds4_card *card, int32_t n_card,
                     int32_t context_tok, struct ds4_partition *out,
                     struct ds4_err *err) DS4_MUST_CHECK;
/* With experts on the host, at the context of the settings or DS4_PLAN_OFFLOAD_TOK. */
int32_t ds4_cut_offload(struct ds4_cut *c, const struct ds4_card *card, int32_t n_card,
                        struct ds4_partition *out, struct ds4_err *err) DS4_MUST_CHECK;
/* ds4_cut_find for the context of the settings and no other, or from the model's down if they name none;
 * then, where the settings allow it, ds4_cut_offload. */
int32_t ds4_cut_choose(struct ds4_cut *c, const struct ds4_card *card, int32_t n_card,
                       struct ds4_partition *out, struct ds4_err *err) DS4_MUST_CHECK;

#endif
