"""Folded norms and rotations leave the model what it is; a wrong fold is seen before anything is rounded."""

from dataclasses import replace

import pytest
import tiny_models as tiny
import torch
from tiny_transforms import KINDS, exactness, refused, save

from compressor import models
from compressor.errors import CompressError, UsageError
from compressor.models.skeleton import model_config
from compressor.transform import check, norms, rotate
from compressor.transform.view import TransformedWeights


def folded(family, config, get):
    return [norms.fold(family, config, get)]


def r1(family, config, get):
    return [norms.fold(family, config, get), rotate.r1(family, config, 3)]


def r2(family, config, get):
    return [rotate.r2(family, config, 3)]


def both(family, config, get):
    return r1(family, config, get) + r2(family, config, get)


@pytest.mark.parametrize("make", [folded, r1, r2, both])
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_the_same_function_in_float32(tmp_path, kind, make):
    folder = save(tmp_path, kind)
    if kind == "gemma3" and make in (r1, both):
        with pytest.raises(UsageError, match=r"R1 cannot be folded into gemma3_text: its post_attention_layernorm"):
            exactness(folder, make)
        return
    found = exactness(folder, make)
    assert 0 < found.max_logit_difference <= 1e-4 and found.dtype == "float32"
    assert found.tokens == 64


@pytest.mark.parametrize("make", [folded, r1])
def test_an_untied_model_gets_no_second_head_and_a_tied_one_does(tmp_path, make):
    for kind, added in (("llama", []), ("llama-tied", ["lm_head.weight"])):
        folder = save(tmp_path / kind, kind)
        config, _ = model_config(folder)
        family = models.get(config.model_type)
        get = TransformedWeights(folder, family, config, []).get
        view = TransformedWeights(folder, family, config, make(family, config, get))
        assert view.added() == added and view.untied == bool(added)
        assert view.config.tie_word_embeddings is False
        assert config.tie_word_embeddings is bool(added), "the source's own config must stay"


def test_a_rotation_of_heads_leaves_a_tied_model_tied(tmp_path):
    folder = save(tmp_path, "llama-tied")
    config, _ = model_config(folder)
    family = models.get(config.model_type)
    view = TransformedWeights(folder, family, config, [rotate.r2(family, config, 0)])
    assert view.added() == [] and view.config.tie_word_embeddings is True


def test_a_folded_norm_is_one_in_its_familys_convention(tmp_path):
    for kind, one in (("llama", 1.0), ("gemma3", 0.0)):
        folder = save(tmp_path / kind, kind)
        config, _ = model_config(folder)
        family = models.get(config.model_type)
        get = TransformedWeights(folder, family, config, []).get
        view = TransformedWeights(folder, family, config, [norms.fold(family, config, get)])
        for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
            assert set(view.get(name).tolist()) == {one}


def test_tensors_keep_their_dtype_and_those_that_do_not_change_their_bytes(tmp_path):
    folder = tiny.save(tmp_path, "llama")
    config, _ = model_config(folder)
    family = models.get(config.model_type)
    plain = TransformedWeights(folder, family, config, [])
    view = TransformedWeights(folder, family, config, [rotate.r2(family, config, 0)])
    name = "model.layers.0.self_attn.v_proj.weight"
    assert view.get(name).dtype == torch.bfloat16 and not torch.equal(view.get(name), plain.get(name))
    precise = TransformedWeights(folder, family, config, view.transforms, torch.float32).get(name)
    assert precise.dtype == torch.float32 and torch.equal(precise.bfloat16(), view.get(name))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(view.get(name), plain.get(name))


# ------------------------------------------------------------------ wrong folds


def broken(transforms, name, change):
    """The last transform with another change of the tensors whose name ends with `name`."""
    last = transforms[-1]
    return [
        *transforms[:-1],
        replace(last, changes={k: change if k.endswith(name) else v for k, v in last.changes.items()}),
    ]


def test_q_in_place_of_its_transpose_is_refused(tmp_path):
    def wrong(family, config, get):
        q = rotate.r1_rotation(config, 3)
        return broken(r1(family, config, get), "mlp.down_proj.weight", lambda w: q.inverse(w.mT).mT)

    message = refused(save(tmp_path, "llama"), wrong)
    assert "transform norm folding + R1 changes" in message


def test_a_rotation_that_forgets_a_tensor_is_refused(tmp_path):
    folder = save(tmp_path, "llama-biased")
    for name in ("embed_tokens.weight", "o_proj.bias", "lm_head.weight", "1.mlp.gate_proj.weight"):
        refused(folder, lambda *args, name=name: broken(r1(*args), name, lambda tensor: tensor))
    for name in ("v_proj.weight", "v_proj.bias", "o_proj.weight"):
        assert "transform R2 changes" in refused(
            folder, lambda *args, name=name: broken(r2(*args), name, lambda tensor: tensor)
        )


def test_a_missing_one_in_gemmas_norms_is_refused(tmp_path):
    folder = save(tmp_path, "gemma3")
    family = models.get("gemma3_text")
    refused(folder, folded, replace(family, norm_offset=0.0))
    refused(save(tmp_path / "llama", "llama"), folded, replace(models.get("llama"), norm_offset=1.0))


def test_a_norm_that_feeds_other_linears_than_the_family_says_is_refused(tmp_path):
    family = models.get("gemma3_text")
    groups = tuple(replace(g, norm="post_attention_layernorm") if "gate" in g.names[0] else g for g in family.groups)
    refused(save(tmp_path, "gemma3"), folded, replace(family, groups=groups))


def test_a_rotation_without_folded_norms_is_refused(tmp_path):
    refused(save(tmp_path, "llama"), lambda family, config, get: [rotate.r1(family, config, 3)])


def test_q_and_k_rows_of_phi3_must_not_be_rotated_with_v(tmp_path):
    def wrong(family, config, get):
        q = rotate.rotation(16, 4)
        return broken(r2(family, config, get), "0.self_attn.qkv_proj.weight", lambda w: rotate.left(q, w))

    refused(save(tmp_path, "phi3"), wrong)


def test_float64_decides_where_float32_cannot_tell(tmp_path, monkeypatch):
    folder = save(tmp_path, "llama")
    monkeypatch.setattr(check, "TOLERANCE", 1e-7)
    exact = exactness(folder, r2)
    assert exact.dtype == "float64" and exact.max_logit_difference <= 1e-7


def test_a_quantized_checkpoint_is_not_transformed(tmp_path, monkeypatch):
    folder = tiny.save(tmp_path, "llama")
    config, _ = model_config(folder)
    monkeypatch.setattr(
        "compressor.transform.view.Weights.__init__", lambda self, f: setattr(self, "packed", {"a": []})
    )
    with pytest.raises(CompressError, match="quantized already"):
        TransformedWeights(folder, models.get("llama"), config, [])
