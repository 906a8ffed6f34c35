"""Dense weights by their original names, from a plain or a packed checkpoint."""

from pathlib import Path

import torch

from compressor.checkpoint.config import CONFIG, read_config
from compressor.checkpoint.reader import ShardReader, check_finite
from compressor.errors import CompressError
from compressor.formats import Scheme, quantized_layers
from compressor.formats.config import schemes_from_config


class Weights:
    """Reads a checkpoint folder tensor by tensor; compressed-tensors layers come out decoded.

    Args:
        folder: config.json and safetensors shards.

    `packed` maps each quantized layer's name to its on-disk suffixes (``weight_packed``, ``weight_scale`` …), `schemes`
    to how it is stored and run.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.reader = ShardReader(self.folder)
        quantization = read_config(self.folder).get("quantization_config")
        self.packed: dict[str, list[str]] = {}
        self.schemes: dict[str, Scheme] = {}
        if quantization is not None:
            self.packed = quantized_layers(self.reader.keys())
            try:
                found = schemes_from_config(quantization)
                for layer in self.packed:
                    scheme = found.of(layer)
                    if scheme is None:
                        raise CompressError(f"quantization_config: no target names '{layer}', which is quantized")
                    self.schemes[layer] = scheme
            except CompressError as error:
                raise CompressError(f"{self.folder / CONFIG}: {error}") from None

    def layer_tensors(self, layer: str) -> dict[str, torch.Tensor]:
        """On-disk tensors of one packed layer, by suffix."""
        return {suffix: self.reader.get(f"{layer}.{suffix}") for suffix in self.packed[layer]}

    def get(self, name: str) -> torch.Tensor:
        """The dense tensor `name` in its stored dtype (float32 when it had to be decoded).

        Raises CompressError for a missing tensor, and for NaN or Inf in one, naming file and tensor.
        """
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and layer in self.packed:
            return self.schemes[layer].fmt.decode(self.layer_tensors(layer))
        tensor = self.reader.get(name)
        check_finite(name, tensor, self.reader.file_of(name))
        return tensor
