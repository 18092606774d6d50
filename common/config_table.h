/* The table behind common/config.h; only config.c and config_table.c read it. */
#ifndef DS4_COMMON_CONFIG_TABLE_H
#define DS4_COMMON_CONFIG_TABLE_H

#include "common/config.h"

#include <stddef.h>

enum ds4_setting_type {
    DS4_SETTING_BOOL,
    DS4_SETTING_INT32,
    DS4_SETTING_INT64,
    DS4_SETTING_DOUBLE,
    DS4_SETTING_CHOICE,
    DS4_SETTING_TEXT,
    DS4_SETTING_INTS,
    DS4_SETTING_TEXTS,
};

struct ds4_setting {
    const char *section;
    const char *option;
    enum ds4_setting_type type; /* follows from the member's C type */
    size_t offset;              /* of the member in struct ds4_config */
    const char *fallback; /* the default, as ds4_config_set takes it; "" = empty list or text */
    double min, max;      /* numbers and the items of a list of numbers */
    const char *choices;  /* "a|b|c": index 0, 1, 2; or NULL */
    const char *unit;     /* "" if none */
    const char *doc;      /* one line */
    bool live;            /* a reload of the router applies it; the others need a restart */
};

/* Rows of one section stand together. */
extern const struct ds4_setting ds4_settings[];
extern const size_t ds4_n_settings;

#endif
