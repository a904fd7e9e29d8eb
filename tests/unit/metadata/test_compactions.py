"""The compactions file: life cycle, edits and how version 1 is read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagstone.errors import CorruptData, InternalError
from flagstone.format import flat
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.tree import BytesRange
from flagstone.metadata.compactions import (
    Compactions,
    DrainSpec,
    Job,
    JobContext,
    JobStatus,
    Subcompaction,
    TieredSpec,
    Worker,
    add_job,
    decode_compactions,
    edit_job,
    encode_compactions,
    may_follow,
    trim_finished,
)
from flagstone.metadata.manifest import SsTable
from flagstone.metadata.manifest_codec import ULID
from flagstone.types import KeyRange, RunId, Seq, Ulid

SPEC = TieredSpec((Ulid(5), Ulid(4)), (RunId(7), RunId(3)), RunId(3), b"seg")
SST = SsTable(Ulid(9 << 80), SsTableInfo(b"a", b"z", 10, 5, 10, 0))


def job(number: int, status: JobStatus = JobStatus.SUBMITTED) -> Job:
    return Job(Ulid(number), SPEC, status)


def test_an_empty_compactions_file_has_the_known_bytes() -> None:
    expected = "00020c0000000800080000000400080000000400000000000000"
    assert encode_compactions(Compactions()).hex() == expected
    assert decode_compactions(bytes.fromhex(expected)) == Compactions()


def test_an_encoded_compactions_file_decodes_to_the_same_jobs() -> None:
    context = JobContext(
        (Subcompaction(BytesRange.of(KeyRange(None, b"m")), (SST,)), Subcompaction(BytesRange())), Seq(77)
    )
    held = Compactions(
        3,
        (
            Job(Ulid(1), SPEC, JobStatus.COMPACTED, (SST,), Worker("w", 99)),
            Job(Ulid(2), DrainSpec(b"seg", (Ulid(8),), (RunId(1),)), JobStatus.FAILED),
            Job(Ulid(3), SPEC, JobStatus.RUNNING, (), Worker("", 0), context),
        ),
    )
    assert decode_compactions(encode_compactions(held)) == held


def test_jobs_are_read_in_order_of_their_ids() -> None:
    held = Compactions(0, (job(2), job(1)))
    assert [entry.id for entry in decode_compactions(encode_compactions(held)).jobs] == [1, 2]


@pytest.mark.parametrize("status", [JobStatus.SUBMITTED, JobStatus.SCHEDULED, JobStatus.RUNNING])
def test_outputs_of_an_unfinished_job_are_ignored(status: JobStatus) -> None:
    held = Compactions(0, (replace(job(1, status), output_ssts=(SST,)),))
    assert decode_compactions(encode_compactions(held)).jobs[0].output_ssts == ()


def test_a_file_of_version_1_gets_its_destinations_from_the_sources() -> None:
    without_runs = replace(job(2), spec=replace(SPEC, sorted_runs=(), destination=RunId(6)))
    data = encode_compactions(
        Compactions(0, (replace(job(1), spec=replace(SPEC, destination=RunId(9))), without_runs))
    )
    old = decode_compactions(b"\0\1" + data[2:])
    assert [entry.spec.destination for entry in old.jobs if isinstance(entry.spec, TieredSpec)] == [3, 0]
    drain = Compactions(0, (Job(Ulid(1), DrainSpec(b"s")),))
    assert decode_compactions(b"\0\1" + encode_compactions(drain)[2:]) == drain


def test_sources_in_the_deprecated_field_are_read() -> None:
    old_spec = flat.Shape[tuple[object, ...]](
        *(
            "TieredCompactionSpec",
            flat.Children(ULID),
            flat.Numbers(),
            flat.Children(ULID),
            flat.Bytes(),
            flat.U32,
        ),
        make=tuple,
        take=lambda values: values,
    )
    old_job = flat.Shape[tuple[object, ...]](
        *("Compaction", flat.Child(ULID, required=True), flat.U8, flat.Union({1: old_spec}), flat.I8),
        make=tuple,
        take=lambda values: values,
    )
    old_file = flat.Shape[tuple[object, ...]](
        "CompactionsV1", flat.U64, flat.Children(old_job), make=tuple, take=lambda values: values
    )
    data = flat.encode(old_file, (4, [(Ulid(1), 1, ([Ulid(5)], None, None, None, 2), 99)]))
    expected = Job(Ulid(1), TieredSpec((Ulid(5),), (), RunId(2)), JobStatus.SUBMITTED)
    assert decode_compactions(b"\0\2" + data) == Compactions(4, (expected,))


@pytest.mark.parametrize(
    ("data", "problem"), [(b"\0", "cut off"), (b"\0\3" + bytes(30), "version 3"), (b"\0\2", "holds no table")]
)
def test_bytes_that_are_no_compactions_file_raise_corrupt_data(data: bytes, problem: str) -> None:
    with pytest.raises(CorruptData, match=problem):
        decode_compactions(data)


def test_a_job_may_take_every_step_of_its_life_cycle_and_none_after_the_last() -> None:
    path = [
        JobStatus.SUBMITTED,
        JobStatus.SCHEDULED,
        JobStatus.RUNNING,
        JobStatus.COMPACTED,
        JobStatus.COMPLETED,
    ]
    held = add_job(Compactions(), job(1))
    for status in path:
        held = edit_job(held, Ulid(1), lambda entry, status=status: replace(entry, status=status))
    assert held.jobs[0].status is JobStatus.COMPLETED
    assert not any(may_follow(JobStatus.COMPLETED, status) for status in JobStatus if not status.finished)


def test_a_step_outside_of_the_life_cycle_is_refused() -> None:
    held = add_job(Compactions(), job(1))
    with pytest.raises(InternalError, match="SUBMITTED to COMPACTED"):
        edit_job(held, Ulid(1), lambda entry: replace(entry, status=JobStatus.COMPACTED))
    with pytest.raises(InternalError, match="not in the compactions file"):
        edit_job(held, Ulid(2), lambda entry: entry)


def test_jobs_are_added_once_and_kept_in_order() -> None:
    held = add_job(add_job(Compactions(), job(2)), job(1))
    assert [entry.id for entry in held.jobs] == [1, 2]
    assert add_job(held, job(2, JobStatus.FAILED)) is held
    assert held.newest_job == 2
    assert Compactions().newest_job is None


def test_trimming_keeps_only_the_newest_finished_job() -> None:
    statuses = [JobStatus.COMPLETED, JobStatus.RUNNING, JobStatus.FAILED, JobStatus.SUBMITTED]
    held = Compactions(0, tuple(job(number, status) for number, status in enumerate(statuses)))
    assert [entry.id for entry in trim_finished(held).jobs] == [1, 2, 3]
    assert trim_finished(Compactions()) == Compactions()
