"""Every code block of README.md, CONTRIBUTING.md and docs/ runs as described. `code_blocks.py` has the rules."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from docs.code_blocks import LANGUAGES, PROJECT, REASONS, Page, located, pages, parse, summary
from docs.running import BlockFailed, run_page
from servers.s3 import S3Server

ALL = pages()
SPARK = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
HIDDEN_COMMAND = re.compile(r"^\s*(?:flagstone |pip install|import |from \S+ import |>>> )", re.MULTILINE)


def marks_of(page: Page) -> list[pytest.MarkDecorator]:
    slow = page.needs_spark or page.needs_a_shell or page.on_s3
    # The README runs with every change; other pages on Spark take a minute each and run in `make long`.
    long = page.needs_spark and page.name != "README.md"
    return [
        *([pytest.mark.slow] if slow else []),
        *([pytest.mark.long] if long else []),
        *(SPARK if page.needs_spark else []),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=page.name, marks=marks_of(page)) for page in ALL])
def test_the_blocks_of_a_page_run_in_order(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__page__"}
    if page.needs_spark:
        namespace["spark"] = request.getfixturevalue("spark")
    if page.on_s3:
        reach(request.getfixturevalue("s3_server"), monkeypatch)

    run_page(page, tmp_path, namespace)


def reach(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the address of the server and the credentials in the environment, as an operator does."""
    variables = {
        "AWS_ENDPOINT": server.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": server.region,
        "AWS_ACCESS_KEY_ID": server.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for bucket in ("bucket", "bucket-wal"):
        with urllib.request.urlopen(urllib.request.Request(f"{server.endpoint}/{bucket}", method="PUT")):
            pass


def test_every_code_block_names_its_language() -> None:
    for block in (block for page in ALL for block in page.shown):
        assert block.language in LANGUAGES, (
            f"{block.position} is {block.language!r}; use one of {sorted(LANGUAGES)}"
        )
        if block.language == "text":
            assert not HIDDEN_COMMAND.search(block.code), (
                f"{block.position} could be run: make it python or sh"
            )


def test_every_reason_to_skip_a_block_is_listed_and_used() -> None:
    given = {
        block.not_run: block.position for page in ALL for block in page.blocks if block.not_run is not None
    }

    assert set(given) <= set(REASONS), given
    assert set(REASONS) <= set(given), "a reason that no block uses any more"


def test_the_summary_counts_the_blocks_and_more_than_fifty_run(capsys: pytest.CaptureFixture[str]) -> None:
    print(summary())

    assert re.match(r"\d+ code blocks on \d+ pages", capsys.readouterr().out)
    assert sum(block.runs for page in ALL for block in page.shown) > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nassert 1 == 2\n```\n", "AssertionError"),
        ("<!-- ends with: KeyError -->\n```python\npass\n```\n", "no KeyError came"),
        ('```python\nprint(1)\n```\n```text title="Output"\n2\n```\n', "the block before printed"),
        ("```sh\nfalse\n```\n", "exit code 1"),
        ("```sh\nflagstone --path s3://bucket/nothing stats\n```\n", "no database at"),
        ("```toml\nno toml\n```\n", "is not toml"),
        (
            "<!-- services -->\n```sh\nflagstone --path s3://bucket/nothing run-compactor\n```\n",
            "ended with 2",
        ),
    ],
)
def test_a_page_with_a_wrong_block_fails(text: str, complaint: str, tmp_path: Path) -> None:
    page = parse(PROJECT / "docs/wrong.md", text)

    with pytest.raises(BlockFailed, match=complaint):
        run_page(page, tmp_path, {})


def test_blocks_of_a_page_share_names_and_files(tmp_path: Path) -> None:
    text = (
        "<!-- prepare\nlimit = 1\n-->\n"
        '```toml title="SlateDb.toml"\nflush_interval = "1s"\n```\n'
        "```python\nfrom flagstone import Settings\ns = Settings.load(folder)\nprint(s.flush_interval, limit)\n```\n"
        '```text title="Output"\n0:00:01 1\n```\n'
        "<!-- not run: make -->\n```sh\nmake nothing\n```\n"
    )

    run_page(parse(PROJECT / "docs/right.md", text), tmp_path, {"folder": tmp_path})


def test_bucket_urls_and_tmp_in_blocks_become_folders() -> None:
    assert located('open("s3://bucket/shop")', Path("/x")) == 'open("/x/bucket/shop")'
    assert located("--store gs://other --path /tmp/shop", Path("/x")) == "--store /x/other --path /x/tmp/shop"
    assert located("/data/tmp/shop", Path("/x")) == "/data/tmp/shop"
    assert (
        located("sqlite:///tmp/a.db s3://bucket", Path("/x"), buckets=False)
        == "sqlite:///x/tmp/a.db s3://bucket"
    )
