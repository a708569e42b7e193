"""The API's answers: the keys and types of a job and a manifest."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import jsonschema
import pydantic
import pytest

from harvest.contract import HarvestJob, HarvestResult, Manifest, Timings, utc_now

SCHEMA = json.loads((Path(__file__).parent / "data" / "harvest_job.schema.json").read_text())

NOON = datetime(2026, 11, 3, 12, 0, 0, 123456, UTC)
RESULT = HarvestResult(
    n_shards=1,
    layer_indices=[1, 2],
    manifest_url="file:///run/manifest.json",
    shard_urls=["file:///run/shards/shard_00000.zarr.zip"],
    stats_url="file:///run/stats.safetensors",
    contents="activations",
    tokens=5,
    bytes_written=900,
    timings=Timings(load_s=0, forward_s=0.5, save_s=0.25, upload_s=0),
)
ENDED: dict[str, Any] = {"started_at": NOON, "completed_at": NOON}
JOBS: dict[str, dict[str, Any]] = {
    "pending": {"tokens": None, "started_at": None, "completed_at": None},
    "running": {"tokens": None, "started_at": NOON, "completed_at": None},
    "done": {**ENDED, "tokens": 5, "result": RESULT, "urls_expire_at": NOON + timedelta(days=7)},
    "failed": {**ENDED, "tokens": 0, "error": "no space left"},
    "cancelled": {**ENDED, "tokens": 9},
}


def make_job(status: str) -> HarvestJob:
    ids = {"job_id": UUID(int=0), "run_id": UUID("dded282c-8ebd-44cf-8ba5-9a234973d1ec")}
    same = {"model": "tiny", "n_prompts": 2, "reserved_tokens": 9, "layers": [1, 2], "created_at": NOON}
    return HarvestJob.model_validate({**ids, **same, **JOBS[status], "status": status})


@pytest.mark.parametrize(
    ("status", "more"), [("pending", []), ("running", []), ("done", ["result", "urls_expire_at"]), ("failed", ["error"]), ("cancelled", [])]
)
def test_a_job_is_written_with_the_api_s_keys_and_types(status: str, more: list[str]) -> None:
    job = make_job(status)
    written = json.loads(job.to_json())
    assert list(written) == [*SCHEMA["required"], *more]
    jsonschema.validate(written, SCHEMA, format_checker=jsonschema.FormatChecker())
    # Times are kept to the millisecond, and so is what is read back.
    assert json.loads(HarvestJob.model_validate_json(job.to_json()).to_json()) == written


def test_a_job_and_its_result_have_no_other_keys_than_the_api_s() -> None:
    result = SCHEMA["properties"]["result"]
    assert set(HarvestJob.model_fields) == set(SCHEMA["properties"])
    assert set(HarvestResult.model_fields) == set(result["properties"])
    assert set(Timings.model_fields) == set(result["properties"]["timings"]["properties"])
    for document in (make_job("done"), RESULT, RESULT.timings):
        with pytest.raises(pydantic.ValidationError, match="Extra inputs"):
            type(document).model_validate({**document.model_dump(), "pid": 7})


def test_times_are_written_in_utc_to_the_millisecond() -> None:
    elsewhere = NOON.astimezone(timezone(timedelta(hours=5, minutes=30)))
    written = json.loads(make_job("pending").model_copy(update={"created_at": elsewhere}).to_json())
    assert written["created_at"] == "2026-11-03T12:00:00.123+00:00"
    now = utc_now()
    assert now.utcoffset() == timedelta(0)
    assert now.microsecond % 1000 == 0
    assert timedelta(0) <= datetime.now(UTC) - now < timedelta(minutes=1)


def test_a_manifest_has_the_api_s_keys_and_local() -> None:
    keys = (
        "run_id layout_version model_id hf_repo dtype compression capture add_special_tokens layer_indices residual_stream_convention "
        "n_prompts batch_size prompts shards contents projection tensor_layout tokens_layout statistics mean_token_norm"
    )
    assert list(Manifest.model_fields) == [*keys.split(), "local"]


def test_documents_are_checked_without_torch_transformers_and_zarr() -> None:
    program = "import sys, harvest.contract; print([name for name in ('torch', 'transformers', 'zarr') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout == "[]\n"
