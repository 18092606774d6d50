/* The manifests' folder: what a start finds after each way a router can have died, and what it makes of it. */
#include "router/disk/folder.h"
#include "worker/kv_part.h"

#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static const uint8_t fingerprint[DS4_ID_BYTES] = {0xab, 0xcd, 1, 2, 3, 4, 5, 6, 7, 8};

struct place {
    char dir[64];
    struct ds4_folder folder;
};

static int start(void **state)
{
    struct place *p = calloc(1, sizeof(*p));
    struct ds4_err err = {0};

    assert_non_null(p);
    snprintf(p->dir, sizeof(p->dir), "/tmp/ds4-folder-XXXXXX");
    assert_non_null(mkdtemp(p->dir));
    assert_int_equal(ds4_folder_open(&p->folder, p->dir, fingerprint, &err), 0);
    *state = p;
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
    struct place *p = *state;

    ds4_folder_close(&p->folder);
    assert_int_equal(nftw(p->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
    free(p);
    return 0;
}

static struct ds4_manifest manifest(uint8_t id)
{
    struct ds4_manifest m;

    assert_int_equal(ds4_manifest_init(&m, 2, 2, NULL), 0);
    memcpy(m.fingerprint, fingerprint, DS4_ID_BYTES);
    memset(m.commit, id, DS4_ID_BYTES);
    m.pos = 1100;
    m.kind = DS4_KV_TAIL;
    for (int32_t i = 0; i < 2; i++) {
        memset(m.object[i].key, id + i, DS4_ID_BYTES);
        m.object[i].first_file = i;
        m.object[i].n_file = 1;
        m.file[i] = (struct ds4_kv_part_ref){.last_layer = 8, .bytes = 5};
    }
    m.token = calloc((size_t)m.pos, sizeof(*m.token));
    assert_non_null(m.token);
    return m;
}

static void store(struct place *p, uint8_t id, bool commit)
{
    struct ds4_manifest m = manifest(id);
    struct ds4_err err = {0};
    struct ds4_buf out;

    ds4_buf_init(&out, DS4_MANIFEST_MAX_BYTES);
    assert_int_equal(ds4_manifest_write(&m, &out, &err), 0);
    assert_int_equal(ds4_folder_intend(&p->folder, m.commit, out.ptr, out.len, &err), 0);
    if (commit)
        assert_int_equal(ds4_folder_commit(&p->folder, m.commit, out.ptr, out.len, &err), 0);
    ds4_buf_deinit(&out);
    ds4_manifest_deinit(&m);
}

static void write_part(struct place *p, const uint8_t *key, bool tail, const char *text, bool old)
{
    const struct ds4_kv_part_ref file = {.last_layer = 8};
    char path[DS4_FOLDER_PATH_BYTES], *slash;
    struct timespec times[2] = {{.tv_sec = time(NULL) - 3600}, {.tv_sec = time(NULL) - 3600}};
    int fd;

    assert_true(ds4_folder_part_path(path, &p->folder, key, tail, &file));
    for (slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    if (old)
        assert_int_equal(futimens(fd, times), 0);
    close(fd);
}

static void write_parts(struct place *p, uint8_t id)
{
    struct ds4_manifest m = manifest(id);

    write_part(p, m.object[0].key, false, "12345", true);
    write_part(p, m.object[1].key, true, "12345", true);
    ds4_manifest_deinit(&m);
}

static bool exists(struct place *p, uint8_t id, const char *suffix)
{
    char path[DS4_FOLDER_PATH_BYTES + 64];
    int n = snprintf(path, sizeof(path), "%s/", p->folder.man);

    for (int i = 0; i < DS4_ID_BYTES; i++)
        n += snprintf(path + n, sizeof(path) - (size_t)n, "%02x", id);
    snprintf(path + n, sizeof(path) - (size_t)n, "%s", suffix);
    return access(path, F_OK) == 0;
}

static void scan(struct place *p, bool local, struct ds4_folder_scan *found)
{
    struct ds4_err err = {0};

    assert_int_equal(ds4_folder_scan(&p->folder, fingerprint, local, found, &err), 0);
}

static void a_commit_is_found_and_read_back(void **state)
{
    struct place *p = *state;
    struct ds4_folder_scan found;
    struct ds4_manifest m;
    enum ds4_kv_reason reason;
    struct ds4_err err = {0};
    struct stat st;

    store(p, 7, true);
    assert_false(exists(p, 7, ".w"));
    scan(p, false, &found);
    assert_int_equal(found.commit.len, 1);
    assert_int_equal(found.leftover.len, 0);
    assert_int_equal(ds4_folder_load(&p->folder, found.commit.ptr[0].commit, &m, &reason, &err), 0);
    assert_int_equal(m.pos, 1100);
    assert_non_null(m.token);
    ds4_manifest_deinit(&m);
    ds4_folder_scan_deinit(&found);
    assert_int_equal(stat(p->folder.man, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
}

static void a_save_that_did_not_end_is_a_leftover(void **state)
{
    struct place *p = *state;
    struct ds4_folder_scan found;

    store(p, 7, false);
    scan(p, true, &found);
    assert_int_equal(found.commit.len, 0);
    assert_int_equal(found.leftover.len, 1);
    ds4_folder_scan_deinit(&found);
    assert_int_equal(ds4_folder_forget(&p->folder, (uint8_t[DS4_ID_BYTES]){7}, NULL), 0);
}

static void a_commit_that_was_being_dropped_is_none(void **state)
{
    struct place *p = *state;
    struct ds4_manifest m = manifest(7);
    struct ds4_folder_scan found;

    store(p, 7, true);
    assert_int_equal(ds4_folder_retire(&p->folder, m.commit, false, NULL), 0);
    scan(p, false, &found);
    assert_int_equal(found.commit.len, 0);
    assert_int_equal(found.leftover.len, 1);
    ds4_folder_scan_deinit(&found);
    assert_int_equal(ds4_folder_forget(&p->folder, m.commit, NULL), 0);
    scan(p, false, &found);
    assert_int_equal(found.leftover.len, 0);
    ds4_folder_scan_deinit(&found);
    ds4_manifest_deinit(&m);
}

static void a_damaged_manifest_is_put_away_and_counted(void **state)
{
    struct place *p = *state;
    char path[DS4_FOLDER_PATH_BYTES + 64];
    struct ds4_folder_scan found;
    int fd;

    store(p, 0x11, true);
    store(p, 0x22, true);
    snprintf(path, sizeof(path), "%s/11111111111111111111111111111111.m", p->folder.man);
    fd = open(path, O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "?", 1, 90), 1);
    close(fd);
    for (int32_t i = 0; i < 2; i++) { /* once, and then it is not there any more */
        scan(p, false, &found);
        assert_int_equal(found.commit.len, 1);
        assert_int_equal(found.n_reject[DS4_KV_BAD_CRC], i == 0);
        ds4_folder_scan_deinit(&found);
    }
    assert_true(exists(p, 0x11, ".bad"));
    assert_false(exists(p, 0x11, ".m"));
}

/* No cap counts what was put away: it must not grow for ever. */
static void what_was_put_away_goes_after_a_week(void **state)
{
    struct place *p = *state;
    const struct timespec old[2] = {{.tv_sec = time(NULL) - 8 * 24 * 3600},
                                    {.tv_sec = time(NULL) - 8 * 24 * 3600}};
    char path[DS4_FOLDER_PATH_BYTES + 64];
    struct ds4_folder_scan found;

    for (uint8_t id = 0x11; id <= 0x22; id += 0x11) {
        struct ds4_manifest m = manifest(id);

        store(p, id, true);
        assert_int_equal(ds4_folder_retire(&p->folder, m.commit, true, NULL), 0);
        ds4_manifest_deinit(&m);
    }
    snprintf(path, sizeof(path), "%s/11111111111111111111111111111111.bad", p->folder.man);
    assert_int_equal(utimensat(AT_FDCWD, path, old, 0), 0);
    scan(p, false, &found);
    ds4_folder_scan_deinit(&found);
    assert_false(exists(p, 0x11, ".bad"));
    assert_true(exists(p, 0x22, ".bad"));
}

static void a_disk_that_damages_everything_is_not_filled_with_what_was_put_away(void **state)
{
    struct place *p = *state;
    int32_t n_bad = 0;

    for (int32_t id = 1; id <= 100; id++) {
        struct ds4_manifest m = manifest((uint8_t)id);

        store(p, (uint8_t)id, true);
        assert_int_equal(ds4_folder_retire(&p->folder, m.commit, true, NULL), 0);
        assert_false(exists(p, (uint8_t)id, ".m"));
        n_bad += exists(p, (uint8_t)id, ".bad");
        ds4_manifest_deinit(&m);
    }
    assert_int_equal(n_bad, 64);
}

static void what_is_no_file_does_not_stop_a_scan(void **state)
{
    static const char name[] = "0123";
    struct place *p = *state;
    char path[DS4_FOLDER_PATH_BYTES + 64];
    struct ds4_folder_scan found;

    store(p, 0x77, true);
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof(path), "%s/%c%.31s.m", p->folder.man, name[i],
                 "1111111111111111111111111111111");
        assert_int_equal(i == 0   ? mkfifo(path, 0600)
                         : i == 1 ? mkdir(path, 0700)
                         : i == 2 ? symlink("/dev/zero", path)
                                  : symlink("nowhere", path),
                         0);
    }
    for (int i = 0; i < 2; i++) {
        scan(p, false, &found);
        assert_int_equal(found.commit.len, 1);
        ds4_folder_scan_deinit(&found);
    }
}

static void a_manifest_of_another_name_is_put_away(void **state)
{
    struct place *p = *state;
    char from[DS4_FOLDER_PATH_BYTES + 64], to[DS4_FOLDER_PATH_BYTES + 64];
    struct ds4_folder_scan found;

    store(p, 0x11, true);
    snprintf(from, sizeof(from), "%s/11111111111111111111111111111111.m", p->folder.man);
    snprintf(to, sizeof(to), "%s/33333333333333333333333333333333.m", p->folder.man);
    assert_int_equal(rename(from, to), 0);
    scan(p, false, &found);
    assert_int_equal(found.commit.len, 0);
    assert_int_equal(found.n_reject[DS4_KV_BAD_FINGERPRINT], 1);
    ds4_folder_scan_deinit(&found);
}

static void a_manifest_whose_part_is_missing_is_put_away_where_parts_can_be_seen(void **state)
{
    struct place *p = *state;
    struct ds4_folder_scan found;

    store(p, 7, true);
    write_parts(p, 7);
    store(p, 40, true);
    scan(p, false, &found); /* on other hosts: nobody can tell */
    assert_int_equal(found.commit.len, 2);
    ds4_folder_scan_deinit(&found);
    scan(p, true, &found);
    assert_int_equal(found.commit.len, 1);
    assert_int_equal(found.n_reject[DS4_KV_MISSING_PART], 1);
    assert_true(exists(p, 40, ".bad"));
    ds4_folder_scan_deinit(&found);
}

static void parts_that_no_manifest_names_go_once_they_are_old(void **state)
{
    struct place *p = *state;
    struct ds4_manifest kept = manifest(7), orphan = manifest(60);
    char path[DS4_FOLDER_PATH_BYTES];
    struct ds4_folder_scan found;

    store(p, 7, true);
    write_parts(p, 7);
    write_parts(p, 60);
    write_part(p, orphan.object[1].key, false, "being written now", false);
    scan(p, false, &found);
    assert_int_equal(found.n_orphan, 0);
    ds4_folder_scan_deinit(&found);
    scan(p, true, &found);
    assert_int_equal(found.n_orphan, 2);
    assert_int_equal(found.commit.len, 1);
    ds4_folder_scan_deinit(&found);
    assert_true(ds4_folder_part_path(path, &p->folder, kept.object[0].key, false, kept.file));
    assert_int_equal(access(path, F_OK), 0);
    assert_true(ds4_folder_part_path(path, &p->folder, orphan.object[0].key, false, orphan.file));
    assert_int_not_equal(access(path, F_OK), 0);
    assert_true(ds4_folder_part_path(path, &p->folder, orphan.object[1].key, false, orphan.file));
    assert_int_equal(access(path, F_OK), 0);
    ds4_manifest_deinit(&kept);
    ds4_manifest_deinit(&orphan);
}

static void uses_are_remembered(void **state)
{
    struct place *p = *state;
    struct ds4_commit_use use[2] = {{.hits = 2.5, .used_ns = 1796050685000000001}, {.hits = 0}};
    struct ds4_folder_scan found;

    memset(use[0].id, 9, DS4_ID_BYTES);
    assert_int_equal(ds4_folder_note_uses(&p->folder, use, 2, NULL), 0);
    scan(p, false, &found);
    assert_int_equal(found.use.len, 2);
    assert_memory_equal(found.use.ptr[0].id, use[0].id, DS4_ID_BYTES);
    assert_true(found.use.ptr[0].hits == 2.5 && found.use.ptr[0].used_ns == use[0].used_ns);
    ds4_folder_scan_deinit(&found);
}

static void a_second_router_does_not_get_the_folder(void **state)
{
    struct place *p = *state;
    struct ds4_folder second;
    struct ds4_err err = {0};

    assert_int_equal(ds4_folder_open(&second, p->dir, fingerprint, &err), -1);
    assert_int_equal(err.code, DS4_E_BUSY);
    ds4_folder_close(&p->folder);
    assert_int_equal(ds4_folder_open(&second, p->dir, fingerprint, &err), 0);
    ds4_folder_close(&second);
}

/* Router and worker include nothing of each other; of the names of files they must think the same. */
static void router_and_worker_name_a_part_alike(void **state)
{
    struct place *p = *state;
    struct ds4_kv_part part = {.kind = DS4_KV_TAIL, .first_layer = 15, .last_layer = 30};
    const struct ds4_kv_part_ref file = {.first_layer = 15, .last_layer = 30};
    char ours[DS4_FOLDER_PATH_BYTES], theirs[DS4_KV_PATH_BYTES];

    memcpy(part.fingerprint, fingerprint, DS4_ID_BYTES);
    for (int i = 0; i < DS4_ID_BYTES; i++)
        part.key[i] = (uint8_t)(17 * i + 3);
    for (int i = 0; i < 2; i++) {
        part.kind = i == 0 ? DS4_KV_TAIL : DS4_KV_EXTENT;
        assert_true(ds4_kv_part_path(theirs, p->dir, &part));
        assert_true(ds4_folder_part_path(ours, &p->folder, part.key, i == 0, &file));
        assert_string_equal(ours, theirs);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_commit_is_found_and_read_back),
        TEST(a_save_that_did_not_end_is_a_leftover),
        TEST(a_commit_that_was_being_dropped_is_none),
        TEST(a_damaged_manifest_is_put_away_and_counted),
        TEST(what_was_put_away_goes_after_a_week),
        TEST(a_disk_that_damages_everything_is_not_filled_with_what_was_put_away),
        TEST(what_is_no_file_does_not_stop_a_scan),
        TEST(a_manifest_of_another_name_is_put_away),
        TEST(a_manifest_whose_part_is_missing_is_put_away_where_parts_can_be_seen),
        TEST(parts_that_no_manifest_names_go_once_they_are_old),
        TEST(uses_are_remembered),
        TEST(a_second_router_does_not_get_the_folder),
        TEST(router_and_worker_name_a_part_alike),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
