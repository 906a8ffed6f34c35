"""What is not done is refused in one line that names the key."""

import json
import socket
import urllib.error
import urllib.request

import openai
import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]


def ask(served, path, body=None):
    """Status and answer, as text."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    url = f"http://127.0.0.1:{served.port}{path}"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def refused(served, path, body):
    status, text = ask(served, path, body)
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    return status, error["param"], error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("n", 2, "n: 2 is not supported here; it can only be 1"),
        ("n", True, "n: True is not supported here; it can only be 1"),
        ("presence_penalty", False, "presence_penalty: False is not supported here; it can only be 0"),
        ("logit_bias", {"5": 1}, "logit_bias: "),
        ("presence_penalty", 0.5, "presence_penalty: 0.5 is not supported"),
        ("frequency_penalty", -1, "frequency_penalty: "),
        ("logprobs", 3, "logprobs: 3 is not supported"),
        ("tools", [{"type": "function"}], "tools: "),
        ("best_of", 3, "best_of: 3"),
        ("echo", True, "echo: True"),
        ("suffix", "x", "suffix: 'x'"),
        ("temprature", 1, "temprature: 1 is not supported here; leave it out"),
        ("temperature", -1, "temperature: -1"),
        ("temperature", "hot", "temperature: input should be a valid number"),
        ("temperature", float("nan"), "temperature: nan"),
        ("top_p", 0, "top_p: 0"),
        ("top_k", -2, "top_k: input should be greater than or equal to -1"),
        ("max_tokens", 0, "max_tokens: input should be greater than or equal to 1"),
        ("max_tokens", 1.5, "max_tokens: input should be a valid integer"),
        ("seed", 2**63, "seed: "),
        ("stop", [""], "stop: "),
        ("stop", list("abcde"), "stop: "),
        ("stop", [1], "stop: "),
        ("stream", "yes", "stream: input should be a valid boolean"),
        ("stream_options", {"every": 2}, "every: 2 is not supported"),
        ("response_format", {"type": "xml"}, "response_format.type: "),
        ("response_format", {"type": "json_schema"}, "response_format: json_schema is missing"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "response_format.json_schema.schema: ",
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
            "response_format: schema: ",
        ),
        ("guided_regex", "(", "guided_regex: pattern: '('"),
    ],
)
def test_a_bad_or_unknown_value_is_refused_by_name(served, path, key, value, says):
    prompt = {"messages": USER} if path == CHAT else {"prompt": "Hello"}
    status, param, message = refused(served, path, {"model": "tiny", **prompt, key: value})
    assert status == 400 and message.startswith(says)
    assert param == key or message.startswith(param)


@pytest.mark.parametrize(
    ("path", "prompt", "says"),
    [
        (COMPLETIONS, {}, "prompt: field required"),
        (COMPLETIONS, {"prompt": ""}, "prompt: it is empty"),
        (COMPLETIONS, {"prompt": []}, "prompt: it is empty"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "prompt: it is empty"),
        (COMPLETIONS, {"prompt": [5, 320]}, "prompt: token 320 is outside the vocabulary of 320"),
        (COMPLETIONS, {"prompt": [5, -1]}, "prompt: token -1"),
        (COMPLETIONS, {"prompt": 5}, "prompt: "),
        (COMPLETIONS, {"prompt": [5, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": "\ud800"}, "the body holds half a surrogate pair"),
        (CHAT, {"messages": USER, "model": "\udfff"}, "the body holds half a surrogate pair"),
        (CHAT, {"messages": []}, "messages: "),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role: "),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content: field required"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url: "),
        (COMPLETIONS, {"prompt": "x" * 8200}, "prompt: 8200 tokens and 1 new ones exceed the model's maximum context"),
        (COMPLETIONS, {"prompt": "x" * 8000, "max_tokens": 193}, "prompt: 8000 tokens and 193 new ones exceed"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(served, path, prompt, says):
    status, _, message = refused(served, path, {"model": "tiny", **prompt})
    assert status == 400 and message.startswith(says)


def test_the_default_length_is_what_fits(served):
    status, text = ask(served, COMPLETIONS, {"model": "tiny", "prompt": "x" * 8180, "temperature": 0})
    assert status == 200 and json.loads(text)["usage"]["completion_tokens"] <= 12


def test_a_body_that_is_no_object_is_refused(served):
    assert refused(served, CHAT, b'{"model": ')[2].startswith("the body is not JSON: ")
    assert refused(served, CHAT, b"[1]")[0] == 400
    assert refused(served, CHAT, b"[" * 100_000)[0] == 400


def test_another_model_is_not_found(served):
    with pytest.raises(openai.NotFoundError, match="'other' does not exist; 'tiny' is served") as caught:
        served.client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"


def test_unknown_paths_and_methods_are_answered_in_the_same_shape(served):
    assert refused(served, "/v1/nothing", {})[0] == 404
    assert refused(served, COMPLETIONS, None)[::2] == (405, f"GET {COMPLETIONS}: Method Not Allowed")


def test_an_error_while_generating_ends_an_answer_and_a_stream(serve_anew, monkeypatch):
    with serve_anew() as served:
        monkeypatch.setattr(served.runner.decoder, "forward", lambda *_: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
            served.client.completions.create(model="tiny", prompt="x")
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            list(served.client.completions.create(model="tiny", prompt="x", stream=True))
        monkeypatch.undo()
        assert served.client.completions.create(model="tiny", prompt="x", max_tokens=3).choices


def test_health_and_metrics(serve_anew):
    with serve_anew() as served:
        assert ask(served, "/health") == (200, '{"status":"ok"}')
        body = {"model": "tiny", "prompt": "abcabc", "max_tokens": 60, "temperature": 0}
        counted = json.loads(ask(served, COMPLETIONS, body)[1])["usage"]["completion_tokens"]
        lines = ask(served, "/metrics")[1].splitlines()
        values = dict(line.split() for line in lines if not line.startswith("#"))
        numbers = {name.removeprefix("compressor:"): int(value) for name, value in values.items()}
        assert numbers["num_requests_running"] == numbers["kv_cache_bytes"] == 0
        assert numbers["generation_tokens_total"] == counted
        assert 0 < numbers["spec_decode_num_drafts_total"] <= numbers["spec_decode_num_draft_tokens_total"]
        assert "spec_decode_num_accepted_tokens_total" in numbers


def test_the_stream_is_server_sent_events(served):
    body = {"model": "tiny", "messages": USER, "max_tokens": 5, "stream": True, "seed": 1}
    _, text = ask(served, CHAT, {**body, "stream_options": {"include_usage": True}})
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 5
    assert "usage" not in ask(served, CHAT, body)[1]


def test_a_connection_without_a_request_harms_nobody(served):
    with socket.create_connection(("127.0.0.1", served.port)) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
    assert ask(served, "/health")[0] == 200
