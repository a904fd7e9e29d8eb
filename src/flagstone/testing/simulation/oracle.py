"""What a database must show: every write that was made, in the order of its sequence numbers.

The oracle knows each write by the sequence number that the writer returned; `history` has the values that it keeps. A
writer that is replaced keeps a *branch* of its own: its memory may hold writes that never became durable. When the next
writer opens the database at sequence number p, the branch up to p joins the trunk and the rest of it is gone. No write
that was acknowledged as durable may be in that rest.

A restore gives up every write since a checkpoint: from its sequence number on the database shows the checkpoint's rows.

The outcome of a write is in doubt if its call raised an error or its process crashed. Such a write may appear, whole,
at one sequence number. The audit of the next opening finds out.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator

from flagstone.testing.simulation.history import (
    Branch,
    Change,
    Commit,
    Found,
    Intent,
    Restore,
    Version,
    Violation,
    check_commit,
    check_commits,
    extends,
    in_doubt,
    insert_version,
    seq_of,
    shows,
    tokens_of,
)
from flagstone.types import Row


class Oracle:
    """The history of one database. Every method raises `Violation` if the history is impossible."""

    def __init__(self) -> None:
        self.trunk: dict[bytes, list[Version]] = {}
        self.branches: list[Branch] = []
        self._joined: dict[int, Intent] = {}
        self._loads: list[Intent] = []
        """Bulk loads that a writer may add at any time."""
        self._load_floors: dict[int, int] = {}
        """For each bulk load: the write that was the last acknowledged one before the load was added."""
        self.restores: list[Restore] = []
        self.acknowledged_seq: int = 0
        self.acknowledged: int = 0
        self.reads: int = 0

    def start_with(self, rows: Iterable[Row], seq: int) -> None:
        """The database begins with these rows, which are durable: it is a clone."""
        for row in rows:
            self.trunk[row.key] = [Version(min(row.seq, seq), "put", row.value, row.expires_ms)]
        self.acknowledged_seq = seq

    def keys(self) -> set[bytes]:
        """Every key that was ever written."""
        restored = (key for restore in self.restores for key in restore.rows)
        return {*self.trunk, *restored, *(key for branch in self.branches for key in branch.versions)}

    # -- writers ------------------------------------------------------------------------------------------

    def opened(self, epoch: int, last_seq: int) -> Branch:
        """A writer has opened the database and starts at that sequence number."""
        branch = Branch(epoch, last_seq)
        later = [other for other in self.branches if other.epoch >= epoch]
        if any(other.epoch == epoch for other in later):
            raise Violation(f"two writers have epoch {epoch}")
        if later:
            # It was replaced before its opening returned. Nothing that it writes can become durable.
            branch.joined = True
            self.branches.append(branch)
            self.branches.sort(key=lambda each: each.epoch)
            return branch
        if last_seq < self.acknowledged_seq:
            raise Violation(
                f"write {self.acknowledged_seq} was acknowledged as durable, but the writer of epoch {epoch} "
                f"starts at {last_seq}"
            )
        before = self.latest
        if before is not None:
            self._join(before, last_seq)
        self.branches.append(branch)
        return branch

    def restored(self, epoch: int, seq: int, rows: Iterable[Row]) -> None:
        """An older state is the current one, under a sequence number above all that were used."""
        before = self.latest
        if before is not None:
            if epoch <= before.epoch:
                raise Violation(f"epoch {epoch} restored a checkpoint after epoch {before.epoch} had opened")
            if seq <= self.acknowledged_seq:
                raise Violation(
                    f"a restore has the sequence number {seq}, but {self.acknowledged_seq} was used before"
                )
            self._join(before, seq - 1)
        self.branches.append(Branch(epoch, seq, audited=True))
        self.restores.append(
            Restore(seq, {row.key: Version(row.seq, "put", row.value, row.expires_ms) for row in rows})
        )
        self.acknowledged_seq = seq

    @property
    def latest(self) -> Branch | None:
        """The branch of the newest writer."""
        return self.branches[-1] if self.branches else None

    def begin(self, branch: Branch, changes: Iterable[Change]) -> Intent:
        """A write is about to be made."""
        intent = Intent(tuple(changes))
        branch.open_intents.append(intent)
        return intent

    def settle(self, branch: Branch, intent: Intent, seq: int) -> None:
        """The write has that sequence number."""
        if seq in branch.intents or seq <= branch.base_seq:
            raise Violation(f"sequence number {seq} was given out twice in epoch {branch.epoch}")
        branch.open_intents.remove(intent)
        intent.seq = seq
        branch.intents[seq] = intent
        for change in intent.changes:
            insert_version(branch.versions, change, seq)
            check_commits(branch, change.key, seq)

    def begin_load(self, changes: Iterable[Change], seq: int) -> Intent:
        """A bulk load waits for a writer that adds it."""
        intent = Intent(tuple(changes), planned_seq=seq)
        self._loads.append(intent)
        self._load_floors[seq] = self.acknowledged_seq
        return intent

    def drop_load(self, intent: Intent) -> None:
        """The bulk load was given up: it must never appear."""
        if intent in self._loads:
            self._loads.remove(intent)
            intent.dropped = True

    def finish_load(self, intent: Intent) -> None:
        """The bulk load is in the database, and durable."""
        if intent not in self._loads:
            return
        seq, latest = intent.planned_seq, self.latest
        assert seq is not None, "a bulk load knows its sequence number"
        self._loads.remove(intent)
        intent.seq = seq
        if latest is None or seq <= latest.base_seq:
            target = self.trunk
            self._joined[seq] = intent
        else:
            target = latest.versions
            latest.intents[seq] = intent
        for change in intent.changes:
            insert_version(target, change, seq)
        if target is self.trunk and latest is not None and latest.found is not None:
            # The writer had found the load. A delete in doubt may have been above it.
            before = self._since_audit(latest)
            doubtful = {change.key for change in intent.changes if in_doubt(before, change.key)}
            self._adopt(latest, doubtful, latest.found)
        if self.acknowledged_seq < seq:
            self._load_floors[seq] = self.acknowledged_seq
            self.acknowledged_seq = seq

    def renumber_load(self, intent: Intent, seq: int) -> None:
        """The database had passed the number of the load, which is offered under another one. None of it is visible."""
        assert intent.planned_seq is not None, "a bulk load knows its sequence number"
        if intent not in self._loads:
            raise Violation(f"load {intent.planned_seq} was found in the database and then offered again")
        self._load_floors.pop(intent.planned_seq, None)
        intent.planned_seq = seq
        self._load_floors[seq] = self.acknowledged_seq

    def settle_claimed_load(self, branch: Branch, intent: Intent, seq: int) -> None:
        """A range delete, or a load that claimed the database, is in it. The next writer may have shown that before."""
        if intent.seq is not None:
            return
        self.acknowledge(branch, seq)
        if not branch.joined:
            self.settle(branch, intent, seq)
            return
        self._settle_late(branch, intent, seq)
        for change in intent.changes:  # the replaced writer sees it, too
            insert_version(branch.versions, change, seq)

    def drop(self, branch: Branch, intent: Intent) -> None:
        """The write was refused: it must never appear."""
        branch.open_intents.remove(intent)
        intent.dropped = True

    def acknowledge(self, branch: Branch, seq: int) -> None:
        """The writer reported everything up to that sequence number as durable."""
        self.acknowledged += 1
        following = next((other for other in self.branches if other.epoch > branch.epoch), None)
        if following is None:
            self.acknowledged_seq = max(self.acknowledged_seq, seq)
        elif seq > following.base_seq:
            raise Violation(
                f"the writer of epoch {branch.epoch} acknowledged write {seq}, but the writer of epoch "
                f"{following.epoch} starts at {following.base_seq}"
            )

    def writes(self) -> dict[int, Intent]:
        """Every write of the trunk and of the newest writer by its sequence number."""
        latest = self.latest
        return {**self._joined, **({} if latest is None else latest.intents)}

    def doubtful(self) -> list[Intent]:
        """The writes whose outcome is unknown."""
        return [*self._loads, *(intent for branch in self.branches for intent in branch.open_intents)]

    def _join(self, branch: Branch, last_seq: int) -> None:
        branch.joined = True
        lost = self._doubt_below_load(branch, last_seq)
        self._joined |= {seq: intent for seq, intent in branch.intents.items() if seq <= last_seq}
        for key, versions in branch.versions.items():
            kept = [version for version in versions if version.seq <= last_seq and version.seq not in lost]
            if kept:
                self.trunk.setdefault(key, []).extend(kept)

    def _doubt_below_load(self, branch: Branch, last_seq: int) -> set[int]:
        """Writes of which `last_seq` does not tell whether they were lost; they are in doubt from now on.

        A new writer that finds a waiting bulk load adds it when it opens. Then it starts above the load, however many
        writes of the former writer were lost.
        """
        floor, load_seq = self._gap_below_load(branch, last_seq)
        doubtful = {seq for seq in branch.intents if floor < seq < load_seq}
        for seq in sorted(doubtful):
            branch.open_intents.append(branch.intents.pop(seq))
        return doubtful

    def _gap_below_load(self, branch: Branch, last_seq: int) -> tuple[int, int]:
        """Between which sequence numbers writes of the branch may be lost, because another writer added a bulk load."""
        own = max(
            (seq for seq in branch.intents if seq <= last_seq and seq not in self._load_floors), default=0
        )
        # The branch's writer added loads below its later writes; of the others the first is without the lost writes.
        first = max(own, branch.base_seq)
        added = [seq for seq, floor in self._load_floors.items() if max(first, floor) < seq <= last_seq]
        load_seq = min(added, default=0)
        return (max(self._load_floors[load_seq], branch.base_seq), load_seq) if load_seq else (0, 0)

    # -- reads --------------------------------------------------------------------------------------------

    def expect(
        self, branch: Branch, key: bytes, value: bytes | None, seqs: tuple[int, int], now: tuple[int, int]
    ) -> None:
        """A read of `key`, at a sequence number between the two and at a time between the two, gave `value`."""
        self.reads += 1
        if value in self._known_values(branch, key, seqs, now):
            return
        if not self._explained(branch, key, value, seqs, now):
            shown = [self._fold(branch, key, seq, now[1]) for seq in self._candidates(branch, key, *seqs)]
            raise Violation(
                f"epoch {branch.epoch} shows {value!r} for {key!r} at sequence numbers {seqs}; expected one of {shown}"
            )

    def expect_all(
        self, branch: Branch, rows: dict[bytes, bytes], seqs: tuple[int, int], now: tuple[int, int]
    ) -> None:
        """A scan of everything gave these rows."""
        restored = self.restores[-1].rows if self.restores else ()
        keys = {*rows, *self.trunk, *restored, *branch.versions}
        for key in sorted(keys):
            self.expect(branch, key, rows.get(key), seqs, now)

    def audit(self, branch: Branch, rows: list[Row], now: tuple[int, int]) -> None:
        """The new writer's rows, expired ones included, right after it opened. Settles writes in doubt."""
        if self.latest is branch:
            self._settle_doubts(self._since_audit(branch), rows, branch.base_seq)
            branch.audited = True
        shown = {row.key: row.value for row in rows if row.expires_ms is None or row.expires_ms > now[0]}
        self.expect_all(branch, shown, (branch.base_seq, branch.base_seq), now)
        if self.latest is branch:
            branch.found = Found(shown, now)
            restored = self.restores[-1].rows if self.restores else ()
            self._adopt(branch, {*shown, *self.trunk, *restored}, branch.found)

    def _adopt(self, branch: Branch, keys: Collection[bytes], found: Found) -> None:
        """Take what writes in doubt have made of a key as its value. A delete leaves no row that would settle it."""
        for key in sorted(keys):
            value = found.rows.get(key)
            if all(self._fold(branch, key, branch.base_seq, now_ms) != value for now_ms in found.now):
                change = Change("delete", key) if value is None else Change("put", key, value)
                insert_version(self.trunk, change, branch.base_seq)

    def check_isolation(self, branch: Branch, commit: Commit) -> None:
        """A transaction has committed: no other write of what it depends on lies between its start and its end.

        It depends on the keys that it wrote and, if it is serializable, on those that it read. docs/simulation.md
        shows why this excludes every cycle. A write that is settled later is compared with the commit then.
        """
        insort(branch.commits, commit, key=lambda each: each.end)
        for key in sorted(branch.versions) if commit.scanned is not None else sorted(commit.keys):
            for version in branch.versions.get(key, ()):
                check_commit(commit, key, version.seq)

    def _since_audit(self, branch: Branch) -> list[Branch]:
        """The branches before this one whose writes in doubt may be in the database."""
        found: list[Branch] = []
        for other in reversed([each for each in self.branches if each.epoch < branch.epoch]):
            found.append(other)
            if other.audited:
                break
        return found

    def _settle_doubts(self, before: list[Branch], rows: list[Row], last_seq: int) -> None:
        for row in rows:
            for intent in list(self._loads):
                if row.seq == intent.planned_seq and any(shows(change, row) for change in intent.changes):
                    self.finish_load(intent)
            if row.seq > last_seq or row.seq in self._joined:
                continue
            for other in before:
                for intent in list(other.open_intents):
                    if any(shows(change, row) for change in intent.changes):
                        self._settle_late(other, intent, row.seq)

    def _settle_late(self, before: Branch, intent: Intent, seq: int) -> None:
        before.open_intents.remove(intent)
        intent.seq = seq
        before.intents[seq] = self._joined[seq] = intent
        for change in intent.changes:
            insert_version(self.trunk, change, seq)
            check_commits(before, change.key, seq)

    def _known_values(
        self, branch: Branch, key: bytes, seqs: tuple[int, int], now: tuple[int, int]
    ) -> Iterator[bytes | None]:
        """The values that writes without doubt may show, also if another writer has added a bulk load above them."""
        for seq in self._candidates(branch, key, *seqs):
            for now_ms in now:
                yield self._fold(branch, key, seq, now_ms)
        floor, load_seq = self._gap_below_load(branch, seqs[0])
        for cut in range(len(branch.versions.get(key, ())) if load_seq else 0):
            lost = {each.seq for each in branch.versions[key][cut:] if floor < each.seq < load_seq}
            for now_ms in now:
                yield self._fold(branch, key, seqs[0], now_ms, lost)

    def _candidates(self, branch: Branch, key: bytes, low: int, high: int) -> list[int]:
        return [low, *(version.seq for version in branch.versions.get(key, ()) if low < version.seq <= high)]

    def _fold(
        self, branch: Branch, key: bytes, seq: int, now_ms: int, lost: Collection[int] = ()
    ) -> bytes | None:
        own = branch.versions.get(key, [])
        if lost:
            own = [version for version in own if version.seq not in lost]
        shared = self.trunk.get(key, [])
        base_end = bisect_right(shared, min(seq, branch.base_seq), key=seq_of)
        # A writer that has reached the number of a bulk load has added it, also if a later writer's audit put it on
        # the trunk.
        loaded = [
            version
            for version in shared[base_end : bisect_right(shared, seq, key=seq_of)]
            if version.seq in self._load_floors and version.seq not in branch.intents
        ]
        stack = [*shared[:base_end], *own[: bisect_right(own, seq, key=seq_of)]]
        if loaded:
            stack = sorted([*stack, *loaded], key=seq_of)
        restore = next(
            (each for each in reversed(self.restores) if each.seq <= min(seq, branch.base_seq)), None
        )
        if restore is not None:
            kept = [version for version in stack if version.seq > restore.seq]
            stack = [restore.rows[key], *kept] if key in restore.rows else kept
        operands: list[bytes] = []
        base: bytes | None = None
        while stack:
            version = stack.pop()
            if version.kind == "merge":
                operands.append(version.value)
                continue
            if version.kind == "put" and (version.expires_ms is None or version.expires_ms > now_ms):
                base = version.value
            break
        if not operands:
            return base
        return (base or b"") + b"".join(reversed(operands))

    def _explained(
        self, branch: Branch, key: bytes, value: bytes | None, seqs: tuple[int, int], now: tuple[int, int]
    ) -> bool:
        """Whether writes in doubt, or under way, explain the value."""
        before = (
            self._since_audit(branch)
            if seqs[0] >= branch.base_seq
            else [other for other in self.branches if other.epoch < branch.epoch]
        )
        loads = [load for load in self._loads if load.planned_seq is not None and load.planned_seq <= seqs[1]]
        doubtful = in_doubt([branch, *before], key)
        doubtful += [change for load in loads for change in load.changes if change.key == key]
        if not doubtful:
            return False
        if value is None:
            return any(change.kind == "delete" or change.expires_ms is not None for change in doubtful)
        tokens = {change.value for change in doubtful if change.kind == "merge"}
        bases = {change.value for change in doubtful if change.kind == "put"}
        parts = tokens_of(value)
        known = b"".join(part for part in parts if part not in tokens)
        if known in bases or any(base and known.startswith(base) for base in bases):
            return True
        if not known and any(change.kind == "delete" for change in doubtful):
            return True
        folds = list(self._known_values(branch, key, seqs, now))
        return any(extends(fold or b"", parts, tokens) for fold in folds) or any(
            change.kind == "delete" and fold is not None and fold.endswith(known)
            for change in doubtful
            for fold in folds
        )
