"""How far the quantized model's distribution is from the reference's: KL, total variation, perplexity, top-1."""

import math

import torch

from compressor.errors import CompressError
from compressor.models.stream import BlockStream

_LOGIT_POSITIONS = 2048  # positions whose logits are alive at a time


def distances(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Sums over positions of everything `compare` averages.

    Args:
        reference, candidate: logits [positions, vocab] of the two models at the same inputs.
        targets: the tokens that followed, int64 [positions].

    Returns sums of `kl` (KL(reference ‖ candidate) in nats), `tv` (total variation), `nll_reference`, `nll` and `top1`
    (positions with the same most likely token), and the count `tokens`.
    """
    log_p = reference.float().log_softmax(-1)
    log_q = candidate.float().log_softmax(-1)
    p = log_p.exp()
    picked = targets[:, None]
    return {
        "kl": (p * (log_p - log_q)).sum(dtype=torch.float64).item(),
        "tv": 0.5 * (p - log_q.exp()).abs().sum(dtype=torch.float64).item(),
        "nll_reference": -log_p.gather(-1, picked).sum().item(),
        "nll": -log_q.gather(-1, picked).sum().item(),
        "top1": (log_p.argmax(-1) == log_q.argmax(-1)).sum().item(),
        "tokens": targets.numel(),
    }


def compare(
    reference: BlockStream, candidate: BlockStream, ids: torch.Tensor, *, batch_size: int = 4, progress
) -> dict:
    """Compare two checkpoints on token rows, holding one block of each in memory.

    Args:
        reference, candidate: streams over the original and the quantized checkpoint (float32 measures the
            quantization alone).
        ids: int64 [rows, length].
        progress: UI progress with `advance`; one step a block and one for the head.

    Returns `kl_nats`, `tv`, `top1_agreement`, `perplexity_reference`, `perplexity` and `tokens`, each a mean over all
    next-token positions. Raises CompressError if a result is not finite.
    """
    rows = ids.split(batch_size)
    hidden = []
    for stream in (reference, candidate):
        hidden.append([stream.embed(batch) for batch in rows])
        stream.release_embedding()
    for index in range(len(reference)):
        for stream, states in zip((reference, candidate), hidden, strict=True):
            with stream.block(index) as layer:
                for i, state in enumerate(states):
                    states[i] = stream.run(index, layer, state)
        progress.advance()
    sums: dict[str, float] = {}
    with reference.head() as reference_logits, candidate.head() as candidate_logits:
        for batch, ours, theirs in zip(rows, *hidden, strict=True):
            for row, a, b in zip(batch, ours, theirs, strict=True):
                targets, a, b = row[1:], a[None, :-1], b[None, :-1]
                for first in range(0, len(targets), _LOGIT_POSITIONS):
                    part = slice(first, first + _LOGIT_POSITIONS)
                    found = distances(reference_logits(a[:, part])[0], candidate_logits(b[:, part])[0], targets[part])
                    for key, value in found.items():
                        sums[key] = sums.get(key, 0.0) + value
    progress.advance()
    if not all(math.isfinite(value) for value in sums.values()):
        raise CompressError("quality: the logits of the reference or the quantized model are not finite")
    tokens = sums["tokens"]
    return {
        "kl_nats": sums["kl"] / tokens,
        "tv": sums["tv"] / tokens,
        "top1_agreement": sums["top1"] / tokens,
        "perplexity_reference": math.exp(sums["nll_reference"] / tokens),
        "perplexity": math.exp(sums["nll"] / tokens),
        "tokens": int(tokens),
    }
