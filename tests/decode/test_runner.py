import pytest
import tiny_models as tiny
import torch

from compressor.decode import Law, Runner
from compressor.errors import CompressError, UsageError
from compressor.proposers.base import Draft
from compressor.proposers.ngram import NgramProposer

GREEDY = Law(temperature=0.0)
PROMPT = [*range(3, 30), 5, 6, 7]


@pytest.fixture(scope="module")
def model():
    return tiny.random_model()


class Oracle:
    """Proposes a text known beforehand, with a wrong token at the given positions of the new text."""

    features = ()

    def __init__(self, text, wrong=()):
        self.text = [token if i not in wrong else 3 for i, token in enumerate(text)]
        self.asked: list[int] = []

    def session(self):
        return self

    def propose(self, context):
        self.asked.append(context.k)
        done = len(context.history) - len(PROMPT)
        return Draft(tuple(self.text[done : done + context.k]))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "qwen3"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_greedy_speculation_gives_the_target_tokens(kind, k):
    model = tiny.random_model(kind)
    alone = Runner(model).generate(PROMPT, 40, GREEDY, seed=0, eos_token_ids=())
    assisted = Runner(model, NgramProposer(), k).generate(PROMPT, 40, GREEDY, seed=0, eos_token_ids=())
    guided = Runner(model, Oracle(alone.token_ids, wrong={9, 10, 23}), k).generate(PROMPT, 40, GREEDY, 0, ())
    assert assisted.token_ids == guided.token_ids == alone.token_ids
    assert alone.cycles == 40 and guided.cycles < 30


def test_the_target_alone_gives_the_tokens_of_transformers(model):
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    ours = Runner(model).generate(PROMPT, 20, GREEDY, seed=0, eos_token_ids=())
    assert ours.token_ids == theirs[0, len(PROMPT) :].tolist()


def test_every_step_of_a_stream_has_tokens_however_the_prompt_is_read(model, monkeypatch):
    monkeypatch.setattr("compressor.decode.batch.CHUNK", 8)
    steps = [list(fresh) for fresh, _ in Runner(model).stream(PROMPT, 3, GREEDY, 0, ())]
    assert [len(fresh) for fresh in steps] == [1, 1, 1]


def test_cycles_can_be_recounted(model):
    text = Runner(model).generate(PROMPT, 40, GREEDY, 0, ()).token_ids
    out = Runner(model, Oracle(text, wrong={2, 12}), 3).generate(PROMPT, 21, GREEDY, 0, ())
    # first the prompt; [1, wrong, 3]; then three right ones a cycle, until position 12
    assert out.accepted_per_position[:4] == [(), (1, 0, 0), (1, 1, 1), (1, 1, 1)]
    assert (0, 0, 0) not in out.accepted_per_position[:4]
    assert out.cycles == len(out.accepted_per_position) == len(out.proposals)
    assert [len(tokens) for tokens in out.proposals] == [len(entry) for entry in out.accepted_per_position]
    assert out.accepted == sum(map(sum, out.accepted_per_position)) and out.proposed == 3 * (out.cycles - 1)
    assert len(out.token_ids) == 21 <= out.cycles + out.accepted <= 21 + 3
    assert out.token_ids == text[:21] and out.stop == "length"


def test_a_length_limit_inside_a_cycle_cuts_the_tokens_but_not_the_counts(model):
    text = Runner(model).generate(PROMPT, 20, GREEDY, 0, ()).token_ids
    out = Runner(model, Oracle(text), 6).generate(PROMPT, 4, GREEDY, 0, ())
    assert out.token_ids == text[:4]
    assert out.accepted_per_position == [(), (1,) * 6]


def test_an_end_of_sequence_inside_a_cycle_ends_the_text_there(model):
    text = Runner(model).generate(PROMPT, 20, GREEDY, 0, ()).token_ids
    at = next(i for i in range(3, 20) if text[i] not in text[:i])
    for k in (1, 3, 6):
        out = Runner(model, Oracle(text), k).generate(PROMPT, 20, GREEDY, 0, [text[at]])
        assert out.token_ids == text[: at + 1] and out.stop == "eos"
    first = Runner(model, Oracle(text), 3).generate(PROMPT, 20, GREEDY, 0, {text[0]})
    assert first.token_ids == text[:1] and first.cycles == 1


def test_the_model_says_where_texts_end_unless_told_otherwise(model):
    text = Runner(model).generate(PROMPT, 20, GREEDY, 0, ()).token_ids
    stop = text[5]
    before, model.generation_config.eos_token_id = model.generation_config.eos_token_id, [1, stop]
    try:
        assert Runner(model).generate(PROMPT, 20, GREEDY, 0).token_ids == text[: text.index(stop) + 1]
        assert Runner(model).generate(PROMPT, 20, GREEDY, 0, ()).token_ids == text
    finally:
        model.generation_config.eos_token_id = before


def test_sampling_repeats_with_the_seed(model):
    runner, law = Runner(model, NgramProposer(), 3), Law(0.9, top_k=20, top_p=0.95)
    assert runner.generate(PROMPT, 30, law, seed=1, eos_token_ids=()) == runner.generate(PROMPT, 30, law, 1, ())
    assert runner.generate(PROMPT, 30, law, 1, ()).token_ids != runner.generate(PROMPT, 30, law, 2, ()).token_ids


def test_proposals_never_run_past_the_models_positions():
    model = tiny.random_model(max_position_embeddings=40)
    text = Runner(model).generate(PROMPT, 10, GREEDY, 0, ()).token_ids
    oracle = Oracle(text * 3)
    assert Runner(model, oracle, 6).generate(PROMPT, 10, GREEDY, 0, ()).token_ids == text
    assert oracle.asked == [6, 2]


class Faulty:
    features = ()

    def __init__(self, tokens, q=None, parents=None):
        self.draft = Draft(tuple(tokens), parents, q)

    def session(self):
        return self

    def propose(self, context):
        return self.draft


@pytest.mark.parametrize(
    ("proposer", "says"),
    [
        (Faulty([3, 4, 5, 6]), "4 tokens in a row where at most 3"),
        (Faulty(range(3, 73), None, (-1,) * 70), "a tree of 70 nodes; at most 64"),
        (Faulty([tiny.VOCABULARY]), "outside the vocabulary of 320"),
        (Faulty([3, 4], None, (1, -1)), "node 0 does not come after its parent 1"),
        (Faulty([3, 4, 3], None, (-1, 0, -1)), "token 3 is proposed twice after the same text"),
        (Faulty([3, 4], None, (-1,)), "2 tokens and 1 parents"),
        (Faulty([3], torch.ones(1, 8) / 8), "q: expected shape"),
        (Faulty([3], torch.eye(tiny.VOCABULARY)[4:5]), "probability zero under q"),
    ],
)
def test_a_faulty_proposer_is_refused(model, proposer, says):
    with pytest.raises(CompressError, match=says):
        Runner(model, proposer, 3).generate(PROMPT, 5, GREEDY, 0)


@pytest.mark.parametrize(
    ("prompt", "limit", "says"),
    [
        ([], 5, "prompt is empty"),
        ([3, tiny.VOCABULARY], 5, "vocabulary of 320"),
        ([3, -1], 5, "vocabulary of 320"),
        ([3], 0, "max_new_tokens"),
        ([3] * 510, 3, "512 positions"),
    ],
)
def test_unusable_requests_are_refused(model, prompt, limit, says):
    with pytest.raises(UsageError, match=says):
        Runner(model).generate(prompt, limit, GREEDY, 0)


def test_models_whose_state_cannot_be_rolled_back_are_refused(model):
    with pytest.raises(UsageError, match="negative"):
        Runner(model, num_speculative_tokens=-1)
    with pytest.raises(UsageError, match="num_speculative_tokens: 65: a draft can have 64 tokens"):
        Runner(model, num_speculative_tokens=65)
    with pytest.raises(UsageError, match="rule: 'medusa' is not one of exact, typical"):
        Runner(model, rule="medusa")
    model.config.layer_types = ["linear_attention", "full_attention"]
    try:
        with pytest.raises(CompressError, match="linear_attention layers cannot be rolled back"):
            Runner(model)
    finally:
        model.config.layer_types = None
