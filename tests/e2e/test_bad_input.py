#!/usr/bin/env python3
"""Bad input: a clear error that names the value, in the right words, and a healthy server after it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
import e2e  # noqa: E402

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
CHAT = "/v1/chat/completions"


class Requests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rig = e2e.rig(stages=1, settings={"model": {"context": 1024},
                                              "http": {"any_model": False}})
        cls.rig.start()

    @classmethod
    def tearDownClass(cls):
        cls.rig.stop()

    def tearDown(self):
        self.assertEqual(self.rig.post(CHAT, HELLO)[0], 200, "the server is not healthy afterwards")

    def refused(self, body, status, code, word, path=CHAT):
        got, _, data = self.rig.request("POST", path, body)
        answer = json.loads(data)
        self.assertEqual(got, status, answer)
        self.assertEqual(answer["error"]["code"], code, answer)
        self.assertIn(word, answer["error"]["message"])
        return answer["error"]

    def test_broken_json_names_the_place(self):
        for body in (b"{", b"", b"nonsense", b'{"messages": [}', b'{"a": "\xff"}', b"[" * 100000):
            self.refused(body, 400, "invalid_json", "")

    def test_wrong_types_name_the_member(self):
        for change, word in (({"messages": "x"}, "messages"), ({"messages": []}, "messages"),
                             ({"messages": [1]}, "messages[0]"),
                             ({"messages": [{"role": 5, "content": ""}]}, "role"),
                             ({"messages": [{"role": "wizard", "content": ""}]}, "wizard"),
                             ({"messages": [{"role": "user", "content": 7}]}, "content"),
                             ({"stream": "yes"}, "stream"), ({"temperature": "5"}, "temperature"),
                             ({"max_tokens": "5"}, "max_tokens"), ({"stop": 5}, "stop"),
                             ({"tools": {}}, "tools"), ({"seed": 1.5}, "seed"),
                             ({"logit_bias": {"x": 1}}, "x"), ({"n": 0}, "n"), ({"n": 99}, "n")):
            with self.subTest(change=change):
                error = self.refused(dict(HELLO, **change), 400, "invalid_value", word)
                self.assertTrue(error["param"], error)

    def test_values_out_of_range_are_refused(self):
        for change in ({"max_tokens": 0}, {"max_tokens": -1}, {"max_completion_tokens": -5},
                       {"temperature": 2.1}, {"temperature": -0.1}, {"top_p": 0}, {"top_p": 1.1},
                       {"top_k": -2}, {"min_p": 1}, {"presence_penalty": 3},
                       {"repetition_penalty": 0}, {"top_logprobs": 21, "logprobs": True},
                       {"logit_bias": {"99999999": 1}}, {"logit_bias": {"5": 101}},
                       {"stop": [str(n) for n in range(17)]}, {"top_logprobs": 2}):
            with self.subTest(change=change):
                self.refused(dict(HELLO, **change), 400, "invalid_value", next(iter(change)))

    def test_unsupported_members_are_refused_not_ignored(self):
        for change in ({"best_of": 2}, {"use_beam_search": True}, {"guided_grammar": "x"}, {"echo": True},
                       {"grammar": "root ::= x"}, {"modalities": ["text", "audio"]}, {"bad_words": ["x"]},
                       {"length_penalty": 2}, {"add_generation_prompt": False}):
            self.refused(dict(HELLO, **change), 400, "unsupported_value", next(iter(change)))
        for change in ({"guided_choice": ["a", "b"]}, {"guided_regex": "a+"}):
            self.refused(dict(HELLO, **change), 422, "schema_unsupported", next(iter(change)))
        # The error about a schema named response_format, which these clients do not send.
        far = {"$ref": "http://x/y"}
        for change in ({"guided_json": far}, {"structured_outputs": {"json": far}}):
            error = self.refused(dict(HELLO, **change), 422, "schema_unsupported", "")
            self.assertTrue(error["param"].startswith(next(iter(change))), error)
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        self.refused(dict(HELLO, messages=image), 400, "unsupported_value", "image_url")
        self.refused(dict(HELLO, reasoning_effort="huge"), 400, "invalid_value", "huge")

    def test_members_that_ask_for_nothing_are_taken(self):
        """Whole sets of parameters come from clients that print all they have."""
        usual = {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "echo": False,
                 "grammar": "", "modalities": ["text"], "audio": None, "chat_template": None, "tools": [],
                 "tool_choice": "auto", "stop": [], "logit_bias": {}, "response_format": {"type": "text"},
                 "add_generation_prompt": True, "stream_options": None, "n": 1, "logprobs": False,
                 "top_logprobs": None, "parallel_tool_calls": True, "metadata": {}, "store": False,
                 "service_tier": "auto", "reasoning": {}, "guided_json": None, "documents": []}
        self.assertEqual(self.rig.post(CHAT, dict(HELLO, **usual))[0], 200)
        for name, value in usual.items():
            with self.subTest(name=name):
                self.assertEqual(self.rig.post(CHAT, dict(HELLO, **{name: value}))[0], 200)

    def test_a_call_demanded_without_tools_is_refused(self):
        for choice in ("required", {"type": "any"}):
            self.refused(dict(HELLO, tools=[], tool_choice=choice), 400, "invalid_value", "tool_choice")

    def test_a_strict_schema_is_refused_not_forgotten(self):
        schema = {"name": "x", "schema": {"type": "object"}, "strict": True}
        body = dict(HELLO, response_format={"type": "json_schema", "json_schema": schema})
        self.refused(body, 422, "schema_unsupported", "strict")
        schema["strict"] = False
        self.assertEqual(self.rig.post(CHAT, body)[0], 200)

    def test_prompt_over_the_context_uses_the_words_clients_match(self):
        long = dict(HELLO, messages=[{"role": "user", "content": "river stone " * 2000}])
        error = self.refused(long, 400, "context_length_exceeded", "maximum context length is 1024 tokens")
        self.assertRegex(error["message"], r"^This model's maximum context length is 1024 tokens\. "
                                           r"However, your prompt has \d+ tokens\.$")
        self.assertEqual(error["n_ctx"], 1024)
        self.assertGreater(error["n_prompt_tokens"], 1024)

    def test_more_tokens_than_the_window_are_lowered_visibly(self):
        status, answer = self.rig.post(CHAT, dict(HELLO, max_tokens=100000))
        self.assertEqual(status, 200)
        self.assertEqual(answer["ds4"]["downgrades"][0]["what"], "max_tokens")

    def test_unknown_model_is_404(self):
        self.refused(dict(HELLO, model="gpt-none"), 404, "model_not_found", "gpt-none")
        self.assertEqual(self.rig.post(CHAT, dict(HELLO, model=""))[0], 200)

    def test_body_over_the_limit_is_413(self):
        got, _, data = self.rig.request("POST", CHAT, b" " * (65 << 20))
        self.assertEqual(got, 413)
        self.assertEqual(json.loads(data)["error"]["code"], "request_too_large")

    def test_unknown_path_and_wrong_method(self):
        self.refused({}, 404, "endpoint_not_supported", "exactly once", "/v1/v1/chat/completions")
        self.refused({}, 404, "endpoint_not_supported", "/v1/embeddings", "/v1/embeddings")
        status, headers, _ = self.rig.request("GET", CHAT)
        self.assertEqual(status, 405)
        self.assertIn("POST", headers["allow"])

    def test_bad_token_ids_are_refused(self):
        for tokens in ([-1], [1 << 40], ["x"], [4096], "x", [1.5]):
            got, _, data = self.rig.request("POST", "/detokenize", {"tokens": tokens})
            self.assertEqual(got, 400, data)

    def test_garbage_on_the_socket_is_answered_and_survived(self):
        for junk in (b"\x00" * 100, b"GET", b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                     b"GET / HTTP/9.9\r\n\r\n", b"A" * 70000):
            with socket.create_connection(("127.0.0.1", self.rig.port), timeout=e2e.PATIENCE) as sock:
                sock.sendall(junk)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass


class Starts(unittest.TestCase):
    """Programs that must not start, and say why."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="ds4-bad-")

    def tearDown(self):
        shutil.rmtree(self.folder)

    def run_program(self, program, settings, *args):
        path = os.path.join(self.folder, "ds4.conf")
        settings.setdefault("cluster", {}).setdefault("endpoint_dir", os.path.join(self.folder, "run"))
        settings.setdefault("model", {}).setdefault("path", e2e.TINY)
        settings["model"].setdefault("release", "v4_preview")
        with open(path, "w", encoding="utf-8") as out:
            out.write(e2e.settings_text(settings))
        done = subprocess.run([os.path.join(e2e.bin_dir(), program), "--config", path, *args],
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
        return done.returncode, (done.stdout + done.stderr).decode("utf-8", "replace")

    def refuses(self, program, settings, word, *args, status=78):
        code, output = self.run_program(program, settings, *args)
        self.assertEqual(code, status, output)
        self.assertIn(word, output)

    def test_public_address_without_keys_is_refused(self):
        self.refuses("ds4-router", {"http": {"listen": "0.0.0.0", "port": e2e.free_port()}}, "0.0.0.0")

    def test_unknown_setting_and_bad_value_name_file_and_line(self):
        self.refuses("ds4-router", {"http": {"prot": 1}}, "ds4.conf:")
        self.refuses("ds4-router", {"http": {"port": 99999}}, "99999")
        self.refuses("ds4-worker", {"sched": {"max_seqs": -1}}, "-1", "--stage", "0")

    def test_partition_that_does_not_sum_is_refused(self):
        wrong = {"cluster": {"partition": [3, 3]}}
        self.refuses("ds4-worker", wrong, "8", "--stage", "0")
        self.refuses("ds4-worker", {"cluster": {"stages": 2}}, "5", "--stage", "5")

    def test_model_that_is_no_gguf_is_refused(self):
        with open(e2e.TINY, "rb") as tiny:
            whole = tiny.read(1 << 20)
        for name, data in (("empty", b""), ("text", b"hello " * 100), ("cut", whole)):
            path = os.path.join(self.folder, name + ".gguf")
            with open(path, "wb") as out:
                out.write(data)
            for program, args in (("ds4-router", ()), ("ds4-worker", ("--stage", "0"))):
                settings = {"model": {"path": path}, "http": {"port": e2e.free_port()}}
                if (name, program) == ("cut", "ds4-router"):
                    continue  # the router reads metadata only; the workers refuse the tensors
                self.refuses(program, settings, name + ".gguf", *args)
        self.refuses("ds4-worker", {"model": {"path": "/none/such.gguf"}}, "such.gguf", "--stage", "0")

    def test_a_model_that_is_not_set_is_named(self):
        for program, args in (("ds4-router", ()), ("ds4-worker", ("--stage", "0"))):
            self.refuses(program, {"model": {"path": ""}}, "model.path is not set", *args)

    def test_port_in_use_is_a_temporary_failure(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            self.refuses("ds4-router", {"http": {"port": port}}, str(port), status=75)


if __name__ == "__main__":
    e2e.main()
