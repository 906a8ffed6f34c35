#!/usr/bin/env python3
"""Greedy speculation against greedy decoding by the target alone, token for token, for every proposer; and the cache
after all its rollbacks against a fresh prefill.

    greedy_agreement.py MODEL QUESTIONS.jsonl [--prompts 20] [--tokens 64] [--out benchmarks/greedy_agreement.json]

MODEL is a Llama-shaped checkpoint. The draft model is its own first layers; Medusa, EAGLE-3 and MTP heads are made
here, of random or copied weights: nearly all they propose is rejected, which is what rolling back has to survive. In
float32 a cache also differs from a prefill by the order of its sums: the row "none" is the target alone, which rolls
nothing back, and --dtype float64 leaves what is stale. QUESTIONS.jsonl is Spec-Bench's; prompts are spread over its
categories. Exits 1 where a token differs.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from compressor.decode import Batch, Decoder, Law, Request, engine
from compressor.decode.decoder import Feed
from compressor.decode.length import Fixed
from compressor.proposers import load
from compressor.proposers.base import Proposer

GREEDY = Law(temperature=0.0)
K, TREE = 4, (3, 2, 1, 1)
DRAFT_LAYERS = 0.8
LONGEST_PROMPT = 512
REDUCED = 8192


def prompts(path: Path, tokenizer: Any, wanted: int) -> list[list[int]]:
    """Token ids of `wanted` questions, taken from the categories in turn."""
    by_category: dict[str, list[list[int]]] = {}
    for line in path.read_text().splitlines():
        question = json.loads(line)
        messages = [{"role": "user", "content": question["turns"][0]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        if len(ids) <= LONGEST_PROMPT:
            by_category.setdefault(question["category"], []).append(ids)
    rounds = max(map(len, by_category.values()))
    return [rows[i] for i in range(rounds) for rows in by_category.values() if i < len(rows)][:wanted]


def generate(decoder: Decoder, proposer: Proposer | None, ids: list[int], tokens: int) -> tuple[list[int], Any, list]:
    """(new tokens, output, how far the cache is from a fresh prefill of what it holds: largest relative difference of a
    layer's keys or values in norm, largest difference of a number)."""
    batch = Batch(decoder, proposer, Fixed(K if proposer else 0))
    text = batch.join(Request(ids, tokens, GREEDY, 0, frozenset()))
    while batch.texts:
        batch.step()
    if text.error is not None:
        raise text.error
    known = ids + text.output.token_ids  # the cache may hold more: what was accepted beyond the limit
    held = min(text.cache.length, len(known))
    fresh = decoder.cache(held)
    decoder.forward([Feed(known[:held], fresh)])  # all of it in one pass
    pairs = [(text.cache.keys[:, :, :held], fresh.keys), (text.cache.values[:, :, :held], fresh.values)]
    norms = [((old - new).flatten(1).norm(dim=1) / new.flatten(1).norm(dim=1)).max().item() for old, new in pairs]
    worst = [max(norms), max((old - new).abs().max().item() for old, new in pairs)]
    return text.output.token_ids, text.output, worst


def cache_differences(runs: list[tuple[list[int], Any, list]]) -> dict[str, float]:
    return {
        "cache_difference_of_a_layer_in_norm": max(run[2][0] for run in runs),
        "cache_difference_of_a_number": max(run[2][1] for run in runs),
    }


def truncated(model: Path, folder: Path) -> None:
    """The model's first layers as a checkpoint of its own."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    count = int(DRAFT_LAYERS * len(whole.model.layers))
    whole.model.layers = whole.model.layers[:count]
    whole.config.num_hidden_layers = count
    whole.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def block(prefix: str, config: Any, width: int, random: Any) -> dict[str, torch.Tensor]:
    """Random weights of one Llama block whose attention reads `width` inputs."""
    hidden, head = config.hidden_size, config.head_dim
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    shapes = {
        "self_attn.q_proj": (heads * head, width),
        "self_attn.k_proj": (kv * head, width),
        "self_attn.v_proj": (kv * head, width),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (config.intermediate_size, hidden),
        "mlp.up_proj": (config.intermediate_size, hidden),
        "mlp.down_proj": (hidden, config.intermediate_size),
    }
    found = {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}
    names = ("input_layernorm", "post_attention_layernorm")
    return found | {f"{prefix}{name}.weight": torch.ones(hidden) for name in names}


def heads(model: Path, work: Path, decoder: Decoder) -> None:
    """Folders `medusa`, `eagle3` and `mtp` (the model with a module in DeepSeek's layout) in `work`."""
    config, generator = decoder.config, torch.Generator().manual_seed(0)
    hidden, vocabulary = config.hidden_size, config.vocab_size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def write(name: str, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        (work / name).mkdir()
        save_file(tensors, work / name / "model.safetensors")
        (work / name / "config.json").write_text(json.dumps(settings))

    head = decoder.embedding.weight.detach()
    medusa = {f"blocks.{i}.layers.0.weight": 0.1 * random(hidden, hidden) for i in range(K)}
    medusa |= {f"lm_heads.{i}.weight": head.clone() for i in range(K)}
    settings = {"num_heads": K, "num_hidden_layers": 1, "hidden_size": hidden, "vocab_size": vocabulary}
    write("medusa", medusa, {"model_type": "medusa", "architectures": ["MedusaModel"], **settings})

    layers = len(decoder.layers)
    kept = torch.randperm(vocabulary, generator=generator)[:REDUCED].sort().values
    eagle = block("midlayer.", config, 2 * hidden, random)
    eagle |= {"midlayer.hidden_norm.weight": torch.ones(hidden), "norm.weight": torch.ones(hidden)}
    eagle |= {"fc.weight": random(hidden, 3 * hidden), "lm_head.weight": head[kept].clone()}
    eagle |= {"d2t": kept - torch.arange(REDUCED)}
    eagle["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, kept, True)
    settings = {**config.to_dict(), "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}
    settings |= {"num_hidden_layers": 1, "draft_vocab_size": REDUCED, "norm_before_residual": False}
    settings["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3],
        "use_aux_hidden_state": True,
    }
    write("eagle3", eagle, settings)

    shutil.copytree(model, work / "mtp")
    root = f"model.layers.{layers}."
    mtp = block(root, config, hidden, random)
    mtp |= {f"{root}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    mtp[f"{root}eh_proj.weight"] = random(hidden, 2 * hidden)
    save_file(mtp, work / "mtp" / "mtp.safetensors")
    index = work / "mtp" / "model.safetensors.index.json"
    shards = sorted(path.name for path in model.glob("*.safetensors"))
    stored = json.loads(index.read_text())["weight_map"] if index.exists() else None
    if stored is None:
        from safetensors import safe_open

        with safe_open(model / shards[0], "pt") as file:
            stored = dict.fromkeys(file.keys(), shards[0])
    stored |= dict.fromkeys(mtp, "mtp.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": stored}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/greedy_agreement.json"))
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = prompts(args.questions, tokenizer, args.prompts)
    decoder = engine.decoder(args.model, dtype=getattr(torch, args.dtype))
    plain = [generate(decoder, None, ids, args.tokens) for ids in rows]
    table: dict[str, Any] = {"none": {"prompts": len(rows), "equal": len(rows), **cache_differences(plain)}}
    print("none", table["none"], flush=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        truncated(args.model, work / "draft")
        heads(args.model, work, decoder)
        named = {"ngram": args.model, "suffix": args.model, f"draft:{work / 'draft'}": args.model}
        named |= {f"medusa:{work / 'medusa'}": args.model, f"eagle3:{work / 'eagle3'}": args.model, "mtp": work / "mtp"}
        for text, target in named.items():
            shapes = [None, TREE] if text.partition(":")[0] in load.DRAWS else [None]
            for branching in shapes:
                proposer = load.build(load.parse(text, target, branching), decoder, target)
                runs = [generate(decoder, proposer, ids, args.tokens) for ids in rows]
                key = text.partition(":")[0] + (" tree" if branching else "")
                accepted = sum(run[1].accepted for run in runs)
                table[key] = {
                    "equal": sum(run[0] == one[0] for run, one in zip(runs, plain, strict=True)),
                    "prompts": len(rows),
                    "proposed": sum(run[1].proposed for run in runs),
                    "accepted": accepted,
                    "tokens_per_cycle": round(1 + accepted / sum(run[1].cycles for run in runs), 3),
                    **cache_differences(runs),
                }
                print(key, table[key], flush=True)
    result = {"dtype": args.dtype, "k": K, "tree": TREE, "tokens": args.tokens, "proposers": table}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(entry["equal"] != entry["prompts"] for entry in table.values()))


if __name__ == "__main__":
    main()
