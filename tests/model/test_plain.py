"""The check before a run: prompts in a padded batch against each alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TEXTS, Notes, tiny_request

import harvest
from harvest.errors import RequestError, StreamError
from harvest.model.blocks import LoadedDecoder
from harvest.model.capture import Capture
from harvest.model.plain import check_values, tolerance

IDS = [np.arange(1, 9, dtype=np.int32), np.arange(3, 6, dtype=np.int32)]


class Decoder(torch.nn.Module):
    """Two blocks; one that reads a batch otherwise where it is longer, as models whose positions hang on the padded length do."""

    def __init__(self, minds_the_length: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.minds_the_length = minds_the_length

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        stream = self.embed(input_ids)
        if self.minds_the_length:
            stream = stream * (1 + 0.1 * (input_ids.shape[1] > 4))
        for layer in self.layers:
            stream = layer(stream)
        return stream


@pytest.mark.parametrize("store", [torch.float32, torch.bfloat16])
def test_a_decoder_that_minds_the_padded_length_is_found(store: torch.dtype) -> None:
    for minds in (False, True):
        decoder = Decoder(minds)
        loaded = LoadedDecoder(decoder, list(decoder.layers))
        allowed = tolerance(str(store).removeprefix("torch."), "float32")
        with Capture(loaded, [0, 1], 8, store) as capture:
            if minds:
                with pytest.raises(
                    StreamError, match=r"layer 0 of the prompt of 3 tokens is 0\.\d+ of its norm away .* cannot be read in padded"
                ):
                    check_values(loaded, capture, [0, 1], IDS, allowed)
            else:
                assert check_values(loaded, capture, [0, 1], IDS, allowed) <= allowed


def test_a_checked_run_says_so_and_writes_the_same(tiny_run: Path, tmp_path: Path) -> None:
    notes = Notes()
    harvest.run(tiny_request(shard_size=4), tmp_path / "run", harvest.Engine(check=True), notes)
    assert any(note.startswith("checked: 2 prompts in a batch are within ") for note in notes.said), notes.said
    for path in (tiny_run / "shards").iterdir():
        assert path.read_bytes() == (tmp_path / "run" / "shards" / path.name).read_bytes()


def test_a_check_of_projections_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    from harvest.input.directions import tensor_object

    request: Any = tiny_request(TEXTS, project_onto=tensor_object(np.ones((1, 64), dtype=np.float32)))
    with pytest.raises(RequestError, match="check: it compares the stream itself"):
        harvest.run(request, tmp_path / "run", harvest.Engine(check=True))
