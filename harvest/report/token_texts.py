"""The text of each token of a run, by its model's tokenizer where that is on this machine."""

from collections.abc import Sequence
from typing import Any

from harvest.errors import ModelError
from harvest.model.describe import load_tokenizer
from harvest.reading.origin import read_model
from harvest.reading.run import Run
from harvest.settings import Engine

_IDS = "Tokens are shown by their ids"
_TRIED = 3
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Token ids to texts. note: why there are none, so that ids stand for them; None where there are."""

    def __init__(self, run: Run) -> None:
        """Find the tokenizer, offline. It is taken only where it reads the run's first prompts as the run did."""
        self.note: str | None = None
        self._tokenizer: Any = None
        try:
            tokenizer = read_model(run.manifest, Engine(), load_tokenizer)
        except ModelError as error:
            self.note = f"{_IDS}: the tokenizer of {run.manifest.model_id} is not on this machine ({error})."
            return
        if all(_reads_alike(tokenizer, run, prompt) for prompt in range(min(run.n_prompts, _TRIED))):
            self._tokenizer = tokenizer
        else:
            self.note = f"{_IDS}: the tokenizer of {run.manifest.model_id} on this machine gives other ids than the run has."

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each of a row of tokens adds; an empty one for a token that is a part of a character, but for the last part."""
        if self._tokenizer is None:
            return [f"{number} " for number in ids]
        pieces: list[str] = []
        begun = 0
        for place in range(len(ids)):
            text = self._decode(ids[begun : place + 1])
            if text.endswith(_INCOMPLETE) and place + 1 < len(ids) and place - begun < 4:
                pieces.append("")
                continue
            pieces.append(text)
            begun = place + 1
        return pieces

    def _decode(self, ids: Sequence[int]) -> str:
        # Of a token alone a tokenizer of the SentencePiece kind drops the space in front; after another it does not.
        alone: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        word = self._tokenizer.convert_ids_to_tokens(int(ids[0]))
        return f" {alone}" if isinstance(word, str) and word.startswith("▁") and not alone.startswith(" ") else alone


def _reads_alike(tokenizer: Any, run: Run, prompt: int) -> bool:
    """Whether a prompt's text has the stored ids, be there a start token in front or not, or a cut at the end."""
    stored = run.token_ids(prompt).tolist()
    own = tokenizer(run.text(prompt), add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return any(rest == own[: len(rest)] and (len(rest) == len(own) or len(rest) > 1) for rest in (stored, stored[1:]))
