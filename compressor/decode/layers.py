"""One decoder block of any supported family, on tokens of several texts at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.decode.cache import SequenceCache
from compressor.decode.linear import Linear
from compressor.errors import CompressError, brief

Rope = tuple[Tensor, Tensor]
WINDOW_IN_CONFIG = ("mistral", "phi3")
"""Families in which every layer has the window of the config. The others say it at the module, or have none whatever
their config says."""


@dataclass
class Span:
    """The tokens [start, start + count) of a pass, which belong to one text.

    `ancestors` [count, count] bool: which of them a token may attend to, besides everything in the cache; None where
    that is each one up to itself.
    """

    start: int
    count: int
    cache: SequenceCache
    ancestors: Tensor | None = None
    _masks: dict = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.count

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """What is added to the scores, [repeats · count, length + count]: 0 or -inf; None where all may be seen. Made
        once a pass for every kind of layer."""
        key = (window, repeats)
        if key not in self._masks:
            self._masks[key] = self._mask(window, repeats, dtype, device)
        return self._masks[key]

    def _mask(self, window: int | None, repeats: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        length = self.cache.length
        total = length + self.count
        if self.count == 1 and (window is None or total <= window):
            return None
        sees = torch.ones(self.count, total, dtype=torch.bool)
        among = self.ancestors if self.ancestors is not None else sees[:, length:].tril()
        sees[:, length:] = among
        if window is not None:
            sees &= self._positions()[:, None] - torch.cat([torch.arange(length), self._positions()]) < window
        mask = torch.zeros(self.count, total, dtype=dtype).masked_fill_(~sees, -torch.inf)
        return mask.repeat(repeats, 1).to(device)

    def _positions(self) -> Tensor:
        """Position of every token in its text: a node of a tree lies one behind its parent, that is, behind as many
        tokens as it sees."""
        if self.ancestors is None:
            return torch.arange(self.cache.length, self.cache.length + self.count)
        return self.cache.length + self.ancestors.sum(1) - 1


class Norm:
    """RMSNorm of the families, rounded where transformers rounds: x/rms(x) and then ·w, or in Gemma ·(1 + w) in float32
    at once."""

    def __init__(self, module: Any) -> None:
        self.eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        self.offset = type(module).__name__.startswith("Gemma")
        self.wide = torch.promote_types(module.weight.dtype, torch.float32)
        self.weight = 1.0 + module.weight.to(self.wide) if self.offset else module.weight

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(self.wide)  # written out: F.rms_norm is a dozen operators on the CPU, and slower
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype) if self.offset else self.weight * wide.to(x.dtype)


class Attention:
    """Grouped-query attention of one block: projections, optional norms of queries and keys, rotary embedding."""

    def __init__(self, module: Any, config, *, pack: bool) -> None:
        self.head_dim: int = module.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.scaling: float = module.scaling
        stated = config if config.model_type in WINDOW_IN_CONFIG else module
        self.window: int | None = getattr(stated, "sliding_window", None)
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise CompressError(f"sliding_window: {brief(self.window)} is not a positive integer")
        if getattr(config, "attn_logit_softcapping", None) is not None:
            raise CompressError(f"model_type '{config.model_type}': attn_logit_softcapping is not supported")
        names = ("qkv_proj",) if hasattr(module, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        self.qkv = Linear([getattr(module, name) for name in names], pack=pack)
        self.out = Linear([module.o_proj], pack=pack)
        self.q_norm = Norm(module.q_norm) if hasattr(module, "q_norm") else None
        self.k_norm = Norm(module.k_norm) if hasattr(module, "k_norm") else None

    def __call__(self, x: Tensor, rope: Rope, spans: "list[Span] | Mixer", index: int) -> Tensor:
        """x [N, in] → [N, hidden]; writes keys and values as layer `index` of every span's cache."""
        states = self.qkv(x).view(len(x), -1, self.head_dim)
        turned, values = states[:, : self.heads + self.kv_heads], states[:, self.heads + self.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            turned = torch.cat([self.q_norm(turned[:, : self.heads]), self.k_norm(turned[:, self.heads :])], 1)
        turned = rotate(turned, *rope)
        if not isinstance(spans, list):
            return self.out(spans(self, index, turned[:, : self.heads], turned[:, self.heads :], values))
        outputs = [
            self._attend(
                turned[span.start : span.end, : self.heads],
                *span.cache.write(
                    index,
                    turned[span.start : span.end, self.heads :].transpose(0, 1),
                    values[span.start : span.end].transpose(0, 1),
                ),
                span,
            )
            for span in spans
        ]
        return self.out(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, span: Span) -> Tensor:
        """queries [n, heads, d]; keys, values [kv_heads, S, d] → [n, heads · d].

        The queries of one key head become rows of one matrix, so that keys are read once for all of them. A single
        token has too few rows for that to be worth a second thread's idling: its heads are worked on apart.
        """
        count, group = span.count, self.heads // self.kv_heads
        mask = span.mask(self.window, group, queries.dtype, queries.device)
        if count == 1 and mask is None:
            apart = queries.view(1, self.heads, 1, self.head_dim)
            mixed = F.scaled_dot_product_attention(
                apart, keys[None], values[None], scale=self.scaling, enable_gqa=group > 1
            )
            return mixed.view(1, -1)
        rows = queries.view(count, self.kv_heads, group, self.head_dim).permute(1, 2, 0, 3)
        rows = rows.reshape(1, self.kv_heads, group * count, self.head_dim)
        mixed = F.scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask, scale=self.scaling)
        return mixed.view(self.kv_heads, group, count, self.head_dim).permute(2, 0, 1, 3).reshape(count, -1)


class Mixer(Protocol):
    """Attends for all tokens of a pass at once, in another way than span by span."""

    def __call__(self, attention: Attention, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """queries [N, heads, d], keys and values [N, kv_heads, d] of layer `index` → [N, heads · d]."""
        ...


class Layer:
    """One block: attention and gated MLP on the residual stream, with two norms or, as in Gemma, four."""

    def __init__(self, block: Any, config, *, pack: bool) -> None:
        self.attention = Attention(block.self_attn, config, pack=pack)
        self.kv_heads, self.head_dim = self.attention.kv_heads, self.attention.head_dim
        self.mlp = GatedMLP(block.mlp, pack=pack)
        self.before_attention = Norm(block.input_layernorm)
        if hasattr(block, "pre_feedforward_layernorm"):
            self.after_attention: Callable[[Tensor], Tensor] = Norm(block.post_attention_layernorm)
            self.before_mlp = Norm(block.pre_feedforward_layernorm)
            self.after_mlp: Callable[[Tensor], Tensor] = Norm(block.post_feedforward_layernorm)
        else:
            self.after_attention = self.after_mlp = _same
            self.before_mlp = Norm(block.post_attention_layernorm)

    def __call__(self, x: Tensor, rope: Rope, spans: list[Span] | Mixer, index: int) -> Tensor:
        """x [N, hidden] → [N, hidden]."""
        x = x + self.after_attention(self.attention(self.before_attention(x), rope, spans, index))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


class GatedMLP:
    """down(act(gate(x)) · up(x))."""

    def __init__(self, module: Any, *, pack: bool) -> None:
        names = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
        self.gate_up = Linear([getattr(module, name) for name in names], pack=pack)
        self.down = Linear([module.down_proj], pack=pack)
        self.activation = getattr(module, "act_fn", None) or module.activation_fn

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, d] by cos and sin [N, 1, r]: halves of the first r elements turn together (Su et
    al., 2021, in the half-split order of transformers); the rest stays."""
    size = cos.shape[-1]
    turned = x if size == x.shape[-1] else x[..., :size]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], -1)


def _same(x: Tensor) -> Tensor:
    return x
