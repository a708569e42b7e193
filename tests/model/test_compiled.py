"""--compile: decoder blocks compiled with torch.compile, and checked against the uncompiled ones."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TEXTS, Notes, tiny_request

import harvest
from harvest.errors import FolderError, RequestError, StreamError
from harvest.model.plain import mean_error

ENGINE = {"store_dtype": "float32", "batch_tokens": 100}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of TEXTS that is not compiled."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    harvest.run(tiny_request(shard_size=4), folder, harvest.Engine(**ENGINE))
    return folder


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
# torch's own use of what it deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_blocks_compute_the_same_values(plain: Path, tmp_path: Path) -> None:
    notes = Notes()
    harvest.run(tiny_request(shard_size=4), tmp_path / "run", harvest.Engine(**ENGINE, compile=True), notes)
    assert any(note.startswith("compiled the decoder blocks in ") for note in notes.said)
    run, other = harvest.open(tmp_path / "run"), harvest.open(plain)
    for prompt in range(len(TEXTS)):
        for ours, theirs in zip(run.prompt(prompt).double(), other.prompt(prompt).double(), strict=True):
            assert mean_error(ours, theirs) < 1e-5
    assert run.manifest.local["engine"]["compile"] is True
    assert "compile" not in other.manifest.local["engine"]
    # Its last bits are others, so it is another run.
    with pytest.raises(FolderError, match="compile"):
        harvest.run(tiny_request(shard_size=4), tmp_path / "run", harvest.Engine(**ENGINE))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Replace torch.compile."""

    def replace(compile: Callable[[Any], Any]) -> None:
        monkeypatch.setattr(torch, "compile", lambda function, **_options: compile(function))

    return replace


@pytest.mark.parametrize(("factor", "shown"), [(1.01, r"0\.01"), (float("nan"), "nan")])
def test_compiled_blocks_that_compute_something_else_are_refused(factor: float, shown: str, compiler: Any, tmp_path: Path) -> None:
    compiler(lambda function: lambda *arguments, **others: function(*arguments, **others) * factor)
    with pytest.raises(StreamError, match=f"compile: layer 0 is {shown} of its norm away"):
        harvest.run(tiny_request(), tmp_path / "run", harvest.Engine(**ENGINE, compile=True))


def test_a_compiler_that_fails_is_named(compiler: Any, tmp_path: Path) -> None:
    def fail(_function: Any) -> Any:
        raise FileNotFoundError("no compiler was found\nand much more")

    compiler(fail)
    with pytest.raises(StreamError, match=r"compile: torch cannot compile the decoder blocks here \(no compiler was found\)"):
        harvest.run(tiny_request(), tmp_path / "run", harvest.Engine(**ENGINE, compile=True))


@pytest.mark.parametrize("changes", [{"weights": "stream"}, {"device_map": "auto", "max_memory": "cpu=1GB"}])
def test_weights_that_are_not_on_one_device_are_not_compiled(changes: Any, save_model: Any, tmp_path: Path) -> None:
    import transformers
    from conftest import LLAMA_LIKE

    request = harvest.HarvestRequest(model=str(save_model(transformers.LlamaConfig(**LLAMA_LIKE))), prompts=TEXTS)
    with pytest.raises(RequestError, match="compile: it needs all weights on one device"):
        harvest.run(request, tmp_path / "run", harvest.Engine(compile=True, **changes))
    assert not (tmp_path / "run").exists()
