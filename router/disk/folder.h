/* The manifests' folder: one call per change, each all or nothing.
 *
 *   DIR/v1/FINGERPRINT/man/COMMIT.m      a commit
 *                         COMMIT.w      parts of it may be there, nobody may rely on them: they are being
 *                                       written, or to be removed
 *                         COMMIT.bad    was refused; kept for people
 *                         uses          how often and when commits were used
 *                         lock          held by the router that owns the folder
 *                     /ext, /tail       the stages' parts, where they are on this host (worker/kv_part.h)
 *
 * Every call blocks (fsync): for the disk thread (shelf.h), and for tests.  Folders are 0700, files 0600: they
 * hold what people wrote. */
#ifndef DS4_ROUTER_DISK_FOLDER_H
#define DS4_ROUTER_DISK_FOLDER_H

#include "common/err.h"
#include "common/vec.h"
#include "router/disk/manifest.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_FOLDER_PATH_BYTES 512

struct ds4_folder {
    char dir[DS4_FOLDER_PATH_BYTES / 2];
    char man[DS4_FOLDER_PATH_BYTES]; /* DIR/v1/FINGERPRINT/man */
    int lock_fd;                     /* -1: not open */
    int32_t n_bad;                   /* put away by this router */
};

/* A line of the file of uses. */
struct ds4_commit_use {
    uint8_t id[DS4_ID_BYTES];
    double hits;
    int64_t used_ns;
};
DS4_VEC_TYPE(ds4_commit_uses, struct ds4_commit_use);

/* What a scan found; owned by whoever got it. */
struct ds4_folder_scan {
    DS4_VEC(struct ds4_manifest) commit;   /* heads of sound ones */
    DS4_VEC(struct ds4_manifest) leftover; /* of .w files: parts to be removed */
    struct ds4_commit_uses use;
    int32_t n_reject[DS4_KV_N_REASON]; /* files put away, by reason */
    int32_t n_orphan;                  /* parts that no manifest names, removed */
};
void ds4_folder_scan_deinit(struct ds4_folder_scan *scan);

/* Makes the folder of this fingerprint and takes its lock.  DS4_E_IO, DS4_E_BUSY (another router has it),
 * DS4_E_INVALID (a path too long). */
int ds4_folder_open(struct ds4_folder *folder, const char *dir,
                    const uint8_t fingerprint[DS4_ID_BYTES], struct ds4_err *err) DS4_MUST_CHECK;
void ds4_folder_close(struct ds4_folder *folder);
/* The folder that was opened is still the one of its name: not removed, not unmounted, not mounted over. */
bool ds4_folder_is_there(const struct ds4_folder *folder);

/* Reads the head of every manifest.  What is not sound becomes .bad; temporary files that are old go, and what
 * was put away a week ago.
 * `local`: the stages' parts are on this host; then a manifest with a missing part is put away, and parts that
 * no manifest names are removed, both judged by names and sizes alone. */
int ds4_folder_scan(struct ds4_folder *folder, const uint8_t fingerprint[DS4_ID_BYTES], bool local,
                    struct ds4_folder_scan *scan, struct ds4_err *err) DS4_MUST_CHECK;

/* COMMIT.w of these bytes, not synced: losing it loses nothing but the knowledge of garbage. */
int ds4_folder_intend(struct ds4_folder *folder, const uint8_t id[DS4_ID_BYTES], const void *bytes,
                      size_t n, struct ds4_err *err) DS4_MUST_CHECK;
/* COMMIT.m: written beside, synced, renamed, the folder synced; then COMMIT.w goes.  The rename is the moment
 * the commit exists. */
int ds4_folder_commit(struct ds4_folder *folder, const uint8_t id[DS4_ID_BYTES], const void *bytes,
                      size_t n, struct ds4_err *err) DS4_MUST_CHECK;
/* COMMIT.m becomes COMMIT.w, or COMMIT.bad (the first 64 of a router's life: no cap counts those); there is
 * none: fine. */
int ds4_folder_retire(struct ds4_folder *folder, const uint8_t id[DS4_ID_BYTES], bool quarantine,
                      struct ds4_err *err) DS4_MUST_CHECK;
/* COMMIT.w goes: its parts have gone. */
int ds4_folder_forget(struct ds4_folder *folder, const uint8_t id[DS4_ID_BYTES],
                      struct ds4_err *err) DS4_MUST_CHECK;
/* The whole manifest with its tokens.  -1: *reason and err say why. */
int ds4_folder_load(struct ds4_folder *folder, const uint8_t id[DS4_ID_BYTES],
                    struct ds4_manifest *m, enum ds4_kv_reason *reason,
                    struct ds4_err *err) DS4_MUST_CHECK;
/* The file of uses. */
int ds4_folder_note_uses(struct ds4_folder *folder, const struct ds4_commit_use *use, size_t n,
                         struct ds4_err *err) DS4_MUST_CHECK;

/* Where a part of this host's stages is; false if the path is too long. */
bool ds4_folder_part_path(char path[DS4_FOLDER_PATH_BYTES], const struct ds4_folder *folder,
                          const uint8_t key[DS4_ID_BYTES], bool tail,
                          const struct ds4_kv_part_ref *file);

#endif
