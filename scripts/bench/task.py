"""What every contender gets: one model's folder, the same token ids, the same layers, and a folder to write to."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """One contender's work.

    location: a Hugging Face folder or id.
    layers: decoder blocks, ascending.
    prompts: token ids of each prompt, int64 [token], the start token first: the very ids that harvest reads.
    out: an empty folder.
    batch_tokens: tokens of a pass of the limit; the others have sizes of their own.
    """

    location: str
    n_layers: int
    layers: list[int]
    prompts: list[Ids]
    out: Path
    batch_tokens: int

    @property
    def n_tokens(self) -> int:
        """Tokens of all prompts, padding left out."""
        return sum(map(len, self.prompts))

    @property
    def warm_up(self) -> list[Ids]:
        """A short batch to be read before the clock starts: harvest's own first pass, its check of the model, counts as loading too."""
        return [self.prompts[0][:64]]

    def batches(self, size: int) -> Iterator[list[Ids]]:
        """Prompts in file order, so many at a time."""
        for first in range(0, len(self.prompts), size):
            yield self.prompts[first : first + size]


def save_plan(work: Path, location: str, n_layers: int, layers: Sequence[int], prompts: Sequence[Ids]) -> None:
    """Write down for all contenders what they read."""
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in prompts])])
    np.savez(work / "ids.npz", ids=np.concatenate(prompts), offsets=offsets)
    plan = {"location": location, "n_layers": n_layers, "layers": list(layers), "n_prompts": len(prompts), "n_tokens": int(offsets[-1])}
    (work / "plan.json").write_text(json.dumps(plan))


def read_plan(work: Path) -> dict[str, Any]:
    """What `save_plan` wrote, but the ids."""
    return dict(json.loads((work / "plan.json").read_text()))


def load_task(work: Path, out: Path, n_prompts: int | None, batch_tokens: int) -> Task:
    """The task of a contender that reads the first so many prompts, or all."""
    plan = read_plan(work)
    with np.load(work / "ids.npz") as file:
        ids, offsets = file["ids"], file["offsets"]
    prompts = [ids[first:end] for first, end in itertools.pairwise(offsets)][:n_prompts]
    return Task(plan["location"], plan["n_layers"], plan["layers"], prompts, out, batch_tokens)
