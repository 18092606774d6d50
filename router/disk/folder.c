/* Manifests on disk (see the header).
 *
 * Order is what makes a kill at any moment harmless.  Saving: COMMIT.w, the parts, COMMIT.m (the commit), then
 * COMMIT.w goes.  Dropping: COMMIT.m is renamed to COMMIT.w (no commit any more), the parts go, COMMIT.w goes.
 * Whoever dies in between leaves a .w file that names all there is to clean up, on whatever host it lies.
 * Invariant: a file named .m was complete and synced when it got that name. */
#include "router/disk/folder.h"

#include "common/clock.h"
#include "common/fault.h"
#include "common/log.h"
#include "proto/point.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define STALE_S     600             /* what nobody has touched for so long is nobody's */
#define BAD_S       (7 * 24 * 3600) /* so long somebody may look at what was put away */
#define MAX_BAD     64              /* and at so many */
#define TMP_MARK    ".tmp."
#define HEX_BYTES   (2 * DS4_ID_BYTES)
#define SUFFIX_ROOM 32

static int fail_io(struct ds4_err *err, const char *what)
{
    return ds4_fail(err, errno == ENOSPC || errno == EDQUOT ? DS4_E_NOMEM : DS4_E_IO, "%s: %s",
                    what, strerror(errno));
}

static void put_hex(char *out, const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

static bool get_hex(const char *text, uint8_t *out, size_t n)
{
    for (size_t i = 0; i < 2 * n; i++) {
        const char *digits = "0123456789abcdef", *at = text[i] ? strchr(digits, text[i]) : NULL;

        if (at == NULL)
            return false;
        out[i / 2] = (uint8_t)(i % 2 == 0 ? (at - digits) << 4 : out[i / 2] | (at - digits));
    }
    return true;
}

static void path_of(const struct ds4_folder *f, const uint8_t *id, const char *suffix,
                    char path[DS4_FOLDER_PATH_BYTES + 2 * HEX_BYTES])
{
    char hex[HEX_BYTES + 1];

    put_hex(hex, id, DS4_ID_BYTES);
    snprintf(path, DS4_FOLDER_PATH_BYTES + 2 * HEX_BYTES, "%s/%s%s", f->man, hex, suffix);
}

bool ds4_folder_part_path(char path[DS4_FOLDER_PATH_BYTES], const struct ds4_folder *f,
                          const uint8_t key[DS4_ID_BYTES], bool tail,
                          const struct ds4_kv_part_ref *file)
{
    char hex[HEX_BYTES + 1];
    int n, root = (int)(strlen(f->man) - strlen("/man"));

    put_hex(hex, key, DS4_ID_BYTES);
    n = snprintf(path, DS4_FOLDER_PATH_BYTES, "%.*s/%s/%.2s/%s.s%d-%d", root, f->man,
                 tail ? "tail" : "ext", hex, hex, (int)file->first_layer,
                 (int)file->last_layer - 1);
    return n > 0 && n < DS4_FOLDER_PATH_BYTES;
}

/* ---- life ------------------------------------------------------------------------------------------- */

static int make_folders(const char *path)
{
    char part[DS4_FOLDER_PATH_BYTES + 2];

    snprintf(part, sizeof(part), "%s/", path);
    for (char *at = strchr(part + 1, '/'); at != NULL; at = strchr(at + 1, '/')) {
        *at = 0;
        if (mkdir(part, 0700) != 0 && errno != EEXIST)
            return -1;
        *at = '/';
    }
    return 0;
}

int ds4_folder_open(struct ds4_folder *f, const char *dir, const uint8_t fingerprint[DS4_ID_BYTES],
                    struct ds4_err *err)
{
    char hex[HEX_BYTES + 1], lock[DS4_FOLDER_PATH_BYTES + 8];

    *f = (struct ds4_folder){.lock_fd = -1};
    if (strlen(dir) >= sizeof(f->dir) - 1)
        return ds4_fail(err, DS4_E_INVALID, "kv.disk_dir is longer than %zu bytes", sizeof(f->dir));
    snprintf(f->dir, sizeof(f->dir), "%s", dir);
    put_hex(hex, fingerprint, DS4_ID_BYTES / 2);
    snprintf(f->man, sizeof(f->man), "%s/v1/%s/man", dir, hex);
    if (make_folders(f->man) != 0)
        return fail_io(err, "kv.disk_dir");
    snprintf(lock, sizeof(lock), "%s/lock", f->man);
    f->lock_fd = open(lock, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (f->lock_fd < 0)
        return fail_io(err, "kv.disk_dir");
    if (flock(f->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        ds4_folder_close(f);
        return ds4_fail(err, DS4_E_BUSY, "another router keeps its manifests in %s", dir);
    }
    return 0;
}

void ds4_folder_close(struct ds4_folder *f)
{
    if (f->lock_fd >= 0)
        close(f->lock_fd);
    f->lock_fd = -1;
}

bool ds4_folder_is_there(const struct ds4_folder *f)
{
    char lock[DS4_FOLDER_PATH_BYTES + 8];
    struct stat ours, named;

    snprintf(lock, sizeof(lock), "%s/lock", f->man);
    return f->lock_fd >= 0 && fstat(f->lock_fd, &ours) == 0 && stat(lock, &named) == 0 &&
           ours.st_dev == named.st_dev && ours.st_ino == named.st_ino;
}

static int sync_folder(const struct ds4_folder *f)
{
    int rc, fd = open(f->man, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0)
        return -1;
    rc = fsync(fd);
    close(fd);
    return rc;
}

/* ---- writing ---------------------------------------------------------------------------------------- */

static int write_all(int fd, const uint8_t *bytes, size_t n)
{
    if (DS4_FAULT_POINT(WRITE_ENOSPC)) {
        errno = ENOSPC;
        return -1;
    }
    for (size_t put = 0; put < n;) {
        ssize_t w = write(fd, bytes + put, n - put);

        if (w < 0 && errno == EINTR)
            continue;
        if (w < 0)
            return -1;
        put += (size_t)w;
    }
    return 0;
}

/* A file at `path`; on failure there is none. */
static int write_file(const char *path, const void *bytes, size_t n, bool sync, struct ds4_err *err)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int rc;

    if (fd < 0)
        return fail_io(err, "create");
    rc = write_all(fd, bytes, n) != 0 ? fail_io(err, "write") : 0;
    if (rc == 0 && sync && DS4_FAULT_POINT(FSYNC_EIO))
        rc = ds4_fail(err, DS4_E_IO, "fsync: deliberate fault");
    if (rc == 0 && sync && fsync(fd) != 0)
        rc = fail_io(err, "fsync");
    if (close(fd) != 0 && rc == 0)
        rc = fail_io(err, "close");
    if (rc != 0)
        (void)unlink(path);
    return rc;
}

static int replace(struct ds4_folder *f, const char *path, const void *bytes, size_t n,
                   struct ds4_err *err)
{
    char tmp[DS4_FOLDER_PATH_BYTES + 2 * HEX_BYTES + SUFFIX_ROOM];

    snprintf(tmp, sizeof(tmp), "%s" TMP_MARK "%d", path, (int)getpid());
    if (write_file(tmp, bytes, n, true, err) != 0)
        return -1;
    if (DS4_FAULT_POINT(KILL_BEFORE_RENAME))
        (void)kill(getpid(), SIGKILL);
    if (DS4_FAULT_POINT(RENAME_FAIL) || rename(tmp, path) != 0) {
        (void)unlink(tmp);
        return fail_io(err, "rename");
    }
    return sync_folder(f) != 0 ? fail_io(err, "fsync of the folder") : 0;
}

int ds4_folder_intend(struct ds4_folder *f, const uint8_t id[DS4_ID_BYTES], const void *bytes,
                      size_t n, struct ds4_err *err)
{
    char path[DS4_FOLDER_PATH_BYTES + 2 * HEX_BYTES];

    path_of(f, id, ".w", path);
    return write_file(path, bytes, n, false, err);
}

int ds4_folder_commit(struct ds4_folder *f, const uint8_t id[DS4_ID_BYTES], const void *bytes,
                      size_t n, struct ds4_err *err)
{
    char path[DS4_FOLDER_PATH_BYTES + 2 * HEX_BYTES];

    if (DS4_FAULT_POINT(KILL_AFTER_PART_BEFORE_MANIFEST))
        (void)kill(getpid(), SIGKILL);
    path_of(f, id, ".m", path);
    if (replace(f, path, bytes, n, err) != 0)
        return -1;
    if (DS4_FAULT_POINT(KILL_AFTER_MANIFEST))
        (void)kill(getpid(), SIGKILL);
    return ds4_folder_forget(f, id, err);
}

/* A manifest that was refused: renamed for people, or gone. */
static int set_aside(struct ds4_folder *f, const char *path, const char *to)
{
    if (f->n_bad < MAX_BAD && rename(path, to) == 0) {
        f->n_bad++;
        (void)utimensat(AT_FDCWD, to, NULL, 0); /* its week begins */
        return 0;
    }
    return unlink(path) != 0 && errno != ENOENT ? -1 : 0;
}

int ds4_folder_retire(struct ds4_folder *f, const uint8_t id[DS4_ID_BYTES], bool quarantine,
                      struct ds4_err *err)
{
    char from[DS4_FOLDER_PATH_BYTES + 2 * HEX_BYTES], to[sizeof(from)];

    path_of(f, id, ".m", from);
    path_of(f, id, quarantine ? ".bad" : ".w", to);
    if (quarantine ? set_aside(f, from, to) != 0
                   : rename(from, to) != 0 && errno != ENOENT && unlink(from) != 0)
        return fail_io(err, "rename");
    return sync_folder(f) != 0 ? fail_io(err, "fsync of the folder") : 0;
}

int ds4_folder_forget(struct ds4_folder *f, const uint8_t id[DS4_ID_BYTES], struct ds4_err *err)
{
    char path[DS4_FOLDER_PATH_BYTES + 2 * HEX_BYTES];

    path_of(f, id, ".w", path);
    return unlink(path) != 0 && errno != ENOENT ? fail_io(err, "unlink") : 0;
}

int ds4_folder_note_uses(struct ds4_folder *f, const struct ds4_commit_use *use, size_t n,
                         struct ds4_err *err)
{
    char path[DS4_FOLDER_PATH_BYTES + 8];
    struct ds4_buf text;
    int rc;

    ds4_buf_init(&text, DS4_MANIFEST_MAX_BYTES);
    for (size_t i = 0; i < n; i++) {
        char hex[HEX_BYTES + 1];

        put_hex(hex, use[i].id, DS4_ID_BYTES);
        if (ds4_buf_appendf(&text, "%s %.3f %" PRId64 "\n", hex, use[i].hits, use[i].used_ns) != 0)
            break;
    }
    snprintf(path, sizeof(path), "%s/uses", f->man);
    rc = text.failed ? ds4_buf_check(&text, "the file of uses", err)
                     : replace(f, path, ds4_buf_view(&text).ptr, text.len, err);
    ds4_buf_deinit(&text);
    return rc;
}

/* ---- reading ---------------------------------------------------------------------------------------- */

/* The first `most` bytes of a file (0: all); NULL with *reason.  *file_bytes is its size. */
static uint8_t *read_file(const char *path, size_t most, size_t *n, uint64_t *file_bytes,
                          enum ds4_kv_reason *reason, struct ds4_err *err)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a pipe of that name must not wait */
    uint8_t *bytes = NULL;
    struct stat st;
    size_t want;

    *reason = fd < 0 && errno == ENOENT ? DS4_KV_MISSING_PART : DS4_KV_IO;
    *n = 0;
    if (fd < 0 || fstat(fd, &st) != 0) {
        (void)fail_io(err, "a manifest");
        goto out;
    }
    *file_bytes = (uint64_t)st.st_size;
    if (!S_ISREG(st.st_mode) || *file_bytes > DS4_MANIFEST_MAX_BYTES) {
        *reason = DS4_KV_BAD_SIZE;
        (void)ds4_fail(err, DS4_E_CORRUPT, "a manifest of %" PRIu64 " bytes", *file_bytes);
        goto out;
    }
    want = most != 0 && most < *file_bytes ? most : (size_t)*file_bytes;
    bytes = malloc(want + 1);
    if (bytes == NULL) {
        (void)ds4_fail(err, DS4_E_NOMEM, "no memory for a manifest");
        goto out;
    }
    while (*n < want) {
        ssize_t r = pread(fd, bytes + *n, want - *n, (off_t)*n);

        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            break;
        *n += (size_t)r;
    }
    bytes[*n] = 0;
    if (*n < want) {
        (void)ds4_fail(err, DS4_E_IO, "could not read a manifest");
        free(bytes);
        bytes = NULL;
    }
out:
    if (fd >= 0)
        close(fd);
    return bytes;
}

int ds4_folder_load(struct ds4_folder *f, const uint8_t id[DS4_ID_BYTES], struct ds4_manifest *m,
                    enum ds4_kv_reason *reason, struct ds4_err *err)
{
    char path[DS4_FOLDER_PATH_BYTES + 2 * HEX_BYTES];
    uint64_t file_bytes = 0;
    uint8_t *bytes;
    size_t n;
    int rc = -1;

    path_of(f, id, ".m", path);
    *m = (struct ds4_manifest){0};
    bytes = read_file(path, 0, &n, &file_bytes, reason, err);
    if (bytes == NULL)
        return -1;
    if (ds4_manifest_peek(bytes, n, file_bytes, reason, err) != 0)
        rc = ds4_manifest_read(bytes, n, m, reason, err);
    if (rc == 0 && m->token == NULL) {
        *reason = DS4_KV_BAD_SIZE;
        ds4_manifest_deinit(m);
        rc = ds4_fail(err, DS4_E_CORRUPT, "a manifest without tokens");
    }
    free(bytes);
    return rc;
}

/* The head alone. */
static int load_head(const char *path, const uint8_t *fingerprint, const uint8_t *id,
                     struct ds4_manifest *m, enum ds4_kv_reason *reason, struct ds4_err *err)
{
    uint64_t file_bytes = 0;
    uint8_t *bytes =
        read_file(path, DS4_MANIFEST_FIXED_BYTES, &(size_t){0}, &file_bytes, reason, err);
    size_t head, n;
    int rc;

    if (bytes == NULL)
        return -1;
    head = file_bytes < DS4_MANIFEST_FIXED_BYTES
               ? ds4_manifest_peek(bytes, 0, file_bytes, reason, err)
               : ds4_manifest_peek(bytes, DS4_MANIFEST_FIXED_BYTES, file_bytes, reason, err);
    free(bytes);
    if (head == 0)
        return -1;
    bytes = read_file(path, head, &n, &file_bytes, reason, err);
    if (bytes == NULL)
        return -1;
    rc = ds4_manifest_read(bytes, n, m, reason, err);
    free(bytes);
    if (rc != 0)
        return -1;
    *reason = DS4_KV_BAD_FINGERPRINT;
    if (memcmp(m->fingerprint, fingerprint, DS4_ID_BYTES) != 0 ||
        memcmp(m->commit, id, DS4_ID_BYTES) != 0) {
        ds4_manifest_deinit(m);
        return ds4_fail(err, DS4_E_CORRUPT, "a manifest of another model or name");
    }
    return 0;
}

/* ---- scanning --------------------------------------------------------------------------------------- */

void ds4_folder_scan_deinit(struct ds4_folder_scan *scan)
{
    for (size_t i = 0; i < scan->commit.len; i++)
        ds4_manifest_deinit(&scan->commit.ptr[i]);
    for (size_t i = 0; i < scan->leftover.len; i++)
        ds4_manifest_deinit(&scan->leftover.ptr[i]);
    DS4_VEC_DEINIT(&scan->commit);
    DS4_VEC_DEINIT(&scan->leftover);
    DS4_VEC_DEINIT(&scan->use);
}

/* Are all parts there, in the size the manifest says? */
static bool has_parts(const struct ds4_folder *f, const struct ds4_manifest *m)
{
    for (int32_t i = 0; i < m->n_object; i++)
        for (int32_t p = 0; p < m->object[i].n_file; p++) {
            const struct ds4_kv_part_ref *file = &m->file[m->object[i].first_file + p];
            char path[DS4_FOLDER_PATH_BYTES];
            struct stat st;

            if (!ds4_folder_part_path(path, f, m->object[i].key, i == m->n_object - 1, file) ||
                stat(path, &st) != 0 || (uint64_t)st.st_size != file->bytes)
                return false;
        }
    return true;
}

static void put_away(struct ds4_folder *f, const char *path, enum ds4_kv_reason reason,
                     const char *why, struct ds4_folder_scan *scan)
{
    char to[DS4_FOLDER_PATH_BYTES + 2 * HEX_BYTES + SUFFIX_ROOM];

    scan->n_reject[reason]++;
    snprintf(to, sizeof(to), "%.*s.bad", (int)(strlen(path) - 2), path);
    (void)set_aside(f, path, to);
    ds4_log(DS4_LOG_WARN, "kv.reject", "reason=%s message=\"a manifest was put away: %s\"",
            ds4_kv_reason_text(reason), why);
}

static void scan_one(struct ds4_folder *f, const char *name, const uint8_t *fingerprint, bool local,
                     struct ds4_folder_scan *scan)
{
    char path[DS4_FOLDER_PATH_BYTES + 2 * HEX_BYTES];
    enum ds4_kv_reason reason = DS4_KV_IO;
    uint8_t id[DS4_ID_BYTES];
    struct ds4_manifest m;
    struct ds4_err err = {0};
    bool is_commit = strcmp(name + HEX_BYTES, ".m") == 0;

    if (!get_hex(name, id, DS4_ID_BYTES))
        return;
    path_of(f, id, name + HEX_BYTES, path);
    if (load_head(path, fingerprint, id, &m, &reason, &err) != 0) {
        if (is_commit)
            put_away(f, path, reason, err.msg, scan);
        else
            (void)unlink(path); /* died while it was written: its parts were not begun */
        return;
    }
    if (is_commit && local && !has_parts(f, &m)) {
        put_away(f, path, DS4_KV_MISSING_PART, "a part is missing or of another size", scan);
        ds4_manifest_deinit(&m);
        return;
    }
    if ((is_commit ? DS4_VEC_PUSH(&scan->commit, m) : DS4_VEC_PUSH(&scan->leftover, m)) != 0)
        ds4_manifest_deinit(&m); /* no memory: it stays for the next start */
}

static bool is_older(int dir_fd, const char *name, int64_t seconds)
{
    struct stat st;

    return fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) &&
           time(NULL) - st.st_mtime > seconds;
}

static void read_uses(struct ds4_folder *f, struct ds4_folder_scan *scan)
{
    char path[DS4_FOLDER_PATH_BYTES + 8], *next;
    enum ds4_kv_reason reason;
    uint64_t file_bytes = 0;
    size_t n;
    char *text;

    snprintf(path, sizeof(path), "%s/uses", f->man);
    text = (char *)read_file(path, 0, &n, &file_bytes, &reason, NULL);
    for (char *line = text; line != NULL && *line != 0; line = next) {
        struct ds4_commit_use use = {0};
        char *end;

        next = strchr(line, '\n');
        if (next == NULL)
            break;
        *next++ = 0;
        if (strlen(line) < HEX_BYTES + 2 || !get_hex(line, use.id, DS4_ID_BYTES))
            continue;
        use.hits = strtod(line + HEX_BYTES, &end);
        use.used_ns = strtoll(end, &end, 10);
        if (*end == 0 && use.hits >= 0 && use.hits < 1e9 && DS4_VEC_PUSH(&scan->use, use) != 0)
            break;
    }
    free(text);
}

static int compare_keys(const void *a, const void *b)
{
    return memcmp(a, b, DS4_ID_BYTES + 1);
}

/* Every object a manifest names, its kind first, sorted; NULL if memory is out. */
static uint8_t *sorted_keys(const struct ds4_folder_scan *scan, size_t *n)
{
    uint8_t *keys, *at;
    size_t most = 1;

    for (size_t i = 0; i < scan->commit.len; i++)
        most += (size_t)scan->commit.ptr[i].n_object;
    keys = malloc(most * (DS4_ID_BYTES + 1));
    at = keys;
    for (size_t i = 0; i < scan->commit.len && keys != NULL; i++)
        for (int32_t o = 0; o < scan->commit.ptr[i].n_object; o++, at += DS4_ID_BYTES + 1) {
            at[0] = o == scan->commit.ptr[i].n_object - 1;
            memcpy(at + 1, scan->commit.ptr[i].object[o].key, DS4_ID_BYTES);
        }
    *n = most - 1;
    if (keys != NULL)
        qsort(keys, *n, DS4_ID_BYTES + 1, compare_keys);
    return keys;
}

static void sweep_parts(const char *folder, bool tail, const uint8_t *keys, size_t n_key,
                        struct ds4_folder_scan *scan)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;

    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        uint8_t key[DS4_ID_BYTES + 1] = {tail};

        if (strlen(entry->d_name) < HEX_BYTES + 2 || entry->d_name[HEX_BYTES] != '.' ||
            strstr(entry->d_name, ".bad") != NULL || !get_hex(entry->d_name, key + 1, DS4_ID_BYTES))
            continue;
        if (bsearch(key, keys, n_key, DS4_ID_BYTES + 1, compare_keys) != NULL ||
            !is_older(dirfd(dir), entry->d_name, STALE_S))
            continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0) == 0)
            scan->n_orphan++;
    }
    if (dir != NULL)
        closedir(dir);
}

static void sweep_orphans(struct ds4_folder *f, struct ds4_folder_scan *scan)
{
    size_t n_key;
    uint8_t *keys = sorted_keys(scan, &n_key);

    for (int i = 0; i < 2 * 256 && keys != NULL; i++) {
        uint8_t key[DS4_ID_BYTES] = {(uint8_t)i};
        char path[DS4_FOLDER_PATH_BYTES];

        if (!ds4_folder_part_path(path, f, key, i >= 256, &(struct ds4_kv_part_ref){0}))
            break;
        *strrchr(path, '/') = 0;
        sweep_parts(path, i >= 256, keys, n_key, scan);
    }
    free(keys);
}

int ds4_folder_scan(struct ds4_folder *f, const uint8_t fingerprint[DS4_ID_BYTES], bool local,
                    struct ds4_folder_scan *scan, struct ds4_err *err)
{
    DIR *dir = opendir(f->man);
    struct dirent *entry;

    *scan = (struct ds4_folder_scan){0};
    if (dir == NULL)
        return fail_io(err, "the manifests' folder");
    while ((entry = readdir(dir)) != NULL) {
        size_t n = strlen(entry->d_name);

        if (strstr(entry->d_name, TMP_MARK) != NULL) {
            if (is_older(dirfd(dir), entry->d_name, STALE_S))
                (void)unlinkat(dirfd(dir), entry->d_name, 0);
        } else if (n == HEX_BYTES + strlen(".bad") &&
                   strcmp(entry->d_name + HEX_BYTES, ".bad") == 0) {
            if (is_older(dirfd(dir), entry->d_name, BAD_S))
                (void)unlinkat(dirfd(dir), entry->d_name, 0);
        } else if (n == HEX_BYTES + 2 && (strcmp(entry->d_name + HEX_BYTES, ".m") == 0 ||
                                          strcmp(entry->d_name + HEX_BYTES, ".w") == 0)) {
            scan_one(f, entry->d_name, fingerprint, local, scan);
        }
    }
    closedir(dir);
    read_uses(f, scan);
    if (local)
        sweep_orphans(f, scan);
    return 0;
}
