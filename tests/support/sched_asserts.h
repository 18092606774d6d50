/* What tests over a sched_rig.h say again and again; not in sched_rig.c, which a bench
 * without cmocka uses as well. */
#ifndef DS4_TESTS_SUPPORT_SCHED_ASSERTS_H
#define DS4_TESTS_SUPPORT_SCHED_ASSERTS_H

#include "router/sched/engine.h"
#include "tests/support/sched_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

/* The books of blocks, prefixes, points and commits balance, and the stage saw nothing wrong. */
static inline void assert_clean(const struct ds4_rig *rig)
{
    struct ds4_sched *s = rig->sched;
    struct ds4_err err = {0};

    assert_string_equal(rig->stage.err.msg, "");
    if (s->budget == NULL) /* no generation, so no books */
        return;
    (void)(ds4_budget_check(s->budget, &err) == 0 && ds4_prefix_check(&s->prefix, &err) == 0 &&
           ds4_points_check(&s->points, &err) == 0 &&
           (s->tier.catalog == NULL || ds4_catalog_check(s->tier.catalog, &err) == 0));
    assert_string_equal(err.msg, "");
}

static inline struct ds4_rig_client *submit(struct ds4_rig_client *client)
{
    struct ds4_err err = {0};

    assert_int_equal(ds4_rig_submit(client, NULL, &err), 0);
    return client;
}

/* The caller's to free; another seed, another text. */
static inline int32_t *tokens(uint32_t seed, int32_t n)
{
    int32_t *token = malloc((size_t)n * sizeof(*token));
    uint32_t x = seed * 2654435761u + 1;

    assert_non_null(token);
    for (int32_t t = 0; t < n; t++) {
        x = x * 1664525u + 1013904223u;
        token[t] = (int32_t)((x >> 10) % DS4_RIG_VOCAB);
    }
    return token;
}

#endif
