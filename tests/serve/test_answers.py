"""What clients of OpenAI's library get is what the runner generates."""

import json
import re

import pytest
import tiny_models as tiny

from compressor.decode import Law, Runner

PROMPT = "Once upon a time"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße?"}]


def complete(served, prompt=PROMPT, **options):
    return served.client.completions.create(model=served.name, prompt=prompt, **options)


def chat(served, messages=MESSAGES, **options):
    return served.client.chat.completions.create(model=served.name, messages=messages, **options)


def streamed(answer):
    """Text, finish reasons and usage of a stream."""
    text, reasons, usage = "", [], None
    for chunk in answer:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return text, reasons, usage


def chat_ids(served):
    return served.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)


@pytest.mark.parametrize("seed", [0, 7, -1])
@pytest.mark.parametrize(
    "law", [{}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2}]
)
def test_a_completion_is_what_the_runner_generates(served, law, seed):
    text, output = served.alone(PROMPT, 40, Law(**law), seed)
    ours = {key: law[key] for key in law.keys() & {"top_k", "min_p", "repetition_penalty"}}
    rest = {key: law[key] for key in law.keys() - ours.keys()}
    answer = complete(served, max_tokens=40, seed=seed, extra_body=ours, **rest)
    choice, usage = answer.choices[0], answer.usage
    assert choice.text == text
    assert choice.finish_reason == {"eos": "stop", "length": "length"}[output.stop]
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), len(output.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_greedy_texts_agree_in_every_way_of_asking(served):
    text, output = served.alone(PROMPT, 50, Law(temperature=0))
    options = {"max_tokens": 50, "temperature": 0}
    ids = served.tokenizer(PROMPT).input_ids
    assert complete(served, **options).choices[0].text == text
    assert complete(served, ids, **options).choices[0].text == text
    assert complete(served, [PROMPT], **options).choices[0].text == text
    usage = {"stream_options": {"include_usage": True}}
    found, reasons, counts = streamed(complete(served, stream=True, **usage, **options))
    assert (found, reasons) == (text, ["length"])
    assert (counts.prompt_tokens, counts.completion_tokens) == (len(ids), len(output.token_ids))


def test_a_chat_goes_through_the_template(served):
    ids = chat_ids(served)
    text, output = served.alone(ids, 40, Law(), 5)
    options = {"max_completion_tokens": 40, "seed": 5}
    answer = chat(served, **options)
    assert (answer.object, answer.choices[0].message.role) == ("chat.completion", "assistant")
    assert answer.choices[0].message.content == text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(output.token_ids))
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
    developer = [{**parts[0], "role": "developer"}, parts[1]]
    assert chat(served, developer, **options).choices[0].message.content == text
    assert streamed(chat(served, stream=True, **options)) == (text, ["length"], None)


def test_a_stream_comes_in_pieces_without_parts_of_characters(served):
    law = {"temperature": 0.7, "seed": 11, "max_tokens": 120}
    text, _ = served.alone(PROMPT, 120, Law(temperature=0.7), 11)
    pieces = [chunk.choices[0].text for chunk in complete(served, stream=True, **law)]
    assert len(pieces) > 10 and "".join(pieces) == text


def test_several_prompts_are_several_choices(served):
    prompts = [PROMPT, "Another", "x"]
    alone = [served.alone(prompt, 20, Law(), 4)[0] for prompt in prompts]
    answer = complete(served, prompts, max_tokens=20, seed=4)
    assert [choice.text for choice in answer.choices] == alone
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    found = ["", "", ""]
    for chunk in complete(served, prompts, max_tokens=20, seed=4, stream=True):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == alone


def test_without_a_seed_every_request_has_its_own_and_a_length_by_default(served):
    texts = {complete(served).choices[0].text for _ in range(3)}
    assert len(texts) == 3
    assert len({choice.text for choice in complete(served, [PROMPT] * 3).choices}) == 3
    assert complete(served, temperature=0).usage.completion_tokens == 256


def ascii_runs(text, size):
    """Parts of `text` that are several tokens of the byte-level tokenizer, first occurrences, not at its beginning."""
    runs = [match.group() for match in re.finditer(f"[!-~]{{{size}}}", text)]
    return [run for run in runs if text.index(run) > 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stop_string_cuts_the_text_also_across_tokens(served, size, stream):
    law = {"max_tokens": 80, "seed": 2, "temperature": 0.5}
    text, _ = served.alone(PROMPT, 80, Law(temperature=0.5), 2)
    stop = ascii_runs(text, size)[0]
    assert len(served.tokenizer(stop).input_ids) == size
    for stops in (stop, [stop], ["never there", stop]):
        answer = complete(served, stop=stops, stream=stream, stream_options={"include_usage": True}, **law)
        if stream:
            found, (reason,), usage = streamed(answer)
        else:
            found, reason, usage = answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
        assert (found, reason) == (text[: text.index(stop)], "stop")
        assert 0 < usage.completion_tokens < 80


def test_a_stop_string_that_only_begins_changes_nothing(served):
    text, _ = served.alone(PROMPT, 40, Law(), 2)
    stop = text[-1] + "and more"
    answer = complete(served, stop=[text[10] + "€€", stop], max_tokens=40, seed=2)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "length")
    assert streamed(complete(served, stop=stop, max_tokens=40, seed=2, stream=True))[0] == text


def test_the_end_of_sequence_ends_a_text_and_is_not_in_it(served):
    seed = next(seed for seed in range(2000) if served.alone(PROMPT, 8, Law(), seed)[1].stop == "eos")
    text, output = served.alone(PROMPT, 8, Law(), seed)
    answer = complete(served, max_tokens=8, seed=seed)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")
    assert answer.usage.completion_tokens == len(output.token_ids) and "</s>" not in text


def test_an_ordinary_token_that_ends_a_text_is_not_in_it(served, monkeypatch):
    _, output = served.alone(PROMPT, 40, Law(temperature=0))
    end = output.token_ids[12]
    before = output.token_ids[: output.token_ids.index(end)]
    monkeypatch.setattr(served.runner.decoder, "stops", frozenset({end}))
    answer = complete(served, temperature=0, max_tokens=40)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (served.tokenizer.decode(before), "stop")
    assert answer.usage.completion_tokens == len(before) + 1
    monkeypatch.undo()
    longer = complete(served, temperature=0, max_tokens=len(before) + 1)  # the same token, which ends nothing now
    assert longer.choices[0].text == served.tokenizer.decode([*before, end])


WORDS = tiny.sentencepiece(["x", *(f"▁w{number}" for number in range(4, tiny.VOCABULARY))])


@pytest.mark.usefixtures("endless")
def test_a_completion_keeps_the_space_between_prompt_and_answer_and_a_message_has_none(serve_anew):
    with serve_anew(tokenizer=WORDS) as served:
        options = {"max_tokens": 6, "temperature": 0}
        _, output = served.alone([5, 6], 6, Law(temperature=0))
        prompt, whole = WORDS.decode([5, 6]), WORDS.decode([5, 6, *output.token_ids])
        assert complete(served, [5, 6], **options).choices[0].text == whole.removeprefix(prompt)
        assert streamed(complete(served, [5, 6], stream=True, **options))[0] == whole.removeprefix(prompt)
        assert whole.startswith(f"{prompt} w") and WORDS.decode(output.token_ids).startswith("w")
        asked = [{"role": "user", "content": "x"}]  # the prompt ends in a text that a space could follow
        text = chat(served, asked, **options).choices[0].message.content
        assert text.startswith("w") and streamed(chat(served, asked, stream=True, **options))[0] == text


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_an_answer_follows_a_schema(served, temperature):
    schema = {
        "type": "object",
        "properties": {"fine": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
        "required": ["fine", "size"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = chat(served, response_format=wanted, temperature=temperature, seed=1, max_tokens=200)
    found = json.loads(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert set(found) == {"fine", "size"} and found["size"] in ("small", "large")


def test_an_answer_follows_an_expression(served):
    answer = complete(served, extra_body={"guided_regex": "[ab]{5}"}, seed=1)
    assert re.fullmatch("[ab]{5}", answer.choices[0].text) and answer.choices[0].finish_reason == "stop"
    assert not re.fullmatch("[ab]{5}", complete(served, seed=1).choices[0].text)


def test_a_json_object_begins_like_one(served):
    text = chat(served, response_format={"type": "json_object"}, seed=1, max_tokens=40).choices[0].message.content
    assert text.lstrip(" \t\r\n")[:1] in ("{", "")
    plain = chat(served, response_format={"type": "text"}, seed=1, max_tokens=40).choices[0].message.content
    assert plain == chat(served, seed=1, max_tokens=40).choices[0].message.content != text


def test_keys_that_change_nothing_are_accepted(served):
    plain = chat(served, seed=3, max_tokens=20).choices[0].message.content
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "n": 1, "presence_penalty": 0, "logprobs": False}
    assert chat(served, seed=3, max_tokens=20, **harmless).choices[0].message.content == plain
    assert chat(served, seed=3, max_tokens=20, presence_penalty=0.0).choices[0].message.content == plain
    nulls = {"stop": None, "top_p": None, "tools": None, "response_format": None, "reasoning_effort": None}
    assert chat(served, seed=3, max_tokens=20, extra_body=nulls).choices[0].message.content == plain


def test_the_served_model_is_listed(served):
    (model,) = served.client.models.list().data
    assert (model.id, model.max_model_len, model.lossy) == ("tiny", 8192, False)


def test_a_model_that_is_served_with_a_lossy_rule_says_so(runner, serve_anew):
    with serve_anew(Runner(runner.decoder, runner.proposer, 3, "typical")) as served:
        (model,) = served.client.models.list().data
        assert model.lossy is True
