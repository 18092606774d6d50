/* Long work that says how far it is: a bar on a terminal, a line now and then in a journal.
 *
 *   struct ds4_progress p;
 *   ds4_progress_begin(&p, "loading weights", total_bytes);
 *   ... ds4_progress_update(&p, done_bytes); ...      as often as one likes
 *   ds4_progress_end(&p);
 *
 * Written to stderr.  Nothing is written for work that is over before DS4_PROGRESS_QUIET_MS.  One thread
 * at a time. */
#ifndef DS4_COMMON_PROGRESS_H
#define DS4_COMMON_PROGRESS_H

#include "common/buf.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_PROGRESS_QUIET_MS 2000  /* shorter work needs no progress */
#define DS4_PROGRESS_DRAW_MS  200   /* the bar moves so often */
#define DS4_PROGRESS_LINE_MS  10000 /* a line comes so often */

struct ds4_progress {
    const char *what; /* borrowed: "loading weights" */
    int64_t total_bytes;
    int64_t done_bytes;
    int64_t began_ns;
    int64_t next_ns;
    bool terminal; /* stderr is one */
    bool shown;
};

void ds4_progress_begin(struct ds4_progress *p, const char *what, int64_t total_bytes);
void ds4_progress_update(struct ds4_progress *p, int64_t done_bytes);
/* Removes the bar; a line tells of the whole if anything was shown. */
void ds4_progress_end(struct ds4_progress *p);

/* What a line says: "37 %, 12.1 of 32.4 GiB, 812 MiB/s, 25 s left"; without a rate before there is one.
 * elapsed_ns since the beginning. */
void ds4_progress_text(int64_t done_bytes, int64_t total_bytes, int64_t elapsed_ns, char *text,
                       size_t size);

#endif
