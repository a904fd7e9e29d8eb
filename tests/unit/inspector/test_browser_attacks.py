"""What other sites, wrong addresses and names with markup can do with the page of `flagstone inspect`, in Chromium.

The attacker of these tests has pages of its own and often knows even the token. Nothing of the database may reach it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import flagstone
from flagstone import Settings
from kit.answers import answer_in_page
from kit.browser import CHROMIUM, Browser
from kit.grown_database import grow
from kit.inspected import inspected, place, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]
QUIET = Settings(compactor_options=None, garbage_collector_options=None)
SECRET = "the-secret-value"
LOADED = "document.querySelector('#sizes table') && document.querySelector('#history svg')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Names of other sites that their owners let point to this machine: that is what DNS rebinding does.
    with Browser("--host-resolver-rules=MAP *.example 127.0.0.1, MAP *.test 127.0.0.1") as found:
        found.before_pages(
            "window.hits = 0; window.hit = () => { window.hits++; }; "
            "window.alert = window.confirm = window.prompt = window.hit;"
        )
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("attacked") / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"k", SECRET.encode())
        db.flush()
    with inspected(place(folder)) as inspection, served(inspection) as found:
        yield found


class Evil:
    """A site of an attacker: one page, and what browsers asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        evil = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                evil.asked.append((self.path, self.headers["Referer"]))
                body = b"<!doctype html><title>evil</title><body>evil</body>"
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://evil.example:{self._server.server_port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


@pytest.fixture
def evil() -> Iterator[Evil]:
    site = Evil()
    yield site
    site.close()


def text_at(browser: Browser, address: str) -> str:
    """What the browser shows at an address that is not the page."""
    browser.open("about:blank")
    browser.until("location.href === 'about:blank'")
    browser.open(address)
    browser.until("location.href !== 'about:blank' && document.readyState === 'complete' && document.body")
    return str(browser.run("document.documentElement.innerHTML"))


@pytest.mark.parametrize(
    "name",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "127-0-0-1.rebind.example",
        "localhost.example",
        "inspector.test",
        "xn--lcalhost-1ff.example",
        "localhost.",
    ],
)
def test_a_name_that_was_rebound_to_this_machine_gets_no_page(
    browser: Browser, address: str, name: str
) -> None:
    for page in ("", "api/state", "api/rows", "events", "page.js"):
        shown = text_at(browser, address.replace("127.0.0.1", name) + page)
        assert "use the address that flagstone printed" in shown
        assert SECRET not in shown


WRONG = [
    "",
    "api/rows",
    "{token}",
    "{short}/",
    "{token}0/",
    "0{token}/",
    "{upper}X/",
    "{zeros}/api/rows",
    "?token={token}",
    "#{token}/",
    "{token}%2Fapi/rows",
    "%7B{token}%7D/",
    "{token};/api/rows",
    "{token}%00/",
    "x/../x{token}/api/rows",
]


@pytest.mark.parametrize("wrong", WRONG)
def test_an_address_without_the_token_shows_no_page(browser: Browser, address: str, wrong: str) -> None:
    token = urlsplit(address).path.strip("/")
    root = address.removesuffix(f"{token}/")
    path = wrong.format(token=token, short=token[:-1], upper=token.upper(), zeros="0" * len(token))
    shown = text_at(browser, root + path)
    assert "the token is missing or wrong" in shown
    assert SECRET not in shown


TRAVERSALS = [
    "../../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "assets/../server.py",
    "%2e%2e/server.py",
    "....//server.py",
    "/etc/passwd",
    "api/../../server.py",
    "server.py",
    "__init__.py",
    "page.js%00.html",
    "C:\\\\windows\\\\win.ini",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_path_leads_to_other_files(browser: Browser, address: str, path: str) -> None:
    browser.open(address)
    browser.until(LOADED)
    answer = answer_in_page(browser, path)
    assert answer.status in (403, 404)
    assert "root:" not in answer.text
    assert "def serve" not in answer.text


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "PROPFIND", "MADEUP"]
)
def test_a_page_can_only_get(browser: Browser, address: str, method: str) -> None:
    browser.open(address)
    browser.until(LOADED)
    answer = answer_in_page(browser, "api/rows", method=method)
    assert answer.status == 501
    assert SECRET not in answer.text


READS = {
    "fetch": "fetch(ADDRESS + 'api/rows').then((answer) => answer.text())",
    "fetch with cookies": "fetch(ADDRESS + 'api/rows', {credentials: 'include'}).then((answer) => answer.text())",
    "fetch without CORS": "fetch(ADDRESS + 'api/rows', {mode: 'no-cors'}).then((answer) => answer.text())",
    "XMLHttpRequest": "new Promise((done) => { const it = new XMLHttpRequest(); it.onload = () => "
    "done(it.responseText); it.onerror = () => done(''); it.open('GET', ADDRESS + 'api/rows'); it.send(); })",
    "EventSource": "new Promise((done) => { const it = new EventSource(ADDRESS + 'events'); "
    "it.addEventListener('live', (event) => { it.close(); done('secret ' + event.data); }); "
    "it.onerror = () => { it.close(); done(''); }; })",
    "WebSocket": "new Promise((done) => { const it = new WebSocket(ADDRESS.replace('http', 'ws') + 'events'); "
    "it.onopen = it.onmessage = () => done('secret'); it.onerror = () => done(''); })",
    "script": "loaded('script', 'src', 'api/rows')",
    "module": "import(ADDRESS + 'page.js').then(() => 'secret', () => '')",
    "style": "loaded('link', 'href', 'page.css', {rel: 'stylesheet'}).then(() => [...document.styleSheets]"
    ".map((sheet) => { try { return [...sheet.cssRules].map((rule) => rule.cssText).join(); } "
    "catch { return ''; } }).join())",
    "image": "loaded('img', 'src', 'icon.svg')",
    "frame": "loaded('iframe', 'src', '').then(() => { const it = document.querySelector('iframe'); "
    "try { return it.contentWindow.document.documentElement.innerHTML; } catch { return ''; } })",
    "object": "loaded('object', 'data', '').then(() => document.querySelector('object').contentDocument"
    "?.documentElement.innerHTML ?? '')",
    "embed": "loaded('embed', 'src', '').then(() => '')",
    "worker": "new Promise((done) => { try { const it = new Worker(ADDRESS + 'page.js'); it.onerror = () => done(''); "
    "setTimeout(() => done(''), 300); } catch { done(''); } })",
    "beacon": "Promise.resolve(navigator.sendBeacon(ADDRESS + 'api/rows', 'x')).then(() => '')",
    "window": "new Promise((done) => { const it = window.open(ADDRESS); setTimeout(() => { let text = ''; "
    "try { text = it.document.documentElement.innerHTML; } catch {} it?.close(); done(text); }, 500); })",
    "form": "(() => { const it = document.createElement('form'); it.method = 'POST'; it.target = '_blank'; "
    "it.action = ADDRESS + 'api/rows'; document.body.append(it); it.submit(); return Promise.resolve(''); })()",
}


@pytest.mark.parametrize("way", READS)
def test_another_site_that_knows_the_address_reads_nothing(
    browser: Browser, address: str, evil: Evil, way: str
) -> None:
    browser.open(evil.url)
    browser.until("document.title === 'evil'")
    found = browser.run(
        f"""(() => {{ const ADDRESS = {json.dumps(address)};
        const loaded = (tag, name, path, more = {{}}) => new Promise((done) => {{
          const it = document.createElement(tag); Object.assign(it, more);
          it.onload = it.onerror = () => done(''); it[name] = ADDRESS + path; document.body.append(it);
          setTimeout(() => done(''), 500); }});
        return {READS[way]}.catch(() => ''); }})()"""
    )
    for leak in (SECRET, "secret", "figures", "swatch", "h-tree"):
        assert leak not in (found or "")


def test_another_site_does_not_learn_the_address_from_the_browser(
    browser: Browser, address: str, evil: Evil
) -> None:
    token = urlsplit(address).path.strip("/")
    for leave in (f"location = '{evil.url}left'", f"location.replace('{evil.url}replaced')"):
        browser.open(address)
        browser.until(LOADED)
        browser.run(f"void ({leave})")
        browser.until("document.title === 'evil'")
        assert browser.run("document.referrer") == ""
        assert browser.run("window.opener") is None
    assert [path for path, _ in evil.asked if path in ("/left", "/replaced")] == ["/left", "/replaced"]
    from_the_page = [
        asked for asked in evil.asked if asked[0] != "/favicon.ico"
    ]  # which its own page asks for
    assert [referrer for _, referrer in from_the_page if referrer is not None] == []
    assert token not in str(evil.asked)


@pytest.mark.parametrize("length", [33_000, 70_000, 2_000_000])
def test_a_very_long_prefix_is_refused_on_the_page(browser: Browser, address: str, length: int) -> None:
    browser.open(address)
    browser.until(LOADED)
    browser.run(
        f"document.getElementById('prefix').value = '<b>'.padEnd({length}, 'é'); "
        "document.getElementById('search').requestSubmit()"
    )
    browser.until("!document.getElementById('problem').hidden")
    assert browser.run("document.querySelectorAll('#problem *').length") == 0
    assert len(browser.run("document.getElementById('problem').textContent")) < 300
    browser.run(
        "document.getElementById('prefix').value = ''; document.getElementById('search').requestSubmit()"
    )
    browser.until("document.querySelector('#rows button')")


MARKS = [
    "<img src=x onerror=hit()>",
    "<svg onload=hit()>",
    "<script>hit()<script>",
    '"><b onclick=hit()>',
    "' autofocus onfocus='hit()",
    "<style>*{display:none}",
    "&lt;img src=x onerror=hit()&gt;",
    "\u202e<b>gnp",
    "${hit()}{{hit()}}",
    "javascript:hit()",
]


@pytest.mark.parametrize("number", range(len(MARKS)))
def test_markup_in_names_of_databases_checkpoints_and_workers_is_only_text(
    tmp_path: Path, browser: Browser, number: int
) -> None:
    mark = MARKS[number]
    shop = grow(tmp_path, manifests=40, mark=mark)
    with inspected(place(shop)) as inspection, served(inspection) as address:
        browser.requests.clear()
        browser.open(address)
        browser.until(LOADED)
        browser.run(
            "document.querySelectorAll('.bar').forEach((bar) => "
            "bar.dispatchEvent(new PointerEvent('pointermove', {clientX: 9})))"
        )
        assert browser.run("document.title") == shop.name
        shown = browser.run("document.body.textContent")
        for name in (f"nightly{mark}", f"origin{mark}", f"worker-1{mark}", f"before the move{mark}"):
            assert name in shown
        foreign = "img, script, iframe, style, form:not(#search), a, object, embed"
        assert browser.run(f"document.querySelectorAll('body :is({foreign})').length") == 0
        assert browser.run("document.querySelectorAll('b:not(.figure > b)').length") == 0
        assert browser.run("window.hits") == 0
        assert [each for each in browser.requests if not each.startswith(address)] == []
