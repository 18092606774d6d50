/* What the stories of the disk tier stand on: a folder, stages whose parts outlive routers, a router at a time. */
#ifndef DS4_TESTS_SUPPORT_DISK_WORLD_H
#define DS4_TESTS_SUPPORT_DISK_WORLD_H

#include "router/sched/engine.h"
#include "tests/support/sched_rig.h"

struct world {
    char dir[64];
    struct ds4_scripted_disk disk;
    struct ds4_rig rig;
    struct ds4_rig_shape shape;
};

/* A router on the folder and the stages of w->shape. */
void world_open_rig(struct world *w);
/* cmocka's set-up and tear-down of one test: *state is a struct world. */
int world_start(void **state);
void world_remove_tree(const char *path);
int world_stop(void **state);
/* Everything that is worth it is on disk, and what is not wanted is gone. */
void world_settle(struct world *w);
/* Another router on the same folder and the same stages. */
void world_restart(struct world *w);
struct ds4_rig_client *world_submit(struct world *w, const int32_t *token, int32_t n,
                                    int32_t max_new);
/* Runs it alone; returns how many prompt tokens were not computed. */
int32_t world_ask(struct world *w, const int32_t *token, int32_t n, int32_t max_new);
/* Files of the manifests' folder that end so. */
int32_t world_n_files(struct world *w, const char *suffix);
/* The prompt and what was answered to it, as the next turn sends it: the answer's last token is not computed. */
int32_t *world_turn(const int32_t *prompt, int32_t n, int32_t n_answer, int32_t n_more,
                    int32_t *len);
/* A stage is killed, and all form again. */
void world_lose(struct world *w);
uint64_t world_disk_bytes(const struct world *w);

#endif
