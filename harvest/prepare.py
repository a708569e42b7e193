"""All that is decided before a model's weights are loaded: settings, layers, token ids, the plan, and what the bytes depend on."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from harvest.asked import digest_prompts
from harvest.errors import RequestError
from harvest.input.plan import CardCosts, Plan, make_plan
from harvest.input.tokens import Tokens, tokenize
from harvest.model.budget import attention_kind, auto_batch_tokens, auto_window_bytes, card_costs
from harvest.model.describe import Description, describe, max_context
from harvest.model.device import Placement, place, resolve_device
from harvest.model.sources import find_model
from harvest.model.start_token import chosen_start_token_id, start_token_id
from harvest.model.streaming import Room, choose_weights, find_room
from harvest.output.codecs import default_codec
from harvest.output.layout import FORMAT_VERSION, ShardLayout
from harvest.output.record import Fingerprint
from harvest.parts import ALONE, Rank
from harvest.progress import Reporter
from harvest.request import HarvestRequest
from harvest.settings import Dtype, Engine
from harvest.stop import StopFlag

# On the device at once: one that computes, the next, and what that one is made of.
STREAMED_BLOCKS = 3


@dataclass(frozen=True)
class Settings:
    """The engine's settings with nothing left open. Dtypes by name; context_length None: no prompt is cut.

    device: with its index, if it is a card. card: what passes cost there; None without one.
    """

    device: str
    compute_dtype: str
    store_dtype: Dtype
    codec: str
    attention: str
    context_length: int | None
    batch_tokens: int
    window_bytes: int
    device_map: str
    weights: Literal["resident", "stream"] = "resident"
    window_tokens: int | None = None
    compile: bool = False
    card: CardCosts | None = None

    @property
    def on_card(self) -> bool:
        """Whether a CUDA card computes, so that host memory for its copies is pinned."""
        return self.device.startswith("cuda")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values. What is not used, of those that came later, has no key, as in runs of earlier versions."""
        return {name: value for name, value in asdict(self).items() if name not in ("compile", "card") or value}


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to begin.

    directions_DH: of length 1, where the run projects. room: for rows and waiting streams, where blocks are streamed; else None.
    """

    request: HarvestRequest
    description: Description
    settings: Settings
    placement: Placement
    layers: list[int]
    tokens: Tokens
    directions_DH: npt.NDArray[np.float32] | None
    layout: ShardLayout
    plan: Plan
    fingerprint: Fingerprint
    allow_nonfinite: bool
    check_values: bool
    room: Room | None = None

    @property
    def n_blocks(self) -> int:
        """How many blocks are run: up to the deepest asked."""
        return self.layers[-1] + 1

    @property
    def reserved_tokens(self) -> int:
        """What the API would hold against a budget: each prompt's UTF-8 bytes, and 1 more for its start token."""
        return sum(len(text.encode()) + 1 for text in self.request.prompts)

    @property
    def digest(self) -> str:
        """The fingerprint in 64 hexadecimal digits, by what windows were asked for and not by what they came to on this machine."""
        asked = {name: value for name, value in self.fingerprint.items() if name != "window_tokens"}
        asked["window_bytes"] = self.settings.window_bytes
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def prepare(
    request: HarvestRequest, engine: Engine, reporter: Reporter, stop: StopFlag, rank: Rank = ALONE, held: Fingerprint | None = None
) -> Prepared:
    """Decide everything that can be decided without the model's weights. Raises RequestError.

    held: the fingerprint of the run that is gone on with; the budgets of a batch and of a window that were chosen there, maybe for another
        machine, stay.
    """
    device = resolve_device(engine.device, rank, reporter.note)
    placement = place(engine, device)
    source = find_model(request.model, engine)
    description = describe(source, stop.check, reporter.note)
    if source.is_tiny:
        reporter.note("tiny has random weights: it shows how harvest works, and its numbers mean nothing")
    layers = request.resolve_layers(description.n_layers)
    directions_DH = _directions(request, engine, description)
    settings = _resolve(engine, placement, description, layers, directions_DH, held or {}, reporter)
    tokens = _tokenize(request, engine, description, settings, reporter)
    about = {"model": request.model, "repository": description.repository, "revision": description.revision, "layers": layers}
    if directions_DH is None:
        layout = ShardLayout("activations", tuple(layers), description.hidden_size, settings.store_dtype, settings.codec, about)
    else:
        about["directions"] = f"sha256:{hashlib.sha256(directions_DH.tobytes()).hexdigest()}"
        layout = ShardLayout("projections", tuple(layers), len(directions_DH), settings.store_dtype, settings.codec, about)
    room = find_room(engine, rank, device) if settings.weights == "stream" else None
    settings = replace(settings, window_tokens=_window_tokens(engine, description, settings, layout, tokens, room, held or {}, reporter))
    plan = make_plan(
        tokens.lengths,
        request.shard_size,
        layout.token_bytes,
        settings.window_bytes,
        settings.batch_tokens,
        description.length_switches,
        description.n_chosen_keys,
        settings.window_tokens,
        settings.card,
    )
    fingerprint = {
        **request.model_dump(exclude={"prompts", "layers", "project_onto"}),
        **about,
        **_of_settings(settings),
        # Which of several cards computed is no difference, nor where the weights lay meanwhile; that it was a card is.
        "device": device.type,
        "prompts": digest_prompts(request.prompts),
        "n_prompts": len(request.prompts),
        "start_token_id": tokens.start_token_id,
        "shard_format": FORMAT_VERSION,
    }
    if description.adapter is not None:
        fingerprint["adapter"] = description.adapter.revision
        _compare_base(description, reporter)
    return Prepared(
        request,
        description,
        settings,
        placement,
        layers,
        tokens,
        directions_DH,
        layout,
        plan,
        fingerprint,
        engine.allow_nonfinite,
        engine.check,
        room,
    )


def _of_settings(settings: Settings) -> Fingerprint:
    """The settings that change bytes."""
    windows = "window_tokens" if settings.window_tokens is None else "window_bytes"
    return {name: value for name, value in settings.to_dict().items() if name not in ("device_map", "weights", windows)}


def _window_tokens(
    engine: Engine,
    description: Description,
    settings: Settings,
    layout: ShardLayout,
    tokens: Tokens,
    room: Room | None,
    held: Fingerprint,
    reporter: Reporter,
) -> int | None:
    """The most tokens of a window, where they are given or blocks are streamed; None for what follows from the other settings."""
    if engine.window_tokens is not None:
        return engine.window_tokens
    if room is None:
        # Begun where its blocks were streamed.
        return held.get("window_tokens")
    state_bytes = description.hidden_size * getattr(torch, settings.compute_dtype).itemsize
    chosen = room.window_tokens(layout.token_bytes, state_bytes, len(tokens.ids))
    begun_with: int | None = held.get("window_tokens") if held else chosen
    if begun_with != chosen:
        reporter.note(
            f"windows of {f'{begun_with:,} tokens' if begun_with else 'a run that is not streamed'}, with which this run was begun; "
            f"{chosen:,} would be chosen here"
        )
    return begun_with


def _compare_base(description: Description, reporter: Reporter) -> None:
    """Warn where an adapter names another base than the model that it is put on; a copy in a folder of the same name is none."""
    adapter = description.adapter
    if adapter is not None and adapter.base.rstrip("/").split("/")[-1] != description.repository.rstrip("/").split("/")[-1]:
        reporter.note(f"warning: the adapter {adapter.name} was trained on {adapter.base}, and is put on {description.repository}")


def _directions(request: HarvestRequest, engine: Engine, description: Description) -> npt.NDArray[np.float32] | None:
    """The directions to project onto, of length 1, float32 [D, H]; None where the stream itself is kept."""
    if request.project_onto is None:
        return None
    width = request.project_onto.shape[1]
    if width != description.hidden_size:
        raise RequestError(
            f"project_onto: directions of {width} values were given, but the hidden size of {request.model} is {description.hidden_size}"
        )
    if engine.check:
        raise RequestError("check: it compares the stream itself, and this run keeps projections; leave check or project_onto out")
    if engine.store_dtype not in ("auto", "float32"):
        raise RequestError(f"store_dtype: {engine.store_dtype} was given, but projections are stored as float32; leave it out")
    return request.project_onto.directions()


def _resolve(
    engine: Engine,
    placement: Placement,
    description: Description,
    layers: Sequence[int],
    directions_DH: npt.NDArray[np.float32] | None,
    held: Fingerprint,
    reporter: Reporter,
) -> Settings:
    device = placement.device
    longest = None if description.source.is_tiny else max_context(description.config)
    longest = longest or description.context_length
    if engine.context_length is not None and longest is not None and engine.context_length > longest:
        raise RequestError(
            f"context_length: {engine.context_length} was given, but {description.source.name} has {longest} positions; give 2 to {longest}"
        )
    auto_dtype = "float32" if device.type == "cpu" else description.dtype
    auto_store: Dtype = "bfloat16" if directions_DH is None else "float32"
    store_dtype = auto_store if engine.store_dtype == "auto" else engine.store_dtype
    compute_dtype = auto_dtype if engine.compute_dtype == "auto" else engine.compute_dtype
    weights = choose_weights(engine, placement, description, layers[-1] + 1, compute_dtype, reporter.note)
    if engine.compile and (weights == "stream" or engine.device_map != "none"):
        way = "are streamed block by block" if weights == "stream" else "are spread over devices"
        raise RequestError(f"compile: it needs all weights on one device, and here they {way}. Leave --compile out.")
    width = description.hidden_size if directions_DH is None else len(directions_DH)
    token_bytes = len(layers) * width * getattr(torch, store_dtype).itemsize
    text = description.config.get_text_config(decoder=True)
    n_loaded = STREAMED_BLOCKS if weights == "stream" else layers[-1] + 1
    value_bytes = getattr(torch, compute_dtype).itemsize
    window_bytes = engine.window_bytes or held.get("window_bytes", auto_window_bytes(device))
    batch_tokens = engine.batch_tokens
    if batch_tokens is None:
        chosen = auto_batch_tokens(placement, text, n_loaded, value_bytes, token_bytes)
        batch_tokens = held.get("batch_tokens", chosen)
        if batch_tokens != chosen:
            reporter.note(f"batches of {batch_tokens:,} tokens, as this run was started with ({chosen:,} would be chosen here)")
    card = None
    if device.type == "cuda":
        attention = attention_kind(description, engine.attention)
        card = card_costs(text, layers[-1] + 1, value_bytes, token_bytes, attention)
        if held.get("card", {}).keys() == asdict(card).keys():
            card = CardCosts(**held["card"])
    return Settings(
        device=str(device),
        compute_dtype=compute_dtype,
        store_dtype=store_dtype,
        codec=default_codec(store_dtype) if engine.codec == "auto" else engine.codec,
        attention=engine.attention,
        context_length=engine.context_length or description.context_length,
        batch_tokens=batch_tokens,
        window_bytes=window_bytes,
        device_map=engine.device_map,
        weights=weights,
        compile=engine.compile,
        card=card,
    )


def _tokenize(request: HarvestRequest, engine: Engine, description: Description, settings: Settings, reporter: Reporter) -> Tokens:
    start = None
    if engine.start_token != "auto":
        if not request.add_special_tokens:
            raise RequestError("start_token: it means nothing without add_special_tokens, which puts it before each prompt; leave one out")
        start = chosen_start_token_id(engine.start_token, description.tokenizer, description.vocab_size)
    elif request.add_special_tokens:
        start = start_token_id(description.tokenizer, description.config)
        if start is None:
            reporter.note(f"{request.model} has no start token, so none is put before the prompts")
    max_tokens = settings.context_length - 1 if settings.context_length else None
    tokens = tokenize(request.prompts, description.tokenizer, start, max_tokens, description.vocab_size)
    if tokens.cut:
        reporter.note(f"cut to the first {max_tokens} tokens, the context length less one: {_prompts(tokens.cut)}")
    if tokens.doubled:
        reporter.note(
            "warning: text that already began with the start token now has two, so every position is off by one: "
            f"{_prompts(tokens.doubled)}; "
            "pass --no-add-special-tokens for text that begins with its own"
        )
    return tokens


def _prompts(numbers: Sequence[int]) -> str:
    """`prompt 7`, or `3 prompts (numbers 0, 5, 9)`, the first five named."""
    if len(numbers) == 1:
        return f"prompt {numbers[0]}"
    return f"{len(numbers)} prompts (numbers {', '.join(map(str, numbers[:5]))}{', …' if len(numbers) > 5 else ''})"
