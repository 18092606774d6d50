/* What the router adds: from a worker's token message to the bytes at a client's socket, and from a
 * request to its first step.
 *
 * The real router runs as its own process on the tiny model's vocabulary; this program is both its only
 * worker (one stage that answers every step after a fixed pause, over the ordinary wire) and its
 * clients.  All clocks are CLOCK_MONOTONIC of one machine.  Latency of token n of a stream = arrival of
 * its n-th content frame minus the moment its TOKENS message was given to ZeroMQ, so it holds both
 * sockets, the parser and the event's formatting.  What limits it on two cores: the three threads of
 * work (worker, router, clients) share them. */
#include "common/clock.h"
#include "proto/codec.h"
#include "worker/bus.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BENCH_MODEL      "tests/data/ds4-tiny.gguf"
#define BENCH_MAX_STREAM 64
#define BENCH_TOKENS     400
#define BENCH_CONTEXT    (1 << 18)
#define BENCH_STEP_NS    (5 * DS4_NS_PER_MS) /* a fast rig's decode step */
#define BENCH_BOOT       0x5a

struct slot {
    int32_t stream; /* from the sampling seed; -1 closed */
    int32_t n_sent;
};

struct bench {
    char folder[64];
    char config[96];
    int port;
    pid_t router;
    pthread_t worker;
    atomic_bool stop;
    int32_t token; /* the id every step answers with */
    struct slot slot[BENCH_MAX_STREAM + 8];
    _Atomic int64_t sent_ns[BENCH_MAX_STREAM][BENCH_TOKENS + 1];
    _Atomic int64_t first_step_ns[BENCH_MAX_STREAM];
};

static void die(const char *what)
{
    fprintf(stderr, "bench_router: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* ---- the worker ----------------------------------------------------------------------------------- */

static void send_hello(struct ds4_wbus *bus)
{
    struct ds4_hello hello = {.stage = 0,
                              .n_stage = 1,
                              .first_layer = 0,
                              .last_layer = 8,
                              .n_layer = 8,
                              .max_blocks = 80 * 1024,
                              .max_slots = BENCH_MAX_STREAM + 8,
                              .max_context = BENCH_CONTEXT,
                              .pid = getpid(),
                              .backend = "cpu",
                              .device = "scripted",
                              .host = "bench"};
    struct ds4_buf out;

    memset(hello.boot_id, BENCH_BOOT, sizeof(hello.boot_id));
    ds4_buf_init(&out, 1 << 20);
    if (ds4_codec_encode_hello(&hello, &out, NULL) != 0 ||
        ds4_wbus_send(bus, DS4_FRAME_HELLO, 0, ds4_buf_view(&out), NULL) != 0)
        fprintf(stderr, "bench_router: hello was not sent\n");
    ds4_buf_deinit(&out);
}

static void send_health(struct ds4_wbus *bus, uint32_t generation, int64_t step_no)
{
    struct ds4_health health = {.generation = generation,
                                .state = generation == 0 ? DS4_WORKER_IDLE : DS4_WORKER_READY,
                                .step_no = step_no,
                                .loaded_bytes = 1,
                                .total_bytes = 1};
    struct ds4_buf out;

    ds4_buf_init(&out, 1 << 20);
    if (ds4_codec_encode_health(&health, &out, NULL) == 0)
        (void)!ds4_wbus_send(bus, DS4_FRAME_HEALTH, generation, ds4_buf_view(&out), NULL);
    ds4_buf_deinit(&out);
}

static void note_opens(struct bench *b, const struct ds4_step *step)
{
    for (int32_t i = 0; i < step->n_close; i++)
        b->slot[step->close_slot[i]].stream = -1;
    for (int32_t i = 0; i < step->n_open; i++) {
        uint64_t seed = step->open[i].sampling.seed;
        struct slot *slot = &b->slot[step->open[i].slot];

        slot->stream = seed < BENCH_MAX_STREAM ? (int32_t)seed : -1;
        slot->n_sent = 0;
        if (slot->stream >= 0)
            atomic_store(&b->first_step_ns[slot->stream], ds4_clock_ns());
    }
}

static void answer_step(struct bench *b, struct ds4_wbus *bus, const struct ds4_step *step,
                        struct ds4_arena *arena)
{
    struct ds4_token_entry *entry =
        ds4_arena_take_array(arena, (size_t)step->n_entry, sizeof(*entry));
    struct ds4_tokens_out out = {.generation = step->generation,
                                 .step_no = step->step_no,
                                 .n_entry = step->n_entry,
                                 .entry = entry};
    struct ds4_buf bytes;
    int64_t now_ns;

    note_opens(b, step);
    for (int32_t i = 0; i < step->n_entry; i++) {
        const struct ds4_step_entry *from = &step->entry[i];

        entry[i] = (struct ds4_token_entry){
            .seq = from->seq, .epoch = from->epoch, .pos = from->base_pos + from->n_tok};
        if (from->sample) {
            entry[i].flags = DS4_TOKEN_SAMPLED;
            entry[i].n_token = 1;
            entry[i].token[0] = b->token;
        }
    }
    ds4_buf_init(&bytes, 8 << 20);
    if (ds4_codec_encode_tokens(&out, arena, &bytes, NULL) != 0)
        die("encode");
    now_ns = ds4_clock_ns();
    for (int32_t i = 0; i < step->n_entry; i++) {
        struct slot *slot = &b->slot[step->entry[i].slot];

        if (step->entry[i].sample && slot->stream >= 0 && slot->n_sent < BENCH_TOKENS)
            atomic_store(&b->sent_ns[slot->stream][slot->n_sent++], now_ns);
    }
    if (ds4_wbus_send(bus, DS4_FRAME_TOKENS, step->generation, ds4_buf_view(&bytes), NULL) != 0)
        fprintf(stderr, "bench_router: tokens were not sent\n");
    ds4_buf_deinit(&bytes);
}

static void take_frame(struct bench *b, struct ds4_wbus *bus, const struct ds4_frame *frame,
                       struct ds4_str payload, struct ds4_arena *arena, uint32_t *generation,
                       int64_t *step_no)
{
    struct ds4_step step;
    struct ds4_form form;
    struct timespec pause = {0, BENCH_STEP_NS};

    if (frame->kind == DS4_FRAME_FORM && ds4_codec_decode_form(payload, arena, &form, NULL) == 0) {
        *generation = form.generation;
        (void)!ds4_wbus_send(bus, DS4_FRAME_FORMED, *generation, DS4_STR(""), NULL);
        send_health(bus, *generation, -1);
    } else if (frame->kind == DS4_FRAME_STEP &&
               ds4_codec_decode_step(payload, frame->generation, arena, &step, NULL) == 0) {
        if (step.n_tok <= 2 * BENCH_MAX_STREAM) /* prompts cost nothing here */
            (void)nanosleep(&pause, NULL);
        answer_step(b, bus, &step, arena);
        *step_no = step.step_no;
    }
}

static void *run_worker(void *arg)
{
    struct bench *b = arg;
    char endpoint[128];
    struct ds4_wbus_config config = {.endpoint = endpoint};
    struct ds4_deadline heartbeat = ds4_deadline_in_ms(0);
    struct ds4_frame frame;
    struct ds4_arena arena;
    struct ds4_buf payload;
    struct ds4_err err = {0};
    struct ds4_wbus *bus;
    uint32_t generation = 0;
    int64_t step_no = -1;

    snprintf(endpoint, sizeof(endpoint), "ipc://%s/run/router.sock", b->folder);
    memset(config.boot_id, BENCH_BOOT, sizeof(config.boot_id));
    bus = ds4_wbus_open(&config, &err);
    if (bus == NULL)
        die(err.msg);
    ds4_arena_init(&arena, DS4_CODEC_ARENA_BYTES * 2);
    ds4_buf_init(&payload, DS4_MAX_FRAME_BYTES);
    while (!atomic_load(&b->stop)) {
        ds4_wbus_wait(bus, NULL, 0, 100);
        if (ds4_wbus_next_link(bus) == DS4_WBUS_UP) {
            send_hello(bus);
            send_health(bus, generation, step_no);
        }
        while (ds4_wbus_recv(bus, &frame, &payload, &err) == 1) {
            take_frame(b, bus, &frame, ds4_buf_view(&payload), &arena, &generation, &step_no);
            ds4_arena_reset(&arena, (struct ds4_arena_mark){0});
        }
        if (ds4_deadline_passed(heartbeat)) {
            send_health(bus, generation, step_no);
            heartbeat = ds4_deadline_in_ms(500);
        }
    }
    ds4_buf_deinit(&payload);
    ds4_arena_deinit(&arena);
    ds4_wbus_close(bus, 0);
    return NULL;
}

/* ---- the clients ------------------------------------------------------------------------------------ */

struct client {
    int fd;
    int32_t stream;
    int32_t n_seen;
    bool done;
    int64_t asked_ns;
    int64_t *latency_ns; /* [BENCH_TOKENS] */
    char tail[16384];
    size_t n_tail;
};

static int connect_router(const struct bench *b)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)b->port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof(at)) != 0) {
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

static void ask(const struct bench *b, struct client *c, int32_t words)
{
    char head[256];
    struct ds4_buf body;

    ds4_buf_init(&body, 64 << 20);
    ds4_buf_appendf(&body,
                    "{\"stream\":true,\"seed\":%d,\"max_tokens\":%d,\"chat_template_kwargs\":"
                    "{\"thinking\":false},\"messages\":[{\"role\":\"user\",\"content\":\"%d",
                    c->stream, BENCH_TOKENS, c->stream);
    for (int32_t i = 0; i < words; i++)
        ds4_buf_append_text(&body, " stone");
    ds4_buf_append_text(&body, "\"}]}");
    snprintf(head, sizeof(head),
             "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
             "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
             body.len);
    c->fd = connect_router(b);
    if (c->fd < 0)
        die("connect");
    c->asked_ns = ds4_clock_ns();
    if (write(c->fd, head, strlen(head)) < 0)
        die("write");
    for (size_t at = 0; at < body.len;) {
        ssize_t n = write(c->fd, body.ptr + at, body.len - at);

        if (n < 0)
            die("write");
        at += (size_t)n;
    }
    ds4_buf_deinit(&body);
}

/* Counts content frames in what arrived; the first delta carries the role and an empty content. */
static void take_bytes(struct bench *b, struct client *c)
{
    static const char mark[] = "\"delta\":{\"content\":\"";
    int64_t now_ns;
    ssize_t n = read(c->fd, c->tail + c->n_tail, sizeof(c->tail) - 1 - c->n_tail);
    char *at, *hit;

    now_ns = ds4_clock_ns();
    if (n <= 0) {
        c->done = true;
        return;
    }
    c->n_tail += (size_t)n;
    c->tail[c->n_tail] = '\0';
    at = c->tail;
    while ((hit = strstr(at, mark)) != NULL) {
        at = hit + sizeof(mark) - 1;
        if (c->n_seen < BENCH_TOKENS) {
            c->latency_ns[c->n_seen] = now_ns - atomic_load(&b->sent_ns[c->stream][c->n_seen]);
            c->n_seen++;
        }
    }
    if (strstr(c->tail, "data: [DONE]") != NULL)
        c->done = true;
    /* Keep what may be the start of a mark. */
    n = (ssize_t)(c->n_tail - (size_t)(at - c->tail));
    if (n > (ssize_t)sizeof(mark))
        n = (ssize_t)sizeof(mark);
    memmove(c->tail, c->tail + c->n_tail - (size_t)n, (size_t)n);
    c->n_tail = (size_t)n;
}

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return x < y ? -1 : x > y;
}

static double at_us(const int64_t *sorted, size_t n, double fraction)
{
    return n == 0 ? 0.0 : (double)sorted[(size_t)((double)(n - 1) * fraction)] / 1e3;
}

static void run(struct bench *b, int32_t n_stream, int32_t words, const char *what)
{
    struct client *client = calloc((size_t)n_stream, sizeof(*client));
    int64_t *all = calloc((size_t)n_stream * BENCH_TOKENS, sizeof(*all));
    int64_t *added = calloc((size_t)n_stream, sizeof(*added));
    struct pollfd poll_fd[BENCH_MAX_STREAM];
    size_t n_all = 0;
    int32_t open;

    if (client == NULL || all == NULL || added == NULL)
        die("memory");
    for (int32_t i = 0; i < n_stream; i++) {
        atomic_store(&b->first_step_ns[i], 0);
        client[i].stream = i;
        client[i].latency_ns = all + (size_t)i * BENCH_TOKENS;
        ask(b, &client[i], words);
    }
    do {
        open = 0;
        for (int32_t i = 0; i < n_stream; i++) {
            poll_fd[i] = (struct pollfd){client[i].done ? -1 : client[i].fd, POLLIN, 0};
            open += !client[i].done;
        }
        if (open > 0 && poll(poll_fd, (nfds_t)n_stream, 20000) <= 0)
            die("no bytes for 20 s");
        for (int32_t i = 0; i < n_stream; i++)
            if ((poll_fd[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0)
                take_bytes(b, &client[i]);
    } while (open > 0);
    for (int32_t i = 0; i < n_stream; i++) {
        added[i] = atomic_load(&b->first_step_ns[i]) - client[i].asked_ns;
        memmove(all + n_all, client[i].latency_ns, (size_t)client[i].n_seen * sizeof(*all));
        n_all += (size_t)client[i].n_seen;
        close(client[i].fd);
    }
    qsort(all, n_all, sizeof(*all), compare);
    qsort(added, (size_t)n_stream, sizeof(*added), compare);
    printf("%-34s %7zu %9.0f %9.0f %9.0f %12.2f\n", what, n_all, at_us(all, n_all, 0.5),
           at_us(all, n_all, 0.99), at_us(all, n_all, 1.0),
           at_us(added, (size_t)n_stream, 0.5) / 1e3);
    free(client);
    free(all);
    free(added);
}

/* ---- the router --------------------------------------------------------------------------------------- */

static int free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t size = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof(at)) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &size) != 0)
        die("port");
    close(fd);
    return ntohs(at.sin_port);
}

static void start_router(struct bench *b, const char *program)
{
    FILE *file;

    snprintf(b->folder, sizeof(b->folder), "/tmp/ds4-bench-XXXXXX");
    if (mkdtemp(b->folder) == NULL)
        die("folder");
    snprintf(b->config, sizeof(b->config), "%s/ds4.conf", b->folder);
    b->port = free_port();
    file = fopen(b->config, "we");
    if (file == NULL)
        die(b->config);
    fprintf(file,
            "http { port = %d }\nmodel { path = \"%s\" release = \"v4_preview\" context = %d }\n"
            "cluster { stages = 1 endpoint_dir = \"%s/run\" }\n"
            "sched { max_seqs = %d chunk_tok = 8192 }\nlog { level = \"warn\" }\n",
            b->port, BENCH_MODEL, BENCH_CONTEXT, b->folder, BENCH_MAX_STREAM);
    fclose(file);
    b->router = fork();
    if (b->router == 0) {
        execl(program, program, "--config", b->config, (char *)NULL);
        _exit(127);
    }
}

static void wait_ready(const struct bench *b)
{
    static const char request[] = "GET /health HTTP/1.0\r\n\r\n";
    char answer[64];

    for (int i = 0; i < 200; i++) {
        int fd = connect_router(b);
        ssize_t n = 0;

        if (fd >= 0) {
            if (write(fd, request, sizeof(request) - 1) > 0)
                n = read(fd, answer, sizeof(answer) - 1);
            close(fd);
        }
        if (n > 12 && memcmp(answer + 9, "200", 3) == 0)
            return;
        usleep(50000);
    }
    die("the router is not ready");
}

static void clean(const struct bench *b)
{
    static const char *const names[] = {"run/router.sock", "run/router.lock", "ds4.conf"};
    char path[128];

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", b->folder, names[i]);
        (void)unlink(path);
    }
    snprintf(path, sizeof(path), "%s/run", b->folder);
    (void)rmdir(path);
    (void)rmdir(b->folder);
}

int main(int argc, char **argv)
{
    static struct bench b;
    int status = 0;

    b.token = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 315; /* a word of the tiny vocabulary */
    for (size_t i = 0; i < sizeof(b.slot) / sizeof(b.slot[0]); i++)
        b.slot[i].stream = -1;
    signal(SIGPIPE, SIG_IGN);
    start_router(&b, argc > 1 ? argv[1] : "build/release/bin/ds4-router");
    if (pthread_create(&b.worker, NULL, run_worker, &b) != 0)
        die("thread");
    wait_ready(&b);
    printf("router: worker message in -> bytes at the client; a step takes 5 ms\n");
    printf("%-34s %7s %9s %9s %9s %12s\n", "case", "tokens", "p50 us", "p99 us", "max us",
           "to step ms");
    run(&b, 1, 4, "warm-up");
    run(&b, 1, 4, "1 stream");
    run(&b, 64, 4, "64 streams");
    run(&b, 1, 100000, "1 stream, prompt of 100k tokens");
    atomic_store(&b.stop, true);
    pthread_join(b.worker, NULL);
    kill(b.router, SIGTERM);
    (void)waitpid(b.router, &status, 0);
    clean(&b);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
}
