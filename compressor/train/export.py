"""A trained EAGLE-3 head on disk, as vLLM and SGLang load it or in the `speculators` format."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.checkpoint import writer
from compressor.checkpoint.config import CONFIG, read_json_object
from compressor.checkpoint.reader import SINGLE_NAME, ShardReader
from compressor.decode.decoder import Decoder
from compressor.errors import UsageError, naming
from compressor.proposers.eagle3 import Eagle3Proposer, default_aux, plain_name, read_settings
from compressor.train.eagle3 import Eagle3Head, HeadShape

Layout = Literal["vllm", "speculators"]


def tensors(head: Eagle3Head, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """By name: the weights in `dtype`, `d2t` int64 [draft_vocab] (target id - own id) and `t2d` bool [V]."""
    ids = head.target_ids.cpu()
    known = torch.zeros(head.shape.vocab_size, dtype=torch.bool)
    known[ids] = True
    found = {name: value.detach().to("cpu", dtype) for name, value in head.named_parameters()}
    return found | {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def write(
    head: Eagle3Head,
    folder: Path,
    *,
    layout: Layout = "vllm",
    verifier: str = "",
    architectures: list[str] | None = None,
    num_speculative_tokens: int = 3,
) -> None:
    """Write config.json and model.safetensors into `folder`.

    `verifier` and `architectures` say which target the head belongs to; only the `speculators` layout records them.
    Every choice that engines have different defaults for is written out (aux layer ids, norm_before_residual).
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = tensors(head)
    if layout == "speculators":
        found = {_speculators_name(name): value for name, value in found.items()}
        config = _speculators_config(head.shape, verifier, architectures or [], num_speculative_tokens)
    else:
        config = _raw_config(head.shape)
    writer.save_atomic(folder / SINGLE_NAME, found, {"format": "pt"})
    with naming(folder / CONFIG):
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def layout_of(folder: Path) -> Layout:
    """Of the head in `folder`."""
    return "speculators" if "speculators_model_type" in read_json_object(folder / CONFIG) else "vllm"


def load(folder: Path, decoder: Decoder) -> Eagle3Head:
    """A head of either layout as a trainable module, in float32.

    Errors as `Eagle3Proposer.load`; UsageError for a head with parts that are not trained here.
    """
    Eagle3Proposer.load(folder, decoder)  # whatever is wrong with the files
    settings = read_settings(folder)
    config, rope = settings.layer, settings.layer.rope_parameters
    with ShardReader(folder) as reader:
        found = {plain_name(name): reader.get(name) for name in reader.keys()}  # noqa: SIM118 - no mapping
    norms = settings.norm_before_fc or settings.fc_norm or settings.norm_output
    block = config.model_type != "llama" or rope.get("rope_type", "default") != "default" or config.hidden_act != "silu"
    if settings.fmt is not None:
        raise UsageError(f"{folder}: its weights are in {settings.fmt.name}; train the head that it was made from")
    if "embed_tokens.weight" in found or norms or settings.logit_scale != 1 or block:
        raise UsageError(
            f"{settings.path}: heads with an embedding of their own, norms around fc or on the output, a logit_scale, "
            "rope scaling or another block than Llama's are run, not trained"
        )
    for name in ("lm_head.weight", "d2t"):
        if name not in found:
            raise UsageError(f"{folder}: tensor '{name}' is missing; a head that shares the target's is not trained")
    shape = HeadShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=decoder.vocab_size,
        draft_vocab_size=settings.draft_vocab_size,
        aux=settings.aux if settings.aux is not None else default_aux(len(decoder.layers)),
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        max_position_embeddings=config.max_position_embeddings,
        norm_before_residual=settings.norm_before_residual,
    )
    head = Eagle3Head(shape, decoder.embedding.weight.detach(), found["d2t"].long() + torch.arange(len(found["d2t"])))
    state = head.state_dict()
    other = sorted(found.keys() - state.keys() - {"d2t", "t2d"})
    if other:
        raise UsageError(f"{folder}: tensor '{other[0]}' would not be trained; heads with it are run, not trained")
    head.load_state_dict({name: found[name].float() for name in state})
    return head


def _speculators_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _layer(shape: HeadShape) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        # rope_theta twice: transformers 5 reads rope_parameters, engines on older versions the field itself.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
    }


def _raw_config(shape: HeadShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(shape),
        "dtype": "bfloat16",
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.hidden_size,
        "norm_before_residual": shape.norm_before_residual,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(shape.aux),
            "use_aux_hidden_state": True,
            "norm_before_residual": shape.norm_before_residual,
            "norm_before_fc": False,
        },
    }


def _speculators_config(
    shape: HeadShape, verifier: str, architectures: list[str], num_speculative_tokens: int
) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "dtype": "bfloat16",
        "transformer_layer_config": _layer(shape),
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.hidden_size,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": list(shape.aux),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }
