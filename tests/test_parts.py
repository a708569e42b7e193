"""Which share a process takes: --part, and the ranks of launchers, read only where they are true."""

import pytest
import torch

from harvest.errors import RequestError
from harvest.model.device import resolve_device
from harvest.parts import ALONE, WHOLE, Part, Rank, find_rank, parse_part

# What each launcher sets, as it was found in processes that it had started.
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {
    "SLURM_JOB_ID": "5", "SLURM_NTASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
}  # fmt: skip
SBATCH = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(("text", "part"), [("0/1", WHOLE), ("0/4", Part(0, 4)), (" 3/4 ", Part(3, 4)), ("7/8", Part(7, 8))])
def test_a_part(text: str, part: Part) -> None:
    assert parse_part(text) == part


@pytest.mark.parametrize("text", ["", "1", "4/4", "5/4", "-1/4", "1/0", "0/0", "a/b", "1/4/2", "1.0/2", "٣/4"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(RequestError, match="a part is I/N, counted from 0: of four they are 0/4, 1/4, 2/4 and 3/4"):
        parse_part(text)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, ALONE),
        (TORCHRUN, Rank(3, 4, 1, 2)),
        (SRUN, Rank(2, 3, 0, 1)),
        (SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}, Rank(1, 3, 1, 2)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2),1", "SLURM_NODEID": "2"}, Rank(2, 3, 0, 1)),
        # A launcher of its own inside a step counts; the shell of a batch script, and a cluster's own RANK, do not.
        (SRUN | TORCHRUN, Rank(3, 4, 1, 2)),
        (SBATCH, ALONE),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ALONE),
        (SBATCH | {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "3"}, ALONE),
    ],
)
def test_ranks_are_read_only_where_they_are_true(environment: dict[str, str], rank: Rank) -> None:
    assert find_rank(environment) == rank


@pytest.mark.parametrize("change", [{"RANK": "4"}, {"WORLD_SIZE": "many"}, {"LOCAL_RANK": ""}])
def test_a_rank_that_makes_no_sense(change: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=r"stands? in the environment"):
        find_rank(TORCHRUN | change)


def test_ranks_of_parts_share_each_unit_once() -> None:
    shares = [Rank(rank, 2).share(Part(part, 3)) for part in range(3) for rank in range(2)]
    takers = [[share for share in shares if share.takes(unit)] for unit in range(20)]
    assert [len(taker) for taker in takers] == [1] * 20
    assert len({share.index for share in shares}) == 6


def test_each_rank_takes_a_card_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [str(resolve_device("auto", Rank(rank, 8, rank % 4, 4))) for rank in (0, 3, 5)] == ["cuda:0", "cuda:3", "cuda:1"]
    assert str(resolve_device("cuda", Rank(2, 4, 2, 4))) == "cuda:2"
    assert str(resolve_device("cuda:3", Rank(1, 2, 0, 1))) == "cuda:3"
    with pytest.raises(RequestError, match="cuda:1 was given to each of 2 ranks on this machine"):
        resolve_device("cuda:1", Rank(0, 2, 0, 2))
    notes: list[str] = []
    assert str(resolve_device("cuda", Rank(5, 8, 5, 8), notes.append)) == "cuda:1"
    assert not notes, "one rank says it for all"
    resolve_device("cuda", Rank(0, 8, 0, 8), notes.append)
    assert notes == ["warning: 8 ranks share the 4 cards of this machine; start one rank a card"]
    # srun --gpus-per-task=1 shows each task its own card alone.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert str(resolve_device("auto", Rank(3, 4, 3, 4))) == "cuda:0"
