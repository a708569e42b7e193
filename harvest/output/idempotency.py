"""Idempotency keys: the same key and the same request below one root folder mean the same run, for 24 hours."""

import contextlib
import hashlib
import json
from datetime import datetime, timedelta
from pathlib import Path
from uuid import uuid4

from harvest.contract import utc_now
from harvest.errors import RequestError
from harvest.output import durable
from harvest.request import HarvestRequest

MAX_KEY_LENGTH = 255
KEPT = timedelta(hours=24)


def folder_for_key(root: Path, key: str, request: HarvestRequest) -> Path:
    """The run folder of a key below `root`: the first run's where the key was used within 24 hours, else a new one, written down.

    Raises RequestError for a key that is empty or longer than 255 characters, and for one that was used with another request.
    """
    if not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise RequestError(f"idempotency_key: a key of {len(key)} characters was given; a key has 1 to {MAX_KEY_LENGTH}")
    digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
    path = root / ".idempotency" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    durable.make_folder(path.parent)
    entry = {"key": key, "request": digest, "folder": f"run-{uuid4()}", "created_at": utc_now().isoformat()}
    if not durable.write_new(path, json.dumps(entry).encode()):
        with contextlib.suppress(OSError, ValueError, KeyError):
            known = json.loads(path.read_bytes())
            if utc_now() - datetime.fromisoformat(known["created_at"]) < KEPT:
                if known["request"] != digest:
                    raise RequestError(
                        f"idempotency_key: {key!r} was used with another request on {known['created_at']} ({root / known['folder']}); "
                        "take another key, or repeat that request"
                    )
                return root / str(known["folder"])
        durable.write_whole(path, json.dumps(entry).encode())
    return root / entry["folder"]
