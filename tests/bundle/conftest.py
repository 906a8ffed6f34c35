"""A small, complete, signed bundle: two blocks of a random Llama, encoded by the product's own formats."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compressor import formats, models
from compressor.bundle import Bundle, Passport, environment, finish, ledger, sha256, signing, verify
from compressor.bundle.record_base import MEASURED
from compressor.checkpoint import writer
from compressor.checkpoint.inventory import Inventory
from compressor.errors import CompressError
from compressor.formats.config import quantization_config

HIDDEN, INTERMEDIATE, VOCABULARY, BLOCKS = 64, 128, 96, 2
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def random_llama(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (0.05 * torch.randn(shape, generator=generator)).bfloat16()

    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "model.norm.weight": normal(HIDDEN) + 1}
    for block in range(BLOCKS):
        prefix = f"model.layers.{block}."
        tensors |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in LINEARS.items()}
        tensors |= {
            f"{prefix}{name}.weight": normal(HIDDEN) + 1 for name in ("input_layernorm", "post_attention_layernorm")
        }
    return tensors


def acceptance(target: str, tau: float, conditional: list) -> dict:
    return {
        "task": "evaluation prompts",
        "target": target,
        "k": 3,
        "conditional": conditional,
        "tau": tau,
        "cycles": 240,
        "ci95": [tau - 0.1, tau + 0.1],
        "evidence": MEASURED,
    }


def passport_fields(
    folder: Path, source: Inventory, layers: list[dict], fmt: formats.Format, activations: bool
) -> dict:
    return {
        "created": "2026-11-29T12:00:00Z",
        "recipe": {"name": "tiny", "quantization": {"format": fmt.name}, "run": {"seed": 0}},
        "source": {
            "uri": "example/tiny",
            "kind": "folder",
            "files": {"model.safetensors": "0" * 64},
            "parameters": source.parameters,
            "total_bytes": source.total_bytes,
            "tied": True,
        },
        "target": {
            "architecture": "LlamaForCausalLM",
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "layers": BLOCKS,
            "vocab_size": VOCABULARY,
            "tokenizer_sha256": sha256(folder / "tokenizer.json"),
            "dtype": "bfloat16",
        },
        "quantization": {
            "format": fmt.name,
            "compression_format": fmt.compression_format,
            "bits": fmt.bits,
            "group_size": fmt.group_size,
            "bits_per_weight": fmt.bits_per_weight,
            "activations": formats.Scheme(fmt, activations).activations,
            "method": "rtn",
            "calibration": {"digest": "1" * 64, "kind": "self", "rows": 8, "length": 64},
            "layers": layers,
            "ignored": ["lm_head", "model.layers.1.self_attn.o_proj"],
        },
        "proposer": {
            "kind": "ngram",
            "num_speculative_tokens": 3,
            "settings": {"prompt_lookup_min": 1, "prompt_lookup_max": 4},
        },
        "verifier": {"rule": "accept with min(1, p/q)", "law": {"temperature": 0.0}},
        "workload": {"prompts": 8, "max_new_tokens": 64},
        "outcomes": {
            "quality": [
                {
                    "name": "self",
                    "dataset": "2" * 64,
                    "tokens": 8176,
                    "baseline": 12.5,
                    "quantized": 13.25,
                    "kl_nats": 0.08,
                    "tv": 0.11,
                    "top1_agreement": 0.87,
                    "evidence": MEASURED,
                }
            ],
            "acceptance": [
                acceptance("baseline", 1.72, [0.41, 0.62, 0.73]),
                acceptance("quantized", 1.64, [0.38, 0.6, None]),
            ],
        },
        "ledger": ledger.measure(folder, source),
        "kernels": [{"layer_pattern": "model.layers.*", "kernel": "none", "path": "dequantized", "proof": "not run"}],
        "environment": environment.capture(),
        "decisions": [{"what": "lm_head kept in bfloat16", "why": "engines read it so"}],
    }


def _matrix(layer: str) -> str:
    """What engines run the linear as."""
    return models.get("llama").fused(SimpleNamespace(**CONFIG)).get(layer, layer)


def build(root: Path, name: str, private_key: Path, *, activations: bool = False, seed: int = 0) -> Path:
    """Encode, shard, describe and sign; returns the bundle's folder."""
    fmt, original = formats.get(name).for_inputs(activations), random_llama(seed)
    source, folder = root / "source", root / "bundle"
    source.mkdir(parents=True)
    folder.mkdir()
    writer.save_atomic(source / "model.safetensors", original)
    (source / "config.json").write_text(json.dumps(CONFIG))
    layers, tensors = [], {}
    matrices: dict[str, list[torch.Tensor]] = {}
    for key, weight in original.items():
        matrices.setdefault(_matrix(key.removesuffix(".weight")), []).append(weight)
    for key, weight in original.items():
        layer = key.removesuffix(".weight")
        if layer.rpartition(".")[0].rpartition(".")[2] not in ("self_attn", "mlp") or layer.endswith(
            "1.self_attn.o_proj"
        ):
            tensors[key] = weight
            continue
        encoded = fmt.encode(weight, global_scale=fmt.global_scale(matrices[_matrix(layer)]))
        if activations and (scale := fmt.input_global_scale(4.0)) is not None:
            encoded["input_global_scale"] = scale
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in encoded.items()}
        layers.append(
            {
                "name": layer,
                "shape": list(weight.shape),
                "format": name,
                "error": 0.01 * (1 + len(layers) % 5),
                "sqnr_db": 20.0,
                "packed_bytes": sum(tensor.nbytes for tensor in encoded.values()),
                "original_bytes": weight.nbytes,
            }
        )
    writer.save_atomic(root / "parts.safetensors", tensors)
    writer.assemble([root / "parts.safetensors"], folder, max_shard_bytes=40_000)
    ignore = ["lm_head", "model.layers.1.self_attn.o_proj"]
    config = CONFIG | {"quantization_config": quantization_config(fmt, activations=activations, ignore=ignore)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    fields = passport_fields(folder, Inventory.read(source), layers, fmt, activations)
    finish(folder, Passport.make(**fields), private_key)
    return folder


@pytest.fixture(scope="session")
def keys(tmp_path_factory) -> tuple[Path, Path]:
    return signing.ensure_keypair(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="session")
def built(tmp_path_factory, keys) -> Callable[..., Path]:
    """Bundles by format, activations and seed, made once; not to be changed."""
    made: dict[tuple, Path] = {}

    def get(name: str = "int4-g32", *, activations: bool = False, seed: int = 0) -> Path:
        key = (name, activations, seed)
        if key not in made:
            root = tmp_path_factory.mktemp(name)
            made[key] = build(root, name, keys[0], activations=activations, seed=seed)
        return made[key]

    return get


@pytest.fixture
def bundle(built, tmp_path) -> Path:
    """A copy of the INT4 bundle, to be damaged."""
    return shutil.copytree(built(), tmp_path / "bundle")


@pytest.fixture
def lie(keys) -> Callable[[Path, Callable[[dict], None]], None]:
    """Change the passport of a bundle and sign the result with the right key."""

    def change(folder: Path, edit: Callable[[dict], None]) -> None:
        fields = Bundle.open(folder).passport.model_dump(mode="json")
        edit(fields)
        (folder / "passport.json").write_text(Passport.make(**fields).to_json())
        signing.sign(folder, keys[0])

    return change


@pytest.fixture
def refusal(keys) -> Callable[[Path], str]:
    """Verify a bundle that must be refused; returns the message, which is one line."""

    def verify_and_fail(folder: Path, public_key: Path = keys[1]) -> str:
        with pytest.raises(CompressError) as caught:
            verify.verify(folder, public_key)
        assert caught.value.exit_code == 1
        message = str(caught.value)
        assert "\n" not in message
        return message

    return verify_and_fail
