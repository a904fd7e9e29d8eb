"""`shell`: commands about one database, typed at a terminal or read from standard input."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import print_facts, print_json_line, print_line
from flagstone.cli.parsing import (
    KeyForm,
    ValueForm,
    parse_as_of,
    parse_bytes,
    parse_lifetime,
    parse_merge_operator,
    screen_text,
)
from flagstone.cli.process import exit_code, waiting_for_input
from flagstone.cli.rows import MergeWith, print_pairs, row_json
from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.inspector.text import json_text, line_text, size_text

if TYPE_CHECKING:
    import flagstone
    from flagstone.cli.connection import Connection

_PROMPT: Final = "flagstone> "
_SHOWN_ROWS: Final = 20
_COMPLETIONS: Final = 50
_HISTORY_LINES: Final = 1000

_HELP: Final = {
    "get KEY": "print the value of a key",
    "scan [PREFIX] [LIMIT]": f"print rows in key order, by default {_SHOWN_ROWS}",
    "put KEY VALUE [TTL]": "set a key, durably; needs --write",
    "delete KEY": "delete a key, durably; needs --write",
    "as-of [MOMENT]": 'read a former state: a sequence number, a time, "2h ago"; without a moment the present',
    "refresh": "read what is on the store now",
    "explain KEY": "how a get finds its answer, and what it costs",
    "stats": "what the shell shows, and the requests it has made",
    "help": "this list",
    "exit": "end the shell; so does the end of the input",
}


def shell(
    context: typer.Context,
    write: Annotated[
        bool,
        typer.Option("--write", help="Allow put and delete. The first of them fences a running writer."),
    ] = False,
    merge_operator: MergeWith = None,
    json: AsJson = False,
) -> None:
    """Type commands about one database: get, scan, put, delete, as-of, explain, stats, help.

    On a terminal, Tab completes commands and keys, and the history is kept in ~/.local/state/flagstone/history (not if
    FLAGSTONE_HISTORY is empty; another file if it names one). Without a terminal it reads commands from standard input
    and ends at the first error, with its exit code. With --json each result is one line of JSON. Keys and values are
    text, or hexadecimal digits after 0x; quote them as in a shell.

    For example:

        flagstone shell s3://bucket/shop
        echo 'scan user/ 5' | flagstone -p s3://bucket/shop --json shell
    """
    call = invocation(context, json=json)
    connection = call.connect()
    operator = parse_merge_operator(merge_operator)
    with Session(call, connection, merge_operator=operator, writes=write) as session:
        if sys.stdin.isatty():
            _converse(session)
            return
        for line in sys.stdin:
            if not session.run(line):
                break
            sys.stdout.flush()


def _converse(session: Session) -> None:
    """Read commands from a terminal until its end."""
    session.open()
    print_line(f"{session.title}; type help for the commands")
    with _line_editing(session):
        while True:
            try:
                with waiting_for_input():
                    line = input(_PROMPT)
            except EOFError:
                print_line("")
                return
            except KeyboardInterrupt:
                print_line("")  # as in other shells, Ctrl-C gives up the line
                continue
            try:
                if not session.run(line):
                    return
            except KeyboardInterrupt:
                print_line("\ninterrupted")
                session.close()  # it may be in the middle of a request: the next command opens it again
            except FlagstoneError as error:
                sys.stderr.write(f"flagstone: {error}\n")
                if exit_code(error) == 4:
                    session.close()  # fenced or destroyed: the next command opens it again


class Session:
    """The database of a shell: a reader of one moment, and from the first write on the writer."""

    def __init__(
        self, call: Invocation, connection: Connection, *, merge_operator: Any, writes: bool
    ) -> None:
        self._call = call
        self._connection = connection
        self._operator = merge_operator
        self._writes = writes
        self._opened: flagstone.Db | flagstone.DbReader | None = None
        self._writer = False
        self._as_of: str | None = None
        self._commands: dict[str, Callable[[list[str]], None]] = {
            "get": self._get,
            "scan": self._scan,
            "put": self._put,
            "delete": self._delete,
            "as-of": self._read_as_of,
            "refresh": self._refresh,
            "explain": self._explain,
            "stats": self._stats,
            "help": self._help,
        }

    @property
    def title(self) -> str:
        """The database and its store."""
        return f"{self._connection.root} in {self._connection.store.url}"

    @property
    def names(self) -> list[str]:
        """The commands."""
        return [*self._commands, "exit"]

    def run(self, line: str) -> bool:
        """Run one line; False if it ends the shell. A line that is empty or begins with # does nothing."""
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise InvalidRequest(f"cannot read {line.strip()!r}: {str(error).lower()}") from None
        if not words:
            return True
        name, arguments = words[0], words[1:]
        if name in ("exit", "quit"):
            return False
        command = self._commands.get(name)
        if command is None:
            raise InvalidRequest(f"there is no command {name!r}; there are {', '.join(self.names)}")
        command(arguments)
        return True

    def open(self) -> flagstone.Db | flagstone.DbReader:
        """The reader or writer that answers now."""
        if self._opened is None:
            self._opened = self._connection.reader(
                as_of=parse_as_of(self._as_of), merge_operator=self._operator
            )
        return self._opened

    def close(self) -> None:
        """Close what is open. Closing twice is fine."""
        opened, self._opened, self._writer = self._opened, None, False
        if opened is not None:
            opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keys_from(self, prefix: str) -> list[str]:
        """Some keys that begin with `prefix` and can be typed as text."""
        with self.open().scan(prefix=_bytes(prefix), limit=_COMPLETIONS) as found:
            return [text for key, _ in found if (text := line_text(key)).startswith(prefix)]

    def _get(self, words: list[str]) -> None:
        (key,) = _expect("get KEY", words, 1)
        row = self.open().get_row(_bytes(key))
        if self._call.json:
            print_json_line(None if row is None else row_json(row))
        else:
            print_line("(no value)" if row is None else screen_text(row.value))

    def _scan(self, words: list[str]) -> None:
        prefix, limit = _expect("scan [PREFIX] [LIMIT]", words, 0, "", str(_SHOWN_ROWS))
        if not limit.isdecimal():
            raise InvalidRequest(f"the limit {limit!r} is not a number; write scan [PREFIX] [LIMIT]")
        with self.open().scan(prefix=_bytes(prefix), limit=int(limit)) as found:
            if self._call.json:
                for row in found.rows():
                    print_json_line(row_json(row))
            else:
                print_pairs(found, KeyForm.auto, ValueForm.auto)

    def _put(self, words: list[str]) -> None:
        key, value, ttl = _expect("put KEY VALUE [TTL]", words, 2, None)
        handle = self._open_writer().put(
            _bytes(key), _bytes(value), ttl=parse_lifetime(ttl), await_durable=True
        )
        self._print_written(key, handle.seq)

    def _delete(self, words: list[str]) -> None:
        (key,) = _expect("delete KEY", words, 1)
        self._print_written(key, self._open_writer().delete(_bytes(key), await_durable=True).seq)

    def _print_written(self, key: str, seq: int) -> None:
        if self._call.json:
            print_json_line({"key": json_text(_bytes(key)), "seq": seq})
        else:
            print_line(f"sequence number {seq}")

    def _open_writer(self) -> flagstone.Db:
        import flagstone

        if self._as_of is not None:
            raise InvalidRequest(
                "the shell shows a former state, which cannot change; type as-of to leave it"
            )
        if not self._writes:
            raise InvalidRequest(
                "this shell only reads; start it with --write, which fences a running writer at the first write"
            )
        if not self._writer:
            self.close()
            self._opened = self._connection.database(self._call.settings(), merge_operator=self._operator)
            self._writer = True
        assert isinstance(self._opened, flagstone.Db), "the writer is open"
        return self._opened

    def _read_as_of(self, words: list[str]) -> None:
        moment = " ".join(words) or None
        parse_as_of(moment)
        before, self._as_of = self._as_of, moment
        self.close()
        try:
            self.open()
        except FlagstoneError:
            self._as_of = before
            raise
        self._say("showing", "the present" if moment is None else moment)

    def _refresh(self, words: list[str]) -> None:
        import flagstone

        _expect("refresh", words, 0)
        opened = self.open()
        if not isinstance(opened, flagstone.Db):  # the writer always shows the present
            opened.refresh()
        self._say("refreshed", self.title)

    def _explain(self, words: list[str]) -> None:
        from flagstone.cli.explain import print_explanation

        (key,) = _expect("explain KEY", words, 1)
        opened = self.open()
        print_explanation(self._call, opened.explain(_bytes(key)), opened.manifest(), write=print_json_line)

    def _stats(self, words: list[str]) -> None:
        _expect("stats", words, 0)
        status, connection = self.open().status(), self._connection
        facts = {
            "database": self.title,
            "open": "for writing" if self._writer else "for reading",
            "as_of": self._as_of,
            "last_sequence_number": status["last_seq"],
            "requests": connection.requests,
            "bytes": connection.bytes_moved,
        }
        if self._call.json:
            print_json_line(facts)
        else:
            facts["bytes"] = size_text(connection.bytes_moved)
            print_facts([(name.replace("_", " "), value) for name, value in facts.items()])

    def _help(self, words: list[str]) -> None:
        _expect("help", words, 0)
        if self._call.json:
            print_json_line(_HELP)
        else:
            print_facts(_HELP.items())

    def _say(self, what: str, about: str) -> None:
        if self._call.json:
            print_json_line({what: about})
        else:
            print_line(f"{what} {about}")


def _expect(form: str, words: list[str], least: int, *defaults: Any) -> list[Any]:
    """The arguments of a command, with defaults for those at the end."""
    if not least <= len(words) <= least + len(defaults):
        raise InvalidRequest(f"write {form}")
    return [*words, *defaults[len(words) - least :]]


def _bytes(text: str) -> bytes:
    return parse_bytes(text, KeyForm.auto)


@contextmanager
def _line_editing(session: Session) -> Iterator[None]:
    """Completion and history for `input`, if this Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_completer(_Completer(session, readline).complete)
    readline.set_completer_delims(" \t\n")
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    history = _history_file()
    if history is not None:
        with suppress(OSError):  # there is none yet
            readline.read_history_file(history)
    try:
        yield
    finally:
        if history is not None:
            _save_history(readline, history)


def _history_file() -> Path | None:
    named = os.environ.get("FLAGSTONE_HISTORY")
    if named is not None:
        return Path(named) if named else None
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "flagstone" / "history"


def _save_history(editor: Any, history: Path) -> None:
    """Keep the history for the next shell. Only its owner may read it, because values may be secrets."""
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch(mode=0o600)
        editor.set_history_length(_HISTORY_LINES)
        editor.write_history_file(history)
    except OSError as error:
        sys.stderr.write(f"flagstone: the history was not saved to {history}: {error.strerror}\n")


class _Completer:
    """Completes the first word with a command, and others with keys."""

    def __init__(self, session: Session, editor: Any) -> None:
        self._session = session
        self._editor = editor
        self._found: list[str] = []

    def complete(self, text: str, state: int) -> str | None:
        """The completion number `state` of `text`; None after the last one."""
        if state == 0:
            self._found = self._candidates(text)
        return self._found[state] if state < len(self._found) else None

    def _candidates(self, text: str) -> list[str]:
        before = self._editor.get_line_buffer()[: self._editor.get_begidx()].split()
        if not before:
            return [f"{name} " for name in self._session.names if name.startswith(text)]
        if before[0] in ("get", "put", "delete", "scan", "explain") and len(before) == 1:
            try:
                return self._session.keys_from(text)
            except FlagstoneError:
                return []  # the command itself reports it
        return []
