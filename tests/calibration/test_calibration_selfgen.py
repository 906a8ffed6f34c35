"""The target answers our prompts; the same seed gives the same rows, and a mute model is refused."""

import pytest
import torch
from tiny_models import CONFIGS
from tiny_writer import EOS, calibration_spec, writer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from compressor import calibration
from compressor.calibration import selfgen
from compressor.decode.law import Law
from compressor.errors import CompressError
from compressor.ui import NullUI


class Recorder(NullUI):
    """Keeps what a progress bar was told."""

    def progress(self, description, total):
        self.description, self.total, self.done = description, total, []
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def advance(self, n=1):
        self.done.append(n)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    """What is tested here shows in short answers too."""
    monkeypatch.setattr(selfgen, "MAX_NEW_TOKENS", 40)
    monkeypatch.setattr(selfgen, "USUAL_NEW_TOKENS", 30)


def build(tokenizer, model=None, *, seed=0, ui=None, **changes):
    model = model or writer()
    return calibration.build(calibration_spec(**changes), tokenizer, seed=seed, load_model=lambda: model, ui=ui)


def test_rows_have_the_shape_and_ids_of_the_target(tokenizer):
    made = build(tokenizer, rows=6, length=200)
    assert made.ids.shape == (6, 200)
    assert made.ids.dtype == torch.long
    assert made.ids.min() >= 0 and made.ids.max() < 320
    assert made.digest == calibration.digest(made.ids)
    assert made.description["kind"] == "self"
    assert made.description["digest"] == made.digest
    assert made.description["generated_tokens"] > 0


def test_rows_hold_prompts_in_the_chat_template_and_answers(tokenizer):
    text = tokenizer.decode(build(tokenizer, rows=6, length=300).ids.flatten())
    assert "<s>assistant\n" in text
    prompts = [p["messages"][-1]["content"] for p in calibration.prompts.calibration_prompts() if "messages" in p]
    assert sum(prompt in text for prompt in prompts) >= 2


def test_the_seed_decides_the_set(tokenizer):
    first, again, other = (build(tokenizer, seed=seed).digest for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_global_random_state_is_untouched(tokenizer):
    before = torch.get_rng_state()
    build(tokenizer)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(123)
    assert build(tokenizer).digest == build(tokenizer).digest


def test_the_law_is_the_recipes_and_not_the_checkpoints(tokenizer):
    plain, opinionated = writer(), writer()
    opinionated.generation_config = GenerationConfig(
        eos_token_id=EOS, do_sample=True, temperature=0.2, top_k=2, repetition_penalty=3.0, max_length=11
    )
    kept = opinionated.generation_config
    assert build(tokenizer, plain).digest == build(tokenizer, opinionated).digest
    assert opinionated.generation_config is kept
    assert build(tokenizer, plain).digest != build(tokenizer, plain, temperature=0.2).digest
    assert build(tokenizer, plain).digest != build(tokenizer, plain, top_p=0.1).digest


def test_sampling_follows_temperature_and_top_p():
    logits = torch.tensor([4.0, 3.0, 1.0, -2.0]).expand(20000, 4)
    none = torch.empty(20000, 0, dtype=torch.long)

    def frequencies(temperature, top_p):
        chosen = selfgen._Draw(Law(temperature, None, top_p), 0)(none, logits).argmax(-1)
        return torch.bincount(chosen, minlength=4) / len(chosen)

    assert torch.allclose(frequencies(1.0, 1.0), logits[0].softmax(-1), atol=0.015)
    assert torch.allclose(frequencies(2.0, 1.0), (logits[0] / 2).softmax(-1), atol=0.015)
    assert torch.allclose(
        frequencies(1.0, 0.8), torch.tensor([4.0, 3.0, -torch.inf, -torch.inf]).softmax(-1), atol=0.015
    )
    assert not torch.allclose(frequencies(1.0, 1.0), (logits[0] / 2).softmax(-1), atol=0.015)


def test_temperature_zero_is_greedy(tokenizer):
    model = writer()
    ids = build(tokenizer, model, temperature=0.0, rows=1, length=600).ids
    assert torch.equal(ids, build(tokenizer, model, temperature=0.0, rows=1, length=600).ids)
    text = tokenizer.decode(ids[0])
    prompt = tokenizer(text[: text.index("assistant\n") + len("assistant\n")], add_special_tokens=False).input_ids
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].argmax()
    assert ids[0, len(prompt)] == expected


def test_padding_does_not_change_an_answer(tokenizer):
    """Left padding is masked and positions are counted behind it: batch or alone, the greedy answer is the same."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIGS["llama"]()).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    batch = [tokenizer(text).input_ids for text in ("a", "many words in a row", "some words")]

    def answers(rows):
        with NullUI().progress("", 0) as bar:
            made = selfgen._Writer(model, [EOS], None, 512, 10**6, bar)
            made.answer(rows)
        return made.documents

    assert answers(batch) == [answers([row])[0] for row in batch]
    assert answers(batch) != answers([[5], *batch[1:]])


def test_small_sets_are_cheap(tokenizer):
    small = build(tokenizer, rows=2, length=32)
    assert small.description["documents"] <= 2
    assert small.description["generated_tokens"] <= 2 * selfgen.MAX_NEW_TOKENS


def test_generation_stops_when_the_rows_are_full(tokenizer):
    ui = Recorder()
    made = build(tokenizer, rows=10, length=300, ui=ui)
    assert (ui.total, sum(ui.done)) == (3000, 3000)
    assert "calibration" in ui.description
    prompts = made.description["documents"]
    assert made.description["generated_tokens"] <= 3000 + prompts * selfgen.MIN_NEW_TOKENS


def few(monkeypatch, texts):
    prompts = [{"id": str(i), "category": "c", "text": text} for i, text in enumerate(texts)]
    monkeypatch.setattr(calibration.prompts, "calibration_prompts", lambda: prompts)


def test_prompts_are_answered_again_with_other_random_numbers(tokenizer, monkeypatch):
    few(monkeypatch, ["a first prompt", "a second one"])
    made = build(tokenizer, rows=4, length=256)
    assert made.description["passes"] > 1
    rows = tokenizer.decode(made.ids.flatten()).split("a first prompt")
    assert len(rows) > 2
    assert rows[1][:20] != rows[2][:20]


def test_greedy_answers_are_not_repeated(tokenizer, monkeypatch):
    few(monkeypatch, ["a first prompt", "a second one"])
    with pytest.raises(
        CompressError, match=r"greedy answers to all 2 prompts give .* of 90 rows .* temperature above 0"
    ):
        build(tokenizer, temperature=0.0, rows=90, length=64)


@pytest.mark.parametrize("rows", [1, 100])
def test_a_model_that_only_ends_is_refused(tokenizer, rows):
    with pytest.raises(CompressError, match=r"self-generation: .* 0\.0 tokens on average before they end"):
        build(tokenizer, writer(mute=True), rows=rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_model_is_refused(tokenizer, temperature):
    model = writer()
    model.lm_head.weight.data[7] = float("nan")
    with pytest.raises(CompressError, match="logits hold NaN or infinity"):
        build(tokenizer, model, temperature=temperature)


def test_a_tokenizer_with_ids_beyond_the_model_is_refused(tokenizer):
    with pytest.raises(CompressError, match=r"tokenizer: token id \d+ is outside .* of 90: wrong tokenizer"):
        build(tokenizer, writer(vocab_size=90))


def test_prompts_longer_than_the_context_are_left_out_and_counted(tokenizer):
    made = build(tokenizer, writer(context=150))
    assert 0 < made.description["prompts_beyond_context"] < len(calibration.prompts.calibration_prompts())
    assert build(tokenizer).description["prompts_beyond_context"] == 0
    with pytest.raises(CompressError, match="no prompt fits the model's context of 20 tokens"):
        build(tokenizer, writer(context=20))


def test_an_answer_ends_at_any_end_id_of_the_checkpoint(tokenizer):
    model = writer()
    model.generation_config.eos_token_id = [EOS, 1, *range(10, 160)]  # half of all ids end an answer
    with pytest.raises(CompressError, match="tokens on average before they end"):
        build(tokenizer, model, rows=20, length=200)


def test_a_trained_model_writes_words(shared_data):
    folder = shared_data / "stories260K" / "hf"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    made = build(tokenizer, model, rows=4, length=128, temperature=0.8)
    text = tokenizer.decode(made.ids.flatten())
    assert sum(text.count(f" {word} ") for word in ("the", "and", "was", "to", "a")) > 10
