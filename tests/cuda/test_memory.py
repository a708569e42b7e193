"""Too little memory, wherever it shows: a run ends whole, or in a HarvestError that says what to do, and its folder is resumed."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Notes
from torch.utils._python_dispatch import TorchDispatchMode

import harvest
import harvest.stream
import harvest.window
from harvest.errors import DeviceError, HarvestError, ModelError, StreamError
from harvest.output.folder import RunFolder
from harvest.output.job import read_job

from .conftest import PROMPTS, Card, agree, asking, settings

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("once")]

PACKAGE = str(Path(harvest.__file__).parent)
# What a lowered batch budget changes is the last bits of float32.
ALLOWED = 1e-4


class Allocations(TorchDispatchMode):
    """Sees each operator that makes a tensor on a card or in pinned memory, by the line of harvest that asked for it, and fails some.

    fails_at: the line, as `model/capture.py:118`. times: how often it fails, from its `first` time on.
    """

    def __init__(self, fails_at: str | None = None, first: int = 0, times: int = 1) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.n_failed = 0
        self._fails_at, self._first, self._times = fails_at, first, times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        tensors = made if isinstance(made, (tuple, list)) else [made]
        is_pinned = bool(kwargs.get("pin_memory")) or "_pin_memory" in str(func)
        is_new = all(result.alias_info is None for result in func._schema.returns)
        if is_new and (is_pinned or any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors)):
            self._see(is_pinned)
        return made

    def _see(self, is_pinned: bool) -> None:
        line = _line()
        number, self.seen[line] = self.seen[line], self.seen[line] + 1
        if line == self._fails_at and self._first <= number < self._first + self._times:
            self.n_failed += 1
            if is_pinned:
                raise RuntimeError("CUDA error: out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _line() -> str:
    """The line of harvest that is nearest on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@contextmanager
def in_all_threads(mode: TorchDispatchMode) -> Iterator[None]:
    """Have a mode in this thread, and in each that starts meanwhile."""
    start = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with mode:
            start(self)

    threading.Thread.run = run  # type: ignore[method-assign]
    try:
        with mode:
            yield
    finally:
        threading.Thread.run = start  # type: ignore[method-assign]


def run_or_fail(request: harvest.HarvestRequest, folder: Path, engine: harvest.Engine) -> HarvestError | None:
    """Run a request. Return its HarvestError if it ends in one, after checking that the job holds it too."""
    try:
        harvest.run(request, folder, engine)
    except HarvestError as error:
        job = read_job(RunFolder(folder))
        if job is None or (job.status, job.error) != ("failed", str(error)):
            raise AssertionError(f"the job says {job}") from error
        return error
    return None


# Each way through the program asks for memory at other lines.
WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "resident, run by run": {"_STAGED_SHARE": 0},
    "streamed, on the card": {"weights": "stream"},
    "streamed, on the host": {"weights": "stream", "_STAYS": 0},
    "streamed, in a file": {"weights": "stream", "scratch": True, "window_bytes": 1000},
    "checked": {"check": True},
}


@pytest.fixture
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> harvest.Engine:
    """The engine of a way, in batches of several prompts."""
    changes = dict(WAYS[request.param])
    for name, module in (("_STAGED_SHARE", harvest.window), ("_STAYS", harvest.stream)):
        if name in changes:
            monkeypatch.setattr(module, name, changes.pop(name))
    if changes.pop("scratch", False):
        changes["scratch"] = str(tmp_path)
    return settings(store_dtype="float32", batch_tokens=400, window_tokens=900, **changes)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_memory_that_runs_out_anywhere(way: harvest.Engine, llama: Path, tmp_path: Path, card: Card) -> None:
    request = asking(llama, prompts=PROMPTS[:12])
    seen = Allocations()
    with in_all_threads(seen):
        harvest.run(request, tmp_path / "whole", way)
    assert len(seen.seen) >= 8
    outcomes: Counter[str] = Counter()
    for number, line in enumerate(sorted(seen.seen)):
        # Once, when streams and rows are under way; and for ever.
        for first, times in ((seen.seen[line] // 2, 1), (0, 1 << 30)):
            folder = tmp_path / f"run-{number}-{first}-{times}"
            failing = Allocations(line, first, times)
            with in_all_threads(failing):
                error = run_or_fail(request, folder, way)
            outcomes["whole" if error is None else type(error).__name__] += 1
            if error is not None:
                assert times > 1 or not isinstance(error, StreamError), f"{line} failed once: {error}"
                harvest.run(request, folder, way)
            assert failing.n_failed, f"{line} was not reached"
            agree(folder, tmp_path / "whole", exact=False, allowed=ALLOWED)
    assert outcomes["whole"] >= len(seen.seen) // 2


@pytest.mark.parametrize("weights", ["resident", "stream"])
def test_cards_of_every_size(weights: str, llama: Path, tmp_path: Path, card: Card) -> None:
    """From a card that is too small for anything to one with room for all."""
    request, engine = asking(llama), settings(weights=weights, batch_tokens=400, window_tokens=900, store_dtype="float32")
    harvest.run(request, tmp_path / "whole", engine)
    outcomes: list[str] = []
    size, number = 20_000, 0
    while size < 4_000_000:
        card.shrink(size)
        folder = tmp_path / f"run-{number}"
        error = run_or_fail(request, folder, engine)
        outcomes.append("whole" if error is None else type(error).__name__)
        if error is None:
            agree(folder, tmp_path / "whole", exact=False, allowed=ALLOWED)
        else:
            assert isinstance(error, (DeviceError, ModelError, StreamError))
            assert "memory" in str(error)
        size, number = int(size * 1.3), number + 1
    assert outcomes[-1] == "whole"
    if card.is_simulated:
        assert outcomes[0] != "whole"
        # Once a card is large enough, each larger one is.
        assert "whole" not in outcomes[: outcomes.index("whole")]
        assert set(outcomes[outcomes.index("whole") :]) == {"whole"}


class Small(TorchDispatchMode):
    """A card without memory for the embeddings of more than `most` tokens."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self._most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The prompts that are tried before a run have up to 64 tokens.
        if "embedding" in str(func) and args[1].numel() > 64:
            self.tokens.append(args[1].numel())
            if args[1].numel() > self._most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def test_a_lowered_budget_is_said_once_and_kept(llama: Path, tmp_path: Path, card: Card) -> None:
    engine = settings(batch_tokens=480, window_tokens=900, store_dtype="float32")
    harvest.run(asking(llama), tmp_path / "whole", engine)
    for weights in ("resident", "stream"):
        notes, folder, small = Notes(), tmp_path / weights, Small(200)
        with in_all_threads(small):
            harvest.run(asking(llama), folder, engine.model_copy(update={"weights": weights}), notes)
        halvings = [note for note in notes.said if "did not fit" in note]
        assert len(halvings) in (1, 2), notes.said
        assert sum(count > 200 for count in small.tokens) <= 2 * len(halvings), f"{weights}: {small.tokens}"
        lowered = harvest.open(folder).manifest.local["lowered_batch_tokens"]
        assert len(lowered) == len(harvest.open(folder).manifest.shards)
        agree(folder, tmp_path / "whole", exact=False, allowed=ALLOWED)


class Broken(TorchDispatchMode):
    """A card that fails for good after `n_calls` calls."""

    def __init__(self, n_calls: int) -> None:
        super().__init__()
        self.n_left = n_calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_left -= 1
        if self.n_left < 0:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return func(*args, **(kwargs or {}))


def test_a_card_that_fails_leaves_a_folder_that_is_resumed(llama: Path, tmp_path: Path, card: Card) -> None:
    """After an illegal access each call to the card fails, also those that clean up."""
    request = asking(llama, prompts=PROMPTS * 3)

    for weights in ("resident", "stream"):
        engine, whole, counting = settings(weights=weights), tmp_path / weights, Broken(1 << 60)
        with in_all_threads(counting):
            harvest.run(request, whole, engine)
        for share in (0.05, 0.5, 0.95):
            folder, failing = tmp_path / f"{weights}-{share}", Broken(int(share * ((1 << 60) - counting.n_left)))
            with in_all_threads(failing), pytest.raises(HarvestError, match="an illegal memory access was encountered") as caught:
                harvest.run(request, folder, engine)
            job = read_job(RunFolder(folder))
            assert job is not None
            assert (job.status, job.error) == ("failed", str(caught.value))
            assert share < 0.9 or RunFolder(folder).recorded(), "what was published stays"
            assert harvest.run(request, folder, engine).status == "done"
            agree(folder, whole, exact=card.is_simulated)
