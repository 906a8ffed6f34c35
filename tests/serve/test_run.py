"""The whole server as a process: it says where it is, ends when it is told to, and refuses an address in one line."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models as tiny

from compressor.bundle import Bundle
from compressor.errors import CompressError, UsageError
from compressor.generation import Settings
from compressor.serve import run, serve
from compressor.serve.run import listen_on

SCRIPT = """
import sys, torch
import tiny_models as tiny
from compressor.decode import Decoder, Runner, engine
from compressor.serve.run import listen_on, serve_runner
runner = Runner(Decoder(engine.load(sys.argv[1], dtype=torch.float32)))
runner.decoder.stops = frozenset()  # texts go on to their length
serve_runner(runner, tiny.tokenizer(), "tiny", listen_on("127.0.0.1", 0))
print("ended", runner.decoder.vocab_size)
"""


TELLING = """
from compressor.decode import grammar
compile_it = grammar.json_schema
grammar.json_schema = lambda *arguments: print("compiling", flush=True) or compile_it(*arguments)
"""
LASTING = """
import threading
from types import SimpleNamespace
from compressor.serve import compiling
thread = threading.Thread
compiling.threading = SimpleNamespace(Thread=lambda **options: thread(**options | {"daemon": False}))
"""
FOR_HOURS = {"allOf": [{"type": "string", "pattern": f".{{0,{i}}}xi.*"} for i in range(60)]}


@contextmanager
def server(folder, script=SCRIPT):
    """The process of `script`, and its address."""
    tiny.save(folder, max_position_embeddings=100_000)
    paths = os.pathsep.join([str(Path(tiny.__file__).parent), str(Path(__file__).parents[2])])
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        yield process, re.fullmatch(r"serving tiny at (http://127\.0\.0\.1:\d+/v1)\n", line)[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_when_it_is_ready_and_a_signal_ends_it_even_in_a_stream(tmp_path, number):
    with server(tmp_path) as (process, url):
        body = b'{"model": "tiny", "prompt": "abc", "max_tokens": 90000, "stream": true}'
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as stream:
            assert stream.readline().startswith(b"data: {")
            start = time.monotonic()
            process.send_signal(number)
            end = stream.read().decode()
        assert '"message": "the server is ending' in end and end.endswith("data: [DONE]\n\n")
        assert process.wait(timeout=20) == 0 and time.monotonic() - start < 4
        assert (process.stdout.read(), process.stderr.read().replace("\r", "")) == ("ended 320\n", "")


def ask_for_hours(url):
    """Status and answer to a request with a grammar that is not compiled in any reasonable time."""
    form = {"type": "json_schema", "json_schema": {"schema": FOR_HOURS}}
    body = json.dumps({"model": "tiny", "prompt": "abc", "response_format": form}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value as answer:
        return answer.code, answer.read().decode()


@pytest.mark.parametrize("daemon", [True, False])
def test_a_signal_ends_it_while_a_grammar_is_compiled_for_hours(tmp_path, daemon):
    """Unless the thread is one that Python waits for."""
    script = TELLING + ("" if daemon else LASTING) + SCRIPT
    with ThreadPoolExecutor(1) as pool, server(tmp_path, script) as (process, url):
        asked = pool.submit(ask_for_hours, url)
        assert process.stdout.readline() == "compiling\n"
        process.send_signal(signal.SIGTERM)
        status, answer = asked.result(timeout=4)
        assert status == 503 and "the server is ending" in answer
        assert process.stdout.readline() == "ended 320\n"
        if daemon:
            assert process.wait(timeout=8) == 0
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=8)


def test_a_port_in_use_is_named_before_anything_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CompressError, match=f"--host 127.0.0.1 --port {port}: Address already in use; ") as caught:
            serve(tmp_path / "nowhere", Settings(), port=port)
    assert caught.value.exit_code == 1
    with pytest.raises(CompressError, match="nowhere"):  # the port is free again: now the bundle is looked at
        serve(tmp_path / "nowhere", Settings(), port=port)


def test_a_bundle_is_served_under_the_name_of_its_folder(tmp_path, monkeypatch):
    class Fake:
        def tokenizer(self):
            return "tokenizer"

        def runner(self, proposer, k, **options):
            return proposer, k, options["kernel"]

    served = []
    monkeypatch.setattr(Bundle, "open", lambda path: Fake())
    monkeypatch.setattr(run, "serve_runner", lambda *arguments: served.append(arguments))
    serve(tmp_path / "small-model", Settings("none", 5, kernel="dequantized"), port=0, max_batch=4)
    serve(tmp_path, Settings(), port=0, model_name="other")
    (runner, tokenizer, name, _, max_batch), (_, _, other, _, _) = served
    assert runner == ("none", 5, "dequantized")
    assert (tokenizer, name, max_batch, other) == ("tokenizer", "small-model", 4, "other")


def test_a_host_that_is_not_of_this_machine_is_named():
    with pytest.raises(CompressError, match=r"--host 192\.0\.2\.1 --port 0: "):
        listen_on("192.0.2.1", 0)
    with pytest.raises(CompressError, match=r"--host no\.such\.host\.invalid: "):
        listen_on("no.such.host.invalid", 0)
    with pytest.raises(UsageError, match="--port 70000: not a port"):
        listen_on("127.0.0.1", 70_000)


@pytest.mark.parametrize("host", ["x..y", ".", "x" * 64])
def test_a_host_that_cannot_be_one_is_named_in_one_line(host):
    with pytest.raises(UsageError, match=f"^--host {re.escape(host)}: neither an address nor a host name; [^\\n]*$"):
        listen_on(host, 0)


@pytest.mark.parametrize(
    ("rule", "end"), [("exact", ""), ("typical", r" with LOSSY acceptance \(rule typical\)")], ids=["exact", "typical"]
)
def test_the_line_that_says_it_is_ready_says_when_the_rule_is_lossy(rule, end):
    with closing(listen_on("127.0.0.1", 0)) as listener:
        line = run._ready(SimpleNamespace(rule=rule), "tiny", listener)
    assert re.fullmatch(rf"serving tiny at http://127\.0\.0\.1:\d+/v1{end}", line)


def test_an_address_of_protocol_six_is_listened_on():
    with closing(listen_on("::1", 0)) as listener:
        assert listener.family == socket.AF_INET6
