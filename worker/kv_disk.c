/* The disk thread: a queue of jobs, run one after the other (see kv_disk.h).
 *
 * One thread is enough: a stage reads or writes one disk, and order makes "written, then read" hold
 * without thought.  Cancelling is for the end of a generation: its memory is about to be used by another,
 * so nothing may still be on its way into it.
 *
 * Invariant: a job is in exactly one place: the free stack, the hands of the step thread, the queue, or
 * running. */
#include "worker/kv_disk.h"

#include "common/clock.h"
#include "common/log.h"
#include "worker/kv_file.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct ds4_kv_disk {
    struct ds4_kv_files files; /* the thread's own, but files.cancel */
    char dir[DS4_KV_PATH_BYTES / 2];
    pthread_t thread;
    bool started;

    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t wake;  /* a job, a cancel, a stop */
    pthread_cond_t idle;  /* the thread runs nothing */
    struct ds4_kv_job *free_job[DS4_MAX_KV_JOBS];
    int32_t n_free;
    struct ds4_kv_job *queue[DS4_MAX_KV_JOBS];
    int32_t first, n;
    bool running;
    bool stop;

    struct ds4_kv_job job[DS4_MAX_KV_JOBS];
    struct ds4_kv_job_section *sections; /* [DS4_MAX_KV_JOBS, max_section] */
};

static struct ds4_kv_job *pop_locked(struct ds4_kv_disk *d)
{
    struct ds4_kv_job *job = d->queue[d->first];

    d->first = (d->first + 1) % DS4_MAX_KV_JOBS;
    d->n--;
    return job;
}

static void put_locked(struct ds4_kv_disk *d, struct ds4_kv_job *job)
{
    d->free_job[d->n_free++] = job;
}

/* Gives back what the job was to give back. */
static void release(struct ds4_kv_job *job, bool failed)
{
    for (int b = 0; b < 2; b++)
        if (job->give[b] && (job->kind != DS4_KV_JOB_READ || failed))
            ds4_kv_host_give(job->host[b], &job->blob[b]);
    if (job->state != NULL)
        atomic_store(job->state, failed ? DS4_KV_STAGED_FAILED : DS4_KV_STAGED_READY);
}

static void run_job(struct ds4_kv_disk *d, struct ds4_kv_job *job)
{
    struct ds4_kv_done done = {.generation = job->generation, .job = job->id};
    int64_t start_ns = ds4_clock_ns();

    switch (job->kind) {
    case DS4_KV_JOB_WRITE:
        ds4_kv_file_write(&d->files, job, &done);
        break;
    case DS4_KV_JOB_READ:
        ds4_kv_file_read(&d->files, job, &done);
        break;
    case DS4_KV_JOB_UNLINK:
        ds4_kv_file_unlink(&d->files, job, &done);
        break;
    }
    done.duration_ns = ds4_clock_ns() - start_ns;
    release(job, done.reason != DS4_KV_OK);
    pthread_mutex_lock(&d->lock);
    put_locked(d, job);
    pthread_mutex_unlock(&d->lock);
    d->files.config.done(d->files.config.done_arg, &done);
}

/* Sleeps in the rate limit, but not through a cancel. */
static void pause_ns(void *arg, int64_t ns)
{
    struct ds4_kv_disk *d = arg;
    int64_t at_ns = ds4_clock_ns() + ns;
    struct timespec at = {.tv_sec = (time_t)(at_ns / DS4_NS_PER_SEC),
                          .tv_nsec = (long)(at_ns % DS4_NS_PER_SEC)};

    pthread_mutex_lock(&d->lock);
    while (!atomic_load(&d->files.cancel) && ds4_clock_ns() < at_ns)
        pthread_cond_timedwait(&d->wake, &d->lock, &at);
    pthread_mutex_unlock(&d->lock);
}

static void *run(void *arg)
{
    struct ds4_kv_disk *d = arg;

    ds4_kv_file_sweep(&d->files);
    pthread_mutex_lock(&d->lock);
    while (!d->stop || d->n > 0) {
        struct ds4_kv_job *job;

        if (d->n == 0) {
            pthread_cond_wait(&d->wake, &d->lock);
            continue;
        }
        job = pop_locked(d);
        if (d->stop && job->kind == DS4_KV_JOB_READ) { /* nobody is left to use it */
            release(job, true);
            put_locked(d, job);
            continue;
        }
        d->running = true;
        pthread_mutex_unlock(&d->lock);
        run_job(d, job);
        pthread_mutex_lock(&d->lock);
        d->running = false;
        pthread_cond_broadcast(&d->idle);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* ---- jobs ------------------------------------------------------------------------------------------- */

struct ds4_kv_job *ds4_kv_disk_take(struct ds4_kv_disk *d)
{
    struct ds4_kv_job *job = NULL;
    struct ds4_kv_job_section *section;

    pthread_mutex_lock(&d->lock);
    if (d->n_free > 0)
        job = d->free_job[--d->n_free];
    pthread_mutex_unlock(&d->lock);
    if (job == NULL)
        return NULL;
    section = job->section;
    memset(job, 0, sizeof(*job));
    job->section = section;
    return job;
}

void ds4_kv_disk_put(struct ds4_kv_disk *d, struct ds4_kv_job *job)
{
    pthread_mutex_lock(&d->lock);
    put_locked(d, job);
    pthread_mutex_unlock(&d->lock);
}

void ds4_kv_disk_submit(struct ds4_kv_disk *d, struct ds4_kv_job *job)
{
    pthread_mutex_lock(&d->lock);
    d->queue[(d->first + d->n++) % DS4_MAX_KV_JOBS] = job;
    pthread_cond_broadcast(&d->wake);
    pthread_mutex_unlock(&d->lock);
}

void ds4_kv_disk_cancel(struct ds4_kv_disk *d)
{
    pthread_mutex_lock(&d->lock);
    while (d->n > 0) {
        struct ds4_kv_job *job = pop_locked(d);

        release(job, true);
        put_locked(d, job);
    }
    atomic_store(&d->files.cancel, true);
    pthread_cond_broadcast(&d->wake);
    while (d->running)
        pthread_cond_wait(&d->idle, &d->lock);
    atomic_store(&d->files.cancel, false);
    pthread_mutex_unlock(&d->lock);
}

/* ---- life ------------------------------------------------------------------------------------------- */

static void init_sync(struct ds4_kv_disk *d)
{
    pthread_condattr_t attributes;

    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->idle, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC); /* the clock of pause_ns */
    pthread_cond_init(&d->wake, &attributes);
    pthread_condattr_destroy(&attributes);
}

struct ds4_kv_disk *ds4_kv_disk_open(const struct ds4_kv_disk_config *config, struct ds4_err *err)
{
    struct ds4_kv_disk *d = NULL;
    size_t n_section = (size_t)config->max_section;
    int rc;

    if (ds4_kv_file_make_root(config->dir, err) != 0)
        return NULL;
    d = calloc(1, sizeof(*d));
    if (d == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the disk tier");
        return NULL;
    }
    init_sync(d);
    memcpy(d->dir, config->dir, strlen(config->dir)); /* make_root checked the length */
    d->files.config = *config;
    d->files.config.dir = d->dir;
    d->files.place.path = d->dir;
    if (ds4_store_dir_check(&d->files.place, err) != 0)
        goto fail;
    d->files.pause = pause_ns;
    d->files.pause_arg = d;
    d->files.header = malloc(DS4_KV_PART_MAX_HEADER);
    d->files.section = calloc(DS4_KV_PART_MAX_SECTIONS, sizeof(*d->files.section));
    d->sections = calloc(DS4_MAX_KV_JOBS * n_section, sizeof(*d->sections));
    if (d->files.header == NULL || d->files.section == NULL || d->sections == NULL) {
        ds4_fail(err, DS4_E_NOMEM, "no memory for the disk tier");
        goto fail;
    }
    for (int32_t i = 0; i < DS4_MAX_KV_JOBS; i++) {
        d->job[i].section = d->sections + (size_t)i * n_section;
        put_locked(d, &d->job[i]);
    }
    rc = pthread_create(&d->thread, NULL, run, d);
    if (rc != 0) {
        ds4_fail(err, DS4_E_IO, "disk thread: %s", strerror(rc));
        goto fail;
    }
    d->started = true;
    return d;
fail:
    ds4_kv_disk_close(d);
    return NULL;
}

void ds4_kv_disk_close(struct ds4_kv_disk *d)
{
    if (d == NULL)
        return;
    pthread_mutex_lock(&d->lock);
    d->stop = true;
    pthread_cond_broadcast(&d->wake);
    pthread_mutex_unlock(&d->lock);
    if (d->started)
        pthread_join(d->thread, NULL);
    pthread_cond_destroy(&d->wake);
    pthread_cond_destroy(&d->idle);
    pthread_mutex_destroy(&d->lock);
    free(d->sections);
    free(d->files.section);
    free(d->files.header);
    free(d);
}
