"""What an architecture is to the pipeline: its blocks, the linears in them, and which of those engines fuse."""

from collections.abc import Iterator
from dataclasses import dataclass

from compressor.errors import CompressError


@dataclass(frozen=True)
class LinearGroup:
    """Linears of one block that read the same input, so that one Hessian serves them all.

    `names` are relative to the block (``self_attn.q_proj``). `fused_as` is the name under which engines run them as one
    matrix (``self_attn.qkv_proj``): such parts must share one global scale. None where they stay apart.
    """

    names: tuple[str, ...]
    fused_as: str | None = None


ATTENTION_AND_GATED_MLP = (
    LinearGroup(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
    LinearGroup(("self_attn.o_proj",)),
    LinearGroup(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
    LinearGroup(("mlp.down_proj",)),
)


@dataclass(frozen=True)
class Family:
    """Names inside a decoder-only checkpoint. A new family is one file that makes one of these.

    `groups` are in the order the block runs them. A family whose blocks differ (dense and mixture-of-experts layers)
    overrides `linear_groups`, which is the only thing the pipeline asks.
    """

    model_types: tuple[str, ...]
    groups: tuple[LinearGroup, ...] = ATTENTION_AND_GATED_MLP
    block_prefix: str = "model.layers.{index}."
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"

    def linear_groups(self, config, index: int) -> tuple[LinearGroup, ...]:
        """Linear groups of block `index` of a model with this transformers `config`."""
        return self.groups

    def block(self, index: int) -> str:
        return self.block_prefix.format(index=index)

    def linears(self, config) -> Iterator[tuple[str, LinearGroup, int]]:
        """Every quantizable linear of the model as (full name, its group, its block index), in order of execution."""
        for index in range(config.num_hidden_layers):
            for group in self.linear_groups(config, index):
                for name in group.names:
                    yield self.block(index) + name, group, index

    def fused(self, config) -> dict[str, str]:
        """Full name of the matrix that engines make of it and its neighbours, for each linear that is such a part."""
        return {
            name: self.block(index) + group.fused_as for name, group, index in self.linears(config) if group.fused_as
        }


def unknown_family(model_type: str, known: list[str]) -> CompressError:
    return CompressError(f"model_type '{model_type}' is not supported; supported: {', '.join(known)}")
