"""What pages need: the shared Spark session, and where they talk to one, an S3 server of their own."""

from __future__ import annotations

import pytest

from servers.plugin import _port
from servers.s3 import S3Server, start_ministack
from spark.conftest import spark

__all__ = ["s3_server", "spark"]


@pytest.fixture(scope="session")
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Not shared between processes: pages write to the same bucket."""
    worker = getattr(request.config, "workerinput", {}).get("workerid", "alone")
    return S3Server(_port(request.config, f"docs-{worker}", start_ministack))
