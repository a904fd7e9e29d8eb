"""`verify` reports damage with object and offset, and reports no damage of sound objects."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagstone import Admin, InvalidRequest
from flagstone.format.sst_info import SstType
from flagstone.store.paths import DbPaths
from flagstone.store.resolve import resolve
from flagstone.verification.report import Report
from flagstone.verification.ssts import LocalChecker, SstCheck, Subject, plan_batches
from golden.corpus import DATA
from kit.databases import World, numbered


def verify(folder: Path) -> Report:
    return Admin("db", store=str(folder)).verify()


@pytest.fixture
def compaction(tmp_path: Path) -> Path:
    """A copy of a database with sorted runs, an L0, tombstones, WAL files and compactions files."""
    shutil.copytree(DATA / "compaction", tmp_path / "store")
    return tmp_path / "store"


def referenced_sst(folder: Path) -> Path:
    """An SST that the latest manifest refers to: its loss is damage."""
    for sst in sorted((folder / "db/compacted").iterdir()):
        hidden = sst.rename(sst.with_suffix(".hidden"))
        lost = not verify(folder).ok
        hidden.rename(sst)
        if lost:
            return sst
    raise AssertionError("no referenced SST")


def change_byte(file: Path, offset: int, bits: int = 0xFF) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= bits
    file.write_bytes(data)


def test_a_flipped_byte_in_an_sst_is_reported_with_object_and_offset(compaction: Path) -> None:
    sst = referenced_sst(compaction)
    change_byte(sst, 20)

    report = verify(compaction)

    assert not report.ok
    finding = report.damage[0]
    assert finding.object == f"db/compacted/{sst.name}"
    assert finding.offset == 0, "block 0 begins there; its checksum covers byte 20"
    assert "checksum" in finding.problem


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=40)
def test_any_changed_byte_of_an_sst_or_wal_file_is_reported(data: st.DataObject) -> None:
    files = sorted((DATA / "basic/db/wal").iterdir()) + sorted((DATA / "basic/db/compacted").iterdir())
    chosen = data.draw(st.sampled_from([file for file in files if file.stat().st_size > 10]))
    offset = data.draw(st.integers(0, chosen.stat().st_size - 1))
    bits = data.draw(st.integers(1, 255))
    from flagstone.store.memory import MemoryStore

    store = MemoryStore()
    for file in (DATA / "basic").rglob("*"):
        if file.is_file() and file.name != "expected.json":
            content = bytearray(file.read_bytes())
            if file == chosen:
                content[offset] ^= bits
            store.put(str(file.relative_to(DATA / "basic")), bytes(content))

    report = Admin("db", store=store).verify()

    assert [finding.object for finding in report.damage] != []
    assert {finding.object for finding in report.damage} == {str(chosen.relative_to(DATA / "basic"))}


def test_a_missing_sst_is_damage_that_names_the_manifest_referring_to_it(compaction: Path) -> None:
    sst = referenced_sst(compaction)
    sst.unlink()
    problems = [str(finding) for finding in verify(compaction).damage]
    assert any(sst.name in problem and "refers to it" in problem for problem in problems)


def test_a_truncated_sst_is_damage(compaction: Path) -> None:
    sst = referenced_sst(compaction)
    sst.write_bytes(sst.read_bytes()[:-3])
    assert [finding.object for finding in verify(compaction).damage] == [f"db/compacted/{sst.name}"]


def test_an_sst_replaced_by_another_one_is_damage(compaction: Path) -> None:
    sst = referenced_sst(compaction)
    other = next(file for file in sorted(sst.parent.iterdir()) if file.read_bytes() != sst.read_bytes())
    shutil.copy(other, sst)
    assert any("SsTableInfo differs" in finding.problem for finding in verify(compaction).damage)


def test_a_missing_wal_file_is_damage_that_counts_the_files_behind_it(tmp_path: Path) -> None:
    shutil.copytree(DATA / "crash", tmp_path / "store")
    (tmp_path / "store/db/wal/00000000000000000004.sst").unlink()
    problems = [str(finding) for finding in verify(tmp_path / "store").damage]
    assert problems == [
        "damage: db/wal/00000000000000000004.sst: missing; replay stops here, 1 files before the end"
    ]


def test_a_wal_file_out_of_order_is_damage(tmp_path: Path) -> None:
    shutil.copytree(DATA / "crash", tmp_path / "store")
    wal = tmp_path / "store/db/wal"
    shutil.copy(wal / "00000000000000000004.sst", wal / "00000000000000000005.sst")
    assert any(
        "begins at sequence number" in finding.problem for finding in verify(tmp_path / "store").damage
    )


def test_a_manifest_of_an_unknown_version_is_damage(compaction: Path) -> None:
    newest = max((compaction / "db/manifest").iterdir())
    change_byte(newest, 1, 0x10)
    report = verify(compaction)
    assert report.damage[0].object == f"db/manifest/{newest.name}"
    assert "version" in report.damage[0].problem


def test_a_missing_checkpointed_manifest_is_damage(tmp_path: Path) -> None:
    shutil.copytree(DATA / "checkpoints", tmp_path / "store")
    (tmp_path / "store/db/manifest/00000000000000000004.manifest").unlink()
    problems = [finding.problem for finding in verify(tmp_path / "store").damage]
    assert any("checkpoint" in problem and "(first)" in problem for problem in problems)


def test_checkpoints_expire_by_the_clock_of_the_admin() -> None:
    world = World()
    world.write("db", numbered(0, 3))
    admin = world.admin()
    kept = admin.create_checkpoint(lifetime=timedelta(hours=1))
    world.write("db", numbered(3, 6))
    path = DbPaths("db").manifest(kept.manifest_id)
    world.store.delete(path)

    assert [(finding.object, finding.problem) for finding in admin.verify().damage] == [
        (path, f"missing, but checkpoint {kept.id} refers to this manifest")
    ]
    world.clock.advance(3_600_000)
    assert admin.verify().ok


def test_a_boundary_above_the_newest_manifest_is_damage(tmp_path: Path) -> None:
    shutil.copytree(DATA / "gc", tmp_path / "store")
    (tmp_path / "store/db/gc/manifest.boundary").write_text("99999")
    assert [finding.object for finding in verify(tmp_path / "store").damage] == ["db/gc/manifest.boundary"]


def test_orphans_and_foreign_files_are_notes(compaction: Path) -> None:
    (compaction / "db/compacted/README.txt").write_text("hello")
    report = verify(compaction)
    assert report.ok
    assert any(finding.object.endswith("README.txt") for finding in report.findings)
    assert {finding.severity for finding in report.findings} == {"note"}


def test_a_lender_without_our_final_checkpoint_is_a_warning(tmp_path: Path) -> None:
    shutil.copytree(DATA / "clone", tmp_path / "store")
    newest = max((tmp_path / "store/parent/manifest").iterdir())
    shutil.copy(tmp_path / "store/parent/manifest/00000000000000000001.manifest", newest)
    report = Admin("child", store=str(tmp_path / "store")).verify()
    assert report.ok
    assert any(
        "lacks checkpoint" in finding.problem for finding in report.findings if finding.severity == "warning"
    )


def test_verifying_an_empty_path_raises_invalid_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no database at"):
        verify(tmp_path)


def test_a_report_as_a_dictionary_has_the_counts_of_objects_and_rows(compaction: Path) -> None:
    described = verify(compaction).to_dict()
    assert described["ok"] is True
    assert described["objects"]["sst"] == 11
    assert described["rows"] == 1851


class ElsewhereChecker:
    """Checks as other machines do: each object on its own, in any order, with pickled results."""

    def __init__(self, folder: Path) -> None:
        store = resolve(folder)
        self._local = LocalChecker(store, store)
        self.seen: list[str] = []

    def check(self, subjects: Sequence[Subject]) -> list[SstCheck | None]:
        found: dict[str, SstCheck | None] = {}
        for subject in reversed(subjects):
            self.seen.append(subject.path)
            pickled = pickle.dumps(next(self._local.check([subject])))
            assert len(pickled) < 2_000, "a result is small for an SST of any size"
            found[subject.path] = pickle.loads(pickled)
        return [found[subject.path] for subject in subjects]


@pytest.mark.parametrize("name", ["compaction", "crash", "checkpoints", "gc", "basic"])
def test_a_remote_checker_gives_the_same_report(name: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / name, tmp_path / "store")
    files = [file for file in (tmp_path / "store/db").rglob("*.sst") if file.stat().st_size > 10]
    for file in sorted(files)[::3]:
        change_byte(file, file.stat().st_size // 2)
    elsewhere = ElsewhereChecker(tmp_path / "store")

    report = Admin("db", store=str(tmp_path / "store")).verify(checker=elsewhere)

    assert report == verify(tmp_path / "store")
    assert sorted(elsewhere.seen) == sorted(
        str(file.relative_to(tmp_path / "store")) for file in (tmp_path / "store/db").rglob("*.sst")
    )


@given(sizes=st.lists(st.integers(0, 1 << 27), max_size=40))
def test_batches_have_at_most_eight_objects_and_64_mib(sizes: list[int]) -> None:
    subjects = [Subject(str(at), SstType.COMPACTED, size) for at, size in enumerate(sizes)]
    batches = list(plan_batches(subjects))
    assert [subject for batch in batches for subject in batch] == subjects
    for batch in batches:
        assert 1 <= len(batch) <= 8
        assert len(batch) == 1 or sum(subject.bytes for subject in batch) <= 1 << 26
