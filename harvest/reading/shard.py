"""One shard file of either kind, harvest's own or the safetensors file of the API's first version, as a mapping with the API's names."""

import bisect
import contextlib
import gzip
import re
import shutil
import tempfile
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import safetensors
import torch
import zarr
from zarr.storage import ZipStore

from harvest.errors import NotARunError
from harvest.output.layout import FORMAT, FORMAT_VERSION
from harvest.reading.stored import StoredLayer, find_stored

_LOGICAL_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SAFETENSORS_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_DAMAGE = (zipfile.BadZipFile, zlib.error, safetensors.SafetensorError)
_PROMPT = re.compile(r"prompt_(0|[1-9][0-9]*)")
_ZIP, _GZIP = b"PK", b"\x1f\x8b"


class Shard(Mapping[str, torch.Tensor]):
    """The tensors of one shard file by the API's names: `prompt_{i}` and `tokens_{i}`, i numbered over the whole run.

    prompt_{i}: [layer, token, hidden], or [layer, token, direction], in the type that the run stored (bfloat16 as real bfloat16).
    tokens_{i}: int32 [token].
    prompts: the numbers of the shard's prompts; prompts[j] is tokens token_offsets[j] to token_offsets[j + 1] of the shard.
    width: values a token, the hidden size or the number of directions; dtype: their type.
    The file is read when a tensor is asked for. A context manager; `close` ends it too.
    """

    def __init__(
        self, path: Path, prompts: list[int], token_offsets: list[int], width: int, dtype: torch.dtype, layers: list[int] | None
    ) -> None:
        self.path = path
        self.prompts = prompts
        self.token_offsets = token_offsets
        self.width = width
        self.dtype = dtype
        self._layers = layers
        self._places = {str(prompt): place for place, prompt in enumerate(prompts)}

    @property
    def layers(self) -> list[int]:
        """The decoder blocks of the layer axis. Raises NotARunError for a safetensors file opened alone, which does not say them."""
        if self._layers is None:
            raise NotARunError(
                f"{self.path}: a safetensors shard does not say which decoder blocks it holds, its manifest does; "
                "open its run with harvest.open, or name them: open_shard(path, layers=[...])"
            )
        return self._layers

    @property
    def n_tokens(self) -> int:
        """Tokens of all prompts of the shard."""
        return self.token_offsets[-1]

    @abstractmethod
    def layer(self, position: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Tokens start to stop - 1, by default all, of the layer at a position of `layers`: [token, hidden]."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    @abstractmethod
    def _prompt(self, place: int) -> torch.Tensor: ...

    @abstractmethod
    def _tokens(self, place: int) -> torch.Tensor: ...

    def __getitem__(self, name: str) -> torch.Tensor:
        kind, _, number = name.partition("_")
        place = self._places.get(number)
        if place is None or kind not in ("prompt", "tokens"):
            raise KeyError(name)
        return self._prompt(place) if kind == "prompt" else self._tokens(place)

    def __iter__(self) -> Iterator[str]:
        for prompt in self.prompts:
            yield f"prompt_{prompt}"
            yield f"tokens_{prompt}"

    def __len__(self) -> int:
        return 2 * len(self.prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        layers = "" if self._layers is None else f", layers {self._layers}"
        return f"<Shard {self.path.name}: {len(self.prompts)} prompts, {self.n_tokens} tokens{layers}>"


class ZarrShard(Shard):
    """A shard of harvest's own kind: a Zarr store in a ZIP file. attributes: what the store says of itself."""

    def __init__(self, path: Path) -> None:
        with _reading(path):
            self._store = ZipStore(path, mode="r")
            group: Any = zarr.open_group(self._store, mode="r")
        if group.attrs.get("format") != FORMAT:
            raise NotARunError(f"{path}: is a Zarr store, but no shard of harvest")
        if group.attrs.get("format_version") != FORMAT_VERSION:
            raise NotARunError(f"{path}: has shard format {group.attrs.get('format_version')}; this harvest reads format {FORMAT_VERSION}")
        self.attributes: dict[str, Any] = dict(group.attrs)
        with _reading(path):
            self._rows = group["projections" if "projections" in group else "activations"]
            dtype = _LOGICAL_DTYPES[str(self._rows.attrs["logical_dtype"])]
            self._token_ids = group["token_ids"][:]
            prompts, offsets, layers = (group[name][:].tolist() for name in ("prompt_indices", "prompt_offsets", "layer_indices"))
        super().__init__(path, prompts, offsets, self._rows.shape[2], dtype, layers)

    def layer(self, position: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._tensor(position, slice(start, stop))

    def stored(self, position: int) -> StoredLayer | None:
        """The places of a layer's chunks in the file, or None in a file that another tool packed in a way of its own."""
        with _reading(self.path):
            return find_stored(self.path, self._rows, position)

    def close(self) -> None:
        self._store.close()

    def _prompt(self, place: int) -> torch.Tensor:
        return self._tensor(slice(None), self._range(place))

    def _tokens(self, place: int) -> torch.Tensor:
        return torch.from_numpy(self._token_ids[self._range(place)].copy())

    def _range(self, place: int) -> slice:
        return slice(self.token_offsets[place], self.token_offsets[place + 1])

    def _tensor(self, layers: int | slice, tokens: slice) -> torch.Tensor:
        with _reading(self.path):
            stored = self._rows[layers, tokens]
        return torch.from_numpy(np.ascontiguousarray(stored)).view(self.dtype)


class SafetensorsShard(Shard):
    """A shard as the API's first version has it: a safetensors file, gzipped or not, of `prompt_{i}` and `tokens_{i}`."""

    def __init__(self, path: Path, layers: Sequence[int] | None = None) -> None:
        """layers: the decoder blocks of its layer axis, from its manifest."""
        with _reading(path):
            self._file: Any = _open_safetensors(path)
            numbers = sorted(int(match[1]) for name in self._file.keys() if (match := _PROMPT.fullmatch(name)))  # noqa: SIM118
            self._slices = [self._file.get_slice(f"prompt_{number}") for number in numbers]
            lengths = [self._file.get_slice(f"tokens_{number}").get_shape() for number in numbers]
        shapes = [rows.get_shape() for rows in self._slices]
        dtypes = {rows.get_dtype() for rows in self._slices}
        # One number of layers, one width, one type; and each prompt has as many ids as rows.
        is_alike = len(dtypes) == len({(*shape[:1], *shape[2:]) for shape in shapes}) == 1 and dtypes <= _SAFETENSORS_DTYPES.keys()
        if not is_alike or len(shapes[0]) != 3 or lengths != [shape[1:2] for shape in shapes]:
            raise NotARunError(
                f"{path}: is a safetensors file, but no shard: a shard holds prompt_i [layer, token, hidden] and tokens_i [token]"
            )
        self._n_layers, _, width = shapes[0]
        if layers is not None and len(layers) != self._n_layers:
            raise NotARunError(f"{path}: holds {self._n_layers} layers, and {len(layers)} were named for it: {list(layers)}")
        offsets = np.cumsum([0, *(shape[1] for shape in shapes)]).tolist()
        super().__init__(path, numbers, offsets, width, _SAFETENSORS_DTYPES[dtypes.pop()], None if layers is None else list(layers))

    def layer(self, position: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        position = range(self._n_layers)[position]
        start, stop, _ = slice(start, stop).indices(self.n_tokens)
        parts = []
        for place in range(max(bisect.bisect_right(self.token_offsets, start) - 1, 0), len(self.prompts)):
            first, end = self.token_offsets[place : place + 2]
            if first >= stop:
                break
            if end > start:
                parts.append(self._slices[place][position, max(start - first, 0) : min(stop, end) - first])
        return torch.cat(parts) if parts else torch.empty(0, self.width, dtype=self.dtype)

    def close(self) -> None:
        self._slices = []
        self._file.__exit__(None, None, None)

    def _prompt(self, place: int) -> torch.Tensor:
        return self._read(f"prompt_{self.prompts[place]}")

    def _tokens(self, place: int) -> torch.Tensor:
        return self._read(f"tokens_{self.prompts[place]}")

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


def open_shard(path: str | Path, layers: Sequence[int] | None = None) -> Shard:
    """Open one shard file, alone, as a mapping with the API's names.

    layers: the decoder blocks that a safetensors file holds, which stand in its manifest alone; harvest's own shards say them themselves.
    Raises NotARunError where the path holds no shard.
    """
    path = Path(path)
    if not path.is_file():
        raise NotARunError(f"{path}: there is no such shard file")
    return ZarrShard(path) if _begins_with(path, _ZIP) else SafetensorsShard(path, layers)


def _begins_with(path: Path, magic: bytes) -> bool:
    with _reading(path), open(path, "rb") as file:
        return file.read(len(magic)) == magic


def _open_safetensors(path: Path) -> Any:
    if not _begins_with(path, _GZIP):
        return safetensors.safe_open(path, framework="pt")
    # The file is unpacked beside others that nobody keeps, and needs its name no longer than until it is mapped into memory.
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as unpacked, gzip.open(path) as packed:
        shutil.copyfileobj(packed, unpacked)
        unpacked.flush()
        return safetensors.safe_open(unpacked.name, framework="pt")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the libraries say of a file that is no shard, or a damaged one, into a NotARunError."""
    try:
        yield
    except (*_DAMAGE, OSError, EOFError, ValueError, KeyError, RuntimeError) as error:
        raise NotARunError(f"{path}: is no shard file that can be read ({error})") from error
