/* Part files: write-once, all or nothing (plan 3.3 to 3.5).
 *
 * Writing: temporary name, fsync, rename, fsync of the folder; whoever dies on the way leaves a temporary
 * file that nobody reads.  What is there already and sound is not written again: rewriting prefixes is
 * what fills disks upstream.  Reading: everything is checked before anyone hears of success, and what
 * fails a check is renamed, so that no second request tries it.
 *
 * Invariant: no file descriptor outlives a job; a file of a final name was complete when it got it. */
#include "worker/kv_file.h"

#include "common/clock.h"
#include "common/crc32c.h"
#include "common/fault.h"
#include "common/log.h"
#include "proto/point.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define PIECE_BYTES    ((size_t)1 << 20)
#define STALE_S        600
#define TMP_MARK       ".tmp."
#define BAD_S          (7 * 24 * 3600) /* so long somebody may look at a part that was put away */
#define MAX_BAD        16 /* and at so many: no cap counts them, and some disks damage all */
#define FAULT_DELAY_NS (INT64_C(300) * DS4_NS_PER_MS)

static int fail(struct ds4_kv_done *done, enum ds4_kv_reason reason, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static int fail(struct ds4_kv_done *done, enum ds4_kv_reason reason, const char *fmt, ...)
{
    va_list args;

    done->reason = reason;
    va_start(args, fmt);
    vsnprintf(done->text, sizeof(done->text), fmt, args);
    va_end(args);
    return -1;
}

static int fail_io(struct ds4_kv_done *done, const char *what)
{
    enum ds4_kv_reason reason =
        errno == ENOSPC || errno == EDQUOT || errno == EFBIG ? DS4_KV_NO_SPACE : DS4_KV_IO;

    return fail(done, reason, "%s: %s", what, strerror(errno));
}

/* The point of the power cut: nothing of this process runs after. */
static void die_at(bool here)
{
    if (here)
        (void)kill(getpid(), SIGKILL);
}

/* ---- folders ---------------------------------------------------------------------------------------- */

/* Makes every folder above the file `path`. */
static int make_folders(const char *path)
{
    char part[DS4_KV_PATH_BYTES];

    snprintf(part, sizeof(part), "%s", path);
    for (char *at = strchr(part + 1, '/'); at != NULL; at = strchr(at + 1, '/')) {
        *at = 0;
        if (mkdir(part, 0700) != 0 && errno != EEXIST)
            return -1;
        *at = '/';
    }
    return 0;
}

int ds4_kv_file_make_root(const char *dir, struct ds4_err *err)
{
    char path[DS4_KV_PATH_BYTES];
    int n = snprintf(path, sizeof(path), "%s/v1/", dir);

    if (n < 0 || (size_t)n >= sizeof(path) / 2)
        return ds4_fail(err, DS4_E_INVALID, "kv.disk_dir is longer than %d bytes",
                        DS4_KV_PATH_BYTES / 2);
    if (make_folders(path) != 0 || access(path, W_OK | X_OK) != 0)
        return ds4_fail(err, DS4_E_IO, "kv.disk_dir %s: %s", dir, strerror(errno));
    return 0;
}

/* Only the start makes the folder: later, a disk that is not mounted must not be filled up beside it. */
static int check_place(struct ds4_kv_files *files, struct ds4_kv_done *done)
{
    struct ds4_err err = {0};

    return ds4_store_dir_check(&files->place, &err) == 0 ? 0 : fail(done, DS4_KV_IO, "%s", err.msg);
}

static int sync_folder(const char *path)
{
    char folder[DS4_KV_PATH_BYTES];
    int fd, rc;

    snprintf(folder, sizeof(folder), "%s", path);
    *strrchr(folder, '/') = 0;
    fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    rc = fsync(fd);
    close(fd);
    return rc;
}

static int64_t keep_s(const char *name)
{
    size_t n = strlen(name), suffix = strlen(".bad");

    if (strstr(name, TMP_MARK) != NULL)
        return STALE_S;
    return n > suffix && strcmp(name + n - suffix, ".bad") == 0 ? BAD_S : INT64_MAX;
}

static void sweep_folder(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *entry;
    time_t now = time(NULL);

    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        struct stat st;

        if (keep_s(entry->d_name) < INT64_MAX &&
            fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(st.st_mode) && now - st.st_mtime > keep_s(entry->d_name))
            (void)unlinkat(dirfd(dir), entry->d_name, 0);
    }
    if (dir != NULL)
        closedir(dir);
}

void ds4_kv_file_sweep(struct ds4_kv_files *files)
{
    struct ds4_kv_part part = {.last_layer = 1};
    char path[DS4_KV_PATH_BYTES];

    memcpy(part.fingerprint, files->config.fingerprint, DS4_ID_BYTES);
    for (int i = 0; i < 2 * 256 && !atomic_load(&files->cancel); i++) {
        part.kind = i < 256 ? DS4_KV_EXTENT : DS4_KV_TAIL;
        part.key[0] = (uint8_t)i;
        if (!ds4_kv_part_path(path, files->config.dir, &part))
            return;
        *strrchr(path, '/') = 0;
        sweep_folder(path);
    }
}

/* Out of the way for good: renamed, or gone. */
static void quarantine(struct ds4_kv_files *files, const char *path)
{
    char to[DS4_KV_PATH_BYTES + 8];

    snprintf(to, sizeof(to), "%s.bad", path);
    if (files->n_bad < MAX_BAD && rename(path, to) == 0) {
        files->n_bad++;
        (void)utimensat(AT_FDCWD, to, NULL, 0); /* its week begins */
    } else if (unlink(path) != 0 && errno != ENOENT)
        ds4_log(DS4_LOG_WARN, "kv.quarantine", "message=\"%s\"", strerror(errno));
}

/* ---- headers ---------------------------------------------------------------------------------------- */

static int pread_all(int fd, uint8_t *out, size_t n, uint64_t at)
{
    if (DS4_FAULT_POINT(PART_SHORT_READ))
        return -1;
    for (size_t got = 0; got < n;) {
        ssize_t r = pread(fd, out + got, n - got, (off_t)(at + got));

        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            return -1;
        got += (size_t)r;
    }
    return 0;
}

/* Reads and checks the header of an open file against `want`; *header_bytes is its size. */
static int read_header(struct ds4_kv_files *files, int fd, uint64_t file_bytes,
                       const struct ds4_kv_part *want, struct ds4_kv_part *part,
                       size_t *header_bytes, struct ds4_kv_done *done)
{
    enum ds4_kv_reason reason = DS4_KV_IO;
    struct ds4_err err = {0};

    part->section = files->section;
    if (file_bytes < DS4_KV_PART_ALIGN)
        return fail(done, DS4_KV_BAD_SIZE, "a file of %" PRIu64 " bytes", file_bytes);
    if (pread_all(fd, files->header, DS4_KV_PART_ALIGN, 0) != 0)
        return fail(done, DS4_KV_IO, "could not read the header");
    *header_bytes = ds4_kv_part_peek(files->header, DS4_KV_PART_ALIGN, &reason, &err);
    if (*header_bytes == 0)
        return fail(done, reason, "%s", err.msg);
    if (*header_bytes > file_bytes)
        return fail(done, DS4_KV_BAD_SIZE, "a file of %" PRIu64 " bytes, its header has %zu",
                    file_bytes, *header_bytes);
    if (pread_all(fd, files->header, *header_bytes, 0) != 0)
        return fail(done, DS4_KV_IO, "could not read the header");
    if (ds4_kv_part_read(files->header, *header_bytes, file_bytes, DS4_KV_PART_MAX_SECTIONS, part,
                         &reason, &err) != 0)
        return fail(done, reason, "%s", err.msg);
    if (DS4_FAULT_POINT(PART_WRONG_FINGERPRINT))
        part->fingerprint[0] ^= 1;
    if (ds4_kv_part_match(part, want, &reason, &err) != 0)
        return fail(done, reason, "%s", err.msg);
    return 0;
}

/* ---- writing ---------------------------------------------------------------------------------------- */

static int64_t throttle(struct ds4_kv_files *files, int64_t next_ns, size_t bytes)
{
    int64_t now_ns = ds4_clock_ns();

    if (files->config.write_mbps <= 0)
        return now_ns;
    if (next_ns > now_ns)
        files->pause(files->pause_arg, next_ns - now_ns);
    else
        next_ns = now_ns;
    return next_ns + (int64_t)bytes * 1000 / files->config.write_mbps;
}

static int write_all(int fd, const uint8_t *bytes, size_t n, uint64_t at)
{
    if (DS4_FAULT_POINT(WRITE_ENOSPC)) {
        errno = ENOSPC;
        return -1;
    }
    for (size_t put = 0; put < n;) {
        ssize_t w = pwrite(fd, bytes + put, n - put, (off_t)(at + put));

        if (w < 0 && errno == EINTR)
            continue;
        if (w < 0)
            return -1;
        put += (size_t)w;
    }
    return 0;
}

/* The job's sections as the file will list them, with their checksums. */
static void describe(struct ds4_kv_files *files, const struct ds4_kv_job *job,
                     struct ds4_kv_part *part)
{
    struct timespec now;

    *part = job->part;
    part->section = files->section;
    part->n_section = job->n_section;
    for (int32_t s = 0; s < job->n_section; s++) {
        const struct ds4_kv_job_section *from = &job->section[s];
        struct ds4_kv_cursor cursor =
            ds4_kv_cursor_at(job->host[from->blob], &job->blob[from->blob], from->offset);
        uint32_t crc = 0;
        size_t n;

        for (size_t left = from->bytes; left > 0; left -= n) {
            const uint8_t *at = ds4_kv_cursor_next(&cursor, left, &n);

            crc = ds4_crc32c(crc, at, n);
        }
        part->section[s] = (struct ds4_kv_part_section){.layer = (uint16_t)from->layer,
                                                        .kind = (uint16_t)from->kind,
                                                        .rows = (uint32_t)from->rows,
                                                        .bytes = from->bytes,
                                                        .crc = crc};
    }
    clock_gettime(CLOCK_REALTIME, &now);
    part->created_ns = (uint64_t)now.tv_sec * DS4_NS_PER_SEC + (uint64_t)now.tv_nsec;
}

static int write_sections(struct ds4_kv_files *files, const struct ds4_kv_job *job,
                          const struct ds4_kv_part *part, int fd, struct ds4_kv_done *done)
{
    int64_t next_ns = 0;

    for (int32_t s = 0; s < job->n_section; s++) {
        const struct ds4_kv_job_section *from = &job->section[s];
        struct ds4_kv_cursor cursor =
            ds4_kv_cursor_at(job->host[from->blob], &job->blob[from->blob], from->offset);
        uint64_t to = part->section[s].offset;
        size_t n;

        for (size_t left = from->bytes; left > 0; left -= n, to += n) {
            const uint8_t *at =
                ds4_kv_cursor_next(&cursor, left < PIECE_BYTES ? left : PIECE_BYTES, &n);

            if (atomic_load(&files->cancel))
                return fail(done, DS4_KV_CANCELLED, "the generation ended");
            if (write_all(fd, at, n, to) != 0)
                return fail_io(done, "write");
            next_ns = throttle(files, next_ns, n);
        }
    }
    return 0;
}

/* The file at `tmp`, whole and on the disk. */
static int write_tmp(struct ds4_kv_files *files, const struct ds4_kv_job *job,
                     struct ds4_kv_part *part, const char *tmp, struct ds4_kv_done *done)
{
    size_t header = ds4_kv_part_header_bytes(part->n_section);
    int fd, rc = 0;

    if (unlink(tmp) != 0 && errno != ENOENT)
        return fail_io(done, "unlink");
    fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return fail_io(done, "create");
    ds4_kv_part_write(part, files->header);
    ds4_kv_part_digest(files->header, header, done->digest);
    if (ftruncate(fd, (off_t)done->bytes) != 0)
        rc = fail_io(done, "truncate");
    if (rc == 0)
        rc = write_sections(files, job, part, fd, done);
    if (rc == 0 && write_all(fd, files->header, header, 0) != 0)
        rc = fail_io(done, "write");
    if (rc == 0 && DS4_FAULT_POINT(FSYNC_EIO))
        rc = fail(done, DS4_KV_IO, "fsync: deliberate fault");
    if (rc == 0 && fsync(fd) != 0)
        rc = fail_io(done, "fsync");
    if (close(fd) != 0 && rc == 0)
        rc = fail_io(done, "close");
    return rc;
}

/* True if a sound file of that name is there; one that is not sound goes to quarantine. */
static bool exists(struct ds4_kv_files *files, const struct ds4_kv_job *job, const char *path,
                   struct ds4_kv_done *done)
{
    struct ds4_kv_part part = {0};
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    size_t header = 0;
    struct stat st;
    int rc;

    if (fd < 0)
        return false;
    rc = fstat(fd, &st) != 0
             ? -1
             : read_header(files, fd, (uint64_t)st.st_size, &job->part, &part, &header, done);
    close(fd);
    if (rc != 0) {
        quarantine(files, path);
        *done = (struct ds4_kv_done){.generation = done->generation, .job = done->job};
        return false;
    }
    ds4_kv_part_digest(files->header, header, done->digest);
    done->bytes = (uint64_t)st.st_size;
    done->existed = true;
    return true;
}

static int check_space(const char *path, struct ds4_kv_done *done)
{
    char folder[DS4_KV_PATH_BYTES];
    struct statvfs fs;
    uint64_t room;

    snprintf(folder, sizeof(folder), "%s", path);
    *strrchr(folder, '/') = 0;
    if (statvfs(folder, &fs) != 0)
        return fail_io(done, "statvfs");
    room = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (room < done->bytes + done->bytes / 20)
        return fail(done, DS4_KV_NO_SPACE, "%" PRIu64 " bytes are free, the part needs %" PRIu64,
                    room, done->bytes);
    return 0;
}

static int publish(const char *tmp, const char *path, struct ds4_kv_done *done)
{
    die_at(DS4_FAULT_POINT(KILL_BEFORE_RENAME));
    if (DS4_FAULT_POINT(RENAME_FAIL))
        return fail(done, DS4_KV_IO, "rename: deliberate fault");
    if (rename(tmp, path) != 0)
        return fail_io(done, "rename");
    if (sync_folder(path) != 0)
        return fail_io(done, "fsync of the folder");
    die_at(DS4_FAULT_POINT(KILL_AFTER_PART_BEFORE_MANIFEST));
    return 0;
}

void ds4_kv_file_write(struct ds4_kv_files *files, const struct ds4_kv_job *job,
                       struct ds4_kv_done *done)
{
    char path[DS4_KV_PATH_BYTES], tmp[DS4_KV_PATH_BYTES + 64];
    struct ds4_kv_part part;

    if (!ds4_kv_part_path(path, files->config.dir, &job->part)) {
        (void)fail(done, DS4_KV_IO, "the name of the file is too long");
        return;
    }
    if (check_place(files, done) != 0)
        return;
    if (make_folders(path) != 0) {
        (void)fail_io(done, "folder");
        return;
    }
    if (exists(files, job, path, done))
        return;
    describe(files, job, &part);
    done->bytes = ds4_kv_part_place(&part);
    if (check_space(path, done) != 0)
        return;
    snprintf(tmp, sizeof(tmp), "%s" TMP_MARK "%d.%02x%02x%02x%02x", path, (int)getpid(),
             part.commit[0], part.commit[1], part.commit[2], part.commit[3]);
    if (write_tmp(files, job, &part, tmp, done) != 0 || publish(tmp, path, done) != 0)
        (void)unlink(tmp);
}

/* ---- reading ---------------------------------------------------------------------------------------- */

static int read_section(struct ds4_kv_files *files, int fd, const struct ds4_kv_job *job,
                        struct ds4_kv_job_section *to, const struct ds4_kv_part_section *from,
                        struct ds4_kv_done *done)
{
    struct ds4_kv_cursor cursor =
        ds4_kv_cursor_at(job->host[to->blob], &job->blob[to->blob], to->offset);
    uint64_t at = from->offset;
    uint32_t crc = 0;
    size_t n;

    if (from->rows != (uint32_t)to->rows || from->bytes != to->bytes)
        return fail(done, DS4_KV_BAD_SIZE, "layer %d has %" PRIu32 " rows of kind %d, must have %d",
                    to->layer, from->rows, to->kind, to->rows);
    for (size_t left = to->bytes; left > 0; left -= n, at += n) {
        uint8_t *piece = ds4_kv_cursor_next(&cursor, left < PIECE_BYTES ? left : PIECE_BYTES, &n);

        if (atomic_load(&files->cancel))
            return fail(done, DS4_KV_CANCELLED, "the generation ended");
        if (pread_all(fd, piece, n, at) != 0)
            return fail(done, DS4_KV_IO, "could not read layer %d kind %d", to->layer, to->kind);
        crc = ds4_crc32c(crc, piece, n);
    }
    if (DS4_FAULT_POINT(PART_BAD_CRC))
        crc ^= 1;
    if (crc != from->crc)
        return fail(done, DS4_KV_BAD_CRC, "checksum of layer %d kind %d", to->layer, to->kind);
    to->filled = true;
    done->bytes += to->bytes;
    return 0;
}

static int read_open_part(struct ds4_kv_files *files, int fd, const struct ds4_kv_job *job,
                          const struct ds4_kv_part_ref *ref, const struct ds4_kv_part *want,
                          struct ds4_kv_done *done)
{
    uint8_t digest[DS4_ID_BYTES];
    struct ds4_kv_part part = {0};
    size_t header = 0;
    struct stat st;

    if (fstat(fd, &st) != 0)
        return fail_io(done, "stat");
    if ((uint64_t)st.st_size != ref->bytes)
        return fail(done, DS4_KV_BAD_SIZE, "a file of %" PRIu64 " bytes, must be %" PRIu64,
                    (uint64_t)st.st_size, ref->bytes);
    if (read_header(files, fd, ref->bytes, want, &part, &header, done) != 0)
        return -1;
    ds4_kv_part_digest(files->header, header, digest);
    if (memcmp(digest, ref->digest, sizeof(digest)) != 0)
        return fail(done, DS4_KV_BAD_CRC, "the header is not the one of the manifest");
    for (int32_t s = 0; s < job->n_section; s++) {
        struct ds4_kv_job_section *section = &job->section[s];
        const struct ds4_kv_part_section *from;

        if (section->layer < part.first_layer || section->layer >= part.last_layer)
            continue;
        from = ds4_kv_part_find(&part, section->layer, section->kind);
        if (from == NULL)
            return fail(done, DS4_KV_MISSING_PART, "layer %d has no section of kind %d",
                        section->layer, section->kind);
        if (read_section(files, fd, job, section, from, done) != 0)
            return -1;
    }
    return 0;
}

/* A part that failed a check is put away; one that could not be read, or was not read to its end, is not
 * known to be bad. */
static bool is_bad(enum ds4_kv_reason reason)
{
    return reason != DS4_KV_OK && reason != DS4_KV_IO && reason != DS4_KV_CANCELLED;
}

static int read_ref(struct ds4_kv_files *files, const struct ds4_kv_job *job,
                    const struct ds4_kv_part_ref *ref, struct ds4_kv_done *done)
{
    struct ds4_kv_part want = job->part;
    char path[DS4_KV_PATH_BYTES];
    int fd, rc;

    want.first_layer = ref->first_layer;
    want.last_layer = ref->last_layer;
    if (!ds4_kv_part_path(path, files->config.dir, &want))
        return fail(done, DS4_KV_IO, "the name of the file is too long");
    fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT && check_place(files, done) != 0)
        return -1; /* nothing is known of the part */
    if (fd < 0 && errno == ENOENT)
        return fail(done, DS4_KV_MISSING_PART, "no part of layers %d to %d", ref->first_layer,
                    ref->last_layer - 1);
    if (fd < 0)
        return fail_io(done, "open");
    rc = read_open_part(files, fd, job, ref, &want, done);
    close(fd);
    if (rc != 0 && is_bad(done->reason)) {
        ds4_log(DS4_LOG_WARN, "kv.reject", "reason=%s message=\"%s\"",
                ds4_kv_reason_text(done->reason), done->text);
        quarantine(files, path);
    }
    return rc;
}

void ds4_kv_file_read(struct ds4_kv_files *files, const struct ds4_kv_job *job,
                      struct ds4_kv_done *done)
{
    const struct ds4_kv_disk_config *config = &files->config;

    if (DS4_FAULT_POINT(PART_DELAY_MS))
        files->pause(files->pause_arg, FAULT_DELAY_NS);
    for (int32_t i = 0; i < job->n_ref; i++) {
        const struct ds4_kv_part_ref *ref = &job->ref[i];

        if (ref->first_layer < config->last_layer && ref->last_layer > config->first_layer &&
            read_ref(files, job, ref, done) != 0)
            return;
    }
    for (int32_t s = 0; s < job->n_section; s++)
        if (!job->section[s].filled) {
            (void)fail(done, DS4_KV_MISSING_PART, "no part has layer %d kind %d",
                       job->section[s].layer, job->section[s].kind);
            return;
        }
}

void ds4_kv_file_unlink(struct ds4_kv_files *files, const struct ds4_kv_job *job,
                        struct ds4_kv_done *done)
{
    char path[DS4_KV_PATH_BYTES];

    if (!ds4_kv_part_path(path, files->config.dir, &job->part))
        return; /* cannot have been written */
    if (check_place(files, done) != 0)
        return;
    if (job->quarantine)
        quarantine(files, path);
    else if (unlink(path) != 0 && errno != ENOENT)
        (void)fail_io(done, "unlink");
}
