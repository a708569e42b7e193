"""A decoder whose blocks have no weights until each is filled from the checkpoint, and is emptied again.

The model is made on the meta device as `from_pretrained` makes it, and only what stands beside the blocks is loaded: embeddings, tables of
positions, norms. A block's tensors are renamed, put together, split and cast by transformers' own conversion, over that block's part of
the checkpoint alone.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.core_model_loading import WeightConverter, WeightRenaming, convert_and_load_state_dict_in_model, rename_source_key
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from harvest.errors import ModelError
from harvest.model.blocks import LoadedDecoder, find_blocks, find_decoder
from harvest.model.checkpoint import StoredTensor, find_tensors, read_now

# With it transformers converts in the thread that asks, one tensor at a time, and not in threads of its own that run ahead.
_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"

# Quantised weights that transformers makes whole ones of while it loads them, each from its own tensors alone.
_WIDENED = ("fp8", "mxfp4")

_INSTEAD = "leave out --weights stream; --device-map auto spreads a model over cards, host memory and disk"


@dataclass(frozen=True)
class _Empty:
    """A parameter or buffer of a block that stands for weights which are not there."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor

    def of(self) -> dict[str, Any]:
        """Those of its module, by name, among which it stands."""
        return self.module._parameters if self.name in self.module._parameters else self.module._buffers


def loads_by_block() -> bool:
    """Whether this release of transformers converts a part of a checkpoint as it does here; its first of version 5 asked for more."""
    required = [
        parameter.name
        for parameter in inspect.signature(convert_and_load_state_dict_in_model).parameters.values()
        if parameter.default is parameter.empty
    ]
    return required == ["model", "state_dict", "load_config"]


class BlockwiseDecoder:
    """A decoder whose blocks are filled and emptied one at a time.

    decoder: with the first blocks of the model, up to the deepest that is wanted; their weights are on the meta device.
    tensors: of each block, those of the checkpoint that it is made of.
    """

    def __init__(self, model: Any, decoder: LoadedDecoder, tensors: Sequence[Sequence[StoredTensor]], config: Any) -> None:
        self.decoder = decoder
        self.tensors = tensors
        self._model, self._config = model, config
        self._names = _block_names(model, decoder.blocks)
        self._empty = [_find_empty(block) for block in decoder.blocks]

    def n_bytes(self, block: int) -> int:
        """Bytes of a block's tensors in the checkpoint."""
        return sum(tensor.n_bytes for tensor in self.tensors[block])

    def fill(self, block: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give a block its weights, from the checkpoint's tensors by their names there. They may be used as they are, without a copy.

        Raises ModelError where some are missing, or are not what the block takes.
        """
        self._convert(block, tensors, self.decoder.device)
        # As in a model that is loaded whole. It is more than bookkeeping: torch.matmul folds its batch by it, and rounds otherwise.
        self.decoder.blocks[block].requires_grad_(False)

    def empty(self, block: int) -> None:
        """Take a block's weights away again."""
        for entry in self._empty[block]:
            entry.of()[entry.name] = entry.tensor

    def weights(self, block: int) -> list[torch.Tensor]:
        """What a block is filled with now."""
        return [entry.of()[entry.name] for entry in self._empty[block]]

    def rehearse(self, check: Callable[[], None] = lambda: None) -> None:
        """Fill each block with tensors that have a shape and no values, so that what is missing or does not fit shows before any is read.

        Raises ModelError. check: called for each block, and raises to stop.
        """
        for block, stored in enumerate(self.tensors):
            check()
            shapes = {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in stored}
            try:
                self._convert(block, shapes, torch.device("meta"))
            finally:
                self.empty(block)

    def _convert(self, block: int, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        config = replace(self._config, device_map={"": device})
        with _quietly_here():
            info, _ = convert_and_load_state_dict_in_model(self._model, dict(tensors), config)
        name = type(self._model).__name__
        reasons = {key: _reason(text) for key, text in info.conversion_errors.items()}
        for key, reason in reasons.items():
            if "out of memory" in reason.lower():
                raise ModelError(f"model: {device} has no memory to make {key} of {name} beside what is there ({reason}); {_INSTEAD}")
            # A conversion that looks at values cannot be made without any, and is when the block's turn comes.
            if device.type != "meta" or "meta tensor" not in reason.lower():
                raise ModelError(
                    f"model: the tensor {key} of {name} cannot be made from the checkpoint, whose tensors for it are not all there, or not "
                    f"of shapes that belong together ({reason}); complete its files"
                )
        if reasons:
            return
        own = self._names[block]
        if wrong := sorted(entry for entry in info.mismatched_keys if entry[0] in own):
            key, given, expected = wrong[0]
            raise ModelError(
                f"model: the checkpoint holds {key} of shape {list(given)}, where {name} takes {list(expected)}; complete its files, or "
                "mend its config.json"
            )
        if missing := sorted(info.missing_keys & own):
            raise _lacking(missing, block)


def _reason(text: str) -> str:
    """The error itself in transformers' words on a conversion, which begin with a whole traceback."""
    lines = text.splitlines()
    return next((line for line in lines[1:] if line and not line[0].isspace()), text) if text.startswith("Traceback") else text


def _lacking(missing: Sequence[str], block: int) -> ModelError:
    return ModelError(
        f"model: the checkpoint has no tensors of its own for {len(missing)} of decoder block {block} (such as {missing[0]}); complete its "
        f"files, or, where the model takes them from another of its blocks, {_INSTEAD}"
    )


def blockwise_class(model_class: Any, name: str, n_layers: int, n_blocks: int, done: list[BlockwiseDecoder], device: torch.device) -> Any:
    """A class whose `from_pretrained` leaves the decoder blocks empty, and appends the decoder, of its first `n_blocks`, to `done`.

    name: the model's, for errors.
    """

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any) -> Any:
        if state_dict is not None or not checkpoint_files or not str(checkpoint_files[0]).endswith(".safetensors"):
            raise ModelError(
                f"model: the weights of {name} are not in safetensors files, which alone are read a block at a time; {_INSTEAD}"
            )
        quantizer = load_config.hf_quantizer
        if quantizer is not None:
            asked = quantizer.quantization_config
            method = getattr(asked.quant_method, "value", asked.quant_method)
            if method not in _WIDENED or not getattr(asked, "dequantize", False):
                raise ModelError(
                    f"model: the weights of {name} are quantised ({method}), and are loaded as a whole here and not a block at a time; "
                    f"{_INSTEAD}"
                )
        load_config = replace(load_config, device_map={"": device})
        decoder = find_decoder(model, n_layers)
        blocks = list(find_blocks(decoder, n_layers))
        own = _names_of(model, decoder.state_dict(keep_vars=True).values())
        in_blocks = _block_names(model, blocks)
        beside = own - frozenset().union(*in_blocks)
        parts = _part(model, load_config, find_tensors(checkpoint_files), beside, in_blocks[:n_blocks])
        with _quietly_here():
            info, _ = convert_and_load_state_dict_in_model(model, read_now(parts[-1]), load_config)
        # What nobody will read is neither missing nor to be initialised.
        tied = model.all_tied_weights_keys
        info.missing_keys &= beside | {*tied, *tied.values()} - frozenset().union(*in_blocks)
        for key, tensor in model.state_dict(keep_vars=True).items():
            if key not in beside:
                tensor._is_hf_initialized = True
        done.append(BlockwiseDecoder(model, LoadedDecoder(decoder, blocks[:n_blocks], device), parts[:-1], load_config))
        return info, None

    members = {"_load_pretrained_model": staticmethod(load), "__module__": model_class.__module__, "__doc__": model_class.__doc__}
    return type(model_class.__name__, (model_class,), members)


def _part(
    model: Any, config: Any, tensors: Mapping[str, StoredTensor], beside: frozenset[str], in_blocks: Sequence[frozenset[str]]
) -> list[list[StoredTensor]]:
    """A checkpoint's tensors, parted by what becomes of them: of each block those that it is made of, and last those beside the blocks."""
    names = model.state_dict()
    mapping = config.weight_mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    place = {name: number for number, own in enumerate(in_blocks) for name in own}
    parts: list[list[StoredTensor]] = [[] for _ in range(len(in_blocks) + 1)]
    spare: dict[str, StoredTensor] = {}
    there = set()
    for key, tensor in tensors.items():
        name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:
            name, _ = rename_source_key(key, [], [], model.base_model_prefix, names)
        there.add(name)
        if name in place:
            parts[place[name]].append(tensor)
        elif name in beside:
            parts[-1].append(tensor)
        else:
            spare[name] = tensor
    # Of two tied tensors a checkpoint may hold the other one.
    for target, source in model.all_tied_weights_keys.items():
        for wanted, other in ((target, source), (source, target)):
            if wanted in beside and wanted not in there and other in spare:
                parts[-1].append(spare[other])
    return parts


@contextmanager
def _quietly_here() -> Iterator[None]:
    """Conversions without a progress bar for each, in the thread that asks for them, and on a card on that thread's stream."""
    was_enabled, before = is_progress_bar_enabled(), os.environ.get(_ONE_THREAD)
    disable_progress_bar()
    os.environ[_ONE_THREAD] = "1"
    try:
        yield
    finally:
        os.environ.pop(_ONE_THREAD)
        if before is not None:
            os.environ[_ONE_THREAD] = before
        if was_enabled:
            enable_progress_bar()


def _names_of(model: Any, tensors: Any) -> frozenset[str]:
    wanted = {id(tensor) for tensor in tensors}
    return frozenset(name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) in wanted)


def _block_names(model: Any, blocks: Sequence[torch.nn.Module]) -> list[frozenset[str]]:
    """The names in a model of what each of its blocks is filled with."""
    names = {id(module): name for name, module in model.named_modules()}
    return [frozenset(f"{names[id(block)]}.{name}" for name in block.state_dict()) for block in blocks]


def _find_empty(block: torch.nn.Module) -> list[_Empty]:
    kept = {id(tensor) for tensor in block.state_dict(keep_vars=True).values()}
    found = []
    for module in block.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) in kept:
                found.append(_Empty(module, name, tensor))
    return found
