/* Every metric: name, type, buckets, labels with their closed value lists, help.
 *
 * X(id, name, type, buckets, labels, help).  labels: "api=chat|messages,kind=a|b", "" = none, at most
 * three; "stage=#" stands for 0..63.  A value outside its list is counted as `other` where the list
 * has one, else dropped and counted in ds4_metrics_unknown_labels_total. */
#ifndef DS4_COMMON_METRICS_TABLE_H
#define DS4_COMMON_METRICS_TABLE_H

#define DS4_APIS         "api=chat|completions|responses|messages"
#define DS4_STEPS        "kind=prefill|decode|verify|mixed"
#define DS4_STAGE        "stage=#"
#define DS4_DRAFTERS     "method=ngram"
#define DS4_DRAFT_PLACES "position=0|1|2|3|4|5|6|7"
#define DS4_XID_CODES    "code=13|31|43|45|48|62|63|64|74|79|94|95|109|119|120|154|other"
#define DS4_EFFORTS                                                                                \
    "requested=none|minimal|low|medium|high|xhigh|max|ultra|absent|other,applied=off|low|high|max"
#define DS4_ENDPOINTS                                                                              \
    "endpoint=chat|completions|responses|messages|count_tokens|models|tokenize|detokenize|"        \
    "apply_template|health|livez|metrics|version|root|admin|stats|unsupported|other"

/* clang-format off: a table reads by row */
#define DS4_METRICS(X)                                                                             \
    X(UNKNOWN_LABELS, "ds4_metrics_unknown_labels_total", COUNTER, NONE, "",                       \
      "Observations dropped for a label value outside its list")                                   \
    X(BUILD_INFO, "ds4_build_info", INFO, NONE, "",                                                \
      "Version of the program and of what it serves")                                              \
    X(READY, "ds4_ready", GAUGE, NONE, "", "1 while /ready answers 200")                           \
    X(STATE, "ds4_state", GAUGE, NONE,                                                             \
      "state=starting|loading|forming|ready|degraded|recovering|draining|failed",                  \
      "Current state of the cluster is 1")                                                         \
    X(HTTP_REQUESTS, "ds4_http_requests_total", COUNTER, NONE,                                     \
      DS4_ENDPOINTS ",method=GET|POST|HEAD|OPTIONS|DELETE|other,code=200|204|400|401|403|404|405|" \
                    "408|413|415|422|429|499|500|503|other",                                       \
      "Answers sent")                                                                              \
    X(HTTP_REQUEST_SECONDS, "ds4_http_request_seconds", HISTOGRAM, LATENCY, DS4_ENDPOINTS,         \
      "Time from request to last byte")                                                            \
    X(HTTP_CONNECTIONS, "ds4_http_connections", GAUGE, NONE, "state=active|idle|streaming",        \
      "Open connections")                                                                          \
    X(HTTP_BYTES, "ds4_http_bytes_total", COUNTER, NONE, "direction=in|out",                       \
      "Bytes of requests and answers")                                                             \
    X(REQUESTS_STARTED, "ds4_requests_started_total", COUNTER, NONE, DS4_APIS,                     \
      "Requests received")                                                                         \
    X(REQUESTS, "ds4_requests_total", COUNTER, NONE,                                               \
      DS4_APIS ",outcome=completed|failed|refused|cancelled|timeout", "Requests by outcome")       \
    X(REQUESTS_INFLIGHT, "ds4_requests_inflight", GAUGE, NONE,                                     \
      "phase=queued|prefill|decode|parked", "Requests by phase")                                   \
    X(REQUESTS_CANCELLED, "ds4_requests_cancelled_total", COUNTER, NONE,                           \
      "phase=queued|prefill|decode|parked,reason=disconnect|api|slow_client|shutdown",             \
      "Requests cancelled")                                                                        \
    X(FINISH, "ds4_finish_total", COUNTER, NONE,                                                   \
      DS4_APIS ",reason=eos|stop|tool_calls|length|context|repetition|error|cancelled",            \
      "Ends of generation by cause")                                                               \
    X(AUTH_FAILURES, "ds4_auth_failures_total", COUNTER, NONE, "reason=missing|invalid|limited",   \
      "Requests refused for their key")                                                            \
    X(TOKENIZE_SECONDS, "ds4_tokenize_seconds", HISTOGRAM, LATENCY, "",                            \
      "Time to tokenise a prompt")                                                                 \
    X(RENDER_SECONDS, "ds4_render_seconds", HISTOGRAM, LATENCY, "", "Time to render a prompt")     \
    X(EVENTLOOP_LAG_SECONDS, "ds4_eventloop_lag_seconds", HISTOGRAM, LATENCY, "",                  \
      "Timer lateness of the event loop")                                                          \
    X(TTFT_SECONDS, "ds4_ttft_seconds", HISTOGRAM, LATENCY, DS4_APIS ",cache=cold|partial|warm",   \
      "Time to the first token")                                                                   \
    X(FIRST_CONTENT_SECONDS, "ds4_first_content_seconds", HISTOGRAM, LATENCY, DS4_APIS,            \
      "Time to the first output that is not reasoning")                                            \
    X(INTER_TOKEN_SECONDS, "ds4_inter_token_seconds", HISTOGRAM, INTER_TOKEN, "",                  \
      "Time per token after the first")                                                            \
    X(STEP_GAP_SECONDS, "ds4_step_gap_seconds", HISTOGRAM, INTER_TOKEN, "",                        \
      "Time between two bursts of one sequence")                                                   \
    X(QUEUE_SECONDS, "ds4_queue_seconds", HISTOGRAM, LATENCY, DS4_APIS, "Time in the queue")       \
    X(PREFILL_SECONDS, "ds4_prefill_seconds", HISTOGRAM, LATENCY, DS4_APIS,                        \
      "Time from start to the first token")                                                        \
    X(DECODE_SECONDS, "ds4_decode_seconds", HISTOGRAM, LATENCY, DS4_APIS,                          \
      "Time from the first to the last token")                                                     \
    X(E2E_SECONDS, "ds4_e2e_seconds", HISTOGRAM, LATENCY, DS4_APIS,                                \
      "Time from receipt to the end")                                                              \
    X(PROMPT_TOKENS, "ds4_prompt_tokens", HISTOGRAM, TOKENS, DS4_APIS,                             \
      "Prompt tokens per request")                                                                 \
    X(COMPLETION_TOKENS, "ds4_completion_tokens", HISTOGRAM, TOKENS, DS4_APIS,                     \
      "Generated tokens per request")                                                              \
    X(REASONING_TOKENS, "ds4_reasoning_tokens", HISTOGRAM, TOKENS, DS4_APIS,                       \
      "Reasoning tokens per request")                                                              \
    X(PROMPT_TOKENS_SOURCE, "ds4_prompt_tokens_total", COUNTER, NONE,                              \
      "source=computed|hbm|host|disk", "Prompt tokens by where their state came from")             \
    X(GENERATED_TOKENS, "ds4_generated_tokens_total", COUNTER, NONE,                               \
      "kind=reasoning|content|tool|nudge", "Generated tokens")                                     \
    X(QUEUE_DEPTH, "ds4_queue_depth", GAUGE, NONE, "", "Requests waiting")                         \
    X(QUEUE_OLDEST_SECONDS, "ds4_queue_oldest_seconds", GAUGE, NONE, "",                           \
      "Age of the oldest waiting request")                                                         \
    X(ADMITS, "ds4_admits_total", COUNTER, NONE, "kind=cold|warm|fork|partial_truncate",           \
      "Requests admitted by cache use")                                                            \
    X(ADMIT_REJECTS, "ds4_admit_rejects_total", COUNTER, NONE,                                     \
      "reason=queue_full|queue_timeout|kv_capacity|context|invalid|not_ready|draining|poisoned|"   \
      "other",                                                                                     \
      "Requests refused")                                                                          \
    X(BATCH_SEQUENCES, "ds4_batch_sequences", HISTOGRAM, TOKENS, DS4_STEPS, "Sequences per step")  \
    X(BATCH_TOKENS, "ds4_batch_tokens", HISTOGRAM, TOKENS, DS4_STEPS, "Rows per step")             \
    X(STEPS, "ds4_steps_total", COUNTER, NONE, DS4_STEPS, "Steps done")                            \
    X(DECODE_STEPS, "ds4_decode_steps_total", COUNTER, NONE, "", "Steps that decoded")             \
    X(STEP_SECONDS, "ds4_step_seconds", HISTOGRAM, STEP, DS4_STEPS,                                \
      "Time from posting a step to its tokens")                                                    \
    X(PIPELINE_BUBBLE, "ds4_pipeline_bubble_ratio", GAUGE, NONE, "",                               \
      "Share of the stages' time, while steps were under way, that was not computing, over 10 s")  \
    X(SEQS_PARKED, "ds4_seqs_parked_total", COUNTER, NONE, "reason=slow_client|capacity",          \
      "Sequences that wait: nobody takes their output, or they gave way to others")                \
    X(PREEMPTIONS, "ds4_preemptions_total", COUNTER, NONE, "reason=slow_client|restart|capacity",  \
      "Running sequences that lost their place on the stages")                                     \
    X(UNKNOWN_FIELDS, "ds4_request_unknown_fields_total", COUNTER, NONE,                           \
      "field=mirostat|typical_p|tfs_z|dynatemp_range|dry_multiplier|xtc_probability|samplers|"     \
      "keep_alive|options|format|num_ctx|think|raw|template|extra_body|thinking_budget|"           \
      "max_thinking_tokens|reasoning_format|response_schema|top_a|epsilon_cutoff|prompt_template|" \
      "other",                                                                                     \
      "Members of requests that this server does not know")                                        \
    X(PARAM_IGNORED, "ds4_param_ignored_total", COUNTER, NONE,                                     \
      "field=stream_options|store|request_id|prompt_cache_key|user|metadata|service_tier|"         \
      "safety_identifier|verbosity|prediction|web_search_options|priority|documents|"              \
      "media_io_kwargs|id_slot|timings_per_token|sse_ping_interval|client_metadata|"               \
      "max_tool_calls|prompt_cache_retention|context_management|container|mcp_servers|betas|"      \
      "cache_control|other",                                                                       \
      "Members of requests that are taken and do nothing")                                         \
    X(WORKER_INFO, "ds4_worker_info", INFO, NONE, "", "What a stage runs on")                      \
    X(WORKER_START_TIME, "ds4_worker_start_time_seconds", GAUGE, NONE, DS4_STAGE,                  \
      "Start of the worker's process, Unix time")                                                  \
    X(WORKER_CPU, "ds4_worker_cpu_seconds_total", COUNTER, NONE, DS4_STAGE,                        \
      "User and system CPU time of the worker")                                                    \
    X(CUDA_ERRORS, "ds4_cuda_errors_total", COUNTER, NONE,                                         \
      DS4_STAGE ",code=214|700|710|714|716|719|other",                                             \
      "Device faults that ended a worker, by CUDA's number")                                       \
    X(STAGE_STEP_SECONDS, "ds4_stage_step_seconds", HISTOGRAM, STEP,                               \
      DS4_STAGE ",kind=prefill|decode", "Computing time of one step on one stage")                 \
    X(STAGE_BYTES, "ds4_stage_bytes_total", COUNTER, NONE, DS4_STAGE ",link=next|prev",            \
      "Bytes of activations between stages")                                                       \
    X(WORKER_UP, "ds4_worker_up", GAUGE, NONE, DS4_STAGE, "Heartbeat is fresh")                    \
    X(WORKER_STATE, "ds4_worker_state", GAUGE, NONE,                                               \
      DS4_STAGE ",state=starting|loading|idle|forming|ready|draining|failed",                      \
      "Current state of the worker is 1")                                                          \
    X(WORKER_HEARTBEAT_AGE, "ds4_worker_heartbeat_age_seconds", GAUGE, NONE, DS4_STAGE,            \
      "Age of the newest heartbeat")                                                               \
    X(WORKER_RESTARTS, "ds4_worker_restarts_total", COUNTER, NONE,                                 \
      DS4_STAGE ",exit=clean|70|71|72|75|78|79|signal",                                            \
      "Workers come back, by how the one before left")                                             \
    X(STAGE_BUSY, "ds4_stage_busy_seconds_total", COUNTER, NONE, DS4_STAGE, "Time in steps")       \
    X(STAGE_WAIT, "ds4_stage_wait_seconds_total", COUNTER, NONE,                                   \
      DS4_STAGE ",on=recv|send|token|command", "Idle time by cause")                               \
    X(STAGE_STEPS, "ds4_stage_steps_total", COUNTER, NONE, DS4_STAGE, "Steps executed")            \
    X(EXPERT_STEPS, "ds4_stage_expert_steps_total", COUNTER, NONE, DS4_STAGE,                      \
      "Steps in which distinct experts were counted")                                              \
    X(EXPERTS_TOUCHED, "ds4_stage_experts_touched_total", COUNTER, NONE, DS4_STAGE,                \
      "Distinct experts in those steps, in the last layer of the stage")                           \
    X(EXPERT_USES, "ds4_stage_expert_uses_total", COUNTER, NONE,                                   \
      DS4_STAGE ",where=device|streamed|host",                                                     \
      "Uses of routed experts by where they were served, on stages with offload")                  \
    X(EXPERTS_MOVED, "ds4_stage_experts_moved_total", COUNTER, NONE, DS4_STAGE,                    \
      "Experts that moved from host memory to the device because they are used")                   \
    X(STAGE_PROBE, "ds4_stage_probe", GAUGE, NONE, DS4_STAGE ",verdict=none|full|throttled|brake", \
      "1 for what the start-up probe found of the device's arithmetic")                            \
    X(STAGE_BANDWIDTH, "ds4_stage_bandwidth_bytes_per_second", GAUGE, NONE, DS4_STAGE,             \
      "Reads of the device's memory, as the start-up probe measured")                              \
    X(LINK_BANDWIDTH, "ds4_link_bandwidth_bytes", GAUGE, NONE, DS4_STAGE,                          \
      "Bytes per second from host to card, as the start-up probe measured")                        \
    X(LINK_LATENCY, "ds4_link_latency_seconds", GAUGE, NONE, DS4_STAGE,                            \
      "From asking for a word of the card's memory to having it, as measured at the start")        \
    X(STAGE_FLOPS, "ds4_stage_flops", GAUGE, NONE, DS4_STAGE,                                      \
      "Single-precision operations per second the probe measured")                                 \
    X(STAGE_MEMORY, "ds4_stage_memory_bytes", GAUGE, NONE, DS4_STAGE ",kind=weights|kv|rss",       \
      "Memory of the stage")                                                                       \
    X(GPU_TEMPERATURE, "ds4_gpu_temperature_celsius", GAUGE, NONE,                                 \
      DS4_STAGE ",sensor=core|memory", "Temperature of the card")                                  \
    X(GPU_TEMPERATURE_LIMIT, "ds4_gpu_temperature_limit_celsius", GAUGE, NONE,                     \
      DS4_STAGE ",sensor=core|memory", "Temperature at which the card slows itself down")          \
    X(GPU_POWER, "ds4_gpu_power_watts", GAUGE, NONE, DS4_STAGE, "Power the card draws")            \
    X(GPU_POWER_LIMIT, "ds4_gpu_power_limit_watts", GAUGE, NONE, DS4_STAGE,                        \
      "Power the card may draw")                                                                   \
    X(GPU_CLOCK, "ds4_gpu_clock_hertz", GAUGE, NONE, DS4_STAGE ",clock=sm|memory",                 \
      "Clocks of the card")                                                                        \
    X(GPU_THROTTLE, "ds4_gpu_throttle", GAUGE, NONE,                                               \
      DS4_STAGE ",reason=thermal|power_brake|power_cap", "1 while this holds the clocks down")     \
    X(GPU_LINK_GENERATION, "ds4_gpu_link_generation", GAUGE, NONE, DS4_STAGE,                      \
      "PCIe generation of the card's link now; lower when idle on some cards")                     \
    X(GPU_LINK_WIDTH, "ds4_gpu_link_width", GAUGE, NONE, DS4_STAGE, "Lanes of the card's link")    \
    X(GPU_MEMORY, "ds4_gpu_memory_bytes", GAUGE, NONE, DS4_STAGE ",kind=weights|kv|free|other",    \
      "Memory of the card; other: what else is used, by this stage or anybody")                    \
    X(GPU_XID, "ds4_gpu_xid_total", COUNTER, NONE, DS4_STAGE "," DS4_XID_CODES,                    \
      "Faults of the card that the driver reported, by number")                                    \
    X(GPU_ECC_ERRORS, "ds4_gpu_ecc_errors_total", COUNTER, NONE, DS4_STAGE,                        \
      "Uncorrected memory errors since the driver was loaded, on cards that tell")                 \
    X(PCIE_REPLAYS, "ds4_pcie_replays_total", COUNTER, NONE, DS4_STAGE,                            \
      "Repeated packets on the card's link since the driver was loaded")                           \
    X(GENERATION, "ds4_generation", GAUGE, NONE, "", "Formations of the cluster so far")           \
    X(REFORM_SECONDS, "ds4_reform_seconds", HISTOGRAM, LATENCY, "", "Time of a formation")         \
    X(REFORMS, "ds4_reforms_total", COUNTER, NONE, "result=ok|failed|timeout", "Formations")       \
    X(REQUESTS_FAILED_BY_RESTART, "ds4_requests_failed_by_restart_total", COUNTER, NONE, "",       \
      "Requests ended by a restart")                                                               \
    X(REQUESTS_REPLAYED, "ds4_requests_replayed_total", COUNTER, NONE, "",                         \
      "Requests computed again after a restart")                                                   \
    X(ZMQ_MESSAGES, "ds4_zmq_messages_total", COUNTER, NONE, "direction=in|out",                   \
      "Messages between router and workers")                                                       \
    X(ZMQ_DROPPED, "ds4_zmq_dropped_total", COUNTER, NONE,                                         \
      "reason=version|generation|malformed|unknown_peer|full", "Messages dropped")                 \
    X(KV_BLOCKS, "ds4_kv_blocks", GAUGE, NONE, "state=free|promised|live|cached|io",               \
      "Cache blocks; the sum is constant")                                                         \
    X(KV_SLOTS, "ds4_kv_slots", GAUGE, NONE, "state=free|used", "Sequence slots")                  \
    X(KV_USAGE, "ds4_kv_usage_ratio", GAUGE, NONE, "", "Promised and live blocks of all")          \
    X(KV_LOOKUPS, "ds4_kv_lookups_total", COUNTER, NONE, "result=hit_full|hit_partial|miss",       \
      "Prefix look-ups")                                                                           \
    X(KV_HIT_TOKENS, "ds4_kv_hit_tokens_total", COUNTER, NONE, "tier=hbm|host|disk",               \
      "Prompt tokens found in the cache")                                                          \
    X(KV_BYTES, "ds4_kv_bytes", GAUGE, NONE, "tier=hbm|host|disk",                                 \
      "Sequence state, all stages: rows on devices, restore points, parts and manifests on disk")  \
    X(KV_EVICTIONS, "ds4_kv_evictions_total", COUNTER, NONE,                                       \
      "tier=hbm|host|disk,reason=capacity|ttl|stale|manual",                                       \
      "Prefixes, restore points and commits evicted")                                              \
    X(KV_EVICTED_BYTES, "ds4_kv_evicted_bytes_total", COUNTER, NONE,                               \
      "tier=hbm|host|disk,reason=capacity|ttl|stale|manual", "What that made free, all stages")    \
    X(KV_RESTORES, "ds4_kv_restores_total", COUNTER, NONE,                                         \
      "tier=host|disk,result=ok|corrupt|missing|timeout|capacity|io|cancelled",                    \
      "Requests that were to go on from a restore point or a commit, by what became of that")      \
    X(KV_RESTORE_SECONDS, "ds4_kv_restore_seconds", HISTOGRAM, LATENCY, "tier=disk",               \
      "Time from admission until all parts are verified")                                          \
    X(KV_IO_BYTES, "ds4_kv_io_bytes_total", COUNTER, NONE, "tier=host|disk,op=read|write",         \
      "Bytes of restore points and of parts, all stages")                                          \
    X(KV_DIVERGED_TOKENS, "ds4_kv_diverged_tokens_total", COUNTER, NONE, "",                       \
      "Prompt tokens behind the first difference to the cache")                                    \
    X(KV_RECOMPUTED_TOKENS, "ds4_kv_recomputed_tokens_total", COUNTER, NONE,                       \
      "source=hot|tail|anchor|disk|replay|cold",                                                   \
      "Prompt tokens computed, by what the prompt went on from")                                   \
    X(KV_EXTRA_TOKENS, "ds4_kv_extra_tokens", HISTOGRAM, EXTRA, "",                                \
      "Prompt tokens computed again before the first difference")                                  \
    X(KV_POINTS, "ds4_kv_points", GAUGE, NONE, "", "Restore points in host memory")                \
    X(KV_POINT_BYTES, "ds4_kv_point_bytes", GAUGE, NONE, "",                                       \
      "Host memory for restore points, of the fullest stage")                                      \
    X(KV_DISK_MISSES, "ds4_kv_disk_misses_total", COUNTER, NONE,                                   \
      "reason=none|scanning|no_room|failed|stalled",                                               \
      "Requests that looked for their prompt on disk and do without")                              \
    X(KV_DISK_REJECTS, "ds4_kv_disk_rejects_total", COUNTER, NONE,                                 \
      "reason=magic|version|fingerprint|size|crc|tokens|missing_part|io",                          \
      "Commits on disk that were put away or given up")                                            \
    X(KV_DISK_SAVES, "ds4_kv_disk_saves_total", COUNTER, NONE, "result=ok|failed",                 \
      "Commits begun, by what became of them")                                                     \
    X(KV_DISK_SKIPS, "ds4_kv_disk_write_skips_total", COUNTER, NONE, "reason=value|busy|pressure", \
      "Commits that were not begun")                                                               \
    X(KV_DISK_ABORTS, "ds4_kv_disk_aborts_total", COUNTER, NONE,                                   \
      DS4_STAGE ",op=save|restore|remove", "Jobs of the disk tier a stage could not do")           \
    X(KV_DISK_STATE, "ds4_kv_disk_state", GAUGE, NONE,                                             \
      "state=off|opening|ready|stalled|lost|failing", "One of these is 1: how the disk tier is")   \
    X(KV_DISK_LIMIT, "ds4_kv_disk_limit_bytes", GAUGE, NONE, "",                                   \
      "What they may take, kv.disk_mb; 0 = there is no disk tier")                                 \
    X(KV_DISK_COMMITS, "ds4_kv_disk_commits", GAUGE, NONE, "", "Commits on disk")                  \
    X(ADMIT_AFTER_REJECT, "ds4_admit_after_reject_violations_total", COUNTER, NONE,                \
      "invariant=I1|I2|I3|I4|I7",                                                                  \
      "Work without a grant, or refusals that left traces; must stay 0")                           \
    X(KV_INVARIANT_FAILURES, "ds4_kv_invariant_failures_total", COUNTER, NONE,                     \
      "id=I1|I2|I3|I4|I5|I6|I7|I8|I9|I10|I11|I12|I13", "Broken invariants; must stay 0")           \
    X(TOOL_CALLS, "ds4_tool_calls_total", COUNTER, NONE,                                           \
      DS4_APIS ",result=ok|recovered|rejected|truncated", "Tool calls in output")                  \
    X(DSML_BLOCKS, "ds4_dsml_blocks_total", COUNTER, NONE, "spelling=exact|near",                  \
      "Tool-call blocks read")                                                                     \
    X(DSML_RECOVERED, "ds4_dsml_recovered_total", COUNTER, NONE,                                   \
      "kind=invoke|fused|headless|nameless", "Damaged tool calls read")                            \
    X(DSML_REJECTED, "ds4_dsml_rejected_total", COUNTER, NONE,                                     \
      "reason=undeclared|required|ambiguous|fence|prose|unclosed|inline",                          \
      "Possible tool calls left as text")                                                          \
    X(DSML_STRAY_CLOSERS, "ds4_dsml_stray_closers_total", COUNTER, NONE, "",                       \
      "Closing tags without an opener")                                                            \
    X(DSML_EMPTY_BLOCKS, "ds4_dsml_empty_blocks_total", COUNTER, NONE, "",                         \
      "Tool-call blocks without a call")                                                           \
    X(DSML_UNDECLARED, "ds4_dsml_undeclared_total", COUNTER, NONE, "",                             \
      "Calls of tools the request does not have")                                                  \
    X(DSML_DUP_PARAMS, "ds4_dsml_dup_params_total", COUNTER, NONE, "", "Parameters given twice")   \
    X(DSML_TRUNCATED, "ds4_dsml_truncated_total", COUNTER, NONE, "",                               \
      "Calls cut by the end of output")                                                            \
    X(DSML_COERCED_PARAMS, "ds4_dsml_coerced_params_total", COUNTER, NONE, "",                     \
      "Values read by the schema because they were no JSON")                                       \
    X(ENVELOPE_MISSING, "ds4_envelope_missing_total", COUNTER, NONE,                               \
      "flag=pseudo_tag|budget_burn", "Turns with tools that tried to call without an envelope")    \
    X(PARSER_RECOVERIES, "ds4_parser_recoveries_total", COUNTER, NONE,                             \
      "kind=orphan_invoke|wrapper_variant|hybrid_xml|headless|misspelled_close|bad_json",          \
      "Damaged markup read as what was meant")                                                     \
    X(PARSER_LEAKS, "ds4_parser_leaks_total", COUNTER, NONE, "kind=dsml_in_content|control_tag",   \
      "Markup that reached the client as text")                                                    \
    X(GRAMMAR_FAILURES, "ds4_grammar_failures_total", COUNTER, NONE, "action=abandoned",           \
      "Answers that were to be JSON and are not what was asked for")                               \
    X(TOOL_REPLAY, "ds4_tool_replay_total", COUNTER, NONE,                                         \
      "result=exact|canonical|edited|missing", "Tool calls in history by how they were restored")  \
    X(TOOL_MEMORY_ENTRIES, "ds4_tool_memory_entries", GAUGE, NONE, "", "Remembered tool turns")    \
    X(TOOL_MEMORY_BYTES, "ds4_tool_memory_bytes", GAUGE, NONE, "",                                 \
      "Memory of remembered tool turns")                                                           \
    X(REPLAY_MISSING_REASONING, "ds4_replay_missing_reasoning_total", COUNTER, NONE, DS4_APIS,     \
      "Assistant turns that came back without their reasoning")                                    \
    X(PROMPT_STRIPPED, "ds4_prompt_stripped_total", COUNTER, NONE,                                 \
      "what=billing_header|empty_think|leaked_markup", "Text removed from prompts")                \
    X(EFFORT_REQUESTS, "ds4_effort_requests_total", COUNTER, NONE, DS4_APIS "," DS4_EFFORTS,       \
      "Requests by reasoning effort asked for and applied")                                        \
    X(EFFORT_DOWNGRADES, "ds4_effort_downgrades_total", COUNTER, NONE,                             \
      "from=max|high|low,to=high|low|off,reason=context|other",                                    \
      "Reasoning effort lowered, visibly")                                                         \
    X(TRIPWIRES, "ds4_tripwires_total", COUNTER, NONE,                                             \
      "kind=control_soup|repeat_line|fuzzy_phrase|token_loop|nan_logits|empty_output|no_progress", \
      "Loops and faults noticed in output")                                                        \
    X(NUDGES, "ds4_nudges_total", COUNTER, NONE,                                                   \
      "mode=nudge|reopen,result=recovered|again|exhausted", "Recoveries from loops")               \
    X(NONFINITE_ROWS, "ds4_nan_logit_rows_total", COUNTER, NONE, DS4_STAGE ",where=target|draft",  \
      "Logits rows with NaN or Inf")                                                               \
    X(CANARY, "ds4_canary_total", COUNTER, NONE, "result=ok|mismatch|timeout",                     \
      "Answers to the question with a known answer")                                               \
    X(CANARY_AGE_SECONDS, "ds4_canary_age_seconds", GAUGE, NONE, "",                               \
      "Time since the newest right answer of the canary")                                          \
    X(SPEC_DRAFTS, "ds4_spec_drafts_total", COUNTER, NONE, DS4_DRAFTERS,                           \
      "Times drafts of a sequence were run")                                                       \
    X(SPEC_DRAFT_TOKENS, "ds4_spec_draft_tokens_total", COUNTER, NONE, DS4_DRAFTERS,               \
      "Drafts that were run")                                                                      \
    X(SPEC_ACCEPTED_TOKENS, "ds4_spec_accepted_tokens_total", COUNTER, NONE, DS4_DRAFTERS,         \
      "Drafts that were right")                                                                    \
    X(SPEC_ACCEPTED_PER_POS, "ds4_spec_accepted_per_pos_total", COUNTER, NONE,                     \
      DS4_DRAFTERS "," DS4_DRAFT_PLACES, "Drafts that were right, by their place")                 \
    X(SPEC_ACCEPT_LENGTH, "ds4_spec_accept_length", HISTOGRAM, ACCEPT, DS4_DRAFTERS,               \
      "Tokens that a run with drafts gave")                                                        \
    X(SPEC_DISABLED, "ds4_spec_disabled_total", COUNTER, NONE, "reason=quench|context",            \
      "Sequences that went on without drafts: they were wrong too often, or the end was near")     \
    X(SPEC_BAD_DRAFTS, "ds4_spec_bad_drafts_total", COUNTER, NONE, "reason=out_of_vocab|nan_row",  \
      "Drafts dropped: no id of the vocabulary, or a row of them that was not finite")             \
    X(VLLM_SPEC_DRAFTS, "vllm:spec_decode_num_drafts_total", COUNTER, NONE, "",                    \
      "Times drafts were run")                                                                     \
    X(VLLM_SPEC_DRAFT_TOKENS, "vllm:spec_decode_num_draft_tokens_total", COUNTER, NONE, "",        \
      "Drafts that were run")                                                                      \
    X(VLLM_SPEC_ACCEPTED_TOKENS, "vllm:spec_decode_num_accepted_tokens_total", COUNTER, NONE, "",  \
      "Drafts that were right")                                                                    \
    X(VLLM_SPEC_ACCEPTED_PER_POS, "vllm:spec_decode_num_accepted_tokens_per_pos_total", COUNTER,   \
      NONE, DS4_DRAFT_PLACES, "Drafts that were right, by their place")                            \
    X(VLLM_RUNNING, "vllm:num_requests_running", GAUGE, NONE, "", "Running requests")              \
    X(VLLM_WAITING, "vllm:num_requests_waiting", GAUGE, NONE, "", "Waiting requests")              \
    X(VLLM_KV_USAGE, "vllm:kv_cache_usage_perc", GAUGE, NONE, "", "Cache usage, 0 to 1")           \
    X(VLLM_PROMPT, "vllm:prompt_tokens_total", COUNTER, NONE, "", "Prompt tokens")                 \
    X(VLLM_GENERATION, "vllm:generation_tokens_total", COUNTER, NONE, "", "Generated tokens")      \
    X(VLLM_PREEMPTIONS, "vllm:num_preemptions_total", COUNTER, NONE, "", "Preemptions")            \
    X(VLLM_CACHE_QUERIES, "vllm:prefix_cache_queries_total", COUNTER, NONE, "",                    \
      "Prompt tokens looked up in the prefix cache")                                               \
    X(VLLM_CACHE_HITS, "vllm:prefix_cache_hits_total", COUNTER, NONE, "",                          \
      "Prompt tokens found on the device")                                                         \
    X(VLLM_EXTERNAL_QUERIES, "vllm:external_prefix_cache_queries_total", COUNTER, NONE, "",        \
      "Prompt tokens looked up in host memory and on disk")                                        \
    X(VLLM_EXTERNAL_HITS, "vllm:external_prefix_cache_hits_total", COUNTER, NONE, "",              \
      "Prompt tokens found there")                                                                 \
    X(VLLM_SUCCESS, "vllm:request_success_total", COUNTER, NONE,                                   \
      "finished_reason=stop|length|abort|error|repetition", "Ended requests by reason")            \
    X(VLLM_TTFT, "vllm:time_to_first_token_seconds", HISTOGRAM, VLLM_TTFT, "",                     \
      "Time to first token")                                                                       \
    X(VLLM_INTER_TOKEN, "vllm:inter_token_latency_seconds", HISTOGRAM, VLLM_TOKEN, "",             \
      "Time per token after the first")                                                            \
    X(VLLM_E2E, "vllm:e2e_request_latency_seconds", HISTOGRAM, VLLM_REQUEST, "",                   \
      "Time from receipt to the end")                                                              \
    X(VLLM_QUEUE_TIME, "vllm:request_queue_time_seconds", HISTOGRAM, VLLM_REQUEST, "",             \
      "Time in the queue")                                                                         \
    X(VLLM_PREFILL_TIME, "vllm:request_prefill_time_seconds", HISTOGRAM, VLLM_REQUEST, "",         \
      "Time of the prefill")                                                                       \
    X(VLLM_DECODE_TIME, "vllm:request_decode_time_seconds", HISTOGRAM, VLLM_REQUEST, "",           \
      "Time of the decode")                                                                        \
    X(VLLM_INFERENCE_TIME, "vllm:request_inference_time_seconds", HISTOGRAM, VLLM_REQUEST, "",     \
      "Time of prefill and decode")                                                                \
    X(VLLM_PROMPT_TOKENS, "vllm:request_prompt_tokens", HISTOGRAM, VLLM_LENGTH, "",                \
      "Prompt tokens per request")                                                                 \
    X(VLLM_GENERATION_LENGTH, "vllm:request_generation_tokens", HISTOGRAM, VLLM_LENGTH, "",        \
      "Generated tokens per request")                                                              \
    X(VLLM_MAX_TOKENS, "vllm:request_params_max_tokens", HISTOGRAM, VLLM_LENGTH, "",               \
      "Output limit per request")                                                                  \
    X(VLLM_PARAMS_N, "vllm:request_params_n", HISTOGRAM, VLLM_N, "", "n per request")              \
    X(VLLM_ITERATION_TOKENS, "vllm:iteration_tokens_total", HISTOGRAM, VLLM_STEP, "",              \
      "Rows per step")                                                                             \
    X(VLLM_CACHE_CONFIG, "vllm:cache_config_info", INFO, NONE, "", "Shape of the cache")           \
    X(PROCESS_CPU, "process_cpu_seconds_total", COUNTER, NONE, "", "User and system CPU time")     \
    X(PROCESS_RSS, "process_resident_memory_bytes", GAUGE, NONE, "", "Resident memory")            \
    X(PROCESS_FDS, "process_open_fds", GAUGE, NONE, "", "Open file descriptors")                   \
    X(PROCESS_START, "process_start_time_seconds", GAUGE, NONE, "",                                \
      "Start of the process, Unix time")
/* clang-format on */

#endif
