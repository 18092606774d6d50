/* A folder of ours on a disk that may go away while we run.
 *
 * A disk that is unmounted leaves an empty folder of the same name, and whoever makes what is missing there
 * fills another disk.  So a folder is made once, at the start; after that it must be there, and be a mount
 * point if it has been one. */
#ifndef DS4_COMMON_STORE_DIR_H
#define DS4_COMMON_STORE_DIR_H

#include "common/err.h"

#include <stdbool.h>

struct ds4_store_dir {
    const char *path; /* borrowed */
    bool known;       /* it has been there */
    bool mount;       /* as a mount point */
};

/* Is it what it was?  The first time that it is there is remembered.  DS4_E_IO; the message has no path.
 * Blocking: a look at two folders. */
int ds4_store_dir_check(struct ds4_store_dir *dir, struct ds4_err *err) DS4_MUST_CHECK;

#endif
