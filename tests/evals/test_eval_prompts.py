"""Acceptance is measured on a fixed mix of copying and free answers."""

import pytest

from compressor.calibration.prompts import encode, evaluation_prompts
from compressor.errors import UsageError
from compressor.evals.prompts import COPYING, acceptance_order, acceptance_prompts


def test_the_order_holds_every_evaluation_prompt_once():
    ids = [p["id"] for p in acceptance_order()]
    assert sorted(ids) == sorted(p["id"] for p in evaluation_prompts())
    assert ids == [p["id"] for p in acceptance_order()]


@pytest.mark.parametrize("n", [4, 8, 16, 32])
def test_every_beginning_mixes_copying_and_free_answers(n):
    copying = sum(p["category"] in COPYING for p in acceptance_order()[:n])
    assert 0.3 * n <= copying <= 0.6 * n


def test_eight_prompts_come_from_eight_categories():
    assert len({p["category"] for p in acceptance_order()[:8]}) == 8
    assert len({p["category"] for p in evaluation_prompts()[:8]}) < 8  # file order would not do


def test_prompts_are_ready_for_an_answer(tokenizer):
    prompts = acceptance_prompts(tokenizer, 8)
    assert prompts == [encode(p, tokenizer) for p in acceptance_order()[:8]]
    assert tokenizer.decode(prompts[0]).endswith("</s>\n<s>assistant\n")
    assert acceptance_prompts(tokenizer, 3) == prompts[:3]


def test_without_a_chat_template_prompts_are_plain_text(plain_tokenizer):
    assert "<s>" not in plain_tokenizer.decode(acceptance_prompts(plain_tokenizer, 1)[0])


@pytest.mark.parametrize("n", [0, 1000])
def test_a_number_of_prompts_that_there_is_not_is_refused(tokenizer, n):
    with pytest.raises(UsageError, match=rf"measure\.acceptance\.prompts: {n} is not between 1 and \d+"):
        acceptance_prompts(tokenizer, n)
