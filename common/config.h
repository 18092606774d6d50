/* The settings of both programs: one file (libConfuse syntax), one table, one plain struct.
 *
 *   http {
 *       listen = "127.0.0.1"
 *       port = 8000
 *   }
 *   cluster { partition = {15, 15, 13} }
 *
 * Setting `a.b` is option b of section a and member config.a.b.  The table in config_table.c holds
 * name, default, range, unit and meaning of each; `--print-config` prints it.  A new setting is one
 * member here and one row there; the member's type decides how the row is read:
 *
 *   bool                          true | false | yes | no | on | off
 *   int32_t, int64_t              integer within the row's range
 *   double                        number within the row's range
 *   unsigned int                  one of the row's choices; the value is its index: an enum below
 *   char *                        text, never NULL
 *   struct ds4_config_ints        {1, 2, 3}
 *   struct ds4_config_texts       {"a", "b"}
 *
 * The struct owns its texts and lists; ds4_config_deinit frees them. */
#ifndef DS4_COMMON_CONFIG_H
#define DS4_COMMON_CONFIG_H

#include "common/buf.h"
#include "common/choices.h"
#include "common/err.h"

#include <stdbool.h>
#include <stdint.h>

#define DS4_CONFIG_MAX_ITEMS 64 /* of a list */

struct ds4_config_ints {
    int32_t v[DS4_CONFIG_MAX_ITEMS];
    int32_t n;
};

struct ds4_config_texts {
    char *v[DS4_CONFIG_MAX_ITEMS];
    int32_t n;
};

/* What is asked of products; auto follows from the backend, and what computes is told enum ds4_products. */
enum ds4_products_choice {
    DS4_PRODUCTS_CHOICE_AUTO,
    DS4_PRODUCTS_CHOICE_EXACT,
    DS4_PRODUCTS_CHOICE_FAST
};

struct ds4_config {
    struct {
        char *listen;
        int32_t port;
        bool open;
        char *keys_file;
        int64_t max_body;
        int32_t request_s;
        bool any_model;
        int32_t ping_ms;
        int32_t queue_header_ms;
        int64_t out_buf;
        int32_t slow_client_s;
        int32_t max_n;
        int32_t store_max;
        unsigned int drop_media; /* enum ds4_media */
        bool ds4_field;
        struct ds4_config_texts cors_origins;
    } http;
    struct {
        char *path;
        char *name;
        struct ds4_config_texts aliases;
        unsigned int release; /* enum ds4_release */
        int32_t context;
    } model;
    struct {
        struct ds4_config_ints partition;
        int32_t stages;
        char *endpoint_dir;
        char *steps_endpoint;
        char *curve_dir;
        unsigned int pipe; /* enum ds4_pipe_kind */
        int32_t heartbeat_ms;
        int32_t lost_ms;
        int32_t form_ms;
        int32_t away_ms;
        int32_t fresh_ms;
        int32_t hold_s;
        int32_t drain_s;
        int32_t leave_s;
    } cluster;
    struct {
        unsigned int mode; /* enum ds4_lost_mode */
        int32_t hold_s;
        char *generation_file;
    } recovery;
    struct {
        int32_t idle_s;
        int32_t busy_s;
        bool fatal;
        struct ds4_config_ints expect;
    } canary;
    struct {
        unsigned int mode; /* enum ds4_health_mode */
    } health;
    struct {
        int32_t max_seqs;
        int32_t default_max_new;
        int32_t queue_max;
        int32_t queue_s;
        int32_t chunk_tok;
        int32_t itl_ms;
        int32_t inflight;
        int32_t probe_ms;
    } sched;
    struct {
        unsigned int method; /* enum ds4_spec_method */
        int32_t k;
        int32_t min_match;
    } spec;
    struct {
        double temperature;
        double top_p;
    } sampling;
    struct {
        unsigned int quant_sim; /* enum ds4_auto_switch */
        int32_t blocks;
        int32_t hot_window;
        int32_t host_mb;
        int32_t overcommit;
        int32_t disk_mb;
        char *disk_dir;
        int32_t disk_write_mbps;
        int32_t disk_timeout_s;
    } kv;
    struct {
        unsigned int
            default_effort; /* enum ds4_effort_setting; written think.default in the file */
        int32_t max_min_context;
    } think;
    struct {
        unsigned int absent_thinking; /* enum ds4_absent_thinking */
    } anthropic;
    struct {
        unsigned int content_specials; /* enum ds4_content_specials */
        bool escape_param_close;
        bool reasoning_memory;
    } prompt;
    struct {
        unsigned int reasoning_field; /* enum ds4_reasoning_field */
        bool dsml_recovery;
        bool dsml_heal_xml;
        int64_t dsml_hold_max;
    } parse;
    struct {
        bool soup;
        int32_t soup_streak;
        int32_t soup_total;
        bool repetition;
        int32_t rep_streak;
        int32_t rep_window;
        bool rep_fuzzy;
        int32_t fuzzy_min_lines;
        int32_t fuzzy_min_hits;
        int32_t fuzzy_prefix_words;
        double fuzzy_overlap;
        int32_t block_tok;
        unsigned int recovery; /* enum ds4_recovery_mode */
        int32_t recovery_max;
        char *nudge_text;
        char *reopen_text;
    } loop;
    struct {
        unsigned int backend; /* enum ds4_backend_kind */
        int32_t threads;
        unsigned int isa;  /* enum ds4_isa */
        unsigned int load; /* enum ds4_load */
    } worker;
    struct {
        struct ds4_config_texts device;
        struct ds4_config_ints memory_limit_mb;
        bool self_test;
        bool offload;
        struct ds4_config_texts cards;
        bool sync_layers;
    } gpu;
    struct {
        bool p2p;
        bool shm;
        char *interface;
        int32_t channels;
        char *debug;
    } nccl;
    struct {
        unsigned int stream;   /* enum ds4_stream_dtype */
        unsigned int products; /* enum ds4_products_choice */
    } numerics;
    struct {
        int32_t step_s;
        int32_t prefill_s;
    } watchdog;
    struct {
        char *listen; /* for ds4_config_address; "" = only where the API is */
        bool open;
        bool vllm_aliases;
    } metrics;
    struct {
        unsigned int level; /* enum ds4_log_level */
        int32_t slow_first_s;
        int32_t slow_total_s;
    } log;
};

/* Defaults only.  0, or -1 with DS4_E_NOMEM. */
int ds4_config_init(struct ds4_config *config, struct ds4_err *err) DS4_MUST_CHECK;
void ds4_config_deinit(struct ds4_config *config);

/* Reads a file over an initialised config.  -1 with DS4_E_IO naming the path if it cannot be read, or
 * DS4_E_INVALID beginning "path:line: " for a bad value, an unknown name, or a section that is not
 * closed; the config then holds a mixture and is good only for ds4_config_deinit. */
int ds4_config_load(struct ds4_config *config, const char *path,
                    struct ds4_err *err) DS4_MUST_CHECK;
/* The same from memory; `name` stands for the path in messages. */
int ds4_config_parse(struct ds4_config *config, struct ds4_str text, const char *name,
                     struct ds4_err *err) DS4_MUST_CHECK;
/* One setting from text ("http.port", "8001"), as the file would write it but without quotes. */
int ds4_config_set(struct ds4_config *config, const char *setting, const char *text,
                   struct ds4_err *err) DS4_MUST_CHECK;

/* What no single row can say: a public address needs keys or http.open, tcp endpoints need CURVE
 * keys, partition and stages agree, and so on.  What needs the model is checked elsewhere. */
int ds4_config_check(const struct ds4_config *config, struct ds4_err *err) DS4_MUST_CHECK;

/* A reload: moves each reloadable setting that differs from `fresh` (a checked config of its own) into
 * `running`, whose old text or list goes the other way.  Appends the names of those to *taken, and of
 * those that differ but need a restart to *left, each after a space.  Cannot fail half-way. */
void ds4_config_take_live(struct ds4_config *running, struct ds4_config *fresh,
                          struct ds4_buf *taken, struct ds4_buf *left);

/* "127.0.0.1:9401" or "[::1]:9401" in two; -1 if it is neither. */
#define DS4_CONFIG_ADDRESS_BYTES 64
int ds4_config_address(const char *text, char address[DS4_CONFIG_ADDRESS_BYTES],
                       int32_t *port) DS4_MUST_CHECK;

/* The number of pipeline stages: cluster.stages, else the length of the partition, else of gpu.cards,
 * else 1. */
int32_t ds4_config_stages(const struct ds4_config *config);
/* True if the text is an address of this host only: 127.x.y.z or ::1. */
bool ds4_config_is_loopback(const char *address);
/* The choice's text, e.g. ds4_config_choice("model.release", 1) = "v4_preview"; "" outside the list.
 * Valid until the eighth call after it in the same thread. */
const char *ds4_config_choice(const char *setting, unsigned int value);

/* Appends all settings in effect as a file that loads back to the same values, each with its meaning,
 * range and default as a comment.  0, or -1 when out is full. */
int ds4_config_print(const struct ds4_config *config, struct ds4_buf *out);

#endif
