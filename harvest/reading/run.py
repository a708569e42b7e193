"""A run folder of either kind, read back: one that harvest made, or the files of the API's first version."""

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pydantic
import safetensors.torch
import torch

from harvest.contract import HarvestJob, Manifest
from harvest.errors import HarvestError, NotARunError
from harvest.output.folder import RunFolder
from harvest.output.job import read_job, with_fresh_links
from harvest.output.store import no_folder
from harvest.reading.axis import TokenAxis, token_axis
from harvest.reading.shard import Shard, open_shard

if TYPE_CHECKING:
    import xarray


@dataclass(frozen=True)
class Stats:
    """The run's stats. mean and std: float32 [layer, hidden]; mean_token_norm: by layer. Position 0 of each prompt is left out."""

    mean: torch.Tensor
    std: torch.Tensor
    mean_token_norm: dict[int, float]


class Layer:
    """All tokens of one layer, [token, hidden], prompts end to end. Nothing is read before it is asked for.

    Iterating answers one tensor a shard; a slice answers its tokens, and reads only the shards that hold them.
    """

    def __init__(self, run: "Run", layer: int) -> None:
        self._run = run
        self._position = run.layer_position(layer)

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens and hidden size."""
        return self._run.n_tokens, self._run.width

    def __len__(self) -> int:
        return self._run.n_tokens

    def __repr__(self) -> str:
        return f"<Layer {self._run.layers[self._position]} of {self._run.path.name}: {list(self.shape)}>"

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self._run.n_shards):
            with self._run.shard(index) as shard:
                yield shard.layer(self._position)

    def __getitem__(self, tokens: slice) -> torch.Tensor:
        if not isinstance(tokens, slice):
            raise TypeError(f"a layer is cut with a slice of tokens, such as layer[0:1000]; {tokens!r} was given")
        start, stop, step = tokens.indices(len(self))
        if step != 1:
            raise ValueError(f"a layer's slice has step 1; {step} was given")
        parts = []
        bounds = self._run.shard_token_offsets
        for index in range(bisect.bisect_right(bounds, start) - 1, self._run.n_shards):
            if bounds[index] >= stop:
                break
            with self._run.shard(index) as shard:
                parts.append(shard.layer(self._position, max(start - bounds[index], 0), min(stop, bounds[index + 1]) - bounds[index]))
        return torch.cat(parts) if parts else torch.empty(0, self.shape[1], dtype=self._run.dtype)


class Run:
    """A whole run: its prompts, layers and stats, whichever kind of files hold them. Tensors are read when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        """Open a run folder. Raises NotARunError where there is none, or one that is not whole."""
        self._folder = RunFolder(Path(path))
        self.path = self._folder.path
        if not self.path.is_dir():
            raise no_folder(path)
        if not self._folder.manifest.exists():
            job = read_job(self._folder)
            state = f"its job is {job.status}; run the same command again to finish it" if job else "it holds no job either"
            if self._folder.copying.exists():
                state = "a copy of a run was begun there; run the same harvest export or harvest fetch again to finish it"
            raise NotARunError(f"{path}: holds no manifest.json, so it is no whole run; {state}")
        try:
            self.manifest = Manifest.model_validate_json(self._folder.manifest.read_bytes())
        except pydantic.ValidationError as error:
            raise NotARunError(f"{self._folder.manifest}: is no manifest of a run ({error.error_count()} fields are wrong)") from error
        self._first_prompts = [entry.prompt_indices[0] for entry in self.manifest.shards]
        lengths = [[tensor.shape[0] for tensor in entry.tensors if len(tensor.shape) == 1] for entry in self.manifest.shards]
        self.shard_token_offsets = [0]
        for shard in lengths:
            self.shard_token_offsets.append(self.shard_token_offsets[-1] + sum(shard))

    @property
    def layers(self) -> list[int]:
        """The decoder blocks that were read, ascending."""
        return self.manifest.layer_indices

    @property
    def n_prompts(self) -> int:
        """How many prompts the run holds."""
        return self.manifest.n_prompts

    @property
    def n_tokens(self) -> int:
        """Tokens of all prompts, as the model read them."""
        return self.shard_token_offsets[-1]

    @property
    def n_shards(self) -> int:
        """How many shard files there are."""
        return len(self.manifest.shards)

    @property
    def width(self) -> int:
        """Values a token: the hidden size, or the number of directions."""
        return self.manifest.shards[0].tensors[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the stored values."""
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[self.manifest.dtype]

    @functools.cached_property
    def axis(self) -> TokenAxis:
        """Where prompts, shards and chunks begin on the token axis. Raises NotARunError where the manifest does not say it."""
        return token_axis(self.manifest, self.width, self.dtype)

    @property
    def job(self) -> HarvestJob | None:
        """The run's job, with links to where the folder lies now."""
        job = read_job(self._folder)
        return None if job is None else with_fresh_links(self._folder, job)

    @property
    def stats(self) -> Stats:
        """Mean, standard deviation and mean norm over all tokens but each prompt's first."""
        tensors = safetensors.torch.load_file(self._folder.stats)
        norms = {int(layer): norm for layer, norm in self.manifest.mean_token_norm.items()}
        return Stats(tensors["mean"], tensors["std"], norms)

    def prompt(self, number: int) -> torch.Tensor:
        """The residual stream of one prompt: [layer, token, hidden], in the stored type. Raises IndexError."""
        return self._of_prompt("prompt", number)

    def token_ids(self, number: int) -> torch.Tensor:
        """The ids that the model read for one prompt: int32 [token]. Raises IndexError."""
        return self._of_prompt("tokens", number)

    def text(self, number: int) -> str:
        """One prompt's text. Raises IndexError."""
        self._check_prompt(number)
        return self.manifest.prompts[number]

    def layer(self, layer: int) -> Layer:
        """All tokens of one layer, by the number of its decoder block. Raises KeyError where the run does not hold it."""
        return Layer(self, layer)

    def xarray(self) -> "xarray.Dataset":
        """The whole run as one xarray dataset, over all shards; what is selected is read when its values are asked for, not before.

        `activations` (layer, token, hidden), or `projections` (layer, token, direction): bfloat16 as float32, which holds it exactly.
        Coordinates: `layer`, the decoder block, to select by; along `token`, prompts end to end, `prompt` (its number), `position` and
        `token_id`. `prompt_offsets`: prompt i is tokens prompt_offsets[i] to prompt_offsets[i + 1].
        A selection of one layer reads chunks of that layer alone. Raises HarvestError where xarray is not installed.
        """
        try:
            from harvest.reading.lazy import lazy_dataset
        except ModuleNotFoundError as error:
            if error.name != "xarray":
                raise
            raise HarvestError("xarray: the package is not installed; pip install xarray") from error
        return lazy_dataset(self)

    def layer_position(self, layer: int) -> int:
        """The place of a decoder block on the layer axis. Raises KeyError where the run does not hold it."""
        if layer not in self.layers:
            raise KeyError(f"layer {layer} is not in this run; it holds {self.layers}")
        return self.layers.index(layer)

    def shard(self, index: int) -> Shard:
        """Open one shard file by its number."""
        return open_shard(self.shard_file(index), self.layers)

    def shard_file(self, index: int) -> Path:
        """Where one shard file lies, by its number."""
        return self._folder.find(self.manifest.shards[index].key)

    def __repr__(self) -> str:
        manifest = self.manifest
        return f"<Run {self.path.name}: {manifest.model_id}, {self.n_prompts} prompts, {self.n_tokens} tokens, layers {self.layers}>"

    def _of_prompt(self, kind: str, number: int) -> torch.Tensor:
        self._check_prompt(number)
        with self.shard(bisect.bisect_right(self._first_prompts, number) - 1) as shard:
            return shard[f"{kind}_{number}"]

    def _check_prompt(self, number: int) -> None:
        if not 0 <= number < self.n_prompts:
            raise IndexError(f"prompt {number} is not in this run; it holds prompts 0 to {self.n_prompts - 1}")


def open_run(path: str | Path) -> Run:
    """Open a whole run by its folder. Raises NotARunError."""
    return Run(path)
