"""A transformers KV cache that can forget its last tokens exactly, on every attention layer."""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

INITIAL_CAPACITY = 256


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer in buffers [batch, heads, capacity, head_dim] that grow by doubling.

    `update` writes behind the valid part and returns views of it, so a decode step copies only its own tokens.
    Sliding-window layers use this same class and keep every token: the attention mask, built by transformers from
    `get_mask_sizes`, hides what lies outside the window. A layer that dropped old tokens (as transformers' own sliding
    layers do) could not bring them back when a rejected token moves the window backwards.
    """

    keys: torch.Tensor  # type: ignore[assignment]
    values: torch.Tensor  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[-1]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[-1]))
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append [batch, heads, n, head_dim] states; returns views [batch, heads, length, head_dim] of all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            capacity = max(end, 2 * self.keys.shape[-2], INITIAL_CAPACITY)
            self.keys = self._grown(self.keys, capacity)
            self.values = self._grown(self.values, capacity)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, buffer: torch.Tensor, capacity: int) -> torch.Tensor:
        grown = buffer.new_empty((*buffer.shape[:2], capacity, buffer.shape[-1]))
        grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1  # transformers' value for "no maximum"

    def reset(self) -> None:
        self.length = 0


class KVCache(Cache):
    """One `KVLayer` per attention layer, made as the model first reaches it. Pass as `model(..., cache=KVCache())`."""

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=KVLayer)

    def rollback(self, length: int) -> None:
        """Forget every token from position `length` on. O(1): later updates overwrite what lies behind.

        Raises ValueError if the cache does not hold that many tokens.
        """
        held = self.get_seq_length()
        if not 0 <= length <= held:
            raise ValueError(f"cannot roll back to {length} tokens: the cache holds {held}")
        for layer in self.layers:
            layer.length = length
