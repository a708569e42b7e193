"""What is written down of one published shard."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Fingerprint = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """What is known of one published shard.

    fingerprint: what the shard's bytes depend on; a shard of another request is never taken for this one's.
    prompts: the first prompt, and one past the last.
    bytes, sha256, modified_ns: of the file.
    nonfinite: tokens with a value that is not finite, by layer, where there are any.
    batch_tokens: the budget that its batches were cut to for lack of memory, where they were.
    e_tag: an object store's word for the very bytes that it holds, where they were taken to one.
    """

    shard: int
    fingerprint: Fingerprint
    prompts: tuple[int, int]
    tokens: int
    bytes: int
    sha256: str
    modified_ns: int
    published_at: str
    nonfinite: tuple[int, ...] = ()
    batch_tokens: int | None = None
    e_tag: str | None = None

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """The record in a file, or None where there is none that can be read."""
        try:
            return cls.parse(path.read_text())
        except (OSError, ValueError):
            return None

    @classmethod
    def parse(cls, text: str) -> "Record | None":
        """The record in the text of its file, or None where that is none."""
        try:
            fields = json.loads(text)
            return cls(**fields | {name: tuple(fields[name]) for name in ("prompts", "nonfinite")})
        except (ValueError, TypeError, KeyError):
            return None

    def to_json(self) -> str:
        """The text of its file."""
        fields = asdict(self)
        if self.e_tag is None:
            del fields["e_tag"]
        return json.dumps(fields, indent=2)
