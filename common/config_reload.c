/* What a reload may change: the rows of the table that are marked as live.
 *
 * Members are exchanged, not copied: nothing is allocated, so nothing can fail half-way, and what the
 * running config held is freed with the fresh one. */
#include "common/config_table.h"

#include <string.h>

static size_t member_bytes(const struct ds4_setting *row)
{
    switch (row->type) {
    case DS4_SETTING_BOOL:
        return sizeof(bool);
    case DS4_SETTING_INT32:
        return sizeof(int32_t);
    case DS4_SETTING_INT64:
        return sizeof(int64_t);
    case DS4_SETTING_DOUBLE:
        return sizeof(double);
    case DS4_SETTING_CHOICE:
        return sizeof(unsigned int);
    case DS4_SETTING_TEXT:
        return sizeof(char *);
    case DS4_SETTING_INTS:
        return sizeof(struct ds4_config_ints);
    case DS4_SETTING_TEXTS:
        break;
    }
    return sizeof(struct ds4_config_texts);
}

static bool same_texts(const struct ds4_config_texts *a, const struct ds4_config_texts *b)
{
    if (a->n != b->n)
        return false;
    for (int32_t i = 0; i < a->n; i++)
        if (strcmp(a->v[i], b->v[i]) != 0)
            return false;
    return true;
}

static bool same_ints(const struct ds4_config_ints *a, const struct ds4_config_ints *b)
{
    return a->n == b->n && memcmp(a->v, b->v, (size_t)a->n * sizeof(a->v[0])) == 0;
}

static bool same(const struct ds4_setting *row, const void *a, const void *b)
{
    if (row->type == DS4_SETTING_TEXT)
        return strcmp(*(char *const *)a, *(char *const *)b) == 0;
    if (row->type == DS4_SETTING_TEXTS)
        return same_texts(a, b);
    if (row->type == DS4_SETTING_INTS)
        return same_ints(a, b);
    return memcmp(a, b, member_bytes(row)) == 0;
}

static void exchange(void *a, void *b, size_t n)
{
    unsigned char *x = a, *y = b, kept;

    for (size_t i = 0; i < n; i++) {
        kept = x[i];
        x[i] = y[i];
        y[i] = kept;
    }
}

void ds4_config_take_live(struct ds4_config *running, struct ds4_config *fresh,
                          struct ds4_buf *taken, struct ds4_buf *left)
{
    const struct ds4_setting *row;
    void *old, *new;

    for (size_t i = 0; i < ds4_n_settings; i++) {
        row = &ds4_settings[i];
        old = (char *)running + row->offset;
        new = (char *)fresh + row->offset;
        if (same(row, old, new))
            continue;
        (void)ds4_buf_appendf(row->live ? taken : left, " %s.%s", row->section, row->option);
        if (row->live)
            exchange(old, new, member_bytes(row));
    }
}
