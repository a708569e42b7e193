"""What a forward pass may do that cannot be read, and batches that do not fit the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TEXTS, Notes, tiny_request

import harvest
from harvest.errors import ModelError, StreamError
from harvest.model.blocks import LoadedDecoder, find_blocks
from harvest.model.capture import Capture
from harvest.model.tiny import tiny_model

IDS = [np.array([256, 1, 2, 3], dtype=np.int32), np.array([256, 9], dtype=np.int32)]


def loaded(module: torch.nn.Module, n_blocks: int = 3) -> LoadedDecoder:
    return LoadedDecoder(module, find_blocks(module, n_blocks))


class Decoder(torch.nn.Module):
    """A decoder whose blocks are called as a test wants."""

    def __init__(self, order: list[int], shape: tuple[int, ...] = (8,)) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.order = order
        self.shape = shape

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        stream = torch.ones(*input_ids.shape, 8)
        for block in self.order:
            stream = self.layers[block](stream.expand(*self.shape[:-1], *stream.shape) if len(self.shape) > 1 else stream)
        return stream


def read(decoder: torch.nn.Module, layers: list[int], **kwargs: Any) -> Any:
    with Capture(loaded(decoder), layers, **{"hidden_size": 8, "store_dtype": torch.float32, **kwargs}) as capture:
        return capture.read(IDS)


def test_rows_are_the_real_tokens_prompts_end_to_end() -> None:
    captured = read(Decoder([0, 1, 2]), [0, 2])
    assert captured.rows_LTW.shape == (2, 6, 8)
    assert torch.equal(captured.peaks_L, captured.rows_LTW.abs().amax(dim=(1, 2)))


@pytest.mark.parametrize(
    ("decoder", "layers", "message"),
    [
        (Decoder([1, 0, 2]), [0, 1], "decoder block 1 was called out of turn"),
        (Decoder([0, 0, 1]), [0, 1], "decoder block 0 was called out of turn"),
        (Decoder([0, 1]), [0, 2], "ended after calling 1 of the 2 asked decoder blocks"),
        (Decoder([0, 1, 2], shape=(4, 8)), [0, 1], r"hands out \[4, 2, 4, 8\]"),
    ],
)
def test_a_model_that_does_not_run_each_block_once_on_one_stream_is_refused(decoder: Any, layers: list[int], message: str) -> None:
    with pytest.raises(StreamError, match=message):
        read(decoder, layers)


def test_another_width_than_the_config_says_is_refused() -> None:
    with pytest.raises(StreamError, match=r"\[batch, token, hidden\] = \[2, 4, 16\]"):
        read(Decoder([0, 1, 2]), [0], hidden_size=16)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="no list of 3 decoder blocks"):
        find_blocks(torch.nn.Sequential(torch.nn.Linear(2, 2)), 3)


def test_hooks_are_gone_after_the_capture() -> None:
    model = tiny_model().get_decoder()
    with Capture(loaded(model, 4), [1], 64, torch.float32) as capture:
        capture.read(IDS)
    assert all(not module._forward_hooks for module in model.modules())


@contextmanager
def memory_for(n_tokens: int) -> Iterator[None]:
    """A device that has no memory for more padded tokens at once: its allocator's own error, raised from within the model."""

    def refuse(module: torch.nn.Module, args: Any, kwargs: Any = None) -> None:
        if isinstance(module, torch.nn.Embedding) and args[0].numel() > n_tokens:
            raise torch.OutOfMemoryError("out of memory")

    hook = torch.nn.modules.module.register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def test_a_batch_that_does_not_fit_is_read_in_halves(tiny_run: Path, tmp_path: Path) -> None:
    notes = Notes()
    with memory_for(80):
        harvest.run(tiny_request(shard_size=4), tmp_path / "run", harvest.Engine(store_dtype="float32"), notes)
    assert any("did not fit the device's memory" in text for text in notes.said)
    halved, whole = harvest.open(tmp_path / "run"), harvest.open(tiny_run)
    for number in range(len(TEXTS)):
        assert torch.allclose(halved.prompt(number), whole.prompt(number).float(), rtol=1e-2, atol=1e-2)


def test_one_prompt_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with memory_for(65), pytest.raises(StreamError, match="prompt 6, of 70 tokens, does not fit the device's memory even alone"):
        harvest.run(tiny_request(), tmp_path / "run")
    assert not (tmp_path / "run" / "manifest.json").exists()
