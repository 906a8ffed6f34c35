"""A tiny random model behind a real server on a free port of this machine."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import tiny_models as tiny
import torch
import uvicorn

from compressor.decode import Decoder, Law, Runner, engine
from compressor.proposers.ngram import NgramProposer
from compressor.serve import Worker, make_app
from compressor.serve.run import listen_on

POSITIONS = 8192  # texts that somebody has to cancel run for seconds


@dataclass
class Served:
    """A running server, and what its model says without it."""

    port: int
    worker: Worker
    runner: Runner
    tokenizer: Any
    name: str = "tiny"
    client: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def alone(self, prompt: str | list[int], count: int, law: Law, seed: int = 0):
        """Text and output of the runner itself."""
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        output = self.runner.generate(ids, count, law, seed)
        return self.tokenizer.decode(output.token_ids, skip_special_tokens=True), output


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether `holds` comes true in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def serving(runner: Runner, tokenizer: Any = None, **options) -> Iterator[Served]:
    tokenizer = tiny.tokenizer() if tokenizer is None else tokenizer
    with closing(Worker(runner, **options)) as worker, closing(listen_on("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = uvicorn.Config(make_app(worker, tokenizer, "tiny"), log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        served = Served(port, worker, runner, tokenizer)
        try:
            assert eventually(lambda: server.started)
            yield served
        finally:
            served.client.close()
            worker.close()
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def runner(tmp_path_factory) -> Runner:
    folder = tiny.save(tmp_path_factory.mktemp("model"), max_position_embeddings=POSITIONS)
    return Runner(Decoder(engine.load(folder, dtype=torch.float32)), NgramProposer(), 3)


@pytest.fixture(scope="session")
def served(runner) -> Iterator[Served]:
    with serving(runner) as running:
        yield running


@pytest.fixture
def serve_anew(runner):
    """`serving` for tests that need a server of their own, of another runner if they give one."""
    return lambda other=runner, **options: serving(other, **options)


@pytest.fixture
def endless(runner, monkeypatch) -> None:
    """Texts go on to their length: no token ends one."""
    monkeypatch.setattr(runner.decoder, "stops", frozenset())


@pytest.fixture(name="eventually")
def _eventually():
    return eventually
