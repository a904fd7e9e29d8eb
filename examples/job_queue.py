"""A job queue in one database: jobs are taken in order, and a worker that dies loses its job to another one.

    python examples/job_queue.py

There is no other server. A job is one row under `("job", number)`. A worker takes the first job without a lease, in a
transaction, by writing a lease that expires: if the worker finishes, it deletes the job and the lease; if it dies, the
lease expires and the next worker takes the job. So every job runs at least once.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import flagstone
from flagstone import keys

LEASE = timedelta(seconds=1)
NEXT = keys.encode("next")


class Job(NamedTuple):
    number: int
    work: dict[str, Any]


class Queue:
    """Jobs in a database. All workers of the process that has it open may share one queue."""

    def __init__(self, db: flagstone.Db) -> None:
        self._db = db

    def add(self, work: dict[str, Any]) -> int:
        """Append a job, and return its number when it is durable."""

        def append(tx: flagstone.Transaction) -> int:
            number = int(tx.get(NEXT, b"0"))
            tx.put(NEXT, b"%d" % (number + 1))
            tx.put(keys.encode("job", number), json.dumps(work).encode())
            return number

        number = self._db.run(append)
        self._db.flush("wal")
        return number

    def take(self, worker: str) -> Job | None:
        """Lease the first job that has no lease; None if there is none. Two workers never lease one job."""

        def lease(tx: flagstone.Transaction) -> Job | None:
            for key, value in tx.scan(prefix=keys.encode("job")):
                _, number = keys.decode(key)
                leased = keys.encode("lease", number)
                if tx.get(leased) is None:
                    tx.put(leased, worker.encode(), ttl=LEASE)
                    return Job(number, json.loads(value))
            return None

        return self._db.run(lease, isolation="serializable")

    def finish(self, job: Job) -> None:
        """Remove a job that is done. Finishing it again changes nothing."""
        with self._db.batch(await_durable=True) as batch:
            batch.delete(keys.encode("job", job.number))
            batch.delete(keys.encode("lease", job.number))

    def waiting(self) -> int:
        return self._db.count(prefix=keys.encode("job"))


def work_off(queue: Queue, worker: str) -> Iterator[int]:
    """Run jobs until there is none to take."""
    while (job := queue.take(worker)) is not None:
        if job.work.get("fatal") == worker:
            return  # this worker dies here, with a lease and without a word
        yield job.number
        queue.finish(job)


def main(folder: Path) -> None:
    with flagstone.open(folder / "queue") as db:
        queue = Queue(db)
        for number in range(20):
            queue.add(
                {"mail": f"customer-{number}@example.org"} | ({"fatal": "worker-0"} if number == 0 else {})
            )
        with ThreadPoolExecutor(4) as pool:
            # One worker alone takes job 0 and dies; then four work at once.
            assert list(work_off(queue, "worker-0")) == []
            done = pool.map(lambda name: list(work_off(queue, name)), [f"worker-{n}" for n in range(1, 5)])
            first = sorted(number for numbers in done for number in numbers)
        print(f"four workers ran {len(first)} jobs, each once; {queue.waiting()} is leased by a dead worker")
        assert first == list(range(1, 20))
        time.sleep(LEASE.total_seconds() + 0.1)
        rest = list(work_off(queue, "worker-5"))
        assert rest == [0]
        assert queue.waiting() == 0
    with flagstone.open_reader(folder / "queue") as reader:
        assert reader.count(prefix=keys.encode("job")) == 0
    print("after its lease had expired, another worker ran the last job")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
