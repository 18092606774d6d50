/* The router's disk thread: jobs come back done, in their order, and the end waits for what was asked. */
#include "router/disk/shelf.h"

#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static const uint8_t fingerprint[DS4_ID_BYTES] = {9};

struct bench {
    char dir[64];
    struct ds4_shelf *shelf;
    atomic_int n_wake;
};

static void on_wake(void *arg)
{
    struct bench *b = arg;

    atomic_fetch_add(&b->n_wake, 1);
}

static void open_shelf(struct bench *b)
{
    const struct ds4_shelf_config config = {.dir = b->dir, .wake = on_wake, .wake_arg = b};
    struct ds4_err err = {0};

    b->shelf = ds4_shelf_new(&config, &err);
    assert_non_null(b->shelf);
}

static int start(void **state)
{
    struct bench *b = calloc(1, sizeof(*b));

    assert_non_null(b);
    snprintf(b->dir, sizeof(b->dir), "/tmp/ds4-shelf-XXXXXX");
    assert_non_null(mkdtemp(b->dir));
    open_shelf(b);
    *state = b;
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)kind;
    (void)where;
    return remove(path);
}

static int stop(void **state)
{
    struct bench *b = *state;

    ds4_shelf_free(b->shelf);
    assert_int_equal(nftw(b->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
    free(b);
    return 0;
}

static void submit(struct bench *b, enum ds4_shelf_kind kind, uint8_t id, uint64_t tag)
{
    uint8_t name[DS4_ID_BYTES];
    struct ds4_shelf_job *job;
    struct ds4_manifest m;
    struct ds4_buf out;

    memset(name, id, sizeof(name));
    job = ds4_shelf_job_new(kind, kind == DS4_SHELF_OPEN ? fingerprint : name, tag);
    assert_non_null(job);
    if (kind == DS4_SHELF_COMMIT) {
        assert_int_equal(ds4_manifest_init(&m, 1, 1, NULL), 0);
        memcpy(m.fingerprint, fingerprint, DS4_ID_BYTES);
        memcpy(m.commit, name, DS4_ID_BYTES);
        m.pos = 300;
        m.kind = DS4_KV_TAIL;
        m.object[0].n_file = 1;
        m.file[0].last_layer = 4;
        m.token = calloc(300, sizeof(*m.token));
        assert_non_null(m.token);
        ds4_buf_init(&out, DS4_MANIFEST_MAX_BYTES);
        assert_int_equal(ds4_manifest_write(&m, &out, NULL), 0);
        job->bytes = ds4_buf_take(&out, &job->n);
        ds4_manifest_deinit(&m);
    }
    ds4_shelf_submit(b->shelf, job);
}

static struct ds4_shelf_job *await(struct bench *b)
{
    struct ds4_shelf_job *job = NULL;

    for (int i = 0; i < 20000 && (job = ds4_shelf_next(b->shelf)) == NULL; i++)
        (void)poll(NULL, 0, 1);
    assert_non_null(job);
    return job;
}

static void jobs_come_back_in_their_order(void **state)
{
    struct bench *b = *state;

    submit(b, DS4_SHELF_OPEN, 0, 0);
    for (uint8_t i = 1; i < 20; i++)
        submit(b, DS4_SHELF_COMMIT, i, i);
    assert_int_equal(ds4_shelf_n_open(b->shelf), 20);
    for (uint64_t i = 0; i <= 20; i++) {
        struct ds4_shelf_job *job;

        if (i == 20) /* nobody asks for what is not there yet */
            submit(b, DS4_SHELF_LOAD, 7, 20);
        job = await(b);

        assert_int_equal(job->tag, i);
        assert_int_equal(job->rc, 0);
        if (i == 20)
            assert_int_equal(job->manifest.pos, 300);
        ds4_shelf_job_free(job);
    }
    assert_int_equal(ds4_shelf_n_open(b->shelf), 0);
    assert_null(ds4_shelf_next(b->shelf));
    assert_int_equal(atomic_load(&b->n_wake), 21);
}

static void without_a_folder_every_job_fails_and_says_so(void **state)
{
    struct bench *b = *state;
    struct ds4_shelf_job *job;

    submit(b, DS4_SHELF_COMMIT, 1, 1);
    job = await(b);
    assert_int_equal(job->rc, -1);
    assert_int_equal(job->err.code, DS4_E_IO);
    ds4_shelf_job_free(job);
}

static void what_was_asked_is_done_before_the_end(void **state)
{
    struct bench *b = *state;
    struct ds4_shelf_job *job;

    submit(b, DS4_SHELF_OPEN, 0, 0);
    ds4_shelf_job_free(await(b));
    for (uint8_t i = 1; i < 10; i++)
        submit(b, DS4_SHELF_COMMIT, i, i);
    ds4_shelf_free(b->shelf);
    open_shelf(b);
    submit(b, DS4_SHELF_OPEN, 0, 0);
    job = await(b);
    assert_int_equal(job->rc, 0);
    assert_int_equal(job->scan.commit.len, 9);
    ds4_shelf_job_free(job);
}

/* A prompt waits for it, and a smaller cap may have asked for thousands of removals before. */
static void a_manifest_is_read_before_all_that_waits(void **state)
{
    struct bench *b = *state;
    bool loaded = false;
    char path[256];
    int fd;

    submit(b, DS4_SHELF_OPEN, 0, 0);
    ds4_shelf_job_free(await(b));
    snprintf(path, sizeof(path), "%s/v1/0900000000000000/man/01010101010101010101010101010101.w",
             b->dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    submit(b, DS4_SHELF_INTEND, 1, 1); /* the thread stands still until somebody reads */
    submit(b, DS4_SHELF_FORGET, 2, 2);
    submit(b, DS4_SHELF_FORGET, 3, 3);
    submit(b, DS4_SHELF_LOAD, 4, 4);
    fd = open(path, O_RDONLY);
    assert_true(fd >= 0);
    for (int i = 0; i < 4; i++) {
        struct ds4_shelf_job *job = await(b);

        loaded |= job->kind == DS4_SHELF_LOAD;
        assert_true(loaded || job->kind != DS4_SHELF_FORGET);
        ds4_shelf_job_free(job);
    }
    close(fd);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(jobs_come_back_in_their_order),
        TEST(without_a_folder_every_job_fails_and_says_so),
        TEST(what_was_asked_is_done_before_the_end),
        TEST(a_manifest_is_read_before_all_that_waits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
