"""What an architecture is to the pipeline: its blocks, the linears in them, and which of those engines fuse."""

from collections.abc import Iterator
from dataclasses import dataclass

from compressor.errors import CompressError


@dataclass(frozen=True)
class LinearGroup:
    """Linears of one block that read the same input, so that one Hessian serves them all.

    `names` are relative to the block (``self_attn.q_proj``). `fused_as` is the name under which engines run them as one
    matrix (``self_attn.qkv_proj``): such parts must share one global scale. None where they stay apart.

    What transforms need to know: `norm`, the RMSNorm whose output the group reads, and that nothing else reads; or
    `producer`, the linear whose last output rows become the group's input channel by channel (o_proj: the value heads,
    each repeated for the query heads that share it; down_proj: up, times a function of gate). `writes_residual`: the
    group's output is added to the residual stream.
    """

    names: tuple[str, ...]
    fused_as: str | None = None
    norm: str | None = None
    producer: str | None = None
    value_heads: bool = False  # the producer's rows are value heads
    writes_residual: bool = False


def gated_blocks(
    qkv: tuple[str, ...], gate_up: tuple[str, ...], *, mlp_norm: str = "post_attention_layernorm"
) -> tuple[LinearGroup, ...]:
    """Groups of a block of attention and a gated MLP, each behind a norm. `qkv` and `gate_up`: one matrix each, or the
    parts that engines fuse; the last part holds the value heads, and up. `mlp_norm`: the norm before gate and up."""
    fused_qkv = "self_attn.qkv_proj" if len(qkv) > 1 else None
    fused_gate_up = "mlp.gate_up_proj" if len(gate_up) > 1 else None
    return (
        LinearGroup(qkv, fused_qkv, norm="input_layernorm"),
        LinearGroup(("self_attn.o_proj",), producer=qkv[-1], value_heads=True, writes_residual=True),
        LinearGroup(gate_up, fused_gate_up, norm=mlp_norm),
        LinearGroup(("mlp.down_proj",), producer=gate_up[-1], writes_residual=True),
    )


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
ATTENTION_AND_GATED_MLP = gated_blocks(QKV, GATE_UP)


@dataclass(frozen=True)
class Family:
    """Names inside a decoder-only checkpoint. A new family is one file that makes one of these.

    `groups` are in the order the block runs them. A family whose blocks differ (dense and mixture-of-experts layers)
    overrides `linear_groups`, which is the only thing the pipeline asks.

    `norm_offset`: an RMSNorm multiplies by norm_offset + its weight. `post_norms`: norms between what a linear writes
    and the residual stream, by their names in a block.
    """

    model_types: tuple[str, ...]
    groups: tuple[LinearGroup, ...] = ATTENTION_AND_GATED_MLP
    block_prefix: str = "model.layers.{index}."
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    final_norm: str = "model.norm"
    norm_offset: float = 0.0
    post_norms: tuple[str, ...] = ()

    def linear_groups(self, config, index: int) -> tuple[LinearGroup, ...]:
        """Linear groups of block `index` of a model with this transformers `config`."""
        return self.groups

    def value_rows(self, config) -> tuple[int, int, int]:
        """(number of value heads, elements of a head, query heads that share one) of attention."""
        heads = config.num_attention_heads
        values = getattr(config, "num_key_value_heads", None) or heads
        return values, getattr(config, "head_dim", None) or config.hidden_size // heads, heads // values

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
