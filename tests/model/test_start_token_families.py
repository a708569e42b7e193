"""Exactly one start token, put by harvest itself, whatever a family's tokenizer files say and whatever they add by themselves."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizer_folders import ABSENT, FAMILIES, TEXT, Family, own_ids, save_family, special_id

import harvest
from harvest.progress import StderrReporter

PROMPTS = ["Hello there, you", "a", "2 + 2 = 4"]
BYTES = Family("llama", "PreTrainedTokenizerFast", "<s>", "</s>")
SPACED = Family("llama", "LlamaTokenizer", "<s>", "</s>", metaspace=True, prefixed=True)
GPT2 = Family("gpt2", "GPT2Tokenizer", "<s>", "</s>")


def ids_of(folder: Path, prompts: Sequence[str] = PROMPTS, **fields: Any) -> list[list[int]]:
    """The token ids of a run on a model's folder, with all that its manifest says of the start token checked against them."""
    request = harvest.HarvestRequest(model=str(folder), prompts=list(prompts), layers=[0], **fields)
    path = folder / f"run {len(list(folder.glob('run *')))}"
    harvest.run(request, path, reporter=StderrReporter())
    run = harvest.open(path)
    ids = [run.token_ids(prompt).tolist() for prompt in range(run.n_prompts)]
    assert run.manifest.local is not None
    if (said := run.manifest.local["start_token"]) is not None:
        assert {row[0] for row in ids} == {said["id"]}
    return ids


def expected(family: Family, start: str | None, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    first = [] if start is None else [special_id(family, start)]
    return [first + own_ids(family, text) for text in prompts]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gets_its_start_token_once_and_nothing_else(name: str, tmp_path: Path) -> None:
    family, start = FAMILIES[name]
    assert ids_of(save_family(tmp_path, family)) == expected(family, start)


@pytest.mark.parametrize("name", [name for name, (family, _) in FAMILIES.items() if family.bos != ABSENT])
def test_a_config_counts_for_nothing_where_the_tokenizer_speaks(name: str, tmp_path: Path) -> None:
    family, start = FAMILIES[name]
    family = replace(family, config_bos="<another>")
    assert ids_of(save_family(tmp_path, family)) == expected(family, start)


@pytest.mark.parametrize("family", [BYTES, SPACED, GPT2], ids=["bytes", "metaspace", "gpt2"])
@pytest.mark.parametrize("add_bos", [None, False, True])
@pytest.mark.parametrize("add_eos", [None, True])
@pytest.mark.parametrize(
    "template", [None, (TEXT,), ("<s>", TEXT), ("<s>", TEXT, "</s>"), (TEXT, "</s>"), ("<s>", "<s>", TEXT), ("</s>", TEXT)], ids=str
)
def test_neither_flags_nor_template_count(
    family: Family, add_bos: bool | None, add_eos: bool | None, template: Any, tmp_path: Path
) -> None:
    flags = {key: value for key, value in (("add_bos_token", add_bos), ("add_eos_token", add_eos)) if value is not None}
    family = replace(family, flags=flags, template=template)
    assert ids_of(save_family(tmp_path, family)) == expected(family, "<s>")


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("add_prefix_space", [None, False, True])
def test_a_space_before_the_text_is_as_the_tokenizer_alone_has_it(add_prefix_space: bool | None, prefixed: bool, tmp_path: Path) -> None:
    family = replace(SPACED, tokenizer_class="PreTrainedTokenizerFast", prefixed=prefixed, flags={"add_prefix_space": add_prefix_space})
    assert ids_of(save_family(tmp_path, family)) == expected(family, "<s>")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def to_vocab_and_merges(folder: Path) -> None:
    """GPT-2's two files in place of tokenizer.json, as OPT has them."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def to_special_tokens_map(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))


@pytest.mark.parametrize(
    ("family", "edit"),
    [
        (FAMILIES["OPT"][0], to_vocab_and_merges),
        (FAMILIES["GPT-2"][0], to_vocab_and_merges),
        (replace(BYTES, bos=ABSENT, template=("<s>", TEXT)), to_special_tokens_map),
        (BYTES, lambda folder: edit_config(folder, bos_token={"__type": "AddedToken", "content": "<s>", "special": True})),
        (replace(BYTES, config_bos="<s>"), lambda folder: (folder / "tokenizer_config.json").unlink()),
    ],
    ids=["opt, vocab.json", "gpt2, vocab.json", "special_tokens_map.json", "a token as an object", "no tokenizer_config.json"],
)
def test_a_start_token_counts_wherever_it_stands(family: Family, edit: Callable[[Path], None], tmp_path: Path) -> None:
    edit(save_family(tmp_path, family))
    start = "<s>" if family.bos == ABSENT else family.bos
    assert ids_of(tmp_path) == expected(family, start)


# Each adds a bos_token of its own to a vocabulary whose files name none.
CLASSES = ["GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer", "CohereTokenizer", "LlamaTokenizer", "GemmaTokenizer"]
MODEL_TYPES = dict(zip(CLASSES, ["gpt2", "gpt_neox", "codegen", "cohere", "llama", "gemma"], strict=True))


@pytest.mark.parametrize("padded", [False, True], ids=["full embeddings", "padded embeddings"])
@pytest.mark.parametrize("config_bos", [None, "<begin>"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_token_that_only_a_class_of_transformers_has_is_none(name: str, config_bos: str | None, padded: bool, tmp_path: Path) -> None:
    metaspace = name in ("LlamaTokenizer", "GemmaTokenizer")
    family = Family(MODEL_TYPES[name], name, ABSENT, "<end>", metaspace=metaspace, prefixed=name == "LlamaTokenizer", config_bos=config_bos)
    # Rows of the embedding beyond the vocabulary, as many models have them: a new id is in the model, and nobody trained it.
    save_family(tmp_path, family, n_padding=64 if padded else 0)
    assert ids_of(tmp_path) == expected(family, config_bos)


@pytest.mark.parametrize("name", [name for name, (_, start) in FAMILIES.items() if start is not None])
def test_a_text_that_brings_the_start_token_along_has_two_and_a_warning(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, start = FAMILIES[name]
    assert start is not None
    id_ = special_id(family, start)
    own = ids_of(save_family(tmp_path, family), [f"{start}a"], add_special_tokens=False)
    assert own[0][0] == id_ != own[0][1]
    assert "warning" not in capsys.readouterr().err
    assert ids_of(tmp_path, [f"{start}a", "a"]) == [[id_, *own[0]], *expected(family, start, ["a"])]
    assert "already began with the start token now has two, so every position is off by one: prompt 0;" in capsys.readouterr().err


def test_a_chat_template_brings_the_start_token_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, start = FAMILIES["Llama 3.1"]
    assert start is not None
    template = "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    (save_family(tmp_path, family) / "chat_template.jinja").write_text(template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert ids_of(tmp_path, [text], add_special_tokens=False) == expected(family, start, ["[user]Hi"])
    assert ids_of(tmp_path, [text])[0][:2] == [special_id(family, start)] * 2
    assert "pass --no-add-special-tokens for text that begins with its own" in capsys.readouterr().err


# A tokenizer of a model's own code, as InternLM's and Baichuan's are: in Python, with its own word on what stands around a text.
CODE = """
import transformers


class BytesTokenizer(transformers.PreTrainedTokenizer):
    def __init__(self, **kwargs):
        self.names = {chr(byte): byte for byte in range(256)} | {"<s>": 256, "</s>": 257}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return 258

    def get_vocab(self):
        return dict(self.names)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.names[token]

    def _convert_id_to_token(self, id_):
        return next(token for token, number in self.names.items() if number == id_)

    def build_inputs_with_special_tokens(self, ids, pair=None):
        return [256, *ids, 257]
"""


def test_what_a_tokenizer_s_own_code_puts_around_a_text_is_left_out(tmp_path: Path) -> None:
    family = replace(BYTES, tokenizer_class="BytesTokenizer")
    model = tmp_path / "model"
    model.mkdir()
    (save_family(model, family) / "tokenizer.json").unlink()
    (model / "tokenization_bytes.py").write_text(CODE)
    edit_config(model, auto_map={"AutoTokenizer": ["tokenization_bytes.BytesTokenizer", None]})
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    # A process of its own, because transformers chooses where it keeps such code when it is imported.
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "code")}
    command = [sys.executable, "-m", "harvest", "run", "--model", model, "--trust-remote-code", "--layers", "0"]
    command += ["--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "run", "--quiet"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    run = harvest.open(tmp_path / "run")
    assert [run.token_ids(prompt).tolist() for prompt in range(run.n_prompts)] == expected(family, "<s>")


@pytest.mark.smollm2
def test_smollm2_gets_its_start_token_once(smollm2: Path, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    harvest.run(harvest.HarvestRequest(model=str(smollm2), prompts=PROMPTS, layers=[0]), tmp_path / "run")
    run = harvest.open(tmp_path / "run")
    start = tokenizer.token_to_id("<|im_start|>")
    assert [run.token_ids(prompt).tolist() for prompt in range(3)] == [
        [start, *tokenizer.encode(text, add_special_tokens=False).ids] for text in PROMPTS
    ]
