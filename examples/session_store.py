"""A session store on FastAPI: sessions expire by TTL, and a log-in is a transaction.

    python examples/session_store.py                    # a walk through it, in a temporary folder, without a server
    pip install uvicorn
    SESSIONS=s3://bucket/sessions uvicorn session_store:app --app-dir examples

There is no other server: the sessions are on the object store. A log-in returns when it is durable there. One
process writes. A second one that starts takes over, and requests to the first one fail from then on.

There are two kinds of rows, both with a time to live. Keys are tuples, so two keys cannot be confused:
    ("session", token)       {"user": …, "since": …}
    ("user", name, token)    start time: to count and end the sessions of a user
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import flagstone
from flagstone import keys
from flagstone.aio import AsyncDb, AsyncTransaction

MAX_SESSIONS = 3
T = TypeVar("T")


class LogIn(BaseModel):
    user: str


def create_app(url: str | Path, *, ttl: timedelta = timedelta(minutes=30)) -> FastAPI:
    """The application on the database at `url`, which is open while the application runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with flagstone.aio.open(url) as db:
            app.state.db = db
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/sessions", status_code=201)
    async def log_in(request: LogIn) -> dict[str, str]:
        token, since = secrets.token_urlsafe(16), time.time_ns()

        async def begin(tx: AsyncTransaction) -> dict[str, str]:
            # Serializable: if two log-ins count the sessions at once, one of them runs again and counts the other.
            mine = [(int(at), key) async for key, at in tx.scan(prefix=keys.encode("user", request.user))]
            for _, oldest in sorted(mine)[: max(0, len(mine) + 1 - MAX_SESSIONS)]:
                await _end(tx, oldest)
            value = json.dumps({"user": request.user, "since": since}).encode()
            await tx.put(keys.encode("session", token), value, ttl=ttl)
            await tx.put(keys.encode("user", request.user, token), b"%d" % since, ttl=ttl)
            return {"token": token}

        return await _transact(app.state.db, begin)

    @app.get("/sessions/{token}")
    async def look(token: str) -> dict[str, Any]:
        """The session. A request in the second half of the time to live renews it."""
        key = keys.encode("session", token)

        async def renew(tx: AsyncTransaction) -> dict[str, Any]:
            row = await tx.get_row(key)
            if row is None:
                raise HTTPException(404, "no such session, or it has expired")
            session: dict[str, Any] = json.loads(row.value)
            if row.expires_ms is None or row.expires_ms - time.time() * 1000 < ttl.total_seconds() * 500:
                await tx.put(key, row.value, ttl=ttl)
                await tx.put(keys.encode("user", session["user"], token), b"%d" % session["since"], ttl=ttl)
            return session

        return await _transact(app.state.db, renew)

    @app.delete("/users/{user}/sessions")
    async def log_out_everywhere(user: str) -> dict[str, int]:
        async def end(tx: AsyncTransaction) -> dict[str, int]:
            mine = [key async for key, _ in tx.scan(prefix=keys.encode("user", user))]
            for key in mine:
                await _end(tx, key)
            return {"ended": len(mine)}

        return await _transact(app.state.db, end)

    return app


async def _transact(db: AsyncDb, work: Callable[[AsyncTransaction], Awaitable[T]]) -> T:
    """Run `work` in a transaction, again after a conflict, and return when it is durable."""
    while True:
        try:
            async with db.transaction("serializable") as tx:
                result = await work(tx)
                await tx.commit(await_durable=True)
                return result
        except flagstone.TransactionConflict:
            continue


async def _end(tx: AsyncTransaction, key: bytes) -> None:
    """Delete a session, given the key of its user's row."""
    await tx.delete(key)
    await tx.delete(keys.encode("session", keys.decode(key)[-1]))


app = create_app(os.environ.get("SESSIONS", "sessions-data/sessions"))


async def walk(folder: Path) -> None:
    """Call the application as a client does."""
    import httpx  # noqa: PLC0415 - only used here

    app = create_app(folder / "sessions", ttl=timedelta(seconds=4))
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://sessions") as client,
    ):
        # Ten log-ins of one user at once: three sessions are left, in any order.
        answers = await asyncio.gather(*(client.post("/sessions", json={"user": "ada"}) for _ in range(10)))
        tokens = [answer.json()["token"] for answer in answers]
        alive = [token for token in tokens if (await client.get(f"/sessions/{token}")).status_code == 200]
        print(f"{len(tokens)} log-ins at once, {len(alive)} sessions")
        assert len(alive) == MAX_SESSIONS

        await asyncio.sleep(2.4)  # past half of the time to live: this request renews the session
        assert (await client.get(f"/sessions/{alive[0]}")).json()["user"] == "ada"
        await asyncio.sleep(2.4)
        left = [token for token in alive if (await client.get(f"/sessions/{token}")).status_code == 200]
        print(f"4.8 s later, with a time to live of 4 s: {len(left)} session, the one that was used")
        assert left == [alive[0]]

        ended = (await client.delete("/users/ada/sessions")).json()["ended"]
        print(f"log-out everywhere ended {ended}")
        assert (await client.get(f"/sessions/{alive[0]}")).status_code == 404


def main(folder: Path) -> None:
    asyncio.run(walk(folder))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
