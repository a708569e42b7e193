"""How the token ids of two runs of the same prompts differ: a doubled or missing start token first of all, which shifts every position."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from harvest.errors import NotARunError
from harvest.reading.run import Run


@dataclass(frozen=True)
class IdDifference:
    """One way in which token ids differ, by name and in words; prompt, position: where it shows first; n_prompts: that it is in."""

    kind: Literal["start token twice", "start token missing", "ids", "length"]
    what: str
    prompt: int
    position: int
    n_prompts: int


def compare_ids(a: Run, b: Run) -> tuple[list[int], list[IdDifference]]:
    """The tokens of each prompt that is the same in both, 0 for another; and the ways in which ids differ."""
    starts = {run.manifest.local["start_token"]["id"] for run in (a, b) if run.manifest.local and run.manifest.local.get("start_token")}
    lengths: list[int] = []
    found: dict[str, IdDifference] = {}
    for number, (ids_a, ids_b) in enumerate(zip(_token_ids(a), _token_ids(b), strict=True)):
        lengths.append(len(ids_a) if ids_a == ids_b else 0)
        if ids_a != ids_b:
            new, side = _difference(number, ids_a, ids_b, starts)
            first = found.setdefault(f"{new.kind} {side}", new)
            found[f"{new.kind} {side}"] = replace(first, n_prompts=first.n_prompts + 1)
    return lengths, list(found.values())


def _token_ids(run: Run) -> Iterator[list[int]]:
    """The ids of each prompt. Raises NotARunError where the shards do not hold each prompt once, in order."""
    number = 0
    for index in range(run.n_shards):
        with run.shard(index) as shard:
            if shard.prompts != list(range(number, number + len(shard.prompts))):
                raise NotARunError(f"{shard.path}: holds prompts {shard.prompts[:5]}, and prompt {number} was to come first")
            number += len(shard.prompts)
            for prompt in shard.prompts:
                yield shard[f"tokens_{prompt}"].tolist()
    if number != run.n_prompts:
        raise NotARunError(f"{run.path}: its shards hold {number} of its {run.n_prompts} prompts")


def _difference(prompt: int, ids_a: list[int], ids_b: list[int], starts: set[int]) -> tuple[IdDifference, str]:
    """The difference of one prompt, counted for none yet, and which run has the token that the other lacks.

    starts: the start tokens that the runs name; of one that the API made none is known.
    """
    for one, other, ids_one, ids_other in (("A", "B", ids_a, ids_b), ("B", "A", ids_b, ids_a)):
        # The other's ids are one's with a token more in front; a cut to the context may have taken as many from the end.
        n_shared = min(len(ids_one), len(ids_other) - 1)
        start = ids_other[0]
        if n_shared and ids_other[1 : n_shared + 1] == ids_one[:n_shared] and (not starts or start in starts):
            if ids_one[0] == start:
                return IdDifference("start token twice", f"{other} has the start token ({start}) twice, {one} once", prompt, 1, 0), other
            return IdDifference("start token missing", f"{one} lacks the start token ({start}) that {other} has", prompt, 0, 0), other
    pairs = zip(ids_a, ids_b, strict=False)
    position = next((place for place, (id_a, id_b) in enumerate(pairs) if id_a != id_b), None)
    if position is not None:
        return IdDifference("ids", f"the token is {ids_a[position]} in A and {ids_b[position]} in B", prompt, position, 0), ""
    what = f"A has {len(ids_a)} tokens and B {len(ids_b)}, the same up to here"
    return IdDifference("length", what, prompt, min(len(ids_a), len(ids_b)), 0), "A" if len(ids_a) > len(ids_b) else "B"
