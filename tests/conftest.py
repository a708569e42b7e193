"""What several tests share: models in folders, and finished runs."""

import json
import os

# Before the libraries that read it: no test waits for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fake_hub import Hub, serving

import harvest
from harvest.model.tiny import tiny_tokenizer
from harvest.progress import Silent
from harvest.settings import cache_folder

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

DATA = Path(__file__).parent / "data"
PROMPTS_96 = DATA / "prompts-96.jsonl"

# Lengths from 1 to 70 tokens of the byte tokenizer, unsorted, so that batches have padding and shards mix lengths.
TEXTS = [
    "Hello there",
    "a",
    "The cat sat on the mat, and then it slept.",
    "2 + 2 = 4",
    "é" * 30,
    "once more",
    "x" * 69,
    "end",
    "zz top " * 5,
]


# Configs of random models that the byte tokenizer fits.
SMALL = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": None, "pad_token_id": None}
LLAMA_LIKE = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


class Notes(Silent):
    """A reporter that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A Hub over loopback."""
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder that scripts/get-smollm2 makes; scripts/test makes it before the tests."""
    folder = cache_folder() / "smollm2-135m"
    assert (folder / "config.json").is_file(), f"{folder} is missing; make it with scripts/get-smollm2"
    return folder


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a model of random weights, in float32, with the byte tokenizer, as a Hugging Face folder."""

    def save(config: Any) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            # The usual initial weights are so small that attention, its window and its positions hardly show in the stream.
            for weights in model.parameters():
                if weights.dim() > 1:
                    torch.nn.init.normal_(weights, std=0.2)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of TEXTS on tiny: all layers, bfloat16, four prompts a shard. Not to be written to."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    harvest.run(tiny_request(shard_size=4), folder)
    return folder


@pytest.fixture(scope="session")
def chunked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two shards on tiny, float32: some 31,000 tokens, a layer of the first in two chunks. Not to be written to."""
    folder = tmp_path_factory.mktemp("chunked") / "run"
    texts = [f"{i} " + "word " * (12 + i % 15) for i in range(320)]
    harvest.run(tiny_request(texts, shard_size=200), folder, harvest.Engine(store_dtype="float32"))
    return folder


def tiny_request(prompts: list[str] | None = None, **fields: Any) -> harvest.HarvestRequest:
    """A request for all layers of tiny."""
    return harvest.HarvestRequest(model="tiny", prompts=prompts or TEXTS, **{"layers": "all", **fields})


def read_96() -> list[str]:
    """The 96 English prompts."""
    return [json.loads(line)["prompt"] for line in PROMPTS_96.read_text().splitlines()]


def wait_for(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """What a condition answers once that is true; an error where it does not come about."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come about in time")
