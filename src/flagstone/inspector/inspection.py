"""What the page of `flagstone inspect` may ask for: the state, its history, sizes, rows, and the versions of a key.

Every answer is read from the store by requests that change nothing: no checkpoint, no claim of a role, no epoch. A
reader for rows is opened at the first request for rows. Between requests nothing runs, except that the reader polls
the manifest once an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final, Protocol

from flagstone.config import ReaderSettings
from flagstone.db.reader.reader import DbReader, open_reader
from flagstone.db.reader.schemas import read_schemas
from flagstone.db.reader.versions import read_versions
from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.inspector.decoding import LONG, SHORT, Decoder, parse_key
from flagstone.inspector.documents import checkpoint_document, state_document
from flagstone.inspector.manifest_history import ManifestHistory
from flagstone.inspector.rates import Rates, Sample, Sampler, Watched, plan_rates
from flagstone.inspector.snapshot import take_snapshot
from flagstone.lsm.merge_operator import NO_OPERATOR, MergeOperator
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.runtime.sync import Lock
from flagstone.store.paths import DbPaths
from flagstone.store.prices import GIGABYTE, PRICE_LIST, S3_STANDARD, SECONDS_A_MONTH
from flagstone.types import VALUE, KeyRange, Row

MAX_ROWS: Final = 200
MAX_VERSIONS: Final = 100
MAX_CHECKPOINTS: Final = 30
"""The checkpoints in which a key is looked up; each takes a few requests."""

_KEPT_RATES: Final = 120
_KEPT_SIZES_S: Final = 60.0
_KEPT_SCHEMAS_S: Final = 30.0


_READER: Final = ReaderSettings(manifest_poll_interval=timedelta(hours=1), checkpoint_lifetime=None)
"""Every request refreshes the reader, so it need not poll by itself."""


class Unmerged:
    """The merge operator of a page that was given none: the value of a key with operands is a mark.

    Without it a list of rows would fail at the first key with operands.
    """

    _MARK: Final = SYSTEM_IDS.uuid().bytes * 2

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:  # noqa: ARG002
        return self._MARK

    def merge_many(self, key: bytes, existing: bytes | None, operands: Sequence[bytes]) -> bytes:  # noqa: ARG002
        return self._MARK

    @classmethod
    def made(cls, row: Row | None) -> bool:
        """Whether the row has the mark in place of a value."""
        return row is not None and row.value == cls._MARK


class OpensReaders(Protocol):
    """Opens readers that write nothing, such as `open_reader(mode="latest")`."""

    def __call__(self, *, checkpoint: str | None = None) -> DbReader: ...


def inspect_database(
    watched: Watched, *, merge_operator: MergeOperator | None = None, refresh_s: float = 5
) -> Inspection:
    """The inspection of a database. Sends no request yet."""

    def open_one(*, checkpoint: str | None = None) -> DbReader:
        return open_reader(
            watched.root,
            store=watched.store,
            wal_store=watched.wal_store,
            checkpoint=checkpoint,
            mode="latest",
            merge_operator=merge_operator or Unmerged(),
            settings=_READER,
        )

    return Inspection(watched, open_one, refresh_s=refresh_s)


class Inspection:
    """Answers the requests of one page, which may come from many threads. Close it to close its reader."""

    def __init__(
        self, watched: Watched, open_reader: OpensReaders, *, refresh_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._watched = watched
        self._open_reader = open_reader
        self._refresh_s = refresh_s
        self._clock = clock
        paths = DbPaths(watched.root)
        self._manifests = ManifestStore(watched.store, paths)
        self._compactions = CompactionsStore(watched.store, paths)
        self._history = ManifestHistory(watched.store, watched.root, clock=clock)
        self._sampler = Sampler(watched, clock)
        self._lock = Lock()
        self._live_lock = Lock()
        self._reader: DbReader | None = None
        self._refreshed_at = 0.0
        self._decoder: Decoder | None = None
        self._decoder_at = 0.0
        self._samples: list[Sample] = []
        self._rates: list[dict[str, Any]] = []
        self._sizes: tuple[float, dict[str, Any]] | None = None
        self._answers: dict[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {
            "state": self._answer_state,
            "history": lambda _: self._history.document(),
            "sizes": lambda _: self._answer_sizes(),
            "rows": self._answer_rows,
            "key": self._answer_key,
        }

    def close(self) -> None:
        """Close the reader, if there is one."""
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def answer(self, name: str, query: Mapping[str, str]) -> dict[str, Any] | None:
        """The document of that name; None if there is none.

        Raises:
            InvalidRequest: the query has no meaning, or names what is not there.
            Unavailable: the store did not answer.

        """
        chosen = self._answers.get(name)
        return None if chosen is None else chosen(query)

    def live(self) -> dict[str, Any]:
        """What changes all the time, for the stream of events. Pages that ask at the same time share one look."""
        with self._live_lock:
            now_ms = self._clock.now_ms()
            last = self._samples[-1] if self._samples else None
            if last is None or now_ms - last.at_ms >= self._refresh_s * 900:
                sample = self._sampler.take()
                if last is not None:
                    self._rates = [*self._rates, _rates_document(last, sample)][-_KEPT_RATES:]
                self._samples = [*self._samples[-1:], sample]
                last = sample
            return {
                "now_ms": last.at_ms,
                "manifest": last.manifest_id,
                "last_wal": last.last_wal_id,
                "last_seq": last.last_l0_seq,
                "writer_epoch": last.writer_epoch,
                "requests": last.requests,
                "rates": self._rates,
            }

    def _answer_state(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The current manifest with its jobs, or a former one without."""
        decoder = self._decode()
        common = {
            "database": self._watched.root,
            "store": self._watched.store.url,
            "now_ms": self._clock.now_ms(),
        }
        if wanted := query.get("manifest"):
            stored, manifest = self._history.load(_number(wanted, "manifest", 2**63))
            return {
                **common,
                "former": True,
                "written_ms": stored.ms,
                "manifest_bytes": stored.bytes,
                **state_document(stored.id, manifest, None, decoder),
            }
        latest = self._manifests.latest()
        if latest is None:
            raise InvalidRequest(
                f"no database at {self._watched.root!r} in {self._watched.store.url}; it may have been deleted"
            )
        compactions = self._compactions.latest()
        jobs = None if compactions is None else compactions.value
        return {**common, "former": False, **state_document(latest.id, latest.value, jobs, decoder)}

    def _answer_sizes(self) -> dict[str, Any]:
        """The sizes of all objects and what they cost. Lists every object, so the answer is kept for a minute."""
        now = self._clock.monotonic()
        if self._sizes is None or now - self._sizes[0] > _KEPT_SIZES_S:
            seen = take_snapshot(self._watched.store, self._watched.wal_store, self._watched.root)
            stored = sum(weight.bytes for weight in seen.overview.objects.values())
            document = {
                **{
                    name: asdict(weight)
                    for name, weight in (
                        ("live", seen.overview.tables.live),
                        ("pinned", seen.overview.tables.pinned),
                        ("unreferenced", seen.overview.tables.unreferenced),
                        ("borrowed", seen.overview.tables.borrowed),
                        ("wal_to_replay", seen.overview.log.to_replay),
                        ("wal_flushed", seen.overview.log.flushed),
                    )
                },
                "folders": [[name, each.count, each.bytes] for name, each in seen.overview.objects.items()],
                "stored_bytes": stored,
                "space_amplification": seen.overview.space_amplification,
                "dollars_a_month": stored / GIGABYTE * S3_STANDARD.stored_gb,
                "price_list": f"S3 Standard, {PRICE_LIST.partition(',')[0]}",
            }
            self._sizes = (now, document)
        return self._sizes[1]

    def _answer_rows(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Rows of a prefix in key order, from `start` (a key in hexadecimal digits) on."""
        prefix = parse_key(query.get("prefix", ""), query.get("form", "auto"))
        limit = min(_number(query.get("limit", "50"), "limit", MAX_ROWS), MAX_ROWS)
        begin = _hex(query["start"]) if query.get("start") else None
        keys = KeyRange.of_prefix(prefix)
        start = keys.start if begin is None else max(begin, keys.start or b"")
        reader = self._fresh_reader()
        decoder = self._decode(reader)
        with reader.scan(
            start, keys.stop, limit=limit + 1, include_system=query.get("system") == "1"
        ) as found:
            rows = list(found.rows())
        return {
            "rows": [_visible(decoder, row, SHORT) for row in rows[:limit]],
            "next": rows[limit].key.hex() if len(rows) > limit else None,
            "prefix": decoder.key(prefix) if prefix else None,
        }

    def _answer_key(self, query: Mapping[str, str]) -> dict[str, Any]:
        """One key: its row, its stored versions, and what the checkpoints have of it."""
        key = (
            _hex(query["id"])
            if query.get("id")
            else parse_key(query.get("key", ""), query.get("form", "auto"))
        )
        reader = self._fresh_reader()
        decoder = self._decode(reader)
        row = reader.get_row(key)
        unmerged = Unmerged.made(row)
        versions = read_versions(reader, key, limit=MAX_VERSIONS + 1)
        return {
            "key": decoder.key(key),
            "row": None if row is None or unmerged else _visible(decoder, row, LONG),
            "problem": NO_OPERATOR if unmerged else None,
            "versions": [decoder.row(each, limit=SHORT) for each in versions[:MAX_VERSIONS]],
            "more_versions": len(versions) > MAX_VERSIONS,
            **self._in_checkpoints(reader, key, decoder),
        }

    def _in_checkpoints(self, reader: DbReader, key: bytes, decoder: Decoder) -> dict[str, Any]:
        """What the newest checkpoints have of a key. Checkpoints of one manifest are looked up once."""
        now_s = self._clock.now_ms() / 1000
        entries = [
            each for each in reader.manifest().checkpoints if each.expires_s is None or each.expires_s > now_s
        ]
        entries.sort(key=lambda each: (each.created_s, each.manifest_id), reverse=True)
        by_manifest: dict[int, dict[str, Any]] = {}
        answers = []
        for entry in entries[:MAX_CHECKPOINTS]:
            found = by_manifest.get(entry.manifest_id)
            if found is None:
                found = self._in_checkpoint(str(entry.id), key, decoder)
                by_manifest[entry.manifest_id] = found
            answers.append({**checkpoint_document(entry), **found})
        return {"checkpoints": answers, "hidden_checkpoints": max(len(entries) - MAX_CHECKPOINTS, 0)}

    def _in_checkpoint(self, checkpoint: str, key: bytes, decoder: Decoder) -> dict[str, Any]:
        try:
            with self._open_reader(checkpoint=checkpoint) as former:
                row = former.get_row(key)
        except FlagstoneError as error:  # it may have been deleted meanwhile; the others are shown
            return {"row": None, "problem": str(error)}
        if Unmerged.made(row):
            return {"row": None, "problem": NO_OPERATOR}
        return {"row": None if row is None else _visible(decoder, row, SHORT), "problem": None}

    def _fresh_reader(self) -> DbReader:
        """The reader, showing what was on the store less than a second ago."""
        with self._lock:
            if self._reader is None:
                self._reader = self._open_reader()
            elif self._clock.monotonic() - self._refreshed_at >= 1:
                self._reader.refresh()
            else:
                return self._reader
            self._refreshed_at = self._clock.monotonic()
            return self._reader

    def _decode(self, reader: DbReader | None = None) -> Decoder:
        """The decoder with the schemas of less than half a minute ago; without any before rows are asked for."""
        if reader is None:
            return self._decoder or Decoder({})
        now = self._clock.monotonic()
        if self._decoder is None or now - self._decoder_at > _KEPT_SCHEMAS_S:
            self._decoder, self._decoder_at = Decoder(read_schemas(reader)), now
        return self._decoder


def _visible(decoder: Decoder, row: Row, limit: int) -> dict[str, Any]:
    shown = decoder.row((row.key, row.seq, VALUE, row.value, row.created_ms, row.expires_ms), limit=limit)
    return {**shown, "value": None} if Unmerged.made(row) else shown


def _rates_document(before: Sample, after: Sample) -> dict[str, Any]:
    """What happened between two looks, per second, and what the writes would cost in a month at this rate."""
    rates: Rates = plan_rates(before, after)
    puts = rates.wal_files + rates.manifests + rates.flushes + rates.compacted_ssts
    return {
        "at_ms": after.at_ms,
        "seconds": rates.seconds,
        "wal_bytes": rates.wal_bytes / rates.seconds,
        "wal_files": rates.wal_files / rates.seconds,
        "rows": rates.rows / rates.seconds,
        "flushes": rates.flushes,
        "flushed_bytes": rates.flushed_bytes / rates.seconds,
        "compacted_bytes": rates.compacted_bytes / rates.seconds,
        "manifests": rates.manifests / rates.seconds,
        "puts": puts / rates.seconds,
        "dollars_a_month": S3_STANDARD.put * puts / rates.seconds * SECONDS_A_MONTH,
    }


def _number(text: str, name: str, highest: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= highest):
        raise InvalidRequest(f"{name} is a whole number from 0 to {highest}, not {text[:40]!r}")
    return int(text)


def _hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidRequest(f"a key in a request is hexadecimal digits, not {text[:40]!r}") from None
