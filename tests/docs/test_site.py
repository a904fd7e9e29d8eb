"""The site is built without a warning, and its pages load nothing from other servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.code_blocks import PROJECT

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]

ASSET = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+")


def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=PROJECT,
        # With a proxy that does not answer, every fetch fails at once.
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    found = {match for page in pages for match in ASSET.findall(page.read_text(encoding="utf-8"))}
    assert found == set()
    for name in ("Db.put", "Admin.clone", "aio.open_reader", "spark.bulk_load"):
        assert any(f'id="flagstone.{name}"' in page.read_text(encoding="utf-8") for page in pages), name
