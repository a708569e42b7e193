"""A decoder's weights, on the device or spread over several, with nothing in it that nobody needs."""

import copy
import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from harvest.errors import DeviceError, ModelError
from harvest.model import tiny
from harvest.model.adapter import put_on
from harvest.model.blocks import LoadedDecoder, cut_blocks, cut_class, decoder_of
from harvest.model.blockwise import BlockwiseDecoder, blockwise_class
from harvest.model.classes import config_for_class, model_class
from harvest.model.describe import Description
from harvest.model.device import Placement, is_failure, is_out_of_memory
from harvest.model.pretrained import causes, from_pretrained, own_class
from harvest.model.sources import Source
from harvest.settings import cache_folder


def load_decoder(
    description: Description,
    placement: Placement,
    dtype: torch.dtype,
    n_blocks: int,
    attention: str = "auto",
    allow_cut: bool = True,
) -> LoadedDecoder:
    """Load the first `n_blocks` blocks of a model's decoder, without its LM head, ready for inference. Raises ModelError.

    attention: the kind of transformers' attention, or auto for its own choice.
    Where a model cannot be made without the blocks above, or must not, as allow_cut says, they are loaded too; `drop_above` frees them.
    """
    source, n_layers = description.source, description.n_layers
    if source.is_tiny:
        model: Any = tiny.tiny_model()
        if attention != "auto":
            model.set_attn_implementation(attention)
        cut_blocks(model, n_layers, n_blocks)
        decoder = decoder_of(model.to(device=placement.device, dtype=dtype), n_layers, placement.device)
    elif allow_cut:
        try:
            decoder = _load(n_blocks, description, placement, dtype, attention)
        except Exception as error:
            if isinstance(error, DeviceError) or any(is_out_of_memory(cause) or is_failure(cause) for cause in causes(error)):
                raise
            # Whatever stands in the way of a cut model, the whole one shows whether the model itself is at fault.
            return load_decoder(description, placement, dtype, n_blocks, attention, allow_cut=False)
    else:
        decoder = _load(None, description, placement, dtype, attention)
    decoder.module.eval()
    decoder.module.requires_grad_(False)
    return decoder


def load_blockwise(
    description: Description, placement: Placement, dtype: torch.dtype, n_blocks: int, attention: str = "auto"
) -> BlockwiseDecoder:
    """Load what stands beside the blocks of a model's decoder, and leave its first `n_blocks` to be filled one at a time.

    The checkpoint's files are seen to be whole, and to hold all that those blocks take. Raises ModelError.
    """
    decoder_class, kwargs = _class_and_kwargs(description, dtype, attention)
    done: list[BlockwiseDecoder] = []
    blockwise = blockwise_class(decoder_class, description.source.name, description.n_layers, n_blocks, done, placement.device)
    with _quiet_loggers():
        model, info = from_pretrained(blockwise, description.source, **kwargs, device_map={"": placement.device})
    (decoder,) = done
    _check_weights(description.source, decoder.decoder.module, model, info)
    decoder.decoder.module.eval()
    decoder.decoder.module.requires_grad_(False)
    return decoder


def _class_and_kwargs(description: Description, dtype: torch.dtype, attention: str) -> tuple[Any, dict[str, Any]]:
    """The class that a model is made of, and what its `from_pretrained` is given."""
    decoder_class, config = class_and_config(description)
    kwargs: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "config": config}
    if attention != "auto":
        kwargs["attn_implementation"] = attention
    return decoder_class, kwargs


def _load(n_blocks: int | None, description: Description, placement: Placement, dtype: torch.dtype, attention: str) -> LoadedDecoder:
    decoder_class, kwargs = _class_and_kwargs(description, dtype, attention)
    if n_blocks is not None:
        decoder_class = cut_class(decoder_class, description.n_layers, n_blocks)
    if placement.limits is None:
        # An explicit device map makes the weights go to the device as they are read, and not through a second copy in host memory.
        return _read(decoder_class, description, placement.device, kwargs | {"device_map": {"": placement.device}})
    parent = cache_folder() / "offload"
    parent.mkdir(parents=True, exist_ok=True)
    # Weights of the disk lie here where accelerate cannot read them from the model's own files.
    folder = tempfile.mkdtemp(dir=parent)
    try:
        kwargs |= {"device_map": "auto", "max_memory": dict(placement.limits), "offload_folder": folder}
        decoder = _read(decoder_class, description, placement.device, kwargs)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(decoder.module, shutil.rmtree, folder, ignore_errors=True)
    return decoder


def _read(decoder_class: Any, description: Description, device: torch.device, kwargs: dict[str, Any]) -> LoadedDecoder:
    with _quiet_loggers():
        model, info = from_pretrained(decoder_class, description.source, **kwargs)
        if description.adapter is not None:
            put_on(model, description.adapter, description.n_layers)
    decoder = decoder_of(model, description.n_layers, device)
    _check_weights(description.source, decoder.module, model, info)
    if kwargs["device_map"] != "auto":
        return decoder
    decoder = replace(decoder, device=_entry(model, description.source, device))
    return replace(decoder, places=_places(model, decoder))


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    """Silence lists of the tensors of blocks that were left out, and that some lie elsewhere; those that are missing are an error."""
    loggers = [logging.getLogger(name) for name in ("transformers", "accelerate")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _entry(model: Any, source: Source, device: torch.device) -> torch.device:
    """Return where token ids go into a spread model. If it came to lie on one device alone, transformers moves nothing between devices.

    Raises DeviceError if that is the host, and a card was to be used.
    """
    if hasattr(model, "hf_device_map"):
        return device
    found: torch.device = next(model.parameters()).device
    if found.type == "cpu" and device.type == "cuda":
        raise DeviceError(
            f"device_map: no part of {source.name} fits what --max-memory, or the free memory, leaves for it on {device}. "
            "Raise --max-memory, or pass --device cpu."
        )
    return found


def _places(model: Any, decoder: LoadedDecoder) -> list[str]:
    """Where accelerate has put each block: cuda:0, cpu or disk."""
    names = {id(module): name for name, module in model.named_modules()}
    spread = getattr(model, "hf_device_map", {})
    found = []
    for block in decoder.blocks:
        # A place is named for a module, or for one that holds it; a block is never split.
        parts = names[id(block)].split(".")
        holders = (".".join(parts[:n]) for n in range(len(parts), -1, -1))
        place = next((spread[holder] for holder in holders if holder in spread), decoder.device)
        found.append(f"cuda:{place}" if isinstance(place, int) else str(place))
    return found


def class_and_config(description: Description) -> tuple[Any, Any]:
    """The class that the model is made of, and a copy of the config that it takes."""
    config = copy.deepcopy(description.config)
    own = own_class(description.source, config)
    return (own, config) if own is not None else (model_class(config), config_for_class(config))


def _check_weights(source: Source, decoder: torch.nn.Module, model: Any, info: dict[str, Any]) -> None:
    """Refuse a decoder with weights that its files do not hold: transformers fills them with random numbers, and only warns."""
    own = {id(tensor) for tensor in decoder.state_dict(keep_vars=True).values()}
    tensors = model.state_dict(keep_vars=True)
    made_up = sorted(name for name in info["missing_keys"] if id(tensors.get(name)) in own)
    if made_up:
        shown = ", ".join(made_up[:3]) + (", …" if len(made_up) > 3 else "")
        raise ModelError(
            f"model: the files of {source.name} lack {len(made_up)} of the decoder's tensors ({shown}), which would be random numbers; "
            "complete the files, or name the model that they belong to"
        )
