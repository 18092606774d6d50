/* worker/kv_part.c, kv_file.c, kv_disk.c: a part is on the disk whole or not at all, and is read whole and
 * sound or not at all.  Every section kind is damaged, every header byte is flipped, writers are killed at
 * any moment and at chosen ones (in the build with faults), disks are full. */
#include "common/fault.h"
#include "common/log.h"
#include "worker/kv_disk.h"
#include "worker/kv_part.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define UNIT      4096
#define N_UNIT    4000
#define N_SECTION 7 /* one of each kind */
#define N_LAYER   2

struct fixture {
    char dir[64];
    struct ds4_kv_disk *disk;
    struct ds4_kv_host host;
    uint8_t *arena;
    pthread_mutex_t lock; /* guards the two below */
    pthread_cond_t told;
    struct ds4_kv_done done;
    int n_done;
    atomic_int state;
    size_t section_bytes; /* of every section of the jobs below */
};

static void on_done(void *arg, const struct ds4_kv_done *done)
{
    struct fixture *f = arg;

    pthread_mutex_lock(&f->lock);
    f->done = *done;
    f->n_done++;
    pthread_cond_signal(&f->told);
    pthread_mutex_unlock(&f->lock);
}

static struct ds4_kv_done await(struct fixture *f)
{
    struct ds4_kv_done done;

    pthread_mutex_lock(&f->lock);
    while (f->n_done == 0)
        pthread_cond_wait(&f->told, &f->lock);
    f->n_done--;
    done = f->done;
    pthread_mutex_unlock(&f->lock);
    return done;
}

static const struct ds4_kv_part sample = {.fingerprint = {1, 2, 3},
                                          .key = {0xab, 7},
                                          .commit = {9, 9},
                                          .kind = DS4_KV_TAIL,
                                          .first_layer = 4,
                                          .last_layer = 4 + N_LAYER,
                                          .begin = 1024,
                                          .end = 1100,
                                          .row_format = DS4_KV_FORMAT_F32};

static void open_disk(struct fixture *f, int32_t write_mbps)
{
    struct ds4_kv_disk_config config = {.dir = f->dir,
                                        .row_format = DS4_KV_FORMAT_F32,
                                        .first_layer = sample.first_layer,
                                        .last_layer = sample.last_layer,
                                        .max_section = N_SECTION,
                                        .write_mbps = write_mbps,
                                        .done = on_done,
                                        .done_arg = f};
    struct ds4_err err = {0};

    memcpy(config.fingerprint, sample.fingerprint, DS4_ID_BYTES);
    f->disk = ds4_kv_disk_open(&config, &err);
    if (f->disk == NULL)
        fail_msg("%s", err.msg);
}

static void remove_tree(const char *path)
{
    char command[128];

    snprintf(command, sizeof(command), "%s", path);
    if (fork() == 0) {
        execlp("rm", "rm", "-rf", command, (char *)NULL);
        _exit(1);
    }
    wait(NULL);
}

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    snprintf(f->dir, sizeof(f->dir), "/tmp/ds4-kv-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    f->arena = malloc((size_t)UNIT * N_UNIT);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->told, NULL);
    assert_int_equal(ds4_kv_host_init(&f->host, f->arena, UNIT, N_UNIT, NULL), 0);
    ds4_kv_host_reset(&f->host, (int64_t)UNIT * N_UNIT);
    f->section_bytes = 3 * UNIT + 100;
    open_disk(f, 0);
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;

    ds4_kv_disk_close(f->disk);
    ds4_kv_host_deinit(&f->host);
    remove_tree(f->dir);
    free(f->arena);
    free(f);
    return 0;
}

/* ---- jobs ------------------------------------------------------------------------------------------- */

static uint8_t byte_at(uint8_t seed, size_t i)
{
    return (uint8_t)(seed + i * 7 + i / 256);
}

/* One section of each kind; the odd ones in blob 1, one of them empty. */
static struct ds4_kv_job *make_job(struct fixture *f, enum ds4_kv_job_kind kind,
                                   const struct ds4_kv_part *part)
{
    struct ds4_kv_job *job = ds4_kv_disk_take(f->disk);
    size_t used[2] = {0};

    assert_non_null(job);
    job->kind = kind;
    job->generation = 1;
    job->id = 5;
    job->part = *part;
    for (int s = 0; s < N_SECTION; s++) {
        size_t bytes = s == 4 ? 0 : f->section_bytes;

        job->section[s] = (struct ds4_kv_job_section){.layer = part->first_layer + s % N_LAYER,
                                                      .kind = s + 1,
                                                      .rows = s == 4 ? 0 : 10 + s,
                                                      .bytes = bytes,
                                                      .blob = s % 2,
                                                      .offset = used[s % 2]};
        used[s % 2] += bytes;
    }
    job->n_section = N_SECTION;
    for (int b = 0; b < 2; b++) {
        job->host[b] = &f->host;
        job->give[b] = true;
        assert_int_equal(ds4_kv_host_take(&f->host, used[b], &job->blob[b], NULL), 0);
    }
    return job;
}

static void fill(struct fixture *f, struct ds4_kv_blob *blob, uint8_t seed)
{
    struct ds4_kv_cursor cursor = ds4_kv_cursor_at(&f->host, blob, 0);
    size_t i = 0, n;
    uint8_t *at;

    while (at = ds4_kv_cursor_next(&cursor, blob->bytes, &n), n > 0)
        for (size_t k = 0; k < n; k++)
            at[k] = byte_at(seed, i++);
}

static struct ds4_kv_done write_part(struct fixture *f, const struct ds4_kv_part *part)
{
    struct ds4_kv_job *job = make_job(f, DS4_KV_JOB_WRITE, part);

    fill(f, &job->blob[0], part->key[0]);
    fill(f, &job->blob[1], (uint8_t)(part->key[0] + 1));
    ds4_kv_disk_submit(f->disk, job);
    return await(f);
}

/* Reads what write_part wrote; checks every byte when it went well. */
static struct ds4_kv_done read_part(struct fixture *f, const struct ds4_kv_part *part,
                                    const struct ds4_kv_done *written)
{
    struct ds4_kv_job *job = make_job(f, DS4_KV_JOB_READ, part);
    struct ds4_kv_blob blob[2] = {job->blob[0], job->blob[1]};
    struct ds4_kv_done done;

    job->n_ref = 1;
    job->ref[0] = (struct ds4_kv_part_ref){
        .first_layer = part->first_layer, .last_layer = part->last_layer, .bytes = written->bytes};
    memcpy(job->ref[0].digest, written->digest, DS4_ID_BYTES);
    job->state = &f->state;
    atomic_store(&f->state, DS4_KV_STAGED_LOADING);
    ds4_kv_disk_submit(f->disk, job);
    done = await(f);
    assert_int_equal(atomic_load(&f->state),
                     done.reason == DS4_KV_OK ? DS4_KV_STAGED_READY : DS4_KV_STAGED_FAILED);
    for (int b = 0; b < 2 && done.reason == DS4_KV_OK; b++) {
        struct ds4_kv_cursor cursor = ds4_kv_cursor_at(&f->host, &blob[b], 0);
        size_t i = 0, n;
        uint8_t *at;

        while (at = ds4_kv_cursor_next(&cursor, blob[b].bytes, &n), n > 0)
            for (size_t k = 0; k < n; k++)
                if (at[k] != byte_at((uint8_t)(part->key[0] + b), i++))
                    fail_msg("byte %zu of blob %d", i - 1, b);
        ds4_kv_host_give(&f->host, &blob[b]);
    }
    assert_int_equal(ds4_kv_host_used_bytes(&f->host), 0); /* whatever happened */
    return done;
}

/* ---- files ------------------------------------------------------------------------------------------ */

static void path_of(const struct fixture *f, const struct ds4_kv_part *part,
                    char path[DS4_KV_PATH_BYTES])
{
    assert_true(ds4_kv_part_path(path, f->dir, part));
}

static uint8_t *load_file(const char *path, size_t *n)
{
    FILE *file = fopen(path, "rb");
    uint8_t *bytes;
    struct stat st;

    assert_non_null(file);
    assert_int_equal(fstat(fileno(file), &st), 0);
    *n = (size_t)st.st_size;
    bytes = malloc(*n + 1);
    assert_int_equal(fread(bytes, 1, *n, file), *n);
    fclose(file);
    return bytes;
}

static void store_file(const char *path, const uint8_t *bytes, size_t n)
{
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    fclose(file);
}

static bool is_there(const char *path, const char *suffix)
{
    char name[DS4_KV_PATH_BYTES + 32];

    snprintf(name, sizeof(name), "%s%s", path, suffix);
    return access(name, F_OK) == 0;
}

/* Files of a folder whose name has `mark`; all with NULL. */
static int count_files(const char *path, const char *mark)
{
    char folder[DS4_KV_PATH_BYTES];
    struct dirent *entry;
    int n = 0;
    DIR *dir;

    snprintf(folder, sizeof(folder), "%s", path);
    *strrchr(folder, '/') = 0;
    dir = opendir(folder);
    while (dir != NULL && (entry = readdir(dir)) != NULL)
        n += entry->d_name[0] != '.' && (mark == NULL || strstr(entry->d_name, mark) != NULL);
    if (dir != NULL)
        closedir(dir);
    return n;
}

/* ---- sound parts ------------------------------------------------------------------------------------- */

static void a_part_comes_back_byte_by_byte(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_done written = write_part(f, &sample), done;
    struct stat st;

    assert_int_equal(written.reason, DS4_KV_OK);
    assert_false(written.existed);
    assert_int_equal(written.job, 5);
    path_of(f, &sample, path);
    assert_non_null(strstr(path, "/v1/0102030000000000/tail/ab/ab07000000000000"));
    assert_non_null(strstr(path, ".s4-5"));
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(st.st_size, written.bytes);
    *strrchr(path, '/') = 0;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    done = read_part(f, &sample, &written);
    assert_int_equal(done.reason, DS4_KV_OK);
    assert_int_equal(done.bytes, 6 * f->section_bytes);
}

static void a_part_that_is_there_is_not_written_again(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_part other = sample;
    struct ds4_kv_done first = write_part(f, &sample), again;
    struct stat before, after;

    path_of(f, &sample, path);
    assert_int_equal(stat(path, &before), 0);
    other.commit[0] = 1; /* another commit of the same tokens */
    again = write_part(f, &other);
    assert_int_equal(again.reason, DS4_KV_OK);
    assert_true(again.existed);
    assert_int_equal(again.bytes, first.bytes);
    assert_memory_equal(again.digest, first.digest, DS4_ID_BYTES);
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
}

static void a_tail_that_another_commit_wrote_is_read_and_not_put_away(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_part other = sample;
    struct ds4_kv_done again;

    (void)write_part(f, &sample);
    other.commit[0] = 1;
    again = write_part(f, &other);
    assert_true(again.existed);
    assert_int_equal(read_part(f, &other, &again).reason, DS4_KV_OK);
    path_of(f, &sample, path);
    assert_true(is_there(path, ""));
}

static void a_part_that_is_there_and_damaged_is_written_again(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_done done;

    (void)write_part(f, &sample);
    path_of(f, &sample, path);
    store_file(path, (const uint8_t *)"rubbish", 7);
    done = write_part(f, &sample);
    assert_int_equal(done.reason, DS4_KV_OK);
    assert_false(done.existed);
    assert_true(is_there(path, ".bad"));
    assert_int_equal(read_part(f, &sample, &done).reason, DS4_KV_OK);
}

static void a_part_is_unlinked_or_put_away(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];

    path_of(f, &sample, path);
    for (int round = 0; round < 3; round++) { /* the last one: there is none */
        struct ds4_kv_job *job;

        if (round < 2)
            assert_int_equal(write_part(f, &sample).reason, DS4_KV_OK);
        job = ds4_kv_disk_take(f->disk);
        job->kind = DS4_KV_JOB_UNLINK;
        job->part = sample;
        job->quarantine = round == 1;
        ds4_kv_disk_submit(f->disk, job);
        assert_int_equal(await(f).reason, DS4_KV_OK);
        assert_false(is_there(path, ""));
        assert_int_equal(is_there(path, ".bad"), round >= 1);
    }
}

/* ---- damage ----------------------------------------------------------------------------------------- */

/* The file with those bytes in the place of the part: how it is refused. */
static enum ds4_kv_reason read_changed(struct fixture *f, const uint8_t *bytes, size_t n,
                                       const struct ds4_kv_done *ref)
{
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_done done;

    path_of(f, &sample, path);
    store_file(path, bytes, n);
    done = read_part(f, &sample, ref);
    if (done.reason != DS4_KV_OK) {
        assert_true(done.text[0] != 0);
        assert_false(is_there(path, "")); /* nobody tries it twice */
        assert_true(is_there(path, ".bad"));
    }
    return done.reason;
}

static void a_flipped_byte_in_any_section_is_found(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_done written = write_part(f, &sample);
    struct ds4_kv_part_section section[N_SECTION];
    struct ds4_kv_part part = {.section = section};
    enum ds4_kv_reason reason;
    size_t n;
    uint8_t *bytes;

    path_of(f, &sample, path);
    bytes = load_file(path, &n);
    assert_int_equal(ds4_kv_part_read(bytes, DS4_KV_PART_ALIGN, n, N_SECTION, &part, &reason, NULL),
                     0);
    assert_int_equal(part.n_section, N_SECTION);
    for (int s = 0; s < N_SECTION; s++) {
        const size_t at[] = {0, section[s].bytes / 2, section[s].bytes - 1};

        for (int i = 0; i < 3 && section[s].bytes > 0; i++) {
            bytes[section[s].offset + at[i]] ^= 1;
            assert_int_equal(read_changed(f, bytes, n, &written), DS4_KV_BAD_CRC);
            bytes[section[s].offset + at[i]] ^= 1;
        }
    }
    assert_int_equal(read_changed(f, bytes, n, &written), DS4_KV_OK);
    free(bytes);
}

static void a_flipped_bit_anywhere_in_the_header_is_found(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_done written = write_part(f, &sample);
    size_t n;
    uint8_t *bytes;

    path_of(f, &sample, path);
    bytes = load_file(path, &n);
    for (size_t i = 0; i < DS4_KV_PART_ALIGN; i += i < 400 ? 1 : 61) {
        bytes[i] ^= (uint8_t)(1 << i % 8);
        if (read_changed(f, bytes, n, &written) == DS4_KV_OK)
            fail_msg("byte %zu", i);
        bytes[i] ^= (uint8_t)(1 << i % 8);
    }
    free(bytes);
}

static void a_cut_part_is_found(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_done written = write_part(f, &sample);
    size_t n;
    uint8_t *bytes;

    path_of(f, &sample, path);
    bytes = load_file(path, &n);
    for (size_t i = 0; i < 6; i++) {
        const size_t cut[] = {0, 100, 4095, 4096, n - 4096, n - 1};
        struct ds4_kv_done ref = written;

        assert_int_equal(read_changed(f, bytes, cut[i], &written), DS4_KV_BAD_SIZE);
        ref.bytes = cut[i]; /* even if the manifest were as wrong; the last byte is padding */
        if (cut[i] < n - 1)
            assert_int_equal(read_changed(f, bytes, cut[i], &ref), DS4_KV_BAD_SIZE);
    }
    free(bytes);
}

/* A header that is sound in itself but not the one that was asked for; `change` does the rest. */
static enum ds4_kv_reason read_other(struct fixture *f, void (*change)(struct ds4_kv_part *part))
{
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_done written = write_part(f, &sample);
    struct ds4_kv_part_section section[N_SECTION];
    struct ds4_kv_part part = {.section = section};
    enum ds4_kv_reason reason;
    size_t n;
    uint8_t *bytes;

    assert_int_equal(written.reason, DS4_KV_OK);
    path_of(f, &sample, path);
    bytes = load_file(path, &n);
    assert_int_equal(ds4_kv_part_read(bytes, DS4_KV_PART_ALIGN, n, N_SECTION, &part, &reason, NULL),
                     0);
    change(&part);
    part.payload_bytes = 0;
    for (int32_t s = 0; s < part.n_section; s++)
        part.payload_bytes += section[s].bytes;
    ds4_kv_part_write(&part, bytes);
    ds4_kv_part_digest(bytes, DS4_KV_PART_ALIGN, written.digest);
    reason = read_changed(f, bytes, n, &written);
    free(bytes);
    return reason;
}

static void change_nothing(struct ds4_kv_part *part)
{
    part->created_ns++;
}
static void change_fingerprint(struct ds4_kv_part *part)
{
    part->fingerprint[15]++;
}
static void change_format(struct ds4_kv_part *part)
{
    part->row_format = DS4_KV_FORMAT_BF16;
}
static void change_key(struct ds4_kv_part *part)
{
    part->key[15]++;
}
static void change_commit(struct ds4_kv_part *part)
{
    part->commit[0]++;
}
static void change_kind(struct ds4_kv_part *part)
{
    part->kind = DS4_KV_ANCHOR;
}
static void change_range(struct ds4_kv_part *part)
{
    part->end++;
}
static void change_layers(struct ds4_kv_part *part)
{
    part->last_layer++;
}
static void drop_section(struct ds4_kv_part *part)
{
    part->n_section--;
}
static void change_section_layer(struct ds4_kv_part *part)
{
    part->section[2].layer++;
}
static void change_rows(struct ds4_kv_part *part)
{
    part->section[1].rows--;
}
static void shorten_section(struct ds4_kv_part *part)
{
    part->section[1].bytes--;
}
static void overlap_sections(struct ds4_kv_part *part)
{
    part->section[2].offset = part->section[1].offset;
}
static void move_section_outside(struct ds4_kv_part *part)
{
    part->section[6].offset = UINT64_MAX / 4096 * 4096;
}

static void a_sound_header_of_something_else_is_refused_with_its_reason(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(read_other(f, change_nothing), DS4_KV_OK);
    assert_int_equal(read_other(f, change_fingerprint), DS4_KV_BAD_FINGERPRINT);
    assert_int_equal(read_other(f, change_format), DS4_KV_BAD_FINGERPRINT);
    assert_int_equal(read_other(f, change_key), DS4_KV_BAD_TOKENS);
    assert_int_equal(read_other(f, change_commit), DS4_KV_OK); /* the same tokens, see above */
    assert_int_equal(read_other(f, change_kind), DS4_KV_BAD_TOKENS);
    assert_int_equal(read_other(f, change_range), DS4_KV_BAD_TOKENS);
    assert_int_equal(read_other(f, change_layers), DS4_KV_MISSING_PART);
    assert_int_equal(read_other(f, drop_section), DS4_KV_MISSING_PART);
    assert_int_equal(read_other(f, change_section_layer), DS4_KV_MISSING_PART);
    assert_int_equal(read_other(f, change_rows), DS4_KV_BAD_SIZE);
    assert_int_equal(read_other(f, shorten_section), DS4_KV_BAD_SIZE);
    assert_int_equal(read_other(f, overlap_sections), DS4_KV_BAD_SIZE);
    assert_int_equal(read_other(f, move_section_outside), DS4_KV_BAD_SIZE);
}

static void no_file_and_the_header_of_another_write_are_refused(void **state)
{
    struct fixture *f = *state;
    struct ds4_kv_done written = {.bytes = 4096};

    assert_int_equal(read_part(f, &sample, &written).reason, DS4_KV_MISSING_PART);
    written = write_part(f, &sample);
    written.digest[3] ^= 1;
    assert_int_equal(read_part(f, &sample, &written).reason, DS4_KV_BAD_CRC);
}

/* ---- disks ------------------------------------------------------------------------------------------ */

/* Runs `body` in a child of its own; its exit status. */
static int in_child(struct fixture *f, int (*body)(struct fixture *f))
{
    pid_t pid;
    int status;

    fflush(NULL);
    pid = fork();
    if (pid == 0)
        _exit(body(f));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

enum { CHILD_OK, CHILD_WRONG, CHILD_SKIPPED = 77 };

/* The thread sanitizer ends a child that starts threads. */
#ifdef __SANITIZE_THREAD__
#define NEEDS_FORK() skip()
#else
#define NEEDS_FORK() (void)0
#endif

/* The disk thread did not come along through fork: a new one. */
static void reopen_disk(struct fixture *f)
{
    open_disk(f, 0);
}

static int write_beyond_a_limit(struct fixture *f)
{
    const struct rlimit limit = {40000, 40000};
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_done done;

    signal(SIGXFSZ, SIG_IGN);
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
        return CHILD_SKIPPED;
    reopen_disk(f);
    done = write_part(f, &sample);
    path_of(f, &sample, path);
    return done.reason == DS4_KV_NO_SPACE && done.text[0] != 0 && count_files(path, NULL) == 0
               ? CHILD_OK
               : CHILD_WRONG;
}

static void a_write_that_the_system_refuses_leaves_nothing(void **state)
{
    NEEDS_FORK();
    assert_int_equal(in_child(*state, write_beyond_a_limit), CHILD_OK);
}

static int write_to_a_full_disk(struct fixture *f)
{
    char path[DS4_KV_PATH_BYTES], filler[DS4_KV_PATH_BYTES];
    struct ds4_kv_done done;

    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("none", f->dir, "tmpfs", 0, "size=256k") != 0)
        return CHILD_SKIPPED;
    reopen_disk(f);
    path_of(f, &sample, path);
    done = write_part(f, &sample); /* 6 sections of 13 kB fit once, not twice */
    if (done.reason != DS4_KV_OK)
        return CHILD_WRONG;
    snprintf(filler, sizeof(filler), "%s/filler", f->dir);
    f->section_bytes = 5 * UNIT;
    for (int i = 0; i < 2; i++) {
        struct ds4_kv_part other = sample;

        other.key[1] = (uint8_t)(100 + i);
        done = write_part(f, &other);
    }
    return done.reason == DS4_KV_NO_SPACE && strstr(done.text, "free") != NULL &&
                   count_files(path, ".tmp.") == 0
               ? CHILD_OK
               : CHILD_WRONG;
}

static void a_full_disk_refuses_before_it_writes(void **state)
{
    int rc;

    NEEDS_FORK();
    rc = in_child(*state, write_to_a_full_disk);
    if (rc == CHILD_SKIPPED)
        skip(); /* no mount namespaces here */
    assert_int_equal(rc, CHILD_OK);
}

static void a_folder_that_cannot_be_made_is_an_error_of_the_start(void **state)
{
    struct ds4_kv_disk_config config = {
        .dir = "/proc/ds4-kv", .last_layer = 1, .max_section = 1, .done = on_done};
    struct ds4_err err = {0};

    (void)state;
    assert_null(ds4_kv_disk_open(&config, &err));
    assert_int_equal(err.code, DS4_E_IO);
}

static double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void what_waits_is_written_before_the_end_and_writes_keep_to_the_rate(void **state)
{
    struct fixture *f = *state;
    struct ds4_kv_part part = sample;
    double start;

    part.key[0] ^= 1;
    ds4_kv_disk_submit(f->disk, make_job(f, DS4_KV_JOB_WRITE, &part));
    ds4_kv_disk_close(f->disk); /* which used to drop what waited */
    assert_int_equal(await(f).reason, DS4_KV_OK);
    open_disk(f, 10);
    f->section_bytes = 250 * 1000; /* 1.5 MB in all */
    start = seconds();
    assert_int_equal(write_part(f, &sample).reason, DS4_KV_OK);
    assert_true(seconds() - start > 0.12); /* 0.15 s, less the last piece */
}

static void a_cancelled_write_leaves_nothing_and_is_over_at_once(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_job *job;

    ds4_kv_disk_close(f->disk);
    open_disk(f, 1);
    f->section_bytes = 900 * 1000; /* 5 s */
    job = make_job(f, DS4_KV_JOB_WRITE, &sample);
    ds4_kv_disk_submit(f->disk, job);
    path_of(f, &sample, path);
    for (int i = 0; i < 20000 && count_files(path, ".tmp.") == 0; i++)
        usleep(1000);
    assert_int_equal(count_files(path, ".tmp."), 1);
    f->section_bytes = 1000;
    for (int i = 0; i < 3; i++) /* and some that wait */
        ds4_kv_disk_submit(f->disk, make_job(f, DS4_KV_JOB_WRITE, &sample));
    ds4_kv_disk_cancel(f->disk);
    assert_int_equal(count_files(path, NULL), 0);
    assert_int_equal(ds4_kv_host_used_bytes(&f->host), 0);
    assert_int_equal(await(f).reason, DS4_KV_CANCELLED);
    assert_int_equal(write_part(f, &sample).reason, DS4_KV_OK); /* small now: life goes on */
}

static void jobs_are_never_more_than_the_pool(void **state)
{
    struct fixture *f = *state;
    struct ds4_kv_job *job[DS4_MAX_KV_JOBS];

    for (int i = 0; i < DS4_MAX_KV_JOBS; i++)
        assert_non_null(job[i] = ds4_kv_disk_take(f->disk));
    assert_null(ds4_kv_disk_take(f->disk));
    for (int i = 0; i < DS4_MAX_KV_JOBS; i++)
        ds4_kv_disk_put(f->disk, job[i]);
    assert_non_null(job[0] = ds4_kv_disk_take(f->disk));
    ds4_kv_disk_put(f->disk, job[0]);
}

static void old_temporary_files_are_swept_young_ones_stay(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES], name[DS4_KV_PATH_BYTES + 32];
    const struct timespec old[] = {{.tv_sec = 1000}, {.tv_sec = 1000}};

    assert_int_equal(write_part(f, &sample).reason, DS4_KV_OK);
    path_of(f, &sample, path);
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof(name), "%s.tmp.%d.aa", path, i);
        store_file(name, (const uint8_t *)"x", 1);
        if (i == 0)
            assert_int_equal(utimensat(AT_FDCWD, name, old, 0), 0);
    }
    ds4_kv_disk_close(f->disk);
    open_disk(f, 0);
    assert_int_equal(write_part(f, &sample).reason, DS4_KV_OK); /* behind the sweep */
    assert_false(is_there(path, ".tmp.0.aa"));
    assert_true(is_there(path, ".tmp.1.aa"));
    assert_true(is_there(path, ""));
}

static void parts_put_away_are_few_and_go_after_a_week(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES], name[DS4_KV_PATH_BYTES + 32];
    const struct timespec old[] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    struct ds4_kv_part part = sample;
    int n_bad = 0;

    for (int i = 0; i < 40; i++) {
        part.key[1] = (uint8_t)i;
        (void)write_part(f, &part);
        path_of(f, &part, path);
        store_file(path, (const uint8_t *)"rubbish", 7);
        assert_int_equal(write_part(f, &part).reason, DS4_KV_OK);
        n_bad += is_there(path, ".bad");
    }
    assert_int_equal(n_bad, 16);
    for (int i = 0; i < 2; i++) {
        part.key[1] = (uint8_t)i;
        path_of(f, &part, path);
        snprintf(name, sizeof(name), "%s.bad", path);
        if (i == 0)
            assert_int_equal(utimensat(AT_FDCWD, name, old, 0), 0);
    }
    ds4_kv_disk_close(f->disk);
    open_disk(f, 0);
    assert_int_equal(write_part(f, &part).reason, DS4_KV_OK); /* behind the sweep */
    assert_true(is_there(path, ".bad"));
    part.key[1] = 0;
    path_of(f, &part, path);
    assert_false(is_there(path, ".bad"));
    assert_true(is_there(path, ""));
}

/* ---- kill -9 ---------------------------------------------------------------------------------------- */

static int write_for_ever(struct fixture *f)
{
    struct ds4_kv_part part = sample;

    reopen_disk(f);
    for (int i = 0;; i++) {
        part.key[1] = (uint8_t)i;
        if (write_part(f, &part).reason != DS4_KV_OK)
            return CHILD_WRONG;
    }
}

/* Whatever is there under a final name is whole; the digest is in nobody's manifest, so the header says. */
static int check_whole(struct fixture *f, const struct ds4_kv_part *part)
{
    char path[DS4_KV_PATH_BYTES];
    struct ds4_kv_done written = {0};
    size_t n;
    uint8_t *bytes;

    path_of(f, part, path);
    if (!is_there(path, ""))
        return 0;
    bytes = load_file(path, &n);
    assert_true(n >= DS4_KV_PART_ALIGN);
    written.bytes = n;
    ds4_kv_part_digest(bytes, DS4_KV_PART_ALIGN, written.digest);
    free(bytes);
    assert_int_equal(read_part(f, part, &written).reason, DS4_KV_OK);
    return 1;
}

static void a_writer_killed_at_any_moment_leaves_whole_parts_only(void **state)
{
    struct fixture *f = *state;
    int n_whole = 0;

    NEEDS_FORK();
    for (int round = 0; round < 12 || (n_whole == 0 && round < 60); round++) {
        struct ds4_kv_part part = sample;
        pid_t pid;

        fflush(NULL);
        pid = fork();
        if (pid == 0)
            _exit(write_for_ever(f));
        usleep((useconds_t)(3000 + round * 3700));
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        for (int i = 0; i < 256; i++) {
            part.key[1] = (uint8_t)i;
            n_whole += check_whole(f, &part);
        }
    }
    assert_true(n_whole > 0);
}

#ifdef DS4_FAULTS

static int write_with_fault(struct fixture *f)
{
    reopen_disk(f);
    (void)write_part(f, &sample);
    return CHILD_OK;
}

static void set(const char *fault)
{
    struct ds4_err err = {0};

    if (ds4_fault_set(fault, 0, &err) != 0)
        fail_msg("%s", err.msg);
}

static void a_writer_killed_at_a_save_point_leaves_a_part_or_none(void **state)
{
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];

    NEEDS_FORK();
    path_of(f, &sample, path);
    set("kill_before_rename:1:0");
    assert_int_equal(in_child(f, write_with_fault), 128 + SIGKILL);
    assert_false(is_there(path, ""));
    assert_int_equal(count_files(path, ".tmp."), 1);
    set("kill_after_part_before_manifest:1:0");
    assert_int_equal(in_child(f, write_with_fault), 128 + SIGKILL);
    set(NULL);
    assert_int_equal(check_whole(f, &sample), 1);
}

static void each_fault_of_a_write_leaves_nothing(void **state)
{
    static const struct {
        const char *fault;
        enum ds4_kv_reason reason;
    } rows[] = {{"write_enospc:1:0", DS4_KV_NO_SPACE},
                {"write_enospc:3:0", DS4_KV_NO_SPACE},
                {"fsync_eio:1:0", DS4_KV_IO},
                {"rename_fail:1:0", DS4_KV_IO}};
    struct fixture *f = *state;
    char path[DS4_KV_PATH_BYTES];

    path_of(f, &sample, path);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        set(rows[i].fault);
        assert_int_equal(write_part(f, &sample).reason, rows[i].reason);
        assert_int_equal(count_files(path, NULL), 0);
        assert_int_equal(ds4_kv_host_used_bytes(&f->host), 0);
    }
    set(NULL);
    assert_int_equal(write_part(f, &sample).reason, DS4_KV_OK);
}

static void each_fault_of_a_read_is_refused_with_its_reason(void **state)
{
    static const struct {
        const char *fault;
        enum ds4_kv_reason reason;
    } rows[] = {{"part_short_read:1:0", DS4_KV_IO},
                {"part_short_read:3:0", DS4_KV_IO},
                {"part_bad_crc:2:0", DS4_KV_BAD_CRC},
                {"part_wrong_fingerprint:1:0", DS4_KV_BAD_FINGERPRINT},
                {"part_delay_ms:1:0", DS4_KV_OK}};
    struct fixture *f = *state;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct ds4_kv_done written;

        set(NULL);
        written = write_part(f, &sample);
        assert_int_equal(written.reason, DS4_KV_OK);
        set(rows[i].fault);
        assert_int_equal(read_part(f, &sample, &written).reason, rows[i].reason);
    }
    set(NULL);
}

#endif

#define WITH_DISK(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_DISK(a_part_comes_back_byte_by_byte),
        WITH_DISK(a_part_that_is_there_is_not_written_again),
        WITH_DISK(a_tail_that_another_commit_wrote_is_read_and_not_put_away),
        WITH_DISK(a_part_that_is_there_and_damaged_is_written_again),
        WITH_DISK(a_part_is_unlinked_or_put_away),
        WITH_DISK(a_flipped_byte_in_any_section_is_found),
        WITH_DISK(a_flipped_bit_anywhere_in_the_header_is_found),
        WITH_DISK(a_cut_part_is_found),
        WITH_DISK(a_sound_header_of_something_else_is_refused_with_its_reason),
        WITH_DISK(no_file_and_the_header_of_another_write_are_refused),
        WITH_DISK(a_write_that_the_system_refuses_leaves_nothing),
        WITH_DISK(a_full_disk_refuses_before_it_writes),
        WITH_DISK(a_folder_that_cannot_be_made_is_an_error_of_the_start),
        WITH_DISK(what_waits_is_written_before_the_end_and_writes_keep_to_the_rate),
        WITH_DISK(a_cancelled_write_leaves_nothing_and_is_over_at_once),
        WITH_DISK(jobs_are_never_more_than_the_pool),
        WITH_DISK(old_temporary_files_are_swept_young_ones_stay),
        WITH_DISK(parts_put_away_are_few_and_go_after_a_week),
        WITH_DISK(a_writer_killed_at_any_moment_leaves_whole_parts_only),
#ifdef DS4_FAULTS
        WITH_DISK(a_writer_killed_at_a_save_point_leaves_a_part_or_none),
        WITH_DISK(each_fault_of_a_write_leaves_nothing),
        WITH_DISK(each_fault_of_a_read_is_refused_with_its_reason),
#endif
    };

    ds4_log_set_level(DS4_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
