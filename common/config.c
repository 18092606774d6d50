/* Settings: libConfuse reads the syntax, the table decides what a value may be.
 *
 * Every option is given to libConfuse as text (or a list of texts), and its validate callback hands the
 * text to the same reader that ds4_config_set uses, while libConfuse still knows the line.  So there is
 * one place that understands values, and its complaints name setting, value and range.
 * libConfuse accepts a file that ends inside a section; a sentinel option appended to the text then
 * lands in that section, where it is unknown. */
#include "common/config.h"

#include "common/config_table.h"

#include <confuse.h>

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DS4_CHOICE_TEXTS     8
#define DS4_CONFIG_MAX_BYTES ((size_t)1 << 20)
#define DS4_CONFIG_MAX_ROWS  256
#define DS4_CONFIG_SENTINEL  "end_of_settings"

static void *member_of(const struct ds4_config *config, const struct ds4_setting *row)
{
    return (char *)(uintptr_t)config + row->offset;
}

static const struct ds4_setting *find_row(const char *section, size_t n_section, const char *option)
{
    for (size_t i = 0; i < ds4_n_settings; i++) {
        if (strlen(ds4_settings[i].section) == n_section &&
            memcmp(ds4_settings[i].section, section, n_section) == 0 &&
            strcmp(ds4_settings[i].option, option) == 0)
            return &ds4_settings[i];
    }
    return NULL;
}

static const struct ds4_setting *find_setting(const char *name)
{
    const char *dot = strchr(name, '.');

    return dot == NULL ? NULL : find_row(name, (size_t)(dot - name), dot + 1);
}

/* ---- reading one value --------------------------------------------------------------------- */

static int read_bool(const struct ds4_setting *row, const char *text, bool *out,
                     struct ds4_err *err)
{
    static const char *const words[][2] = {{"false", "true"}, {"no", "yes"}, {"off", "on"}};

    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        for (int value = 0; value < 2; value++) {
            if (strcmp(text, words[i][value]) == 0) {
                *out = value != 0;
                return 0;
            }
        }
    }
    return ds4_fail(err, DS4_E_INVALID, "%s.%s is '%.64s', must be true or false", row->section,
                    row->option, text);
}

static int read_int(const struct ds4_setting *row, const char *text, int64_t *out,
                    struct ds4_err *err)
{
    char *end;
    long long value;

    errno = 0;
    value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno == ERANGE || (double)value < row->min ||
        (double)value > row->max)
        return ds4_fail(err, DS4_E_INVALID,
                        "%s.%s is '%.64s', must be an integer from %.0f to %.0f", row->section,
                        row->option, text, row->min, row->max);
    *out = value;
    return 0;
}

static int read_double(const struct ds4_setting *row, const char *text, double *out,
                       struct ds4_err *err)
{
    char *end;
    double value = strtod(text, &end);

    if (end == text || *end != '\0' || !(value >= row->min && value <= row->max))
        return ds4_fail(err, DS4_E_INVALID, "%s.%s is '%.64s', must be a number from %g to %g",
                        row->section, row->option, text, row->min, row->max);
    *out = value;
    return 0;
}

/* The bounds of choice `want` in "a|b|c"; false past the last one. */
static bool choice_at(const char *choices, unsigned int want, struct ds4_str *out)
{
    size_t len;

    for (unsigned int i = 0;; i++) {
        len = strcspn(choices, "|");
        if (i == want) {
            *out = (struct ds4_str){choices, len};
            return true;
        }
        if (choices[len] == '\0')
            return false;
        choices += len + 1;
    }
}

static int read_choice(const struct ds4_setting *row, const char *text, unsigned int *out,
                       struct ds4_err *err)
{
    struct ds4_str choice;

    for (unsigned int i = 0; choice_at(row->choices, i, &choice); i++) {
        if (ds4_str_equal(choice, ds4_str_view(text))) {
            *out = i;
            return 0;
        }
    }
    return ds4_fail(err, DS4_E_INVALID, "%s.%s is '%.64s', must be one of %s", row->section,
                    row->option, text, row->choices);
}

static int copy_text(char **out, const char *text, struct ds4_err *err)
{
    char *copy = strdup(text);

    if (copy == NULL)
        return ds4_fail(err, DS4_E_NOMEM, "no memory for a setting");
    free(*out);
    *out = copy;
    return 0;
}

static void clear_texts(struct ds4_config_texts *texts)
{
    while (texts->n > 0)
        free(texts->v[--texts->n]);
}

static void clear_list(struct ds4_config *config, const struct ds4_setting *row)
{
    if (row->type == DS4_SETTING_INTS)
        *(struct ds4_config_ints *)member_of(config, row) = (struct ds4_config_ints){0};
    else if (row->type == DS4_SETTING_TEXTS)
        clear_texts(member_of(config, row));
}

static int add_item(struct ds4_config *config, const struct ds4_setting *row, const char *text,
                    struct ds4_err *err)
{
    struct ds4_config_ints *ints = member_of(config, row);
    struct ds4_config_texts *texts = member_of(config, row);
    int64_t number;
    char *copy = NULL;

    if ((row->type == DS4_SETTING_INTS ? ints->n : texts->n) == DS4_CONFIG_MAX_ITEMS)
        return ds4_fail(err, DS4_E_INVALID, "%s.%s has more than %d items", row->section,
                        row->option, DS4_CONFIG_MAX_ITEMS);
    if (row->type == DS4_SETTING_INTS) {
        if (read_int(row, text, &number, err) != 0)
            return -1;
        ints->v[ints->n++] = (int32_t)number;
        return 0;
    }
    if (copy_text(&copy, text, err) != 0)
        return -1;
    texts->v[texts->n++] = copy;
    return 0;
}

static int set_scalar(struct ds4_config *config, const struct ds4_setting *row, const char *text,
                      struct ds4_err *err)
{
    void *member = member_of(config, row);
    int64_t number;

    switch (row->type) {
    case DS4_SETTING_BOOL:
        return read_bool(row, text, member, err);
    case DS4_SETTING_INT64:
        return read_int(row, text, member, err);
    case DS4_SETTING_INT32:
        if (read_int(row, text, &number, err) != 0)
            return -1;
        *(int32_t *)member = (int32_t)number; /* the row's range lies within int32_t */
        return 0;
    case DS4_SETTING_DOUBLE:
        return read_double(row, text, member, err);
    case DS4_SETTING_CHOICE:
        return read_choice(row, text, member, err);
    case DS4_SETTING_TEXT:
        return copy_text(member, text, err);
    case DS4_SETTING_INTS:
    case DS4_SETTING_TEXTS:
        break;
    }
    return ds4_fail(err, DS4_E_BUG, "%s.%s is a list", row->section, row->option);
}

static bool is_list(const struct ds4_setting *row)
{
    return row->type == DS4_SETTING_INTS || row->type == DS4_SETTING_TEXTS;
}

/* A list written as one text: items separated by commas, braces allowed around it. */
static int set_list(struct ds4_config *config, const struct ds4_setting *row, const char *text,
                    struct ds4_err *err)
{
    struct ds4_str rest = ds4_str_trim(ds4_str_view(text)), item;
    char *copy;
    size_t comma;
    int rc = 0;

    clear_list(config, row);
    if (rest.len >= 2 && rest.ptr[0] == '{' && rest.ptr[rest.len - 1] == '}')
        rest = ds4_str_trim((struct ds4_str){rest.ptr + 1, rest.len - 2});
    while (rest.len > 0 && rc == 0) {
        comma = ds4_str_find(rest, DS4_STR(","), 0);
        item = ds4_str_trim(ds4_str_head(rest, comma));
        copy = strndup(item.ptr, item.len);
        if (copy == NULL)
            return ds4_fail(err, DS4_E_NOMEM, "no memory for a setting");
        rc = add_item(config, row, copy, err);
        free(copy);
        rest = comma == DS4_STR_NONE ? (struct ds4_str){0} : ds4_str_skip(rest, comma + 1);
    }
    return rc;
}

int ds4_config_set(struct ds4_config *config, const char *setting, const char *text,
                   struct ds4_err *err)
{
    const struct ds4_setting *row = find_setting(setting);

    if (row == NULL)
        return ds4_fail(err, DS4_E_INVALID, "no setting is named '%.64s'", setting);
    return is_list(row) ? set_list(config, row, text, err) : set_scalar(config, row, text, err);
}

/* ---- life ---------------------------------------------------------------------------------- */

int ds4_config_init(struct ds4_config *config, struct ds4_err *err)
{
    const struct ds4_setting *row;

    memset(config, 0, sizeof(*config));
    for (size_t i = 0; i < ds4_n_settings; i++) {
        row = &ds4_settings[i];
        if ((is_list(row) ? set_list(config, row, row->fallback, err)
                          : set_scalar(config, row, row->fallback, err)) != 0) {
            ds4_config_deinit(config);
            return -1;
        }
    }
    return 0;
}

void ds4_config_deinit(struct ds4_config *config)
{
    char **text;

    for (size_t i = 0; i < ds4_n_settings; i++) {
        if (ds4_settings[i].type == DS4_SETTING_TEXT) {
            text = member_of(config, &ds4_settings[i]);
            free(*text);
            *text = NULL;
        } else if (ds4_settings[i].type == DS4_SETTING_TEXTS) {
            clear_texts(member_of(config, &ds4_settings[i]));
        }
    }
}

/* ---- files --------------------------------------------------------------------------------- */

/* libConfuse's callbacks carry no user pointer. */
struct parse {
    struct ds4_config *config;
    const char *name; /* of the file */
    struct ds4_err *err;
    bool failed;
};
static _Thread_local struct parse *parsing;

__attribute__((format(printf, 2, 0))) static void on_syntax_error(cfg_t *cfg, const char *fmt,
                                                                  va_list args)
{
    char text[DS4_ERR_MSG_BYTES];

    if (parsing->failed)
        return; /* the first complaint is the cause */
    parsing->failed = true;
    (void)vsnprintf(text, sizeof(text), fmt, args);
    if (strstr(text, DS4_CONFIG_SENTINEL) != NULL || strstr(text, "premature end") != NULL)
        (void)ds4_fail(parsing->err, DS4_E_INVALID,
                       "%s:%d: the file ends inside a section, list or text: } or quote missing",
                       parsing->name, cfg->line);
    else
        (void)ds4_fail(parsing->err, DS4_E_INVALID, "%s:%d: %s", parsing->name, cfg->line, text);
}

static int on_value(cfg_t *cfg, cfg_opt_t *opt)
{
    const struct ds4_setting *row = find_row(cfg->name, strlen(cfg->name), opt->name);
    int rc = 0;

    if (parsing->failed || row == NULL)
        return -1;
    if (is_list(row)) {
        /* Called after each item and after the brace: start over each time. */
        clear_list(parsing->config, row);
        for (unsigned int i = 0; i < cfg_opt_size(opt) && rc == 0; i++)
            rc = add_item(parsing->config, row, cfg_opt_getnstr(opt, i), parsing->err);
    } else {
        rc = set_scalar(parsing->config, row, cfg_opt_getstr(opt), parsing->err);
    }
    if (rc != 0) {
        parsing->failed = true;
        (void)ds4_err_wrap(parsing->err, "%s:%d", parsing->name, cfg->line);
    }
    return rc;
}

/* Fills `opts` (one run of options per section, each ended) and `sections` from the table. */
static void build_grammar(cfg_opt_t *opts, cfg_opt_t *sections)
{
    const cfg_opt_t end = CFG_END();
    const cfg_opt_t sentinel = CFG_STR(DS4_CONFIG_SENTINEL, NULL, CFGF_NODEFAULT);
    size_t n_opts = 0, n_sections = 0;
    const struct ds4_setting *row;

    for (size_t i = 0; i < ds4_n_settings; i++) {
        row = &ds4_settings[i];
        if (i == 0 || strcmp(row->section, row[-1].section) != 0) {
            if (i > 0)
                opts[n_opts++] = end;
            sections[n_sections++] = (cfg_opt_t)CFG_SEC(row->section, &opts[n_opts], CFGF_NONE);
        }
        opts[n_opts] = is_list(row) ? (cfg_opt_t)CFG_STR_LIST(row->option, NULL, CFGF_NODEFAULT)
                                    : (cfg_opt_t)CFG_STR(row->option, NULL, CFGF_NODEFAULT);
        opts[n_opts++].validcb = on_value;
    }
    opts[n_opts] = end;
    sections[n_sections++] = sentinel;
    sections[n_sections] = end;
}

/* `text` ends with the sentinel line. */
static int parse_text(struct parse *parse, const char *text)
{
    cfg_opt_t opts[2 * DS4_CONFIG_MAX_ROWS];
    cfg_opt_t sections[DS4_CONFIG_MAX_ROWS];
    cfg_t *cfg;
    int rc;

    build_grammar(opts, sections);
    cfg = cfg_init(sections, CFGF_NONE);
    if (cfg == NULL)
        return ds4_fail(parse->err, DS4_E_NOMEM, "no memory to read settings");
    (void)cfg_set_error_function(cfg, on_syntax_error);
    parsing = parse;
    rc = cfg_parse_buf(cfg, text);
    parsing = NULL;
    if (rc == CFG_SUCCESS && !parse->failed && cfg_size(cfg, DS4_CONFIG_SENTINEL) == 0) {
        parse->failed = true;
        (void)ds4_fail(parse->err, DS4_E_INVALID, "%s: a comment is not closed", parse->name);
    } else if (rc != CFG_SUCCESS && !parse->failed) {
        parse->failed = true;
        (void)ds4_fail(parse->err, DS4_E_INVALID, "%s: cannot be read as settings", parse->name);
    }
    cfg_free(cfg);
    return parse->failed ? -1 : 0;
}

int ds4_config_parse(struct ds4_config *config, struct ds4_str text, const char *name,
                     struct ds4_err *err)
{
    struct parse parse = {.config = config, .name = name, .err = err};
    struct ds4_buf buf;
    int rc = -1;

    ds4_buf_init(&buf, DS4_CONFIG_MAX_BYTES);
    if (text.len > 0 && memchr(text.ptr, '\0', text.len) != NULL) {
        (void)ds4_fail(err, DS4_E_INVALID, "%s: holds a NUL byte", name);
        goto out;
    }
    (void)ds4_buf_append_str(&buf, text);
    (void)ds4_buf_append_text(&buf, "\n" DS4_CONFIG_SENTINEL " = 1\n");
    if (ds4_buf_check(&buf, name, err) != 0)
        goto out;
    rc = parse_text(&parse, buf.ptr);
out:
    ds4_buf_deinit(&buf);
    return rc;
}

static int read_file(const char *path, struct ds4_buf *buf, struct ds4_err *err)
{
    char block[4096];
    ssize_t n;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return ds4_fail(err, DS4_E_IO, "could not open %s: %s", path, strerror(errno));
    while ((n = read(fd, block, sizeof(block))) != 0) {
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 || ds4_buf_append(buf, block, (size_t)n) != 0)
            break;
    }
    if (n < 0)
        (void)ds4_fail(err, DS4_E_IO, "could not read %s: %s", path, strerror(errno));
    (void)close(fd);
    return n < 0 ? -1 : ds4_buf_check(buf, path, err);
}

int ds4_config_load(struct ds4_config *config, const char *path, struct ds4_err *err)
{
    struct ds4_buf text;
    int rc;

    ds4_buf_init(&text, DS4_CONFIG_MAX_BYTES);
    rc = read_file(path, &text, err);
    if (rc == 0)
        rc = ds4_config_parse(config, ds4_buf_view(&text), path, err);
    ds4_buf_deinit(&text);
    return rc;
}

/* ---- checks -------------------------------------------------------------------------------- */

bool ds4_config_is_loopback(const char *address)
{
    struct in_addr v4;
    struct in6_addr v6;

    if (inet_pton(AF_INET, address, &v4) == 1)
        return (ntohl(v4.s_addr) >> 24) == IN_LOOPBACKNET;
    return inet_pton(AF_INET6, address, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

int32_t ds4_config_stages(const struct ds4_config *config)
{
    if (config->cluster.stages > 0)
        return config->cluster.stages;
    if (config->cluster.partition.n > 0)
        return config->cluster.partition.n;
    return config->gpu.cards.n > 0 ? config->gpu.cards.n : 1;
}

int ds4_config_address(const char *text, char address[DS4_CONFIG_ADDRESS_BYTES], int32_t *port)
{
    struct ds4_str rest = ds4_str_view(text);
    size_t colon = rest.len;
    unsigned char bytes[sizeof(struct in6_addr)];
    char *end;
    long number;

    while (colon > 0 && text[colon - 1] != ':')
        colon--;
    if (colon < 2 || colon == rest.len || !isdigit((unsigned char)text[colon]))
        return -1;
    number = strtol(text + colon, &end, 10);
    rest = ds4_str_head(rest, colon - 1);
    if (rest.len > 2 && rest.ptr[0] == '[' && rest.ptr[rest.len - 1] == ']')
        rest = (struct ds4_str){rest.ptr + 1, rest.len - 2};
    if (*end != '\0' || number > UINT16_MAX || rest.len >= DS4_CONFIG_ADDRESS_BYTES)
        return -1;
    memcpy(address, rest.ptr, rest.len);
    address[rest.len] = '\0';
    *port = (int32_t)number;
    return inet_pton(text[0] == '[' ? AF_INET6 : AF_INET, address, bytes) == 1 ? 0 : -1;
}

static bool is_tcp(const char *endpoint)
{
    return strncmp(endpoint, "tcp://", strlen("tcp://")) == 0;
}

static int check_metrics_access(const struct ds4_config *config, bool has_keys, struct ds4_err *err)
{
    char address[DS4_CONFIG_ADDRESS_BYTES];
    const char *listen = config->metrics.listen;
    int32_t port;

    if (listen[0] == '\0')
        return 0;
    if (ds4_config_address(listen, address, &port) != 0)
        return ds4_fail(err, DS4_E_INVALID,
                        "metrics.listen is \"%.64s\", must be address:port like 127.0.0.1:9401",
                        listen);
    if (!ds4_config_is_loopback(address) && !has_keys && !config->metrics.open)
        return ds4_fail(
            err, DS4_E_INVALID,
            "metrics.listen is %.64s, a public address: set http.keys_file, or metrics.open = "
            "true to show everyone",
            listen);
    return 0;
}

static int check_access(const struct ds4_config *config, struct ds4_err *err)
{
    bool has_keys = config->http.keys_file[0] != '\0';

    if (!ds4_config_is_loopback(config->http.listen) && !has_keys && !config->http.open)
        return ds4_fail(
            err, DS4_E_INVALID,
            "http.listen is %.64s, a public address: set http.keys_file, or http.open = "
            "true to serve everyone",
            config->http.listen);
    if (check_metrics_access(config, has_keys, err) != 0)
        return -1;
    if (is_tcp(config->cluster.steps_endpoint) && config->cluster.curve_dir[0] == '\0')
        return ds4_fail(err, DS4_E_INVALID,
                        "cluster.steps_endpoint on tcp needs the keys of cluster.curve_dir");
    return 0;
}

/* Lists with a value per stage; `one` value may stand for all of them. */
static int check_per_stage(const struct ds4_config *config, const char *setting, int32_t n,
                           bool one, struct ds4_err *err)
{
    int32_t n_stage = ds4_config_stages(config);

    if (n == 0 || n == n_stage || (one && n == 1))
        return 0;
    return ds4_fail(err, DS4_E_INVALID, "%s has %d values, the cluster has %d stages", setting, n,
                    n_stage);
}

int ds4_config_check(const struct ds4_config *config, struct ds4_err *err)
{
    if (check_access(config, err) != 0)
        return -1;
    if (config->cluster.stages > 0 && config->cluster.partition.n > 0 &&
        config->cluster.stages != config->cluster.partition.n)
        return ds4_fail(err, DS4_E_INVALID, "cluster.stages is %d, but cluster.partition has %d",
                        config->cluster.stages, config->cluster.partition.n);
    if (check_per_stage(config, "gpu.device", config->gpu.device.n, true, err) != 0 ||
        check_per_stage(config, "gpu.memory_limit_mb", config->gpu.memory_limit_mb.n, true, err) !=
            0 ||
        check_per_stage(config, "gpu.cards", config->gpu.cards.n, false, err) != 0)
        return -1;
    if (config->cluster.lost_ms < 2 * config->cluster.heartbeat_ms)
        return ds4_fail(err, DS4_E_INVALID,
                        "cluster.lost_ms is %d, must be at least twice cluster.heartbeat_ms (%d)",
                        config->cluster.lost_ms, config->cluster.heartbeat_ms);
    if (config->sampling.top_p <= 0)
        return ds4_fail(err, DS4_E_INVALID, "sampling.top_p is 0, must be in (0, 1]");
    return 0;
}

/* ---- printing ------------------------------------------------------------------------------ */

const char *ds4_config_choice(const char *setting, unsigned int value)
{
    static _Thread_local char texts[DS4_CHOICE_TEXTS][32]; /* several in one printf */
    static _Thread_local unsigned int turn;
    const struct ds4_setting *row = find_setting(setting);
    struct ds4_str choice;
    char *text;

    if (row == NULL || row->choices == NULL || !choice_at(row->choices, value, &choice))
        return "";
    text = texts[turn++ % DS4_CHOICE_TEXTS];
    (void)snprintf(text, sizeof(texts[0]), "%.*s", DS4_STR_ARG(choice));
    return text;
}

/* Double quotes as libConfuse reads them; it would expand "${NAME}" from the environment. */
static void print_quoted(struct ds4_buf *out, const char *text)
{
    (void)ds4_buf_append_byte(out, '"');
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\')
            (void)ds4_buf_appendf(out, "\\%c", *text);
        else if ((unsigned char)*text < ' ' || *text == '$')
            (void)ds4_buf_appendf(out, "\\x%02x", (unsigned char)*text);
        else
            (void)ds4_buf_append_byte(out, *text);
    }
    (void)ds4_buf_append_byte(out, '"');
}

static void print_double(struct ds4_buf *out, double value)
{
    char text[32];

    /* The shortest text that reads back the same; libConfuse takes a bare "1e+02" for "1e += 02". */
    for (int digits = 1; digits <= 17; digits++) {
        (void)snprintf(text, sizeof(text), "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    for (const char *c = text; *c != '\0'; c++) {
        if (*c != '+')
            (void)ds4_buf_append_byte(out, (unsigned char)*c);
    }
}

static void print_value(const struct ds4_config *config, const struct ds4_setting *row,
                        struct ds4_buf *out)
{
    const void *member = member_of(config, row);
    const struct ds4_config_ints *ints = member;
    const struct ds4_config_texts *texts = member;
    struct ds4_str choice = {"", 0};

    switch (row->type) {
    case DS4_SETTING_BOOL:
        (void)ds4_buf_append_text(out, *(const bool *)member ? "true" : "false");
        return;
    case DS4_SETTING_INT32:
        (void)ds4_buf_appendf(out, "%d", *(const int32_t *)member);
        return;
    case DS4_SETTING_INT64:
        (void)ds4_buf_appendf(out, "%lld", (long long)*(const int64_t *)member);
        return;
    case DS4_SETTING_DOUBLE:
        print_double(out, *(const double *)member);
        return;
    case DS4_SETTING_CHOICE:
        (void)choice_at(row->choices, *(const unsigned int *)member, &choice);
        (void)ds4_buf_appendf(out, "\"%.*s\"", DS4_STR_ARG(choice));
        return;
    case DS4_SETTING_TEXT:
        print_quoted(out, *(char *const *)member);
        return;
    case DS4_SETTING_INTS:
    case DS4_SETTING_TEXTS:
        break;
    }
    (void)ds4_buf_append_byte(out, '{');
    for (int32_t i = 0; i < (row->type == DS4_SETTING_INTS ? ints->n : texts->n); i++) {
        (void)ds4_buf_append_text(out, i == 0 ? "" : ", ");
        if (row->type == DS4_SETTING_INTS)
            (void)ds4_buf_appendf(out, "%d", ints->v[i]);
        else
            print_quoted(out, texts->v[i]);
    }
    (void)ds4_buf_append_byte(out, '}');
}

static void print_comment(const struct ds4_setting *row, struct ds4_buf *out)
{
    const char *space = row->unit[0] == '\0' ? "" : " ";

    (void)ds4_buf_appendf(out, "    # %s\n    # ", row->doc);
    if (row->choices != NULL)
        (void)ds4_buf_appendf(out, "one of %s; ", row->choices);
    else if (row->min < row->max && row->type == DS4_SETTING_DOUBLE)
        (void)ds4_buf_appendf(out, "%g to %g%s%s; ", row->min, row->max, space, row->unit);
    else if (row->min < row->max)
        (void)ds4_buf_appendf(out, "%.0f to %.0f%s%s; ", row->min, row->max, space, row->unit);
    (void)ds4_buf_appendf(out, "default %s%s\n", row->fallback[0] == '\0' ? "empty" : row->fallback,
                          row->live ? "; reloadable" : "");
}

int ds4_config_print(const struct ds4_config *config, struct ds4_buf *out)
{
    const struct ds4_setting *row;
    bool opens, closes;

    for (size_t i = 0; i < ds4_n_settings; i++) {
        row = &ds4_settings[i];
        opens = i == 0 || strcmp(row->section, row[-1].section) != 0;
        closes = i + 1 == ds4_n_settings || strcmp(row->section, row[1].section) != 0;
        if (opens)
            (void)ds4_buf_appendf(out, "%s%s {\n", i == 0 ? "" : "\n", row->section);
        print_comment(row, out);
        (void)ds4_buf_appendf(out, "    %s = ", row->option);
        print_value(config, row, out);
        (void)ds4_buf_append_byte(out, '\n');
        if (closes)
            (void)ds4_buf_append_text(out, "}\n");
    }
    return out->failed ? -1 : 0;
}
