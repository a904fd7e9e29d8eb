"""PostgreSQL in a folder, from the pgserver wheel, reached through a Unix socket.

Run as a script it is the server: it writes where it can be reached, waits to be told to stop, and stops
the database. Never imported by pytest for that part, because pgserver registers exit hooks of its own.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path

ADDRESS = "address"


def start_postgres() -> tuple[int, dict[str, object]]:
    from servers.shared import Launched, ServerMissingError

    if importlib.util.find_spec("pgserver") is None:
        raise ServerMissingError("PostgreSQL is not installed: pip install pgserver")
    launched = Launched("postgres", [sys.executable, str(Path(__file__).resolve()), "{folder}"])
    address = launched.folder / ADDRESS
    launched.wait_until(address.exists, within_s=90)
    return launched.pid, {"url": address.read_text().replace("postgresql://", "postgresql+psycopg://", 1)}


def serve(folder: Path) -> None:
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
