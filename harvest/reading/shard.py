"""One shard file, as a mapping with the API's names."""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import zarr
from zarr.storage import ZipStore

from harvest.errors import NotARunError
from harvest.output.layout import FORMAT, FORMAT_VERSION

_LOGICAL_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Shard(Mapping[str, torch.Tensor]):
    """The tensors of one shard file by the API's names: `prompt_{i}` and `tokens_{i}`, i numbered over the whole run.

    prompt_{i}: [layer, token, hidden], in the type that the run stored (bfloat16 as real bfloat16).
    tokens_{i}: int32 [token].
    The file is read when a tensor is asked for. A context manager; `close` ends it too.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a shard file. Raises NotARunError where the path holds none."""
        self.path = Path(path)
        if not self.path.is_file():
            raise NotARunError(f"{path}: there is no such shard file")
        try:
            self._store = ZipStore(self.path, mode="r")
            group = zarr.open_group(self._store, mode="r")
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise NotARunError(f"{path}: is no shard file that can be read ({error})") from error
        if group.attrs.get("format") != FORMAT:
            raise NotARunError(f"{path}: is a Zarr store, but no shard of harvest")
        if group.attrs.get("format_version") != FORMAT_VERSION:
            raise NotARunError(f"{path}: has shard format {group.attrs.get('format_version')}; this harvest reads format {FORMAT_VERSION}")
        self.attributes: dict[str, Any] = dict(group.attrs)
        self._rows: Any = group["activations"]
        self._dtype = _LOGICAL_DTYPES[str(self._rows.attrs["logical_dtype"])]
        self._token_ids = self._small(group, "token_ids")
        self._offsets = self._small(group, "prompt_offsets")
        self._positions = {int(prompt): place for place, prompt in enumerate(self._small(group, "prompt_indices"))}
        self.layers: list[int] = [int(layer) for layer in self._small(group, "layer_indices")]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    @property
    def prompts(self) -> list[int]:
        """The numbers of the shard's prompts."""
        return list(self._positions)

    @property
    def n_tokens(self) -> int:
        """Tokens of all prompts of the shard."""
        return len(self._token_ids)

    @property
    def width(self) -> int:
        """Values a token: the hidden size."""
        return int(self._rows.shape[2])

    def layer(self, position: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Tokens start to stop - 1, by default all, of the layer at a position of `layers`: [token, hidden]."""
        return self._tensor(self._rows[position, start:stop])

    def __getitem__(self, name: str) -> torch.Tensor:
        kind, _, number = name.partition("_")
        place = self._positions.get(int(number)) if number.isdecimal() else None
        if place is None or kind not in ("prompt", "tokens"):
            raise KeyError(name)
        tokens = slice(int(self._offsets[place]), int(self._offsets[place + 1]))
        if kind == "tokens":
            return torch.from_numpy(self._token_ids[tokens].copy())
        return self._tensor(self._rows[:, tokens])

    def __iter__(self) -> Iterator[str]:
        for prompt in self._positions:
            yield f"prompt_{prompt}"
            yield f"tokens_{prompt}"

    def __len__(self) -> int:
        return 2 * len(self._positions)

    def __repr__(self) -> str:
        return f"<Shard {self.path.name}: {len(self._positions)} prompts, {self.n_tokens} tokens, layers {self.layers}>"

    def _tensor(self, stored: Any) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(stored))
        return tensor.view(self._dtype)

    @staticmethod
    def _small(group: Any, name: str) -> Any:
        return group[name][:]


def open_shard(path: str | Path) -> Shard:
    """Open one shard file, alone, as a mapping with the API's names. Raises NotARunError."""
    return Shard(path)
