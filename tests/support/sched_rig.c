/* Scheduler, scripted stage and fake clients (see the header). */
#include "tests/support/sched_rig.h"

#include "common/clock.h"
#include "proto/point.h"

#include <stdio.h>
#include <stdlib.h>

static void must(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "sched_rig: %s\n", what);
    abort();
}

void ds4_rig_start(struct ds4_rig *rig)
{
    struct ds4_err err = {0};

    rig->form.generation++;
    ds4_scripted_form(&rig->stage, &rig->form, DS4_RIG_VOCAB, 120);
    if (rig->stage.disk != NULL)
        ds4_scripted_disk_form(rig->stage.disk, &rig->stage);
    must(ds4_sched_start(rig->sched, &rig->form, &rig->host, rig->now_ns, &err) == 0, err.msg);
}

/* Points shaped like those of the real model, a thousand times smaller. */
static void shape_points(struct ds4_rig *rig, int32_t n_points)
{
    const struct ds4_point_shape shape = {
        .window_tok = 128,
        .row_bytes = 10,
        .n_group = 2,
        .group = {{.ratio = 4, .prev_bytes = 100, .open_bytes = 200},
                  {.ratio = 128, .open_bytes = 20}},
    };

    rig->stage.shape = shape;
    rig->stage.unit_bytes = 64;
    rig->form.host_bytes = n_points * ds4_unit_round(ds4_point_bytes(&shape, 128), 64);
    rig->host.n_stage = n_points > 0 ? 1 : 0;
    rig->host.stage[0].shape = shape;
    rig->host.stage[0].unit_bytes = 64;
    rig->host.stage[0].max_bytes = rig->form.host_bytes;
}

/* Every stage of the form has points, and a disk. */
static void add_disk(struct ds4_rig *rig, struct ds4_scripted_disk *disk)
{
    rig->stage.disk = disk;
    disk->block_bytes = DS4_RIG_BLOCK_BYTES;
    rig->host.disk = true;
    rig->host.n_stage = rig->form.n_stage;
    for (int32_t s = 0; s < rig->form.n_stage; s++) {
        rig->host.stage[s] = rig->host.stage[0];
        rig->host.stage[s].block_bytes = DS4_RIG_BLOCK_BYTES;
        rig->host.stage[s].first_layer = 2 * s;
        rig->host.stage[s].last_layer = 2 * s + 2;
    }
}

void ds4_rig_open(struct ds4_rig *rig, const struct ds4_rig_shape *shape)
{
    struct ds4_sched_config config = shape->config;
    struct ds4_sched_port port = {.owner = &rig->stage,
                                  .send_step = ds4_scripted_send,
                                  .send_kv_write = ds4_scripted_kv_write,
                                  .send_kv_read = ds4_scripted_kv_read,
                                  .send_kv_unlink = ds4_scripted_kv_unlink};
    struct ds4_err err = {0};

    *rig = (struct ds4_rig){.now_ns = 1000 * DS4_NS_PER_SEC};
    config.vocab = DS4_RIG_VOCAB;
    config.max_draft = shape->max_draft;
    rig->sched = ds4_sched_new(&config, &port, &err);
    must(rig->sched != NULL, err.msg);
    rig->form = (struct ds4_form){
        .n_stage = shape->n_stage,
        .n_blocks = shape->n_blocks,
        .n_slots = shape->n_slots,
        .context_tok = shape->context_tok,
        .max_draft = shape->max_draft,
    };
    ds4_sched_shape(rig->sched, &rig->form);
    shape_points(rig, shape->n_points);
    rig->host.replay_tok = rig->stage.replay_tok = shape->replay_tok;
    if (shape->disk != NULL)
        add_disk(rig, shape->disk);
    ds4_rig_start(rig);
}

void ds4_rig_close(struct ds4_rig *rig)
{
    ds4_sched_free(rig->sched);
    ds4_scripted_deinit(&rig->stage);
}

static void on_admitted(void *owner, int32_t cached_tok)
{
    struct ds4_rig_client *client = owner;

    client->n_admitted++;
    client->cached = cached_tok;
}

static void on_progress(void *owner, int32_t done_tok, int32_t total_tok, int32_t cached_tok)
{
    struct ds4_rig_client *client = owner;

    must(done_tok > client->progress && done_tok <= total_tok && cached_tok == client->cached,
         "progress goes backwards");
    client->n_progress++;
    client->progress = done_tok;
}

static void on_token(void *owner, const struct ds4_token_entry *entry, int32_t index)
{
    struct ds4_rig_client *client = owner;
    struct ds4_rig_client *other = client->cancel_other;

    must(client->n_done == 0, "a token after done");
    must(DS4_VEC_PUSH(&client->out, entry->token[index]) == 0, "no memory");
    if (client->cancel_after > 0 && (int32_t)client->out.len == client->cancel_after)
        ds4_sched_cancel(client->rig->sched, client->req, DS4_CANCEL_API, client->rig->now_ns);
    client->cancel_other = NULL;
    if (other != NULL && other->req != NULL)
        ds4_sched_cancel(client->rig->sched, other->req, DS4_CANCEL_DISCONNECT,
                         client->rig->now_ns);
}

static void on_done(void *owner, const struct ds4_request_result *result)
{
    struct ds4_rig_client *client = owner;

    client->n_done++;
    client->result = *result;
    ds4_request_free(client->req);
    client->req = NULL;
}

struct ds4_rig_client *ds4_rig_client_of(struct ds4_rig *rig, const int32_t *prompt, int32_t n,
                                         int32_t max_new)
{
    struct ds4_rig_client *client = calloc(1, sizeof(*client));
    struct ds4_err err = {0};

    must(client != NULL, "no memory");
    client->rig = rig;
    client->req = ds4_request_new(DS4_API_CHAT, rig->now_ns, (size_t)8 << 20, &err);
    must(client->req != NULL, err.msg);
    for (int32_t t = 0; t < n; t++)
        must(DS4_VEC_PUSH(&client->prompt, prompt[t]) == 0, "no memory");
    must(ds4_request_set_prompt(client->req, client->prompt.ptr, n, &err) == 0, err.msg);
    client->req->max_new = max_new;
    client->req->n_stop_id = 1;
    client->req->n_model_stop_id = 1;
    client->req->stop_id[0] = DS4_RIG_STOP_ID;
    client->req->sink = (struct ds4_request_sink){
        .owner = client,
        .admitted = on_admitted,
        .progress = on_progress,
        .token = on_token,
        .done = on_done,
    };
    return client;
}

struct ds4_rig_client *ds4_rig_client(struct ds4_rig *rig, uint32_t seed, int32_t n,
                                      int32_t max_new)
{
    struct ds4_rig_client *client;
    int32_t *prompt = malloc((size_t)n * sizeof(*prompt) + 1);
    uint32_t x = seed * 2654435761u + 1;

    must(prompt != NULL, "no memory");
    for (int32_t t = 0; t < n; t++) {
        x = x * 1664525u + 1013904223u;
        prompt[t] = (int32_t)((x >> 10) % DS4_RIG_VOCAB);
    }
    client = ds4_rig_client_of(rig, prompt, n, max_new);
    free(prompt);
    return client;
}

int ds4_rig_submit(struct ds4_rig_client *client, enum ds4_reason *reason, struct ds4_err *err)
{
    return ds4_sched_submit(client->rig->sched, client->req, client->rig->now_ns, reason, NULL,
                            err);
}

void ds4_rig_client_free(struct ds4_rig_client *client)
{
    ds4_request_free(client->req);
    DS4_VEC_DEINIT(&client->prompt);
    DS4_VEC_DEINIT(&client->out);
    free(client);
}

/* Answers, but those of stages that are mute: they are owed. */
static void say(struct ds4_rig *rig, struct ds4_scripted_owed *what)
{
    struct ds4_scripted_disk *disk = rig->stage.disk;
    struct ds4_err err = {0};

    if ((disk->mute >> what->stage & 1) != 0)
        must(DS4_VEC_PUSH(&disk->owed, *what) == 0, "no memory");
    else
        must(ds4_sched_kv_done(rig->sched, what->stage, &what->done, rig->now_ns, &err) == 0,
             err.msg);
}

void ds4_rig_disk(struct ds4_rig *rig)
{
    struct ds4_scripted_disk *disk = rig->stage.disk;
    struct ds4_kv_done done[DS4_MAX_STAGES];

    for (size_t n = disk == NULL ? 0 : disk->owed.len; n > 0; n--) {
        struct ds4_scripted_owed first = disk->owed.ptr[0];

        memmove(disk->owed.ptr, disk->owed.ptr + 1, --disk->owed.len * sizeof(first));
        say(rig, &first);
    }
    while (disk != NULL && ds4_scripted_disk_run(disk, rig->form.n_stage, done))
        for (int32_t s = 0; s < rig->form.n_stage; s++)
            say(rig, &(struct ds4_scripted_owed){.stage = s, .done = done[s]});
}

bool ds4_rig_turn(struct ds4_rig *rig)
{
    struct ds4_tokens_out out;
    struct ds4_err err = {0};

    ds4_sched_pump(rig->sched, rig->now_ns);
    ds4_rig_disk(rig);
    rig->now_ns += DS4_NS_PER_MS;
    if (!ds4_scripted_answer(&rig->stage, &out))
        return false;
    must(rig->stage.err.code == DS4_OK, rig->stage.err.msg);
    must(ds4_sched_tokens(rig->sched, &out, rig->now_ns, &err) == 0, err.msg);
    return true;
}

void ds4_rig_run(struct ds4_rig *rig)
{
    struct ds4_sched_stats stats;

    for (int32_t guard = 0; guard < 1000000; guard++) {
        ds4_sched_stats(rig->sched, &stats);
        if (stats.queued + stats.prefilling + stats.decoding + stats.parked + stats.draining +
                stats.inflight ==
            0)
            return;
        if (!ds4_rig_turn(rig) && rig->stage.disk == NULL) {
            ds4_sched_stats(rig->sched, &stats);
            must(stats.queued + stats.prefilling + stats.decoding + stats.parked + stats.draining ==
                     0,
                 "work is left and nothing is posted");
        }
    }
    must(false, "the scheduler does not come to an end");
}

bool ds4_rig_is_right(const struct ds4_rig_client *client, int32_t max_new)
{
    int32_t n = (int32_t)client->prompt.len;
    int32_t *token = malloc(((size_t)n + (size_t)max_new) * sizeof(*token));
    int32_t made = 0;
    bool right = true;

    must(token != NULL, "no memory");
    memcpy(token, client->prompt.ptr, (size_t)n * sizeof(*token));
    while (made < max_new) {
        int32_t next = ds4_scripted_next(DS4_RIG_VOCAB, token, n + made);

        right = right && made < (int32_t)client->out.len && client->out.ptr[made] == next;
        token[n + made++] = next;
        if (next == DS4_RIG_STOP_ID)
            break;
    }
    free(token);
    return right && made == (int32_t)client->out.len;
}
