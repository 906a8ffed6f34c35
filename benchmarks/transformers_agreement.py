#!/usr/bin/env python3
"""Does a bundle give the same logits in transformers as in our runner?

    transformers_agreement.py BUNDLE... [--prompts 12]

transformers must load each bundle without a missing, unexpected or mismatched tensor. The relative error over the
logits of a prompt, ‖ours − theirs‖ / ‖theirs‖, is taken in the bundle's own dtype for each kernel of our runner, and
once more in float32 (transformers' model converted after loading: its weights are the stored ones only where those are
exact in bfloat16, which a scale search sees to). Prints one JSON object a bundle: the mean and the largest error over
the prompts.
"""

import argparse
import json

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from compressor import Bundle
from compressor.decode import Decoder, engine
from compressor.decode.decoder import Feed
from compressor.evals.prompts import acceptance_prompts


def theirs(bundle: Bundle, dtype: torch.dtype):
    asymmetric = "asym" in bundle.passport.quantization.format  # see README: these load decoded only
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if asymmetric else {}
    model, info = AutoModelForCausalLM.from_pretrained(bundle.path, dtype=dtype, output_loading_info=True, **options)
    wrong = {kind: keys for kind, keys in info.items() if keys}
    if wrong:
        raise SystemExit(f"{bundle.path}: transformers reports {wrong}")
    return model.eval()


def errors(ours: Decoder, other, prompts: list[list[int]]) -> dict[str, float]:
    found = []
    with torch.no_grad():
        for ids in prompts:
            expected = other(torch.tensor([ids])).logits[0].float()
            (read,) = ours.forward([Feed(ids, ours.cache(len(ids)), rows=len(ids))])
            found.append(((read.logits.float() - expected).norm() / expected.norm()).item())
    return {"mean": round(sum(found) / len(found), 6), "largest": round(max(found), 6)}


def judge(bundle: Bundle, count: int) -> dict:
    dtype = bundle.passport.target.torch_dtype()
    prompts = acceptance_prompts(bundle.tokenizer(), count)
    report: dict = {"bundle": str(bundle.path), "prompts": len(prompts)}
    stored = theirs(bundle, dtype)
    for kernel in ("dequantized", "auto"):
        model = engine.decoder(bundle.path, dtype=dtype, kernel=kernel)
        report[f"{bundle.passport.target.dtype}, {kernel} kernel"] = errors(model, stored, prompts)
    exact = engine.decoder(bundle.path, dtype=torch.float32, kernel="dequantized")
    report["float32, dequantized"] = errors(exact, torch.nn.Module.float(stored), prompts)  # its own .float() refuses
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--prompts", type=int, default=12)
    args = parser.parse_args()
    for path in args.bundles:
        print(json.dumps(judge(Bundle.open(path), args.prompts)), flush=True)


if __name__ == "__main__":
    main()
