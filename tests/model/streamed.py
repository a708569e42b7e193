"""One decoder read in two ways: loaded whole, and a block at a time from the same files."""

from collections.abc import Sequence
from pathlib import Path

import torch

from harvest.model.blocks import LoadedDecoder, stream_of
from harvest.model.blockwise import BlockwiseDecoder
from harvest.model.checkpoint import read_now
from harvest.model.describe import describe
from harvest.model.device import Placement
from harvest.model.load import load_blockwise, load_decoder
from harvest.model.restart import Restart
from harvest.model.sources import find_model

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


def streams_by_block(decoder: BlockwiseDecoder, batches: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The same of each batch, all of them through one block after the other."""
    streams: list[list[torch.Tensor]] = [[] for _ in batches]
    with Restart(decoder.decoder) as restart:
        for block, tensors in enumerate(decoder.tensors):
            decoder.fill(block, read_now(tensors))
            for ids_BS, own in zip(batches, streams, strict=True):
                own.append(restart.run(ids_BS, block, own[-1].clone() if own else None))
            decoder.empty(block)
    return streams
