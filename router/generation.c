/* The generation file (see the header).
 *
 * One decimal number and a newline, so that people can read and mend it.  The folder is synced as well: a
 * rename that the disk forgets would bring an old number back. */
#include "router/generation.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DS4_GENERATION_BYTES 32

int ds4_generation_load(const char *path, uint32_t *generation, struct ds4_err *err)
{
    char text[DS4_GENERATION_BYTES], *end;
    unsigned long long value;
    ssize_t n;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    *generation = 0;
    if (fd < 0 && errno == ENOENT)
        return 0;
    if (fd < 0)
        return ds4_fail(err, DS4_E_IO, "could not open the generation file: %s", strerror(errno));
    n = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (n < 0)
        return ds4_fail(err, DS4_E_IO, "could not read the generation file: %s", strerror(errno));
    text[n] = '\0';
    value = strtoull(text, &end, 10);
    if (n == 0 || text[0] < '0' || text[0] > '9' || strcmp(end, "\n") != 0 || value > UINT32_MAX)
        return ds4_fail(err, DS4_E_CORRUPT, "the generation file does not hold a number");
    *generation = (uint32_t)value;
    return 0;
}

static int sync_folder(const char *path)
{
    char copy[PATH_MAX];
    int fd, rc;

    (void)snprintf(copy, sizeof(copy), "%s", path);
    fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    rc = fsync(fd);
    close(fd);
    return rc;
}

int ds4_generation_store(const char *path, uint32_t generation, struct ds4_err *err)
{
    char beside[PATH_MAX], text[DS4_GENERATION_BYTES];
    int n = snprintf(text, sizeof(text), "%" PRIu32 "\n", generation);
    bool good;
    int fd;

    if (snprintf(beside, sizeof(beside), "%s.tmp", path) >= (int)sizeof(beside))
        return ds4_fail(err, DS4_E_INVALID, "the path of the generation file is too long");
    fd = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return ds4_fail(err, DS4_E_IO, "could not write the generation file: %s", strerror(errno));
    good = write(fd, text, (size_t)n) == n && fsync(fd) == 0;
    good = close(fd) == 0 && good;
    good = good && rename(beside, path) == 0 && sync_folder(path) == 0;
    return good ? 0
                : ds4_fail(err, DS4_E_IO, "could not write the generation file: %s",
                           strerror(errno));
}
