"""How many bytes a model's weights take, counted on a model without memory for them, and how many a device has for weights."""

from dataclasses import dataclass
from typing import Any

import torch

from harvest.errors import HarvestError, ModelError
from harvest.model.blocks import find_blocks, find_decoder
from harvest.model.describe import Description
from harvest.model.device import Placement, free_card_bytes, free_memory_bytes
from harvest.model.load import class_and_config
from harvest.model.tiny import tiny_model


@dataclass(frozen=True)
class Weighed:
    """A model without memory for its weights; and the parameters of each of its blocks, and of its decoder beside them."""

    model: Any
    blocks: list[int]
    beside: int

    def n_bytes(self, n_blocks: int, dtype: str) -> int:
        """The bytes of the decoder's first blocks and what stands beside them."""
        return (sum(self.blocks[:n_blocks]) + self.beside) * int(getattr(torch, dtype).itemsize)


def build(description: Description) -> Weighed:
    """A model of meta tensors, its parameters counted.

    Raises ModelError where it cannot be built, or its blocks are not found.
    """
    if description.source.is_tiny:
        model: Any = tiny_model()
    else:
        try:
            decoder_class, config = class_and_config(description)
            with torch.device("meta"):
                model = decoder_class(config)
        except HarvestError:
            raise
        except Exception as error:
            name = description.source.name
            raise ModelError(f"model: {name} cannot be built from its config: {type(error).__name__}: {error}") from error
    decoder = find_decoder(model, description.n_layers)
    sizes = [_count(block) for block in find_blocks(decoder, description.n_layers)]
    return Weighed(model, sizes, _count(decoder) - sum(sizes))


def free_bytes(placement: Placement) -> int:
    """The memory for weights where a model would be placed: of all its devices, where it is spread."""
    if placement.limits is not None:
        return sum(placement.limits.values())
    if placement.device.type == "cuda":
        return free_card_bytes(placement.device)
    return free_memory_bytes()


def _count(module: torch.nn.Module) -> int:
    return sum(weights.numel() for weights in module.parameters())
