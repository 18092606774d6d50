#!/usr/bin/env python3
"""Speed of whole rigs on the tiny model: prefill and decode tokens per second at 1 and 2 CPU stages, and how
long /health takes meanwhile.

Prints median and spread over several runs; rates come from the client's clock, so HTTP, router, wire
and stages are all in them.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "deploy"))
from local_rig import Rig  # noqa: E402

PROMPT_WORDS = 1500
DECODE_TOKENS = 200
RUNS = 5
HEALTHS, HEALTH_EVERY_S = 2000, 0.002
ROUTER_NICE = 10


def machine():
    with open("/proc/cpuinfo", encoding="ascii") as info:
        for line in info:
            if line.startswith("model name"):
                return "%s, %d cores" % (line.split(":", 1)[1].strip(), os.cpu_count())
    return "unknown machine"


def commit():
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True,
                          check=False)
    return done.stdout.decode().strip() or "unknown"


def one(rig, words, tokens, salt):
    """(prompt tokens, seconds to the first token, generated tokens, seconds after the first)."""
    # A text that differs from its first words on, so that no prefix is found.
    text = "%d " % salt + "stone river " * (words // 2)
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "temperature": 0,
            "max_tokens": tokens, "min_tokens": tokens, "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"thinking": False}}
    begin, first, usage = time.monotonic(), None, None
    for event, data in rig.stream("/v1/chat/completions", body):
        if event == ":" or data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise SystemExit("bench_serve: %s" % chunk["error"]["message"])
        usage = chunk.get("usage") or usage
        if first is None and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
            first = time.monotonic()
    end = time.monotonic()
    return usage["prompt_tokens"], first - begin, usage["completion_tokens"], end - first


def spread(values):
    return "%8.1f  (%.1f .. %.1f)" % (statistics.median(values), min(values), max(values))


def inside(rig):
    """(seconds, answers) of /health by the router's own clock."""
    text = rig.request("GET", "/metrics")[2].decode()
    found = [re.search(r'ds4_http_request_seconds_%s{[^}]*endpoint="health"} (\S+)' % part, text)
             for part in ("sum", "count")]
    return [float(match.group(1)) for match in found]


def health(rig, what, streams, long_prompt=0):
    """Asks for /health over one connection while `streams` answers run, or while a prompt of so many bytes is
    read in: p50, p99 and the worst by the client's clock, the mean by the router's."""
    over = threading.Event()

    def run(number):
        while not over.is_set():
            if long_prompt:
                text = "".join(chr(97 + (number + i * i) % 26) for i in range(1024)) * (long_prompt // 1024)
                rig.request("POST", "/v1/completions", {"prompt": text, "max_tokens": 1})
            else:
                one(rig, 4, DECODE_TOKENS, 3000 + number)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(streams)]
    for thread in threads:
        thread.start()
    sock = socket.create_connection(("127.0.0.1", rig.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    before, took = inside(rig), []
    for _ in range(HEALTHS):
        begin = time.perf_counter()
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        sock.recv(65536)
        took.append(1e6 * (time.perf_counter() - begin))
        time.sleep(HEALTH_EVERY_S)
    after = inside(rig)
    over.set()
    for thread in threads:
        thread.join()
    sock.close()
    took.sort()
    print("/health %-26s p50 %6.0f us, p99 %6.0f us, worst %6.0f us; in the router %4.0f us" %
          (what, took[len(took) // 2], took[len(took) * 99 // 100], took[-1],
           1e6 * (after[0] - before[0]) / (after[1] - before[1])))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="release")
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args()
    print("serve: ds4-tiny, exact products, %s, commit %s" % (machine(), commit()))
    print("%-10s %-36s %-36s" % ("stages", "prefill tok/s, median (min .. max)",
                                 "decode tok/s, median (min .. max)"))
    for stages in (1, 2):
        rig = Rig(os.path.join(ROOT, "tests/data/ds4-tiny.gguf"), stages,
                  bin_dir=os.path.join(ROOT, "build", args.config, "bin"),
                  settings={"model": {"release": "v4_preview"}})
        try:
            rig.start()
            one(rig, 100, 20, 0)
            prefill, decode = [], []
            for run in range(args.runs):
                n, to_first, _, _ = one(rig, PROMPT_WORDS, 1, 1000 + run)
                prefill.append(n / to_first)
                _, _, n, rest = one(rig, 4, DECODE_TOKENS, 2000 + run)
                decode.append((n - 1) / rest)
            print("%-10d %-36s %-36s" % (stages, spread(prefill), spread(decode)))
            if stages == 2:
                health(rig, "idle", 0)
                health(rig, "beside 8 streams", 8)
                health(rig, "beside prompts of 256 KiB", 1, 256 << 10)
                if os.geteuid() == 0:
                    os.setpriority(os.PRIO_PROCESS, rig.router.pid,
                                   os.getpriority(os.PRIO_PROCESS, rig.router.pid) - ROUTER_NICE)
                    health(rig, "beside 8, router %d nicer" % -ROUTER_NICE, 8)
        finally:
            rig.stop()
    print("limit: arithmetic of %d cores (20 M parameters, about 14 M used by a token); a single stream "
          "decodes on one stage at a time" % os.cpu_count())


if __name__ == "__main__":
    main()
