"""Keys and values of one text, in buffers made once, that can forget or rearrange their last tokens exactly."""

from collections.abc import Sequence

import torch


class SequenceCache:
    """`keys` and `values` [layers, kv_heads, capacity, head_dim]; the first `length` positions are valid.

    One allocation a text, at its full capacity (untouched pages cost no memory), freed with the object. A model's pass
    writes behind `length` with `write` and then decides with `keep` or `rollback` what stays. Sliding-window layers
    keep every token too: the window is a matter of the attention mask. A layer that dropped old tokens could not bring
    them back when a rejected token moves the window backwards.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0
        self.written = 0  # positions written so far, committed or not

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put [kv_heads, n, head_dim] states behind the valid part of `layer`; returns views [kv_heads, length + n,
        head_dim] of all of them. Raises ValueError beyond the capacity."""
        end = self.length + keys.shape[1]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions, and {end} are asked for")
        self.keys[layer, :, self.length : end] = keys
        self.values[layer, :, self.length : end] = values
        self.written = end
        return self.keys[layer, :, :end], self.values[layer, :, :end]

    def keep(self, prefix: int, extra: Sequence[int] = ()) -> None:
        """After a pass over n new tokens: commit the first `prefix` of them and then those with the indices `extra`
        (among the n, ascending), moved to lie behind; the others are forgotten. Raises ValueError for tokens that were
        not written."""
        new = self.written - self.length
        if not 0 <= prefix <= new or any(not prefix <= index < new for index in extra):
            raise ValueError(f"cannot keep {prefix} tokens and {list(extra)}: {new} were written")
        end = self.length + prefix
        if list(extra) != list(range(prefix, prefix + len(extra))):
            source = torch.tensor(extra, device=self.keys.device) + self.length
            for buffer in (self.keys, self.values):
                buffer[:, :, end : end + len(extra)] = buffer[:, :, source]  # the right side is a copy
        self.length = self.written = end + len(extra)

    def rollback(self, length: int) -> None:
        """Forget every token from position `length` on. O(1): later writes overwrite what lies behind.

        Raises ValueError if the cache does not hold that many tokens.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} tokens: the cache holds {self.length}")
        self.length = self.written = length
