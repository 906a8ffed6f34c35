"""Tiny random models that write text, and recipe sections as plain attributes, for calibration and evaluation rows."""

from types import SimpleNamespace

import torch
from tiny_models import CONFIGS, VOCABULARY
from transformers import LlamaForCausalLM

EOS = 2  # of tiny_models.tokenizer


def writer(*, vocab_size: int = VOCABULARY, context: int = 4096, mute: bool = False) -> LlamaForCausalLM:
    """One random block over nearly uniform logits; `mute` ends every answer at once."""
    config = CONFIGS["llama"](
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        max_position_embeddings=context,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    if mute:
        model.lm_head = torch.nn.Linear(16, vocab_size).requires_grad_(False)
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()[EOS] = 100
    return model


def calibration_spec(**changes) -> SimpleNamespace:
    source = {"path": None, "dataset": None, "subset": None, "split": "train", "column": "text"}
    return SimpleNamespace(
        **{"kind": "self", "rows": 4, "length": 64, "temperature": 1.0, "top_p": 1.0, **source, **changes}
    )
