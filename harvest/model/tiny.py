"""The embedded model: a four-block Llama with random weights from a fixed seed, and a tokenizer that reads bytes.

It is for trying the pipeline without a download. Its numbers mean nothing.
"""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT_LENGTH = 1024
START_TOKEN = "<s>"
# Changes whenever the weights change, so that a run made with other weights is never taken for this model's.
REVISION = "tiny-1"
_SEED = 20261201


def tiny_config() -> LlamaConfig:
    """Four blocks, hidden size 64, 257 tokens: the bytes and a start token."""
    return LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.1,
        bos_token_id=256,
        eos_token_id=None,
        dtype=torch.float32,
    )


def tiny_model() -> LlamaForCausalLM:
    """The model in float32 on the CPU, the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return LlamaForCausalLM(tiny_config())


def tiny_tokenizer() -> Any:
    """A token a byte, numbered 0 to 255, and the start token, 256."""
    # The byte-level alphabet writes byte b as one printable character; sorting by byte gives each its own number as id.
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=START_TOKEN)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE: printable ones for themselves, the rest from U+0100 onward."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
