"""The code blocks of README.md and docs/, and the directives by which a page controls how tests run them.

A page is run from top to bottom in one namespace and one folder. The language of a block decides what happens:

    python          executed
    sh              run by bash, with `flagstone` on the path; every command must succeed
    toml json yaml  must parse; with title="NAME" it is written to that file, for the blocks below
    text            not run; with title="Output" it is the expected output of the block before

HTML comments, which the site does not show, are directives:

    <!-- prepare ... -->             Python that prepares the next blocks; runs in order, like a block
    <!-- not run: REASON -->         the next block is not run; REASON is one of `REASONS`
    <!-- ends with: ERROR -->        the next block ends by raising this
    <!-- services -->                every line of the next block runs until it gets a signal

`s3://bucket` and similar URLs, and `/tmp`, stand for folders of the test: `located` replaces them. A page with
`<!-- page: on S3 -->` keeps its buckets and talks to an S3 server.

`python tests/docs/code_blocks.py` counts the blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]

REASONS = {
    "cluster": "needs a cluster, or a service of a cloud",
    "installation": "installs packages",
    "Spark": "needs a Spark session on a page without one",
    "serves": "a server that runs until Ctrl-C",
    "make": "a target of the Makefile, which the tests are part of",
}
"""The allowed reasons for a block that is not run."""

RUNNABLE = frozenset(["python", "sh"])
FILES = frozenset(["json", "toml", "yaml"])
LANGUAGES = RUNNABLE | FILES | {"text"}

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$"
    r"|^<!-- (?P<comment>.*?) ?-->$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]*)"')
_BUCKET = re.compile(r"\b(?:s3a?|gs|az)://([A-Za-z0-9][A-Za-z0-9.-]*)")
_TEMPORARY = re.compile(r"(?<![\w.-])/tmp(?![\w.-])")


@dataclass(frozen=True)
class Block:
    """A fenced block, or Python that prepares the next one (`shown` is False)."""

    page: Path
    line: int
    language: str
    code: str
    title: str = ""
    shown: bool = True
    not_run: str | None = None
    ends_with: str | None = None
    services: bool = False

    @property
    def position(self) -> str:
        return f"{self.page.relative_to(PROJECT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and self.not_run is None


@dataclass(frozen=True)
class Page:
    path: Path
    blocks: tuple[Block, ...]
    on_s3: bool

    @property
    def name(self) -> str:
        return str(self.path.relative_to(PROJECT))

    @property
    def shown(self) -> list[Block]:
        return [block for block in self.blocks if block.shown]

    @property
    def needs_spark(self) -> bool:
        return any(block.runs and re.search(r"\bspark\b", block.code) for block in self.blocks)

    @property
    def needs_a_shell(self) -> bool:
        return any(block.runs and block.language == "sh" for block in self.blocks)


def pages() -> list[Page]:
    """Every page with blocks to run or to check."""
    paths = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").rglob("*.md"))]
    read = [parse(path, path.read_text(encoding="utf-8")) for path in paths]
    return [page for page in read if page.blocks]


def parse(path: Path, text: str) -> Page:
    """The page with its blocks in order; other comments than directives are ignored."""
    blocks: list[Block] = []
    directives: dict[str, str] = {}
    on_s3 = False
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        comment = found["comment"]
        if comment is None:
            blocks.append(_block(path, line, found, directives))
            directives = {}
        elif comment.startswith("prepare\n"):
            blocks.append(Block(path, line, "python", comment.removeprefix("prepare\n"), shown=False))
        elif comment == "page: on S3":
            on_s3 = True
        else:
            name, _, value = comment.partition(": ")
            if name in ("not run", "ends with", "services"):
                directives[name] = value
    return Page(path, tuple(blocks), on_s3)


def _block(path: Path, line: int, found: re.Match[str], directives: dict[str, str]) -> Block:
    language, _, rest = found["info"].strip().partition(" ")
    title = _TITLE.search(rest)
    return Block(
        path,
        line,
        language,
        re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE),
        title=title[1] if title else "",
        not_run=directives.get("not run"),
        ends_with=directives.get("ends with"),
        services="services" in directives,
    )


def located(code: str, folder: Path, *, buckets: bool = True) -> str:
    """The code with /tmp, and by default every bucket, replaced by a folder inside `folder`."""
    # /tmp is replaced first, because the folder may itself be in /tmp.
    code = _TEMPORARY.sub(str(folder / "tmp"), code)
    return _BUCKET.sub(lambda match: str(folder / match[1]), code) if buckets else code


def commands(code: str) -> Iterator[str]:
    """The commands of a shell block, without comments and with continued lines joined."""
    joined = code.replace("\\\n", " ")
    yield from (line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def summary() -> str:
    """A text for people: how many blocks there are, and how many are run."""
    shown = [block for page in pages() for block in page.shown]
    run = Counter(block.language for block in shown if block.runs)
    parsed = sum(block.language in FILES for block in shown)
    text = sum(block.language == "text" for block in shown)
    out = Counter(block.not_run for block in shown if block.not_run is not None)
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(out.items()))
    return (
        f"{len(shown)} code blocks on {len(pages())} pages: {run['python']} Python and {run['sh']} shell run, "
        f"{parsed} files parsed, {text} text, {sum(out.values())} left out ({left_out})"
    )


if __name__ == "__main__":
    print(summary())
