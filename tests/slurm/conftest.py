"""A SLURM for the whole session, started by the first test that asks for it."""

import os
from collections.abc import Iterator

import pytest

from slurm.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running SLURM; where none can be started the test is skipped, or fails where HARVEST_TEST_SLURM=1 says that there must be one."""
    if reason := why_not():
        if os.environ.get("HARVEST_TEST_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with Cluster() as running:
        yield running
