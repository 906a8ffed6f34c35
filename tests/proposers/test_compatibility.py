import json
import time

import pytest
from tiny_models import VOCABULARY, tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from compressor.errors import CompressError
from compressor.proposers.compatibility import vocabulary

NAMES = ("models/target", "models/draft")


def changed(edit) -> PreTrainedTokenizerFast:
    """`tokenizer()` with `edit` applied to the JSON of its backend."""
    fast = tokenizer()
    content = json.loads(fast.backend_tokenizer.to_str())
    edit(content)
    roles = {f"{role}_token": getattr(fast, f"{role}_token") for role in ("eos", "bos", "pad", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **roles)


def swapped(one: str, other: str) -> PreTrainedTokenizerFast:
    def edit(content):
        vocab = content["model"]["vocab"]
        vocab[one], vocab[other] = vocab[other], vocab[one]

    return changed(edit)


def extended(*tokens, special: bool = False) -> PreTrainedTokenizerFast:
    fast = tokenizer()
    fast.add_tokens([AddedToken(token, special=special) for token in tokens])
    return fast


def with_backend(**parts) -> PreTrainedTokenizerFast:
    fast = tokenizer()
    for name, part in parts.items():
        setattr(fast.backend_tokenizer, name, part)
    return fast


def with_bos() -> PreTrainedTokenizerFast:
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return with_backend(post_processor=template)


def unigram(*, byte_fallback: bool) -> PreTrainedTokenizerFast:
    pieces = [("<unk>", 0.0), ("x", -1.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    inner = Tokenizer(models.Unigram(pieces, 0, byte_fallback))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def refusal(target, draft, target_size: int = VOCABULARY, draft_size: int = VOCABULARY) -> str:
    with pytest.raises(CompressError) as caught:
        vocabulary(target, draft, target_size, draft_size, NAMES)
    message = str(caught.value)
    assert all(name in message for name in NAMES) and "\n" not in message
    assert message.endswith("choose a draft that was made with the target's tokenizer")
    return message


def test_the_same_tokenizer_shares_every_id():
    assert vocabulary(tokenizer(), tokenizer(), VOCABULARY, VOCABULARY) == VOCABULARY


@pytest.mark.parametrize(
    ("target_size", "draft_size", "shared"), [(320, 384, 320), (384, 320, 320), (384, 352, 352), (384, 384, 384)]
)
def test_padded_rows_are_shared_as_far_as_both_models_have_them(target_size, draft_size, shared):
    assert vocabulary(tokenizer(), tokenizer(), target_size, draft_size) == shared


def test_two_swapped_tokens_are_refused_at_the_first():
    draft = swapped("a", "b")
    first = tokenizer().convert_tokens_to_ids("a")
    assert f"id {first} is 'a' in models/target and 'b' in models/draft" in refusal(tokenizer(), draft)
    assert vocabulary(draft, swapped("a", "b"), VOCABULARY, VOCABULARY) == VOCABULARY


def test_the_first_of_several_differences_is_named():
    def edit(content):
        vocab = content["model"]["vocab"]
        vocab["<extra_300>"], vocab["<extra_290>"] = vocab["<extra_290>"], vocab["<extra_300>"]
        vocab["!!"] = vocab.pop("!")

    first = tokenizer().convert_tokens_to_ids("!")
    assert f"id {first} is '!' in models/target and '!!' in models/draft" in refusal(tokenizer(), changed(edit))


def test_a_token_that_the_draft_does_not_know_is_refused():
    message = refusal(extended("<tool>"), tokenizer(), 384, 384)
    assert "id 320 is '<tool>' in models/target and no token in models/draft" in message


def test_tokens_behind_the_targets_are_never_proposed():
    assert vocabulary(tokenizer(), extended("<tool>", "<call>"), 384, 384) == VOCABULARY
    assert vocabulary(tokenizer(), extended("<tool>", "<call>"), 300, 384) == 300
    assert vocabulary(extended("<tool>", "<call>"), extended("<tool>", "<call>"), 384, 384) == 384


def test_an_added_token_in_a_hole_of_the_target_is_refused():
    def without(content):
        del content["model"]["vocab"]["<extra_310>"]

    message = refusal(changed(without), tokenizer())
    assert "id 310 is no token in models/target and '<extra_310>' in models/draft" in message
    assert vocabulary(changed(without), changed(without), VOCABULARY, VOCABULARY) == VOCABULARY


def test_another_added_token_at_the_same_id_is_refused():
    message = refusal(extended("<tool>"), extended("<call>"), 384, 384)
    assert "id 320 is '<tool>' in models/target and '<call>' in models/draft" in message


def test_the_same_token_special_in_one_only_is_refused():
    special, ordinary = extended("<a>", "<tool>", special=True), extended("<a>", "<tool>")
    assert "id 320 ('<a>') is special in models/target and ordinary in models/draft" in refusal(
        special, ordinary, 384, 384
    )
    assert "id 320 ('<a>') is ordinary in models/target and special in models/draft" in refusal(
        ordinary, special, 384, 384
    )
    assert vocabulary(special, extended("<a>", "<tool>", special=True), 384, 384) == 384


def test_special_tokens_behind_the_targets_do_not_matter():
    assert vocabulary(tokenizer(), extended("<tool>", special=True), 384, 384) == VOCABULARY


@pytest.mark.parametrize("role", ["eos", "bos", "pad", "unk"])
def test_another_special_token_of_the_same_vocabulary_is_refused(role):
    draft = tokenizer()
    before = getattr(draft, f"{role}_token")
    other = "<s>" if before != "<s>" else "</s>"
    setattr(draft, f"{role}_token", other)
    number, new = tokenizer().convert_tokens_to_ids(before), tokenizer().convert_tokens_to_ids(other)
    assert (
        f"the {role} token is {number} ({before!r}) in models/target and {new} ({other!r}) in models/draft"
        in refusal(tokenizer(), draft)
    )


def test_a_special_token_that_only_one_has_is_refused():
    draft = tokenizer()
    draft.pad_token = None
    assert "the pad token is 2 ('</s>') in models/target and none in models/draft" in refusal(tokenizer(), draft)


def test_another_decoder_is_refused():
    draft = with_backend(decoder=decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))
    message = refusal(tokenizer(), draft)
    assert "the tokenizer's decoder is" in message and "ByteFallback" in message


def test_another_byte_fallback_is_refused():
    draft = changed(lambda content: content["model"].update(byte_fallback=True))
    assert "byte_fallback is false in models/target and true in models/draft" in refusal(tokenizer(), draft)
    pair = [unigram(byte_fallback=flag) for flag in (True, False)]
    assert "byte_fallback is true in models/target and false in models/draft" in refusal(*pair, 258, 258)
    assert vocabulary(pair[0], unigram(byte_fallback=True), 258, 258) == 258


def test_what_only_encoding_reads_may_differ():
    draft = with_backend(
        normalizer=normalizers.NFC(),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
        decoder=decoders.ByteLevel(add_prefix_space=False, use_regex=False),
    )
    assert draft.backend_tokenizer.to_str() != tokenizer().backend_tokenizer.to_str()
    assert vocabulary(tokenizer(), draft, VOCABULARY, VOCABULARY) == VOCABULARY


def test_the_same_options_within_a_sequence_of_decoders_may_differ():
    def draft(flag, *more):
        return with_backend(decoder=decoders.Sequence([decoders.ByteLevel(add_prefix_space=flag), *more]))

    assert vocabulary(draft(True), draft(False), VOCABULARY, VOCABULARY) == VOCABULARY
    assert "decoder" in refusal(draft(True), draft(True, decoders.Fuse()))


def test_another_start_of_the_text_is_refused():
    where = "what the tokenizer puts in front of a text is"
    assert f"{where} nothing in models/target and 1 ('<s>') in models/draft" in refusal(tokenizer(), with_bos())
    assert f"{where} 1 ('<s>') in models/target and nothing in models/draft" in refusal(with_bos(), tokenizer())
    assert vocabulary(with_bos(), with_bos(), VOCABULARY, VOCABULARY) == VOCABULARY


def test_what_comes_after_a_text_does_not_matter():
    template = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    draft = with_backend(post_processor=template)
    assert draft("x").input_ids[-1] == 2
    assert vocabulary(tokenizer(), draft, VOCABULARY, VOCABULARY) == VOCABULARY


def test_a_token_without_an_embedding_in_the_draft_is_refused():
    message = refusal(tokenizer(), tokenizer(), VOCABULARY, 300)
    assert "it has 300 embeddings, none for id 300 ('<extra_300>'), which models/target may write" in message


def test_a_token_that_the_target_cannot_write_needs_no_embedding():
    assert vocabulary(tokenizer(), tokenizer(), 300, 300) == 300


def test_a_draft_smaller_than_its_own_tokenizer_is_accepted_where_it_covers_the_targets():
    assert vocabulary(tokenizer(), extended("<tool>", "<call>"), 384, 321) == VOCABULARY


def large(last: str) -> PreTrainedTokenizerFast:
    vocab = {f"t{index}": index for index in range(149_999)} | {last: 149_999}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="t0"))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t0")


def test_a_large_vocabulary_is_compared_to_its_end_in_a_second():
    target, draft = large("last"), large("other")
    started = time.process_time()
    assert vocabulary(target, target, 150_000, 150_000) == 150_000
    assert time.process_time() - started < 1
    assert "id 149999 is 'last'" in refusal(target, draft, 150_000, 150_000)
