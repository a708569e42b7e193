"""Which token a text begins with, family by family, and by a user's choice."""

from typing import Any

import pytest
import transformers
from conftest import SMALL, TEXTS, tiny_request

import harvest
from harvest.errors import RequestError
from harvest.model.start_token import start_token_id
from harvest.model.tiny import tiny_tokenizer

LLAMA_CONFIG = transformers.LlamaConfig(**(SMALL | {"bos_token_id": 7}))


class Tokenizer:
    """What counts of a family's tokenizer: its bos_token, and whether its files say anything of one."""

    def __init__(self, bos_token_id: int | None, says_so: bool = True) -> None:
        self.bos_token_id = bos_token_id
        self.init_kwargs = {"bos_token": None if bos_token_id is None else "<s>"} if says_so else {}


@pytest.mark.parametrize(
    ("family", "tokenizer", "expected"),
    [
        # bos_token in tokenizer_config.json: Llama 2 and 3, Mistral, Gemma, GPT-2, Pythia, OPT, SmolLM2, Phi, OLMo, DeepSeek.
        ("llama", Tokenizer(128000), 128000),
        # "bos_token": null, though the config has a bos_token_id, that of the end of a text: Qwen 2 and 3.
        ("qwen", Tokenizer(None), None),
        # Not a word of it in the tokenizer's files: Falcon. The config's counts.
        ("falcon", Tokenizer(None, says_so=False), 7),
    ],
)
def test_the_start_token_of_a_family(family: str, tokenizer: Any, expected: int | None) -> None:
    assert start_token_id(tokenizer, LLAMA_CONFIG) == expected, family


@pytest.mark.parametrize(("choice", "first"), [("auto", 256), ("none", TEXTS[0].encode()[0]), ("<s>", 256), ("65", 65), ("Z", ord("Z"))])
def test_a_chosen_start_token_stands_first_once(choice: str, first: int, tmp_path: Any) -> None:
    harvest.run(tiny_request(), tmp_path / "run", harvest.Engine(start_token=choice))
    run = harvest.open(tmp_path / "run")
    n_added = 0 if choice == "none" else 1
    for prompt, text in enumerate(TEXTS):
        own = list(text.encode())
        assert run.token_ids(prompt).tolist() == [first] * n_added + own
    token = tiny_tokenizer().convert_ids_to_tokens(first)
    assert run.manifest.local["start_token"] == ({"id": first, "text": token} if n_added else None)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("<bos>", "start_token: '<bos>' is no token of this model; near to it are '<s>'; give a token's text, its id, none or auto"),
        ("257", "start_token: 257 was given, but the model has 257 token ids, 0 to 256"),
        ("-1", "'-1' is no token of this model"),
    ],
)
def test_a_start_token_that_the_model_does_not_have(choice: str, message: str, tmp_path: Any) -> None:
    with pytest.raises(RequestError, match=message):
        harvest.run(tiny_request(), tmp_path / "run", harvest.Engine(start_token=choice))


def test_a_start_token_beside_its_own_denial(tmp_path: Any) -> None:
    with pytest.raises(RequestError, match="it means nothing without add_special_tokens"):
        harvest.run(tiny_request(add_special_tokens=False), tmp_path / "run", harvest.Engine(start_token="<s>"))
