"""How one linear is stored and run: the format of its weight, and whether its inputs are rounded too."""

from dataclasses import dataclass

from compressor.errors import UsageError
from compressor.formats.base import Format

UNROUNDED = "16bit"
"""Inputs in the model's own dtype, as recipes and passports spell it."""


@dataclass(frozen=True)
class Scheme:
    """`fmt`, in the layout that goes with its inputs; `rounds_inputs`: with `Format.fake_quantize_activation`. Make one
    with `make`."""

    fmt: Format
    rounds_inputs: bool

    @classmethod
    def make(cls, fmt: Format, rounds_inputs: bool) -> "Scheme":
        """Raises UsageError where no engine rounds inputs beside weights of this format."""
        if rounds_inputs and rounded_activations(fmt) is None:
            raise UsageError(
                f"{fmt.name} has no 4-bit or 8-bit activations; set quantization.activations to {UNROUNDED}"
            )
        return cls(fmt.for_inputs(rounds_inputs), rounds_inputs)

    @property
    def activations(self) -> str:
        """ "16bit", "8bit" or "4bit": of the inputs."""
        return (rounded_activations(self.fmt) if self.rounds_inputs else None) or UNROUNDED


def rounded_activations(fmt: Format) -> str | None:
    """ "8bit" or "4bit", whichever inputs engines can round to beside weights of this format; None where neither."""
    rounded = fmt.for_inputs(True).activations_config()
    return None if rounded is None else f"{rounded['num_bits']}bit"
