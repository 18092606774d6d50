/* Is the folder still what it was (see the header)?
 *
 * A mount point is a folder on another device than the one above it.  A bind mount from the same device is not
 * told from a plain folder: then only what lies in it can say that it is gone. */
#include "common/store_dir.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define PATH_BYTES 4096

int ds4_store_dir_check(struct ds4_store_dir *dir, struct ds4_err *err)
{
    char above[PATH_BYTES];
    struct stat st, up;
    bool mount;

    if ((size_t)snprintf(above, sizeof(above), "%s/..", dir->path) >= sizeof(above))
        return ds4_fail(err, DS4_E_INVALID, "the folder's name is too long");
    if (stat(dir->path, &st) != 0 || stat(above, &up) != 0)
        return ds4_fail(err, DS4_E_IO, "the folder is gone: %s", strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return ds4_fail(err, DS4_E_IO, "the folder is gone: something else has its name");
    mount = st.st_dev != up.st_dev;
    if (dir->mount && !mount)
        return ds4_fail(err, DS4_E_IO, "the folder's disk is not mounted any more");
    dir->known = true;
    dir->mount = mount;
    return 0;
}
