"""The limit: a bare forward pass of just the blocks that are needed, over the same tokens packed into rows without padding.

No head, no mask, no cache, nothing kept and nothing written. What reads and stores the stream cannot be faster than this, on this
machine with these libraries, but for batches of still better shape.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from task import Ids, Task

from harvest.model.blocks import find_blocks, find_decoder, stream_of

# Tokens of a pass among which the best is looked for, and how many are read to judge one.
SIZES = (512, 1024, 2048, 4096, 8192)
_TRIED_TOKENS = 2048
_TRIES = 2


class _DoneError(Exception):
    """Ends a forward pass after the deepest asked block."""


class Bare:
    """A decoder that stops after the deepest asked block."""

    def __init__(self, decoder: torch.nn.Module, blocks: Sequence[torch.nn.Module], layers: Sequence[int]) -> None:
        self._decoder, self._blocks, self._layers = decoder, blocks, list(layers)
        self._hook = blocks[self._layers[-1]].register_forward_hook(self._stop)
        self.device = next(decoder.parameters()).device

    @property
    def n_parameters(self) -> int:
        """Parameters of the blocks that run."""
        return sum(weights.numel() for block in self._blocks[: self._layers[-1] + 1] for weights in block.parameters())

    @torch.inference_mode()
    def run(self, ids_BS: torch.Tensor) -> None:
        """One forward pass, int64 [batch, token]."""
        try:
            self._decoder(input_ids=ids_BS.to(self.device), use_cache=False)
        except _DoneError:
            return
        raise AssertionError("the pass did not come to the deepest asked block")

    def close(self) -> None:
        """Give the decoder back as it was."""
        self._hook.remove()

    def streams(self, ids: Ids) -> npt.NDArray[np.float32]:
        """The asked layers of one prompt, [layer, token, hidden]: to see that the limit computes what the others compute."""
        kept: list[torch.Tensor] = []

        def keep(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            kept.append(stream_of(output)[0].float())

        # The hook that stops is called before a later one, so it steps aside.
        self._hook.remove()
        hooks = [self._blocks[layer].register_forward_hook(keep) for layer in self._layers]
        self._hook = self._blocks[self._layers[-1]].register_forward_hook(self._stop)
        try:
            self.run(torch.from_numpy(ids)[None])
        finally:
            for hook in hooks:
                hook.remove()
        return np.asarray(torch.stack(kept).cpu().numpy())

    def _stop(self, _module: torch.nn.Module, _args: Any, _output: Any) -> None:
        raise _DoneError


def load_bare(task: Task) -> Bare:
    """The task's model in float32 on the CPU."""
    model = transformers.AutoModelForCausalLM.from_pretrained(task.location, dtype=torch.float32).eval()
    decoder = find_decoder(model, task.n_layers)
    return Bare(decoder, list(find_blocks(decoder, task.n_layers)), task.layers)


def packed(task: Task) -> torch.Tensor:
    """All tokens end to end in rows of equal length, the prompts' mean, int64 [row, token]; less than one row is left over."""
    ids = np.concatenate(task.prompts)
    row_tokens = max(1, round(len(ids) / len(task.prompts)))
    n_rows = len(ids) // row_tokens
    return torch.from_numpy(ids[: n_rows * row_tokens].reshape(n_rows, row_tokens))


def sweep(bare: Bare, rows_RS: torch.Tensor, batch_tokens: int) -> int:
    """Read all rows, so many tokens a pass; answers the tokens."""
    batch = max(1, batch_tokens // rows_RS.shape[1])
    for ids_BS in rows_RS.split(batch):
        bare.run(ids_BS)
    return rows_RS.numel()


def tune(task: Task) -> list[dict[str, float]]:
    """Tokens/s of each size of a pass, the faster of two short tries, the sizes in turn; sizes above all tokens are left out."""
    bare = load_bare(task)
    rows_RS = packed(task)
    row_tokens = rows_RS.shape[1]
    sizes = [size for size in SIZES if size <= rows_RS.numel()] or [rows_RS.numel()]
    best = dict.fromkeys(sizes, 0.0)
    bare.run(rows_RS[:1])
    for _ in range(_TRIES):
        for size in sizes:
            batch = max(1, size // row_tokens)
            n_passes = max(1, _TRIED_TOKENS // (batch * row_tokens))
            tried = rows_RS[: batch * n_passes]
            started = time.perf_counter()
            n_tokens = sweep(bare, tried, size)
            best[size] = max(best[size], n_tokens / (time.perf_counter() - started))
    return [{"batch_tokens": size, "tokens_per_s": rate} for size, rate in best.items()]
