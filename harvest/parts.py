"""Which share of a run this process takes: `--part I/N`, and the rank that a launcher gave it.

A rank is read only where it is true. torchrun and `accelerate launch` set RANK and WORLD_SIZE, and TORCHELASTIC_RUN_ID with them; a
cluster may set the first two for other reasons. In a SLURM batch script SLURM_NTASKS and SLURM_PROCID stand too, but one shell runs
there, and not N: only in a step, which `srun` starts, are there as many processes as it says. An array's index is no rank:
`--array=3,7,11` has the count 3.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from harvest.errors import RequestError


@dataclass(frozen=True)
class Part:
    """Share number `index`, from 0, of `count`."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"part {self.index}/{self.count}"

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole run."""
        return self.count == 1

    def takes(self, unit: int) -> bool:
        """Whether a unit of work, numbered from 0, belongs to this share: they are dealt out in turn."""
        return unit % self.count == self.index


WHOLE = Part()


@dataclass(frozen=True)
class Rank:
    """One of `size` processes that a launcher started together; number `local` of `local_size` on its machine."""

    index: int = 0
    size: int = 1
    local: int = 0
    local_size: int = 1

    def share(self, part: Part) -> Part:
        """What this rank takes of a part."""
        return Part(part.index * self.size + self.index, part.count * self.size)


ALONE = Rank()


def parse_part(text: str) -> Part:
    """`I/N` as a Part. Raises RequestError."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip(), re.ASCII)
    if match is None or not 0 <= int(match[1]) < int(match[2]):
        raise RequestError(f"part: {text!r} was given; a part is I/N, counted from 0: of four they are 0/4, 1/4, 2/4 and 3/4")
    return Part(int(match[1]), int(match[2]))


def find_rank(environment: Mapping[str, str] | None = None) -> Rank:
    """The rank of this process by its environment, or that of a process on its own. Raises RequestError for one that makes no sense."""
    environment = os.environ if environment is None else environment
    if {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= environment.keys():
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} <= environment.keys():
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return ALONE
    index, size, local = (_number(name, environment.get(name, "0")) for name in names[:3])
    if not index < size:
        raise RequestError(f"{names[0]}={index} and {names[1]}={size} stand in the environment; ranks go from 0 to {size - 1}; unset both")
    return Rank(index, size, local, _local_size(names[3], environment, local, size))


def _local_size(name: str, environment: Mapping[str, str], local: int, size: int) -> int:
    """Ranks on this machine. SLURM writes them for all nodes, as in 2(x3),1: two on each of three nodes, and one on the fourth."""
    if name == "LOCAL_WORLD_SIZE":
        return _number(name, environment.get(name, str(size)))
    counts: list[int] = []
    for entry in environment.get(name, str(size)).split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry, re.ASCII)
        if match is None:
            return max(local + 1, 1)
        counts += [int(match[1])] * int(match[2] or 1)
    node = int(environment.get("SLURM_NODEID", "0") or 0)
    return counts[node] if node < len(counts) else local + 1


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise RequestError(f"{name}={text} stands in the environment, where a number was expected; unset it, or start harvest without it")
    return int(text)
