"""The Hub's API is read like any hostile server: in bounded time and memory, and with credentials for the Hub alone."""

import base64
import gc
import itertools
import json
import pickle
import ssl
import time

import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("urllib3")

from builders import http_faults
from builders.http_server import CERTIFICATE, Server
from builders.hub import Hub
from builders.inside import RemoteFiles
from builders.inside import http_client as retries

from safeload import UnsupportedError
from safeload.errors import RemoteError, RemotePermissionError, RemoteTimeoutError

pytestmark = [pytest.mark.store_packages, pytest.mark.usefixtures("quick_web")]

CONTENT = bytes(range(256)) * 800
SMALL = b"small"
FILES = {"model.safetensors": CONTENT, "config.json": SMALL}
URL, FILE = "hf://owner/name", "hf://owner/name/model.safetensors"
API, CHECK = "/api/models/owner/name", "/api/models/owner/name/auth-check"
# Seconds: a moment on a machine of any speed, but less than the pauses of faults.
SOON = 15


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no cache"))
    for name in ("HF_HUB_OFFLINE", "SAFELOAD_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server():
    with Hub() as server:
        server.add("owner/name", FILES)
        yield server


@pytest.fixture
def repository(server):
    return server.repositories["owner/name"]


def files_of(server, **options):
    return RemoteFiles({"endpoint": server.url(), "token": False, **options})


def read(store):
    memory = bytearray(store.size)
    store.read_into(0, memory)
    store.close()
    return bytes(memory)


def refused(call, kind=RemoteError):
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return str(caught.value)


def body(content, **when):
    """200 with other bytes."""
    head = {"Content-Length": str(len(content)), "Content-Type": "application/json"}
    return http_faults.Fault(
        http_faults.change(status=200, content=content, begin=0, end=len(content), headers=head), **when
    )


# ---- time and memory ----


@pytest.mark.parametrize("call", ["open", "listing", "is_folder"])
@pytest.mark.parametrize("url", [URL, FILE, "hf://name"])
def test_an_api_that_does_not_answer_is_an_error(call, url, server):
    server.faults = [http_faults.silent()]
    begun = time.monotonic()
    text = refused(lambda: getattr(files_of(server, timeout=0.1, retries=1), call)(url), RemoteTimeoutError)
    assert text == f"no byte for 0.1 s; tried 2 times ({url})"
    assert time.monotonic() - begun < SOON


@pytest.mark.parametrize("fault", [http_faults.silent(), http_faults.status(404), http_faults.status(500)])
def test_a_refusal_that_the_hub_does_not_explain_is_raised_itself(fault, server):
    fault.path, fault.seen = CHECK, itertools.count()
    server.faults = [
        http_faults.status(403, path=f"/owner/name/resolve/{commit_of(server)}/config.json"),
        fault,
    ]
    text = refused(
        lambda: files_of(server, timeout=0.1, retries=0).open(f"{URL}@{commit_of(server)}/config.json"),
        RemotePermissionError,
    )
    assert text.startswith("the server refuses access (403)")


def commit_of(server):
    return server.repositories["owner/name"].refs["main"]


@pytest.mark.parametrize("length", ["stated", "missing"])
def test_an_answer_of_any_size_takes_little_memory(length, server):
    server.faults = [body(b" " * 70_000_000, path=API)]
    if length == "missing":
        server.faults += [http_faults.header("Content-Length", None, path=API), http_faults.short(70_000_000, path=API)]
    text = refused(lambda: files_of(server).listing(URL))
    size = "70,000,000" if length == "stated" else "more"
    assert text == f"the Hub's response has {size} bytes, but the limit is 67,108,864 ({URL})"
    assert len(server.requests) == 1


@pytest.mark.parametrize("fault", [http_faults.short(10), http_faults.reset(10), http_faults.status(502)])
def test_an_answer_that_breaks_off_is_requested_again(fault, server):
    fault.path, fault.times, fault.seen = API, 1, itertools.count()
    server.faults = [fault]
    assert files_of(server).listing(URL) == [("config.json", False), ("model.safetensors", False)]
    assert len(server.requests) == 2


@pytest.fixture
def _no_collection():
    """At the limit of recursion finalizers of other tests' garbage would fail, and this test with them."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON: Expecting value at byte 0"),
        (b"<html>sign in</html>", "is not JSON: Expecting value at byte 0"),
        (b'{"sha": "\xff"}', "is not JSON: it is not UTF-8"),
        (b"[" * 100_000, "is nested more than 64 levels deep"),
        (b'{"sha": "a", "sha": "b"}', "duplicate key 'sha'"),
        (b'{"sha": ' + b"9" * 9999 + b"}", "is not JSON: "),
        (b"[]", "must be a JSON object, got list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_that_is_malformed_is_an_error(content, message, server):
    server.faults = [body(content, path=API)]
    text = refused(lambda: files_of(server).listing(URL))
    assert text.startswith("the Hub's response")
    assert message in text
    assert text.endswith(f"({URL})")
    assert len(server.requests) == 1


def test_a_hub_that_asks_to_wait_too_long_is_not_waited_for(server):
    for headers in ({"Retry-After": "3600"}, {"RateLimit": '"api";r=0;t=3600'}):
        server.requests.clear()
        server.faults = [http_faults.status(429, headers=headers, path=API)]
        text = refused(lambda: files_of(server).listing(URL))
        assert "returned 429 Too Many Requests and asks to wait 3600 s, which is more than the limit of 60 s" in text
        assert len(server.requests) == 1


# ---- commits ----


def test_a_commit_that_is_answered_by_another_is_an_error(server, repository):
    commit = commit_of(server)
    other = json.dumps({"sha": "0" * 40, "siblings": [{"rfilename": "config.json"}]}).encode()
    server.faults = [body(other, path=f"{API}/revision/{commit}")]
    text = refused(lambda: files_of(server).listing(f"{URL}@{commit}"))
    assert text == f"the Hub reports commit {'0' * 40}, expected {commit} ({URL}@{commit})"


def test_a_file_of_another_commit_than_requested_is_an_error(server):
    commit = commit_of(server)
    server.faults = [http_faults.header("X-Repo-Commit", "0" * 40, path=f"/owner/name/resolve/{commit}/config.json")]
    text = refused(lambda: files_of(server).open(f"{URL}@{commit}/config.json"))
    assert text == f"the Hub returned the file of commit '{'0' * 40}', expected {commit} ({URL}@{commit}/config.json)"


def test_a_renamed_repository_is_read_under_its_old_name(server, repository):
    server.repositories["owner/new"] = server.repositories.pop("owner/name")
    commit = repository.refs["main"]
    files = [f"/owner/name/resolve/{revision}/{name}" for revision in ("main", commit) for name in FILES]
    server.faults = [
        http_faults.redirect(path.replace("owner/name", "owner/new"), code=307, path=path) for path in [API, *files]
    ]
    files = files_of(server, token=server.token)
    assert {name: read(files.open(f"{URL}/{name}")) for name in FILES} == FILES


# ---- credentials ----


def test_the_token_follows_no_redirect_of_the_api_to_another_host(server):
    with Server({API: json.dumps({"sha": "a"}).encode()}) as other:
        server.faults = [http_faults.redirect(other.url(API), path=API)]
        files = files_of(server, token=server.token, headers={"X-Key": "s3cr3t"})
        assert files.listing(URL) == []
        assert server.requests[0].headers["authorization"] == f"Bearer {server.token}"
        assert not {"authorization", "x-key", "cookie"} & set(other.requests[0].headers)


def test_the_api_over_https_is_read_with_the_callers_certificates():
    with Hub(tls=True) as server, Server({}) as plain:
        server.add("owner/name", {"config.json": SMALL})
        files = RemoteFiles({"endpoint": server.url(), "token": False, "verify": str(CERTIFICATE)})
        assert read(files.open(f"{URL}/config.json")) == SMALL
        context = ssl.create_default_context(cafile=CERTIFICATE)
        assert RemoteFiles({"endpoint": server.url(), "token": False, "ssl_context": context}).is_folder(URL)
        assert "certificate is not trusted" in refused(lambda: files_of(server).listing(URL))
        server.faults = [http_faults.redirect(plain.url(API), path=API)]
        text = refused(lambda: RemoteFiles(files._options).listing(URL))
        assert "redirects from https to http" in text
        assert not plain.requests


def test_headers_are_sent_to_the_hub_alone(server):
    files = files_of(server, token=server.token, headers={"X-Key": "s3cr3t", "User-Agent": "mine"})
    assert read(files.open(FILE)) == CONTENT
    assert {request.headers["x-key"] for request in server.requests} == {"s3cr3t"}
    assert {request.headers["user-agent"] for request in server.requests} == {"mine"}
    assert len(server.cdn.requests) >= 1
    assert all("x-key" not in request.headers for request in server.cdn.requests)


def mirror(server, prefix):
    """Let a Hub answer below a path."""
    answer = server.answer
    server.answer = lambda request: answer(request._replace(path=request.path.removeprefix(prefix)))


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_a_mirror_may_have_a_path_a_user_and_a_password(end, server, repository):
    mirror(server, "/api/hf")
    answer = server.answer
    server.answer = lambda request: answer(request._replace(headers={**request.headers, "authorization": token}))
    token = f"Bearer {server.token}"
    endpoint = server.url("/api/hf", user="us3r:s3cr3t@") + end
    files = RemoteFiles({"endpoint": endpoint, "token": False})
    assert {name: read(files.open(f"{URL}/{name}")) for name in FILES} == FILES
    basic = "Basic " + base64.b64encode(b"us3r:s3cr3t").decode()
    assert {request.headers["authorization"] for request in server.requests} == {basic}
    assert all(request.path.startswith(("/api/hf/api/", "/api/hf/owner/")) for request in server.requests)
    assert b"s3cr3t" not in pickle.dumps(files)
    repository.gated = True
    text = refused(lambda: RemoteFiles(files._options).open(FILE), RemotePermissionError)
    assert f"accept its terms at {server.url('/api/hf/owner/name')}, " in text


@pytest.mark.parametrize("token", ["hf_s3cr3t\nX: y", "hf_s3cr3t\x00", "hf_s3cr3t\u4e2d"])
def test_a_token_that_no_header_can_hold_is_not_shown(token, server):
    for call in ("open", "listing"):
        text = refused(lambda call=call: getattr(files_of(server, token=token), call)(FILE), ValueError)
        assert "the value of authorization contains a character that is not allowed" in text
        assert "s3cr3t" not in text
    assert not server.requests


@pytest.mark.parametrize("value", [5, b"https://host"])
@pytest.mark.parametrize("name", ["endpoint", "token"])
def test_endpoint_and_token_are_text(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a str.*got (int|bytes)"):
        RemoteFiles({name: value}).listing(URL)


@pytest.mark.parametrize("revision", [".", "..", "a%2F..", "%2e%2E", "a%2F%2Fb", "%2Fa"])
def test_a_revision_that_leads_elsewhere_is_refused_without_a_request(revision, server):
    for path in ("", "/config.json"):
        with pytest.raises(UnsupportedError, match="cannot be a branch, a tag or a commit"):
            files_of(server).open(f"{URL}@{revision}{path}")
    assert not server.requests


def test_a_path_that_no_file_has_is_not_requested(server):
    for path in ("../../api/whoami-v2", ".", "a/./b", "a//b"):
        with pytest.raises(FileNotFoundError, match="the repository has no such file"):
            files_of(server).open(f"{URL}/{path}")
    assert server.kinds == {"api": 4}


@pytest.mark.parametrize("endpoint", ["host", "ftp://host", "https://", "file:///etc"])
def test_an_endpoint_that_is_no_http_url_is_an_error(endpoint):
    text = refused(lambda: RemoteFiles({"endpoint": endpoint, "token": False}).listing(URL))
    assert "this URL cannot be opened: " in text


# ---- refusals ----


@pytest.mark.parametrize(
    ("status", "headers", "kind", "message"),
    [
        (401, {}, FileNotFoundError, "no such model, or it is private"),
        (
            401,
            {"X-Error-Message": "Invalid credentials in Authorization header"},
            RemotePermissionError,
            "set HF_TOKEN",
        ),
        (403, {}, RemotePermissionError, "the Hub refuses access (403)"),
        (403, {"X-Error-Message": "No. See https://u:s3cr3t@h/?t=s3cr3t"}, RemotePermissionError, "No. See https://h/"),
        (403, {"X-Error-Code": "GatedRepo"}, RemotePermissionError, "accept its terms at "),
        (404, {}, FileNotFoundError, "no such model, or it is private"),
        (404, {"X-Error-Code": "RevisionNotFound"}, FileNotFoundError, "no such branch, tag or commit"),
        (410, {}, FileNotFoundError, "no such model"),
        (400, {"X-Error-Message": "x" * 9999}, RemoteError, "the server returned 400 Bad Request: xxx"),
        (451, {"X-Error-Message": "Access to this resource is disabled."}, RemotePermissionError, "is disabled."),
        (204, {}, RemoteError, "the server returned 204 No Content"),
        (304, {}, RemoteError, "the server returned 304 Not Modified"),
        (407, {}, RemotePermissionError, "the proxy requires a user and a password"),
        (999, {}, RemoteError, "the server returned 999"),
    ],
)
def test_a_refusal_of_the_api_is_named_at_once(status, headers, kind, message, server):
    server.faults = [http_faults.status(status, headers=headers, path=API)]
    text = refused(lambda: files_of(server).listing(URL), kind)
    assert message in text
    assert URL in text
    assert "s3cr3t" not in text
    assert len(text) < 700
    assert len(server.requests) == 1


@pytest.mark.parametrize("url", ["hf://../name", "hf://a--b/c", "hf://owner/-x", "hf://owner/..", "hf://o%2Fp/n"])
def test_a_name_that_no_repository_has_is_refused_without_a_request(url, server):
    with pytest.raises(UnsupportedError, match=r"hf://"):
        files_of(server).listing(url)
    assert not server.requests


def test_retries_of_the_api_are_the_callers(server):
    server.faults = [http_faults.status(500, path=API)]
    assert "tried 3 times" in refused(lambda: files_of(server, retries=2).listing(URL))
    assert len(server.requests) == 3
    assert retries.RETRIES != 2


def test_a_host_behind_a_redirect_that_is_out_of_reach_is_named(server):
    """As if a firewall lets programs reach the Hub, but not its files."""
    server.cdn.url = lambda path="": f"http://127.0.0.1:1{path}"
    text = refused(lambda: files_of(server, retries=0).open(f"{URL}@{commit_of(server)}/model.safetensors"))
    assert ", after a redirect to 127.0.0.1:1 (hf://owner/name@" in text
    assert "Signature" not in text
