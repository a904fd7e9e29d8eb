"""Every duration of the public surface is a timedelta or text with a unit; anything else is refused with a hint.

The last test fails if a public parameter annotated with `timedelta` is not covered here.
"""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

import flagstone
import flagstone.aio
import flagstone.config
import flagstone.spark
from flagstone import Admin, InvalidRequest, WriteBatch
from flagstone.config.fields import Duration, Nullable, Section
from flagstone.lsm.operators import Concatenate
from flagstone.spark.options import parse_read_options, parse_write_options
from flagstone.spark.stream.options import parse_stream_options
from flagstone.store.memory import MemoryStore
from kit.databases import QUIET

NUMBERS = [0, 1, -1, 30, 5.0, float("nan"), float("inf"), 2**70]
NONSENSE = [True, b"5s", [], "", "soon", "-5s", "1.5s", "5 parsecs"]
TEXT_NUMBERS = ["0", "30", "1.5"]
NEGATIVE = [timedelta(seconds=-1), timedelta(microseconds=-1)]


class Shop:
    """A database, its reader, admin and async forms, for calls that take a duration."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.db = flagstone.open("db", store=self.store, settings=QUIET, merge_operator=Concatenate())
        self.db.put(b"k", b"v")
        self.db.flush()
        self.admin = Admin("db", store=self.store)
        self.held = self.admin.create_checkpoint(lifetime="1h")

    def close(self) -> None:
        self.db.close()

    def awaited(self, call: Callable[[Any], Any]) -> Any:
        async def run() -> Any:
            opening = flagstone.aio.open(
                "other", store=MemoryStore(), settings=QUIET, merge_operator=Concatenate()
            )
            async with await opening as db:
                return await call(db)

        return asyncio.run(run())

    def in_transaction(self, call: Callable[[Any], Any]) -> Any:
        async def run(db: Any) -> Any:
            transaction = await db.transaction()
            try:
                return await call(transaction)
            finally:
                await transaction.rollback()

        return self.awaited(run)


def purge(shop: Shop, given: Any) -> None:
    """There is nothing to purge where a database is; but first the duration is checked."""
    try:
        shop.admin.purge(min_age=given)
    except InvalidRequest as error:
        if "destroy it first" not in str(error):
            raise


async def put_into_a_collection(db: Any, given: Any) -> None:
    rows = await db.collection("c", key=str, value="json")
    await rows.put("k", 1, ttl=given)


CALLS: dict[str, Callable[[Shop, Any], Any]] = {
    "Db.put ttl": lambda shop, given: shop.db.put(b"k", b"v", ttl=given),
    "Db.merge ttl": lambda shop, given: shop.db.merge(b"k", b"v", ttl=given),
    "WriteBatch.put ttl": lambda _, given: WriteBatch().put(b"k", b"v", ttl=given),
    "WriteBatch.merge ttl": lambda _, given: WriteBatch().merge(b"k", b"v", ttl=given),
    "Transaction.put ttl": lambda shop, given: shop.db.transaction().put(b"k", b"v", ttl=given),
    "Transaction.merge ttl": lambda shop, given: shop.db.transaction().merge(b"k", b"v", ttl=given),
    "AsyncDb.put ttl": lambda shop, given: shop.awaited(lambda db: db.put(b"k", b"v", ttl=given)),
    "AsyncDb.merge ttl": lambda shop, given: shop.awaited(lambda db: db.merge(b"k", b"v", ttl=given)),
    "AsyncTransaction.put ttl": lambda shop, given: shop.in_transaction(
        lambda tx: tx.put(b"k", b"v", ttl=given)
    ),
    "AsyncTransaction.merge ttl": lambda shop, given: shop.in_transaction(
        lambda tx: tx.merge(b"k", b"v", ttl=given)
    ),
    "Collection.put ttl": lambda shop, given: shop.db.collection("c", key=str, value="json").put(
        "k", 1, ttl=given
    ),
    "AsyncCollection.put ttl": lambda shop, given: shop.awaited(lambda db: put_into_a_collection(db, given)),
    "Db.run timeout": lambda shop, given: shop.db.run(lambda tx: None, timeout=given),
    "Db.checkpoint lifetime": lambda shop, given: shop.db.checkpoint(lifetime=given),
    "AsyncDb.checkpoint lifetime": lambda shop, given: shop.awaited(lambda db: db.checkpoint(lifetime=given)),
    "Admin.create_checkpoint lifetime": lambda shop, given: shop.admin.create_checkpoint(lifetime=given),
    "Admin.refresh_checkpoint lifetime": lambda shop, given: shop.admin.refresh_checkpoint(
        shop.held.id, lifetime=given
    ),
    "Admin.destroy grace": lambda shop, given: shop.admin.destroy(soft=True, grace=given, dry_run=True),
    "Admin.purge min_age": purge,
    "Admin.collect_garbage min_age": lambda shop, given: shop.admin.collect_garbage(
        min_age=given, dry_run=True
    ),
    "Admin.compact timeout": lambda shop, given: shop.admin.compact(timeout=given),
    "Admin.compact patience": lambda shop, given: shop.admin.compact(patience=given),
    "ChangeFeed pin_lifetime": lambda shop, given: flagstone.ChangeFeed(
        "db", store=shop.store, pin="me", pin_lifetime=given
    ),
    "WalReader pin_lifetime": lambda shop, given: flagstone.WalReader(
        "db", store=shop.store, pin="me", pin_lifetime=given
    ),
    "open_feed lifetime": lambda shop, given: flagstone.open_feed(
        "db", "me", store=shop.store, lifetime=given
    ),
    "aio.open_feed lifetime": lambda shop, given: shop.awaited(
        lambda _: flagstone.aio.open_feed("db", "me", store=shop.store, lifetime=given)
    ),
    "spark.compact timeout": lambda _, given: flagstone.spark.compact(
        None,  # type: ignore[arg-type]
        "file:///tmp/nowhere/db",
        timeout=given,
    ),
    "spark.compact patience": lambda _, given: flagstone.spark.compact(
        None,  # type: ignore[arg-type]
        "file:///tmp/nowhere/db",
        patience=given,
    ),
    "spark.delete lifetime": lambda _, given: flagstone.spark.delete(
        "key = X'00'",
        "file:///tmp/nowhere/db",
        lifetime=given,
    ),
    "spark.merge_into lifetime": lambda _, given: flagstone.spark.merge_into(
        None,  # type: ignore[arg-type]
        "file:///tmp/nowhere/db",
        lifetime=given,
    ),
    "spark.export lifetime": lambda _, given: flagstone.spark.export(
        None,  # type: ignore[arg-type]
        "file:///tmp/nowhere/db",
        "/tmp/nowhere/out",
        lifetime=given,
    ),
}
MAY_BE_NONE = {
    name for name in CALLS if not name.endswith((" grace", " patience", "export lifetime", "purge min_age"))
}
NEEDS_SPARK = {name for name in CALLS if name.startswith("spark.")}


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_method_refuses_an_invalid_duration(shop: Shop, name: str) -> None:
    wrong: list[Any] = [*NUMBERS, *NONSENSE, *TEXT_NUMBERS, *NEGATIVE]
    wrong += [] if name in MAY_BE_NONE else [None]
    for given in wrong:
        with pytest.raises(InvalidRequest) as refused:
            CALLS[name](shop, given)
        told = str(refused.value)
        if given in NUMBERS and not isinstance(given, bool):
            assert "has no unit; use a timedelta or text such as '5s'" in told, (name, given, told)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CALLS.keys() - NEEDS_SPARK))
def test_a_method_accepts_a_text_and_a_timedelta(name: str) -> None:
    for given in ("30s", timedelta(seconds=30), "1min 1s"):
        made = Shop()
        CALLS[name](made, given)
        made.close()


def sections() -> list[type[Section]]:
    found = [getattr(flagstone.config, name) for name in flagstone.config.__all__]
    return [each for each in found if isinstance(each, type) and issubclass(each, Section)]


SETTINGS = [
    (section, entry.name, section.kinds()[entry.name])
    for section in sections()
    for entry in fields(section)  # type: ignore[arg-type]
    if isinstance(section.kinds()[entry.name], Duration)
    or (
        isinstance(section.kinds()[entry.name], Nullable)
        and isinstance(section.kinds()[entry.name].inner, Duration)  # type: ignore[attr-defined]
    )
]


@pytest.mark.parametrize(
    ("section", "name", "kind"), SETTINGS, ids=[f"{section.__name__}.{name}" for section, name, _ in SETTINGS]
)
def test_a_setting_refuses_an_invalid_duration(section: type[Section], name: str, kind: Any) -> None:
    wrong: list[Any] = [*NUMBERS, *NONSENSE, *TEXT_NUMBERS, *NEGATIVE]
    wrong += [] if isinstance(kind, Nullable) else [None]
    for given in wrong:
        for build in (lambda: section(**{name: given}), lambda: section.from_dict({name: given})):  # noqa: B023
            with pytest.raises(InvalidRequest, match=name):
                build()


def test_the_environment_refuses_numbers_without_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLATEDB_FLUSH_INTERVAL", "100")
    with pytest.raises(InvalidRequest, match="100 has no unit"):
        flagstone.Settings.from_env()


@pytest.mark.parametrize(
    ("parse", "option"),
    [
        (parse_read_options, "checkpoint_lifetime"),
        (parse_write_options, "hand_over_timeout"),
        (parse_stream_options, "checkpoint_lifetime"),
        (parse_stream_options, "pin_lifetime"),
    ],
)
def test_an_option_of_spark_refuses_an_invalid_duration(parse: Callable[..., Any], option: str) -> None:
    base = {"path": "file:///tmp/nowhere/db", "consumer": "me"}
    if parse is not parse_stream_options:
        del base["consumer"]
    for given in [*TEXT_NUMBERS, "3600", "nan", "", "soon", "-5s", "0s", "10ms"]:
        with pytest.raises(InvalidRequest, match=option):
            parse({**base, option: given})
    parse({**base, option: "90s"})


@pytest.mark.parametrize("name", ["timeout", "connect_timeout", "read_timeout", "pool_idle_timeout"])
def test_a_timeout_of_the_http_client_is_seconds_or_text_with_a_unit(name: str) -> None:
    for given in (-1, 0, float("nan"), True, "30", "soon", "", 1e300):
        with pytest.raises(InvalidRequest, match=name):
            flagstone.Admin("db", store="s3://bucket", store_options={name: given})
    for accepted in (30, 0.5, "30s"):
        flagstone.Admin("db", store="s3://bucket", store_options={name: accepted})


def public_calls() -> Iterator[tuple[str, Any]]:
    for module, prefix in ((flagstone, ""), (flagstone.aio, "aio."), (flagstone.spark, "spark.")):
        for name in module.__all__:
            held = getattr(module, name)
            if isinstance(held, types.FunctionType):
                yield f"{prefix}{name}", held
            elif inspect.isclass(held) and not issubclass(held, Section | BaseException):
                for method, function in inspect.getmembers(held, inspect.isfunction):
                    if not method.startswith("_") or method == "__init__":
                        yield f"{name}.{method}".replace(".__init__", ""), function


def test_these_tests_cover_every_duration_of_the_public_methods() -> None:
    taken = {
        f"{name} {parameter.name}"
        for name, function in public_calls()
        for parameter in inspect.signature(function).parameters.values()
        if any(word in str(parameter.annotation) for word in ("timedelta", "Ttl"))
    }
    assert taken >= {"Db.put ttl", "Admin.destroy grace"}
    assert taken - CALLS.keys() == set()
