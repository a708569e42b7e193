"""Whether a streamed model is read right, seen block by block as its blocks come by: what `soundness` sees of a model that is loaded.

One prompt in three forms goes through the blocks beside the first window. Each form is the model's own whole forward pass: every block
before hands out what it did hand out, all of it. Beside them the same prompt is read as the run reads its batches, with nothing handed on
but the stream; both must be the same.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harvest.errors import ModelError
from harvest.model.blocks import LoadedDecoder, stream_of
from harvest.model.capture import pad, take_rows
from harvest.model.plain import check_error, mean_error
from harvest.model.restart import Restart
from harvest.model.soundness import (
    CAUSAL_BOUND,
    TRIED_TOKENS,
    UNRUNNABLE,
    is_single_stream,
    make_trials,
    not_handed_on,
    not_on_text,
    not_single_stream,
    same_stream,
)


class Witness:
    """Sees each block of a decoder once, in order."""

    def __init__(
        self,
        decoder: LoadedDecoder,
        restart: Restart,
        ids: npt.NDArray[np.int32],
        max_tokens: int = TRIED_TOKENS,
        length_switches: Sequence[int] = (),
    ) -> None:
        """The prompt to try, and how far; see `make_trials`."""
        self._decoder, self._restart = decoder, restart
        self._trials = make_trials(ids, max_tokens, length_switches)
        self._ids, self._outputs = pad([self._trials.whole], decoder.device)[0], list[Any]()
        others = (self._trials.changed, self._trials.alone)
        self._others = [None if ids is None else (pad([ids], decoder.device)[0], list[Any]()) for ids in others]
        self._stream: torch.Tensor | None = None

    def see(self, block: int) -> None:
        """Run a block that is filled, and was not seen yet; after the last, see that none is run again.

        Raises ModelError, or StreamError for an order of blocks, with what is wrong.
        """
        whole = self._run(self._ids, block, self._outputs)
        changed, alone = (None if form is None else self._run(form[0], block, form[1]) for form in self._others)
        try:
            self._stream = self._restart.run(self._ids, block, self._stream)
        except UNRUNNABLE as error:
            raise self._hands_on_more(block, _failing(error)) from error
        if not self._agrees(whole, self._stream):
            raise self._hands_on_more(block, "gives other numbers")
        if changed is not None:
            self._trials.check_causal(self._decoder, whole, changed)
        if alone is not None:
            self._trials.check_padding(self._decoder, whole, alone)
        if block + 1 == len(self._decoder.blocks):
            self._restart.run_out(self._ids, self._outputs)

    def _hands_on_more(self, block: int, what: str) -> ModelError:
        return ModelError(
            f"model: decoder block {block} of {type(self._decoder.module).__name__} {what} when it is given its stream alone, so blocks "
            "hand something else on to each other; it cannot be streamed: leave out --weights stream, or take --device-map auto"
        )

    def _agrees(self, whole_BSH: torch.Tensor, stream_BSH: torch.Tensor) -> bool:
        """Whether two passes of one shape gave the same: the same bits on a CPU; some kernels of a card are not repeatable to the last."""
        if same_stream(whole_BSH, stream_BSH):
            return True
        error = float(((whole_BSH - stream_BSH).float().norm(dim=-1) / whole_BSH.float().norm(dim=-1)).max())
        return self._decoder.device.type != "cpu" and error <= CAUSAL_BOUND

    def _run(self, ids_BS: torch.Tensor, block: int, outputs: list[Any]) -> torch.Tensor:
        broken: list[int] = []

        def seen(number: int, stream: Any) -> None:
            if number and isinstance(stream, torch.Tensor) and not same_stream(stream, stream_of(outputs[number - 1])):
                broken.append(number)

        try:
            outputs.append(self._restart.run_with(ids_BS, block, outputs, seen))
        except UNRUNNABLE as error:
            if block:
                # The first block ran, so that is not for want of a picture: keys and values go from block to block in a dict, for one.
                raise self._hands_on_more(block, _failing(error)) from error
            raise not_on_text(self._decoder, error) from error
        if broken:
            raise not_handed_on(self._decoder, broken[0])
        stream: torch.Tensor = stream_of(outputs[-1])
        if not is_single_stream(stream, ids_BS.shape[1]):
            raise not_single_stream(f"decoder block {block} of {type(self._decoder.module).__name__} hands out", stream, ids_BS.shape[1])
        return stream


def _failing(error: BaseException) -> str:
    return f"fails ({type(error).__name__}: {' '.join(str(error).split())})"


class Comparison:
    """--check of a streamed model: prompts in a padded batch against each alone, as its blocks come by."""

    def __init__(
        self,
        restart: Restart,
        prompts: Sequence[npt.NDArray[np.int32]],
        store_dtype: torch.dtype,
        allowed: float,
        device: torch.device,
    ) -> None:
        """prompts: the token ids of a batch, each int32 [token]. allowed: see `plain.tolerance`."""
        self._restart, self._prompts, self._store_dtype, self._allowed = restart, prompts, store_dtype, allowed
        self._ids_BS, self._real_T = pad(prompts, device)
        self._alone_ids = [pad([ids], device)[0] for ids in prompts]
        self._together: torch.Tensor | None = None
        self._alone: list[torch.Tensor | None] = [None for _ in prompts]
        self.worst = 0.0

    def see(self, block: int, is_asked: bool) -> None:
        """Run a block that is filled, and was not seen yet. Raises StreamError where an asked layer is further apart than allowed."""
        self._together = self._restart.run(self._ids_BS, block, self._together)
        self._alone = [self._restart.run(ids, block, stream) for ids, stream in zip(self._alone_ids, self._alone, strict=True)]
        if not is_asked:
            return
        rows_TH, start = take_rows(self._together, self._real_T, None).to(self._store_dtype).cpu().double(), 0
        for number, (ids, stream) in enumerate(zip(self._prompts, self._alone, strict=True)):
            assert stream is not None
            error = mean_error(rows_TH[start : start + len(ids)], stream[0].cpu().double())
            self.worst = max(self.worst, check_error(error, self._allowed, block, number, len(ids)))
            start += len(ids)
