/* One job of the disk tier, from the first system call to the last; called by the disk thread only. */
#ifndef DS4_WORKER_KV_FILE_H
#define DS4_WORKER_KV_FILE_H

#include "common/store_dir.h"
#include "worker/kv_disk.h"

struct ds4_kv_files {
    struct ds4_kv_disk_config config;
    struct ds4_store_dir place;          /* config.dir */
    uint8_t *header;                     /* [DS4_KV_PART_MAX_HEADER] */
    struct ds4_kv_part_section *section; /* [DS4_KV_PART_MAX_SECTIONS] */
    atomic_bool cancel;                  /* ends a job at the next piece */
    int32_t n_bad;                       /* put away by this process */
    /* Sleeps that long unless cancelled; for the rate limit. */
    void (*pause)(void *arg, int64_t ns);
    void *pause_arg;
};

/* Each fills *done but job and generation; reason DS4_KV_OK or why not. */
void ds4_kv_file_write(struct ds4_kv_files *files, const struct ds4_kv_job *job,
                       struct ds4_kv_done *done);
void ds4_kv_file_read(struct ds4_kv_files *files, const struct ds4_kv_job *job,
                      struct ds4_kv_done *done);
void ds4_kv_file_unlink(struct ds4_kv_files *files, const struct ds4_kv_job *job,
                        struct ds4_kv_done *done);

/* Makes `dir` and checks that it can be written. */
int ds4_kv_file_make_root(const char *dir, struct ds4_err *err) DS4_MUST_CHECK;
/* Removes temporary files of writers that died, those older than 10 minutes, and what was put away a week ago. */
void ds4_kv_file_sweep(struct ds4_kv_files *files);

#endif
