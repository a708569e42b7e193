"""One decoder read in two ways: loaded whole, and a block at a time from the same files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harvest.input.plan import Plan
from harvest.model.blocks import LoadedDecoder, stream_of
from harvest.model.blockwise import BlockwiseDecoder
from harvest.model.capture import check_shape, pad, take_rows, true_float32
from harvest.model.checkpoint import read_now
from harvest.model.describe import Description, describe, find_chosen_keys
from harvest.model.device import Placement
from harvest.model.load import load_blockwise, load_decoder
from harvest.model.restart import Restart
from harvest.model.soundness import tried_tokens
from harvest.model.sources import Source, find_model
from harvest.model.witness import Witness

ON_CPU = Placement(torch.device("cpu"))


def resident(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedDecoder:
    """All blocks of a folder's model."""
    description = describe(find_model(str(folder)))
    return load_decoder(description, ON_CPU, dtype, description.n_layers)


def blockwise(folder: Path, dtype: torch.dtype = torch.float32, n_blocks: int | None = None) -> BlockwiseDecoder:
    """The same with empty blocks, the first n_blocks or all, seen to have all that they take."""
    description = describe(find_model(str(folder)))
    decoder = load_blockwise(description, ON_CPU, dtype, n_blocks or description.n_layers)
    decoder.rehearse()
    return decoder


@torch.inference_mode()
def streams_whole(decoder: LoadedDecoder, ids_BS: torch.Tensor) -> list[torch.Tensor]:
    """The stream after each block, [batch, token, hidden], by hooks while the whole model runs."""
    streams: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _args, output: streams.append(stream_of(output).clone())) for block in decoder.blocks]
    decoder.module(input_ids=ids_BS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return streams


def streams_by_block(
    decoder: BlockwiseDecoder, batches: Sequence[torch.Tensor], see: Callable[[Restart], Callable[[int], None]] | None = None
) -> list[list[torch.Tensor]]:
    """The same of each batch, all of them through one block after the other. see: makes of a Restart what sees each block first."""
    streams: list[list[torch.Tensor]] = [[] for _ in batches]
    with Restart(decoder.decoder) as restart:
        look = None if see is None else see(restart)
        for block, tensors in enumerate(decoder.tensors):
            decoder.fill(block, read_now(tensors))
            if look is not None:
                look(block)
            for ids_BS, own in zip(batches, streams, strict=True):
                own.append(restart.run(ids_BS, block, own[-1].clone() if own else None))
            decoder.empty(block)
    return streams


def described(folder: Path, config: Any, n_layers: int, hidden_size: int) -> Description:
    """What is known of a model of a config, whose weights are in a folder, and its tokenizer nowhere."""
    source = Source(config.model_type, str(folder))
    return Description(source, config, None, str(folder), "", n_layers, hidden_size, None, None, (), None, "float32")


def rows_by_block(description: Description, prompts: Sequence[npt.NDArray[np.int32]], plan: Plan) -> torch.Tensor:
    """The rows of all layers of prompts, float32 [layer, token, hidden], read as a streamed run does.

    Raises ModelError or StreamError, as that does, where the model is found not to be read right.
    """
    decoder = load_blockwise(description, ON_CPU, torch.float32, description.n_layers)
    decoder.rehearse()
    batches = list(plan.batches(plan.windows[0]))
    padded = [pad([prompts[number] for number in batch], ON_CPU.device) for batch in batches]
    n_tried = tried_tokens(find_chosen_keys(description.config.get_text_config(decoder=True)))
    longest = max(prompts, key=len)
    with true_float32():
        streams = streams_by_block(
            decoder,
            [ids_BS for ids_BS, _ in padded],
            lambda restart: Witness(decoder.decoder, restart, longest, n_tried, plan.length_switches).see,
        )
    rows: dict[int, torch.Tensor] = {}
    for batch, (ids_BS, real_T), own in zip(batches, padded, streams, strict=True):
        for block, stream in enumerate(own):
            check_shape(stream, (*ids_BS.shape, description.hidden_size), block)
        rows_LTH = torch.stack([take_rows(stream, real_T, None).float() for stream in own])
        rows |= zip(batch, rows_LTH.split([len(prompts[number]) for number in batch], dim=1), strict=True)
    return torch.cat([rows[number] for number in range(len(prompts))], dim=1)
