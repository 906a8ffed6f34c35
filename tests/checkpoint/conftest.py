"""Tiny checkpoints and GGUF files, generated once per session and copied by tests that damage them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 64, 4, 2, 2, 96
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def tiny_llama_model(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": 128,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(values | changes))).to(torch.bfloat16)


@pytest.fixture(scope="session")
def _sharded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "sharded"
    tiny_llama_model().save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture
def sharded(_sharded: Path, tmp_path: Path) -> Path:
    """A Llama of two layers in several shards with an index; a copy that may be damaged."""
    return Path(shutil.copytree(_sharded, tmp_path / "sharded"))


@pytest.fixture
def single(_sharded: Path, tmp_path: Path) -> Path:
    """The same tensors in one model.safetensors, with random values, without an index."""
    from safetensors.torch import save_file

    folder = tmp_path / "single"
    folder.mkdir()
    shutil.copy(_sharded / "config.json", folder)
    generator = torch.Generator().manual_seed(1)
    save_file({"a": torch.randn(4, 8, generator=generator), "b.weight": torch.ones(3)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def make_gguf() -> Callable[..., dict[str, torch.Tensor]]:
    """`make_gguf(path, pre="smollm", add_bos=False, leave_out=None, extra=None, architecture="llama")` writes a
    byte-level Llama GGUF with Q8_0 matrices and returns the float32 weights a converter must find, by their names in
    transformers."""
    return _write_gguf


def _write_gguf(
    path: Path, *, pre="smollm", add_bos=False, leave_out=None, extra=None, architecture="llama"
) -> dict[str, torch.Tensor]:
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = list(bytes_to_unicode().values())
    tokens = [*specials, *letters, "ĊĊ", "ĠĠ"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(specials) + [1] * (len(tokens) - len(specials)))
    writer.add_token_merges(["Ċ Ċ", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    expected = {}
    for gguf_name, name, shape in _gguf_tensors(len(tokens)):
        if gguf_name == leave_out:
            continue
        expected[name] = _add_tensor(writer, gguf_name, shape)
    for gguf_name, shape in (extra or {}).items():
        _add_tensor(writer, gguf_name, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _gguf_tensors(vocabulary: int) -> list[tuple[str, str, tuple[int, ...]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    rows = [
        ("token_embd.weight", "model.embed_tokens.weight", (vocabulary, HIDDEN)),
        ("output_norm.weight", "model.norm.weight", (HIDDEN,)),
    ]
    for i in range(LAYERS):
        block, layer = f"blk.{i}", f"model.layers.{i}"
        rows += [
            (f"{block}.attn_norm.weight", f"{layer}.input_layernorm.weight", (HIDDEN,)),
            (f"{block}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", (HIDDEN,)),
            (f"{block}.attn_q.weight", f"{layer}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)),
            (f"{block}.attn_k.weight", f"{layer}.self_attn.k_proj.weight", (kv, HIDDEN)),
            (f"{block}.attn_v.weight", f"{layer}.self_attn.v_proj.weight", (kv, HIDDEN)),
            (f"{block}.attn_output.weight", f"{layer}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)),
            (f"{block}.ffn_gate.weight", f"{layer}.mlp.gate_proj.weight", (FFN, HIDDEN)),
            (f"{block}.ffn_up.weight", f"{layer}.mlp.up_proj.weight", (FFN, HIDDEN)),
            (f"{block}.ffn_down.weight", f"{layer}.mlp.down_proj.weight", (HIDDEN, FFN)),
        ]
    return rows


def _add_tensor(writer, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Write a random tensor, quantized if a matrix; returns what it dequantizes to, in transformers' row order."""
    import gguf

    values = np.random.default_rng(sum(name.encode())).standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        writer.add_tensor(name, values)
        return torch.from_numpy(values)
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(values, kind)
    writer.add_tensor(name, blocks, raw_dtype=kind)
    dense = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    if "attn_q." in name or "attn_k." in name:  # llama.cpp interleaves the two halves of each rotary head
        heads = HEADS if "attn_q." in name else KV_HEADS
        dense = dense.reshape(heads, shape[0] // heads // 2, 2, shape[1]).transpose(1, 2).reshape(shape)
    return dense
