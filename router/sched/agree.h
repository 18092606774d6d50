/* Do all stages hold the same after every step (invariant I6)?
 *
 * The last stage's record says where each entry's sequence stands; every other stage sends a digest of the
 * same (ds4_pos_digest).  They come in any order, so the newest steps are remembered.  A step is done
 * once all stages have answered: only then may what runs beside the steps rely on it. */
#ifndef DS4_ROUTER_SCHED_AGREE_H
#define DS4_ROUTER_SCHED_AGREE_H

#include "common/err.h"
#include "proto/message.h"

#include <stdint.h>

#define DS4_AGREE_STEPS 128 /* more than can be posted at once */

struct ds4_agree {
    int32_t n_stage;
    int64_t newest[DS4_MAX_STAGES]; /* step a stage has answered last, -1 none */
    struct {
        int64_t step_no;
        uint32_t digest; /* of the stage that answered first */
    } step[DS4_AGREE_STEPS];
};

void ds4_agree_init(struct ds4_agree *agree, int32_t n_stage);

/* Stage `stage` has done step_no and stands at `digest`.  -1 with DS4_E_PROTOCOL: not the next step of
 * that stage, or another digest than the stages before it. */
int ds4_agree_add(struct ds4_agree *agree, int32_t stage, int64_t step_no, uint32_t digest,
                  struct ds4_err *err) DS4_MUST_CHECK;

#endif
