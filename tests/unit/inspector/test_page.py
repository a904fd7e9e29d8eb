"""The page of `flagstone inspect --output`: its contents and its escaping."""

from __future__ import annotations

from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest

import flagstone
from flagstone import Admin, Settings
from flagstone.inspector.page import lanes, render
from flagstone.inspector.snapshot import DatabaseSnapshot, take_snapshot
from flagstone.store.local import LocalStore
from golden.corpus import GoldenDatabase, databases
from unit.cli.running import Flagstone

QUIET = Settings(compactor_options=None, garbage_collector_options=None)


class Tags(HTMLParser):
    """Counts tags, collects texts, and checks that every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    with flagstone.open(folder, settings=QUIET) as db:
        for number in range(4):
            db.put(b"k%d" % number, b"secret value")
            db.put(b"<script>alert(1)</script>", b"x")
            db.flush()
        db.checkpoint(name="<b>bold</b>", lifetime=timedelta(hours=1))
    return folder


def seen_at(folder: Path) -> DatabaseSnapshot:
    return take_snapshot(LocalStore(folder.parent), None, folder.name, jobs=True)


def test_the_page_shows_ssts_runs_jobs_checkpoints_and_sizes(shop: Path) -> None:
    before = Tags(render(seen_at(shop)))
    assert before.seen.count("rect") == 4
    Admin(shop).compact(full=True)
    after = Tags(render(seen_at(shop)))
    assert after.seen.count("rect") == 1
    texts = " ".join(after.texts)
    for wanted in (
        "run 0",
        "completed",
        "4 of L0, 0 runs → run 0",
        "compacted",
        "a month on S3",
        "<b>bold</b>",
    ):
        assert wanted in texts


def test_keys_are_escaped_and_values_are_not_shown(shop: Path) -> None:
    page = render(seen_at(shop))
    assert "<script" not in page
    assert "<b>" not in page
    assert "secret" not in page


def test_lanes_are_in_read_order(shop: Path) -> None:
    manifest = seen_at(shop).manifest.value
    assert [lane.ssts[0][0] for lane in lanes(manifest, manifest.tree)] == list(manifest.tree.l0)


@pytest.mark.parametrize("database", databases(), ids=lambda database: database.name)
def test_every_golden_database_has_a_page(database: GoldenDatabase) -> None:
    seen = take_snapshot(LocalStore(database.store), None, database.path, jobs=True)
    tags = Tags(render(seen))
    assert tags.seen.count("rect") == sum(1 for _ in seen.manifest.value.views)


def test_the_command_writes_a_file(shop: Path, tmp_path: Path) -> None:
    cli = Flagstone(shop)
    file = tmp_path / "shop.html"
    assert cli.json("inspect", "--output", str(file)) == {"written": str(file)}
    assert "shop" in file.read_text(encoding="utf-8")
    assert "no database" in cli.refused("inspect", path=tmp_path / "nothing")
