/* Reading a key's file.  One reader for both ends of the wire, so that a folder that serves the router
 * serves its workers: the two must not differ in what they take for a key. */
#include "common/curve_key.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

int ds4_curve_key_read(const char *dir, const char *name, char key[DS4_CURVE_KEY_CHARS + 1],
                       struct ds4_err *err)
{
    char path[4096];
    FILE *file;
    size_t n;

    if ((size_t)snprintf(path, sizeof(path), "%s/%s", dir, name) >= sizeof(path))
        return ds4_fail(err, DS4_E_INVALID, "name of the key folder is too long");
    file = fopen(path, "re");
    if (file == NULL)
        return ds4_fail(err, DS4_E_IO, "could not read %s: %s", path, strerror(errno));
    n = fread(key, 1, DS4_CURVE_KEY_CHARS, file);
    fclose(file);
    key[n] = 0;
    if (n != DS4_CURVE_KEY_CHARS || strlen(key) != DS4_CURVE_KEY_CHARS)
        return ds4_fail(err, DS4_E_INVALID, "%s holds no key of %d characters", path,
                        DS4_CURVE_KEY_CHARS);
    return 0;
}
