"""Which token a text begins with by a user's choice."""

from typing import Any

import pytest
from conftest import TEXTS, tiny_request

import harvest
from harvest.errors import RequestError
from harvest.model.tiny import tiny_tokenizer


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
