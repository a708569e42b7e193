"""A body checked against its model, and what is wrong with it said in a sentence that a person can act on."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from harvest.errors import RequestError

Document = TypeVar("Document", bound=pydantic.BaseModel)


def check(model: type[Document], body: Mapping[str, Any], **context: Any) -> Document:
    """A document of the given model, or a RequestError with one sentence for each thing that is wrong (ten at most).

    `context` goes to the model's validators.
    """
    try:
        return model.model_validate(body, context=context)
    except pydantic.ValidationError as error:
        messages = [_explain(entry, list(model.model_fields)) for entry in error.errors(include_url=False)]
    shown = list(dict.fromkeys(messages))
    if len(shown) > 10:
        shown = [*shown[:10], f"and {len(shown) - 10} more"]
    raise RequestError("; ".join(shown))


def _explain(entry: Mapping[str, Any], known: Sequence[str]) -> str:
    """One sentence for one of pydantic's findings."""
    location = entry["loc"]
    if not location and "error" in entry.get("ctx", {}):
        return str(entry["ctx"]["error"])
    if not location:
        return f"{show(entry['input'])} was given, where an object with {', '.join(known)} was expected"
    name = str(location[0])
    if name == "prompts" and len(location) > 1:
        name = f"prompt {location[1]}"
    if entry["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        name = ".".join(map(str, location))
        return f"{name}: no such field{hint} (known: {', '.join(known)})"
    if entry["type"] == "missing":
        return f"{name}: is required and was not given"
    message = str(entry.get("ctx", {}).get("error", entry["msg"]))
    return f"{name}: {show(entry['input'])} was given: {message[0].lower() + message[1:]}"


def show(value: Any) -> str:
    """A value as a message shows it: on one line, and not for pages."""
    try:
        text = repr(value)
    except ValueError:
        # Python writes no number of more than 4,300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
