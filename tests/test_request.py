"""What a request takes and refuses, and in which words."""

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pydantic
import pytest

from harvest.checks import check
from harvest.errors import RequestError
from harvest.request import HarvestRequest, TensorObject, parse_layers
from harvest.settings import Engine

BODY: dict[str, Any] = {"model": "tiny", "prompts": ["a", "b"]}
KNOWN = "(known: model, prompts, layers, shard_size, batch_size, add_special_tokens, project_onto)"

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
        {"prompts": ["a"] * 4096},
    ],
    ids=lambda fields: ascii(fields)[:40],
)
def test_what_is_allowed_is_kept_as_given(fields: dict[str, Any]) -> None:
    request = HarvestRequest.check(json.loads(json.dumps({**BODY, **fields})))
    defaults = {"layers": None, "shard_size": 32, "batch_size": None, "add_special_tokens": True, "project_onto": None}
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
    assert (
        refusal(parse_layers, text)
        == f'--layers: {text!r} was given; allowed are "all", numbers such as 8,16,24 and ranges such as 0-3, counted from 0'
    )


def test_a_command_s_layers_that_run_backwards_are_refused() -> None:
    assert refusal(parse_layers, "1, 5-2") == "--layers: the range 5-2 runs backwards; write 2-5"


def tensor(values: Any, dtype: str = "float32", **fields: Any) -> dict[str, Any]:
    """A tensor object of these directions."""
    array = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if dtype == "bfloat16":
        raw = (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        raw = array.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    return {"data": base64.b64encode(raw).decode(), "dtype": dtype, "shape": list(array.shape), "compression": "none", **fields}


# One wrong tensor object, and what the error says after the field's name and what was given.
BAD_TENSORS = [
    (tensor([[1, 0], [0, 0]]), "direction 1 has length 0, so it has no direction"),
    (tensor([[1, 0], [np.nan, 1]]), "direction 1 holds nan at 0; every value must be finite"),
    (tensor([[1, np.inf]], "float16"), "direction 0 holds inf at 1; every value must be finite"),
    (tensor([[1, 2, 3]], shape=[1, 4]), "data holds 12 bytes, where shape [1, 4] of float32 takes exactly 16"),
    (tensor([[1, 2, 3]], "float16", shape=[1, 2]), "data holds 6 bytes, where shape [1, 2] of float16 takes exactly 4"),
    (tensor(np.ones((65, 2))), "65 directions, where a request takes 1 to 64; --no-limits lifts this limit of the API"),
    (tensor([[1]], data="AAA"), "data is not base64 (Incorrect padding)"),
    (tensor([[1]], data="%%%%"), "data is not base64 (Only base64 data is allowed)"),
    (tensor([[1]], dtype="float64"), "input should be 'float32', 'float16' or 'bfloat16'"),
    (tensor([[1]], shape=[1]), "list should have at least 2 items after validation, not 1"),
    (tensor([[1]], shape=[0, 4]), "input should be greater than or equal to 1"),
    (tensor([[1]], compression="gzip"), "input should be 'none'"),
    (tensor([[1]], kind="x"), "no such field"),
    ("AAAA", "input should be a valid dictionary"),
]


@pytest.mark.parametrize(("given", "message"), BAD_TENSORS, ids=[message[:40] for _, message in BAD_TENSORS])
def test_directions_that_cannot_be_projected_onto_are_refused(given: Any, message: str) -> None:
    said = refusal(HarvestRequest.check, {**BODY, "project_onto": given})
    assert said.startswith("project_onto")
    assert message in said


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_directions_are_scaled_to_length_1(dtype: str) -> None:
    values = np.array([[3, 0, 4], [0, 0, -2], [1, 1, 1]])
    wrapped = tensor(values, dtype)
    wrapped["data"] = "\n ".join(wrapped["data"][i : i + 5] for i in range(0, len(wrapped["data"]), 5))
    directions = TensorObject.model_validate(wrapped).directions()
    assert directions.dtype == np.float32
    np.testing.assert_allclose(directions, values / np.linalg.norm(values, axis=1, keepdims=True), rtol=1e-6)


def test_a_huge_or_a_small_direction_keeps_its_direction() -> None:
    values = np.array([[3e38, 3e38], [1e-40, 0]])
    directions = TensorObject.model_validate(tensor(values)).directions()
    np.testing.assert_allclose(directions, [[0.5**0.5, 0.5**0.5], [1, 0]], rtol=1e-6)


LIMITED = [
    ({"prompts": ["a"] * 4097}, "4,097 prompts, where a request takes 1 to 4,096; --no-limits lifts this limit of the API"),
    (
        {"prompts": ["a" * 8_000_001]},
        "an estimated 2,000,000 tokens (characters / 4), where a request takes at most 2,000,000; --no-limits",
    ),
    ({"project_onto": tensor(np.eye(65))}, "65 directions, where a request takes 1 to 64; --no-limits lifts this limit of the API"),
]


@pytest.mark.parametrize(("fields", "message"), LIMITED, ids=["prompts", "tokens", "directions"])
def test_the_api_s_limits_of_size_hold_until_they_are_lifted(fields: dict[str, Any], message: str) -> None:
    assert message in refusal(HarvestRequest.check, {**BODY, **fields})
    assert HarvestRequest.check({**BODY, **fields}, limits=False).model


def test_exactly_the_limits_pass() -> None:
    assert HarvestRequest.check({**BODY, "prompts": ["a" * 8_000_000]})
    assert HarvestRequest.check({**BODY, "prompts": ["a"] * 4096, "project_onto": tensor(np.eye(64))})
