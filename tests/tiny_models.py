"""Tiny random checkpoints of every supported family, made through transformers' own classes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 320
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
CONFIGS = {
    "llama": lambda **kw: LlamaConfig(**{**SHAPE, "tie_word_embeddings": False, **kw}),
    "llama-tied": lambda **kw: LlamaConfig(**{**SHAPE, "tie_word_embeddings": True, **kw}),
    "mistral": lambda **kw: MistralConfig(**{**SHAPE, "sliding_window": 8, **kw}),
    "qwen2": lambda **kw: Qwen2Config(**{**SHAPE, **kw}),
    "qwen3": lambda **kw: Qwen3Config(**{**SHAPE, "head_dim": 16, "tie_word_embeddings": True, **kw}),
    "gemma3": lambda **kw: Gemma3TextConfig(
        **{
            **SHAPE,
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            **kw,
        }
    ),
    "phi3": lambda **kw: Phi3Config(**{**SHAPE, **kw}),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 320 entries without merges: any text can be encoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    vocab |= {f"<extra_{i}>": i for i in range(len(vocab), VOCABULARY)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    return fast


def sentencepiece(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of `words` behind <unk>, <s> and </s> that decodes like Llama 2's: ▁ is a space, bytes <0x…> make up
    characters, and a text's first space is taken away."""
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    inner = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True))
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(strip)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    return fast


def random_model(kind: str = "llama", *, std: float = 0.12, dtype=torch.float32, seed: int = 0, **config):
    """A random model of `kind`, its weights larger than transformers' initial 0.02, so that logits differ from
    uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**config), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=std)
        elif "gemma" not in kind:
            torch.nn.init.uniform_(parameter, 0.6, 1.4)
    return model.to(dtype).eval().requires_grad_(False)


def save(
    folder: Path, kind: str = "llama", *, dtype=torch.bfloat16, seed: int = 0, shard: str = "60KB", **config
) -> Path:
    """Write a random model of `kind` with several shards and a tokenizer into `folder`."""
    random_model(kind, dtype=dtype, seed=seed, **config).save_pretrained(folder, max_shard_size=shard)
    tokenizer().save_pretrained(folder)
    return Path(folder)


def save_rows(folder: Path) -> Path:
    """Write rows of random ids, int64 [6, 32], for a model of this file; the path of the file."""
    path = folder / "rows.safetensors"
    save_file({"ids": torch.randint(3, VOCABULARY, (6, 32), generator=torch.Generator().manual_seed(3))}, path)
    return path


def edit_config(folder: Path, **changes) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
