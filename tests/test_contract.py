"""The API's documents: what a request takes and refuses, in which words, and the keys of a job."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import jsonschema
import pydantic
import pytest

from harvest.checks import check
from harvest.contract import HarvestJob, HarvestRequest, HarvestResult, Manifest, Timings, parse_layers, utc_now
from harvest.errors import RequestError
from harvest.settings import Engine

BODY: dict[str, Any] = {"model": "tiny", "prompts": ["a", "b"]}
KNOWN = "(known: model, prompts, layers, shard_size, batch_size, add_special_tokens)"
SCHEMA = json.loads((Path(__file__).parent / "data" / "harvest_job.schema.json").read_text())

# One wrong field of a body, and the error's whole text, or its beginning where it ends in "...".
BAD_FIELDS = [
    ({"prompts": []}, "prompts: [] was given: list should have at least 1 item..."),
    ({"prompts": "a"}, "prompts: 'a' was given: input should be a valid list"),
    ({"prompts": ["a", ""]}, "prompt 1: '' was given: an empty prompt has nothing to read; leave it out"),
    ({"prompts": ["a", 5]}, "prompt 1: 5 was given: input should be a valid string"),
    ({"prompts": [[1, 2]]}, "prompt 0: [1, 2] was given: input should be a valid string"),
    (
        {"prompts": ["a", "b\ud83d"]},
        "prompt 1: 'b\\ud83d' was given: holds the lone surrogate '\\ud83d' at character 1, which is no text; ...",
    ),
    ({"model": ""}, "model: '' was given: a model is named by a registry id, a Hugging Face id, a folder or a GGUF file, without NUL..."),
    ({"model": " "}, "model: ' ' was given: a model is named by ..."),
    ({"model": "a\0"}, "model: 'a\\x00' was given: a model is named by ..."),
    ({"model": None}, "model: None was given: input should be a valid string"),
    ({"layers": "All"}, "layers: 'All' was given: layers are \"all\" (in lower case), or a list of decoder block numbers"),
    ({"layers": 3}, "layers: 3 was given: layers are ..."),
    ({"layers": ["1", "1"]}, "layers: ['1', '1'] was given: entry 0 is str, where a decoder block's number was expected"),
    ({"layers": [1, 1.0]}, "layers: [1, 1.0] was given: entry 1 is float, ..."),
    ({"layers": [True]}, "layers: [True] was given: entry 0 is bool, ..."),
    ({"layers": [0, -1]}, "layers: [0, -1] was given: entry 1 is negative; decoder blocks are numbered from 0"),
    ({"layers": []}, 'layers: [] was given: 0 entries, where a request takes 1 to 256, or "all"'),
    ({"layers": [0] * 257}, "layers: [0, 0, 0, ..."),
    ({"shard_size": 10**5000}, "shard_size: a number of thousands of digits was given: ..."),
    ({"shard_size": 0}, "shard_size: 0 was given: input should be greater than or equal to 1"),
    ({"shard_size": 4097}, "shard_size: 4097 was given: input should be less than or equal to 4096"),
    ({"shard_size": "32"}, "shard_size: '32' was given: input should be a valid integer"),
    ({"shard_size": 32.0}, "shard_size: 32.0 was given: input should be a valid integer"),
    ({"shard_size": True}, "shard_size: True was given: input should be a valid integer"),
    ({"shard_size": None}, "shard_size: None was given: input should be a valid integer"),
    ({"batch_size": 0}, "batch_size: 0 was given: input should be greater than or equal to 1"),
    ({"batch_size": 65}, "batch_size: 65 was given: input should be less than or equal to 64"),
    ({"add_special_tokens": 1}, "add_special_tokens: 1 was given: input should be a valid boolean"),
    ({"add_special_tokens": "no"}, "add_special_tokens: 'no' was given: input should be a valid boolean"),
    ({"layer": [1]}, f"layer: no such field; did you mean layers? {KNOWN}"),
    ({"shardsize": 8}, f"shardsize: no such field; did you mean shard_size? {KNOWN}"),
    ({"zzz": 1}, f"zzz: no such field {KNOWN}"),
]


def refusal(function: Callable[..., Any], *given: Any) -> str:
    """What a call says of what it refuses."""
    with pytest.raises(RequestError) as caught:
        function(*given)
    return str(caught.value)


@pytest.mark.parametrize(("field", "message"), BAD_FIELDS, ids=[message[:60] for _, message in BAD_FIELDS])
def test_a_bad_field_is_named_with_what_was_given_and_what_is_allowed(field: dict[str, Any], message: str) -> None:
    said = refusal(HarvestRequest.check, {**BODY, **field})
    assert said.startswith(message[:-3]) if message.endswith("...") else said == message


def test_all_that_is_wrong_is_said_at_once_ten_things_at_most() -> None:
    assert refusal(HarvestRequest.check, {}) == "model: is required and was not given; prompts: is required and was not given"
    given = {**BODY, "prompts": [""], "batch_size": "8"}
    said = ["prompt 0: '' was given: an empty prompt has nothing to read; leave it out", "batch_size: '8' was given: "]
    assert refusal(HarvestRequest.check, given).startswith("; ".join(said))
    ten = "".join(f"prompt {number}: 5 was given: input should be a valid string; " for number in range(10))
    assert refusal(HarvestRequest.check, {**BODY, "prompts": [5] * 11}) == ten + "and 1 more"
    assert refusal(HarvestRequest.check, {**BODY, "prompts": [5] * 10}) == ten.removesuffix("; ")


@pytest.mark.parametrize(("given", "shown"), [("x" * 78, f"'{'x' * 78}'"), ("x" * 79, f"'{'x' * 76}...")])
def test_a_value_is_shown_in_80_characters(given: str, shown: str) -> None:
    assert refusal(HarvestRequest.check, {**BODY, "shard_size": given}) == f"shard_size: {shown} was given: input should be a valid integer"


def test_another_document_is_checked_in_the_same_words() -> None:
    assert check(Engine, {"device": "cuda:1"}) == Engine(device="cuda:1")
    said = refusal(check, Engine, {"devise": "cpu", "codec": "gzip"})
    assert said.startswith("codec: 'gzip' was given: input should be 'auto', 'lz4', 'zstd' or 'none'; ")
    assert "; devise: no such field; did you mean device? (known: device, compute_dtype, " in said


@pytest.mark.parametrize(
    "fields",
    [
        *({"layers": layers} for layers in (None, "all", [3, 0, 3])),
        *({"shard_size": size} for size in (1, 4096)),
        *({"batch_size": size} for size in (1, 64, None)),
        {"add_special_tokens": False},
        {"prompts": ["\0", " ", "\ufeff", "😀\u2028"]},
        {"prompts": ["a"] * 5000},
    ],
    ids=lambda fields: ascii(fields)[:40],
)
def test_what_is_allowed_is_kept_as_given(fields: dict[str, Any]) -> None:
    request = HarvestRequest.check(json.loads(json.dumps({**BODY, **fields})))
    defaults = {"layers": None, "shard_size": 32, "batch_size": None, "add_special_tokens": True}
    assert request.model_dump() == {**BODY, **defaults, **fields}


def test_a_request_cannot_be_changed() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        HarvestRequest.check(BODY).shard_size = 5


@pytest.mark.parametrize(
    ("layers", "n_layers", "resolved"),
    [
        *[("all", 3, [0, 1, 2]), ("all", 300, list(range(300)))],
        *[(None, 32, [8, 16, 24]), (None, 126, [31, 63, 94]), (None, 2, [0, 1]), (None, 1, [0])],
        *[([3, 0, 3, 1], 4, [0, 1, 3]), ([0] * 256, 1, [0])],
    ],
)
def test_layers_are_resolved_ascending_and_each_once(layers: Any, n_layers: int, resolved: list[int]) -> None:
    assert HarvestRequest.check({**BODY, "layers": layers}).resolve_layers(n_layers) == resolved


@pytest.mark.parametrize(("layers", "given"), [([1, 4, 5], "4"), ([10**5000], "a number of thousands of digits")], ids=["4", "10**5000"])
def test_layers_that_a_model_lacks_are_refused(layers: list[int], given: str) -> None:
    message = f"layers: {given} was given, but tiny has 4 decoder blocks, numbered 0 to 3"
    assert refusal(HarvestRequest.check({**BODY, "layers": layers}).resolve_layers, 4) == message


@pytest.mark.parametrize("body", [[1], "text", None, 3])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    assert refusal(HarvestRequest.check, body).startswith(f"{body!r} was given, where an object with model, prompts, ")


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        *[("all", "all"), ("8", [8]), ("24,8,16,8", [8, 16, 24]), ("0-3,31", [0, 1, 2, 3, 31]), ("2-4,3-5", [2, 3, 4, 5]), ("5-5", [5])],
        *[(" 0 - 2 , 7 ", [0, 1, 2, 7]), ("007", [7]), ("0-999999", list(range(1_000_000)))],
    ],
)
def test_layers_of_a_command(text: str, layers: Any) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    "text",
    ["", " ", "All", " all", "all,3", "1,", ",1", "1,,2", "-1", "1-", "1-2-3", "1.5", "+1", "0x3", "1 2", "٣", "²", "1000000", "0-1000000"],
)
def test_a_command_s_layers_that_are_no_numbers_are_refused(text: str) -> None:
    assert refusal(parse_layers, text) == f'--layers: {text!r} was given; allowed are "all", numbers such as 8,16,24 and ranges such as 0-3'


def test_a_command_s_layers_that_run_backwards_are_refused() -> None:
    assert refusal(parse_layers, "1, 5-2") == "--layers: the range 5-2 runs backwards; write 2-5"


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
        "n_prompts batch_size prompts shards contents tensor_layout tokens_layout statistics mean_token_norm"
    )
    assert list(Manifest.model_fields) == [*keys.split(), "local"]


def test_documents_are_checked_without_torch_transformers_and_zarr() -> None:
    program = "import sys, harvest.contract; print([name for name in ('torch', 'transformers', 'zarr') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout == "[]\n"
