"""Documents become rows without padding, and the digest names exactly the ids and their shape."""

import random

import pytest
import torch

from compressor.calibration.packing import check_vocabulary, digest, pack, shuffled
from compressor.errors import CompressError


def test_documents_are_joined_by_the_separator_and_cut():
    ids = pack([[5, 6], [], [7], [8, 9, 10]], rows=2, length=4, separator=0, source="x")
    assert ids.tolist() == [[5, 6, 0, 7], [0, 8, 9, 10]]
    assert ids.dtype == torch.long


def test_a_document_that_ends_itself_gets_no_second_end():
    ids = pack([[5, 0], [6, 1], [7]], rows=1, length=6, separator=0, ends={1}, source="x")
    assert ids.tolist() == [[5, 0, 6, 1, 7, 0]]


def test_without_a_separator_documents_follow_each_other():
    assert pack([[5], [6]], rows=1, length=2, separator=None, source="x").tolist() == [[5, 6]]


def test_no_more_is_read_than_needed():
    def documents():
        yield [1, 2, 3]
        raise AssertionError("read too far")

    assert pack(documents(), rows=1, length=4, separator=0, source="x").tolist() == [[1, 2, 3, 0]]


def test_too_little_text_is_refused_with_the_rows_there_are():
    with pytest.raises(CompressError, match=r"corpus: 2 documents with 8 tokens fill 2 of 3 rows of 4"):
        pack([[1, 2, 3], [4, 5, 6]], rows=3, length=4, separator=0, source="corpus")


def test_shuffling_is_that_of_the_random_module():
    order = list(range(20))
    random.Random(0).shuffle(order)
    assert shuffled(range(20), 0) == order
    assert shuffled(range(20), 1) != order


def test_digest_depends_on_ids_and_shape_only():
    ids = torch.arange(12).view(3, 4)
    assert digest(ids) == digest(ids.to(torch.int32)) == digest(ids.T.contiguous().T)
    assert digest(ids) != digest(ids.view(4, 3))
    changed = ids.clone()
    changed[2, 3] = 99
    assert digest(ids) != digest(changed)
    assert len(digest(ids)) == 64


@pytest.mark.parametrize("wrong", [10, 4000, -1])
def test_an_id_outside_the_vocabulary_is_named(wrong):
    ids = torch.tensor([[0, 9], [3, wrong]])
    with pytest.raises(CompressError, match=f"token id {wrong} is outside .* of 10: wrong tokenizer"):
        check_vocabulary(ids, 10, "set")
    check_vocabulary(ids[:1], 10, "set")
