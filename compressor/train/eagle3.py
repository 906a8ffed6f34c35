"""A trainable EAGLE-3 head (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv 2503.01840), with the tensor names and the arithmetic of the format that vLLM loads.

A root is a position q of a text. Step 0 reads the target's states at q and token q+1 and foresees token q+2; step j
reads what step j-1 gave at the same root and token q+1+j and foresees token q+2+j, as in decoding after j drafted
tokens. Step j attends to the step-0 rows of all roots up to q (text that the target has read) and to the rows that the
root itself has drafted since.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head; the target's own where it shares something with it. `aux`: states of the target that it reads,
    k for the residual stream after k layers."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    norm_before_residual: bool = True

    @property
    def widths(self) -> dict[str, int]:
        """Inputs of the linears, by name."""
        hidden = self.hidden_size
        widths = {"fc": len(self.aux) * hidden, "q_proj, k_proj and v_proj": 2 * hidden}
        widths |= {"o_proj": self.num_attention_heads * self.head_dim, "gate_proj, up_proj and lm_head": hidden}
        return widths | {"down_proj": self.intermediate_size}


class RMSNorm(nn.Module):
    """In float32 throughout; what reads it rounds."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width, d = 2 * shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(width, shape.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * d, shape.hidden_size, bias=False)
        self.d, self.group = d, shape.num_attention_heads // shape.num_key_value_heads

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, T, 2H] → [B, T, H]. `earlier`: keys and values of the steps before, to which this step's are added."""
        batch, length, _ = x.shape
        heads = [
            projection(x).view(batch, length, -1, self.d).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        queries, keys = (_rotate(part, *rope).to(heads[2].dtype) for part in heads[:2])
        earlier.append((keys.repeat_interleave(self.group, 1), heads[2].repeat_interleave(self.group, 1)))
        mixed = _attend(queries, earlier)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Midlayer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.norm_before_residual = shape.norm_before_residual

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        x = normed if self.norm_before_residual else hidden.float()
        x = x + self.self_attn(torch.cat([self.input_layernorm(embedded), normed], -1), rope, earlier)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """Its state dict, with `d2t` and `t2d` beside it, is the checkpoint. The embedding is the target's and frozen."""

    embedding: Tensor
    target_ids: Tensor

    def __init__(self, shape: HeadShape, embedding: Tensor, target_ids: Tensor) -> None:
        """`embedding` [V, H]; `target_ids` int64 [draft_vocab], ascending: the target's id of every id of the head."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.aux) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)

    def forward(self, features: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
        """The normed states [B, T, H] of every step, of which the logits are made.

        features [B, T, n_aux · H]: the target's states at positions q; tokens int64 [B, T + steps - 1]: token q+1 and
        on. Padding lies behind the text, where no root looks.
        """
        length = features.shape[1]
        hidden, states = self.fc(features), []
        earlier: list[tuple[Tensor, Tensor]] = []
        embedded = F.embedding(tokens, self.embedding)
        for step in range(steps):
            rope = _rope(step, length, self.shape, hidden.device)
            hidden = self.midlayer(embedded[:, step : step + length], hidden, rope, earlier)
            states.append(self.norm(hidden))
        return states


def _attend(queries: Tensor, earlier: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """queries [B, heads, T, d] over the first step's keys up to their own root and over later steps' of their own root.

    Written out: the later steps add one score a root each, and on the CPU the fused kernel's gradient takes twice as
    long for rows as short as these.
    """
    (keys, values), *own = earlier
    scores = (queries @ keys.transpose(-1, -2)).float()
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    parts = [scores.masked_fill(hidden, -torch.inf)]
    parts += [(queries * key).sum(-1, keepdim=True, dtype=torch.float32) for key, _ in own]
    weights = (torch.cat(parts, -1) * queries.shape[-1] ** -0.5).softmax(-1).to(values.dtype)
    length = keys.shape[-2]
    mixed = weights[..., :length] @ values
    for index, (_, value) in enumerate(own):
        mixed = mixed + weights[..., length + index, None] * value
    return mixed


def _rope(start: int, length: int, shape: HeadShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, d] of positions from `start` on, halves in transformers' order."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    positions = torch.arange(start, start + length, device=device, dtype=torch.float32)
    angles = positions[:, None] / shape.rope_theta**exponents
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
