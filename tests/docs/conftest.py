"""An S3 server for the pages that use one."""

from __future__ import annotations

import pytest

from servers.plugin import _port
from servers.s3 import S3Server, start_ministack


@pytest.fixture(scope="session")
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Not shared between processes: pages write to the same bucket."""
    worker = getattr(request.config, "workerinput", {}).get("workerid", "alone")
    return S3Server(_port(request.config, f"docs-{worker}", start_ministack))
