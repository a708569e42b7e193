"""A Chromium for the session, and runs whose prompts mean no good."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_request

import harvest
from harvest.input.directions import tensor_object
from page.chromium import PROGRAMS, Chromium, program

# What would run, fetch, close an element or turn the text around where it is not escaped.
HOSTILE = [
    "<script>document.title = 'owned'</script> and on",
    '"><img src="https://example.invalid/x.png" onerror="document.title = \'owned\'">',
    "</style></section></main><style>body { display: none }</style>",
    "&lt;b&gt; &amp; <b>bold</b> \x00\x1b[31m \u202eback\u2066 \ufeff",
    "é" * 30 + "\r\n\ta line's end",
    "x" * 200,
    "<!-- a comment " * 9,
    "Hello there",
    "a",
    "The cat sat on the mat, and then it slept.",
]
CONTEXT_LENGTH = 128
N_DIRECTIONS = 3


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """A running browser; where none is installed the test is skipped, or fails where HARVEST_TEST_CHROMIUM=1 says that one must be."""
    if program() is None:
        reason = f"not installed: {' or '.join(PROGRAMS)} (Debian: apt-get install --no-install-recommends chromium-headless-shell)"
        if os.environ.get("HARVEST_TEST_CHROMIUM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with Chromium() as running:
        yield running


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all layers of tiny on HOSTILE, two of them cut to the context. Not to be written to."""
    # A name with no place to break a line at.
    folder = tmp_path_factory.mktemp("hostile") / ("run" * 40)
    harvest.run(tiny_request(HOSTILE, shard_size=4), folder, harvest.Engine(context_length=CONTEXT_LENGTH))
    return folder


@pytest.fixture(scope="session")
def projected_run(tmp_path_factory: pytest.TempPathFactory, hostile_run: Path) -> Path:
    """The same onto three directions. Not to be written to."""
    folder = tmp_path_factory.mktemp("projected") / "run"
    directions = np.random.default_rng(0).standard_normal((N_DIRECTIONS, harvest.open(hostile_run).width))
    request = tiny_request(HOSTILE, shard_size=4, project_onto=tensor_object(directions))
    harvest.run(request, folder, harvest.Engine(context_length=CONTEXT_LENGTH))
    return folder
