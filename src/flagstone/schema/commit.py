"""`SchemaCommit`: what the commit of structured rows checks and writes, decided before the rows were encoded. Pure.

Rows name the version of the schema with which they were encoded, which can be hours before they are committed. So the
commit compares the stored schema once more. Versions only ever get more, so rows of a stored version stay right; rows
of a new version need a schema that no other commit has changed meanwhile.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256

from flagstone.errors import TransactionConflict
from flagstone.schema.evolution import Evolution, GivenColumns, plan_evolution
from flagstone.schema.table_schema import SchemaVersion, TableSchema, schema_key


class SchemaChanged(TransactionConflict):
    """Another commit changed the schema while rows were built, and nothing was written: build them again."""


@dataclass(frozen=True, slots=True)
class SchemaCommit:
    """The schema with which rows are encoded, and the stored one (`before`, a digest) from which it was planned."""

    schema: TableSchema
    version: SchemaVersion
    prefix: bytes = b""
    before: str | None = None
    changed: bool = False
    replaces: bool = False

    @classmethod
    def plan(
        cls, stored: bytes | None, given: GivenColumns, *, prefix: bytes = b"", replaces_all: bool = False
    ) -> SchemaCommit:
        """Plan to write rows with the given columns, beside a stored schema row or None.

        Raises:
            InvalidRequest: the rows do not fit the stored schema.
            CorruptData: the schema row is damaged.

        """
        known = None if stored is None else TableSchema.decode(stored, schema_key(prefix))
        planned = plan_evolution(known, given, replaces_all=replaces_all)
        return cls.of(planned, stored, prefix=prefix, replaces_all=replaces_all)

    @classmethod
    def of(
        cls, planned: Evolution, stored: bytes | None, *, prefix: bytes = b"", replaces_all: bool = False
    ) -> SchemaCommit:
        """The commit of an evolution that was planned from the stored schema row."""
        return cls(planned.schema, planned.version, prefix, digest(stored), planned.changed, replaces_all)

    @property
    def key(self) -> bytes:
        """The key of the schema row."""
        return schema_key(self.prefix)

    def settle(self, stored: bytes | None) -> bytes | None:
        """The schema row to write together with the rows, given the one that is stored now; None if it stays.

        Raises:
            SchemaChanged: another commit has changed the schema, and the rows do not fit it.

        """
        if digest(stored) == self.before:
            return self.schema.encode() if self.changed else None
        if stored is not None and not self.replaces:
            now = TableSchema.decode(stored, self.key)
            same_rows = not now.retired and (now.key, now.value_format) == (
                self.schema.key,
                self.schema.value_format,
            )
            if same_rows and now.find(self.version.number) == self.version:
                return None
        raise SchemaChanged(
            "another process has changed the schema of the database since these rows were encoded; nothing was "
            "written: write them again"
        )

    def to_text(self) -> str:
        """The commit as text, for an option of Spark; `from_text` reads it."""
        return json.dumps(
            {
                "schema": self.schema.encode().decode(),
                "version": self.version.number,
                "prefix": self.prefix.hex(),
                "before": self.before,
                "changed": self.changed,
                "replaces": self.replaces,
            }
        )

    @classmethod
    def from_text(cls, text: str) -> SchemaCommit:
        """The commit that `to_text` wrote."""
        fields = json.loads(text)
        schema = TableSchema.decode(fields["schema"].encode())
        version = schema.find(fields["version"])
        if version is None:
            raise ValueError("the version is not in the schema")
        prefix = bytes.fromhex(fields["prefix"])
        return cls(schema, version, prefix, fields["before"], fields["changed"], fields["replaces"])


def digest(stored: bytes | None) -> str | None:
    """A short text that two different schema rows do not share; None for no row."""
    return None if stored is None else sha256(stored).hexdigest()
