/* One thread, one queue in, one out (see the header).
 *
 * Invariant: a job is in exactly one place: its maker's hands, the queue, running, the answers. */
#include "router/disk/shelf.h"

#include "common/store_dir.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct queue {
    struct ds4_shelf_job *head, **tail;
};

struct ds4_shelf {
    struct ds4_shelf_config config;
    char dir[DS4_FOLDER_PATH_BYTES / 2];
    struct ds4_folder folder; /* the thread's own, and so is */
    struct ds4_store_dir place;
    pthread_t thread;
    bool started;
    int32_t n_open; /* the loop's own */

    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t wake;
    struct queue todo, done;
    bool stop;
};

static void push(struct queue *q, struct ds4_shelf_job *job)
{
    job->next = NULL;
    *q->tail = job;
    q->tail = &job->next;
}

static void push_first(struct queue *q, struct ds4_shelf_job *job)
{
    job->next = q->head;
    if (q->head == NULL)
        q->tail = &job->next;
    q->head = job;
}

static struct ds4_shelf_job *pop(struct queue *q)
{
    struct ds4_shelf_job *job = q->head;

    if (job == NULL)
        return NULL;
    q->head = job->next;
    if (q->head == NULL)
        q->tail = &q->head;
    return job;
}

static int open_folder(struct ds4_shelf *s, struct ds4_shelf_job *job)
{
    ds4_folder_close(&s->folder);
    if (s->place.known && ds4_store_dir_check(&s->place, &job->err) != 0)
        return -1;
    if (ds4_folder_open(&s->folder, s->dir, job->id, &job->err) != 0)
        return -1;
    if (ds4_store_dir_check(&s->place, &job->err) != 0)
        return -1;
    return ds4_folder_scan(&s->folder, job->id, job->local, &job->scan, &job->err);
}

static void do_job(struct ds4_shelf *s, struct ds4_shelf_job *job)
{
    struct ds4_folder *f = &s->folder;
    struct ds4_err *err = &job->err;

    switch (job->kind) {
    case DS4_SHELF_OPEN:
        job->rc = open_folder(s, job);
        break;
    case DS4_SHELF_INTEND:
        job->rc = ds4_folder_intend(f, job->id, job->bytes, job->n, err);
        break;
    case DS4_SHELF_COMMIT:
        job->rc = ds4_folder_commit(f, job->id, job->bytes, job->n, err);
        break;
    case DS4_SHELF_RETIRE:
        job->rc = ds4_folder_retire(f, job->id, job->quarantine, err);
        break;
    case DS4_SHELF_FORGET:
        job->rc = ds4_folder_forget(f, job->id, err);
        break;
    case DS4_SHELF_LOAD:
        job->rc = ds4_folder_load(f, job->id, &job->manifest, &job->reason, err);
        break;
    case DS4_SHELF_USES:
        job->rc = ds4_folder_note_uses(f, job->bytes, job->n / sizeof(struct ds4_commit_use), err);
        break;
    }
}

/* What fails in a folder that is gone says nothing about what was asked for; and a file of a manifest that
 * is not found in one is not missing. */
static void run_job(struct ds4_shelf *s, struct ds4_shelf_job *job)
{
    job->gone = job->kind != DS4_SHELF_OPEN && !ds4_folder_is_there(&s->folder);
    if (!job->gone)
        do_job(s, job);
    if (job->rc != 0 && job->kind != DS4_SHELF_OPEN)
        job->gone = !ds4_folder_is_there(&s->folder);
    if (!job->gone)
        return;
    job->rc = ds4_fail(&job->err, DS4_E_IO, "the manifests' folder is gone");
    job->reason = DS4_KV_IO;
}

static void *run(void *arg)
{
    struct ds4_shelf *s = arg;
    bool wanted;

    pthread_mutex_lock(&s->lock);
    for (;;) {
        struct ds4_shelf_job *job = pop(&s->todo);

        if (job == NULL && s->stop)
            break;
        if (job == NULL) {
            pthread_cond_wait(&s->wake, &s->lock);
            continue;
        }
        wanted = !s->stop || (job->kind != DS4_SHELF_OPEN && job->kind != DS4_SHELF_LOAD);
        pthread_mutex_unlock(&s->lock);
        if (wanted)
            run_job(s, job);
        pthread_mutex_lock(&s->lock);
        push(&s->done, job);
        if (s->config.wake != NULL)
            s->config.wake(s->config.wake_arg);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

struct ds4_shelf *ds4_shelf_new(const struct ds4_shelf_config *config, struct ds4_err *err)
{
    struct ds4_shelf *s = calloc(1, sizeof(*s));
    int rc;

    if (s == NULL || strlen(config->dir) >= sizeof(s->dir)) {
        free(s);
        ds4_fail(err, s == NULL ? DS4_E_NOMEM : DS4_E_INVALID, "kv.disk_dir is too long");
        return NULL;
    }
    s->config = *config;
    memcpy(s->dir, config->dir, strlen(config->dir));
    s->folder.lock_fd = -1;
    s->place.path = s->dir;
    s->todo.tail = &s->todo.head;
    s->done.tail = &s->done.head;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    rc = config->no_thread ? 0 : pthread_create(&s->thread, NULL, run, s);
    if (rc != 0) {
        ds4_fail(err, DS4_E_IO, "disk thread: %s", strerror(rc));
        ds4_shelf_free(s);
        return NULL;
    }
    s->started = !config->no_thread;
    return s;
}

void ds4_shelf_free(struct ds4_shelf *s)
{
    struct ds4_shelf_job *job;

    if (s == NULL)
        return;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->wake);
    pthread_mutex_unlock(&s->lock);
    if (s->started)
        pthread_join(s->thread, NULL);
    while ((job = pop(&s->todo)) != NULL || (job = pop(&s->done)) != NULL)
        ds4_shelf_job_free(job);
    ds4_folder_close(&s->folder);
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

struct ds4_shelf_job *ds4_shelf_job_new(enum ds4_shelf_kind kind, const uint8_t *id, uint64_t tag)
{
    struct ds4_shelf_job *job = calloc(1, sizeof(*job));

    if (job == NULL)
        return NULL;
    job->kind = kind;
    job->tag = tag;
    if (id != NULL)
        memcpy(job->id, id, DS4_ID_BYTES);
    return job;
}

void ds4_shelf_submit(struct ds4_shelf *s, struct ds4_shelf_job *job)
{
    s->n_open++;
    if (s->config.no_thread) {
        run_job(s, job);
        push(&s->done, job);
        return;
    }
    pthread_mutex_lock(&s->lock);
    /* Somebody waits for a load, and thousands of removals may be queued. */
    if (job->kind == DS4_SHELF_LOAD)
        push_first(&s->todo, job);
    else
        push(&s->todo, job);
    pthread_cond_broadcast(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

struct ds4_shelf_job *ds4_shelf_next(struct ds4_shelf *s)
{
    struct ds4_shelf_job *job;

    if (s->n_open == 0)
        return NULL; /* asked in every turn of the loop */
    pthread_mutex_lock(&s->lock);
    job = pop(&s->done);
    pthread_mutex_unlock(&s->lock);
    if (job != NULL)
        s->n_open--;
    return job;
}

void ds4_shelf_job_free(struct ds4_shelf_job *job)
{
    if (job == NULL)
        return;
    free(job->bytes);
    ds4_manifest_deinit(&job->manifest);
    ds4_folder_scan_deinit(&job->scan);
    free(job);
}

int32_t ds4_shelf_n_open(const struct ds4_shelf *s)
{
    return s->n_open;
}
