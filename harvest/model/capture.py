"""The residual stream after each asked decoder block, read with forward hooks while the model runs.

Shapes: B prompts of a batch, S padded length, T real tokens of the batch end to end, L layers asked for, H hidden size, D directions,
W values kept of each token: H, or D where the stream is projected.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from harvest.errors import StreamError
from harvest.model.blocks import LoadedDecoder, stream_of

# Rows that are widened to float32 at a time for a projection: 128 MiB at a hidden size of 8,192.
_ROWS_WIDENED = 4096


@dataclass(frozen=True)
class Captured:
    """The stream of one batch, on the model's device.

    rows_LTW: in the stored dtype; real tokens only, prompts end to end in the batch's order.
    peaks_L: float32, the largest magnitude in each layer before it was stored; NaN or inf where one was computed.
    """

    rows_LTW: torch.Tensor
    peaks_L: torch.Tensor


@contextmanager
def true_float32() -> Iterator[None]:
    """True float32 in every matrix product, the projection's above all: no TF32 on a GPU, no bfloat16 on a CPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _DeepestReadError(Exception):
    """Ends a forward pass after the deepest asked block: what lies above, and the head, is never computed."""


class Capture:
    """A decoder whose asked blocks hand out their output. A context manager: the hooks are removed at its end."""

    def __init__(
        self,
        decoder: LoadedDecoder,
        layers: Sequence[int],
        hidden_size: int,
        store_dtype: torch.dtype,
        directions_DH: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Hook the blocks of `layers`, ascending. With directions the stream is projected onto them before it is kept."""
        self._decoder = decoder.module
        self._layers = list(layers)
        self._hidden_size = hidden_size
        self._store_dtype = store_dtype
        self._device = decoder.device
        self._directions_DH = None if directions_DH is None else torch.from_numpy(directions_DH).to(self._device)
        self._width = hidden_size if directions_DH is None else len(directions_DH)
        self._hooks = [
            decoder.blocks[layer].register_forward_hook(self._hook(position, layer), with_kwargs=False)
            for position, layer in enumerate(self._layers)
        ]
        self._pass: _Pass | None = None

    def __enter__(self) -> Self:
        self._precision = ExitStack()
        self._precision.enter_context(true_float32())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._precision.close()
        for hook in self._hooks:
            hook.remove()

    @torch.inference_mode()
    def read(self, prompts: Sequence[npt.NDArray[np.int32]]) -> Captured:
        """Run one batch of token ids, each int32 [token], padded on the right, and capture the asked layers.

        There is no attention mask: in a causal decoder no real token looks at the padding to its right, and without a mask attention
        takes its fastest path. Raises StreamError where a block is not called exactly once, or hands out another shape.
        """
        ids_BS, real_T = pad(prompts, self._device)
        self._pass = _Pass(
            shape=(*ids_BS.shape, self._hidden_size),
            real_T=real_T,
            directions_DH=self._directions_DH,
            rows_LTW=torch.empty(len(self._layers), sum(map(len, prompts)), self._width, dtype=self._store_dtype, device=self._device),
            peaks_L=torch.empty(len(self._layers), dtype=torch.float32, device=self._device),
            n_read=0,
        )
        try:
            self._decoder(input_ids=ids_BS, use_cache=False)
        except _DeepestReadError:
            return Captured(self._pass.rows_LTW, self._pass.peaks_L)
        finally:
            n_read, self._pass = self._pass.n_read, None
        raise StreamError(
            f"the forward pass ended after calling {n_read} of the {len(self._layers)} asked decoder blocks; "
            "this model does not run its blocks in order for text alone"
        )

    def _hook(self, position: int, layer: int) -> Any:
        is_deepest = position == len(self._layers) - 1

        def read_output(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if self._pass is None:
                # The model is run for another reason than `read`, such as a comparison.
                return
            self._pass.store(position, layer, stream_of(output))
            if is_deepest:
                raise _DeepestReadError

        return read_output


@dataclass
class _Pass:
    """One forward pass on its way: what is expected of each block, and where its rows go."""

    shape: tuple[int, ...]
    real_T: torch.Tensor | None
    directions_DH: torch.Tensor | None
    rows_LTW: torch.Tensor
    peaks_L: torch.Tensor
    n_read: int

    def store(self, position: int, layer: int, stream_BSH: Any) -> None:
        if position != self.n_read:
            raise StreamError(f"decoder block {layer} was called out of turn; this model does not run each block once, in order")
        check_shape(stream_BSH, self.shape, layer)
        rows_TW = take_rows(stream_BSH, self.real_T, self.directions_DH)
        self.peaks_L[position] = rows_TW.abs().amax()
        self.rows_LTW[position].copy_(rows_TW)
        self.n_read += 1


def pad(
    prompts: Sequence[npt.NDArray[np.int32]], device: torch.device, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids int64 [B, S], padded on the right, and the places of the real tokens in [B * S], or None where all are real.

    width: of the batch, where that is more than its longest prompt.
    """
    lengths = [len(ids) for ids in prompts]
    longest = width or max(lengths)
    # Any id that the model has will do as padding: no real token sees it, and its rows are dropped.
    padded = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    ids_BS = torch.from_numpy(padded).to(device)
    if min(lengths) == longest:
        return ids_BS, None
    real = np.concatenate([np.arange(length) + row * longest for row, length in enumerate(lengths)])
    return ids_BS, torch.from_numpy(real).to(device)


def check_shape(stream_BSH: Any, shape: tuple[int, ...], layer: int) -> None:
    """Raise StreamError where a block does not hand out one stream of this shape."""
    if not isinstance(stream_BSH, torch.Tensor) or tuple(stream_BSH.shape) != shape:
        found = list(stream_BSH.shape) if isinstance(stream_BSH, torch.Tensor) else type(stream_BSH).__name__
        raise StreamError(
            f"decoder block {layer} hands out {found}, where one stream of shape [batch, token, hidden] = {list(shape)} "
            "was expected; this model has no single residual stream there"
        )


def take_rows(stream_BSH: torch.Tensor, real_T: torch.Tensor | None, directions_DH: torch.Tensor | None) -> torch.Tensor:
    """The rows [T, W] of the real tokens, projected where there are directions. real_T: their places in [B * S], None for all."""
    rows_TH = stream_BSH.reshape(-1, stream_BSH.shape[-1])
    if real_T is not None:
        rows_TH = rows_TH.index_select(0, real_T.to(rows_TH.device))
    return rows_TH if directions_DH is None else project(rows_TH, directions_DH)


def project(rows_TH: torch.Tensor, directions_DH: torch.Tensor) -> torch.Tensor:
    """The rows' components along each direction, float32 [T, D], where the rows are; a bounded number of rows is widened at a time."""
    directions_HD = directions_DH.to(rows_TH.device).T
    return torch.cat([rows.float() @ directions_HD for rows in rows_TH.split(_ROWS_WIDENED)])
