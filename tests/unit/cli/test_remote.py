"""The command line on a bucket: credentials from the environment or a file, and never in the output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers.s3 import SECRET, S3Server
from unit.cli.running import Flagstone

pytestmark = pytest.mark.slow

MAIN = [sys.executable, "-c", "from flagstone.cli.main import main; main()"]


@pytest.fixture
def variables(ministack: S3Server) -> dict[str, str]:
    """The variables that configure SlateDB's own tools."""
    return {
        "CLOUD_PROVIDER": "aws",
        "AWS_BUCKET": ministack.bucket,
        "AWS_ENDPOINT": ministack.endpoint,
        "AWS_ACCESS_KEY_ID": ministack.access_key_id,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": ministack.region,
        "AWS_ALLOW_HTTP": "true",
    }


@pytest.fixture
def bucket(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Flagstone:
    """The command line on a database in a bucket, configured by the environment."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Flagstone(Path("cli/shop"))


def test_commands_work_on_a_bucket(ministack: S3Server, bucket: Flagstone) -> None:
    bucket.ok("put", "a", "1", "--create")
    bucket.ok("put", "b", "2")
    checkpoint = bucket.json("create-checkpoint")["id"]
    assert bucket.ok("scan", path=f"s3://{ministack.bucket}/cli/shop") == "a\t1\nb\t2\n"
    bucket.ok("compact", "--full")
    bucket.ok("clone", "cli/copy", "--checkpoint", checkpoint)
    assert bucket.ok("scan", "--count", path="cli/copy") == "2 entries, 4 bytes\n"
    stats = bucket.json("stats")
    assert stats["store"] == ministack.url
    assert stats["tables"]["live"]["count"] == 1
    assert bucket.json("verify")["ok"] is True
    bucket.ok("delete-db", "--confirm", path="cli/copy")
    assert bucket.json("run-garbage-collection", "-m", "0s")["result"] == "success"
    assert bucket.ok("scan") == "a\t1\nb\t2\n"


def test_a_missing_database_in_a_bucket_is_a_bad_request(bucket: Flagstone) -> None:
    assert "does not exist" in bucket.refused("stats", path="s3://no-such-bucket-here/shop")
    assert "no database at 'cli/nothing'" in bucket.refused("get", "k", path="cli/nothing")


def test_credentials_from_an_env_file_are_not_printed(variables: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "bucket.env"
    file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CLOUD_"))}
    done = subprocess.run(
        [*MAIN, "--env-file", str(file), "--path", "cli/filed", "put", "a", "1", "--create"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean,
    )
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
