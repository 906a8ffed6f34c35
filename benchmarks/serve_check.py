#!/usr/bin/env python3
"""`compress serve` on a real bundle under the OpenAI client: every call, 16 clients at once, 1000 requests of which
each third is killed while it streams.

    serve_check.py BUNDLE [--requests 1000] [--out benchmarks/serve_check.json]

Needs `pip install openai psutil`. Exits 1 where a request is lost, or a cache or memory stays behind: the process may
not grow after the first 500 requests. oneDNN keeps the code it makes for every new shape, and the allocator keeps what
it got; both are held short here, so that what grows would be what the server itself holds on to.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil

CLIENTS = 16
SETTLED = 500
"""Requests after which memory is first read."""
SHORT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "MALLOC_ARENA_MAX": "1"}
SHORT |= {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
LARGEST_GROWTH = 32 * 2**20
PROMPT = "Name a colour and an animal."


def calls(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """One of each kind of call."""
    messages: Any = [{"role": "user", "content": PROMPT}]
    common: dict[str, Any] = {"model": model, "max_tokens": 16, "temperature": 0}
    completion = client.completions.create(prompt="The capital of France is", **common)
    chat = client.chat.completions.create(messages=messages, **common)
    streamed = client.chat.completions.create(messages=messages, stream=True, **common)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    pieces = client.completions.create(prompt="The capital of France is", stream=True, **common)
    joined = "".join(chunk.choices[0].text for chunk in pieces if chunk.choices)
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    formed = client.chat.completions.create(messages=messages, response_format=wanted, **{**common, "max_tokens": 32})
    return {
        "completion": completion.choices[0].text,
        "chat": chat.choices[0].message.content,
        "streamed chat is the chat": text == chat.choices[0].message.content,
        "streamed completion is the completion": joined == completion.choices[0].text,
        "schema obeyed": json.loads(formed.choices[0].message.content or "")["colour"] in ("red", "blue"),
    }


def one(client: openai.OpenAI, model: str, number: int) -> bool:
    """A request of its own length and seed; every third is dropped after its first piece. Whether it was served."""
    prompt = " ".join(["word"] * (number % 23 + 1))
    options: dict[str, Any] = {"max_tokens": number % 13 + 4, "seed": number, "temperature": 1.0}
    stream = client.completions.create(model=model, prompt=prompt, stream=True, **options)
    for chunk in stream:
        if number % 3 == 0:
            stream.close()
            return True
        if chunk.choices[0].finish_reason:
            return True
    return False


def metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(address.removesuffix("/v1") + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.removeprefix("compressor:"): float(value) for name, value in samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/serve_check.json"))
    args = parser.parse_args()
    command = [str(Path(sys.executable).with_name("compress")), "serve", args.bundle, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | SHORT)
    try:
        assert server.stdout is not None
        ready = re.fullmatch(r"serving (\S+) at (\S+)\n", server.stdout.readline())
        if ready is None:
            raise SystemExit("the server did not start")
        model, address = ready.groups()
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=600)
        result = calls(client, model)
        process, start = psutil.Process(server.pid), time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as clients:
            served = list(clients.map(lambda number: one(client, model, number), range(SETTLED)))
            settled = process.memory_info().rss
            served += clients.map(lambda number: one(client, model, number), range(SETTLED, args.requests))
        seconds = time.perf_counter() - start
        deadline = time.monotonic() + 30
        while (left := metrics(address))["num_requests_running"] and time.monotonic() < deadline:
            time.sleep(0.2)
        result |= {
            "requests": len(served),
            "lost": served.count(False),
            "seconds": round(seconds, 1),
            "running_afterwards": left["num_requests_running"],
            "cache_bytes_afterwards": left["kv_cache_bytes"],
            "memory_growth_bytes": process.memory_info().rss - settled,
            "tokens_per_second": round(left["generation_tokens_total"] / seconds, 1),
        }
    finally:
        server.terminate()
        code = server.wait(30)
    result["exit_code_after_sigterm"] = code
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=1, ensure_ascii=False))
    good = all(value for key, value in result.items() if isinstance(value, bool) and "is the" in key)
    behind = result["lost"] or result["running_afterwards"] or result["cache_bytes_afterwards"] or code
    sys.exit(bool(behind or not good or result["memory_growth_bytes"] > LARGEST_GROWTH))


if __name__ == "__main__":
    main()
