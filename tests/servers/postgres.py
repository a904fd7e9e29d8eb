"""PostgreSQL in a folder, from the pgserver wheel, with a Unix socket.

Run as a script, this module is the server: it writes its address, waits for a signal, and stops
the database. Only the script imports pgserver, because that registers its own exit hooks.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

ADDRESS = "address"
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def start_postgres() -> tuple[int, dict[str, object]]:
    from servers.shared import Launched, ServerMissingError

    if importlib.util.find_spec("pgserver") is None:
        raise ServerMissingError("PostgreSQL is not installed: pip install pgserver")
    launched = Launched("postgres", [sys.executable, str(Path(__file__).resolve()), "{folder}"])
    address = launched.folder / ADDRESS
    launched.wait_until(address.exists, within_s=90)
    return launched.pid, {"url": address.read_text().replace("postgresql://", "postgresql+psycopg://", 1)}


def system_path(given: str | None) -> str:
    """The given search path, followed by the system's folders.

    PostgreSQL refuses to run as root, so pgserver creates a user for it with `useradd`. That program is in
    `/usr/sbin`, which an empty environment and many ordinary ones do not search.
    """
    folders = [folder for folder in (given or "").split(os.pathsep) if folder]
    return os.pathsep.join([*folders, *(folder for folder in SYSTEM_FOLDERS if folder not in folders)])


def serve(folder: Path) -> None:
    os.environ["PATH"] = system_path(os.environ.get("PATH"))
    import pgserver

    cluster = folder / "data"
    cluster.mkdir()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    server = pgserver.get_server(cluster, cleanup_mode="stop")
    try:
        unfinished = folder / f"{ADDRESS}.new"
        unfinished.write_text(server.get_uri())
        unfinished.rename(folder / ADDRESS)
        signal.sigwait([signal.SIGTERM])
    finally:
        server.cleanup()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
