/* main() of a fuzz target outside libFuzzer: feeds it the files of the named folders, once each.
 *
 * The product must survive every file, so a crash is the failure and the count says how many were
 * tried.  The last line is "N passed, 0 failed", as tests/run.sh expects. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data = NULL;
    long size = -1;
    int rc = -1;

    if (file == NULL)
        return -1;
    if (fseek(file, 0, SEEK_END) == 0)
        size = ftell(file);
    /* Exactly as large as the input, so that a sanitizer sees the first byte beyond it. */
    if (size >= 0 && fseek(file, 0, SEEK_SET) == 0)
        data = malloc(size == 0 ? 1 : (size_t)size);
    if (data != NULL && fread(data, 1, (size_t)size, file) == (size_t)size)
        rc = LLVMFuzzerTestOneInput(data, (size_t)size);
    free(data);
    (void)fclose(file);
    return rc;
}

/* The number of files tried, or -1 if one could not be read. */
static int replay_folder(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *entry;
    char name[4096];
    int n = 0;

    if (dir == NULL)
        return -1;
    while (n >= 0 && (entry = readdir(dir)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        (void)snprintf(name, sizeof(name), "%s/%s", path, entry->d_name);
        n = replay_file(name) == 0 ? n + 1 : -1;
        if (n < 0)
            (void)fprintf(stderr, "could not replay %s\n", name);
    }
    (void)closedir(dir);
    return n;
}

int main(int argc, char **argv)
{
    int passed = 0, failed = 0, n;

    for (int i = 1; i < argc; i++) {
        n = replay_folder(argv[i]);
        if (n < 0)
            failed++;
        else
            passed += n;
    }
    (void)printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}
