"""harvest's engine around a model of random weights that is made where it computes, without files and without a download.

The parts are wired as `harvest/pipeline.py` wires them: windows are read into buffers, and written beside the next window's passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from synthetic import Case, prompt_lengths

from harvest.input.plan import Window, make_plan
from harvest.input.tokens import Tokens
from harvest.model.blocks import LoadedDecoder, find_blocks
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
    config: transformers.LlamaConfig, case: Case, n_tokens: int, device: torch.device, dtype: str, batch_tokens: int, window_bytes: int
) -> Prepared:
    """A run of random token ids in prompts of log-normal lengths, ready to begin."""
    draw = np.random.default_rng(_SEED)
    lengths = prompt_lengths(n_tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = Tokens(draw.integers(0, config.vocab_size, n_tokens, dtype=np.int32), offsets, None, [], [])
    directions_DH = None
    if case.contents == "projections":
        directions_DH = draw.standard_normal((case.width, config.hidden_size)).astype(np.float32)
        directions_DH /= np.linalg.norm(directions_DH, axis=1, keepdims=True)
    store_dtype: Any = case.store_dtype
    codec = default_codec(store_dtype)
    layout = case.layout(codec)
    description = Description(
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
    settings = Settings(
        device=str(device),
        compute_dtype=dtype,
        store_dtype=store_dtype,
        codec=codec,
        attention="auto",
        context_length=None,
        batch_tokens=batch_tokens,
        window_bytes=window_bytes,
        device_map="none",
    )
    return Prepared(
        request=HarvestRequest.check({"model": "random", "prompts": ["random"] * len(lengths)}, limits=False),
        description=description,
        settings=settings,
        placement=Placement(device),
        layers=list(case.layers),
        tokens=tokens,
        directions_DH=directions_DH,
        layout=layout,
        plan=make_plan(lengths, _SHARD_SIZE, layout.token_bytes, window_bytes, batch_tokens),
        fingerprint={"bench": "gpu"},
        allow_nonfinite=False,
        check_values=False,
    )


@contextmanager
def capturing(prepared: Prepared, decoder: LoadedDecoder) -> Iterator[Capture]:
    """The run's capture, hooked into the decoder's blocks."""
    store_dtype = getattr(torch, prepared.settings.store_dtype)
    with Capture(decoder, prepared.layers, prepared.description.hidden_size, store_dtype, prepared.directions_DH) as capture:
        yield capture


def read_all(prepared: Prepared, decoder: LoadedDecoder) -> None:
    """Read every window to host memory, and write nothing."""
    windows = prepared.plan.windows
    buffers = make_buffers(prepared, windows)
    with WindowReader(prepared, decoder, Silent(), StopFlag(), lambda _window, buffer, _lowered: buffer.release()) as reader:
        read_windows(reader, buffers, windows, lambda: None)


def read_and_write(prepared: Prepared, decoder: LoadedDecoder, folder: Path) -> float:
    """Read every window and write its shards; answers the seconds that the writers were at work, added up over them."""
    run = RunFolder(folder)
    run.make()
    windows = prepared.plan.windows
    buffers = make_buffers(prepared, windows)

    def submit(window: Window, buffer: WindowBuffer, lowered: int | None) -> None:
        writers.submit(window, buffer, lambda _shard: False, lowered)

    with (
        Writers(run, prepared.layout, prepared.tokens, prepared.fingerprint, lambda _n_bytes: None) as writers,
        WindowReader(prepared, decoder, Silent(), StopFlag(), submit) as reader,
    ):
        read_windows(reader, buffers, windows, writers.check)
    return writers.busy_s


def read_synchronously(prepared: Prepared, decoder: LoadedDecoder) -> npt.NDArray[Any]:
    """All rows [L, T, W] as the engine stores them, by copies that nothing runs beside: what the others are held against."""
    layout, offsets = prepared.layout, prepared.tokens.offsets
    rows_LTW = np.empty((len(layout.layers), int(offsets[-1]), layout.width), dtype=layout.numpy_dtype)
    with capturing(prepared, decoder) as capture:
        for window in prepared.plan.windows:
            for batch in prepared.plan.batches(window):
                captured = capture.read([prepared.tokens.of(prompt) for prompt in batch])
                if decoder.device.type == "cuda":
                    torch.cuda.synchronize(decoder.device)
                host = captured.rows_LTW.cpu()
                values = (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()
                row = 0
                for prompt in batch:
                    first, end = int(offsets[prompt]), int(offsets[prompt + 1])
                    rows_LTW[:, first:end] = values[:, row : row + end - first]
                    row += end - first
    return rows_LTW
