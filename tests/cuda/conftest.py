"""What the tests of a card share: the card, real or simulated, and runs on it that are compared with runs on the CPU.

On a simulated card bytes must equal those of a CPU that reads the same batches. On a real one the values agree with the CPU's to the
tolerance that `--check` allows.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import LLAMA_LIKE, Notes

import harvest
import harvest.prepare
from harvest.input.plan import CardCosts, make_plan
from harvest.model.plain import mean_error, tolerance
from harvest.reading.verify import verify

HERE = Path(__file__).parent
SIMULATOR = sys.modules.get("fakecuda")
# Lengths from 1 to 120 tokens of the byte tokenizer, unsorted, each often enough for several batches and windows.
PROMPTS = [text * (1 + number % 3) for number in range(4) for text in ("ab", "once upon a time ", "x" * 40, "é", "The cat sat. " * 2)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests on a machine without a card."""
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@dataclass
class Card:
    """The cards of this machine. simulator: its module if they are simulated, else None."""

    simulator: Any

    @property
    def is_simulated(self) -> bool:
        return self.simulator is not None

    def need(self, n_cards: int) -> None:
        """Have at least `n_cards` cards, or skip the test."""
        if self.is_simulated:
            self._set_up(DEVICES=n_cards)
        elif torch.cuda.device_count() < n_cards:
            pytest.skip(f"this machine has no {n_cards} cards")

    def shrink(self, n_bytes: int) -> None:
        """Let a card have `n_bytes` of memory."""
        if self.is_simulated:
            # What is cached was taken when the card was larger.
            torch.cuda.empty_cache()
            self._set_up(BYTES=n_bytes)
        else:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(min(n_bytes / torch.cuda.get_device_properties(0).total_memory, 1.0))

    def schedule(self, mode: str, seed: int = 1) -> None:
        """Do the work on a simulated card in another order."""
        self.simulator.MODE = mode
        self.simulator.set_mode(mode, seed)

    def _set_up(self, **values: int) -> None:
        for name, value in values.items():
            setattr(self.simulator, name, value)
        self.simulator.C.setup(self.simulator.MODE, 1, self.simulator.DEVICES, self.simulator.BYTES, True)

    def command(self, *arguments: object) -> list[str]:
        """Return a command line of harvest that sees these cards."""
        rig = [str(Path(self.simulator.__file__).parent / "run.py")] if self.is_simulated else []
        return [sys.executable, *rig, "-m", "harvest", *map(str, arguments)]


@pytest.fixture
def card() -> Iterator[Card]:
    """The card, as it was found when the test ends."""
    simulator = SIMULATOR
    before = (simulator.MODE, simulator.DEVICES, simulator.BYTES) if simulator is not None else None
    torch.cuda.set_device(0)
    yield Card(simulator)
    if simulator is not None and before is not None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        simulator.MODE, simulator.DEVICES, simulator.BYTES = before
        simulator.C.setup(simulator.MODE, 1, simulator.DEVICES, simulator.BYTES, True)
    else:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.set_device(0)


@pytest.fixture(autouse=True)
def _within_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go around what a simulated card lacks.

    transformers reserves memory before it loads a model, all but 1.2 GiB of a card, and the cards of some tests have less. And the CPU's
    kernels, which the simulator runs, do not count integers (torch.histc).
    """
    if SIMULATOR is None:
        return
    monkeypatch.setattr("transformers.modeling_utils.caching_allocator_warmup", lambda *_arguments: None)
    count = torch.histc
    monkeypatch.setattr(torch, "histc", lambda values, **bins: count(values.float(), **bins).to(values.dtype))


@pytest.fixture
def once() -> None:
    """Skip a test under all schedules of a simulated card but the first: its result does not depend on them."""
    if SIMULATOR is not None and SIMULATOR.MODE != "lazy":
        pytest.skip("runs under the schedule lazy alone")


@pytest.fixture(scope="session")
def llama(save_model: Any) -> Path:
    """A Llama of four blocks with random weights, in float32."""
    return Path(save_model(transformers.LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=False)))


def asking(model: Path | str, **fields: Any) -> harvest.HarvestRequest:
    """A request for the residual stream of PROMPTS."""
    return harvest.HarvestRequest(**{"model": str(model), "prompts": PROMPTS, "layers": "all", "shard_size": 4, **fields})


# Many small windows of many small batches.
IN_PIECES = {"device": "cuda", "compute_dtype": "float32", "batch_tokens": 160, "window_tokens": 400}


def settings(**changes: Any) -> harvest.Engine:
    """An engine on the card."""
    return harvest.Engine(**IN_PIECES | changes)


@pytest.fixture
def held_against_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: Card) -> Callable[..., Notes]:
    """Run a request on the card and on the CPU, in the same batches, and compare. Returns what the run on the card noted."""

    def check(request: harvest.HarvestRequest, engine: harvest.Engine, folder: Path | None = None, exact: bool = True) -> Notes:
        folder, notes = folder or tmp_path / "card", Notes()
        if not folder.exists():
            assert harvest.run(request, folder, engine, notes).status == "done"
        compare_with_cpu(folder, request, engine, tmp_path / f"{folder.name}-cpu", monkeypatch, exact and card.is_simulated)
        return notes

    return check


def compare_with_cpu(
    folder: Path, request: harvest.HarvestRequest, engine: harvest.Engine, other: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """Compare a run on the card with the same run on the CPU."""
    fingerprint = harvest.open(folder).manifest.local["fingerprint"]
    costs = CardCosts(**fingerprint["card"])
    alike = {"device": "cpu", "weights": "resident", "scratch": None, "device_map": "none", "max_memory": None}
    alike |= {"batch_tokens": fingerprint["batch_tokens"], "window_tokens": fingerprint.get("window_tokens", engine.window_tokens)}
    with monkeypatch.context() as patch:
        # A CPU would form other batches, whose last bits differ.
        patch.setattr(harvest.prepare, "make_plan", lambda *arguments: make_plan(*arguments[:-1], costs))
        harvest.run(request, other, engine.model_copy(update=alike))
    agree(folder, other, exact)
    assert not verify(folder).findings


def agree(folder: Path, other: Path, exact: bool, allowed: float | None = None) -> None:
    """Fail if two runs of the same prompts differ: in a byte, or by more than their types explain."""
    if exact:
        assert digests(folder) == digests(other)
        return
    one, two = harvest.open(folder), harvest.open(other)
    stored = str(two.manifest.dtype)
    allowed = allowed or tolerance(
        stored if stored in ("float16", "bfloat16") else "float32", one.manifest.local["engine"]["compute_dtype"]
    )
    for prompt in range(one.n_prompts):
        assert one.token_ids(prompt).tolist() == two.token_ids(prompt).tolist()
        for ours, theirs in zip(one.prompt(prompt).double(), two.prompt(prompt).double(), strict=True):
            assert mean_error(ours, theirs) <= allowed, prompt


def digests(folder: Path) -> dict[str, str]:
    """The digest of each shard, and of the stats."""
    files = [*sorted((folder / "shards").iterdir()), folder / "stats.safetensors"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_all(commands: Sequence[Sequence[str]], env: Sequence[dict[str, str]]) -> list[str]:
    """Run commands side by side, and fail unless all succeed. Return what each wrote to stderr."""
    processes = [
        subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, own in zip(commands, env, strict=True)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error
    return errors
