"""The options that several commands share: what is asked for, how it is carried out, how a model is loaded; and the request they make."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from harvest.cli.group import SectionedOption
from harvest.errors import RequestError

if TYPE_CHECKING:
    from harvest.progress import Reporter
    from harvest.request import HarvestRequest
    from harvest.settings import Engine

Command = Callable[..., Any]

_request = partial(click.option, cls=SectionedOption, section="Request")
_engine = partial(click.option, cls=SectionedOption, section="Engine")
output_option = partial(click.option, cls=SectionedOption, section="Output")


def _complete_model(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """For a shell: the short ids; a path is the shell's own matter."""
    from harvest.model.registry import registry

    return [name for name in ("tiny", *registry()) if name.startswith(typed)]


_REQUEST = [
    _request(
        "--model",
        shell_complete=_complete_model,
        metavar="ID",
        help="A registry id, Hugging Face id, folder or GGUF file. [default: tiny, random weights]",
    ),
    _request("--config", metavar="FILE", help="A body of the API as .json, or its fields in .toml with an [engine]; options override it."),
    _request("--prompts", metavar="FILE", help=".jsonl, .json or .txt, each also .gz; - reads jsonl from stdin."),
    _request("--field", metavar="NAME", help="The key of the text where a prompt is an object. [default: prompt or text]"),
    _request("--layers", metavar="LAYERS", help='"all", or block numbers from 0 such as 8,16,24 or 0-3. [default: the quartiles]'),
    _request("--shard-size", type=int, metavar="N", help="Prompts in each shard file, 1 to 4096. [default: 32]"),
    _request(
        "--batch-size",
        type=int,
        metavar="N",
        help="1 to 64; kept in the manifest as the API does, and of no effect: the engine sizes its own batches.",
    ),
    _request("--add-special-tokens/--no-add-special-tokens", default=None, help="Put the start token before each prompt. [default: add]"),
    _request("--project-onto", metavar="FILE", help="Keep only the components along these directions: .npy, .safetensors, .pt or .json."),
    _request("--no-limits", is_flag=True, help="Lift the API's limits: 4,096 prompts, 2,000,000 tokens, 64 directions."),
]

_LOADING = [
    _engine("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps. [default: auto]"),
    _engine("--device-map", metavar="MAP", help="auto spreads the weights over cards, host memory and disk. [default: none]"),
    _engine("--max-memory", metavar="LIMITS", help="With --device-map auto: the most for weights, such as cuda:0=70GiB,cpu=100GiB."),
    _engine("--trust-remote-code", is_flag=True, default=None, help="Run the code that a model's files bring along."),
    _engine("--allow-pickle", is_flag=True, default=None, help="Load weights from pickle files where there are no safetensors."),
]

_ENGINE = [
    _engine("--revision", metavar="REF", help="A branch, tag or commit of a model on the Hub. [default: main]"),
    _engine(
        "--adapter", metavar="ADAPTER", help="A PEFT adapter to put on the model: a folder, or a Hugging Face id, also with @REVISION."
    ),
    _engine("--start-token", metavar="TOKEN", help="Put this before each prompt: a token's text or id, or none. [default: the model's]"),
    _engine(
        "--attention", "--attn", metavar="KIND", help="auto, sdpa, eager, flash_attention_2 or another of transformers'. [default: auto]"
    ),
    _engine("--compute-dtype", metavar="DTYPE", help="auto, bfloat16, float16 or float32. [default: auto]"),
    _engine("--store-dtype", metavar="DTYPE", help="auto, bfloat16, float16 or float32. [default: auto, bfloat16]"),
    _engine("--codec", metavar="CODEC", help="auto, lz4, zstd or none. [default: auto, lz4 for bfloat16]"),
    _engine("--context-length", type=int, metavar="N", help="Tokens of context; a prompt keeps its first N - 1. [default: the model's]"),
    _engine("--batch-tokens", type=int, metavar="N", help="Padded tokens of one forward pass. [default: by device]"),
    _engine(
        "--window-bytes", type=int, metavar="N", help="Host memory for captured rows, in bytes. [default: 2 GiB; on a card up to 16 GiB]"
    ),
    _engine(
        "--weights",
        metavar="HOW",
        help="auto; resident, all on the device; or stream, each block read from the files once a window. [default: auto]",
    ),
    _engine("--window-tokens", type=int, metavar="N", help="The most tokens of a window. [default: by --window-bytes, or by the room]"),
    _engine("--scratch", metavar="DIR", help="With streamed weights: a folder for what does not fit host memory, for larger windows."),
    _engine("--compile", is_flag=True, default=None, help="Compile the decoder blocks with torch.compile, and check them."),
    _engine("--check", is_flag=True, default=None, help="First read two prompts in a batch and alone, and compare every layer."),
    _engine("--allow-nonfinite", is_flag=True, default=None, help="Store NaN and inf where the model computes them, and count them."),
    *_LOADING,
]


def request_options(command: Command) -> Command:
    """The options that say what is asked for: a model, prompts, layers."""
    return _with(_REQUEST, command)


def engine_options(command: Command) -> Command:
    """The options that say how it is carried out: fields of the engine, left out where they are not given."""
    return _with(_ENGINE, command)


def loading_options(command: Command) -> Command:
    """The part of the engine's options that a command takes which loads a model for another reason."""
    return _with(_LOADING, command)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def read_request(
    reporter: "Reporter",
    no_limits: bool,
    config: str | None,
    prompts: str | None,
    field: str | None,
    layers: str | None,
    project_onto: str | None,
    **options: Any,
) -> "tuple[HarvestRequest, Engine]":
    """The request and the engine of a command: its config's fields, and over them its options."""
    from harvest.checks import check
    from harvest.input.config import read_config
    from harvest.input.prompts import read_prompts
    from harvest.request import HarvestRequest, parse_layers
    from harvest.settings import Engine

    body, engine = read_config(config) if config else ({}, {})
    fields = given(options)
    engine |= {name: fields.pop(name) for name in list(fields) if name in Engine.model_fields}
    checked_engine = check(Engine, engine)
    body |= fields
    if layers is not None:
        body["layers"] = parse_layers(layers)
    if project_onto is not None:
        from harvest.input.directions import read_directions

        body["project_onto"] = read_directions(project_onto)
    if prompts is not None:
        read = read_prompts(prompts, field)
        body["prompts"] = read.texts
        if read.n_blank:
            reporter.note(f"blank lines left out: {read.n_blank}")
    elif "prompts" not in body:
        raise RequestError("prompts: none were given; name a file with --prompts, or a --config that holds them")
    if "model" not in body:
        body["model"] = "tiny"
        reporter.note("no --model was given: the embedded tiny is used")
    return HarvestRequest.check(body, limits=not no_limits), checked_engine


def _with(options: Sequence[Callable[..., Any]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
