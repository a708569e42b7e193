"""The thread that fills blocks: how often it reads, how many blocks it holds at once, and how it ends."""

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from conftest import LLAMA_LIKE
from streamed import ON_CPU, blockwise, described, resident

from harvest.errors import CancelledError, ModelError
from harvest.model.blockwise import BlockwiseDecoder
from harvest.model.feed import Feed
from harvest.model.load import load_blockwise
from harvest.stop import StopFlag

DEEP = {**LLAMA_LIKE, "num_hidden_layers": 6}
EXPERTS = {**DEEP, "num_local_experts": 4, "num_experts_per_tok": 2}


def go_on() -> None:
    """A check that never stops."""


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harvest-")]


@pytest.fixture(scope="module")
def folder(save_model: Any) -> Path:
    made: Path = save_model(transformers.LlamaConfig(**DEEP))
    return made


def read_all(feed: Feed, check: Callable[[], Any]) -> None:
    """Ask for block after block until something is raised."""
    while True:
        feed.next(check)


def filled(decoder: BlockwiseDecoder) -> list[int]:
    return [block for block in range(len(decoder.tensors)) if not any(weights.is_meta for weights in decoder.weights(block))]


def assert_weights(decoder: BlockwiseDecoder, whole: torch.nn.Module, block: int) -> None:
    expected = whole.state_dict()
    ours = decoder.decoder.blocks[block].state_dict()
    assert set(ours) == set(expected)
    for name, weights in ours.items():
        assert weights.dtype == expected[name].dtype
        assert torch.equal(weights, expected[name]), (block, name)
    assert not any(weights.requires_grad for weights in decoder.decoder.blocks[block].parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [transformers.LlamaConfig(**DEEP), transformers.MixtralConfig(**EXPERTS)], ids=["llama", "mixtral"])
def test_blocks_come_in_order_with_their_own_weights_in_every_pass(config: Any, dtype: torch.dtype, save_model: Any) -> None:
    place = save_model(config)
    decoder, whole = blockwise(place, dtype), resident(place, dtype)
    with Feed(decoder, 3) as feed:
        for _ in range(3):
            for block in range(6):
                assert feed.next(go_on) == block
                assert_weights(decoder, whole.blocks[block], block)
                # The block beside it comes while this one computes, and writes over nothing of it.
                time.sleep(0.01)
                assert_weights(decoder, whole.blocks[block], block)
    assert feed.n_bytes == 3 * sum(map(decoder.n_bytes, range(6)))
    assert feed.read_s > 0
    assert not filled(decoder)


def test_two_blocks_are_there_at_once_and_never_more(folder: Path) -> None:
    decoder = blockwise(folder)
    seen = []
    with Feed(decoder, 2) as feed:
        for number in range(12):
            block = feed.next(go_on)
            deadline = time.monotonic() + 5
            # One more is filled beside it, where one follows, and then nothing happens until it is given back.
            while len(filled(decoder)) < 2 and number < 11 and time.monotonic() < deadline:
                assert block in filled(decoder)
            time.sleep(0.02)
            seen.append(filled(decoder))
            assert feed.n_bytes == sum(decoder.n_bytes(read % 6) for read in range(min(number + 2, 12)))
    following = [sorted({number % 6, (number + 1) % 6}) for number in range(11)]
    assert seen == [*following, [4, 5]]


@pytest.mark.parametrize("n_blocks", [1, 2])
def test_so_few_blocks_are_read_once_and_stay(n_blocks: int, folder: Path) -> None:
    decoder, whole = blockwise(folder, n_blocks=n_blocks), resident(folder)
    with Feed(decoder, 4) as feed:
        for number in range(4 * n_blocks):
            assert feed.next(go_on) == number % n_blocks
            assert_weights(decoder, whole.blocks[number % n_blocks], number % n_blocks)
        assert filled(decoder) == list(range(n_blocks))
    assert feed.n_bytes == sum(map(decoder.n_bytes, range(n_blocks)))
    assert not filled(decoder)


def places_of(decoder: BlockwiseDecoder, block: int) -> set[int]:
    return {weights.untyped_storage().data_ptr() for weights in decoder.weights(block)}


def test_buffers_are_used_again(folder: Path, save_model: Any) -> None:
    decoder, places = blockwise(folder), set()
    with Feed(decoder, 3) as feed:
        for _ in range(18):
            places |= places_of(decoder, feed.next(go_on))
    # All weights of a block lie in the buffer that its bytes were read into, and there are two.
    assert len(places) == 2


def test_a_small_part_of_a_buffer_does_not_hold_it(save_model: Any) -> None:
    # Nearly all of such a block is experts, which are put together elsewhere; its norms and its attention alone are used as they were read.
    decoder = blockwise(save_model(transformers.MixtralConfig(**EXPERTS | {"intermediate_size": 256})))
    with Feed(decoder, 1) as feed:
        for _ in range(6):
            block = feed.next(go_on)
            sizes = {weights.untyped_storage().data_ptr(): weights.untyped_storage().nbytes() for weights in decoder.weights(block)}
            assert sum(sizes.values()) < 1.1 * decoder.n_bytes(block)


def test_a_file_that_shrinks_is_said_when_its_block_is_asked_for(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    description = described(tmp_path, model.config, 6, 32)
    decoder, whole = load_blockwise(description, ON_CPU, torch.float32, 6), resident(folder)
    n_before = 3
    earlier = {tensor.path for block in range(n_before) for tensor in decoder.tensors[block]}
    broken = next(tensor.path for tensor in decoder.tensors[n_before] if tensor.path not in earlier)
    with Feed(decoder, 1) as feed:
        with broken.open("r+b") as file:
            file.truncate(100)
        for block in range(n_before):
            assert feed.next(go_on) == block
            assert_weights(decoder, whole.blocks[block], block)
        with pytest.raises(ModelError, match=rf"{broken} has become shorter while it was read; fetch it anew"):
            feed.next(go_on)
    assert not filled(decoder)


def test_a_file_that_is_gone_is_named_before_a_thread_starts(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    decoder = load_blockwise(described(tmp_path, model.config, 6, 32), ON_CPU, torch.float32, 6)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: No such file or directory; see that it is there"):
        Feed(decoder, 1)


def test_weights_that_cannot_be_put_together_are_said_when_their_block_is_asked_for(save_model: Any, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(save_model(transformers.MixtralConfig(**EXPERTS)))
    model.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.1.w1.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    # Nothing is rehearsed here, which would have said so before.
    decoder = load_blockwise(described(tmp_path, model.config, 6, 32), ON_CPU, torch.float32, 6)
    with Feed(decoder, 1) as feed:
        assert feed.next(go_on) == 0
        with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.gate_up_proj .* complete its files"):
            feed.next(go_on)


def large_model(folder: Path) -> BlockwiseDecoder:
    """Three blocks of 0.2 GB each in a file with holes for values."""
    config = transformers.LlamaConfig(**DEEP | {"num_hidden_layers": 3, "hidden_size": 2048, "intermediate_size": 16384})
    with torch.device("meta"):
        shapes = {name: list(weights.shape) for name, weights in transformers.LlamaForCausalLM(config).state_dict().items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config.save_pretrained(folder)
    return load_blockwise(described(folder, config, 3, 2048), ON_CPU, torch.bfloat16, 3)


def test_a_stop_is_heard_while_a_block_is_read(tmp_path: Path) -> None:
    decoder, stop = large_model(tmp_path), StopFlag()
    stop.ask(CancelledError("enough"))
    feed, started = Feed(decoder, 2), time.monotonic()
    with pytest.raises(CancelledError, match="enough"), feed:
        feed.next(stop.check)
    # The block's pieces that were not begun are not read any more.
    assert feed.n_bytes == 0
    assert time.monotonic() - started < 5
    assert not filled(decoder)


def test_a_stop_is_heard_while_a_block_is_waited_for(tmp_path: Path) -> None:
    decoder, stop, asked = large_model(tmp_path), StopFlag(), []

    def check() -> None:
        # The first block is asked for at once, and takes longer than the pause between two looks.
        asked.append(time.monotonic())
        if len(asked) > 1:
            stop.ask(CancelledError("enough"))
        stop.check()

    with pytest.raises(CancelledError, match="enough"), Feed(decoder, 1) as feed:
        read_all(feed, check)
    assert time.monotonic() - asked[-1] < 5


def test_it_ends_before_all_passes_are_read(folder: Path) -> None:
    decoder = blockwise(folder)
    started = time.monotonic()
    with Feed(decoder, 1000) as feed:
        assert [feed.next(go_on) for _ in range(8)] == [0, 1, 2, 3, 4, 5, 0, 1]
    assert time.monotonic() - started < 5
    assert not filled(decoder)


def raise_at(feed: Feed, block: int) -> None:
    while feed.next(go_on) != block:
        pass
    raise ZeroDivisionError


def test_an_error_of_the_one_who_computes_ends_it(folder: Path) -> None:
    decoder = blockwise(folder)
    with pytest.raises(ZeroDivisionError), Feed(decoder, 10) as feed:
        raise_at(feed, 3)
    assert not filled(decoder)
