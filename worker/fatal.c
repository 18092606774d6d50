/* The last moments of a worker.
 *
 * The step history is written by the step thread and read by whoever finds the fault, without a lock:
 * a fault inside a locked region must not hang the report.  Each field is atomic, so a torn entry can
 * at worst name a step that was just being replaced. */
#include "worker/fatal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/service.h"
#include "kernels/backend.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

struct step_note {
    atomic_int_fast64_t step_no;
    atomic_int_fast64_t begin_ns;
    atomic_uint generation;
    atomic_int n_entry;
    atomic_int n_tok;
};

static struct {
    atomic_int stage;
    _Atomic(const struct ds4_stage *) running;
    atomic_uint_fast64_t n_noted;
    struct step_note note[DS4_FATAL_STEPS];
    atomic_flag leaving;
    pthread_mutex_t report_lock; /* guards the two below */
    ds4_fatal_report_fn report;
    void *report_arg;
} fatal = {.leaving = ATOMIC_FLAG_INIT, .report_lock = PTHREAD_MUTEX_INITIALIZER};

static void leave_at_fault(const struct ds4_device_fault *fault)
{
    ds4_fatal_leave(DS4_EXIT_DEVICE, "%s: %s at %s:%d, kernel launched last: %s", fault->what,
                    fault->why, fault->file, fault->line, fault->kernel);
}

void ds4_fatal_init(int32_t stage)
{
    ds4_backend_on_fault(leave_at_fault);
    atomic_store(&fatal.stage, stage);
    atomic_store(&fatal.n_noted, 0);
}

void ds4_fatal_set_report(ds4_fatal_report_fn report, void *arg)
{
    pthread_mutex_lock(&fatal.report_lock);
    fatal.report = report;
    fatal.report_arg = arg;
    pthread_mutex_unlock(&fatal.report_lock);
}

void ds4_fatal_note_step(const struct ds4_step *step)
{
    struct step_note *note = &fatal.note[atomic_load(&fatal.n_noted) % DS4_FATAL_STEPS];

    atomic_store(&note->step_no, step->step_no);
    atomic_store(&note->begin_ns, ds4_clock_ns());
    atomic_store(&note->generation, step->generation);
    atomic_store(&note->n_entry, step->n_entry);
    atomic_store(&note->n_tok, step->n_tok);
    atomic_fetch_add(&fatal.n_noted, 1);
}

void ds4_fatal_set_stage(const struct ds4_stage *stage)
{
    atomic_store(&fatal.running, stage);
}

/* Newest first. */
static void log_steps(void)
{
    uint64_t n_noted = atomic_load(&fatal.n_noted);
    int64_t now_ns = ds4_clock_ns();

    for (uint64_t i = 0; i < n_noted && i < DS4_FATAL_STEPS; i++) {
        struct step_note *note = &fatal.note[(n_noted - 1 - i) % DS4_FATAL_STEPS];

        ds4_log(DS4_LOG_ERROR, "fatal.step",
                "generation=%u step=%" PRIdFAST64 " age_ms=%" PRId64 " entries=%d rows=%d",
                atomic_load(&note->generation), atomic_load(&note->step_no),
                (now_ns - (int64_t)atomic_load(&note->begin_ns)) / DS4_NS_PER_MS,
                atomic_load(&note->n_entry), atomic_load(&note->n_tok));
    }
}

static void fill_report(struct ds4_fatal_report *report, int exit_code)
{
    const struct ds4_stage *stage = atomic_load(&fatal.running);
    uint64_t n_noted = atomic_load(&fatal.n_noted);

    *report = (struct ds4_fatal_report){
        .stage = atomic_load(&fatal.stage),
        .exit_code = exit_code,
        .step_no = -1,
        .layer = stage == NULL ? -1 : ds4_stage_running_layer(stage),
    };
    if (n_noted > 0) {
        struct step_note *note = &fatal.note[(n_noted - 1) % DS4_FATAL_STEPS];

        report->step_no = atomic_load(&note->step_no);
        report->generation = atomic_load(&note->generation);
    }
}

void ds4_fatal_leave(int exit_code, const char *fmt, ...)
{
    struct ds4_fatal_report report;
    va_list args;

    while (atomic_flag_test_and_set(&fatal.leaving))
        pause();
    fill_report(&report, exit_code);
    va_start(args, fmt);
    vsnprintf(report.message, sizeof(report.message), fmt, args);
    va_end(args);
    ds4_log(DS4_LOG_ERROR, "fatal",
            "exit=%d meaning=\"%s\" stage=%d generation=%u step=%" PRId64
            " layer=%d message=\"%s\"",
            exit_code, ds4_exit_text(exit_code), (int)report.stage, report.generation,
            report.step_no, (int)report.layer, report.message);
    log_steps();
    pthread_mutex_lock(&fatal.report_lock);
    if (fatal.report != NULL)
        fatal.report(fatal.report_arg, &report);
    _exit(exit_code);
}
