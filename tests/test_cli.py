"""The command as a user meets it: what it prints where, its exit codes, and what it does without torch."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TEXTS

import harvest


def command(
    *arguments: str | Path, stdin: str | None = None, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harvest", *map(str, arguments)],
        input=stdin, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}, timeout=120,
    )  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def test_a_run_prints_the_job_alone_on_stdout_and_all_else_on_stderr(prompts: Path, tmp_path: Path) -> None:
    done = command("run", "--model", "tiny", "--prompts", prompts, "--layers", "0-1,3", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert (job["status"], job["layers"], job["n_prompts"]) == ("done", [0, 1, 3], len(TEXTS))
    assert json.loads((tmp_path / "run" / "job.json").read_text())["job_id"] == job["job_id"]
    assert "tiny has random weights" in done.stderr
    assert "248 of 248 tokens" in done.stderr
    assert all(line.startswith("harvest: ") for line in done.stderr.splitlines()), done.stderr


def test_quiet_says_nothing_on_stderr(prompts: Path, tmp_path: Path) -> None:
    done = command("run", "--quiet", "--prompts", prompts, "--out", tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"] == "tiny"


def test_every_flag_reaches_the_run(prompts: Path, tmp_path: Path) -> None:
    done = command(
        "run", "--model", "tiny", "--prompts", prompts, "--layers", "2", "--shard-size", "2", "--batch-size", "16",
        "--no-add-special-tokens", "--compute-dtype", "bfloat16", "--store-dtype", "float16", "--codec", "zstd", "--context-length", "40",
        "--batch-tokens", "100", "--window-bytes", "1000000", "--device", "cpu", "--attention", "eager",
        "--device-map", "auto", "--max-memory", "cpu=1GiB", "--weights", "resident", "--window-tokens", "300", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = harvest.open(tmp_path / "run")
    manifest = run.manifest
    assert (run.layers, run.n_shards, manifest.batch_size, manifest.add_special_tokens, manifest.dtype) == ([2], 5, 16, False, "float16")
    assert manifest.local["engine"] == {
        "device": "cpu", "compute_dtype": "bfloat16", "store_dtype": "float16", "codec": "zstd", "attention": "eager", "context_length": 40,
        "batch_tokens": 100, "window_bytes": 1_000_000, "device_map": "auto", "weights": "resident", "window_tokens": 300,
    }  # fmt: skip
    assert run.token_ids(6).tolist() == list(b"x" * 39)


def test_standard_input_is_jsonl(tmp_path: Path) -> None:
    done = command("run", "--prompts", "-", "--out", tmp_path / "run", stdin='"one"\n{"text": "two"}\n')
    assert done.returncode == 0, done.stderr
    assert harvest.open(tmp_path / "run").manifest.prompts == ["one", "two"]


def test_blank_lines_of_a_text_file_are_left_out_and_counted(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "p.txt.gz", "wt") as file:
        file.write("one\n\n  \ntwo\n")
    done = command("run", "--prompts", tmp_path / "p.txt.gz", "--out", tmp_path / "run")
    assert "blank lines left out: 2" in done.stderr
    assert harvest.open(tmp_path / "run").manifest.prompts == ["one", "two"]


def test_without_out_the_run_goes_below_runs(prompts: Path, tmp_path: Path) -> None:
    done = command("run", "--prompts", prompts, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name.split("-")[0] for path in (tmp_path / "runs").iterdir()] == ["tiny"]


# Arguments, and what the message must say. PROMPTS stands for a good prompts file.
BAD = [
    (["run"], "prompts: none were given; name a file with --prompts, or a --config that holds them"),
    (["run", "--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such prompts file"),
    (["run", "--prompts", "prompts.csv"], "ends in .jsonl, .json, .txt"),
    (["run", "--prompts", "bad.jsonl"], "bad.jsonl, line 2: is not JSON"),
    (["run", "--prompts", "empty.jsonl"], "empty.jsonl, line 2: '' was given: an empty prompt has nothing to read"),
    (["run", "--prompts", "surrogate.jsonl"], "lone surrogate"),
    (["run", "--prompts", "PROMPTS", "--field", "body"], "line 1: expected a string, or an object with 'body', found the keys 'prompt'"),
    (["run", "--prompts", "PROMPTS", "--layers", "ALL"], "'ALL' was given; allowed are"),
    (["run", "--prompts", "PROMPTS", "--layers", "3-1"], "runs backwards"),
    (["run", "--prompts", "PROMPTS", "--layers", "9"], "9 was given, but tiny has 4 decoder blocks, numbered 0 to 3"),
    (["run", "--prompts", "PROMPTS", "--shard-size", "0"], "shard_size: 0 was given"),
    (["run", "--prompts", "PROMPTS", "--shard-size", "5000"], "4096"),
    (["run", "--prompts", "PROMPTS", "--batch-size", "65"], "batch_size: 65 was given"),
    (["run", "--prompts", "PROMPTS", "--store-dtype", "int8"], "'auto', 'bfloat16', 'float16' or 'float32'"),
    (["run", "--prompts", "PROMPTS", "--codec", "gzip"], "'auto', 'lz4', 'zstd' or 'none'"),
    (["run", "--prompts", "PROMPTS", "--device", "tpu"], "a device is auto, cpu, cuda, cuda:N or mps"),
    (["run", "--prompts", "PROMPTS", "--context-length", "1"], "context_length: 1 was given"),
    (["run", "--prompts", "PROMPTS", "--model", "lama-8b"], "did you mean llama-8b?"),
    (["run", "--prompts", "PROMPTS", "--model", "/no/such/folder"], "there is no file or folder /no/such/folder"),
    (["run", "--prompts", "PROMPTS", "--model", "smollm2"], "make it with: python scripts/get-smollm2"),
    (["run", "--prompts", "PROMPTS", "--modle", "tiny"], "No such option '--modle'"),
    (["rum"], "No such command 'rum'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments[-2:]) for arguments, _ in BAD])
def test_a_request_that_cannot_be_run_exits_with_2_and_says_why(arguments: list[str], message: str, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").touch()
    (tmp_path / "bad.jsonl").write_text('"fine"\n{"prompt": \n')
    (tmp_path / "empty.jsonl").write_text('"fine"\n""\n')
    (tmp_path / "surrogate.jsonl").write_text('"\\ud83d"\n')
    given = [str(prompts) if argument == "PROMPTS" else argument for argument in arguments]
    done = command(*given, cwd=tmp_path, HARVEST_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


# Makes the import of torch, transformers and zarr an error, then runs the command.
WITHOUT_HEAVY_IMPORTS = """
import sys
for name in ("torch", "transformers", "zarr"):
    sys.modules[name] = None
from harvest.cli import main
sys.argv[0] = "harvest"
main()
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["run", "--help"], 0),
        (["run", "--prompts", "nowhere.jsonl"], 2),
        (["run", "--prompts", "PROMPTS", "--shard-size", "0"], 2),
        (["run", "--prompts", "PROMPTS", "--layers", "x"], 2),
        (["run", "--prompts", "PROMPTS", "--codec", "gzip"], 2),
        (["run", "--prompts", "PROMPTS", "--model", "lama-8b"], 2),
        (["export", "--help"], 0),
        (["export", "run1", "out", "--format", "npz"], 2),
        (["fetch", "--help"], 0),
        (["fetch", "nowhere.json", "out"], 2),
        (["sbatch", "--out", "run1", "--prompts", "p.jsonl"], 0),
        (["sbatch", "--parts", "0", "--out", "run1"], 2),
        (["run", "--prompts", "PROMPTS", "--part", "4/4"], 2),
    ],
)
def test_help_and_errors_in_the_command_line_need_neither_torch_nor_transformers_nor_zarr(
    arguments: list[str], code: int, prompts: Path
) -> None:
    given = [str(prompts) if argument == "PROMPTS" else argument for argument in arguments]
    done = subprocess.run([sys.executable, "-c", WITHOUT_HEAVY_IMPORTS, *given], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "ImportError" not in done.stderr
    assert "ModuleNotFoundError" not in done.stderr


def test_a_run_that_fails_exits_with_1_and_shows_no_traceback(prompts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "shards" / "shard_00000.zarr.zip").mkdir(parents=True)
    (folder / "request.json").touch()
    done = command("run", "--prompts", prompts, "--out", folder)
    assert done.returncode == 1
    assert "shard_00000.zarr.zip: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("shell", "words"), [("bash", "complete -o nosort"), ("zsh", "#compdef harvest"), ("fish", "complete --no-files")])
def test_a_shell_gets_its_completion(shell: str, words: str) -> None:
    assert words in command("completion", shell).stdout


def test_model_ids_are_completed() -> None:
    environment = {**os.environ, "_HARVEST_COMPLETE": "bash_complete", "COMP_WORDS": "harvest run --model smo", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-m", "harvest"], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["plain,smollm2"]


def test_the_help_of_a_run_has_its_options_in_sections() -> None:
    text = command("run", "--help").stdout
    places = [text.index(f"\n{title}:\n") for title in ("Request", "Engine", "Output", "Other")]
    assert places == sorted(places)
    assert text.index("--layers") < places[1] < text.index("--device ") < places[2] < text.index("--overwrite") < places[3]
