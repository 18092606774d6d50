/* ds4-worker: one pipeline stage.  Arguments, settings, then worker/control.c takes over.
 *
 * Exit codes are those of common/service.h; an error of settings, plan or model is 78, so that the
 * service manager does not restart what cannot work. */
#include "common/config.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/service.h"
#include "common/weights_file.h"
#include "worker/control.h"
#include "worker/rig.h"
#include "worker/self_test.h"
#include "worker/settings.h"

#include <argp.h>
#include <stdio.h>
#include <stdlib.h>

#define DEFAULT_CONFIG  "/etc/ds4/ds4.conf"
#define PLAN_MAX_BYTES  ((size_t)1 << 20)
#define HOST_TEST_BYTES ((size_t)256 << 20)
#define RELOAD_BYTES    ((size_t)16384)

const char *argp_program_version = "ds4-worker " DS4_VERSION;

struct arguments {
    const char *config;
    int32_t stage;
    bool level_given;
    enum ds4_log_level level;
    bool plan;
    const char *cards; /* of --plan; NULL: those of the settings, or this machine's device */
    const char *model; /* of --plan; NULL: model.path */
    bool json;
    bool self_test;
    bool config_given;
    bool check_config;
};

enum option_key {
    OPTION_PLAN = 0x100,
    OPTION_CARDS,
    OPTION_MODEL,
    OPTION_JSON,
    OPTION_SELF_TEST,
    OPTION_CHECK
};

static const struct argp_option options[] = {
    {"config", 'c', "FILE", 0, "settings (default " DEFAULT_CONFIG ")", 0},
    {"stage", 's', "N", 0, "stage to run, from 0 (default 0)", 0},
    {"log-level", 'l', "LEVEL", 0, "error, warn, info or debug", 0},
    {"plan", OPTION_PLAN, NULL, 0, "print the memory plan of rig or stage and leave", 0},
    {"cards", OPTION_CARDS, "GB,GB", 0,
     "with --plan: cards to plan for, no device is touched (default: gpu.cards, else this stage's "
     "device)",
     0},
    {"model", OPTION_MODEL, "FILE", 0,
     "with --plan: model to plan for; without --config all other settings have their defaults", 0},
    {"json", OPTION_JSON, NULL, 0, "with --plan: print JSON", 0},
    {"self-test", OPTION_SELF_TEST, NULL, 0,
     "probe the stage's device, test its free memory and leave: 0, or 79 if it is wrong", 0},
    {"check-config", OPTION_CHECK, NULL, 0, "check the settings and leave", 0},
    {0},
};

static error_t parse_option(int key, char *value, struct argp_state *state)
{
    struct arguments *arguments = state->input;
    char *end;
    long number;

    switch (key) {
    case 'c':
        arguments->config = value;
        arguments->config_given = true;
        return 0;
    case 's':
        number = strtol(value, &end, 10);
        if (*value == 0 || *end != 0 || number < 0 || number >= DS4_MAX_STAGES)
            argp_error(state, "--stage is %s, must be 0 to %d", value, DS4_MAX_STAGES - 1);
        arguments->stage = (int32_t)number;
        return 0;
    case 'l':
        if (ds4_log_parse_level(value, &arguments->level) != 0)
            argp_error(state, "--log-level is %s, must be error, warn, info or debug", value);
        arguments->level_given = true;
        return 0;
    case OPTION_PLAN:
        arguments->plan = true;
        return 0;
    case OPTION_CARDS:
        arguments->cards = value;
        return 0;
    case OPTION_MODEL:
        arguments->model = value;
        return 0;
    case OPTION_JSON:
        arguments->json = true;
        return 0;
    case OPTION_SELF_TEST:
        arguments->self_test = true;
        return 0;
    case OPTION_CHECK:
        arguments->check_config = true;
        return 0;
    case ARGP_KEY_END:
        if (!arguments->plan &&
            (arguments->cards != NULL || arguments->model != NULL || arguments->json))
            argp_error(state, "--cards, --model and --json belong to --plan");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int print_rig(const struct ds4_rig *rig, bool json, struct ds4_err *err)
{
    struct ds4_buf out;
    int rc;

    ds4_buf_init(&out, PLAN_MAX_BYTES);
    rc = json ? ds4_rig_print_json(rig, &out) : ds4_rig_print(rig, &out);
    if (rc != 0)
        ds4_fail(err, DS4_E_NOMEM, "no memory to print the plan");
    else if (fwrite(out.ptr, 1, out.len, stdout) != out.len || fflush(stdout) != 0)
        rc = ds4_fail(err, DS4_E_IO, "could not write the plan");
    ds4_buf_deinit(&out);
    return rc;
}

/* Fitting or not, the plan is printed; a plan that does not fit is what a start would fail with. */
static int plan(const struct arguments *arguments, struct ds4_stage_config *stage,
                struct ds4_err *err)
{
    struct ds4_rig rig = {.fits = false};
    int code = DS4_EXIT_CONFIG;
    int rc;

    if (arguments->cards != NULL)
        stage->n_card = ds4_cards_parse(arguments->cards, stage->card, err);
    if (stage->n_card < 0)
        return DS4_EXIT_CONFIG;
    rc = stage->n_card > 0 ? ds4_rig_plan(&rig, stage, stage->card, stage->n_card, err)
                           : ds4_rig_plan_here(&rig, stage, err);
    if (rc == 0 && print_rig(&rig, arguments->json, err) == 0) {
        code = rig.fits ? DS4_EXIT_OK : DS4_EXIT_CONFIG;
        if (!rig.fits)
            ds4_fail(err, DS4_E_NOMEM, "%s", rig.verdict);
    }
    ds4_rig_deinit(&rig);
    return code;
}

/* On the host only as much as a test needs to mean something: its memory has its own checks. */
static int self_test(const struct ds4_stage_config *stage, struct ds4_err *err)
{
    bool host =
        ds4_backend_find(stage->backend) != NULL && ds4_backend_find(stage->backend)->host_weights;
    size_t limit =
        stage->memory_limit_bytes == 0 && host ? HOST_TEST_BYTES : stage->memory_limit_bytes;

    if (ds4_self_test_device(stage->backend, &stage->device, limit, err) == 0)
        return DS4_EXIT_OK;
    if (err->code == DS4_E_BUSY)
        return DS4_EXIT_TEMPORARY;
    return err->code == DS4_E_CORRUPT ? DS4_EXIT_OPERATOR : DS4_EXIT_CONFIG;
}

/* The settings of the file; with --plan --model and no --config the defaults. */
static int load_settings(const struct arguments *arguments, struct ds4_config *config,
                         struct ds4_err *err)
{
    if (ds4_config_init(config, err))
        return -1;
    if ((arguments->model == NULL || arguments->config_given) &&
        ds4_config_load(config, arguments->config, err))
        return -1;
    if (arguments->model != NULL && ds4_config_set(config, "model.path", arguments->model, err))
        return -1;
    return ds4_config_check(config, err);
}

struct running {
    const struct arguments *arguments;
    struct ds4_config *config;
};

/* SIGHUP.  Of what a reload may change, a stage reads nothing but the log's level: the rest is the
 * router's.  A fault in the file changes nothing. */
static void reload(void *arg)
{
    struct running *running = arg;
    struct ds4_config fresh = {0};
    struct ds4_buf taken, left;
    struct ds4_err err = {0};

    if (load_settings(running->arguments, &fresh, &err) != 0) {
        ds4_log(DS4_LOG_ERROR, "worker.reload", "error=\"%s\"", err.msg);
        ds4_config_deinit(&fresh);
        return;
    }
    ds4_buf_init(&taken, RELOAD_BYTES);
    ds4_buf_init(&left, RELOAD_BYTES);
    ds4_config_take_live(running->config, &fresh, &taken, &left);
    ds4_config_deinit(&fresh);
    if (!running->arguments->level_given)
        ds4_log_set_level((enum ds4_log_level)running->config->log.level);
    ds4_log(DS4_LOG_INFO, "worker.reload", "changed=\"%.*s\"", (int)taken.len, taken.ptr);
    if (left.len > 0)
        ds4_log(DS4_LOG_WARN, "worker.reload", "need_restart=\"%.*s\"", (int)left.len, left.ptr);
    ds4_buf_deinit(&taken);
    ds4_buf_deinit(&left);
}

static int run(const struct arguments *arguments, struct ds4_config *config, struct ds4_err *err)
{
    static char name[32];
    struct running running = {arguments, config};
    struct ds4_worker_settings settings;

    if (load_settings(arguments, config, err))
        return DS4_EXIT_CONFIG;
    snprintf(name, sizeof(name), "stage%d", (int)arguments->stage);
    ds4_log_set_name(name);
    ds4_log_set_level(arguments->level_given ? arguments->level
                                             : (enum ds4_log_level)config->log.level);
    if (ds4_fault_init(arguments->stage, err) || ds4_worker_settings_environment(config, err) ||
        ds4_worker_settings_fill(config, arguments->stage, &settings, err) ||
        ds4_weights_sigbus_install(err))
        return DS4_EXIT_CONFIG;
    if (arguments->check_config)
        return DS4_EXIT_OK;
    if (arguments->self_test)
        return self_test(&settings.stage, err);
    if (arguments->plan)
        return plan(arguments, &settings.stage, err);
    settings.control.reload = reload;
    settings.control.reload_arg = &running;
    return ds4_control_run(&settings.control, err);
}

int main(int argc, char **argv)
{
    const struct argp argp = {
        options, parse_option, NULL, "Runs one pipeline stage of a ds4 cluster.", NULL, NULL, NULL};
    struct arguments arguments = {.config = DEFAULT_CONFIG};
    struct ds4_config config = {0};
    struct ds4_err err = {0};
    int code;

    argp_err_exit_status = DS4_EXIT_CONFIG;
    argp_parse(&argp, argc, argv, 0, NULL, &arguments);
    code = run(&arguments, &config, &err);
    if (code != DS4_EXIT_OK)
        ds4_log(DS4_LOG_ERROR, "exit", "code=%d meaning=\"%s\" message=\"%s\"", code,
                ds4_exit_text(code), err.msg);
    ds4_config_deinit(&config);
    return code;
}
