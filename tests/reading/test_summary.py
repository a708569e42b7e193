"""A run on one screen: whole, unfinished, of the API's kind, or none; light enough to be asked again and again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import TEXTS, tiny_request
from test_either_kind import make_api_folder

import harvest
from harvest.errors import CancelledError, NotARunError
from harvest.input.directions import tensor_object
from harvest.reading.export import export_safetensors
from harvest.reading.summary import ranges, spread, summarize
from harvest.stop import StopFlag


def test_a_whole_run_in_facts(tiny_run: Path) -> None:
    run, found = harvest.open(tiny_run), summarize(tiny_run)
    files = sum(path.stat().st_size for path in (tiny_run / "shards").iterdir())
    assert (found.state, found.error, found.model) == ("done", None, "tiny")
    assert (found.layers, found.n_blocks, found.hidden_size, found.width) == ([0, 1, 2, 3], 4, run.width, run.width)
    assert (found.n_prompts, found.n_tokens, found.n_shards, found.n_shards_done) == (len(TEXTS), 248, 3, 3)
    assert (found.shortest, found.median, found.longest) == (2, 12, 70)
    assert (found.stored_bytes, found.value_bytes) == (files, 248 * 4 * run.width * 2)
    assert found.mean_token_norm == run.manifest.mean_token_norm
    assert run.job is not None
    assert run.job.result is not None
    assert found.timings == run.job.result.timings.model_dump()
    assert (found.n_cut, found.n_doubled, found.nonfinite_tokens) == (0, 0, {})


def test_a_screen_holds_it_and_says_what_matters(tiny_run: Path) -> None:
    lines = summarize(tiny_run).to_text().splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines[1:]), lines
    text = "\n".join(lines)
    for words in ("tiny, 4 blocks of", "layers     4: 0-3", f"prompts    {len(TEXTS)}", "248 (2 to 70 a prompt, median 12)", "forward"):
        assert words in text
    head, numbers = next((line, lines[place + 1]) for place, line in enumerate(lines) if line.startswith("  layer"))
    assert head.split() == ["layer", "0", "1", "2", "3"]
    norms = harvest.open(tiny_run).manifest.mean_token_norm
    assert [float(word) for word in numbers.split()[1:]] == pytest.approx(list(norms.values()), rel=1e-4)


def test_many_layers_are_a_selection(tiny_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["mean_token_norm"] = {str(layer): float(layer) for layer in range(126)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines = summarize(folder).to_text().splitlines()
    assert len(lines) <= 24
    assert "8 of 126 layers" in lines[-3]
    assert lines[-2].split()[1:] == ["0", "18", "36", "54", "71", "89", "107", "125"]


def test_faults_of_the_prompts_are_counted(tmp_path: Path) -> None:
    request = tiny_request(["x" * 100, "y" * 100, "z", "<s>again"])
    harvest.run(request, tmp_path / "run", harvest.Engine(context_length=64))
    found = summarize(tmp_path / "run")
    assert (found.n_cut, found.n_doubled) == (2, 1)
    assert "4, 2 cut to the context, 1 with two start tokens" in found.to_text()


def test_a_run_that_was_stopped_says_how_far_it_is(tmp_path: Path) -> None:
    class StopsAfterOneShard(StopFlag):
        """A wish to stop that comes with the first record."""

        def check(self) -> None:
            if list((tmp_path / "run").glob("records/shard_*.json")):
                raise CancelledError("stopped by the test")

    request = tiny_request(TEXTS * 3, shard_size=4)
    with pytest.raises(CancelledError):
        harvest.run(request, tmp_path / "run", harvest.Engine(window_bytes=1), stop=StopsAfterOneShard())
    found = summarize(tmp_path / "run")
    done = len(list((tmp_path / "run" / "shards").glob("*.zip")))
    assert 0 < done < 7
    assert (found.state, found.n_shards, found.n_shards_done) == ("cancelled", 7, done)
    assert f"{done} of 7 published: " in found.to_text()
    assert found.stored_bytes == sum(path.stat().st_size for path in (tmp_path / "run" / "shards").glob("*.zip"))


def test_folders_of_the_api_and_exported_ones_say_what_their_manifest_says(tiny_run: Path, tmp_path: Path) -> None:
    run = harvest.open(tiny_run)
    found = summarize(make_api_folder(run, tmp_path / "api"))
    assert (found.state, found.n_shards, found.n_shards_done, found.n_cut, found.device) == ("done", 2, 2, None, None)
    assert found.stored_bytes == sum(path.stat().st_size for path in (tmp_path / "api").glob("shard_*"))
    assert "computed" not in found.to_text()
    export_safetensors(run, tmp_path / "exported")
    assert summarize(tmp_path / "exported").n_tokens == 248
    (tmp_path / "api" / "shard_00001.safetensors").unlink()
    assert "1 shard file is missing" in summarize(tmp_path / "api").to_text()


def test_projections_are_called_so(tmp_path: Path, tiny_run: Path) -> None:
    directions = np.eye(harvest.open(tiny_run).width, dtype=np.float32)[:3]
    harvest.run(tiny_request(project_onto=tensor_object(directions)), tmp_path / "run")
    assert "projections, 3 directions a token and layer, float32" in summarize(tmp_path / "run").to_text()


def test_what_is_no_run_is_an_error(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match="no such run folder"):
        summarize(tmp_path / "none")
    with pytest.raises(NotARunError, match=r"neither the manifest\.json nor the job\.json"):
        summarize(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(NotARunError, match="is no manifest of a run"):
        summarize(tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "copying.json").write_text("{}")
    assert summarize(copy).state == "copying"


def test_the_command_prints_it_without_torch(tiny_run: Path) -> None:
    code = (
        "import sys; from harvest.cli import cli; cli(standalone_mode=False); assert not {'torch', 'zarr', 'transformers'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code, "show", tiny_run], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == summarize(tiny_run).to_text() + "\n"
    printed = subprocess.run([sys.executable, "-m", "harvest", "show", tiny_run, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(printed.stdout) == json.loads(summarize(tiny_run).to_json())
    failed = subprocess.run([sys.executable, "-m", "harvest", "show", tiny_run / "shards"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("harvest: error: ")


@pytest.mark.parametrize(("n", "places"), [(0, []), (1, [0]), (2, [0, 8]), (3, [0, 4, 8]), (9, list(range(9))), (50, list(range(9)))])
def test_places_are_spread_evenly(n: int, places: list[int]) -> None:
    assert spread(9, n) == places


def test_ranges_are_short() -> None:
    assert ranges([0, 1, 2, 5, 8, 9]) == "0-2, 5, 8-9"
    assert ranges([]) == ""
