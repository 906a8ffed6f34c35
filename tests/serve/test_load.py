"""Many clients at once: nothing is lost or mixed up, and nothing stays behind."""

import gc
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from compressor.decode import Batch, Law
from compressor.serve import Worker

CLIENTS = 16
LONG = 8000
KEPT = ("running", "waiting", "cache_bytes")


def test_sixteen_clients_each_get_what_they_would_get_alone(serve_anew):
    choose = random.Random(0)
    asked = [
        (choose.choices(range(3, 259), k=choose.randint(1, 200)), choose.randint(1, 60), seed)
        for seed in range(CLIENTS)
    ]
    with serve_anew(max_batch=6) as served, ThreadPoolExecutor(CLIENTS) as pool:

        def ask(prompt, count, seed):
            answer = served.client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=count,
                seed=seed,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = list(answer)
            return "".join(c.choices[0].text for c in chunks if c.choices), chunks[-1].usage.completion_tokens

        answers = list(pool.map(ask, *zip(*asked, strict=True)))
        for (prompt, count, seed), answer in zip(asked, answers, strict=True):
            text, output = served.alone(prompt, count, Law(), seed)
            assert answer == (text, len(output.token_ids))
        assert all(served.worker.statistics()[key] == 0 for key in KEPT)
        same = list(pool.map(ask, [asked[0][0]] * CLIENTS, [40] * CLIENTS, range(CLIENTS)))
        assert len({text for text, _ in same}) == CLIENTS


def post(served, stream, count, seed):
    """A raw connection on which a completion was asked for."""
    body = {"model": "tiny", "prompt": "abcabc", "max_tokens": count, "stream": stream, "seed": seed, "stop": ["€€€"]}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    raw = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    raw.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + data)
    return raw


def read_all(raw):
    parts = []
    while part := raw.recv(65536):
        parts.append(part)
    return b"".join(parts)


def finish(served, seed):
    with post(served, seed % 2 == 0, 6, seed) as raw:
        assert b"finish_reason" in read_all(raw)


def kill_in_stream(served, seed):
    with post(served, True, LONG, seed) as raw:
        assert raw.recv(65536)


def kill_unanswered(served, seed):
    post(served, False, LONG, seed).close()


KINDS = [finish, kill_in_stream, kill_unanswered, finish, kill_in_stream]


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def growth(serving, eventually):
    """Bytes that the process grows by from the 100th request to the 500th."""
    with serving as served, ThreadPoolExecutor(8) as pool:

        def run(seeds):
            list(pool.map(lambda seed: KINDS[seed % len(KINDS)](served, seed), seeds))
            assert eventually(lambda: all(served.worker.statistics()[key] == 0 for key in KEPT))

        run(range(100))
        before = resident()
        run(range(100, 500))
        assert served.worker.statistics()["requests"] >= 200
        return resident() - before


@pytest.mark.usefixtures("endless")
def test_five_hundred_requests_leave_nothing_behind(serve_anew, eventually, monkeypatch):
    assert growth(serve_anew(max_batch=8), eventually) < 4 * 2**20
    kept, leave = [], Batch.leave
    monkeypatch.setattr(Batch, "leave", lambda self, text: kept.append(text) or leave(self, text))
    assert growth(serve_anew(max_batch=8), eventually) > 4 * 2**20  # somebody holds the texts


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("kill", [kill_in_stream, kill_unanswered])
def test_a_client_that_goes_away_frees_its_place(serve_anew, eventually, monkeypatch, kill):
    with serve_anew(max_batch=1) as served:
        kill(served, 1)
        finish(served, 2)  # in the only place: the other one would have needed it for seconds
        assert eventually(lambda: served.worker.statistics()["cache_bytes"] == 0)
        monkeypatch.setattr(Worker, "cancel", lambda self, handle: None)
        kill(served, 1)
        assert eventually(lambda: served.worker.statistics()["running"] == 1)
        assert not eventually(lambda: served.worker.statistics()["running"] == 0, seconds=0.5)
        assert served.worker.statistics()["cache_bytes"] > 0
