"""Many texts decoded one token each at a time, for writing much text; the runner's ragged batch is for serving it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from compressor.decode.decoder import FINAL, Decoder
from compressor.decode.layers import Attention
from compressor.decode.reading import batches_of, pieces
from compressor.errors import UsageError

READ_TOKENS = 2048
"""Tokens of prompts that are read in one pass."""


class LockStep:
    """`rows` texts of at most `capacity` tokens in one rectangular cache, each as long as it is.

    Attention reads all rows in one operation, up to the longest: several times as fast as one by one where there are
    many short texts. What lies behind a row's own end is masked, so that a row's law does not depend on the others.
    """

    def __init__(self, decoder: Decoder, rows: int, capacity: int) -> None:
        """Raises UsageError where memory has no room for the cache."""
        self.decoder = decoder
        shape = (rows, decoder.layers[0].kv_heads, capacity, decoder.layers[0].head_dim)
        # Zeros: what lies behind a row's end has the weight 0, and 0 times the NaN of fresh memory would be NaN.
        try:
            self.keys, self.values = (
                [torch.zeros(shape, dtype=decoder.dtype, device=decoder.device) for _ in decoder.layers]
                for _ in range(2)
            )
        except RuntimeError:  # how torch says that an allocation failed
            size = rows * self.row_bytes(decoder, capacity) / 2**30
            raise UsageError(
                f"a cache of {rows} texts of {capacity} tokens takes {size:.3g} GiB, more than there is; ask for "
                "shorter answers"
            ) from None
        self.lengths = torch.zeros(rows, dtype=torch.long, device=decoder.device)

    @staticmethod
    def row_bytes(decoder: Decoder, capacity: int) -> int:
        """Bytes of one text's keys and values."""
        first = decoder.layers[0]
        return 2 * len(decoder.layers) * first.kv_heads * first.head_dim * capacity * decoder.dtype.itemsize

    @torch.inference_mode()
    def admit(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read `prompts` into `rows`, in place of what they held; logits [len(rows), V] after each."""
        logits: dict[int, Tensor] = {}
        for batch in batches_of([len(prompt) for prompt in prompts], READ_TOKENS):
            caches = [self.decoder.cache(len(prompts[i])) for i in batch]
            for number, out in pieces(self.decoder, [prompts[i] for i in batch], caches):
                logits[batch[number]] = out.logits
            for i, cache in zip(batch, caches, strict=True):
                for index in range(len(self.keys)):
                    self.keys[index][rows[i], :, : cache.length] = cache.keys[index]
                    self.values[index][rows[i], :, : cache.length] = cache.values[index]
                self.lengths[rows[i]] = cache.length
        return torch.cat([logits[i] for i in range(len(prompts))])

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` int64 [rows], one to each row; logits [rows, V] after them."""
        longest = int(self.lengths.max()) + 1
        behind = torch.arange(longest, device=tokens.device) - self.lengths[:, None]
        masks: dict[int | None, Tensor] = {}
        rows = torch.arange(len(tokens), device=tokens.device)

        def mask(window: int | None) -> Tensor:
            if window not in masks:
                hidden = behind > 0 if window is None else (behind > 0) | (behind <= -window)
                zero = torch.zeros(hidden.shape, dtype=self.decoder.dtype, device=tokens.device)
                masks[window] = zero.masked_fill_(hidden, -torch.inf)[:, None, None]
            return masks[window]

        def mix(attention: Attention, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.keys[index][rows, :, self.lengths] = keys
            self.values[index][rows, :, self.lengths] = values
            mixed = F.scaled_dot_product_attention(
                queries.reshape(len(rows), attention.kv_heads, -1, attention.head_dim),
                self.keys[index][:, :, :longest],
                self.values[index][:, :, :longest],
                attn_mask=mask(attention.window),
                scale=attention.scaling,
            )
            return mixed.reshape(len(rows), -1)

        states = self.decoder.states(tokens, self.lengths, mix)
        self.lengths += 1
        return self.decoder.logits(states[FINAL])
