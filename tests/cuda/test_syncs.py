"""The host waits for the card once a batch, for the event of a copy that is done, and never inside a forward pass."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import harvest
import harvest.stream
import harvest.window
from harvest.input.directions import read_directions
from harvest.stream import StreamReader
from harvest.window import WindowReader

from .conftest import PROMPTS, Card, asking, settings

pytestmark = pytest.mark.cuda


@pytest.fixture
def waits(card: Card, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What made the host wait while windows were read, from the second on, and how many batches those had.

    The first window of a streamed run compares values on the host. On a real card torch itself raises for each wait but that for an event.
    """
    found: dict[str, Any] = {"batches": 0, "syncs": Counter(), "windows": 0}

    def watch(kind: Any) -> None:
        read = kind.read

        def watched(self: Any, window: Any, buffer: Any) -> None:
            found["windows"] += 1
            if found["windows"] == 1:
                read(self, window, buffer)
                return
            found["batches"] += len(self._prepared.plan.batches(window))
            if not card.is_simulated:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    read(self, window, buffer)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                return
            before = Counter(card.simulator.syncs)
            read(self, window, buffer)
            found["syncs"] += Counter(card.simulator.syncs) - before

        monkeypatch.setattr(kind, "read", watched)

    watch(WindowReader)
    watch(StreamReader)
    return found


@pytest.mark.parametrize("way", ["staged", "run by run"])
@pytest.mark.parametrize("contents", ["activations", "projections"])
def test_a_batch_waits_for_its_event_alone(
    way: str, contents: str, llama: Path, waits: dict[str, Any], card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "run by run":
        monkeypatch.setattr(harvest.window, "_STAGED_SHARE", 0)
    fields: dict[str, Any] = {}
    if contents == "projections":
        np.save(tmp_path / "directions.npy", np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32))
        fields["project_onto"] = read_directions(str(tmp_path / "directions.npy"))
    harvest.run(asking(llama, prompts=PROMPTS * 3, **fields), tmp_path / "run", settings())
    assert waits["batches"] >= 8
    if card.is_simulated:
        assert set(waits["syncs"]) == {"Event.synchronize"}
        # One for each batch, and one for each window that is put together on the card.
        assert waits["syncs"]["Event.synchronize"] <= waits["batches"] + waits["windows"] * (way == "staged")


@pytest.mark.parametrize("place", ["card", "host"])
def test_a_batch_of_a_streamed_block_waits_for_its_event_alone(
    place: str, llama: Path, waits: dict[str, Any], card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "host":
        monkeypatch.setattr(harvest.stream, "_STAYS", 0)
    harvest.run(asking(llama, prompts=PROMPTS * 3, layers=[1, 3]), tmp_path / "run", settings(weights="stream"))
    assert waits["batches"] >= 8
    if card.is_simulated:
        assert set(waits["syncs"]) == {"Event.synchronize"}


def test_the_next_window_starts_before_the_last_copy_of_the_one_before(
    llama: Path, card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each window is a single batch here, so only the next window can run during its copy."""
    started: list[tuple[str, int]] = []
    read, wait = harvest.window.Capture.read, harvest.window.Arrival.wait

    def reading(self: Any, *arguments: Any) -> Any:
        started.append(("pass", len(started)))
        return read(self, *arguments)

    def waiting(self: Any) -> Any:
        started.append(("wait", len(started)))
        return wait(self)

    monkeypatch.setattr(harvest.window.Capture, "read", reading)
    monkeypatch.setattr(harvest.window.Arrival, "wait", waiting)
    # The writers may be slow: what is waited for then is a buffer.
    monkeypatch.setattr(harvest.window.WindowBuffers, "has_free", True)
    harvest.run(asking(llama, prompts=["x" * 100] * 6, shard_size=1), tmp_path / "run", settings(batch_tokens=101, window_tokens=101))
    assert [kind for kind, _ in started] == ["pass", "pass", "wait", "pass", "wait", "pass", "wait", "pass", "wait", "pass", "wait", "wait"]
