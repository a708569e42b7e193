"""A decoder's own forward pass, begun at any block: the blocks before are passed over, and the pass ends after that one.

So a block is given the very arguments that the model makes for it (masks, positions, rotary embeddings, and whatever else differs between
kinds of layers), by the model's own code, and not by a copy of it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from harvest.errors import StreamError
from harvest.model.blocks import LoadedDecoder, stream_of
from harvest.model.capture import unpacked

# What a block before the one that is begun at hands out: as it did when it ran, with another stream in it.
_Answer = Callable[[torch.Tensor], Any]


class _DoneError(Exception):
    """Ends a forward pass after the block that was asked for."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Restart:
    """Runs one block of a decoder at a time. A context manager: at its end the blocks run as they did before."""

    def __init__(self, decoder: LoadedDecoder) -> None:
        self._decoder = decoder
        self._real = [block.forward for block in decoder.blocks]
        self._answers: list[_Answer] = []
        self._block = self._next = 0
        self._outputs: Sequence[Any] = ()
        self._seen: Callable[[int, Any], None] | None = None

    def __enter__(self) -> Self:
        for number, block in enumerate(self._decoder.blocks):
            # The module tree stays as it is, so that the model finds in it what it looks for.
            block.forward = partial(self._call, number)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for block in self._decoder.blocks:
            del block.forward

    @torch.inference_mode()
    def run(self, ids_BS: torch.Tensor, block: int, stream_BSH: torch.Tensor | None) -> torch.Tensor:
        """The stream after a block, [batch, token, hidden], from the stream before it; of the first block that is None.

        ids_BS: int64 token ids on the decoder's device, padded on the right. The blocks before must have run once, in whatever batch.
        """
        answers = [answer(stream_BSH) for answer in self._answers[:block]] if stream_BSH is not None else []
        output = self.run_with(ids_BS, block, answers)
        if block == len(self._answers):
            self._answers.append(_answer_like(output))
        stream: torch.Tensor = stream_of(output)
        return stream

    @torch.inference_mode()
    def run_with(self, ids_BS: torch.Tensor, block: int, outputs: Sequence[Any], seen: Callable[[int, Any], None] | None = None) -> Any:
        """What a block hands out, where those before it hand out `outputs`.

        seen: told what each block up to this one is given as its stream.
        Raises StreamError where the pass does not come to this block.
        """
        self._block, self._next, self._outputs, self._seen = block, 0, outputs, seen
        try:
            with unpacked():
                self._decoder.module(input_ids=ids_BS, use_cache=False)
        except _DoneError as done:
            return done.output
        finally:
            self._outputs, self._seen = (), None
        raise StreamError(
            f"the forward pass ended before decoder block {block}; this model does not run its blocks in order for text alone"
        )

    @torch.inference_mode()
    def run_out(self, ids_BS: torch.Tensor, outputs: Sequence[Any]) -> None:
        """Let a pass go on to its end after the last block, where all hand out `outputs`, and those above the last hand out what it does.

        Raises StreamError where a block is called again; what else is wrong above the last block is of no account.
        """
        self._block, self._next, self._outputs = len(outputs), 0, outputs
        above = _blocks_above(self._decoder)
        for block in above:
            block.forward = lambda *_args, **_kwargs: outputs[-1]
        try:
            self._decoder.module(input_ids=ids_BS, use_cache=False)
        except StreamError:
            raise
        except Exception:
            # A head or norm that cannot do with what stands in for the blocks above comes after all that is read.
            pass
        finally:
            self._outputs = ()
            for block in above:
                del block.forward

    def _call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        if number != self._next:
            raise StreamError(f"decoder block {number} was called out of turn; this model does not run each block once, in order")
        self._next += 1
        if self._seen is not None:
            self._seen(number, args[0] if args else kwargs.get("hidden_states"))
        if number < self._block:
            return self._outputs[number]
        raise _DoneError(self._real[number](*args, **kwargs))


def _answer_like(output: Any) -> _Answer:
    """How a block of another batch would hand out its stream: alone, or first in a tuple or list, where nothing else is looked at."""
    if isinstance(output, (tuple, list)):
        # A tuple with names takes its entries otherwise.
        make, rest = getattr(type(output), "_make", type(output)), [None] * (len(output) - 1)
        return lambda stream: make([stream, *rest])
    return lambda stream: stream


def _blocks_above(decoder: LoadedDecoder) -> list[torch.nn.Module]:
    """The blocks of a model that come after those that are read."""
    first, n_blocks = decoder.blocks[0], len(decoder.blocks)
    lists = (module for module in decoder.module.modules() if isinstance(module, torch.nn.ModuleList) and len(module) >= n_blocks)
    return next((list(blocks)[n_blocks:] for blocks in lists if blocks[0] is first), [])
