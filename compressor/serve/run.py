"""A bundle behind a port."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from compressor.bundle import Bundle
from compressor.decode.runner import Runner
from compressor.errors import CompressError, UsageError
from compressor.generation import Settings
from compressor.serve.app import make_app
from compressor.serve.compiling import Compiler
from compressor.serve.worker import Worker

GRACE = 5
"""Seconds that clients have at the end to read what was sent to them."""


def serve(
    bundle_path: str | os.PathLike,
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_batch: int = 16,
    model_name: str | None = None,
) -> None:
    """Serve the bundle at `bundle_path` until SIGINT or SIGTERM. Prints one line with the address when it is ready:
    ``serving NAME at ADDRESS``, and behind it that the acceptance rule is lossy, if it is.

    Args:
        settings: proposer, length of drafts, rule and kernel.
        port: 0 takes a free one.
        max_batch: requests generated side by side; the others wait.
        model_name: the `model` that requests name; by default the name of the bundle's folder.

    Raises CompressError for an address that cannot be listened on, before the bundle is loaded, and as
    `Bundle.open` and `Bundle.runner` do.
    """
    with closing(listen_on(host, port)) as listener:
        bundle = Bundle.open(bundle_path)
        tokenizer = bundle.tokenizer()
        runner = settings.runner(bundle)
        serve_runner(runner, tokenizer, model_name or Path(bundle_path).resolve().name, listener, max_batch)


def serve_runner(runner: Runner, tokenizer: Any, model_name: str, listener: socket.socket, max_batch: int = 16) -> None:
    """`serve` for a runner and a bound socket."""
    with closing(Worker(runner, max_batch)) as worker:
        app = make_app(worker, tokenizer, model_name)
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=GRACE)
        with _signals_spent():
            _Server(config, worker, app.state.compiler, _ready(runner, model_name, listener)).run(sockets=[listener])


def listen_on(host: str, port: int) -> socket.socket:
    """A socket bound to the address; connections are refused until the server is ready. Raises CompressError."""
    if not 0 <= port < 2**16:  # getaddrinfo would take the remainder
        raise UsageError(f"--port {port}: not a port; 0 takes a free one, the last is 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except UnicodeError:  # how Python says that a part of the name is empty or too long
        raise UsageError(
            f"--host {host}: neither an address nor a host name; name an address of this machine"
        ) from None
    except OSError as error:
        raise CompressError(f"--host {host}: {error.strerror}; name an address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise CompressError(f"--host {host} --port {port}: {error.strerror}; choose another one") from None
    return listener


class _Server(uvicorn.Server):
    """Says when it is ready, and waits neither for long texts nor for grammars when it has to end."""

    def __init__(self, config: uvicorn.Config, worker: Worker, compiler: Compiler, ready: str) -> None:
        super().__init__(config)
        self._worker, self._compiler, self._ready = worker, compiler, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._ready, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._compiler.close()
        await asyncio.to_thread(self._worker.close)
        await super().shutdown(sockets)


@contextmanager
def _signals_spent() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more, when it is done: that would kill us before we are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ready(runner: Runner, model_name: str, listener: socket.socket) -> str:
    lossy = f" with LOSSY acceptance (rule {runner.rule})" if runner.rule != "exact" else ""
    return f"serving {model_name} at {_address(listener)}/v1{lossy}"


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
