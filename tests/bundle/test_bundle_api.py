"""`Bundle` opens, verifies and runs what `finish` wrote."""

import shutil

import pytest

from compressor.bundle import Bundle, finish, signing, verify
from compressor.decode import Adaptive, Law, engine
from compressor.errors import CompressError, UsageError
from compressor.proposers import load

GREEDY = Law(temperature=0.0, top_k=None, top_p=1.0)
PROMPT = [5, 9, 5, 9, 5, 9, 5]


def test_opening_reads_the_passport(built):
    bundle = Bundle.open(str(built()))
    assert bundle.path == built()
    assert bundle.passport.quantization.format == "int4-g32"


def test_a_folder_without_a_passport_is_no_bundle(tmp_path):
    with pytest.raises(CompressError, match=r"passport\.json: not found"):
        Bundle.open(tmp_path)


def test_it_verifies_with_a_given_key_or_with_the_users_own(built, keys, monkeypatch, tmp_path):
    bundle = Bundle.open(built())
    bundle.verify(public_key=str(keys[1]))
    monkeypatch.setenv("COMPRESS_KEYS", str(keys[1].parent))
    bundle.verify()
    monkeypatch.setenv("COMPRESS_KEYS", str(tmp_path / "other"))
    signing.ensure_keypair()
    with pytest.raises(CompressError, match="wrong key"):
        bundle.verify()


def test_finishing_again_writes_the_same_bytes_and_a_new_signature(bundle, keys):
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    finish(bundle, Bundle.open(bundle).passport, keys[0])
    after = {path.name: path.read_bytes() for path in bundle.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"model.sig"}  # ECDSA is randomized
    verify.verify(bundle, keys[1])


def test_finishing_without_a_usable_key_says_so_and_leaves_no_signature(bundle, tmp_path):
    (bundle / "model.sig").unlink()
    (tmp_path / "key").write_text("nothing")
    with pytest.raises(CompressError, match="not a PEM private key"):
        finish(bundle, Bundle.open(bundle).passport, tmp_path / "key")
    assert not (bundle / "model.sig").exists()


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4"])
def test_the_runner_gives_the_same_greedy_tokens_with_and_without_proposals(built, name):
    bundle = Bundle.open(built(name))
    plain = bundle.runner(proposer="none").generate(PROMPT, max_new_tokens=16, law=GREEDY, seed=0)
    drafted = bundle.runner(num_speculative_tokens=2).generate(PROMPT, max_new_tokens=16, law=GREEDY, seed=0)
    assert plain.token_ids == drafted.token_ids
    assert plain.proposed == 0
    assert drafted.proposed > 0


def test_the_runner_looks_up_with_the_recorded_window(built, lie, tmp_path):
    folder = shutil.copytree(built(), tmp_path / "bundle")
    lie(folder, lambda fields: fields["proposer"]["settings"].update(prompt_lookup_min=2, prompt_lookup_max=3))
    assert Bundle.open(folder).runner().proposer.sizes == range(2, 4)


def test_an_unknown_proposer_is_refused_before_anything_is_loaded(built):
    with pytest.raises(UsageError, match="proposer 'eagle9' is unknown; one of none, ngram, suffix, mtp"):
        Bundle.open(built()).runner(proposer="eagle9")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rule": "medusa"}, "^rule: 'medusa' is not one of exact, typical$"),
        ({"kernel": "gpu"}, "^kernel: 'gpu' is not one of auto, cpu-int4, dequantized$"),
        ({"num_speculative_tokens": 65}, "^num_speculative_tokens: 65: a draft can have 64 tokens; lower it$"),
        ({"num_speculative_tokens": "auto"}, "'auto' is neither an integer nor a length such as"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: -1 is negative"),
        ({"num_speculative_tokens": Adaptive(65)}, "num_speculative_tokens: 65: "),
        ({"proposer": "mtp", "branching": [9, 9, 9]}, "^branching: 9,9,9: its tree has more than the 64 nodes"),
        ({"proposer": "mtp", "branching": [2, 0]}, r"^branching: \[2, 0\] is not a list of positive integers"),
        ({"proposer": "mtp", "branching": [2, 1, 1, 1]}, "its 4 levels are more than num_speculative_tokens"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_loaded(built, monkeypatch, arguments, says):
    loaded = []
    monkeypatch.setattr(engine, "decoder", lambda *arguments, **options: loaded.append(options) or 1 / 0)
    with pytest.raises(UsageError, match=says):
        Bundle.open(built()).runner(**arguments)
    assert not loaded
    with pytest.raises(ZeroDivisionError):
        Bundle.open(built()).runner(proposer="mtp", branching=[4, 15], rule="typical", kernel="dequantized")
    assert loaded


def test_a_draft_model_gets_the_kernel_of_the_target(built, monkeypatch):
    kernels = []
    monkeypatch.setattr(load, "build", lambda *arguments, kernel: kernels.append(kernel))
    for kernel in ("auto", "dequantized"):
        Bundle.open(built()).runner(kernel=kernel)
    assert kernels == ["auto", "dequantized"]


def test_a_bundle_without_a_usable_tokenizer_says_so_in_one_line(built):
    with pytest.raises(CompressError, match="no usable tokenizer") as caught:
        Bundle.open(built()).tokenizer()
    assert "\n" not in str(caught.value)
