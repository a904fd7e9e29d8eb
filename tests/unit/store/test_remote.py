"""The remote store without a server: errors, secrets, pickles and forks."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import traceback

import pytest
from obstore import exceptions as raw

from flagstone.errors import FlagstoneError, InvalidRequest, Unavailable
from flagstone.store.port import AccessRefused, ObjectChanged, ObjectExists, ObjectMissing, ObjectVersion
from flagstone.store.remote import RemoteStore, first_line, outcome

SECRET = "wJalrXUtnFEMIK7MDENG"
OPTIONS = {
    "endpoint": "http://127.0.0.1:1",
    "region": "us-east-1",
    "access_key_id": f"AK{SECRET}",
    "secret_access_key": SECRET,
    "session_token": f"ST{SECRET}",
    "allow_http": True,
}
PREFIX = "Generic S3 error: Error performing PUT http://h/b/x?X-Sig=abc in 1ms - "
STATUS = PREFIX + "Server returned non-2xx status code: "


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the client from requesting credentials of a metadata service: these tests use no network."""
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-environment")


@pytest.fixture
def store() -> RemoteStore:
    return RemoteStore("s3://bucket/folder", options=OPTIONS)


@pytest.mark.parametrize(
    ("error", "verb", "kind"),
    [
        (FileNotFoundError("Object at location x not found"), "get", ObjectMissing),
        (FileNotFoundError("Object at location x not found"), "delete", ObjectMissing),
        (FileNotFoundError("404 Not Found"), "put_if_match", ObjectChanged),
        (FileNotFoundError("404 Not Found"), "put", InvalidRequest),
        (FileNotFoundError("404: <?xml?>\n<Code>NoSuchBucket</Code>"), "get", InvalidRequest),
        (FileNotFoundError("404: <?xml?>\n<Code>ContainerNotFound</Code>"), "put_if_match", InvalidRequest),
        (raw.AlreadyExistsError("x"), "put_if_absent", ObjectExists),
        (raw.PreconditionError("x"), "put_if_absent", ObjectExists),
        (raw.PreconditionError("x"), "put_if_match", ObjectChanged),
        (raw.AlreadyExistsError("x"), "put_if_match", ObjectChanged),
        (raw.PreconditionError("x"), "get_tail", Unavailable),
        (raw.PermissionDeniedError("403"), "get", AccessRefused),
        (raw.UnauthenticatedError("401"), "get", AccessRefused),
        (raw.GenericError(STATUS + "403 Forbidden"), "list", AccessRefused),
        (
            raw.GenericError("PUT http://169.254.169.254/latest/api/token " + STATUS + "404"),
            "get",
            AccessRefused,
        ),
        (raw.NotSupportedError("x"), "get", InvalidRequest),
        (raw.UnknownConfigurationKeyError("x"), "get", InvalidRequest),
        (NotImplementedError("x"), "put_if_match", InvalidRequest),
        (ValueError("bad path"), "get", InvalidRequest),
        (raw.GenericError(STATUS + "500 Internal Server Error"), "get", Unavailable),
        (raw.GenericError(STATUS + "503 Slow Down"), "put", Unavailable),
        (raw.GenericError(STATUS + "429 Too Many Requests"), "put", Unavailable),
        (raw.GenericError(STATUS + "409 Conflict"), "put_if_match", Unavailable),
        (raw.GenericError(STATUS + "408 Request Timeout"), "put", Unavailable),
        (raw.GenericError(STATUS + "400 Bad Request: <Code>RequestTimeout</Code>"), "put", Unavailable),
        (raw.GenericError(STATUS + "400 Bad Request"), "put", InvalidRequest),
        (
            raw.GenericError(STATUS + "404 Not Found: <?xml?>\n<Code>NoSuchBucket</Code>"),
            "list",
            InvalidRequest,
        ),
        (raw.GenericError(STATUS + "501 Not Implemented"), "put_if_absent", InvalidRequest),
        (raw.GenericError(PREFIX + "HTTP error: builder error"), "get", InvalidRequest),
        (raw.GenericError(PREFIX + "HTTP error: error sending request"), "put", Unavailable),
        (raw.GenericError(PREFIX + "operation timed out"), "put_if_absent", Unavailable),
        (ConnectionResetError("reset"), "get", Unavailable),
    ],
)
def test_every_error_of_the_client_becomes_one_of_our_errors(
    error: Exception, verb: str, kind: type[FlagstoneError]
) -> None:
    assert type(outcome(error, verb, "x")) is kind


def test_an_error_text_is_the_first_line_without_queries_and_secrets() -> None:
    error = raw.GenericError(
        f"GET http://user:{SECRET}@h/x?sig=abc&se=1 failed for {SECRET}\n\nDebug source: more"
    )

    assert first_line(error, [SECRET]) == "GET http://h/x failed for ***"


def test_reprs_errors_and_logs_contain_no_secret(
    store: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = [repr(store), str(store), store.url]
    version = ObjectVersion(etag='"x"')
    for call in (
        lambda: store.get("x"),
        lambda: store.head("x"),
        lambda: list(store.list("x")),
        lambda: store.put("x", b"1"),
        lambda: store.put_if_match("x", b"1", version),
        lambda: store.delete_many(["x", "y"]),
    ):
        with pytest.raises(Unavailable) as error:
            call()
        shown += [repr(error.value), "".join(traceback.format_exception(error.value))]
        assert error.value.__context__ is None
        assert error.value.__cause__ is None
    bad = RemoteStore("gs://bucket", options={"service_account_key": f'{{"private_key": "{SECRET}"'})
    with pytest.raises(InvalidRequest, match="cannot open gs://bucket") as refused:
        bad.get("x")
    shown += [repr(bad), "".join(traceback.format_exception(refused.value)), caplog.text]

    assert SECRET not in "".join(shown)
    assert "Debug source" not in "".join(shown)


def test_a_pickled_store_has_no_secrets_without_pickle_secrets(store: RemoteStore) -> None:
    carried = pickle.dumps(store)
    arrived = pickle.loads(carried)
    again = pickle.loads(pickle.dumps(arrived))

    assert SECRET.encode() not in carried
    assert arrived.url == store.url
    assert "'region': 'us-east-1'" in repr(arrived)
    assert "secret_access_key" not in repr(arrived)
    for other in (arrived, again):
        # The credentials of the environment sign the request, which then fails because no server listens.
        with pytest.raises(Unavailable, match=r"^connection refused \(127\.0\.0\.1:1\)") as error:
            other.get("x")
        assert "secret_access_key" in error.value.__notes__[0]
    with_secrets = RemoteStore("s3://bucket/folder", options=OPTIONS, pickle_secrets=True)
    assert repr(pickle.loads(pickle.dumps(with_secrets))) == repr(with_secrets)


def test_refused_options_and_urls_get_a_hint_and_show_no_secret() -> None:
    cases = {
        ("s3://b", "acess_key"): "did you mean 'access_key_id'",
        ("s3://b", "aws_secret_access_key"): "did you mean 'secret_access_key'",
        ("s3://b", "endpoint_url"): "did you mean 'endpoint'",
        ("az://b", "accountkey"): "did you mean 'account_key'",
        ("gs://b", "xyzzy"): "it has allow_http",
    }
    for (url, option), hint in cases.items():
        with pytest.raises(InvalidRequest, match=hint) as error:
            RemoteStore(url, options={option: SECRET})
        assert SECRET not in str(error.value)
    for url in ("s3://", "s3:///x", "s3://b/a//b", "http://b", f"s3://key:{SECRET}@b", "s3:b"):
        with pytest.raises(InvalidRequest) as error:
            RemoteStore(url)
        assert SECRET not in str(error.value)
    with pytest.raises(InvalidRequest, match="credentials") as error:
        RemoteStore("s3://b", options={"endpoint": f"http://u:{SECRET}@host"})
    assert SECRET not in str(error.value)


def test_urls_are_normalized() -> None:
    cases = {
        "s3://b": "s3://b",
        "s3a://b/x/y/": "s3://b/x/y",
        "gs://b/x": "gs://b/x",
        "az://c/x": "az://c/x",
        "abfs://c@acct.dfs.core.windows.net/x": "abfss://c@acct.dfs.core.windows.net/x",
    }
    for url, meant in cases.items():
        store = RemoteStore(url)
        assert store.url == meant
        assert RemoteStore(store.url).url == meant


def test_a_conditional_update_on_gcs_needs_a_generation() -> None:
    with pytest.raises(InvalidRequest, match="listing"):
        RemoteStore("gs://b").put_if_match("x", b"", ObjectVersion(etag='"x"'))


def test_plain_http_must_be_allowed() -> None:
    store = RemoteStore("s3://b", options={**OPTIONS, "allow_http": False})
    with pytest.raises(InvalidRequest, match="allow_http"):
        store.get("x")


def run_forking(before: str) -> subprocess.CompletedProcess[str]:
    script = (
        "import os, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from flagstone.errors import *\n"
        "from flagstone.store.remote import RemoteStore\n"
        f"store = RemoteStore('s3://b', options={OPTIONS!r})\n"
        "def use(store):\n"
        "    try:\n"
        "        store.get('x')\n"
        "    except FlagstoneError as error:\n"
        "        print(type(error).__name__, error, flush=True)\n"
        f"{before}\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    use(store)\n"
        "    use(RemoteStore('s3://other', options={'allow_http': True}))\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        env={**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "x",
             "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "x"},
    )  # fmt: skip


def test_a_fork_after_io_is_refused_instead_of_hanging() -> None:
    lines = run_forking("use(store)").stdout.splitlines()

    assert lines[0].startswith("Unavailable")
    assert [line.split()[0] for line in lines[1:]] == ["InvalidRequest", "InvalidRequest"]
    assert "spawn" in lines[1]


def test_a_fork_before_io_works() -> None:
    lines = run_forking("").stdout.splitlines()

    assert [line.split()[0] for line in lines] == ["Unavailable", "Unavailable"]
