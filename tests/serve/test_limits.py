"""What a client may ask of the server: bodies up to a size, grammars up to a size and a time, and JSON by its name."""

import asyncio
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import openai
import pytest
from llguidance import LLParserLimits

from compressor.decode import grammar
from compressor.serve import compiling, requests
from compressor.serve.body_limit import SMALLEST_LIMIT, body_limit

COMPLETIONS = "/v1/completions"
PLAIN = {"model": "tiny", "prompt": "x", "max_tokens": 3}
OBJECT = {"response_format": {"type": "json_object"}}
EXPRESSION = {"guided_regex": "[ab]{5}"}
MANY_STATES = {"guided_regex": "[ab]*a[ab]{14}c"}


def post(served, body, content_type="application/json", chunks=False):
    """Status and answer to `body`, a request or its text, sent with its length or in chunks."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if content_type is None else {"Content-Type": content_type}
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)) as connection:
        pieces = (data[i : i + 2**14] for i in range(0, len(data), 2**14))
        connection.request("POST", COMPLETIONS, pieces if chunks else data, headers, encode_chunked=chunks)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def refusal(served, body, **options):
    status, answer = post(served, body, **options)
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    return status, error["param"], error["message"]


def answered(served, body):
    return post(served, body)[0] == 200


# Grammars.


@pytest.fixture
def stuck(monkeypatch):
    """Schemas, unlike expressions, are not compiled before this is set."""
    free, compile_it = threading.Event(), grammar.json_schema
    monkeypatch.setattr(grammar, "json_schema", lambda *args: free.wait() and compile_it(*args))
    yield free
    free.set()


def test_a_grammar_that_is_being_compiled_holds_nobody_up(served, stuck, eventually):
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, served, PLAIN | OBJECT)
        try:
            assert eventually(lambda: any(thread.name == "compress-grammar" for thread in threading.enumerate()))
            assert answered(served, PLAIN) and answered(served, PLAIN | EXPRESSION)
            assert not slow.done()
        finally:
            stuck.set()
        assert slow.result()[0] == 200


def test_a_grammar_that_takes_too_long_is_refused_by_name(served, stuck, monkeypatch):
    monkeypatch.setattr(compiling, "DEADLINE", 0.2)
    says = "response_format: the grammar takes more than 0.2 s to compile; simplify it"
    assert refusal(served, PLAIN | OBJECT) == (400, "response_format", says)
    assert answered(served, PLAIN | EXPRESSION)
    stuck.set()
    assert answered(served, PLAIN | OBJECT)


def test_with_two_grammars_given_up_no_further_one_is_begun_until_they_end(serve_anew, stuck, eventually, monkeypatch):
    monkeypatch.setattr(compiling, "DEADLINE", 0.2)
    with serve_anew() as served:
        assert [refusal(served, PLAIN | OBJECT)[0] for _ in range(3)] == [400, 400, 503]
        status, param, message = refusal(served, PLAIN | EXPRESSION)
        assert (status, param) == (503, "guided_regex") and "still compiles 2 grammars" in message
        assert answered(served, PLAIN)
        stuck.set()
        assert eventually(lambda: answered(served, PLAIN | EXPRESSION))


def test_whoever_waits_for_a_grammar_is_told_when_the_server_ends(stuck):
    async def end():
        compiler = compiling.Compiler()
        waiting = [asyncio.create_task(compiler.compile("key", stuck.wait)) for _ in range(3)]  # one for its turn
        assert not (await asyncio.wait(waiting, timeout=0.1))[0]
        compiler.close()
        return await asyncio.gather(*waiting, compiler.compile("key", stuck.wait), return_exceptions=True)

    assert [(error.status, str(error)[:20]) for error in asyncio.run(end())] == [(503, "the server is ending")] * 4


def test_a_grammar_that_fails_unexpectedly_fails_its_request_alone(serve_anew, monkeypatch):
    class Panic(BaseException):
        """As PyO3 raises Rust's."""

    def fail(*args):
        raise Panic

    monkeypatch.setattr(grammar, "json_schema", fail)
    with serve_anew() as served:
        assert refusal(served, PLAIN | OBJECT)[0] == 500
        assert answered(served, PLAIN | EXPRESSION)


@pytest.mark.parametrize(("wanted", "key"), [(OBJECT, "response_format"), (EXPRESSION, "guided_regex")])
def test_a_grammar_is_compiled_up_to_a_size(served, monkeypatch, wanted, key):
    size = len(json.dumps({"type": "object"}) if wanted is OBJECT else wanted[key])
    monkeypatch.setattr(requests, "LARGEST_GRAMMAR", size - 1)
    says = f"{key}: a grammar of {size} bytes is too large; at most {size - 1} are compiled"
    assert refusal(served, PLAIN | wanted) == (400, key, says)
    monkeypatch.setattr(requests, "LARGEST_GRAMMAR", size)
    assert answered(served, PLAIN | wanted)


def test_a_grammar_that_llguidance_gives_up_on_is_the_clients_fault(served, monkeypatch):
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 40, "seed": 1, "extra_body": MANY_STATES}
    create = served.client.completions.create
    assert create(**ask).choices[0].text and list(create(stream=True, **ask))
    monkeypatch.setattr(grammar, "_LIMITS", LLParserLimits(verbose_errors=False, max_lexer_states=20))
    with pytest.raises(openai.BadRequestError, match="llguidance gave up"):
        create(**ask)
    with pytest.raises(openai.APIError, match="llguidance gave up") as caught:
        list(create(stream=True, **ask))
    assert caught.value.body["type"] == "invalid_request_error"


# Bodies.


def prompt_of(size):
    """A body of `size` bytes."""
    return PLAIN | {"prompt": "x" * (size - len(json.dumps(PLAIN | {"prompt": ""})))}


@pytest.mark.parametrize("chunks", [False, True], ids=["length", "chunks"])
def test_a_body_is_read_up_to_a_size(served, chunks):
    limit = body_limit(served.worker.decoder.max_length)
    status, _, message = refusal(served, prompt_of(limit), chunks=chunks)
    assert status == 400 and "exceed the model's maximum context" in message
    says = f"POST {COMPLETIONS}: the body is larger than {limit} bytes; send a shorter one"
    for size in (limit + 1, 5 * limit):
        assert refusal(served, prompt_of(size), chunks=chunks) == (413, None, says)
    assert answered(served, PLAIN)


def test_a_body_that_is_too_large_is_not_read_at_all(served):
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)) as connection:
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Content-Length", str(SMALLEST_LIMIT + 1))
        connection.endheaders()  # and nothing behind them
        assert connection.getresponse().status == 413


def test_a_long_context_has_a_larger_limit():
    assert body_limit(131_072) == 32 * 131_072
    assert body_limit(8) == body_limit(None) == 256 * 1024


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", None])
def test_a_body_that_is_not_called_json_is_refused_with_the_remedy(served, content_type):
    says = "Content-Type: the body is not said to be JSON; send Content-Type: application/json"
    assert refusal(served, PLAIN, content_type=content_type) == (415, None, says)
    assert post(served, PLAIN, content_type="application/json; charset=utf-8")[0] == 200
