/* The stages' positions compared, step by step (step 12).
 *
 * Kept apart from the scheduler because the answers of different stages overtake each other: the last
 * stage's record is what goes on, the others' come when they come. */
#include "router/sched/agree.h"

#include <inttypes.h>

void ds4_agree_init(struct ds4_agree *agree, int32_t n_stage)
{
    *agree = (struct ds4_agree){.n_stage = n_stage};
    for (int32_t s = 0; s < DS4_MAX_STAGES; s++)
        agree->newest[s] = -1;
    for (int32_t i = 0; i < DS4_AGREE_STEPS; i++)
        agree->step[i].step_no = -1;
}

int ds4_agree_add(struct ds4_agree *agree, int32_t stage, int64_t step_no, uint32_t digest,
                  struct ds4_err *err)
{
    size_t i = (size_t)(step_no % DS4_AGREE_STEPS);

    if (stage < 0 || stage >= agree->n_stage || step_no != agree->newest[stage] + 1)
        return ds4_fail(err, DS4_E_PROTOCOL, "stage %d answers step %" PRId64 " after %" PRId64,
                        stage, step_no,
                        stage < 0 || stage >= agree->n_stage ? -1 : agree->newest[stage]);
    agree->newest[stage] = step_no;
    if (agree->step[i].step_no < step_no) {
        agree->step[i].step_no = step_no;
        agree->step[i].digest = digest;
        return 0;
    }
    /* A stage so far behind that the place is taken by a newer step is the watchdog's. */
    if (agree->step[i].step_no > step_no || agree->step[i].digest == digest)
        return 0;
    return ds4_fail(err, DS4_E_PROTOCOL, "stage %d stands elsewhere after step %" PRId64, stage,
                    step_no);
}
