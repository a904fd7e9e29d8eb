"""What a newcomer meets: names, suggestions, reprs, tables in notebooks, and the refusal of near misses."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import InvalidRequest, ReaderSettings, Settings, aio
from flagstone.db.writer.database import Db
from flagstone.store.memory import MemoryStore
from flagstone.store.resolve import resolve_database
from kit.databases import QUIET


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def db(store: MemoryStore) -> Iterator[Db]:
    with flagstone.open("db", store=store, settings=QUIET) as db:
        yield db


def test_the_package_lists_its_names_and_its_version() -> None:
    assert set(flagstone.__all__) <= set(dir(flagstone))
    assert flagstone.__version__ == version("flagstone")
    assert flagstone.operators.Counter() == flagstone.lsm.operators.Counter()


@pytest.mark.parametrize(
    ("name", "meant"), [("opne", "open"), ("opn_reader", "open_reader"), ("Setings", "Settings")]
)
def test_a_misspelt_name_of_the_package_gets_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; did you mean {meant}\?"):
        getattr(flagstone, name)


@pytest.mark.parametrize(
    ("module", "name", "meant"), [(aio, "opn", "open"), (flagstone.operators, "Countr", "Counter")]
)
def test_a_misspelt_name_of_a_module_gets_a_suggestion(module: Any, name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; did you mean {meant}\?"):
        getattr(module, name)
    assert "annotations" not in dir(flagstone.operators)


@pytest.mark.parametrize("address", [None, 5, b"abc", ["a"]])
def test_an_address_is_text_or_a_path(address: Any, store: MemoryStore) -> None:
    with pytest.raises(InvalidRequest, match=f"not {type(address).__name__}"):
        flagstone.open(address)
    with pytest.raises(InvalidRequest, match=f"not {type(address).__name__}"):
        flagstone.open(address, store=store)


@pytest.mark.parametrize("operator", [flagstone.operators.Counter, lambda key, old, new: new, "counter"])
def test_what_cannot_merge_is_refused_when_a_database_is_opened(operator: Any, store: MemoryStore) -> None:
    """Its first merge might be one of a compaction."""
    flagstone.open("db", store=store, settings=QUIET).close()
    for opened in (flagstone.open, flagstone.open_reader):
        with pytest.raises(InvalidRequest, match="merge_operator is an object"):
            opened("db", store=store, merge_operator=operator)
    with pytest.raises(InvalidRequest, match="merge_operator is an object"):
        flagstone.Admin("db", store=store).compact(full=True, merge_operator=operator)


def test_other_near_misses_are_refused_with_advice(db: Db, store: MemoryStore) -> None:
    with pytest.raises(InvalidRequest, match=r"takes a WriteBatch, not list; update\(\)"):
        db.write([(b"a", b"b")])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="the name of a checkpoint is a text, not int"):
        db.checkpoint(name=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no checkpoint has the id or name 'nightly'"):
        flagstone.open_reader("db", store=store, checkpoint="nightly")


def test_a_wait_takes_durations_and_seconds(store: MemoryStore) -> None:
    with flagstone.open("db", store=store) as db:
        for timeout in ("5s", timedelta(seconds=5), 5, 5.0, None):
            db.put(b"a", b"b").wait(timeout)
        with pytest.raises(InvalidRequest, match="timeout: '5' is not a duration"):
            db.put(b"a", b"b").wait("5")


def test_a_misspelt_option_gets_a_suggestion(store: MemoryStore) -> None:
    with pytest.raises(TypeError, match=r"flagstone\.open has no option 'setings'; did you mean settings\?"):
        flagstone.open("db", store=store, setings={})  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match=r"flagstone\.open_reader has no option 'chekpoint'"):
        flagstone.open_reader("db", store=store, chekpoint=None)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="'setings'; did you mean settings"):
        asyncio.run(_opened(aio.open("db", store=store, setings={})))  # type: ignore[call-arg]


async def _opened(opening: Any) -> None:
    await opening


@pytest.mark.parametrize("section", [Settings, ReaderSettings])
def test_a_misspelt_setting_gets_a_suggestion(section: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=r"manifest_pol_interval: unknown setting; did you mean manifest_poll"
    ):
        section(manifest_pol_interval="1s")


def test_settings_may_be_a_mapping(store: MemoryStore) -> None:
    settings = {"flush_interval": "10ms", "compactor_options": {"poll_interval": "1h"}}
    with flagstone.open("db", store=store, settings=settings) as db:
        assert db._engine.env.settings == Settings.from_dict(settings)
        db.flush()
        with flagstone.open_reader("db", store=store, settings={"skip_wal_replay": True}):
            pass
    with pytest.raises(InvalidRequest, match="flush_intervall: unknown setting"):
        flagstone.open("db", store=store, settings={"flush_intervall": "1s"})
    with pytest.raises(InvalidRequest, match="a Settings or a mapping of names and values, not a list"):
        flagstone.open("db", store=store, settings=[1])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="a Settings or a mapping of names and values, not a Reader"):
        flagstone.open("db", store=store, settings=ReaderSettings())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "right"),
    [
        (":memory:", "memory://NAME/path"),
        ("s3:/bucket/x", "write s3://bucket/x"),
        ("s3//bucket/x", "write s3://bucket/x"),
        ("S3:bucket", "write s3://bucket"),
        ("memory:shop", "write memory://shop"),
        ("file:/data/shop", "write file:///data/shop"),
        ("S3://bucket/x", "lower case: s3://"),
        ("sqlite://x", "there is no store for sqlite://"),
    ],
)
def test_a_near_miss_of_an_address_is_refused_with_the_right_spelling(address: str, right: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve_database(address)
    assert right in str(refused.value)


def test_a_refused_address_does_not_repeat_a_password() -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve_database("s3:/key:secret@bucket/x")
    assert "secret" not in str(refused.value)


def test_a_folder_may_have_any_name_behind_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flagstone.open("./s3:/x").close()
    assert (tmp_path / "s3:" / "x").is_dir()


@pytest.mark.parametrize(
    ("write", "advice"),
    [
        (lambda db: db.put("k", b"v"), "a key is bytes, not str; encode it first: b'…'"),
        (lambda db: db.get(("eu", 7)), "flagstone.keys.encode"),
        (lambda db: db.put(7, b"v"), "flagstone.keys.encode"),
        (lambda db: db.put(b"k", "v"), "a value is bytes, not str; encode it first"),
        (lambda db: db.put(b"k", {"a": 1}), "json.dumps"),
        (lambda db: db.put(b"k", None), "delete the key"),
        (lambda db: db.scan("a"), "start is bytes, not str; encode it first"),
        (lambda db: db.scan(prefix="a"), "prefix is bytes, not str; encode it first"),
    ],
)
def test_keys_and_values_of_other_types_are_refused_with_advice(db: Db, write: Any, advice: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        write(db)
    assert advice in str(refused.value)


# -- status -------------------------------------------------------------------------------------------------


def test_the_status_is_a_dictionary_with_typed_attributes(db: Db, store: MemoryStore) -> None:
    db.put(b"k", b"v", await_durable=True)
    status = db.status()
    assert status.durable_seq == status["durable_seq"] == 1
    assert json.loads(json.dumps(status)) == status
    assert pickle.loads(pickle.dumps(status)) == status
    assert {"durable_seq", "keys"} <= set(dir(status))
    with pytest.raises(AttributeError, match="no 'durable_sq'; did you mean durable_seq"):
        status.durable_sq  # noqa: B018
    with pytest.raises(KeyError, match="did you mean durable_seq"):
        status["durable_sq"]
    with flagstone.open_reader("db", store=store) as reader:
        assert reader.status().mode == "managed"
        declared = {
            name for kind in type(reader.status()).__mro__ for name in vars(kind).get("__annotations__", {})
        }
        assert declared == set(reader.status())
    declared = {name for kind in type(status).__mro__ for name in vars(kind).get("__annotations__", {})}
    assert declared == set(status)


def test_the_status_names_the_form_of_the_kernels(db: Db) -> None:
    from flagstone.kernels import COMPILED

    assert db.status().kernels == ("compiled" if COMPILED else "interpreted")


OPEN_TWICE = """
import warnings, flagstone.kernels
warnings.simplefilter("always")
flagstone.kernels.COMPILED = {compiled}
for _ in range(2):
    flagstone.open("memory://x/db").close()
"""


@pytest.mark.parametrize(
    ("compiled", "chosen", "warned"), [(True, "", 0), (False, "", 1), (False, "interpreted", 0)]
)
def test_interpreted_kernels_that_were_not_chosen_are_reported_once(
    compiled: bool, chosen: str, warned: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPEN_TWICE.format(compiled=compiled)],
        env={**os.environ, "FLAGSTONE_KERNELS": chosen},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr.count("RuntimeWarning: flagstone was installed without a C compiler") == warned, (
        done.stderr
    )
    assert warned == 0 or "<string>:6" in done.stderr


# -- notebooks and reprs ------------------------------------------------------------------------------------


class Checked(HTMLParser):
    """Collects the text, and fails on tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_notebooks_show_every_handle_and_escape_what_is_stored(db: Db, store: MemoryStore) -> None:
    db.update({b"<script>%d" % number: b"<img src=x>" for number in range(12)})
    db.put(b"long", b"x" * 10_000)
    db.flush()
    with flagstone.open_reader("db", store=store) as reader:
        shown: list[Any] = [
            db,
            db.status(),
            db.snapshot(),
            db.transaction(),
            reader,
            reader.status(),
            db.scan(),
            db.explain(b"<script>1"),
            db.explain(b"<script>"),
            flagstone.dataset(db),
        ]
        shown += [db[b"a":], db[:b"a"], aio.AsyncDb(db), aio.AsyncDbReader(reader)]
        for thing in shown:
            page = Checked(thing._repr_html_())
            assert "script" not in page.tags
            assert "img" not in page.tags
            assert len(page.text) < 5000


def test_a_notebook_shows_the_main_facts_of_a_handle_and_all_of_the_status(db: Db) -> None:
    db[b"k"] = b"v"
    whole = Checked(db.status()._repr_html_())
    assert "cost.dollars" in whole.text
    for handle in (db, aio.AsyncDb(db)):
        page = Checked(handle._repr_html_())
        assert "durable_seq" in page.text
        assert "cost." not in page.text
        assert page.tags.count("tr") < 20 < whole.tags.count("tr")
    assert "sequence number 1" in Checked(db.explain(b"k")._repr_html_()).text
    with flagstone.dataset(db) as dataset:
        assert "created_ms\nint64" in Checked(dataset._repr_html_()).text
    assert "closed" in Checked(dataset._repr_html_()).text


def test_a_notebook_shows_closed_handles_by_their_names(store: MemoryStore) -> None:
    """An exception there would be a traceback in the notebook."""
    db = flagstone.open("db", store=store, settings=QUIET)
    snapshot, transaction, scan = db.snapshot(), db.transaction(), db.scan()
    things: list[Any] = [db, db[b"a":], snapshot, snapshot[b"a":], transaction, transaction[b"a":], scan]
    things.append(db.collection("c", key=str, value="json"))
    things += [aio.AsyncDb(db), db.status()]
    transaction.rollback()
    assert "the transaction is over" in Checked(transaction[b"a":]._repr_html_()).text
    db.close()
    for thing in things:
        assert Checked(thing._repr_html_()).text


def test_the_preview_of_a_scan_is_bounded_and_does_not_move_it(db: Db) -> None:
    db.update({b"%02d" % number: b"v" for number in range(30)})
    scan = db.scan()
    page = Checked(scan._repr_html_())
    assert page.tags.count("tr") == 11
    assert "more rows" in page.text
    assert len(list(scan)) == 30
    assert "no rows" not in Checked(scan._repr_html_()).text
    assert Checked(db.scan(limit=3)._repr_html_()).tags.count("tr") == 4
    assert "no rows" in Checked(db[b"a":]._repr_html_()).text
    scan.close()
    assert "closed" in Checked(scan._repr_html_()).text


def test_reprs_name_the_database_and_the_state(db: Db) -> None:
    db[b"k"] = b"v"
    snapshot, transaction = db.snapshot(), db.transaction("serializable")
    transaction[b"x"] = b"y"
    assert repr(db) == "Db('db', store='memory://', open)"
    assert repr(db[b"a":b"b"]) == "Db('db', store='memory://', open)[b'a':b'b']"
    assert repr(snapshot) == "Snapshot('db', seq=1, open)"
    assert repr(transaction) == "Transaction('db', serializable, seq=1, 1 writes, open)"
    assert repr(db.scan(b"a", limit=3, reverse=True)) == "Scan([b'a':], seq=1, reverse, limit=3, not begun)"
    transaction.commit()
    snapshot.close()
    assert "committed" in repr(transaction)
    assert "closed" in repr(snapshot)
    assert repr(aio.AsyncDb(db)).startswith("AsyncDb('db'")


def test_checkpoints_are_given_by_id_or_name(db: Db, store: MemoryStore) -> None:
    admin = flagstone.Admin("db", store=store)
    db[b"k"] = b"1"
    first = db.checkpoint(name="nightly")
    db[b"k"] = b"2"
    second = db.checkpoint(name="nightly", lifetime="1h")
    db[b"k"] = b"3"
    db.flush()
    for given, value in (("nightly", b"2"), (first.id, b"1"), (str(first.id), b"1")):
        with flagstone.open_reader("db", store=store, checkpoint=given) as reader:
            assert reader[b"k"] == value
        with flagstone.dataset("db", store=store, checkpoint=given) as dataset:
            assert dataset.to_table()["value"].to_pylist() == [value]
    assert admin.create_checkpoint(source="nightly").manifest_id == second.manifest_id
    assert [key for key, *_ in admin.diff(first.id, "nightly")] == [b"k"]
    admin.clone("copy", checkpoint="nightly")
    with flagstone.open_reader("copy", store=store) as copy:
        assert copy[b"k"] == b"2"
    for change in (admin.delete_checkpoint, admin.refresh_checkpoint, admin.restore):
        with pytest.raises(InvalidRequest, match="2 checkpoints have the name 'nightly'; give the id of one"):
            change("nightly")
    admin.delete_checkpoint(first.id)
    assert admin.refresh_checkpoint("nightly").expires_s is None
    admin.delete_checkpoint("nightly")
    with pytest.raises(InvalidRequest, match="no checkpoint has the id or name 'nightly'"):
        admin.delete_checkpoint("nightly")
    with pytest.raises(InvalidRequest, match="is given by its UUID, not 5"):
        admin.delete_checkpoint(5)  # type: ignore[arg-type]
