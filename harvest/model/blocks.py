"""A model's decoder and its blocks: where they are, and a class of model that has only the first of them.

What lies above the deepest asked block is never run, so it need not be loaded either. Cutting the config instead, to fewer layers, would
change what a model computes from its depth, and lists that the config holds for each layer; so the model is made as its config says, on
the meta device, and the blocks and the head that nobody needs are taken out before the weights come.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from harvest.errors import ModelError

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class LoadedDecoder:
    """A decoder that is ready for inference, and those of its blocks that are loaded: the first of the model, or all.

    device: where token ids go in; a block may lie elsewhere.
    is_cut: whether the blocks above were left out when it was made.
    places: of each block, where the weights are spread: cuda:0, cpu or disk.
    """

    module: torch.nn.Module
    blocks: Sequence[torch.nn.Module]
    device: torch.device = _CPU
    is_cut: bool = False
    places: Sequence[str] = ()

    def where(self) -> str:
        """Where the blocks lie: `blocks 0-20 on cuda:0, 21-31 on disk`."""
        runs = [list(run) for _, run in itertools.groupby(range(len(self.places)), key=self.places.__getitem__)]
        named = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        return "blocks " + ", ".join(f"{numbers} on {self.places[run[0]]}" for numbers, run in zip(named, runs, strict=True))

    def drop_above(self, n_blocks: int) -> None:
        """Free the weights of the blocks above the first `n_blocks`, which must not be run any more."""
        for block in self.blocks[n_blocks:]:
            block.to("meta")


def decoder_of(model: Any, n_layers: int, device: torch.device = _CPU) -> LoadedDecoder:
    """The decoder of a model of so many layers, whole or cut by `cut_blocks`. Raises ModelError where no blocks are found."""
    path = getattr(model, "harvest_blocks", None)
    if path is None:
        decoder = find_decoder(model, n_layers)
        return LoadedDecoder(decoder, list(find_blocks(decoder, n_layers)), device)
    blocks = model.get_submodule(path)
    decoder = next(part for part in _candidates(model) if any(module is blocks for module in part.modules()))
    return LoadedDecoder(decoder, list(blocks), device, is_cut=len(blocks) < n_layers)


def find_decoder(model: Any, n_layers: int) -> torch.nn.Module:
    """The part of a model that holds its decoder blocks, without the head."""
    return next((candidate for candidate in _candidates(model) if _lists(candidate, n_layers)), model)


def _candidates(model: Any) -> list[torch.nn.Module]:
    if type(model).forward is torch.nn.Module.forward:
        # A frame around several models, such as one that understands and one that speaks, which only holds them: the first with blocks.
        return [part for child in model.children() if isinstance(child, PreTrainedModel) for part in _candidates(child)]
    # A few classes answer another part, such as a head that is called decoder; their base model holds the blocks then.
    parts = [model.get_decoder(), model.base_model, model]
    return [part for part in parts if isinstance(part, torch.nn.Module)]


def find_blocks(decoder: torch.nn.Module, n_layers: int) -> torch.nn.ModuleList:
    """The decoder's blocks: its outermost ModuleList with one entry a layer. Raises ModelError."""
    lists = _lists(decoder, n_layers)
    if not lists:
        raise ModelError(
            f"model: {type(decoder).__name__} has no list of {n_layers} decoder blocks, so there is no residual stream to read between them"
        )
    return min(lists, key=lambda entry: entry[0])[1]


def stream_of(output: Any) -> Any:
    """The residual stream in what a block hands out: about twenty families answer a tuple or a list, whose first entry it is."""
    return output[0] if isinstance(output, (tuple, list)) else output


def cut_class(model_class: Any, n_layers: int, n_needed: int) -> Any:
    """A class that makes the same model with its first `n_needed` decoder blocks only, and without a head of its own weights."""

    def make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        cut_blocks(self, n_layers, n_needed)
        tied = self.all_tied_weights_keys
        _drop_head(self, {*tied, *tied.values()})
        there = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        self.all_tied_weights_keys = {target: source for target, source in tied.items() if {target, source} <= there}

    # transformers looks at the class's name and module, for how to read its files among other things.
    members = {"__init__": make, "__module__": model_class.__module__, "__doc__": model_class.__doc__}
    return type(model_class.__name__, (model_class,), members)


def cut_blocks(model: Any, n_layers: int, n_needed: int) -> None:
    """Take the blocks above the first `n_needed` out of a model."""
    blocks = find_blocks(find_decoder(model, n_layers), n_layers)
    del blocks[n_needed:]
    # By their number alone they could be taken for another list of a model from now on.
    model.harvest_blocks = next(name for name, module in model.named_modules() if module is blocks)


def _drop_head(model: Any, tied: set[str]) -> None:
    """Put nothing in the place of the output embeddings, where their weights are not the input's too."""
    head = model.get_output_embeddings()
    path = next((name for name, module in model.named_modules() if module is head and head is not None), "")
    if path and not any(name.startswith(f"{path}.") for name in tied):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, torch.nn.Identity())


def _lists(module: torch.nn.Module, n_layers: int) -> list[tuple[int, torch.nn.ModuleList]]:
    """Each ModuleList of so many entries, with the depth at which it lies."""
    found = module.named_modules()
    return [(name.count("."), part) for name, part in found if isinstance(part, torch.nn.ModuleList) and len(part) == n_layers]
