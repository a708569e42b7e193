"""A window on a device with too little memory, and values that are not finite."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from conftest import LLAMA_LIKE, TEXTS, Notes, tiny_request

import harvest
from harvest.errors import StreamError, ValueRangeError
from harvest.input.plan import make_plan
from harvest.model.capture import Capture
from harvest.output.folder import RunFolder
from harvest.output.record import Record
from harvest.reading.verify import verify


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Exception], list[int]]:
    """Let the device of this test hold only so many padded tokens of a batch; answers the footprints of those that were read."""

    def shrink(most: int, error: Exception) -> list[int]:
        read, footprints = Capture.read, []

        def read_if_it_fits(self: Capture, prompts: Sequence[Any], *arguments: Any) -> Any:
            footprint = len(prompts) * max(map(len, prompts))
            if footprint > most:
                raise error
            footprints.append(footprint)
            return read(self, prompts, *arguments)

        monkeypatch.setattr(Capture, "read", read_if_it_fits)
        return footprints

    return shrink


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
)
def test_a_batch_that_does_not_fit_halves_the_budget_for_its_window(
    error: Exception, small_device: Callable[..., list[int]], tiny_run: Path, tmp_path: Path
) -> None:
    footprints = small_device(80, error)
    reporter = Notes()
    harvest.run(tiny_request(shard_size=4), tmp_path / "run", harvest.Engine(batch_tokens=500), reporter)
    halvings = [note for note in reporter.said if "did not fit the device's memory" in note]
    budgets = [int(note.split("batch budget is ")[1].split()[0]) for note in halvings]
    assert budgets, "each is said once"
    assert all(lower <= budget // 2 for budget, lower in zip([500, *budgets], budgets, strict=False))
    assert max(footprints) <= 80
    run = harvest.open(tmp_path / "run")
    whole = harvest.open(tiny_run)
    for prompt in range(len(TEXTS)):
        torch.testing.assert_close(run.prompt(prompt), whole.prompt(prompt), rtol=0.02, atol=0.02)
    assert run.manifest.local["lowered_batch_tokens"] == {f"shards/shard_0000{index}.zarr.zip": budgets[-1] for index in range(3)}
    assert verify(tmp_path / "run").is_sound


def test_a_lowered_budget_stays_for_the_windows_that_follow(small_device: Callable[..., list[int]], tmp_path: Path) -> None:
    footprints = small_device(150, torch.OutOfMemoryError("out of memory"))
    prompts = ["x" * 60] * 4 + ["ab"] * 48
    # 512 bytes a token: four long prompts fill a window, and the short ones the next.
    engine = harvest.Engine(batch_tokens=244, window_bytes=2 * 250 * 512)
    harvest.run(tiny_request(prompts, shard_size=4), tmp_path / "run", engine)
    records = [Record.read(RunFolder(tmp_path / "run").record(index)) for index in range(13)]
    assert [record.batch_tokens for record in records if record] == [122] * 13
    assert max(footprints) <= 122


def test_a_prompt_that_does_not_fit_even_alone(small_device: Callable[..., list[int]], tmp_path: Path) -> None:
    small_device(60, torch.OutOfMemoryError("out of memory"))
    with pytest.raises(StreamError, match=r"prompt 6, of 70 tokens, does not fit the device's memory even alone. Lower --context-length"):
        harvest.run(tiny_request(), tmp_path / "run")


def test_another_error_of_the_model_is_no_lack_of_memory(small_device: Callable[..., list[int]], tmp_path: Path) -> None:
    small_device(60, RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        harvest.run(tiny_request(), tmp_path / "run")


def test_units_hold_the_windows_of_a_shard_together() -> None:
    lengths = np.array([5] * 4 + [40] * 4 + [5] * 4)
    plan = make_plan(lengths, 4, 1, 2 * 50, 1000)
    assert [[window.index for window in unit] for unit in plan.units()] == [[0], [1, 2, 3, 4], [5]]
    assert [window.index for unit in plan.units() for window in unit] == [window.index for window in plan.windows]


@pytest.fixture
def odd_model(save_model: Any) -> Path:
    """A model that computes NaN for Q and inf for Z, and for what comes after them."""
    folder = save_model(transformers.LlamaConfig(**LLAMA_LIKE))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.get_input_embeddings().weight.data[ord("Q")] = torch.nan
    model.get_input_embeddings().weight.data[ord("Z"), 3] = torch.inf
    model.save_pretrained(folder)
    return Path(folder)


def test_values_that_are_not_finite_are_stored_and_counted_where_that_is_allowed(odd_model: Path, tmp_path: Path) -> None:
    prompts = ["fine", "letter Q", "Zed", "fine too"]
    request = harvest.HarvestRequest(model=str(odd_model), prompts=prompts, layers=[1, 3], shard_size=2)
    with pytest.raises(ValueRangeError, match=r"layer 1, prompt \d, position \d: .*or store it as it is with --allow-nonfinite"):
        harvest.run(request, tmp_path / "run")
    job = harvest.run(request, tmp_path / "run", harvest.Engine(allow_nonfinite=True))
    assert job.status == "done"
    run = harvest.open(tmp_path / "run")
    stored = [run.prompt(prompt).float() for prompt in range(4)]
    # Every token with such a value, the first of a prompt among them, is one.
    bad = [(~torch.isfinite(stream)).any(dim=2) for stream in stored]
    counts = torch.stack([rows.sum(dim=1) for rows in bad]).sum(dim=0).tolist()
    assert counts[0] > 0
    assert run.manifest.local["nonfinite_tokens"] == {"1": counts[0], "3": counts[1]}
    assert not bad[0].any()
    assert not bad[3].any()

    # They are left out of the stats, which so stay finite and are those of the other tokens.
    stats = safetensors.numpy.load_file(tmp_path / "run" / "stats.safetensors")
    for position in range(2):
        rows = [stream[position, 1:][~rows[position, 1:]] for stream, rows in zip(stored, bad, strict=True)]
        values = torch.cat(rows).double().numpy()
        np.testing.assert_allclose(stats["mean"][position], values.mean(axis=0), rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(stats["std"][position], values.std(axis=0), rtol=1e-6)
    assert verify(tmp_path / "run").is_sound


def test_verify_holds_the_count_against_the_shards(odd_model: Path, tmp_path: Path) -> None:
    request = harvest.HarvestRequest(model=str(odd_model), prompts=["fine", "Zed"], layers=[1])
    harvest.run(request, tmp_path / "run", harvest.Engine(allow_nonfinite=True))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    counted = manifest["local"]["nonfinite_tokens"]
    manifest["local"]["nonfinite_tokens"] = {"1": counted["1"] + 1}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    assert [f"{finding}" for finding in verify(tmp_path / "run").findings if "nonfinite_tokens are" in str(finding)]
    manifest["local"]["nonfinite_tokens"] = {}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    assert any("layer 1 holds a value that is not finite" in str(finding) for finding in verify(tmp_path / "run").findings)


def test_an_overflow_shows_beside_values_that_are_allowed(odd_model: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(odd_model)
    model.get_input_embeddings().weight.data[ord("W"), 3] = 1e5
    model.save_pretrained(odd_model)
    request = harvest.HarvestRequest(model=str(odd_model), prompts=["letter Q", "letter W"], layers=[1])
    engine = harvest.Engine(allow_nonfinite=True, store_dtype="float16")
    with pytest.raises(ValueRangeError, match=r"prompt 1, position 8: the stream reaches .*, and float16 ends at 65,504"):
        harvest.run(request, tmp_path / "run", engine)
    harvest.run(request, tmp_path / "wide", engine.model_copy(update={"store_dtype": "float32"}))
