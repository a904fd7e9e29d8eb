"""A model of destroying a database and creating another at its path.

Four processes work on one path: a writer of the first database that may stall anywhere, a late repetition of one of its
requests, a destroyer, and the creator and writer of the second database. A writer does not read the manifest between
two WAL files.

Three things hold in every state. The writer of a destroyed database acknowledges nothing that it wrote after the path
was vacant. What the second writer acknowledged is in the second database. The second database shows no row of the
first one. Each rule can be left out; the tests show that the model then has a violation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from interleaving.explorer import Exploration, Operation, Process, explore

LeftOut = Literal[
    "nothing",
    "the residue",
    "the fence stays",
    "the last WAL file is emptied",
    "the boundary is advanced",
    "manifest ids go on",
    "WAL ids go on",
    "epochs go on",
]

FENCE: Final = ""
FIRST, SECOND, VACANT = "first", "second", "vacant"


class Manifest(NamedTuple):
    """The database it belongs to, the writer epoch, where replay starts, and the rows in SSTs."""

    owner: str
    epoch: int
    replay_after: int = 0
    rows: frozenset[str] = frozenset()
    marked: bool = False


class Path(NamedTuple):
    """All objects below one path.

    `late` is what the first writer acknowledged although it wrote it after its database was erased. The answer of a
    create contains that for the check; a real writer does not get it.
    """

    manifests: tuple[tuple[int, Manifest], ...] = ((1, Manifest(FIRST, 1)),)
    boundary: int = 0
    wal: tuple[tuple[int, str], ...] = ((1, FENCE),)
    done: frozenset[str] = frozenset()
    erased: bool = False
    late: str | None = None

    @property
    def latest(self) -> tuple[int, Manifest] | None:
        """The latest manifest and its id; those at or below the boundary do not count."""
        found = max(self.manifests, default=None)
        return None if found is None or found[0] <= self.boundary else found

    def row(self, wal_id: int) -> str | None:
        return dict(self.wal).get(wal_id)


def check_path(path: Path) -> str | None:
    """What is wrong with a state; None if nothing is."""
    if path.late is not None:
        return f"two owners: {path.late} was acknowledged after its database was deleted"
    latest = path.latest
    second = {row for row in path.done if row.startswith("B")}
    if second and (latest is None or latest[1].owner != SECOND):
        return "the second database is lost"
    if latest is None:
        return None
    manifest = latest[1]
    visible, wal_id = set(manifest.rows), manifest.replay_after + 1
    while (row := path.row(wal_id)) is not None:
        visible.add(row)
        wal_id += 1
    if second - visible:
        return f"{', '.join(sorted(second - visible))} was acknowledged and is lost"
    mixed = {row for row in visible if row.startswith("A")} if manifest.owner == SECOND else set()
    return f"the second database shows {', '.join(sorted(mixed))} of the first" if mixed else None


def explore_destroy(
    left_out: LeftOut = "nothing", *, files: int = 2, late_request: bool = True, fence_collected: bool = False
) -> Exploration:
    """All orders of the processes, with one rule left out.

    With `fence_collected` the second database's collector deletes the fence, as it may after a minimum age. The first
    writer then reads the epoch before it acknowledges.
    """
    processes: dict[str, Callable[[], Process]] = {
        "first writer": partial(_first_writer, files, fence_collected),
        "destroyer": partial(_destroyer, left_out),
        "second writer": partial(_second_writer, left_out, fence_collected),
    }
    if late_request:
        processes["late request"] = _late_request
    return explore(Path(), processes, check_path)


def _first_writer(files: int, checks_epoch: bool) -> Process:
    """Write WAL files, then flush them into a manifest; end when fenced."""
    number, rows = 0, frozenset[str]()
    while number < files:
        row = f"A{number}"
        created, late = yield _put(2 + number, row)
        if not created:
            return
        if checks_epoch:
            latest = yield _read_latest
            if latest is None or latest[1].epoch != 1:
                return
        yield _acknowledge(row, late)
        rows |= {row}
        number += 1
    flushed = Manifest(FIRST, 1, 1 + files, rows)
    created, late = yield _create(2, flushed)
    if created:
        boundary = yield _read_boundary
        if boundary < 2:
            yield _acknowledge("A flush", late)


def _late_request() -> Process:
    """Repeat the request that created the first WAL file, because its reply was lost."""
    yield _put(2, "A0")


def _destroyer(left_out: LeftOut) -> Process:
    attempts, marked, latest = 0, None, None
    while marked is None:
        if attempts == 3:
            return
        attempts += 1
        latest = yield _read_latest
        manifest = latest[1]._replace(epoch=latest[1].epoch + 1, marked=True)
        created, _late = yield _create(latest[0] + 1, manifest)
        if created:
            marked = (latest[0] + 1, manifest)
    fence = marked[1].replay_after + 1
    while not (yield _put(fence, FENCE))[0]:
        fence += 1
    vacant = marked[0] + 1
    yield _erase(vacant, Manifest(VACANT, marked[1].epoch, fence))
    if left_out not in ("the boundary is advanced", "the residue"):
        yield _advance(vacant - 1)
    if left_out not in ("the residue", "the last WAL file is emptied"):
        yield _empty(fence - 1)
    kept = {
        "the residue": (),
        "the fence stays": (fence - 1,),
        "the last WAL file is emptied": (fence,),
    }.get(left_out, (fence - 1, fence))
    doomed = yield _list_wal(fence, kept)
    while doomed:
        yield _delete_wal(doomed[0])
        doomed = doomed[1:]
    old = yield _list_manifests(vacant)
    while old:
        yield _delete_manifest(old[0])
        old = old[1:]
    if left_out == "the residue":
        yield _delete_manifest(vacant)


def _second_writer(left_out: LeftOut, fence_collected: bool) -> Process:
    """Create the second database if the path is vacant, open it, write a row, and flush it."""
    latest = yield _read_latest
    vacancy = latest if left_out != "the residue" else None
    if (vacancy is None and latest is not None) or (vacancy is not None and vacancy[1].owner != VACANT):
        return
    if latest is None and left_out != "the residue":
        return
    if latest is None:
        erased = yield _is_erased
        if not erased:
            return
    number = 1 if vacancy is None or left_out == "manifest ids go on" else vacancy[0] + 1
    epoch = 1 if vacancy is None or left_out == "epochs go on" else vacancy[1].epoch + 1
    replay_after = 0 if vacancy is None or left_out == "WAL ids go on" else vacancy[1].replay_after
    created, _late = yield _create(number, Manifest(SECOND, epoch, replay_after))
    if not created:
        return
    boundary = yield _read_boundary
    if number <= boundary and left_out != "manifest ids go on":
        return
    fence = replay_after + 1
    while not (yield _put(fence, FENCE))[0]:
        fence += 1
    if fence_collected:
        yield _delete_wal(replay_after)
    created, _late = yield _put(fence + 1, "B0")
    if not created:
        return
    yield _acknowledge("B0", False)
    yield _flush(number, fence + 1, frozenset(["B0"]))


def _read_latest(path: Path) -> tuple[Path, tuple[int, Manifest] | None]:
    return path, path.latest


def _read_boundary(path: Path) -> tuple[Path, int]:
    return path, path.boundary


def _is_erased(path: Path) -> tuple[Path, bool]:
    return path, path.erased and not path.manifests


def _put(wal_id: int, row: str) -> Operation:
    def put_if_absent(path: Path) -> tuple[Path, tuple[bool, bool]]:
        if path.row(wal_id) is not None:
            return path, (False, False)
        return path._replace(wal=tuple(sorted([*path.wal, (wal_id, row)]))), (True, path.erased)

    return put_if_absent


def _create(number: int, manifest: Manifest) -> Operation:
    def create_manifest(path: Path) -> tuple[Path, tuple[bool, bool]]:
        if number in dict(path.manifests):
            return path, (False, False)
        manifests = tuple(sorted([*path.manifests, (number, manifest)]))
        return path._replace(manifests=manifests), (True, path.erased)

    return create_manifest


def _erase(number: int, manifest: Manifest) -> Operation:
    def erase(path: Path) -> tuple[Path, tuple[bool, bool]]:
        return _create(number, manifest)(path._replace(erased=True))

    return erase


def _advance(number: int) -> Operation:
    return lambda path: (path._replace(boundary=max(path.boundary, number)), None)


def _list_wal(through: int, kept: tuple[int, ...]) -> Operation:
    def list_wal(path: Path) -> tuple[Path, tuple[int, ...]]:
        return path, tuple(wal_id for wal_id, _ in path.wal if wal_id <= through and wal_id not in kept)

    return list_wal


def _list_manifests(below: int) -> Operation:
    return lambda path: (path, tuple(number for number, _ in path.manifests if number < below))


def _empty(wal_id: int) -> Operation:
    def empty(path: Path) -> tuple[Path, None]:
        return path._replace(
            wal=tuple((number, FENCE if number == wal_id else row) for number, row in path.wal)
        ), None

    return empty


def _delete_wal(wal_id: int) -> Operation:
    return lambda path: (path._replace(wal=tuple(file for file in path.wal if file[0] != wal_id)), None)


def _delete_manifest(number: int) -> Operation:
    return lambda path: (
        path._replace(manifests=tuple(entry for entry in path.manifests if entry[0] != number)),
        None,
    )


def _acknowledge(row: str, late: bool) -> Operation:
    def acknowledge(path: Path) -> tuple[Path, Any]:
        return path._replace(done=path.done | {row}, late=row if late else path.late), None

    return acknowledge


def _flush(base: int, replay_after: int, rows: frozenset[str]) -> Operation:
    def commit_flush(path: Path) -> tuple[Path, Any]:
        latest = path.latest
        if latest is None or latest[0] != base:
            return path, None
        manifest = latest[1]._replace(replay_after=replay_after, rows=latest[1].rows | rows)
        return path._replace(manifests=tuple(sorted([*path.manifests, (base + 1, manifest)]))), None

    return commit_flush
