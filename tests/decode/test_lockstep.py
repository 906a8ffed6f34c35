"""Texts decoded in lock step are the runner's texts."""

import pytest
import tiny_models as tiny
import torch

from compressor.decode import lockstep, reading
from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.decode.lockstep import LockStep
from compressor.decode.runner import Runner
from compressor.errors import CompressError, UsageError
from compressor.train import answers

PROMPTS = [[5, 9, 30, 4], [7], [250, 3, 3, 18, 77, 6, 12, 40, 41, 42], [99, 100]]


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3", "qwen3", "phi3"])
def decoder(request):
    return Decoder(tiny.random_model(request.param))


def alone(decoder, prompt, count, stops=()):
    text = Runner(decoder, None, 0).generate(prompt, count, Law(temperature=0.0), 0).token_ids
    stop = next((index for index, token in enumerate(text) if token in stops), None)
    return text if stop is None else text[: stop + 1]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_greedy_answers_are_those_of_the_runner_whoever_writes_beside(decoder, rows):
    # Mistral's and Gemma's windows of 8 are shorter than these texts.
    found = answers.Writing(
        decoder, PROMPTS, max_new_tokens=14, law=Law(0.0), seed=0, stops=decoder.stops, rows=rows
    ).run()
    assert found == [alone(decoder, prompt, 14, decoder.stops) for prompt in PROMPTS]


def test_prompts_longer_than_one_pass_are_read_in_pieces(decoder, monkeypatch):
    expected = answers.Writing(decoder, PROMPTS, max_new_tokens=4, law=Law(0.0), seed=0, stops=()).run()
    monkeypatch.setattr(reading, "CHUNK", 3)
    monkeypatch.setattr(lockstep, "READ_TOKENS", 12)
    assert answers.Writing(decoder, PROMPTS, max_new_tokens=4, law=Law(0.0), seed=0, stops=()).run() == expected


def test_a_row_is_used_again_without_a_trace_of_the_text_before(decoder):
    table = LockStep(decoder, 2, 32)
    table.admit([0, 1], [PROMPTS[2], PROMPTS[0]])
    table.step(torch.tensor([8, 9]))
    table.admit([0], [PROMPTS[1]])
    fresh = LockStep(decoder, 2, 32)
    fresh.admit([0, 1], [PROMPTS[1], PROMPTS[3]])
    one, other = table.step(torch.tensor([20, 21])), fresh.step(torch.tensor([20, 21]))
    assert torch.allclose(one[0], other[0], atol=1e-4)
    assert not torch.allclose(one[1], other[1], atol=1e-2)  # control: another text differs


def test_a_sampled_answer_depends_on_its_seed_and_prompt_alone(decoder):
    def write(prompts, seed, rows):
        return answers.Writing(decoder, prompts, max_new_tokens=6, law=Law(1.0), seed=seed, stops=(), rows=rows).run()

    assert write(PROMPTS, 1, 4) == write(PROMPTS, 1, 2)
    assert write(PROMPTS, 1, 4) != write(PROMPTS, 2, 4)
    same = write([PROMPTS[0]] * 3, 1, 3)
    assert len({tuple(answer) for answer in same}) == 3


def test_an_answer_ends_with_its_stop_token_or_at_its_length(decoder):
    free = answers.Writing(decoder, PROMPTS, max_new_tokens=9, law=Law(0.0), seed=0, stops=()).run()
    assert [len(answer) for answer in free] == [9] * 4
    stop = free[0][4]
    cut = answers.Writing(decoder, PROMPTS[:1], max_new_tokens=9, law=Law(0.0), seed=0, stops={stop}).run()
    assert cut == [free[0][: free[0].index(stop) + 1]]


def test_answers_that_all_end_at_once_do_not_end_the_writing(decoder):
    found = answers.Writing(decoder, PROMPTS * 3, max_new_tokens=1, law=Law(0.0), seed=0, stops=(), rows=2).run()
    assert found == [alone(decoder, prompt, 1) for prompt in PROMPTS * 3]


def test_of_a_large_model_fewer_texts_are_written_at_a_time(decoder, monkeypatch):
    made = []
    original = LockStep.__init__

    def init(self, decoder, rows, capacity):
        made.append(rows)
        original(self, decoder, rows, capacity)

    monkeypatch.setattr(LockStep, "__init__", init)
    monkeypatch.setattr(answers, "CACHE_BYTES", 2 * LockStep.row_bytes(decoder, 12) + 1)
    answers.Writing(decoder, PROMPTS, max_new_tokens=2, law=Law(0.0), seed=0, stops=()).run()
    assert made == [2]


def test_a_cache_beyond_memory_is_refused_in_one_line(decoder):
    with pytest.raises(UsageError, match=r"a cache of 4 texts of 1000000000000000 tokens takes .* GiB"):
        LockStep(decoder, 4, 10**15)


def test_every_token_is_told(decoder):
    counted = []
    found = answers.Writing(
        decoder, PROMPTS, max_new_tokens=5, law=Law(0.0), seed=0, stops=(), rows=2, advance=counted.append
    ).run()
    assert sum(counted) == sum(map(len, found))


def test_logits_that_are_no_numbers_are_refused():
    broken = tiny.random_model("llama")
    broken.lm_head.weight[3] = torch.nan
    with pytest.raises(CompressError, match="NaN or infinity"):
        answers.Writing(Decoder(broken), PROMPTS, max_new_tokens=2, law=Law(0.0), seed=0, stops=()).run()


def test_no_prompts_are_no_answers(decoder):
    assert answers.Writing(decoder, [], max_new_tokens=2, law=Law(0.0), seed=0, stops=()).run() == []
