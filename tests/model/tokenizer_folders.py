"""What the tokenizer files of model families say of a start token, and small folders whose files say the same.

The facts are token strings, flags and ids as they stand in published tokenizer_config.json, special_tokens_map.json, tokenizer.json and
config.json files.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_configs import tiny_config
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from harvest.model.tiny import tiny_tokenizer

# In place of the text's own tokens in a template.
TEXT = "$A"
# The file does not have this key.
ABSENT = "(absent)"


@dataclass(frozen=True)
class Family:
    """What the files of one family say.

    model_type: as in config.json.
    tokenizer_class, bos, eos: as in tokenizer_config.json; bos and eos by their text, None for null.
    flags: add_bos_token, add_eos_token, add_prefix_space and legacy, where the file has them.
    template: what the TemplateProcessing of tokenizer.json makes of a text; None where it has none.
    metaspace: a vocabulary with a visible space, as sentencepiece has it; otherwise byte-level BPE.
    prefixed: whether a text gets a metaspace before it.
    config_bos: bos_token_id of config.json, by the text of that token; None for null.
    """

    model_type: str
    tokenizer_class: str
    bos: str | None
    eos: str | None
    flags: dict[str, Any] = field(default_factory=dict)
    template: tuple[str, ...] | None = None
    metaspace: bool = False
    prefixed: bool = False
    config_bos: str | None = ABSENT

    @property
    def specials(self) -> list[str]:
        """The tokens that are no part of a text, each once, the config's first."""
        named = (self.config_bos, self.bos, self.eos, *(self.template or ()))
        return list(dict.fromkeys(token for token in named if token not in (None, ABSENT, TEXT)))


_END = "<|endoftext|>"
_BEGIN = "<|begin_of_text|>"
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_NO_PREFIX = {"add_prefix_space": False}
_FIRST = {"add_bos_token": True, "add_eos_token": False}
_NEITHER = {"add_bos_token": False, "add_eos_token": False}
_SPACED = {"metaspace": True, "prefixed": True}
_GEMMA = ("GemmaTokenizer", "<bos>", "<eos>")
_NEOX = ("GPTNeoXTokenizer", _END, _END, _NO_PREFIX)
_QWEN = ("Qwen2Tokenizer", None, "<|im_end|>")
_PLAIN = "PreTrainedTokenizerFast"

# A family, and the start token that its models are to get.
FAMILIES: dict[str, tuple[Family, str | None]] = {
    "Llama 2": (Family("llama", "LlamaTokenizer", "<s>", "</s>", _FIRST, ("<s>", TEXT), **_SPACED, config_bos="<s>"), "<s>"),
    "Llama 3": (Family("llama", _PLAIN, _BEGIN, "<|end_of_text|>", config_bos=_BEGIN), _BEGIN),
    "Llama 3.1": (Family("llama", _PLAIN, _BEGIN, "<|eot_id|>", {}, (_BEGIN, TEXT), config_bos=_BEGIN), _BEGIN),
    "Mistral 7B": (
        Family("mistral", "LlamaTokenizer", "<s>", "</s>", _FIRST | {"legacy": True}, ("<s>", TEXT), **_SPACED, config_bos="<s>"),
        "<s>",
    ),
    "Mistral 7B v0.3": (Family("mistral", ABSENT, "<s>", "</s>", **_SPACED), "<s>"),
    "Mistral NeMo": (Family("mistral", _PLAIN, "<s>", "</s>", _FIRST | _NO_PREFIX), "<s>"),
    "Gemma": (Family("gemma", *_GEMMA, _FIRST | {"legacy": None}, metaspace=True), "<bos>"),
    "Gemma 2": (Family("gemma2", *_GEMMA, _FIRST, metaspace=True), "<bos>"),
    "Gemma 3": (Family("gemma3_text", *_GEMMA, _FIRST, ("<bos>", TEXT), metaspace=True), "<bos>"),
    "Gemma 4": (Family("gemma4_text", *_GEMMA, metaspace=True, config_bos="<bos>"), "<bos>"),
    "Qwen 2": (Family("qwen2", *_QWEN, _NO_PREFIX, config_bos=_END), None),
    "Qwen 2.5": (Family("qwen2", *_QWEN, {"add_bos_token": False} | _NO_PREFIX, config_bos=_END), None),
    "Qwen 2.5, saved by transformers 5": (Family("qwen2", "TokenizersBackend", None, "<|im_end|>", _NO_PREFIX, config_bos=_END), None),
    "Qwen 3": (Family("qwen3", *_QWEN, {"add_bos_token": False} | _NO_PREFIX, config_bos=_END), None),
    "SmolLM3": (Family("smollm3", _PLAIN, None, "<|im_end|>"), None),
    "GPT-2": (Family("gpt2", "GPT2Tokenizer", _END, _END, _NO_PREFIX), _END),
    "Pythia": (Family("gpt_neox", *_NEOX), _END),
    "OPT": (Family("opt", "GPT2Tokenizer", "</s>", "</s>", {"add_bos_token": True} | _NO_PREFIX), "</s>"),
    "Phi-2": (Family("phi", "CodeGenTokenizer", _END, _END, _NO_PREFIX), _END),
    # The flag says that a start token is added, and the template adds none.
    "Phi-3": (Family("phi3", "LlamaTokenizer", "<s>", _END, _FIRST | {"legacy": False}, (TEXT,), **_SPACED), "<s>"),
    "Phi-3, later files": (Family("phi3", "LlamaTokenizer", "<s>", _END, _NEITHER | {"legacy": False}, (TEXT,), **_SPACED), "<s>"),
    "Phi-4": (Family("phi3", "GPT2Tokenizer", _END, "<|im_end|>", _NO_PREFIX), _END),
    "Phi-4 mini": (Family("phi3", "GPT2Tokenizer", _END, _END, _NEITHER | _NO_PREFIX), _END),
    # No bos_token in its files: the one that transformers' class has for such.
    "OLMo": (Family("olmo", ABSENT, ABSENT, _END), _END),
    "OLMo 2": (Family("olmo2", ABSENT, _END, _END), _END),
    "DeepSeek V3": (Family("deepseek_v3", "LlamaTokenizerFast", *_DEEPSEEK, _FIRST | {"legacy": True}), _DEEPSEEK[0]),
    # Not a word of it in its tokenizer's files: the config's counts.
    "Falcon 7B": (Family("falcon", _PLAIN, ABSENT, _END, _NO_PREFIX, config_bos=_END), _END),
    "BLOOM": (Family("bloom", "BloomTokenizer", "<s>", "</s>", _NO_PREFIX), "<s>"),
    "MPT": (Family("mpt", *_NEOX), _END),
    "StableLM 3B": (Family("stablelm", *_NEOX, config_bos=_END), _END),
    "Yi": (
        Family("llama", "LlamaTokenizer", "<|startoftext|>", _END, _NEITHER | {"legacy": True}, **_SPACED, config_bos="<|startoftext|>"),
        "<|startoftext|>",
    ),
    "Command R": (
        Family("cohere", "CohereTokenizerFast", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", _FIRST | {"legacy": True}),
        "<BOS_TOKEN>",
    ),
    "GLM-4": (Family("glm4", "PreTrainedTokenizer", ABSENT, _END), None),
    "Granite 4": (Family("granite", "GPT2Tokenizer", "<|end_of_text|>", "<|end_of_text|>", _NO_PREFIX), "<|end_of_text|>"),
    "gpt-oss": (Family("gpt_oss", _PLAIN, "<|startoftext|>", "<|return|>"), "<|startoftext|>"),
}


# <unk>, a token for each byte, the metaspace and printable ASCII.
_METASPACE_VOCAB = {
    token: id_ for id_, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))])
}
_BYTE_VOCAB = {token: id_ for token, id_ in tiny_tokenizer().get_vocab().items() if id_ < 256}


def own_ids(family: Family, text: str) -> list[int]:
    """The ids of a text's own tokens in a family's folder: its bytes, or the places of its characters in the vocabulary."""
    if not family.metaspace:
        return list(text.encode())
    return [_METASPACE_VOCAB[character] for character in ("▁" if family.prefixed else "") + text.replace(" ", "▁")]


def special_id(family: Family, token: str) -> int:
    """The id of one of a family's special tokens in its folder."""
    return len(_text_vocab(family)) + family.specials.index(token)


def save_family(folder: Path, family: Family, n_padding: int = 0) -> Path:
    """A Hugging Face folder with a random model of the family's type, and with tokenizer files that say what the family's say.

    n_padding: rows of the embedding that no token of the files has.
    """
    config = tiny_config(transformers.CONFIG_MAPPING[family.model_type])
    n_tokens = len(_text_vocab(family)) + len(family.specials) + n_padding
    for name in ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"):
        if hasattr(config, name):
            setattr(config, name, n_tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    written.pop("bos_token_id", None)
    if family.config_bos != ABSENT:
        written["bos_token_id"] = None if family.config_bos is None else special_id(family, family.config_bos)
    path.write_text(json.dumps(written))
    save_tokenizer(folder, family)
    return folder


def save_tokenizer(folder: Path, family: Family) -> None:
    """The two tokenizer files of a family."""
    specials = {token: special_id(family, token) for token in family.specials}
    vocab = {**_text_vocab(family), **specials}
    if family.metaspace:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        prepend = [normalizers.Prepend("▁")] if family.prefixed else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        tokenizer.decoder = decoders.ByteLevel()
    if family.template is not None:
        added = [(token, specials[token]) for token in dict.fromkeys(family.template) if token != TEXT]
        tokenizer.post_processor = processors.TemplateProcessing(single=list(family.template), special_tokens=added)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    says = {"tokenizer_class": family.tokenizer_class, "bos_token": family.bos, "eos_token": family.eos, "model_max_length": 10**30}
    says |= family.flags | ({"unk_token": "<unk>"} if family.metaspace else {})
    (folder / "tokenizer_config.json").write_text(json.dumps({key: value for key, value in says.items() if value != ABSENT}))


def _text_vocab(family: Family) -> dict[str, int]:
    return _METASPACE_VOCAB if family.metaspace else _BYTE_VOCAB
