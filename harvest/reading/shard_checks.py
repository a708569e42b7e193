"""One shard file against the manifest: its bytes, then what they hold, with its part of the stats taken anew from the stored values.

Shapes: L layers, T tokens, W values a token.
"""

import hashlib
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.storage import ZipStore

from harvest.contract import Manifest, ShardEntry
from harvest.output.layout import STORED_AS, ShardLayout
from harvest.output.shard import read_sums
from harvest.reading.blocks import read_blocks, widened
from harvest.reading.documents import check_fingerprint, prompt_lengths, width_of
from harvest.reading.findings import Finding, differing
from harvest.reading.shard import Shard, ZarrShard, open_shard

_SAYS = "manifest.json says"
# Sums in float64, added up in another order.
_ROUNDING = 1e-10
_FROM = ("model", "repository", "revision", "layers", "directions")


class Sums:
    """Sums over tokens, the first of each prompt and those that are not finite left out.

    sum_LW and sum_sq_LW float64 [L, W]; norm_sum_L and count_L, the tokens that they add up, float64 [L]. nonfinite_L, int64 [L]: tokens
    with a value that is not finite, the first of a prompt among them.
    """

    def __init__(self, n_layers: int, width: int) -> None:
        self.sum_LW = np.zeros((n_layers, width))
        self.sum_sq_LW = np.zeros((n_layers, width))
        self.norm_sum_L = np.zeros(n_layers)
        self.count_L = np.zeros(n_layers)
        self.nonfinite_L = np.zeros(n_layers, dtype=np.int64)

    def add_rows(self, position: int, rows_TW: npt.NDArray[np.float64]) -> None:
        """Add rows of one layer, all of them finite."""
        self.count_L[position] += len(rows_TW)
        sq_TW = np.square(rows_TW)
        self.sum_LW[position] += rows_TW.sum(axis=0)
        self.sum_sq_LW[position] += sq_TW.sum(axis=0)
        self.norm_sum_L[position] += np.sqrt(sq_TW.sum(axis=1)).sum()

    def add(self, other: "Sums") -> None:
        """Add another shard's."""
        self.sum_LW += other.sum_LW
        self.sum_sq_LW += other.sum_sq_LW
        self.norm_sum_L += other.norm_sum_L
        self.count_L += other.count_L
        self.nonfinite_L += other.nonfinite_L


def check_bytes(path: Path, where: str, digests: Mapping[str, str], record: tuple[str, int] | None = None) -> Iterator[Finding]:
    """A file's SHA-256 and size against what is known of them; where it is damaged, also what of a ZIP file is.

    digests: what each document says that has a word on it, as "sha256:…". record: the name of its record, and its bytes there.
    """
    if not path.is_file():
        yield Finding(where, "is missing")
        return
    if not digests:
        return
    found = path.stat().st_size
    with open(path, "rb") as file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    wrong = {document: said for document, said in digests.items() if said != digest}
    if len(wrong) == len(digests):
        said = "; ".join(f"{document} says {other}" for document, other in wrong.items())
        size = "" if record is None or record[1] == found else f", {found} bytes of {record[1]}"
        yield Finding(where, f"is not what was published{size}{_damage(path)}: its checksum is {digest}; {said}")
        return
    if record is not None and record[1] != found:
        yield Finding(record[0], f"says that {where} has {record[1]} bytes, and it has {found}")
    for document, said in wrong.items():
        yield Finding(document, f"says that the checksum of {where} is {said}, and it is {digest}")


def _damage(path: Path) -> str:
    """What of a ZIP file is not as it was written, in parentheses; nothing for another file."""
    if ".zip" not in path.suffixes:
        return ""
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.testzip()
    except Exception as error:
        # Whatever bits are flipped in a directory, some other part of zipfile stumbles over them.
        return f" (its directory cannot be read: {error})"
    if entry is not None:
        return f" (the entry {entry} is damaged)"
    return " (every entry is whole, so a header is damaged, or it is another shard)"


def check_shard(path: Path, entry: ShardEntry, manifest: Manifest, run_sums: Sums) -> Iterator[Finding]:
    """What a shard holds: whose tokens, every value finite, its sums those of its values. Its sums go to the run's."""
    with open_shard(path, manifest.layer_indices) as shard:
        n_findings = 0
        for finding in _check_shape(shard, entry, manifest):
            n_findings += 1
            yield finding
        if n_findings:
            return
        yield from _check_token_ids(shard, entry, manifest)
        sums = Sums(len(shard.layers), shard.width)
        yield from _check_values(shard, entry.key, sums, (manifest.local or {}).get("nonfinite_tokens", {}))
        run_sums.add(sums)
        if isinstance(shard, ZarrShard):
            yield from check_fingerprint(entry.key, shard.attributes, (manifest.local or {}).get("fingerprint", {}), _FROM)
            yield from _check_store(shard, entry.key, manifest)
            yield from _check_sums(shard, entry.key, manifest, sums)


def _check_shape(shard: Shard, entry: ShardEntry, manifest: Manifest) -> Iterator[Finding]:
    same = {
        "layers": (shard.layers, manifest.layer_indices),
        "prompts": (shard.prompts, entry.prompt_indices),
        "prompt_lengths": (np.diff(shard.token_offsets).tolist(), prompt_lengths(entry)),
        "the first token": (shard.token_offsets[0], 0),
        "values a token": (shard.width, width_of(manifest)),
        "type of values": (str(shard.dtype).removeprefix("torch."), manifest.dtype),
    }
    yield from differing(entry.key, same, _SAYS)


def _check_token_ids(shard: Shard, entry: ShardEntry, manifest: Manifest) -> Iterator[Finding]:
    """Ids of at least 0, and the start token before each prompt where the run put one there."""
    start = ((manifest.local or {}).get("start_token") or {}).get("id")
    for prompt in shard.prompts:
        ids = shard[f"tokens_{prompt}"]
        if int(ids.min()) < 0:
            yield Finding(entry.key, f"prompt {prompt} has the token id {int(ids.min())}")
        if start is not None and int(ids[0]) != start:
            yield Finding(entry.key, f"prompt {prompt} begins with token {int(ids[0])}, and not with the start token {start}")


def _check_values(shard: Shard, where: str, sums: Sums, allowed: Mapping[str, int]) -> Iterator[Finding]:
    """The sums over all values that are finite. Names the first of each layer that is not, where the manifest counts none."""
    counts_T = np.ones(shard.n_tokens, dtype=bool)
    counts_T[shard.token_offsets[:-1]] = False
    not_finite: dict[int, int] = {}
    for start, rows_LTW in read_blocks(shard, range(len(shard.layers))):
        for position in range(len(shard.layers)):
            for piece, rows_TW in widened(rows_LTW[position]):
                first = start + piece
                is_finite_T = np.isfinite(rows_TW).all(axis=1)
                if not is_finite_T.all():
                    not_finite.setdefault(position, first + int(is_finite_T.argmin()))
                    sums.nonfinite_L[position] += int((~is_finite_T).sum())
                sums.add_rows(position, rows_TW[counts_T[first : first + len(rows_TW)] & is_finite_T])
    for position, row in not_finite.items():
        if str(shard.layers[position]) in allowed:
            continue
        place = int(np.searchsorted(shard.token_offsets, row, side="right")) - 1
        at = f"prompt {shard.prompts[place]}, position {row - shard.token_offsets[place]}"
        yield Finding(where, f"layer {shard.layers[position]} holds a value that is not finite, first at {at}")


def _check_store(shard: Shard, where: str, manifest: Manifest) -> Iterator[Finding]:
    """The ZIP file's names, and each array's own shape and type: readers of other kinds than harvest's look at these."""
    with zipfile.ZipFile(shard.path) as archive:
        entries = archive.infolist()
    twice = [name for name, count in Counter(entry.filename for entry in entries).items() if count > 1]
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if twice or packed:
        yield Finding(where, f"entries that stand in the ZIP file twice: {twice}, or compressed: {packed}")
    n_layers, n_prompts, width = len(shard.layers), len(shard.prompts), shard.width
    expected = {
        manifest.contents: ((n_layers, shard.n_tokens, width), STORED_AS[manifest.dtype]),
        "token_ids": ((shard.n_tokens,), "int32"),
        "prompt_offsets": ((n_prompts + 1,), "int64"),
        "prompt_indices": ((n_prompts,), "int64"),
        "layer_indices": ((n_layers,), "int32"),
        "token_sum": ((n_layers, width), "float64"),
        "token_sum_sq": ((n_layers, width), "float64"),
        "token_norm_sum": ((n_layers,), "float64"),
        "token_count": ((n_layers,), "float64"),
    }
    with ZipStore(shard.path, mode="r") as store:
        group: Any = zarr.open_group(store, mode="r", use_consolidated=False)
        found = {name: (array.shape, str(array.dtype)) for name, array in group.arrays()}
    yield from differing(where, {f"the array {name}": (found.get(name, "missing"), spec) for name, spec in expected.items()}, "should be")


def _check_sums(shard: Shard, where: str, manifest: Manifest, sums: Sums) -> Iterator[Finding]:
    layout = ShardLayout(manifest.contents, tuple(shard.layers), shard.width, manifest.dtype, "none", {})
    sum_LW, sum_sq_LW, norm_sum_L, count_L = read_sums(shard.path, layout)
    # The sum of n values of either sign may cancel to nothing; it cannot be larger than this.
    scale_LW = np.sqrt(sums.sum_sq_LW * np.maximum(sums.count_L, 1)[:, None])
    for name, stored, anew, scale in (
        ("token_sum", sum_LW, sums.sum_LW, scale_LW),
        ("token_sum_sq", sum_sq_LW, sums.sum_sq_LW, sums.sum_sq_LW),
        ("token_norm_sum", norm_sum_L, sums.norm_sum_L, sums.norm_sum_L),
        ("token_count", count_L, sums.count_L, np.zeros_like(count_L)),
    ):
        layers = layers_off(stored, anew, _ROUNDING * scale)
        if layers:
            yield Finding(where, f"{name} is not that of the stored values in layers {[shard.layers[position] for position in layers]}")


def layers_off(stored: npt.NDArray[Any], anew: npt.NDArray[Any], tolerance: npt.NDArray[Any]) -> list[int]:
    """Positions on the layer axis, the first, at which stored figures are further from those taken anew than they may be, or no number."""
    is_off = ~(np.abs(stored - anew) <= tolerance)
    return np.flatnonzero(is_off.reshape(len(is_off), -1).any(axis=1)).tolist()
