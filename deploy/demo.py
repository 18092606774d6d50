#!/usr/bin/env python3
"""The demo: a rig of CPU stages on the tiny model, shown at work on the terminal.

Starts a router and STAGES workers, streams a chat with its reasoning, makes a two-call tool round
trip, prints speed and the state of the stages, and stops everything.  With --serve it leaves the rig
serving until Ctrl-C or SIGTERM.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from local_rig import Rig, RigError  # noqa: E402

TINY = "tests/data/ds4-tiny.gguf"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}


class Screen:
    """Terminal output: colours only when somebody looks at it."""

    def __init__(self):
        self.colour = sys.stdout.isatty()

    def paint(self, code, text):
        return "\033[%sm%s\033[0m" % (code, text) if self.colour else text

    def title(self, text):
        print("\n" + self.paint("1;36", "== " + text), flush=True)

    def piece(self, text, reasoning):
        sys.stdout.write(self.paint("2", text) if reasoning else text)
        sys.stdout.flush()


def chat(rig, screen, messages, tools=None):
    """Streams one chat; prints it as it comes; returns (message, usage, seconds to first token,
    seconds after it)."""
    body = {"messages": messages, "stream": True, "temperature": 0, "max_tokens": 400,
            "stream_options": {"include_usage": True}}
    if tools:
        body["tools"] = tools
    message = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls, usage, mode = [], {}, None
    begin = first = time.monotonic()
    for event, data in rig.stream("/v1/chat/completions", body):
        if event == ":" or data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise RigError(chunk["error"]["message"])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key, name in (("reasoning_content", "thinks"), ("content", "answers")):
                text = delta.get(key)
                if not text:
                    continue
                if mode is None:
                    first = time.monotonic()
                if mode != key:
                    print("%s%s " % ("" if mode is None else "\n", screen.paint("33", name + ">")),
                          end="")
                    mode = key
                message[key] += text
                screen.piece(text, key == "reasoning_content")
            for call in delta.get("tool_calls", []):
                while len(calls) <= call["index"]:
                    calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
                known = calls[call["index"]]
                known["id"] = call.get("id", known.get("id"))
                known["function"]["name"] += call["function"].get("name", "")
                known["function"]["arguments"] += call["function"].get("arguments", "")
    ended = time.monotonic()
    for call in calls:
        print("\n%s %s(%s)" % (screen.paint("35", "calls>"), call["function"]["name"],
                               call["function"]["arguments"]), end="")
    print(flush=True)
    if calls:
        message["tool_calls"] = calls
    return message, usage, first - begin, ended - first


def show_speed(usage, to_first, rest):
    n = usage.get("completion_tokens", 0)
    rate = (n - 1) / rest if rest > 0 and n > 1 else 0.0
    print("   %d prompt tokens (%d cached), %d generated, first after %.0f ms, %.0f tokens/s" %
          (usage.get("prompt_tokens", 0),
           usage.get("prompt_tokens_details", {}).get("cached_tokens", 0), n, to_first * 1e3, rate))


def show_stages(rig, screen):
    screen.title("state of the stages")
    health = json.loads(rig.request("GET", "/health")[2])
    print("   status %s, generation %s" % (health["status"], health["generation"]))
    for stage in health["stages"]:
        print("   stage %d: %s, layers %s, heartbeat %s ms ago, %s" %
              (stage["stage"], stage["state"], stage.get("layers", "?"),
               stage.get("heartbeat_age_ms", "?"), stage.get("gpu", "")))


def show(rig, screen):
    screen.title("a chat with its reasoning")
    question = "What is 47 + 38?"
    print("%s %s" % (screen.paint("32", "asks>"), question))
    show_speed(*chat(rig, screen, [{"role": "user", "content": question}])[1:])

    screen.title("a tool round trip with two calls")
    question = "What is the weather in Paris and Oslo? Use celsius."
    print("%s %s" % (screen.paint("32", "asks>"), question))
    messages = [{"role": "user", "content": question}]
    message, *speed = chat(rig, screen, messages, [WEATHER])
    show_speed(*speed)
    messages.append(message)
    for call in message.get("tool_calls", []):
        city = json.loads(call["function"]["arguments"]).get("city", "?")
        result = json.dumps({"city": city, "temperature": 7 + len(city), "unit": "celsius"})
        print("%s %s" % (screen.paint("34", "tool>"), result))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    if len(message.get("tool_calls", [])) > 0:
        show_speed(*chat(rig, screen, messages, [WEATHER])[1:])
    return len(message.get("tool_calls", []))


class Stopped(Exception):
    """Ctrl-C or SIGTERM."""


def raise_stopped(*_):
    raise Stopped


def serve(rig, screen):
    screen.title("serving on http://127.0.0.1:%d/v1  (Ctrl-C stops it)" % rig.port)
    print("   curl http://127.0.0.1:%d/v1/chat/completions -d "
          "'{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'" % rig.port, flush=True)
    while True:
        time.sleep(0.5)
        rig.check_alive()


def number(parser, name, text, low, high):
    """The value of a make variable, or an error that names it."""
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        parser.error("%s is %s, must be %d to %d" % (name, text, low, high))
    return int(text)


def refuse_taken_port(parser, port):
    """Where somebody listens already, the demo would show that server instead of its own."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError as problem:
            parser.error("PORT %d: %s" % (port, problem.strerror))


def main():
    parser = argparse.ArgumentParser(
        prog="demo", description=__doc__.splitlines()[0],
        usage="make demo [STAGES=2] [PORT=8000] [MODEL=file.gguf] [RELEASE=v4_0731] [SERVE=1]")
    parser.add_argument("--stages", default="2")
    parser.add_argument("--port", default="8000")
    parser.add_argument("--model", default=TINY)
    parser.add_argument("--release", default="", help="model.release, where the file does not say")
    parser.add_argument("--bin", default="build/release/bin")
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()
    args.stages = number(parser, "STAGES", args.stages, 1, 8)
    args.port = number(parser, "PORT", args.port, 0, 65535)
    if not os.path.isfile(args.model):
        parser.error("MODEL %s is not a file" % args.model)
    refuse_taken_port(parser, args.port)
    screen = Screen()
    tiny = os.path.abspath(args.model) == os.path.abspath(TINY)
    settings = {"model": {"release": "v4_preview"}} if tiny else {}
    if args.release:
        settings = {"model": {"release": args.release}}
    rig = Rig(args.model, args.stages, args.port, args.bin, settings)
    status = 1
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, raise_stopped)
        screen.title("starting a router and %d stage%s on %s" %
                     (args.stages, "" if args.stages == 1 else "s", args.model))
        rig.start(timeout=60 if tiny else 3600)
        n_calls = show(rig, screen)
        show_stages(rig, screen)
        if tiny and n_calls != 2:
            raise RigError("two tool calls were expected, not %d" % n_calls)
        status = 0
        if args.serve:
            serve(rig, screen)
    except Stopped:
        print()
    except RigError as problem:
        status = 1
        print("demo: %s" % problem, file=sys.stderr)
    except (OSError, http.client.HTTPException) as problem:
        status = 1
        print("demo: no answer: %r\n%s" % (problem, rig.logs()), file=sys.stderr)
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        screen.title("stopping")
        statuses = rig.stop()
        print("   " + ", ".join("%s: exit %d" % item for item in statuses.items()))
    return status or (0 if all(code == 0 for code in statuses.values()) else 1)


if __name__ == "__main__":
    sys.exit(main())
