/* Every setting: name, default, range, unit, meaning.  The reference that --print-config prints.
 *
 * ROW takes section and option twice over: as text and as the member's path, so a row without a member
 * does not compile, and the member's type chooses how the text is read. */
#include "common/config_table.h"

#define KIB 1024.0
#define MIB (1024.0 * KIB)
#define GIB (1024.0 * MIB)

#define DS4_MEMBER_TYPE(member)                                                                    \
    _Generic(((struct ds4_config *)0)->member, bool                                                \
             : DS4_SETTING_BOOL, int32_t                                                           \
             : DS4_SETTING_INT32, int64_t                                                          \
             : DS4_SETTING_INT64, double                                                           \
             : DS4_SETTING_DOUBLE, unsigned int                                                    \
             : DS4_SETTING_CHOICE, char *                                                          \
             : DS4_SETTING_TEXT, struct ds4_config_ints                                            \
             : DS4_SETTING_INTS, struct ds4_config_texts                                           \
             : DS4_SETTING_TEXTS)
#define ROW_AT(section, option, member, fallback, min, max, choices, unit, doc, live)              \
    {                                                                                              \
#section, option, DS4_MEMBER_TYPE(section.member),                                         \
            offsetof(struct ds4_config, section.member), fallback, min, max, choices, unit, doc,   \
            live                                                                                   \
    }
#define NUM(section, option, fallback, min, max, unit, doc)                                        \
    ROW_AT(section, #option, option, fallback, min, max, NULL, unit, doc, false)
#define ONE(section, option, fallback, choices, doc)                                               \
    ROW_AT(section, #option, option, fallback, 0, 0, choices, "", doc, false)
#define TXT(section, option, fallback, doc)                                                        \
    ROW_AT(section, #option, option, fallback, 0, 0, NULL, "", doc, false)
/* The same for what a reload applies: read anew at every use, or handed on by router/app.c. */
#define NUM_LIVE(section, option, fallback, min, max, unit, doc)                                   \
    ROW_AT(section, #option, option, fallback, min, max, NULL, unit, doc, true)
#define ONE_LIVE(section, option, fallback, choices, doc)                                          \
    ROW_AT(section, #option, option, fallback, 0, 0, choices, "", doc, true)
#define TXT_LIVE(section, option, fallback, doc)                                                   \
    ROW_AT(section, #option, option, fallback, 0, 0, NULL, "", doc, true)

/* clang-format off: a table reads by column */
const struct ds4_setting ds4_settings[] = {
    TXT(http, listen, "127.0.0.1", "address of the API; a public one needs keys or http.open"),
    NUM(http, port, "8000", 0, 65535, "", "port of the API; 0 = any free port (tests)"),
    TXT(http, open, "false", "serve a public address without keys"),
    TXT_LIVE(http, keys_file, "", "file of API keys: one per line, optionally followed by a name"),
    NUM(http, max_body, "67108864", KIB, GIB, "bytes", "largest request body; larger answers 413"),
    NUM(http, request_s, "60", 1, 3600, "s",
        "head and body of a request may take so long; an idle connection is closed after as long"),
    TXT_LIVE(http, any_model, "true", "serve requests that name another model, echoing the name"),
    NUM_LIVE(http, ping_ms, "5000", 100, 600000, "ms",
             "keep-alive in a stream after so long without data"),
    NUM_LIVE(http, queue_header_ms, "2000", 0, 600000, "ms",
             "a queued stream gets its headers after so long"),
    NUM(http, out_buf, "1048576", 4 * KIB, GIB, "bytes",
        "output kept for a slow reader before its sequence pauses"),
    NUM_LIVE(http, slow_client_s, "60", 1, 86400, "s",
             "a paused sequence is cancelled after so long"),
    NUM_LIVE(http, max_n, "8", 1, 64, "", "largest n of a request"),
    NUM(http, store_max, "256", 0, 65536, "",
        "answers of /v1/responses kept for previous_response_id, an hour at most"),
    ONE_LIVE(
        http, drop_media, "refuse", "refuse|placeholder",
        "images and other parts without text: an error, or a mark like [image omitted] in their "
        "place"),
    TXT_LIVE(http, ds4_field, "true", "add the ds4 object to response bodies"),
    TXT_LIVE(http, cors_origins, "", "origins allowed by CORS; \"*\" = any; empty = CORS off"),

    TXT(model, path, "", "GGUF file (first part), or synth:SHAPE:QUANT:SEED"),
    TXT(model, name, "deepseek-v4-flash", "name in /v1/models and in answers"),
    TXT_LIVE(model, aliases, "", "further names that mean this model"),
    ONE(model, release, "", "|v4_preview|v4_0731|v41",
        "prompt format; empty = as settled by the file"),
    NUM(model, context, "0", 0, 1048576, "tokens",
        "context length; 0 = the file's, or what the memory plan fits"),

    NUM(cluster, partition, "", 1, 1024, "",
        "layers per stage, first stage first; empty = cut for gpu.cards, else even"),
    NUM(cluster, stages, "0", 0, DS4_CONFIG_MAX_ITEMS, "",
        "number of stages; 0 = length of partition or of gpu.cards, or 1"),
    TXT(cluster, endpoint_dir, "/run/ds4",
        "folder (mode 0700) of the ipc sockets between router and workers"),
    TXT(cluster, steps_endpoint, "",
        "where router and workers meet; empty = ipc in endpoint_dir; tcp:// needs curve_dir"),
    TXT(cluster, curve_dir, "", "folder of the ZeroMQ CURVE keys"),
    ONE(cluster, pipe, "auto", "auto|shm|nccl",
        "how activations travel between stages; auto = nccl where each stage has its GPU, else "
        "shm"),
    NUM(cluster, heartbeat_ms, "500", 50, 10000, "ms", "a worker reports so often"),
    NUM(cluster, lost_ms, "3000", 200, 60000, "ms", "a worker silent for so long is lost"),
    NUM(cluster, form_ms, "30000", 100, 3600000, "ms", "a formation may take so long"),
    NUM(cluster, away_ms, "120000", 100, 86400000, "ms",
        "a stage away for so long makes the cluster failed"),
    NUM(cluster, fresh_ms, "15000", 100, 3600000, "ms",
        "ready only while the newest step is younger"),
    NUM(cluster, hold_s, "20", 1, 3600, "s", "new requests wait so long for a recovering cluster"),
    NUM_LIVE(cluster, drain_s, "120", 0, 3600, "s",
             "running requests get so long to finish at a stop"),
    NUM(cluster, leave_s, "30", 0, 3600, "s",
        "running requests get so long to finish before a stage is restarted as asked"),

    ONE(recovery, mode, "fail", "fail|replay",
        "running requests when a stage is lost: end with an error, or are computed again"),
    NUM(recovery, hold_s, "300", 1, 3600, "s", "with replay, requests wait so long for the stages"),
    TXT(recovery, generation_file, "",
        "keeps the number of the newest generation over restarts; empty = the clock's seconds"),
    NUM(canary, idle_s, "60", 1, 86400, "s",
        "a prompt with a known answer runs so often while nothing else does"),
    NUM(canary, busy_s, "600", 1, 86400, "s", "and so often whatever runs"),
    TXT(canary, fatal, "false", "a wrong answer, twice, ends the generation of workers"),
    NUM(canary, expect, "", 0, INT32_MAX, "",
        "the 8 token ids of the right answer; empty = the first one after the start"),

    ONE(health, mode, "ready", "ready|live",
        "what /health means: can it answer, or does it run; /ready always means the first"),

    NUM(sched, max_seqs, "8", 1, 1024, "", "sequences running at once"),
    NUM_LIVE(sched, default_max_new, "16384", 1, 1048576, "tokens",
             "output limit of a request that sets none"),
    NUM_LIVE(sched, queue_max, "64", 1, 65536, "",
             "requests waiting at once; further ones answer 429"),
    NUM_LIVE(sched, queue_s, "120", 1, 86400, "s", "longest wait in the queue"),
    NUM(sched, chunk_tok, "512", 1, 65536, "tokens", "prompt tokens per step"),
    NUM(sched, itl_ms, "0", 0, 60000, "ms",
        "prompts are cut so that a step with answers takes no longer; 0 = no aim"),
    NUM(sched, inflight, "0", 0, 64, "", "steps under way at once; 0 = number of stages"),
    NUM(sched, probe_ms, "10000", 100, 3600000, "ms",
        "a probe step runs after so long without work"),

    ONE(spec, method, "none", "none|ngram",
        "who proposes tokens to follow: nobody, or what followed the same tokens before"),
    NUM(spec, k, "4", 1, 8, "tokens", "proposed at once at most; no more than kv.hot_window"),
    NUM(spec, min_match, "3", 1, 16, "tokens", "that must have stood together before"),

    NUM_LIVE(sampling, temperature, "1.0", 0, 100, "", "default temperature"),
    NUM_LIVE(sampling, top_p, "1.0", 0, 1, "", "default top_p; 0.95 is recommended for v4_0731"),

    ONE(kv, quant_sim, "auto", "auto|on|off",
        "round the cache as the checkpoint was trained; auto = on for real checkpoints"),
    NUM(kv, blocks, "0", 0, INT32_MAX, "", "cache blocks on the device; 0 = as many as fit"),
    NUM(kv, hot_window, "120", 1, 128, "tokens", "a sequence can be cut back so far in place"),
    NUM(kv, overcommit, "0", 0, 400, "%",
        "cache promised to answers beyond what there is; when it runs out, the newest one waits"),
    NUM(kv, host_mb, "8192", 0, 16777216, "MiB",
        "host memory of all stages together for states to go back to; at most half of a host's"),
    NUM(kv, disk_mb, "0", 0, 1073741824, "MiB",
        "states and rows kept on disk, all stages together; 0 = none"),
    TXT(kv, disk_dir, "/var/lib/ds4/kv",
        "folder for them, on each worker's host and, for the lists of what is there, the router's"),
    NUM(kv, disk_write_mbps, "200", 0, 1000000, "MB/s",
        "each stage writes no faster to disk; 0 = no limit"),
    NUM(kv, disk_timeout_s, "30", 1, 3600, "s",
        "a disk that is silent for so long is left alone until it answers; requests go on without"),

    ROW_AT(think, "default", default_effort, "high", 0, 0, "off|low|high|max", "",
           "reasoning effort of a request that names none", true),
    NUM_LIVE(think, max_min_context, "393216", 0, 1048576, "tokens",
             "with a smaller context max is lowered, visibly; 0 = never"),

    ONE_LIVE(anthropic, absent_thinking, "default", "default|off",
             "what /v1/messages makes of a request without thinking: the default of this server, "
             "or none"),
    ONE_LIVE(prompt, content_specials, "plain", "plain|reference",
             "special tokens inside message text: plain = text only"),
    TXT_LIVE(prompt, escape_param_close, "false",
             "escape closing tags inside arguments (differs from the reference)"),
    TXT(prompt, reasoning_memory, "true",
        "turns that called tools come back as they were sampled, whatever a client left out"),

    ONE_LIVE(parse, reasoning_field, "both", "both|reasoning_content|reasoning",
             "names under which reasoning is sent"),
    TXT_LIVE(parse, dsml_recovery, "true", "read tool calls whose wrapper is damaged"),
    TXT_LIVE(parse, dsml_heal_xml, "true", "read tool calls written as plain XML"),
    NUM_LIVE(parse, dsml_hold_max, "8388608", KIB, GIB, "bytes",
             "longest text held back as a possible tool call"),

    TXT(loop, soup, "true", "watch for repeated control tags"),
    NUM(loop, soup_streak, "12", 1, 10000, "blocks",
        "one tag in so many blocks in a row is a loop"),
    NUM(loop, soup_total, "18", 1, 10000, "blocks",
        "one tag in so many blocks of a turn is a loop"),
    TXT(loop, repetition, "true", "watch for repeated lines"),
    NUM(loop, rep_streak, "6", 1, 10000, "blocks",
        "so many blocks with repeated lines in a row are a loop"),
    NUM(loop, rep_window, "160", 16, 65536, "tokens", "text looked at for repeated lines"),
    TXT(loop, rep_fuzzy, "true", "watch for lines that repeat with small changes"),
    NUM(loop, fuzzy_min_lines, "8", 1, 10000, "lines", "fewer lines in the window are not judged"),
    NUM(loop, fuzzy_min_hits, "15", 1, 10000, "lines", "lines that begin alike"),
    NUM(loop, fuzzy_prefix_words, "2", 1, 16, "words", "length of that beginning"),
    NUM(loop, fuzzy_overlap, "0.35", 0, 1, "", "share of these lines that have a word in common"),
    NUM(loop, block_tok, "5", 1, 1024, "tokens", "the watch looks after so many new tokens"),
    ONE(loop, recovery, "nudge", "off|nudge|reopen",
        "what a loop leads to: the end, a nudge text, or a new turn"),
    NUM(loop, recovery_max, "2", 0, 100, "", "recoveries per turn"),
    TXT(loop, nudge_text, "", "text of a nudge; empty = built in"),
    TXT(loop, reopen_text, "", "text of a reopened turn; empty = built in"),

    ONE(worker, backend, "cpu", "cpu|cuda", "what computes"),
    NUM(worker, threads, "0", 0, 1024, "", "threads of the CPU backend; 0 = one per core"),
    ONE(worker, isa, "auto", "auto|scalar|avx2|avx512",
        "instruction set of the CPU backend; the results are the same"),
    ONE(worker, load, "mmap", "mmap|pread", "how weights are read"),

    TXT(gpu, device, "",
        "card of each stage: number, PCI address or UUID; empty = stage number, counted round"),
    NUM(gpu, memory_limit_mb, "", 0, INT32_MAX, "MiB",
        "a stage takes no more; one value for all or one per stage; 0 = the whole device"),
    TXT(gpu, self_test, "true", "write and read a card's planned memory before it is used"),
    TXT(gpu, offload, "false",
        "experts that do not fit on a card stay in host memory; the host computes with them"),
    TXT(gpu, cards, "",
        "GiB of each stage's card, for --plan and an unset cluster.partition, like \"64\" or "
        "\"80@3350\" with GB/s"),
    TXT(gpu, sync_layers, "false",
        "wait after each layer, slower: the report of a device fault then names the layer"),

    TXT(nccl, p2p, "false",
        "let GPUs copy to each other directly; only where a byte-exact copy test has passed"),
    TXT(nccl, shm, "true", "use the host's shared memory between GPUs of one host; off = sockets"),
    TXT(nccl, interface, "lo",
        "network interface of its sockets, a real one for several hosts; empty = its choice"),
    NUM(nccl, channels, "2", 0, 32, "",
        "thread blocks a transfer may occupy; 2 fill a narrow link; 0 = NCCL's choice"),
    TXT(nccl, debug, "WARN", "NCCL_DEBUG: what NCCL itself writes"),

    ONE(numerics, stream, "auto", "auto|f32|bf16",
        "type of the residual streams; auto = f32 on cpu, bf16 on cuda"),
    ONE(numerics, products, "auto", "auto|exact|fast",
        "f32 activations, or int8 and bf16 within a stated tolerance; auto = exact on cpu, fast on "
        "cuda"),

    NUM(watchdog, step_s, "30", 1, 3600, "s",
        "a decode step without progress for so long ends the worker"),
    NUM(watchdog, prefill_s, "120", 1, 3600, "s", "the same for a prefill step"),

    TXT(metrics, listen, "",
        "address and port of a listener for /metrics alone, like 127.0.0.1:9401 or [::1]:9401; on "
        "this machine it asks for no key; empty = only the API's"),
    TXT(metrics, open, "false", "serve /metrics on a public address without a key"),
    TXT(metrics, vllm_aliases, "true", "show what vLLM's boards look for under its names as well"),

    ONE_LIVE(log, level, "info", "error|warn|info|debug", "least important lines to write"),
    NUM_LIVE(log, slow_first_s, "30", 0, 86400, "s",
             "a request whose first token takes longer is logged as slow; 0 = none"),
    NUM_LIVE(log, slow_total_s, "600", 0, 86400, "s",
             "a request that takes longer is logged as slow; 0 = none"),
};
/* clang-format on */

const size_t ds4_n_settings = sizeof(ds4_settings) / sizeof(ds4_settings[0]);
