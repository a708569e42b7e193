"""The examples run as they stand, on runs that take seconds, and what they print is right."""

import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import read_96

import harvest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, *arguments: object) -> str:
    """What an example prints. It must need no warning."""
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that a pattern's one group finds."""
    return [float(number) for number in re.findall(pattern, text)]


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the 96 English prompts on tiny."""
    folder = tmp_path_factory.mktemp("prose") / "run"
    harvest.run(harvest.HarvestRequest(model="tiny", prompts=read_96(), layers=[1, 3]), folder)
    return folder


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of questions and exclamations of the same random words on tiny, and its prompts with their labels."""
    folder = tmp_path_factory.mktemp("labelled")
    chosen = random.Random(0)
    words = ["sea", "calm", "night", "town", "river", "two", "plus", "moving", "water", "boils", "mountain", "because"]
    labels = [chosen.randint(0, 1) for _ in range(160)]
    lines = [{"prompt": " ".join(chosen.choices(words, k=6)) + "!?"[label], "label": label} for label in labels]
    (folder / "labelled.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = [str(line["prompt"]) for line in lines]
    harvest.run(harvest.HarvestRequest(model="tiny", prompts=prompts, layers="all"), folder / "run")
    return folder / "run", folder / "labelled.jsonl"


@pytest.mark.parametrize("workers", [0, 2])
def test_train_sae(workers: int, prose: Path, tmp_path: Path) -> None:
    options = f"--features 256 --k 8 --batch-tokens 256 --passes 4 --workers {workers}".split()
    printed = run_example("train_sae.py", prose, "--layer", 3, *options, "--out", tmp_path / "sae.safetensors")
    losses, explained = numbers(r"loss ([\d.]+)", printed), numbers(r"explained variance ([-\d.]+)", printed)
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]
    assert explained[-1] > 0.7
    saved = safetensors.torch.load_file(tmp_path / "sae.safetensors")
    # What was saved explains as much of the run as was printed of the last pass.
    rows = torch.cat(list(harvest.torch_dataset(prose, 3)))
    values = (rows - saved["mean"]) / saved["scale"] @ saved["encoder"].T + saved["bias"]
    top = values.topk(8, dim=1)
    back = torch.zeros_like(values).scatter(1, top.indices, top.values.relu()) @ saved["decoder"] * saved["scale"] + saved["mean"]
    assert 1 - (rows - back).square().sum() / (rows - rows.mean(0)).square().sum() >= explained[-1] - 0.01


def test_linear_probe(labelled: tuple[Path, Path], tmp_path: Path) -> None:
    run, labels = labelled
    printed = run_example("linear_probe.py", run, "--labels", labels, "--layer", 1)
    assert "held out 40 prompts" in printed
    learnt, held_out = numbers(r"prompts: ([\d.]+) right", printed)
    assert (learnt, held_out) == (1.0, 1.0)
    # Labels that have nothing to do with the prompts cannot be told of those that were held out.
    lines = [json.loads(line) for line in labels.read_text().splitlines()]
    chosen = random.Random(1)
    (tmp_path / "noise.jsonl").write_text("".join(json.dumps(line | {"label": chosen.randint(0, 1)}) + "\n" for line in lines))
    noise = numbers(r"prompts: ([\d.]+) right", run_example("linear_probe.py", run, "--labels", tmp_path / "noise.jsonl", "--layer", 1))
    assert noise[1] < 0.8


def test_difference_of_means(labelled: tuple[Path, Path], tmp_path: Path) -> None:
    run, labels = labelled
    outs = ("--out", tmp_path / "direction.npy", "--projected", tmp_path / "projected")
    printed = run_example("difference_of_means.py", run, "--labels", labels, "--layer", 1, *outs)
    (separation,) = numbers(r"separation: ([\d.]+)", printed)
    assert separation > 0.95
    zero, one = numbers(r"class [01] at ([-\d.]+)", printed)
    assert one > zero
    direction = np.load(tmp_path / "direction.npy")
    assert (direction.shape, direction.dtype) == ((1, 64), np.float32)
    np.testing.assert_allclose(np.linalg.norm(direction), 1, rtol=1e-6)
    projected = harvest.open(tmp_path / "projected")
    assert (projected.layers, projected.manifest.contents, projected.n_prompts) == ([1], "projections", 160)


def test_labels_of_other_prompts_are_refused(labelled: tuple[Path, Path], tmp_path: Path) -> None:
    run, labels = labelled
    (tmp_path / "fewer.jsonl").write_text("".join(labels.read_text().splitlines(keepends=True)[1:]))
    command = [sys.executable, EXAMPLES / "linear_probe.py", run, "--labels", tmp_path / "fewer.jsonl", "--layer", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "holds other prompts than" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("sae_lens") is None, reason="needs sae-lens")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_to_saelens(prose: Path, tmp_path: Path) -> None:
    options = ("--features", 256, "--k", 8, "--batch-tokens", 256, "--tokens", 60_000, "--lr", 3e-3, "--out", tmp_path / "sae")
    printed = run_example("to_saelens.py", prose, "--layer", 3, *options)
    (explained,) = numbers(r"explained variance ([-\d.]+)", printed)
    assert explained > 0.5
    from sae_lens import SAE

    sae = SAE.load_from_disk(str(tmp_path / "sae"))
    rows = torch.cat(list(harvest.torch_dataset(prose, 3)))
    with torch.no_grad():
        left = (rows - sae(rows)).square().sum() / (rows - rows.mean(0)).square().sum()
    assert abs(1 - left - explained) < 0.1


@pytest.mark.skipif(importlib.util.find_spec("dictionary_learning") is None, reason="needs dictionary-learning")
def test_to_dictionary_learning(prose: Path, tmp_path: Path) -> None:
    options = ("--features", 256, "--k", 8, "--batch-tokens", 256, "--steps", 300, "--out", tmp_path / "dictionary")
    printed = run_example("to_dictionary_learning.py", prose, "--layer", 3, *options)
    explained = numbers(r"frac_variance_explained = ([-\d.]+)", printed)
    assert explained[-1] > 0.5 > explained[0]
    from dictionary_learning.utils import load_dictionary

    dictionary, config = load_dictionary(str(tmp_path / "dictionary" / "trainer_0"), "cpu")
    assert (config["trainer"]["layer"], config["trainer"]["activation_dim"]) == (3, 64)
    rows = torch.cat(list(harvest.torch_dataset(prose, 3)))
    with torch.no_grad():
        left = (rows - dictionary(rows)).square().sum() / (rows - rows.mean(0)).square().sum()
    assert 1 - left > 0.5
