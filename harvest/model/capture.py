"""The residual stream after each asked decoder block, read with forward hooks while the model runs.

Shapes: B prompts of a batch, S padded length, T real tokens of the batch end to end, L layers asked for, H hidden size, D directions,
W values kept of each token: H, or D where the stream is projected.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, wraps
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from harvest.errors import StreamError
from harvest.model.blocks import LoadedDecoder, stream_of
from harvest.model.device import upload

# Runs of this many bytes on average are copied one by one on a CPU. Shorter ones are faster in one indexed copy (measured at 64 to 4,096
# values a token).
_RUN_BYTES = 32 << 10
# Rows that are widened to float32 at a time for a projection: 128 MiB at a hidden size of 8,192.
_ROWS_WIDENED = 4096


@dataclass(frozen=True)
class Captured:
    """The captured rows of one batch, on the model's device.

    rows_LTW: in the stored dtype; real tokens only, end to end, in the order that `read` was given. If `read` was given places, this
        is the tensor that it wrote into.
    peaks_L: float32, the largest magnitude of each layer before it was stored, see `find_peak`.
    """

    rows_LTW: torch.Tensor
    peaks_L: torch.Tensor


class Places:
    """Where a batch's rows go in a tensor [layer, token, width]: runs of consecutive rows.

    runs: (row, place, n_tokens) of each, `row` among the rows of the batch and `place` in the tensor.
    """

    def __init__(self, runs: Sequence[tuple[int, int, int]]) -> None:
        self.runs = runs
        self._index_T: torch.Tensor | None = None

    def write(self, rows_TW: torch.Tensor, into_TW: torch.Tensor) -> None:
        """Write the rows of one layer to their places: on a card in one kernel, on a CPU in a copy a run if the runs are long."""
        is_long = into_TW.device.type == "cpu" and rows_TW.numel() * into_TW.itemsize >= _RUN_BYTES * len(self.runs)
        if is_long or len(self.runs) == 1:
            for row, place, n_tokens in self.runs:
                into_TW[place : place + n_tokens] = rows_TW[row : row + n_tokens]
            return
        if self._index_T is None:
            index = np.concatenate([np.arange(place, place + n_tokens) for _, place, n_tokens in self.runs])
            self._index_T = upload(index, into_TW.device)
        into_TW.index_copy_(0, self._index_T, rows_TW.to(into_TW.dtype).to(into_TW.device))


@contextmanager
def true_float32() -> Iterator[None]:
    """Compute float32 products in true float32: no TF32 in cuBLAS and cuDNN, no bfloat16 in oneDNN. Settings are restored at the end.

    torch has two interfaces for this. Reading the older one raises RuntimeError if the process has set the newer one, `fp32_precision`,
    to something that the older cannot express (torch docs, "Numerical accuracy"); the newer is enough then.
    """
    before = [(operation, operation.fp32_precision) for operation in _fp32_operations()]
    try:
        with ExitStack() as stack:
            _set_legacy_precision(stack)
            _set_precisions([(operation, "ieee") for operation, _ in before])
            yield
    finally:
        _set_precisions(before)


def _set_legacy_precision(stack: ExitStack) -> None:
    with suppress(RuntimeError):
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
    with suppress(RuntimeError):
        stack.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
        torch.backends.cudnn.allow_tf32 = False


def _fp32_operations() -> list[Any]:
    """Return the operations whose precision torch's newer interface sets. Before torch 2.9 there are none."""
    backends = torch.backends
    names: list[tuple[Any, tuple[str, ...]]] = [
        (backends.cuda, ("matmul",)),
        (backends.cudnn, ("conv", "rnn")),
        (backends.mkldnn, ("matmul", "conv", "rnn")),
    ]
    found = (getattr(backend, name, None) for backend, operations in names for name in operations)
    return [operation for operation in found if getattr(operation, "fp32_precision", None) is not None]


def _set_precisions(precisions: Iterable[tuple[Any, str]]) -> None:
    for operation, precision in precisions:
        if operation.fp32_precision != precision:
            operation.fp32_precision = precision


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
        allow_nonfinite: bool = False,
    ) -> None:
        """Hook the blocks of `layers`, ascending. With directions the stream is projected onto them before it is kept.

        allow_nonfinite: leave NaN and inf out of the peaks.
        """
        self._decoder = decoder.module
        self._layers = list(layers)
        self._hidden_size = hidden_size
        self._store_dtype = store_dtype
        self._allow_nonfinite = allow_nonfinite
        self._device = decoder.device
        self._directions_DH = None if directions_DH is None else upload(directions_DH, self._device)
        self._width = hidden_size if directions_DH is None else len(directions_DH)
        self._hooks = [
            decoder.blocks[layer].register_forward_hook(self._hook(position, layer), with_kwargs=False)
            for position, layer in enumerate(self._layers)
        ]
        self._pass: _Pass | None = None

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._stack.enter_context(true_float32())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        for hook in self._hooks:
            hook.remove()

    @torch.inference_mode()
    def read(
        self,
        prompts: Sequence[npt.NDArray[np.int32]],
        order: Sequence[int] | None = None,
        rows_LTW: torch.Tensor | None = None,
        places: Places | None = None,
    ) -> Captured:
        """Run one batch of token ids, each int32 [token], padded on the right, and capture the requested layers.

        order: the positions in the batch of the prompts whose rows come first, second, and so on. By default that of the batch.
        rows_LTW, places: a tensor in the stored dtype to write the rows into, and their places in it. By default a new tensor.

        There is no attention mask: in a causal decoder no real token looks at the padding to its right, and without a mask attention
        takes its fastest path. On a card nothing here makes the host wait for it. Raises StreamError if a block is not called exactly
        once, or returns another shape.
        """
        ids_BS, real_T = pad(prompts, self._device, order=order)
        n_tokens = sum(map(len, prompts))
        if rows_LTW is None:
            rows_LTW = torch.empty(len(self._layers), n_tokens, self._width, dtype=self._store_dtype, device=self._device)
        self._pass = _Pass(
            shape=(*ids_BS.shape, self._hidden_size),
            real_T=real_T,
            directions_DH=self._directions_DH,
            rows_LTW=rows_LTW,
            places=places or Places([(0, 0, n_tokens)]),
            peaks_L=torch.empty(len(self._layers), dtype=torch.float32, device=self._device),
            allow_nonfinite=self._allow_nonfinite,
            n_read=0,
        )
        try:
            with unpacked():
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
    places: Places
    peaks_L: torch.Tensor
    allow_nonfinite: bool
    n_read: int

    def store(self, position: int, layer: int, stream_BSH: Any) -> None:
        if position != self.n_read:
            raise StreamError(f"decoder block {layer} was called out of turn; this model does not run each block once, in order")
        check_shape(stream_BSH, self.shape, layer)
        rows_TW = take_rows(stream_BSH, self.real_T, self.directions_DH)
        self.peaks_L[position] = find_peak(rows_TW, self.allow_nonfinite)
        self.places.write(rows_TW, self.rows_LTW[position])
        self.n_read += 1


def pad(
    prompts: Sequence[npt.NDArray[np.int32]],
    device: torch.device,
    width: int | None = None,
    order: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return token ids int64 [B, S], padded on the right, and the places of the real tokens in [B * S].

    The places are None if the rows of the batch are wanted as they are: all real, and in order.
    width: of the batch, if that is more than its longest prompt. order: see `Capture.read`.
    """
    lengths = [len(ids) for ids in prompts]
    longest = width or max(lengths)
    # Any id that the model has will do as padding: no real token sees it, and its rows are dropped.
    padded = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    ids_BS = upload(padded, device)
    order = range(len(prompts)) if order is None else order
    if min(lengths) == longest and list(order) == list(range(len(prompts))):
        return ids_BS, None
    return ids_BS, upload(np.concatenate([np.arange(lengths[row]) + row * longest for row in order]), device)


def find_peak(rows_TW: torch.Tensor, allow_nonfinite: bool = False) -> torch.Tensor:
    """Return the largest magnitude of rows, a float32 scalar on their device: NaN or inf if there is one.

    allow_nonfinite: return the largest finite one, so that a value that overflows the stored dtype shows beside those that are allowed.
    Only this makes a copy of the rows.
    """
    if allow_nonfinite:
        rows_TW = rows_TW.where(rows_TW.isfinite(), 0)
    least, most = torch.aminmax(rows_TW)
    return torch.maximum(-least, most).float()


_local = threading.local()


@contextmanager
def unpacked() -> Iterator[None]:
    """Tell transformers that no row of this thread's batches holds several sequences.

    Without a mask it looks for packed sequences in the position ids of each pass, and waits for the card to know
    (transformers.masking_utils.find_packed_sequence_indices).
    """
    _install_unpacked()
    before = getattr(_local, "is_unpacked", False)
    _local.is_unpacked = True
    try:
        yield
    finally:
        _local.is_unpacked = before


@cache
def _install_unpacked() -> None:
    """Replace transformers' search for packed sequences, once: other threads and other passes get its own result, as before."""
    from transformers import masking_utils

    search = getattr(masking_utils, "find_packed_sequence_indices", None)
    if search is None:
        return

    @wraps(search)
    def find_packed_sequence_indices(position_ids: torch.Tensor) -> Any:
        return None if getattr(_local, "is_unpacked", False) else search(position_ids)

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


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
