"""transformers' `from_pretrained`, with what a source allows; and its many errors in a sentence each, with the command that mends it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harvest.errors import HarvestError, ModelError
from harvest.model.sources import Source

# How long the Hub may take to answer at all.
_REACH_S = 10
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")


def from_pretrained(auto_class: Any, source: Source, **kwargs: Any) -> Any:
    """What a class of transformers makes of a source's files; code and pickle only where the source allows them. Raises ModelError."""
    # Without a word of it transformers would ask on the terminal whether to run the code.
    kwargs["trust_remote_code"] = source.trust_remote_code
    if source.gguf_file is not None:
        kwargs["gguf_file"] = source.gguf_file
    if source.revision is not None:
        kwargs["revision"] = source.revision
    what = {"AutoConfig": "config", "AutoTokenizer": "tokenizer"}.get(auto_class.__name__, "weights")
    if what == "weights" and source.gguf_file is None and not source.allow_pickle:
        kwargs["use_safetensors"] = True
        # Else transformers takes weights that a bot of the Hub has converted, from a branch that nobody named.
        os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    try:
        return auto_class.from_pretrained(source.location, **kwargs)
    except HarvestError:
        raise
    except Exception as error:
        # Files that are not what they should be make transformers stumble in any of many ways.
        raise _failed(error, what, source) from error


def see_whether_reachable(note: Callable[[str], None]) -> None:
    """Ask the Hub once; where no answer comes, work without a network from here on: each file would be asked for many times over."""
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_REACH_S)
    except Exception:
        # Of no common class: huggingface_hub has changed the library that it asks with.
        constants.HF_HUB_OFFLINE = True
        note("warning: the Hub cannot be reached from here; what its cache on this machine holds is used")


def own_class(source: Source, config: Any) -> Any:
    """The class of a causal language model in a source's own code, where it may run; None where transformers' own is taken."""
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference is None or not source.trust_remote_code:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        return get_class_from_dynamic_module(reference, source.location, revision=source.revision)
    except Exception as error:
        raise _failed(error, "code", source) from error


def check_weight_files(source: Source) -> None:
    """Refuse a folder whose weights are pickle files only, where the source does not allow them. Raises ModelError."""
    folder = Path(source.location)
    if source.gguf_file is not None or source.allow_pickle or not folder.is_dir():
        return
    if not any((folder / name).is_file() for name in _SAFETENSORS) and (pickles := sorted(folder.glob("pytorch_model*.bin"))):
        raise ModelError(f"model: {_pickle(source.name, pickles[0].name)}")


def explained(error: BaseException, what: str, name: str, repository: str | None, revision: str | None) -> str:
    """Why something of a model cannot be loaded, and the command that mends it.

    what: config, tokenizer, code, weights or adapter. repository: the Hugging Face id, or None for a local folder.
    """
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    words = f"the {what} of {name} cannot be loaded"
    if "trust_remote_code" in str(error):
        return (
            f"{name} comes with code of its own, which would run on this machine; read it among its files, and give --trust-remote-code "
            "where you trust it"
        )
    if "out of memory" in reason.lower():
        return f"{words}: {reason}; --device-map auto spreads a model over several cards, host memory and disk"
    if repository is None:
        return f"{words}: {reason}"
    if what == "weights" and "safetensors" in reason and "does not appear to have a file" in reason:
        return _pickle(name, "pytorch_model.bin")
    kinds = {type(cause).__name__ for cause in causes(error)}
    command = f"hf download {repository}" + (f" --revision {revision}" if revision else "")
    if "GatedRepoError" in kinds:
        return f"{name} is gated: ask for access on the page of {repository} on the Hub, then log in on this machine with `hf auth login`"
    if "RevisionNotFoundError" in kinds:
        return f"{repository} has no revision {revision or 'main'} on the Hub; give a branch, a tag or a commit of it"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"the Hub knows no {repository}, or it is private and this machine may not see it; check the id, log in with "
            "`hf auth login`, or name a local folder"
        )
    if _is_offline() or kinds & {"ConnectError", "ConnectTimeout", "ReadTimeout", "ProxyError", "LocalEntryNotFoundError"}:
        asked = next((name for name in _OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)
        why = f"{asked} is set" if asked else "the Hub cannot be reached from here"
        return (
            f"{words}: {why}, and the Hub's cache on this machine does not hold it; `{command}` where there is a network puts it there, "
            "or name a local folder"
        )
    return f"{words} from {repository}: {reason}"


def _failed(error: BaseException, what: str, source: Source) -> ModelError:
    place = None if source.is_local else source.location
    return ModelError(f"model: {explained(error, what, source.name, place, source.revision)}")


def _pickle(name: str, file: str) -> str:
    return (
        f"the weights of {name} are pickle files ({file}), which can run code when they are read; give --allow-pickle where you trust "
        "them, or save them as safetensors"
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from or during."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_offline() -> bool:
    from huggingface_hub.constants import is_offline_mode

    return bool(is_offline_mode())
