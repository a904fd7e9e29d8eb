"""`flagstone.dataset`: a database as a PyArrow dataset, which DuckDB and other engines query.

The dataset takes the filter apart to find the key ranges to read. PyArrow then applies the whole filter to their rows,
so a result never depends on what was understood of the filter.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
from pyarrow import fs

from flagstone.config import ReaderSettings
from flagstone.db.collections.collection import Collection
from flagstone.db.frozen import freeze, open_frozen
from flagstone.db.read_methods import Reads, check_range
from flagstone.db.reader.as_of import AsOf
from flagstone.db.reader.reader import DbReader, ReaderMode
from flagstone.db.writer.database import Db
from flagstone.db.writer.transaction import Snapshot
from flagstone.errors import Closed, InvalidRequest
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.segments import SegmentExtractor
from flagstone.query.arrow_expressions import NotReadable, read_expression
from flagstone.query.columns import Columns, Mapper, TableRows, mapper, stored_mapper
from flagstone.query.conditions import Condition, Constant
from flagstone.read.preview import html_facts
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike

_log = logging.getLogger("flagstone.query")

_SCANNER_OPTIONS: Final = ("batch_size", "use_threads", "memory_pool")


_UNREACHABLE: Final = (
    "a flagstone.dataset has no files; call to_table() or to_batches() and use the result instead"
)


if TYPE_CHECKING:

    class _ArrowDataset:
        """The methods of PyArrow's class that `Dataset` inherits: type checkers know nothing of PyArrow."""

        def __init__(self, fragments: Any, schema: Any, format: Any, filesystem: Any) -> None: ...  # noqa: A002
        def to_table(self, columns: Any = None, filter: Any = None, **options: Any) -> pa.Table: ...  # noqa: A002
        def to_batches(
            self,
            columns: Any = None,
            filter: Any = None,  # noqa: A002
            **options: Any,
        ) -> Iterator[pa.RecordBatch]: ...
        def head(self, num_rows: int, **options: Any) -> pa.Table: ...
        def take(self, indices: Any, **options: Any) -> pa.Table: ...

else:
    _ArrowDataset = pads.FileSystemDataset


class Dataset(_ArrowDataset):
    """A database at one moment, as a `pyarrow.dataset.Dataset`. Made by `flagstone.dataset`; close it.

    `to_table`, `to_batches`, `scanner`, `head`, `take`, `count_rows` and `filter` work as on every dataset. A filter on
    keys reads only the blocks of the matching key ranges; columns that are not needed are not decoded. Any thread may
    use it.
    """

    def __init__(
        self, rows: TableRows, close: Callable[[], None], *, label: str, condition: Any = None
    ) -> None:
        # Arrow's own code sees a missing file: what would pass by the methods below fails, and does not crash.
        files = fs.SubTreeFileSystem(f"/{_UNREACHABLE}", fs.LocalFileSystem())
        fragment = pads.IpcFileFormat().make_fragment(_UNREACHABLE, files)
        super().__init__([fragment], rows.schema, pads.IpcFileFormat(), files)
        self._rows: TableRows | None = rows
        self._release = close
        self._label = label
        self._condition = condition

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self.rows.schema

    @property
    def partition_expression(self) -> Any:
        """The filter that all rows pass, as given to `filter`."""
        return pc.scalar(value=True) if self._condition is None else self._condition

    @property
    def rows(self) -> TableRows:
        """The rows by key ranges. Raises `Closed` if the dataset was closed."""
        if self._rows is None:
            raise Closed("this dataset was closed; open another one")
        return self._rows

    @property
    def filtered(self) -> bool:
        """Whether `filter` made it."""
        return self._condition is not None

    def scanner(
        self,
        columns: Sequence[str] | Mapping[str, Any] | None = None,
        filter: Any = None,  # noqa: A002 - PyArrow's name
        **options: Any,
    ) -> pads.Scanner:
        """A scanner of the rows that pass `filter`, an expression. It can be read once.

        Options for reading files are ignored.

        Raises:
            InvalidRequest: there is no such column.
            Closed: the dataset was closed.

        """
        rows = self.rows
        wanted = rows.schema.names if columns is None else columns
        condition: Condition = Constant(value=True)
        referred: frozenset[str] = frozenset()
        expression = self._both(filter)
        readable = True
        try:
            if expression is not None:
                condition, referred = read_expression(expression)
            if isinstance(wanted, Mapping):
                referred |= frozenset().union(*(read_expression(each).columns for each in wanted.values()))
            else:
                referred |= frozenset(wanted)
        except NotReadable as reason:
            _log.debug("read everything: a part of the query cannot be taken apart reason=%s", reason)
            readable = False
        missing = sorted(referred - set(rows.schema.names))
        if missing:
            raise InvalidRequest(
                f"there is no column {missing[0]!r}; there are {', '.join(rows.schema.names)}"
            )
        needed = [name for name in rows.schema.names if not readable or name in referred]
        return pads.Scanner.from_batches(
            rows.scan(condition, needed),
            columns=wanted if isinstance(wanted, Mapping) else list(wanted),
            filter=expression,
            **{name: value for name, value in options.items() if name in _SCANNER_OPTIONS},
        )

    def count_rows(self, filter: Any = None, **options: Any) -> int:  # noqa: A002 - PyArrow's name
        """The number of rows that pass `filter`. Reads no column that the filter does not need."""
        return int(self.scanner(columns=[], filter=filter, **options).count_rows())

    def filter(self, expression: Any) -> Dataset:
        """The rows that pass `expression`, at the same moment. Closing either dataset closes both."""
        return Dataset(self.rows, self.close, label=self._label, condition=self._both(expression))

    def sort_by(self, sorting: Any, **options: Any) -> pads.InMemoryDataset:
        """All rows in memory, in another order."""
        return self._in_memory().sort_by(sorting, **options)

    def join(self, *args: Any, **options: Any) -> pads.InMemoryDataset:
        """All rows in memory, joined with another dataset."""
        return self._in_memory().join(*args, **options)

    def join_asof(self, *args: Any, **options: Any) -> pads.InMemoryDataset:
        """All rows in memory, joined with the nearest rows of another dataset."""
        return self._in_memory().join_asof(*args, **options)

    def get_fragments(self, filter: Any = None) -> Iterator[NoReturn]:  # noqa: A002, ARG002 - PyArrow's name
        """Refused: the rows are in no files that Arrow can read."""
        raise InvalidRequest(_UNREACHABLE)

    def replace_schema(self, schema: Any) -> NoReturn:  # noqa: ARG002
        """Refused: give the schema to `flagstone.dataset`."""
        raise InvalidRequest("give the schema to flagstone.dataset(..., schema=...)")

    def close(self) -> None:
        """Release the moment: the checkpoint, snapshot or reader that the dataset holds. Closing twice is fine."""
        self._rows = None
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("a dataset is open in this process only; pass the address, and open it there")

    def __repr__(self) -> str:
        return f"Dataset({self._label}{', closed' if self._rows is None else ''})"

    def _repr_html_(self) -> str:
        columns = {} if self._rows is None else {field.name: str(field.type) for field in self.schema}
        return html_facts(repr(self), columns)

    def _both(self, expression: Any) -> Any:
        if self._condition is None or expression is None:
            return self._condition if expression is None else expression
        return self._condition & expression

    def _in_memory(self) -> pads.InMemoryDataset:
        return pads.InMemoryDataset(self.to_table())


def open_dataset(
    source: str | os.PathLike[str] | Db | DbReader | Snapshot | Collection[Any, Any],
    *,
    schema: Columns | None = None,
    key_columns: Sequence[str] | None = None,
    value_format: str = "row",
    raw: bool = False,
    prefix: bytes | None = None,
    start: bytes | None = None,
    stop: bytes | None = None,
    include_expired: bool = False,
    store: StoreLike | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    wal_store: StoreLike | None = None,
    checkpoint: UUID | str | None = None,
    as_of: AsOf | None = None,
    mode: ReaderMode = "managed",
    merge_operator: MergeOperator | None = None,
    segment_extractor: SegmentExtractor | None = None,
    settings: ReaderSettings | Mapping[str, Any] | None = None,
) -> Dataset:
    """The rows of a database as a `pyarrow.dataset.Dataset`, which DuckDB queries by name and PyArrow by its methods.

    The dataset shows one moment. `source` is an address, with the arguments of `flagstone.open_reader`, or an open
    `Db`, `DbReader` or `Snapshot`, or a collection of one. For an address the dataset creates a checkpoint, refreshes
    it while it is open, and deletes it when it is closed; a crash leaves it behind, and it expires. With a `checkpoint`
    of yours, or with `mode="latest"`, it writes nothing; in that mode a query fails if garbage collection has deleted
    what it reads. Of a `Db` it takes a snapshot, which it closes. A `DbReader` or `Snapshot` has to stay open.

    If the database has a schema for the rows under `prefix` (by default for all rows), the columns are those of the
    schema; `schema` chooses some of them. Otherwise, or with `raw`, they are key, value, seq, created_ms and
    expires_ms; `schema` chooses some of them, and may read key and value as strings. With `key_columns`, `schema` has
    the columns of rows without a stored schema: `flagstone.keys` decodes the key columns, and `value_format` ("row" or
    "json") decodes the others.

    Conditions on the key with =, <, <=, >, >=, between, in and prefixes, joined by and, or and not, select key ranges.
    With key columns these are conditions on the first of them, and on the next one where the one before equals
    something. `prefix`, `start` and `stop` limit the keys of the dataset.

    Raises:
        InvalidRequest: there is no database or no such checkpoint, or the schema does not fit.
        Unavailable: the store did not answer.

    """
    explicit = mapper(schema, key_columns, value_format) if raw or key_columns is not None else None
    if isinstance(source, Collection):
        if prefix is not None:
            raise InvalidRequest("a collection is the rows under its own prefix: leave prefix out")
        prefix = source.range.start
    keys = check_range(start, stop, prefix)
    reads, release, label = _open_reads(
        source,
        {
            "store": store,
            "store_options": store_options,
            "wal_store": wal_store,
            "checkpoint": checkpoint,
            "as_of": as_of,
            "mode": mode,
            "merge_operator": merge_operator,
            "segment_extractor": segment_extractor,
            "settings": settings,
        },
    )
    try:
        mapped = (
            explicit or _stored_mapper(reads, schema, prefix or b"") or mapper(schema, None, value_format)
        )
    except BaseException:
        release()
        raise
    return Dataset(TableRows(reads, mapped, keys, include_expired=include_expired), release, label=label)


def _stored_mapper(reads: Reads, schema: Columns | None, prefix: bytes) -> Mapper | None:
    """The mapping for the rows under `prefix`; None if the database has no schema for them."""
    table = reads.schema(prefix)
    return None if table is None else stored_mapper(table, schema, prefix)


def _open_reads(source: Any, arguments: Mapping[str, Any]) -> tuple[Reads, Callable[[], None], str]:
    if isinstance(source, str | os.PathLike):
        reader = open_frozen(source, **arguments)
        reads, _ = freeze(reader)
        status = reader.status()
        return reads, reader.close, f"{status['path']!r}, store={status['store']!r}, seq={status['last_seq']}"
    given = [
        name
        for name, value in arguments.items()
        if value is not None and (name, value) != ("mode", "managed")
    ]
    if given:
        raise InvalidRequest(f"{given[0]} belongs to an address; {type(source).__name__} is already open")
    reads, release = freeze(source)
    return reads, release, repr(source)
