"""harvest's engine around a model of random weights that is made where it computes, without files and without a download.

The parts are wired as `harvest/pipeline.py` wires them: windows are read into buffers, and written beside the next window's passes.

Shapes: L layers, T tokens, W values a token, D directions, H hidden size.
"""

import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from synthetic import Case, prompt_lengths

from harvest.input.plan import Window, make_plan
from harvest.input.tokens import Tokens
from harvest.model.blocks import LoadedDecoder, find_blocks
from harvest.model.budget import attention_kind, auto_batch_tokens, auto_window_bytes, card_costs
from harvest.model.capture import Capture
from harvest.model.describe import Description
from harvest.model.device import Placement
from harvest.model.sources import Source
from harvest.output.codecs import default_codec
from harvest.output.folder import RunFolder
from harvest.output.writers import WindowBuffer, Writers
from harvest.prepare import Prepared, Settings
from harvest.progress import Silent
from harvest.request import HarvestRequest
from harvest.stop import StopFlag
from harvest.stream import make_buffers
from harvest.window import WindowReader, read_windows

_SEED = 20261201
_SHARD_SIZE = 32

SHAPES: dict[str, dict[str, int]] = {
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    # For trying the script itself.
    "small": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    },
}


def make_config(shape: str, n_layers: int | None = None) -> transformers.LlamaConfig:
    """The config of a Llama of that shape, or of its first so many blocks."""
    sizes: dict[str, Any] = SHAPES[shape] | ({"num_hidden_layers": n_layers} if n_layers else {})
    return transformers.LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=False)


def make_decoder(config: transformers.LlamaConfig, device: torch.device, dtype: torch.dtype) -> LoadedDecoder:
    """A decoder of random weights, the same ones each time on the same device, without a head."""
    torch.manual_seed(_SEED)
    with device:
        module = transformers.AutoModel.from_config(config, dtype=dtype)
    module.eval()
    module.requires_grad_(False)
    return LoadedDecoder(module, list(find_blocks(module, config.num_hidden_layers)), device)


def prepare(
    config: transformers.LlamaConfig,
    case: Case,
    n_tokens: int,
    device: torch.device,
    dtype: str,
    batch_tokens: int | None = None,
    window_bytes: int | None = None,
    compile: bool = False,
) -> Prepared:
    """Return a run of random token ids in prompts of log-normal lengths, planned as `harvest/prepare.py` plans for the device.

    batch_tokens, window_bytes: by default what harvest chooses. compile: whether the decoder blocks are compiled.
    """
    draw = np.random.default_rng(_SEED)
    lengths = prompt_lengths(n_tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = Tokens(draw.integers(0, config.vocab_size, n_tokens, dtype=np.int32), offsets, None, [], [])
    directions_DH = None
    if case.contents == "projections":
        directions_DH = draw.standard_normal((case.width, config.hidden_size)).astype(np.float32)
        directions_DH /= np.linalg.norm(directions_DH, axis=1, keepdims=True)
    description = _describe(config, dtype)
    settings = replace(_settings(description, case, device, batch_tokens, window_bytes), compile=compile)
    layout = case.layout(settings.codec)
    return Prepared(
        request=HarvestRequest.check({"model": "random", "prompts": ["random"] * len(lengths)}, limits=False),
        description=description,
        settings=settings,
        placement=Placement(device),
        layers=list(case.layers),
        tokens=tokens,
        directions_DH=directions_DH,
        layout=layout,
        plan=make_plan(lengths, _SHARD_SIZE, layout.token_bytes, settings.window_bytes, settings.batch_tokens, card=settings.card),
        fingerprint={"bench": "gpu"},
        allow_nonfinite=False,
        check_values=False,
    )


def _describe(config: transformers.LlamaConfig, dtype: str) -> Description:
    return Description(
        source=Source("random", "random"),
        config=config,
        tokenizer=None,
        repository="random",
        revision="random",
        n_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_length=None,
        length_switches=(),
        n_chosen_keys=None,
        dtype=dtype,
    )


def _settings(description: Description, case: Case, device: torch.device, batch_tokens: int | None, window_bytes: int | None) -> Settings:
    store_dtype: Any = case.store_dtype
    codec = default_codec(store_dtype)
    n_blocks, value_bytes, token_bytes = case.layers[-1] + 1, getattr(torch, description.dtype).itemsize, case.layout(codec).token_bytes
    config, card = description.config, None
    if device.type == "cuda":
        card = card_costs(config, n_blocks, value_bytes, token_bytes, attention_kind(description, "auto"))
    return Settings(
        device=str(device),
        compute_dtype=description.dtype,
        store_dtype=store_dtype,
        codec=codec,
        attention="auto",
        context_length=None,
        batch_tokens=batch_tokens or auto_batch_tokens(Placement(device), config, n_blocks, value_bytes, token_bytes),
        window_bytes=window_bytes or auto_window_bytes(device),
        device_map="none",
        card=card,
    )


def plan_figures(prepared: Prepared) -> dict[str, Any]:
    """Return how a run's tokens are cut: windows, batches, their mean tokens, and the padded tokens for each real one."""
    plan = prepared.plan
    batches = [batch for window in plan.windows for batch in plan.batches(window)]
    n_tokens = int(plan.lengths.sum())
    return {
        "tokens": n_tokens,
        "token_bytes": prepared.layout.token_bytes,
        "batch_tokens": plan.batch_tokens,
        "window_bytes": prepared.settings.window_bytes,
        "windows": len(plan.windows),
        "batches": len(batches),
        "mean_batch_tokens": n_tokens / len(batches),
        "padding": sum(len(batch) * int(plan.lengths[batch].max()) for batch in batches) / n_tokens,
    }


def read_all(prepared: Prepared, decoder: LoadedDecoder, stop: StopFlag | None = None) -> dict[str, Any]:
    """Read every window to host memory and write nothing. Return the seconds, without those of making the buffers and of compiling."""
    windows, stop = prepared.plan.windows, stop or StopFlag()
    buffers = make_buffers(prepared, windows)
    with WindowReader(prepared, decoder, Silent(), stop, lambda _window, buffer, _lowered: buffer.release()) as reader:
        started = time.perf_counter()
        read_windows(reader, buffers, windows, stop.check)
        return {"seconds": time.perf_counter() - started}


def read_and_write(prepared: Prepared, decoder: LoadedDecoder, run: RunFolder, stop: StopFlag | None = None) -> dict[str, Any]:
    """Read every window and publish its shards. Return the seconds, without those of making the buffers and of compiling.

    Also returned: the seconds that the writers were at work, added up over them, and the batch budget if it was lowered.
    """
    windows, stop = prepared.plan.windows, stop or StopFlag()
    run.make()
    buffers = make_buffers(prepared, windows)
    lowered_to: list[int] = []

    def submit(window: Window, buffer: WindowBuffer, lowered: int | None) -> None:
        lowered_to.extend([] if lowered is None else [lowered])
        writers.submit(window, buffer, lambda _shard: False, lowered)

    def check() -> None:
        stop.check()
        writers.check()

    with (
        Writers(run, prepared.layout, prepared.tokens, prepared.fingerprint, lambda _n_bytes: None) as writers,
        WindowReader(prepared, decoder, Silent(), stop, submit) as reader,
    ):
        started = time.perf_counter()
        read_windows(reader, buffers, windows, check)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "writers_busy_s": writers.busy_s, "lowered_to": min(lowered_to, default=None)}


def read_synchronously(
    prepared: Prepared, decoder: LoadedDecoder, prompts: Collection[int] | None = None
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield prompts with their rows [L, T, W] as the engine stores them, with nothing else at work during a copy.

    prompts: those that are wanted, by default all. Each is read in the batch in which the engine reads it.
    """
    plan, store_dtype = prepared.plan, getattr(torch, prepared.settings.store_dtype)
    wanted = set(range(len(plan.lengths)) if prompts is None else prompts)
    with Capture(decoder, prepared.layers, prepared.description.hidden_size, store_dtype, prepared.directions_DH) as capture:
        for window in plan.windows:
            if wanted.isdisjoint(range(window.first, window.end)):
                continue
            for batch in plan.batches(window):
                if wanted.isdisjoint(batch):
                    continue
                rows_LTW = capture.read([prepared.tokens.of(prompt) for prompt in batch]).rows_LTW
                if decoder.device.type == "cuda":
                    torch.cuda.synchronize(decoder.device)
                for prompt, own_LTW in zip(batch, rows_LTW.split(plan.lengths[batch].tolist(), dim=1), strict=True):
                    if prompt in wanted:
                        host_LTW = own_LTW.cpu()
                        yield prompt, (host_LTW.view(torch.uint16) if store_dtype == torch.bfloat16 else host_LTW).numpy()
