/* Progress of long work.  The rate is that of the whole time so far: it is steadier than a recent one, and
 * the time left follows from it. */
#include "common/progress.h"

#include "common/clock.h"
#include "common/log.h"

#include <stdio.h>
#include <unistd.h>

#define DS4_PROGRESS_CELLS    30
#define DS4_PROGRESS_BYTES    160
#define DS4_PROGRESS_RATED_NS (DS4_NS_PER_SEC / 2) /* a rate over less is chance */

/* The largest unit in which n is at least 1. */
static const char *unit_of(double n, double *divisor)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t at = 0;

    *divisor = 1;
    while (at + 1 < sizeof(unit) / sizeof(unit[0]) && n >= 1024 * *divisor) {
        *divisor *= 1024;
        at++;
    }
    return unit[at];
}

static void time_text(double seconds, char *text, size_t size)
{
    if (seconds < 100)
        (void)snprintf(text, size, "%.0f s", seconds);
    else if (seconds < 100 * 60)
        (void)snprintf(text, size, "%.0f min", seconds / 60);
    else
        (void)snprintf(text, size, "%.1f h", seconds / 3600);
}

void ds4_progress_text(int64_t done_bytes, int64_t total_bytes, int64_t elapsed_ns, char *text,
                       size_t size)
{
    double divisor, rate_divisor, rate, seconds = (double)elapsed_ns / (double)DS4_NS_PER_SEC;
    const char *unit = unit_of((double)total_bytes, &divisor);
    const char *rate_unit;
    char left[32];
    int used;

    if (total_bytes <= 0) {
        (void)snprintf(text, size, "0 %%");
        return;
    }
    used = snprintf(text, size, "%d %%, %.1f of %.1f %s",
                    (int)(100.0 * (double)done_bytes / (double)total_bytes),
                    (double)done_bytes / divisor, (double)total_bytes / divisor, unit);
    if (elapsed_ns < DS4_PROGRESS_RATED_NS || done_bytes <= 0 || used < 0 || (size_t)used >= size)
        return;
    rate = (double)done_bytes / seconds;
    rate_unit = unit_of(rate, &rate_divisor);
    time_text((double)(total_bytes - done_bytes) / rate, left, sizeof(left));
    (void)snprintf(text + used, size - (size_t)used, ", %.1f %s/s, %s left", rate / rate_divisor,
                   rate_unit, left);
}

void ds4_progress_begin(struct ds4_progress *p, const char *what, int64_t total_bytes)
{
    *p = (struct ds4_progress){
        .what = what,
        .total_bytes = total_bytes,
        .began_ns = ds4_clock_ns(),
        .terminal = isatty(STDERR_FILENO) == 1,
    };
    p->next_ns = p->began_ns + DS4_PROGRESS_QUIET_MS * DS4_NS_PER_MS;
}

static void draw(const struct ds4_progress *p, const char *text)
{
    char cells[DS4_PROGRESS_CELLS + 1];
    int full = p->total_bytes > 0
                   ? (int)((double)p->done_bytes / (double)p->total_bytes * DS4_PROGRESS_CELLS)
                   : 0;

    for (int i = 0; i < DS4_PROGRESS_CELLS; i++)
        cells[i] = i < full ? '#' : '.';
    cells[DS4_PROGRESS_CELLS] = '\0';
    (void)fprintf(stderr, "\r\033[K%s [%s] %s", p->what, cells, text);
    (void)fflush(stderr);
}

void ds4_progress_update(struct ds4_progress *p, int64_t done_bytes)
{
    int64_t now_ns = ds4_clock_ns();
    char text[DS4_PROGRESS_BYTES];

    p->done_bytes = done_bytes;
    if (now_ns < p->next_ns)
        return;
    p->next_ns =
        now_ns + (p->terminal ? DS4_PROGRESS_DRAW_MS : DS4_PROGRESS_LINE_MS) * DS4_NS_PER_MS;
    p->shown = true;
    ds4_progress_text(done_bytes, p->total_bytes, now_ns - p->began_ns, text, sizeof(text));
    if (p->terminal)
        draw(p, text);
    else
        ds4_log(DS4_LOG_INFO, "progress", "what=\"%s\" done=\"%s\"", p->what, text);
}

void ds4_progress_end(struct ds4_progress *p)
{
    double divisor, seconds = (double)(ds4_clock_ns() - p->began_ns) / (double)DS4_NS_PER_SEC;
    const char *unit;

    if (!p->shown)
        return;
    if (p->terminal)
        (void)fprintf(stderr, "\r\033[K");
    unit = unit_of((double)p->done_bytes / seconds, &divisor);
    ds4_log(DS4_LOG_INFO, "progress", "what=\"%s\" bytes=%lld seconds=%.1f rate=\"%.1f %s/s\"",
            p->what, (long long)p->done_bytes, seconds, (double)p->done_bytes / seconds / divisor,
            unit);
}
