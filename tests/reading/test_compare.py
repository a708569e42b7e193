"""Two runs compared: token ids first, then layers; what passes, what does not, and what cannot be compared."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import TEXTS, read_96, tiny_request

import harvest
from harvest.errors import CompareError
from harvest.input.directions import tensor_object
from harvest.reading.compare import Comparison, compare
from harvest.reading.export import export_safetensors

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a run on tiny, of TEXTS unless other prompts are given; `engine` goes to the engine."""

    def make_run(prompts: list[str] | None = None, engine: dict[str, Any] | None = None, **fields: Any) -> Path:
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        harvest.run(tiny_request(prompts, **fields), folder, harvest.Engine(**engine or {}))
        return folder

    return make_run


@pytest.fixture
def edited(tiny_run: Path, tmp_path: Path) -> Callable[..., Path]:
    """An exported copy of the tiny run in which tensors of prompt 3, in shard 0, are changed."""

    def edit(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Path:
        folder = tmp_path / "edited"
        export_safetensors(harvest.open(tiny_run), folder)
        path = folder / "shard_00000.safetensors"
        tensors = safetensors.torch.load_file(path)
        for kind, change in changes.items():
            tensors[f"{kind}_3"] = change(tensors[f"{kind}_3"].clone())
        safetensors.torch.save_file(tensors, path)
        return folder

    return edit


def relabelled(run: Path, to: Path, layers: dict[int, int]) -> Path:
    """A copy of a run whose manifest calls its layers otherwise."""
    shutil.copytree(run, to)
    manifest = json.loads((to / "manifest.json").read_text())
    manifest["layer_indices"] = [layers[layer] for layer in manifest["layer_indices"]]
    manifest["mean_token_norm"] = {str(layers[int(layer)]): norm for layer, norm in manifest["mean_token_norm"].items()}
    (to / "manifest.json").write_text(json.dumps(manifest))
    return to


def ids_of(comparison: Comparison) -> list[tuple[str, int, int, int]]:
    return [(found.kind, found.prompt, found.position, found.n_prompts) for found in comparison.id_differences]


def test_a_run_agrees_with_itself_exactly_and_with_its_export(tiny_run: Path, edited: Callable[..., Path]) -> None:
    for other in (tiny_run, edited()):
        comparison = compare(tiny_run, other)
        assert comparison.agrees
        assert (comparison.n_prompts, comparison.n_tokens) == (len(TEXTS), 248)
        assert [row.layer for row in comparison.layers] == [0, 1, 2, 3]
        assert {(row.mean_cosine, row.worst_cosine, row.relative_error, row.differing_tokens) for row in comparison.layers} == {
            (1, 1, 0, 0)
        }


@pytest.mark.parametrize("store_dtype", ["float32", "float16"])
def test_figures_are_those_of_the_values_whatever_the_shards_chunks_and_types(store_dtype: str, tiny_run: Path, make: Make) -> None:
    other = make(shard_size=2, engine={"store_dtype": store_dtype, "batch_tokens": 90})
    a, b = harvest.open(tiny_run), harvest.open(other)
    for row in compare(tiny_run, other).layers:
        pairs = [(a.prompt(i)[row.layer].double(), b.prompt(i)[row.layer].double()) for i in range(len(TEXTS))]
        cosines = [torch.nn.functional.cosine_similarity(of_a, of_b) for of_a, of_b in pairs]
        later_a, later_b = (torch.cat([pair[side][1:] for pair in pairs]) for side in (0, 1))
        assert row.mean_cosine == pytest.approx(float(torch.cat(cosines).mean()), abs=1e-12)
        assert row.worst_cosine == pytest.approx(float(torch.cat(cosines).min()), abs=1e-12)
        assert float(cosines[row.prompt][row.position]) == pytest.approx(row.worst_cosine, abs=1e-12)
        assert row.relative_error == pytest.approx(float((later_b - later_a).norm() / later_a.norm()))
        assert 1e-4 < row.relative_error < 4e-3
        assert row.differing_tokens > 200


@pytest.mark.parametrize(
    ("swapped", "words"), [(False, "B has the start token (256) twice, A once"), (True, "A has the start token (256) twice, B once")]
)
def test_a_doubled_start_token_is_named(swapped: bool, words: str, make: Make) -> None:
    texts = ["plain", "<s>one", "<s>two" * 5]
    folders = [make(texts, add_special_tokens=False), make(texts)]
    comparison = compare(*reversed(folders) if swapped else folders)
    assert ids_of(comparison) == [("start token missing", 0, 0, 1), ("start token twice", 1, 1, 2)]
    assert comparison.id_differences[1].what == words
    assert f"prompt 1, position 1: {words} (2 prompts in all)" in comparison.to_text()
    assert (comparison.agrees, comparison.n_prompts, comparison.layers) == (False, 0, [])
    assert "no prompt has the same ids in both, so no values were compared" in comparison.to_text()


def test_a_missing_start_token_is_named_also_where_the_context_cut_what_it_pushed_out(make: Make) -> None:
    a, b = make(engine={"context_length": 40}, add_special_tokens=False), make(engine={"context_length": 40})
    comparison = compare(a, b)
    assert ids_of(comparison) == [("start token missing", 0, 0, len(TEXTS))]
    assert comparison.id_differences[0].what == "A lacks the start token (256) that B has"
    assert compare(b, a).id_differences[0].what == "B lacks the start token (256) that A has"


def test_a_cut_prompt_is_named_and_the_others_are_compared(tiny_run: Path, make: Make) -> None:
    comparison = compare(tiny_run, make(engine={"context_length": 60}))
    # Prompts 4 and 6 have 61 and 70 tokens.
    assert ids_of(comparison) == [("length", 4, 59, 2)]
    assert comparison.id_differences[0].what == "A has 61 tokens and B 59, the same up to here"
    assert (comparison.agrees, comparison.low_layers, comparison.n_prompts, comparison.n_tokens) == (False, [], 7, 248 - 61 - 70)


def test_another_token_is_named_with_its_place(tiny_run: Path, edited: Callable[..., Path]) -> None:
    other = edited(tokens=lambda ids: ids.where(torch.arange(len(ids)) != 4, 99))
    comparison = compare(tiny_run, other)
    assert ids_of(comparison) == [("ids", 3, 4, 1)]
    assert comparison.id_differences[0].what == f"the token is {b'2 + 2 = 4'[3]} in A and 99 in B"


def test_layers_in_only_one_are_named_and_the_others_compared(make: Make) -> None:
    comparison = compare(make(layers=[0, 1, 2]), make(layers=[1, 2, 3]))
    assert comparison.agrees
    assert [row.layer for row in comparison.layers] == [1, 2]
    assert (comparison.layers_only_in_a, comparison.layers_only_in_b) == ([0], [3])
    assert "layers only in A: 0\nlayers only in B: 3\n" in comparison.to_text()


def test_a_run_shifted_by_one_layer_does_not_agree(tiny_run: Path, tmp_path: Path) -> None:
    comparison = compare(tiny_run, relabelled(tiny_run, tmp_path / "shifted", {0: 1, 1: 2, 2: 3, 3: 4}))
    assert (comparison.id_differences, comparison.low_layers, comparison.agrees) == ([], [1, 2, 3], False)
    assert max(row.mean_cosine for row in comparison.layers) < 0.99
    assert "the mean cosine is below 0.9997 in layers 1, 2, 3" in comparison.to_text()


def test_projections_are_compared_with_projections_only(tiny_run: Path, make: Make) -> None:
    directions = tensor_object(np.eye(2, 64, dtype=np.float32))
    projected = make(project_onto=directions)
    assert compare(projected, make(project_onto=directions, shard_size=1)).agrees
    with pytest.raises(CompareError, match="contents: activations in A and projections in B"):
        compare(tiny_run, projected)


@pytest.mark.parametrize(
    ("value", "cosine", "low"), [(0.0, 0.0, [2]), (math.nan, math.nan, [2]), (math.inf, math.nan, [2])], ids=["zero", "nan", "inf"]
)
def test_a_row_of_zeros_and_one_that_is_not_finite(
    value: float, cosine: float, low: list[int], tiny_run: Path, edited: Callable[..., Path]
) -> None:
    def change(rows: torch.Tensor) -> torch.Tensor:
        rows[2, 5] = value
        return rows

    other = edited(prompt=change)
    row = compare(tiny_run, other).layers[2]
    assert row.worst_cosine == pytest.approx(cosine, nan_ok=True)
    assert (row.prompt, row.position, row.differing_tokens) == (3, 5, 1)
    comparison = compare(tiny_run, other)
    assert comparison.low_layers == low
    assert json.loads(comparison.to_json())["layers"][2]["worst_cosine"] == (None if math.isnan(cosine) else cosine)
    # Zeros in both are no difference.
    assert compare(other, other).agrees == (value == 0)


def test_what_cannot_be_compared(tiny_run: Path, make: Make, tmp_path: Path) -> None:
    for other, message in (
        (make([*TEXTS[:3], "other", *TEXTS[4:]]), r"prompt 3 is '2 \+ 2 = 4' in A and 'other' in B"),
        (make(TEXTS[:3]), "A holds 9 prompts and B 3"),
        (tmp_path, "holds no manifest.json"),
        (relabelled(tiny_run, tmp_path / "above", {layer: layer + 4 for layer in range(4)}), "there is none that both hold"),
    ):
        with pytest.raises(CompareError, match=message) as caught:
            compare(tiny_run, other)
        assert caught.value.exit_code == 2
    damaged = tmp_path / "above" / "shards" / "shard_00001.zarr.zip"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    with pytest.raises(CompareError, match=r"shard_00001.zarr.zip: .* harvest verify says"):
        compare(damaged.parent.parent, damaged.parent.parent)


def test_the_command_prints_a_table_or_json_and_its_exit_code_is_the_answer(tiny_run: Path, make: Make) -> None:
    def command(*arguments: str | Path) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "harvest", "compare", *map(str, arguments)], capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout, done.stderr

    other = make(engine={"compute_dtype": "bfloat16"})
    code, out, err = command(tiny_run, other, "--min-cosine", "0.99", "--quiet")
    assert (code, err) == (0, "")
    assert out.splitlines()[2:5] == [
        "token ids: the same",
        "compared: 9 prompts, 248 tokens",
        "layer  mean cosine  worst cosine  at prompt  position  relative error  differing tokens",
    ]
    code, out, _ = command(tiny_run, other, "--min-cosine", "1", "--json")
    answer = json.loads(out)
    assert (code, answer["agrees"], len(answer["layers"])) == (1, False, 4)
    code, out, err = command(tiny_run, make(["one"]))
    assert (code, out) == (2, "")
    assert err == "harvest: error: A holds 9 prompts and B 1; only runs of the same prompts can be compared\n"


@pytest.mark.smollm2
def test_smollm2_in_float32_and_in_bfloat16_agree_and_shifted_or_doubled_they_do_not(smollm2: Path, tmp_path: Path) -> None:
    def run(name: str, prompts: list[str], compute_dtype: str = "float32", layers: Any = (7, 8, 15, 16, 22, 23, 29), **fields: Any) -> Path:
        request = harvest.HarvestRequest(model=str(smollm2), prompts=prompts, layers=list(layers), **fields)
        harvest.run(request, tmp_path / name, harvest.Engine(compute_dtype=compute_dtype))
        return tmp_path / name

    a, b = run("float32", read_96()[:8]), run("bfloat16", read_96()[:8], "bfloat16")
    comparison = compare(a, b)
    # Measured: 0.999877 in the last layer, the lowest.
    assert comparison.agrees, comparison.to_text()
    shifted = compare(a, relabelled(a, tmp_path / "shifted", {7: 8, 8: 9, 15: 16, 16: 17, 22: 23, 23: 24, 29: 30}))
    assert shifted.low_layers == [8, 16, 23]
    start = harvest.open(a).manifest.local["start_token"]["text"]
    texts = [start + text for text in read_96()[4:6]]
    doubled = compare(run("once", texts, layers=[0], add_special_tokens=False), run("twice", texts, layers=[0]))
    assert ids_of(doubled) == [("start token twice", 0, 1, 2)]
