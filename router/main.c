/* ds4-router: arguments, settings, then the app. */
#include "common/config.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/service.h"
#include "router/app.h"
#include "router/bus_auth.h"

#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DS4_PRINT_BYTES ((size_t)1 << 20)

struct arguments {
    const char *config;
    const char *log_level;
    bool check_config;
    bool print_config;
    const char *keys_dir;
};

enum { OPTION_CHECK = 256, OPTION_PRINT, OPTION_KEYS };

static const struct argp_option options[] = {
    {"config", 'c', "FILE", 0, "settings file (default /etc/ds4/ds4.conf if it exists)", 0},
    {"log-level", 'l', "LEVEL", 0, "error, warn, info or debug; wins over log.level", 0},
    {"check-config", OPTION_CHECK, NULL, 0, "check the settings and leave", 0},
    {"print-config", OPTION_PRINT, NULL, 0, "print the settings in effect and leave", 0},
    {"make-keys", OPTION_KEYS, "DIR", 0, "write the keys of a tcp endpoint into DIR and leave", 0},
    {0},
};

static error_t on_option(int key, char *arg, struct argp_state *state)
{
    struct arguments *a = state->input;

    switch (key) {
    case 'c':
        a->config = arg;
        return 0;
    case 'l':
        a->log_level = arg;
        return 0;
    case OPTION_CHECK:
        a->check_config = true;
        return 0;
    case OPTION_PRINT:
        a->print_config = true;
        return 0;
    case OPTION_KEYS:
        a->keys_dir = arg;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "unexpected argument \"%s\"", arg);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int load(void *arg, struct ds4_config *config, struct ds4_err *err)
{
    const struct arguments *a = arg;
    const char *path = a->config;

    if (ds4_config_init(config, err) != 0)
        return -1;
    if (path == NULL && access("/etc/ds4/ds4.conf", R_OK) == 0)
        path = "/etc/ds4/ds4.conf";
    if (path != NULL && ds4_config_load(config, path, err) != 0)
        return -1;
    if (a->log_level != NULL && ds4_config_set(config, "log.level", a->log_level, err) != 0)
        return -1;
    return ds4_config_check(config, err);
}

static int print(const struct ds4_config *config, struct ds4_err *err)
{
    struct ds4_buf out;
    int rc;

    ds4_buf_init(&out, DS4_PRINT_BYTES);
    rc = ds4_config_print(config, &out);
    if (rc != 0)
        (void)ds4_fail(err, DS4_E_NOMEM, "no memory for the settings");
    else if (fwrite(out.ptr, 1, out.len, stdout) != out.len || fflush(stdout) != 0)
        rc = ds4_fail(err, DS4_E_IO, "could not write the settings: %s", strerror(errno));
    ds4_buf_deinit(&out);
    return rc == 0 ? DS4_EXIT_OK : DS4_EXIT_CONFIG;
}

static int serve(struct arguments *a, struct ds4_config *config, struct ds4_err *err)
{
    struct ds4_app_config app_config = {.config = config, .load = load, .load_arg = a};
    int signal_fd = ds4_service_open_signals(err);
    int code = DS4_EXIT_CONFIG;
    struct ds4_app *app;

    if (signal_fd < 0)
        return code;
    ds4_service_raise_files();
    app_config.signal_fd = signal_fd;
    app = ds4_app_open(&app_config, &code, err);
    if (app != NULL) {
        code = ds4_app_run(app);
        ds4_app_close(app);
    }
    (void)close(signal_fd);
    return code;
}

static int make_keys(const char *dir, struct ds4_err *err)
{
    if (ds4_bus_auth_make_keys(dir, err) == 0)
        return DS4_EXIT_OK;
    ds4_log(DS4_LOG_ERROR, "router.keys", "error=\"%s\"", err->msg);
    return DS4_EXIT_CONFIG;
}

int main(int argc, char **argv)
{
    static const struct argp argp = {
        options, on_option, NULL, "HTTP router and scheduler of a ds4 cluster.", NULL, NULL, NULL};
    struct arguments a = {0};
    struct ds4_config config = {0};
    struct ds4_err err = {0};
    int code = DS4_EXIT_CONFIG;

    argp_program_version = "ds4-router " DS4_VERSION;
    ds4_log_set_name("router");
    if (argp_parse(&argp, argc, argv, 0, NULL, &a) != 0)
        return DS4_EXIT_CONFIG;
    if (a.keys_dir != NULL) {
        code = make_keys(a.keys_dir, &err);
    } else if (ds4_fault_init(DS4_FAULT_ROUTER, &err) != 0 || load(&a, &config, &err) != 0) {
        ds4_log(DS4_LOG_ERROR, "router.settings", "error=\"%s\"", err.msg);
    } else {
        ds4_log_set_level((enum ds4_log_level)config.log.level);
        code = a.print_config   ? print(&config, &err)
               : a.check_config ? DS4_EXIT_OK
                                : serve(&a, &config, &err);
        if (code != DS4_EXIT_OK)
            ds4_log(DS4_LOG_ERROR, "router.exit", "code=%d error=\"%s\"", code, err.msg);
    }
    ds4_config_deinit(&config);
    return code;
}
