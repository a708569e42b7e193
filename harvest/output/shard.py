"""One shard file: captured rows in, a Zarr store in a ZIP file out, with its part of the stats.

Shapes: L layers, T tokens, W values a token.
"""

import contextlib
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from harvest.output import durable
from harvest.output.archive import Archive
from harvest.output.codecs import CODECS
from harvest.output.layout import ShardLayout
from harvest.output.stats import ChunkSums, sum_rows

# Chunks encoded ahead of the one being written: enough to keep the encoders busy, few enough to bound their memory.
_CHUNKS_AHEAD = 4


@dataclass(frozen=True)
class _Encoded:
    key: str
    data: Any
    crc: int
    position: int
    sums: ChunkSums


class ShardFile:
    """A shard that is being written. Rows are appended in token order, in one piece or several; `publish` makes it whole."""

    def __init__(
        self,
        path: Path,
        layout: ShardLayout,
        token_ids: npt.NDArray[np.int32],
        prompt_lengths: npt.NDArray[np.int64],
        first_prompt: int,
        encoders: Executor,
    ) -> None:
        """Start a shard of the given prompts. token_ids: int32 [T]; prompt_lengths: int64 [prompt]."""
        self._path = path
        self._layout = layout
        self._encoders = encoders
        self._offsets = np.concatenate([[0], np.cumsum(prompt_lengths)]).astype(np.int64)
        self._n_tokens = int(self._offsets[-1])
        self._chunk_tokens = layout.chunk_tokens(self._n_tokens)
        self._n_received = 0
        # Rows after the last whole chunk wait here for the next piece: fewer than a chunk's, of each layer.
        self._tail_LTW = np.empty((len(layout.layers), 0, layout.width), dtype=layout.numpy_dtype)
        n_layers = len(layout.layers)
        self._sum_LW = np.zeros((n_layers, layout.width))
        self._sum_sq_LW = np.zeros((n_layers, layout.width))
        self._norm_sum_L = np.zeros(n_layers)
        self._n_counted_L = np.zeros(n_layers)
        self._n_nonfinite_L = np.zeros(n_layers, dtype=np.int64)
        self._temporary = durable.temporary_name(path)
        with durable.storing(path):
            self._file = durable.open_new(self._temporary)
        self._archive = Archive(self._file)
        try:
            with durable.storing(path):
                self._write_head(token_ids, first_prompt)
        except BaseException:
            self.abandon()
            raise

    @property
    def n_bytes(self) -> int:
        """Bytes written so far."""
        return self._archive.n_bytes

    @property
    def nonfinite(self) -> tuple[int, ...]:
        """Tokens with a value that is not finite, by layer, the first of each prompt counted too; empty where there are none."""
        return tuple(self._n_nonfinite_L.tolist()) if self._n_nonfinite_L.any() else ()

    @property
    def sha256(self) -> str:
        """The digest of what is written so far; of the whole file once it is published."""
        return self._archive.sha256

    def append(self, rows_LTW: npt.NDArray[Any]) -> None:
        """Write the next rows of every layer, stored type; all chunks that they complete go to the file."""
        with durable.storing(self._path):
            for chunk in self._encode(self._complete_chunks(rows_LTW)):
                self._archive.add(chunk.key, chunk.data, chunk.crc)
                self._sum_LW[chunk.position] += chunk.sums.sum_W
                self._sum_sq_LW[chunk.position] += chunk.sums.sum_sq_W
                self._norm_sum_L[chunk.position] += chunk.sums.norm_sum
                self._n_counted_L[chunk.position] += chunk.sums.n_counted
                self._n_nonfinite_L[chunk.position] += chunk.sums.n_nonfinite
        self._keep_tail(rows_LTW)

    def publish(self) -> None:
        """Write the stats and the directory, and give the file its final name. All rows must have been appended."""
        if self._n_received != self._n_tokens:
            raise AssertionError(f"{self._path.name} got {self._n_received} of {self._n_tokens} tokens")
        with durable.storing(self._path):
            for name, values in (
                ("token_sum", self._sum_LW),
                ("token_sum_sq", self._sum_sq_LW),
                ("token_norm_sum", self._norm_sum_L),
                ("token_count", self._n_counted_L),
            ):
                self._archive.add(*self._layout.small_entry(name, values))
            self._archive.close()
            durable.publish(self._file, self._temporary, self._path)

    def abandon(self) -> None:
        """Close and remove an unfinished file. Raises nothing: it is called after an error, which must not be hidden by another."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def _write_head(self, token_ids: npt.NDArray[np.int32], first_prompt: int) -> None:
        n_prompts = len(self._offsets) - 1
        for key, document in self._layout.documents(self._n_tokens, n_prompts).items():
            self._archive.add(key, document)
        for name, values in (
            ("token_ids", token_ids),
            ("prompt_offsets", self._offsets),
            ("prompt_indices", np.arange(first_prompt, first_prompt + n_prompts)),
            ("layer_indices", np.array(self._layout.layers)),
        ):
            self._archive.add(*self._layout.small_entry(name, values))

    def _complete_chunks(self, rows_LTW: npt.NDArray[Any]) -> Iterator[tuple[int, int, npt.NDArray[Any]]]:
        """Position on the layer axis, chunk number and rows of each chunk that is complete with these rows, layer by layer."""
        end = self._n_received + rows_LTW.shape[1]
        n_tail = self._tail_LTW.shape[1]
        first_row = self._n_received - n_tail
        step = self._chunk_tokens
        for position in range(len(rows_LTW)):
            for start in range(first_row, end, step):
                stop = min(start + step, self._n_tokens)
                if stop > end:
                    break
                rows_TW = rows_LTW[position, max(start - self._n_received, 0) : stop - self._n_received]
                if start < self._n_received:
                    rows_TW = np.concatenate([self._tail_LTW[position, start - first_row :], rows_TW])
                yield position, start // step, rows_TW

    def _keep_tail(self, rows_LTW: npt.NDArray[Any]) -> None:
        """Copy the rows after the last whole chunk: the caller's buffer is used again."""
        both_LTW = (self._tail_LTW, rows_LTW)
        self._n_received += rows_LTW.shape[1]
        n_kept = self._n_received % self._chunk_tokens if self._n_received < self._n_tokens else 0
        n_new = rows_LTW.shape[1]
        if n_kept <= n_new:
            self._tail_LTW = rows_LTW[:, n_new - n_kept :].copy()
        else:
            self._tail_LTW = np.concatenate(both_LTW, axis=1)

    def _encode(self, chunks: Iterable[tuple[int, int, npt.NDArray[Any]]]) -> Iterator[_Encoded]:
        """Encode chunks in the encoders' threads, a few ahead, and hand them out in order."""
        ahead: deque[Future[_Encoded]] = deque()
        try:
            for position, chunk, rows_TW in chunks:
                ahead.append(self._encoders.submit(self._encode_chunk, position, chunk, rows_TW))
                if len(ahead) > _CHUNKS_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            # After an error the rows' buffer is used again, so no encoder may still be reading it.
            for future in ahead:
                future.cancel()
            for future in ahead:
                if not future.cancelled():
                    future.exception()

    def _encode_chunk(self, position: int, chunk: int, rows_TW: npt.NDArray[Any]) -> _Encoded:
        first = chunk * self._chunk_tokens
        starts = self._offsets[np.searchsorted(self._offsets, first) : np.searchsorted(self._offsets, first + len(rows_TW))] - first
        sums = sum_rows(rows_TW, starts, self._layout.store_dtype)
        if len(rows_TW) < self._chunk_tokens:
            # Zarr stores the last chunk at its full size too.
            rows_TW = np.concatenate([rows_TW, np.zeros((self._chunk_tokens - len(rows_TW), rows_TW.shape[1]), dtype=rows_TW.dtype)])
        data = CODECS[self._layout.codec].encode(np.ascontiguousarray(rows_TW))
        return _Encoded(self._layout.row_key(position, chunk), data, zlib.crc32(data), position, sums)


def read_sums(source: Path | IO[bytes], layout: ShardLayout) -> list[npt.NDArray[np.float64]]:
    """A published shard's token_sum and token_sum_sq, float64 [L, W], token_norm_sum and token_count, float64 [L]. Raises OSError."""
    n_layers = len(layout.layers)
    shapes: dict[str, tuple[int, ...]] = {
        "token_sum": (n_layers, layout.width),
        "token_sum_sq": (n_layers, layout.width),
        "token_norm_sum": (n_layers,),
        "token_count": (n_layers,),
    }
    with zipfile.ZipFile(source) as archive:
        return [np.frombuffer(archive.read(layout.small_key(name)), dtype="<f8").reshape(shape) for name, shape in shapes.items()]
