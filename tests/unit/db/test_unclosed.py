"""Handles that are never closed: their rows are flushed, their threads end, and a warning names them."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import flagstone
from flagstone.config import Settings
from flagstone.db import exit as unclosed
from flagstone.db.aio.database import AsyncDb
from flagstone.db.aio.reader import AsyncDbReader
from flagstone.runtime.pool import IoPool
from flagstone.store.memory import MemoryStore
from kit.databases import eventually
from kit.faults import Struck, Tracer
from servers.s3 import S3Server

PATIENCE_S = 20.0
LAZY = Settings(flush_interval=None)
"""Nothing is durable before a flush."""


def rows_of(store: MemoryStore) -> dict[bytes, bytes]:
    with flagstone.open_reader("db", store=store, mode="latest") as reader:
        return dict(reader.scan())


def service_threads() -> set[threading.Thread]:
    """Those of open handles; the shared pool for store calls stays."""
    return {
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("flagstone-") and not thread.name.startswith("flagstone-io")
    }


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    gc.collect()  # what other tests left behind
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        yield recorded


def messages(recorded: list[warnings.WarningMessage], category: type[Warning]) -> list[str]:
    return [str(each.message) for each in recorded if each.category is category]


# -- collected ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_collected_database_is_flushed_and_its_threads_end(caught: list[warnings.WarningMessage]) -> None:
    store, before = MemoryStore(), service_threads()
    db = flagstone.open("db", store=store, settings=LAZY)
    for number in range(100):
        db.put(b"%03d" % number, b"v")
    assert not rows_of(store)
    del db
    gc.collect()
    assert messages(caught, ResourceWarning) == [
        "unclosed database 'db' in memory://; call close(), or use it as a context manager"
    ]
    eventually(lambda: len(rows_of(store)) == 100)
    eventually(lambda: service_threads() <= before)
    assert not messages(caught, RuntimeWarning)


@pytest.mark.slow
def test_a_closed_database_is_collected_without_a_warning(caught: list[warnings.WarningMessage]) -> None:
    before = service_threads()
    with flagstone.open("db", store=MemoryStore()) as db:
        db.put(b"k", b"v")
    del db
    gc.collect()
    assert not caught
    eventually(lambda: service_threads() <= before)


@pytest.mark.slow
@pytest.mark.parametrize("face", [flagstone.DbReader, AsyncDbReader])
def test_a_collected_reader_releases_its_checkpoint(face: Any, caught: list[warnings.WarningMessage]) -> None:
    store, before = MemoryStore(), service_threads()
    with flagstone.open("db", store=store) as db:
        db.put(b"k", b"v")
    admin = flagstone.Admin("db", store=store)
    reader: Any = flagstone.open_reader("db", store=store)
    reader = AsyncDbReader(reader) if face is AsyncDbReader else reader
    assert len(admin.checkpoints()) == 1
    del reader
    gc.collect()
    (warning,) = messages(caught, ResourceWarning)
    assert "unclosed reader of database 'db'" in warning
    eventually(lambda: not admin.checkpoints())
    eventually(lambda: service_threads() <= before)


@pytest.mark.slow
def test_a_collected_async_database_is_flushed(caught: list[warnings.WarningMessage]) -> None:
    store = MemoryStore()
    face = AsyncDb(flagstone.open("db", store=store, settings=LAZY))
    face._reads.put(b"k", b"v")
    del face
    gc.collect()
    assert len(messages(caught, ResourceWarning)) == 1
    eventually(lambda: rows_of(store) == {b"k": b"v"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "taken",
    [
        lambda db: db.snapshot(),
        lambda db: db.transaction(),
        lambda db: db.scan(),
        lambda db: AsyncDb(db).snapshot(),
        lambda db: db.scan_arrow(),
    ],
    ids=["snapshot", "transaction", "scan", "async snapshot", "scan_arrow"],
)
def test_a_database_stays_open_while_something_reads_through_it(
    taken: Callable[[flagstone.Db], Any], caught: list[warnings.WarningMessage]
) -> None:
    db = flagstone.open("db", store=MemoryStore())
    db.put(b"k", b"v")
    engine, reading = db._engine, taken(db)
    del db
    gc.collect()
    assert engine.state.now.closed is None
    assert not caught
    del reading
    gc.collect()
    assert len(messages(caught, ResourceWarning)) == 1
    eventually(lambda: engine.state.now.closed is not None)


@pytest.mark.slow
def test_a_write_handle_outlives_its_database(caught: list[warnings.WarningMessage]) -> None:
    store = MemoryStore()
    handle = flagstone.open("db", store=store, settings=LAZY).put(b"k", b"v")
    gc.collect()
    handle.wait(PATIENCE_S)
    assert rows_of(store) == {b"k": b"v"}


def test_rows_are_flushed_when_the_warning_is_raised_as_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    store = MemoryStore()
    db = flagstone.open("db", store=store, settings=LAZY)
    db.put(b"k", b"v")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del db
        gc.collect()
    assert [type(each.exc_value) for each in raised] == [ResourceWarning]
    raised.clear()
    eventually(lambda: rows_of(store) == {b"k": b"v"})


@pytest.mark.slow
def test_a_collected_database_that_cannot_be_flushed_reports_the_number_of_lost_rows(
    caught: list[warnings.WarningMessage],
) -> None:
    store = MemoryStore()
    old = flagstone.open("db", store=store, settings=LAZY)
    with old.batch() as batch:
        for number in range(7):
            batch.put(b"%d" % number, b"v")
    old.put(b"0", b"again")
    new = flagstone.open("db", store=store)  # the former writer is fenced
    del old, batch
    gc.collect()
    (lost,) = eventually(lambda: messages(caught, RuntimeWarning))
    assert lost.startswith("8 rows of the unclosed database 'db' in memory:// could not be written")
    new.close()


@pytest.mark.slow
def test_a_finalizer_that_runs_inside_the_registry_does_not_deadlock(
    caught: list[warnings.WarningMessage],
) -> None:
    """The garbage collector may run while this thread holds the lock of the registry."""
    db = flagstone.open("db", store=MemoryStore())
    engine, done = db._engine, threading.Event()

    def collect_inside(last: list[Any]) -> None:
        with unclosed._lock:
            last.clear()
            gc.collect()
        done.set()

    owner = [db]
    del db
    threading.Thread(target=collect_inside, args=(owner,), daemon=True).start()
    assert done.wait(PATIENCE_S), "the finalizer waits for a lock"
    eventually(lambda: engine.state.now.closed is not None)


@pytest.mark.slow
def test_a_store_that_does_not_answer_does_not_delay_the_closing_of_other_databases(
    caught: list[warnings.WarningMessage],
) -> None:
    gate = threading.Event()

    class Stuck(MemoryStore):
        def put_if_absent(self, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name != threading.main_thread().name:
                gate.wait(PATIENCE_S)
            return super().put_if_absent(*args, **kwargs)

    store = MemoryStore()
    stuck = flagstone.open("db", store=Stuck(), settings=LAZY)
    well = flagstone.open("db", store=store, settings=LAZY)
    stuck.put(b"k", b"v")
    well.put(b"k", b"v")
    del stuck
    gc.collect()
    del well
    gc.collect()
    eventually(lambda: rows_of(store) == {b"k": b"v"})
    gate.set()


# -- at exit -----------------------------------------------------------------------------------------------

NUMBER_OF_ROWS = 1000
WRITE = f"[db.put(b'%d' % number, b'v') for number in range({NUMBER_OF_ROWS})]"


def run(code: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
    )


def count(folder: Path, name: str = "db") -> int:
    with flagstone.open_reader(folder / name, mode="latest") as reader:
        return sum(1 for _ in reader.scan())


ENDINGS = {
    "normal end": f"""
        import flagstone
        db = flagstone.open("db")
        {WRITE}
        """,
    "sys.exit": f"""
        import flagstone, sys
        db = flagstone.open("db")
        {WRITE}
        sys.exit(0)
        """,
    "exception": f"""
        import flagstone
        db = flagstone.open("db")
        {WRITE}
        raise ValueError("boom")
        """,
    "Ctrl-C": f"""
        import flagstone, os, signal, time
        db = flagstone.open("db")
        {WRITE}
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        """,
    "local of a function that raises": f"""
        import flagstone
        def main():
            db = flagstone.open("db")
            {WRITE}
            raise ValueError("boom")
        main()
        """,
    "asyncio": f"""
        import asyncio, flagstone.aio
        async def main():
            global db
            db = await flagstone.aio.open("db")
            for number in range({NUMBER_OF_ROWS}):
                await db.put(b"%d" % number, b"v")
        asyncio.run(main())
        """,
    "asyncio, local": f"""
        import asyncio, flagstone.aio
        async def main():
            db = await flagstone.aio.open("db")
            for number in range({NUMBER_OF_ROWS}):
                await db.put(b"%d" % number, b"v")
        asyncio.run(main())
        """,
    "without a WAL": f"""
        import flagstone
        db = flagstone.open("db", settings=flagstone.Settings(wal_enabled=False))
        {WRITE}
        """,
    "no timer": f"""
        import flagstone
        db = flagstone.open("db", settings=flagstone.Settings(flush_interval=None))
        {WRITE}
        """,
    "a thread that is no daemon writes on": f"""
        import flagstone, threading, time
        db = flagstone.open("db")
        def work():
            time.sleep(0.2)
            {WRITE}
        threading.Thread(target=work).start()
        """,
    "interpreter that starts no thread while it exits": f"""
        # From Python 3.12 on no thread can be started by exit hooks; the settings need threads that were not used yet.
        import atexit, flagstone, threading
        db = flagstone.open("db", settings=flagstone.Settings(wal_enabled=False, compactor_options=None))
        {WRITE}
        def refuse(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        atexit.register(lambda: setattr(threading.Thread, "start", refuse))
        """,
    "worker of multiprocessing, forked": f"""
        import multiprocessing, flagstone
        def work():
            global db
            db = flagstone.open("db")
            {WRITE}
        if __name__ == "__main__":
            process = multiprocessing.get_context("fork").Process(target=work)
            process.start()
            process.join()
        """,
    "worker of multiprocessing that raises": f"""
        import multiprocessing, flagstone
        def work():
            global db
            db = flagstone.open("db")
            {WRITE}
            raise ValueError("boom")
        if __name__ == "__main__":
            process = multiprocessing.get_context("fork").Process(target=work)
            process.start()
            process.join()
        """,
    "interactive": f"""
        import subprocess, sys
        code = '''import flagstone
        db = flagstone.open("db")
        written = {WRITE}
        '''
        code = "\\n".join(line.strip() for line in code.splitlines()) + "\\n"
        subprocess.run([sys.executable, "-X", "dev", "-i", "-q"], input=code, text=True, check=True)
        """,
}


QUICK = {"normal end", "exception", "asyncio, local", "worker of multiprocessing, forked"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ENDINGS]
)
def test_rows_are_flushed_at_exit(name: str, tmp_path: Path) -> None:
    done = run(ENDINGS[name], tmp_path, "-X", "dev")
    assert count(tmp_path) == NUMBER_OF_ROWS, done.stderr
    assert "ResourceWarning: unclosed database 'db' in file://" in done.stderr
    assert "lost" not in done.stderr


@pytest.mark.slow
def test_several_databases_are_flushed_at_exit_and_an_unreachable_store_delays_it_for_a_bounded_time(
    tmp_path: Path,
) -> None:
    """The store out of reach is opened first: waiting for it must not cost the others their rows."""
    begun = time.monotonic()
    done = run(
        f"""
        import flagstone, flagstone.db.exit, threading
        from flagstone.store.memory import MemoryStore
        flagstone.db.exit.FLUSH_SECONDS = 1.0
        class Unreachable(MemoryStore):
            dead = False
            def put_if_absent(self, *args, **kwargs):
                if self.dead:
                    threading.Event().wait()
                return super().put_if_absent(*args, **kwargs)
        store = Unreachable()
        db = lost = flagstone.open("gone", store=store)
        store.dead = True
        {WRITE}
        db = one = flagstone.open("one")
        {WRITE}
        reader = flagstone.open_reader("one")
        db = other = flagstone.open("other")
        {WRITE}
        """,
        tmp_path,
    )
    assert count(tmp_path, "one") == count(tmp_path, "other") == NUMBER_OF_ROWS
    assert (
        f"RuntimeWarning: {NUMBER_OF_ROWS} rows of the unclosed database 'gone' in memory://" in done.stderr
    )
    assert "not durable after" in done.stderr
    assert done.stderr.count("Warning") == 1, done.stderr
    assert time.monotonic() - begun < 15
    assert not flagstone.Admin(tmp_path / "one").checkpoints(), "the reader's checkpoint was not released"


@pytest.mark.slow
def test_an_interrupted_close_is_finished_at_exit(tmp_path: Path) -> None:
    done = run(
        f"""
        import atexit, os, signal, threading, time
        atexit.register(lambda: print(db._engine.state.durable_seq, db.closed))  # runs after those of flagstone
        import flagstone
        from flagstone.store.memory import MemoryStore
        class Slow(MemoryStore):
            delay_s = 0.0
            def put_if_absent(self, *args, **kwargs):
                time.sleep(self.delay_s)
                return super().put_if_absent(*args, **kwargs)
        store = Slow()
        db = flagstone.open("db", store=store, settings=flagstone.Settings(flush_interval=None))
        {WRITE}
        store.delay_s = 0.5
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        db.close()
        """,
        tmp_path,
    )
    assert done.stdout.split() == [str(NUMBER_OF_ROWS), "True"], done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert "lost" not in done.stderr


@pytest.mark.slow
def test_a_forked_child_does_not_flush_the_databases_of_its_parent(tmp_path: Path) -> None:
    done = run(
        f"""
        import flagstone, os, sys, warnings
        warnings.simplefilter("always")
        db = flagstone.open("db", settings=flagstone.Settings(flush_interval=None))
        {WRITE}
        child = os.fork()
        if child == 0:
            sys.exit(0)  # runs the exit hooks, in the child
        os.waitpid(child, 0)
        with flagstone.open_reader("db", mode="latest") as reader:
            print(sum(1 for _ in reader.scan()))
        db.close()
        """,
        tmp_path,
    )
    assert done.stdout.strip() == "0", done.stderr
    assert not done.stderr
    assert count(tmp_path) == NUMBER_OF_ROWS


@pytest.mark.slow
def test_a_forked_child_flushes_the_databases_that_it_opened(tmp_path: Path) -> None:
    done = run(
        f"""
        import flagstone, os, sys
        parents = flagstone.open("parent")
        child = os.fork()
        if child == 0:
            db = flagstone.open("db")
            {WRITE}
            sys.exit(0)
        os.waitpid(child, 0)
        parents.close()
        """,
        tmp_path,
    )
    assert count(tmp_path) == NUMBER_OF_ROWS, done.stderr


# -- what it stands on ---------------------------------------------------------------------------------------


def test_a_pool_runs_calls_in_the_callers_thread_when_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool = IoPool(max_workers=3)
    assert pool.submit(threading.current_thread).result(0) is threading.current_thread()
    assert pool.map_ordered(abs, [-1, 2, -3]) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(0)


@pytest.mark.slow
def test_rows_are_flushed_at_exit_to_a_remote_store(seaweedfs: S3Server, tmp_path: Path) -> None:
    """Its client is not Python: it works for threads that wait in the exit hook."""
    done = run(
        f"""
        import flagstone
        db = flagstone.open("{seaweedfs.url}/exit", store_options={seaweedfs.options()})
        {WRITE}
        """,
        tmp_path,
    )
    with flagstone.open_reader(f"{seaweedfs.url}/exit", store_options=seaweedfs.options()) as reader:
        assert sum(1 for _ in reader.scan()) == NUMBER_OF_ROWS, done.stderr
    assert not done.stderr


# -- interrupted -------------------------------------------------------------------------------------------


class Owner:
    """What the forms of a handle refer to."""


class Handle:
    """A handle whose rows are all durable."""

    label = "handle"

    def is_open(self) -> bool:
        return False

    def begin_flush(self) -> None:
        pass

    def wait_flushed(self, timeout_s: float) -> None:
        pass

    def lost_rows(self) -> int:
        return 0

    def close(self) -> None:
        pass


def test_an_interrupt_at_any_bytecode_of_a_watch_leaves_no_thread_and_no_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A closer that no one stopped took the message that was meant for its successor.
    before = closers()  # other tests leave handles open on purpose
    for name, fresh in (("_watches", {}), ("_collected", SimpleQueue()), ("_closer", None)):
        monkeypatch.setattr(unclosed, name, fresh)
    struck = 0
    for at in itertools.count():
        owner, tracer = Owner(), Tracer(at)
        with suppress(Struck), tracer:
            unclosed.watch(owner, Handle()).end()
        del owner
        struck += tracer.where != ""
        if not tracer.where:
            break
    assert struck > 50
    with flagstone.open("db", store=MemoryStore()):
        pass
    eventually(lambda: closers() <= before and not unclosed._watches, lambda: (closers(), unclosed._watches))


def closers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "flagstone-closer"}
