"""Files behind https: whom secrets are sent to, redirects, URLs that expire, proxies, TLS, options."""

import base64
import contextlib
import functools
import logging
import os
import pickle
import socket
import ssl
import subprocess
import sys
import threading
import traceback
import warnings

import pytest
from builders import http_faults as server
from builders import inside
from builders.http_server import CERTIFICATE, Server
from builders.inside import RemoteFiles, local, thread_group
from builders.remote import WINDOW, read

import safeload
import safeload.remote
from safeload import FormatError, UnsupportedError
from safeload.errors import RemoteError, RemotePermissionError

urllib3 = pytest.importorskip("urllib3")
retries = inside.http_client
client = inside.http_client

pytestmark = pytest.mark.usefixtures("quick_web")

MIB = 1 << 20
CONTENT = os.urandom(MIB)
SIZE = len(CONTENT)
FILES = {"/a": CONTENT, "/b": CONTENT, "/c": CONTENT}
SECRETS = ("s3cr3t", "us3r", "t0ken", "qu3ry", base64.b64encode(b"us3r:s3cr3t").decode())


def serve(*faults, files=FILES, **options):
    return Server(files, faults=faults, **options)


# ---- secrets ----


def in_all_words(error):
    """Everything that a report of an error may show."""
    chain = []
    while error is not None:
        chain += [str(error), repr(error), *traceback.format_exception(error), repr(getattr(error, "__dict__", None))]
        assert error.__cause__ is None
        error = error.__context__
    return "\n".join(chain)


@pytest.mark.parametrize(
    "fault",
    [
        server.reset(),
        server.short(5),
        server.silent(),
        server.stall(5),
        server.garbage(),
        server.garbage(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000),
        server.garbage(b"HTTP/1.1 206 qu3ry\r\nContent-Length: t0ken\r\n\r\n"),
        *(server.status(code) for code in (204, 400, 401, 403, 404, 407, 410, 412, 416, 418, 429, 503)),
        server.status(429, retry_after=1000),
        server.total(3),
        server.whole(),
        server.moved(1),
        server.header("Content-Encoding", "gzip"),
        server.redirect("/b?qu3ry"),
        server.redirect("/a?qu3ry"),
        server.redirect("ftp://us3r:s3cr3t@host/a?qu3ry"),
        server.redirect("http://us3r:s3cr3t@127.0.0.1:1/a?qu3ry"),
        server.redirect("http://us3r:s3cr3t@name.invalid/a?qu3ry"),
        server.redirect("http://[::1/qu3ry"),
        server.redirect("http://" + "x" * 300 + "/a?qu3ry"),
    ],
)
@pytest.mark.parametrize("first", [0, 1], ids=["opening", "reading"])
def test_no_secret_is_shown(fault, first, caplog):
    caplog.set_level(logging.DEBUG)
    fault.first, fault.seen = first, server.itertools.count()
    with serve(fault) as there:
        url = there.url("/a?key=qu3ry#qu3ry", user="us3r:s3cr3t@")
        web = RemoteFiles({"headers": {"X-Key": "t0ken"}, "timeout": 0.1, "retries": 1})
        store, error = None, None
        try:
            store = web.open(url)
            read(store)
        except Exception as caught:
            error = caught
        assert there.requests[0].headers["x-key"] == "t0ken"
    shown = "\n".join(
        [in_all_words(error), repr(web), repr(store), caplog.text, *map(repr, vars(store or web.backend(url)).values())]
    )
    for secret in SECRETS:
        assert secret not in shown
    assert "/a: bytes [0, 131072)" in caplog.text


def test_other_programs_keep_their_log(caplog):
    caplog.set_level(logging.DEBUG)
    with serve() as there, urllib3.PoolManager() as manager:
        manager.request("GET", there.url("/a?mine"))
    assert "/a?mine" in caplog.text


def test_a_store_is_not_pickled():
    with serve() as there:
        store = RemoteFiles({}).open(there.url("/a?qu3ry"))
        with pytest.raises(TypeError, match="cannot be copied or pickled") as caught:
            pickle.dumps(store)
        assert "qu3ry" not in str(caught.value)
        store.close()


def test_user_and_password_of_the_url_are_sent_as_a_header():
    with serve() as there:
        RemoteFiles({}).open(there.url("/a", user="me%40here:p%C3%A4ss@")).close()
        assert (
            there.requests[0].headers["authorization"] == "Basic " + base64.b64encode("me@here:päss".encode()).decode()
        )
        assert "@" not in there.requests[0].headers["host"]


# ---- redirects ----


def test_redirects_are_followed_once_and_remembered():
    with serve(server.redirect("/c?x=1", path="/b"), server.redirect("b", code=307, path="/a")) as there:
        store = RemoteFiles({"headers": {"X-Key": "1"}}).open(there.url("/a"))
        assert read(store) == CONTENT[WINDOW:]
        assert [request.path for request in there.requests] == ["/a", "/b", "/c?x=1", "/c?x=1"]
        assert all(request.headers["x-key"] == "1" for request in there.requests)
        assert store.path == there.url("/a")
        assert there.connections == 1
        store.close()


def test_headers_are_sent_to_no_other_host_or_port():
    with serve() as other, serve() as there:
        there.faults.append(server.redirect(other.url("/b?qu3ry")))
        options = {"headers": {"X-Key": "1", "Cookie": "c", "authorization": "overwritten"}}
        store = RemoteFiles(options).open(there.url("/a", user="us3r:s3cr3t@"))
        assert read(store) == CONTENT[WINDOW:]
        assert there.requests[0].headers["x-key"] == "1"
        assert there.requests[0].headers["authorization"].startswith("Basic ")
        assert len(other.requests) == 2
        for request in other.requests:
            assert not {"x-key", "cookie", "authorization"} & set(request.headers)
        store.close()


def test_a_redirect_from_https_to_http_is_refused():
    with serve() as plain, serve(tls=True) as there:
        there.faults.append(server.redirect(plain.url("/b?qu3ry"), path="/a"))
        with pytest.raises(RemoteError, match=r"redirects from https to http .http://"):
            RemoteFiles({"verify": CERTIFICATE}).open(there.url("/a"))
        plain.faults.append(server.redirect(there.url("/b"), path="/a"))
        store = RemoteFiles({"verify": str(CERTIFICATE), "headers": {"X-Key": "1"}}).open(plain.url("/a"))
        assert read(store) == CONTENT[WINDOW:]
        assert "x-key" not in there.requests[-1].headers
        store.close()
    assert len(plain.requests) == 1


@pytest.mark.parametrize(
    ("faults", "message", "requests"),
    [
        ([server.redirect("/b", path="/a"), server.redirect("/a", path="/b")], "in a loop", 2),
        ([server.redirect("", path="/a")], "redirects without a Location header", 1),
        ([server.status(302)], "redirects without a Location header", 1),
        ([server.redirect("file:///etc/passwd")], "invalid http or https URL", 1),
        ([server.redirect("ftp://127.0.0.1/a")], "invalid http or https URL", 1),
        ([server.redirect("http://127.0.0.1:99999/a")], "invalid http or https URL", 1),
    ],
)
def test_redirects_that_lead_nowhere_are_errors(faults, message, requests):
    for fault in faults:
        fault.seen = server.itertools.count()
    with serve(*faults) as there:
        with pytest.raises(RemoteError, match=message):
            RemoteFiles({}).open(there.url("/a"))
        assert len(there.requests) == requests


def test_there_are_ten_redirects_at_most():
    chain = {f"/{k}": server.redirect(f"/{k + 1}", path=f"/{k}") for k in range(20)}
    with serve(*chain.values(), files={"/20": CONTENT}) as there:
        store = RemoteFiles({}).open(there.url("/10"))
        assert len(there.requests) == 11
        with pytest.raises(RemoteError, match="more than 10 times"):
            RemoteFiles({}).open(there.url("/9"))
        assert len(there.requests) == 22
        store.close()


def test_a_redirect_of_a_later_range_is_followed():
    with serve() as other, serve() as there:
        store = RemoteFiles({"headers": {"X-Key": "1"}}).open(there.url("/a"))
        there.faults.append(server.redirect(other.url("/b")))
        assert read(store) == CONTENT[WINDOW:]
        assert read(store) == CONTENT[WINDOW:]
        assert len(there.requests) == 2
        assert ["x-key" in request.headers for request in other.requests] == [False, False]
        assert ["if-match" in request.headers for request in other.requests] == [False, True]
        store.close()


def test_a_redirect_to_another_version_is_an_error():
    with serve(files={"/b": CONTENT[::-1]}) as other, serve() as there:
        for etag in ("strong", None):
            other.etag = etag
            there.faults.clear()
            store = RemoteFiles({}).open(there.url("/a"))
            there.faults.append(server.redirect(other.url("/b")))
            with pytest.raises(FormatError, match="has changed since it was opened"):
                read(store)
            store.close()


def test_locations_beyond_ascii_are_understood():
    name = "/mod\u00e8le \u4e2d.safetensors"
    with serve(files={name: CONTENT}) as there:
        raw = f"HTTP/1.1 302 Found\r\nLocation: {name}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        there.faults.append(server.garbage(raw, path="/a"))
        store = RemoteFiles({}).open(there.url("/a"))
        assert read(store) == CONTENT[WINDOW:]
        store.close()
        store = RemoteFiles({}).open(there.url(name))
        assert read(store) == CONTENT[WINDOW:]
        store.close()


# ---- URLs that expire ----


def test_an_expired_url_is_resolved_again():
    """As the Hub and presigned URLs have it; in several threads at once, the resolving is done by one."""
    memory_fs = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
    issued = []

    class Signing(memory_fs):
        """What s3fs has that signs URLs."""

        protocol, call_s3, cachable = "s3", None, False

        def url(self, path, **options):
            issued.append(there.url(f"/a?signature={len(issued)}"))
            return issued[-1]

    def check(answer, request):
        if request.path != f"/a?signature={valid[0]}":
            server.status(403).change(answer, request)

    valid = [0]
    with serve(server.Fault(check)) as there:
        location = safeload.remote.of_fsspec(Signing(), "s3://bucket/a")
        store = location.files.open(location.path)
        assert len(issued) == 1
        valid[0] = 1
        memory = [bytearray(1000) for _ in range(8)]
        spans = [[local.Span(WINDOW + 1000 * k, memoryview(one))] for k, one in enumerate(memory)]
        thread_group.run([functools.partial(store.read_spans, one) for one in spans], 8)
        assert b"".join(memory) == CONTENT[WINDOW : WINDOW + 8000]
        assert len(issued) == 2
        valid[0] = 2
        assert read(store) == CONTENT[WINDOW:]
        valid[0] = -1
        with pytest.raises(RemotePermissionError, match="refuses access"):
            read(store)
        assert len(issued) == 4
        there.files["/a"], valid[0] = CONTENT[::-1], 4
        with pytest.raises(Exception, match="has changed since it was opened"):
            read(store)
        store.close()


def test_an_expired_redirect_is_followed_again():
    with serve(server.redirect("/b?1", path="/a", times=1), server.redirect("/b?2", path="/a")) as there:
        there.faults.reverse()
        there.faults[0].first = 1
        store = RemoteFiles({}).open(there.url("/a"))
        there.faults.append(
            server.Fault(lambda answer, request: request.path == "/b?1" and server.status(403).change(answer, request))
        )
        assert read(store) == CONTENT[WINDOW:]
        assert [request.path for request in there.requests] == ["/a", "/b?1", "/b?1", "/a", "/b?2"]
        store.close()


# ---- TLS ----


def test_certificates_are_checked():
    with serve(tls=True) as there:
        with pytest.raises(RemoteError, match="certificate is not trusted: self") as caught:
            RemoteFiles({}).open(there.url("/a?qu3ry"))
        assert "tried" not in str(caught.value)
        for options in ({"verify": CERTIFICATE}, {"ssl_context": ssl.create_default_context(cafile=CERTIFICATE)}):
            for host in ("localhost", "127.0.0.1")[: 1 if urllib3.__version__ < "2" else 2]:
                store = RemoteFiles(options).open(there.url("/a", host))
                assert read(store) == CONTENT[WINDOW:]
                store.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            RemoteFiles({"verify": False}).open(there.url("/a")).close()


def test_the_systems_certificates_are_read_once(monkeypatch, tmp_path):
    """It takes as long as an open; but not those of another file, and a context that verifies nothing is not shared."""
    made, make = [], ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **options: made.append(options) or make(**options))
    client._system_context.cache_clear()
    with serve(tls=True) as there:
        for trusted, count in ((str(CERTIFICATE), 1), (str(tmp_path / "none.pem"), 2), (str(CERTIFICATE), 2)):
            monkeypatch.setenv("SSL_CERT_FILE", trusted)
            for _ in range(2):
                if trusted == str(CERTIFICATE):
                    RemoteFiles({}).open(there.url("/a", "localhost")).close()
                else:
                    with pytest.raises(RemoteError, match="certificate is not trusted"):
                        RemoteFiles({}).open(there.url("/a", "localhost"))
            assert len(made) == count
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            RemoteFiles({"verify": False}).open(there.url("/a")).close()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
        with pytest.raises(RemoteError, match="certificate is not trusted"):
            RemoteFiles({}).open(there.url("/a", "localhost"))
    client._system_context.cache_clear()


def test_a_certificate_for_another_host_is_refused(monkeypatch):
    asked = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: asked("127.0.0.1", *rest))
    with serve(tls=True) as there, pytest.raises(RemoteError, match="certificate is not trusted"):
        RemoteFiles({"verify": CERTIFICATE}).open(there.url("/a", "other.example"))


def test_a_server_that_speaks_no_tls_is_an_error_at_once():
    with serve() as there, pytest.raises(RemoteError, match="TLS failed") as caught:
        RemoteFiles({}).open(there.url("/a").replace("http:", "https:"))
    assert "tried" not in str(caught.value)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": 1}, "https: unknown storage option 'key', expected one of connect_timeout, headers"),
        ({"headers": "x"}, "headers must be a mapping, got str"),
        ({"headers": {"A": 1}}, "headers must map str to str"),
        ({"headers": {"Authorization: t0ken": ""}}, "not allowed in header names"),
        ({"headers": {"A": "t0ken\r\nB: c"}}, "the value of A contains a character"),
        ({"headers": {"A": "t0ken\u4e2d"}}, "the value of A contains a character"),
        ({"headers": {"range": "bytes=0-1"}}, "set by safeload"),
        ({"timeout": 0}, "timeout must be a number of seconds > 0, got 0"),
        ({"timeout": float("nan")}, "timeout"),
        ({"connect_timeout": "1"}, "connect_timeout"),
        ({"retries": -1}, "retries must be >= 0, got -1"),
        ({"retries": True}, "retries"),
        ({"ssl_context": 1}, "SSLContext"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        RemoteFiles(options).open("https://127.0.0.1:9/a")
    assert "t0ken" not in str(caught.value)


def test_a_path_of_certificates_that_leads_nowhere_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"verify: no such certificate file or folder: '.*none\.pem'"):
        RemoteFiles({"verify": tmp_path / "none.pem"}).open("https://127.0.0.1:9/a")


@pytest.mark.parametrize("url", ["http://", "http:///a", "http://:80/a", "http://[::1/a", "http://host:x/a"])
def test_urls_without_a_host_are_errors(url):
    with pytest.raises(RemoteError, match=r"this URL cannot be opened: its? (has no host|host is not|port is not)"):
        RemoteFiles({}).open(url)


def test_there_are_no_folders_and_no_uploads():
    web = RemoteFiles({})
    assert not web.is_folder("https://host/folder/")
    with pytest.raises(UnsupportedError, match=r"https://host/folder/: https has no folders: open an index"):
        web.listing("https://host/folder/?qu3ry")
    with pytest.raises(UnsupportedError, match="https is read-only"):
        web.backend("https://host/").upload("here", "https://host/there?qu3ry")


@pytest.mark.parametrize("path", ["/nothing", "/nothing/", "/a/b.c/d?e.f", "/model.safetensors"])
def test_a_missing_folder_says_what_can_be_opened(path):
    with serve() as there, pytest.raises(FileNotFoundError, match="returned 404") as caught:
        safeload.load(there.url(path))
    assert ("open an index (model.safetensors.index.json), one file" in str(caught.value)) == (
        "safetensors" not in path
    )


def test_files_behind_urls_are_opened_by_their_scheme():
    with serve() as there:
        files = RemoteFiles()
        store = files.open(there.url("/a"))
        assert (store.size, read(store)) == (MIB, CONTENT[WINDOW:])
        store.close()


# ---- proxies ----


def test_proxies_of_the_environment_are_used(monkeypatch):
    # A request to a proxy has the whole URL; this server gives the file of its path.
    with serve() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url(user="us3r:s3cr3t@"))
        store = RemoteFiles({"headers": {"X-Key": "1"}}).open("http://weights.example/a?x=1")
        assert read(store) == CONTENT[WINDOW:]
        assert {request.path for request in proxy.requests} == {"http://weights.example/a?x=1"}
        wanted = "Basic " + base64.b64encode(b"us3r:s3cr3t").decode()
        assert {request.headers["proxy-authorization"] for request in proxy.requests} == {wanted}
        store.close()
        with serve() as there:
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            RemoteFiles({}).open(there.url("/a")).close()
            assert len(there.requests) == 1


def test_https_goes_through_a_tunnel(monkeypatch):
    with serve() as proxy, serve(tls=True) as there:
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.port}")
        store = RemoteFiles({"verify": CERTIFICATE, "headers": {"X-Key": "1"}}).open(there.url("/a", "localhost"))
        assert read(store) == CONTENT[WINDOW:]
        assert [(request.method, request.path) for request in proxy.requests] == [
            ("CONNECT", f"localhost:{there.port}")
        ]
        assert "x-key" not in proxy.requests[0].headers
        store.close()


def test_proxies_that_refuse_are_named(monkeypatch):
    with serve(server.garbage(b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n")) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url(user="us3r:s3cr3t@"))
        monkeypatch.setenv("https_proxy", "http://us3r:s3cr3t@127.0.0.1:1")
        with pytest.raises(RemotePermissionError, match="proxy"):
            RemoteFiles({}).open("http://weights.example/a")
        with pytest.raises(RemoteError, match="the proxy: the connection failed") as caught:
            RemoteFiles({"retries": 0}).open("https://weights.example/a")
        assert "s3cr3t" not in in_all_words(caught.value)
        monkeypatch.setenv("http_proxy", "ftp://127.0.0.1:1")
        with pytest.raises(UnsupportedError, match="proxies must use http, https or socks, got ftp"):
            RemoteFiles({}).open("http://weights.example/a")


def test_a_socks_proxy_needs_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "socks", None)
    monkeypatch.setenv("http_proxy", "socks5://us3r:s3cr3t@127.0.0.1:1")
    with pytest.raises(ModuleNotFoundError, match="SOCKS proxies need PySocks, which is not installed: pip install"):
        RemoteFiles({}).open("http://weights.example/a")


@pytest.mark.parametrize("tls", [False, True])
def test_a_socks_proxy_is_used(monkeypatch, tls):
    pytest.importorskip("socks")
    with serve(tls=tls) as there, SocksProxy() as proxy:
        monkeypatch.setenv("https_proxy" if tls else "http_proxy", f"socks5h://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        store = RemoteFiles({"verify": CERTIFICATE} if tls else {}).open(there.url("/a", "localhost"))
        assert read(store) == CONTENT[WINDOW:]
        assert proxy.hosts == ["localhost"]
        store.close()


class SocksProxy:
    """A SOCKS 5 proxy without a password, which connects every name to this machine (RFC 1928)."""

    def __init__(self):
        self.hosts, self._listening = [], socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]

    def __enter__(self):
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._listening.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._connect, args=self._listening.accept()[:1], daemon=True).start()

    def _connect(self, client):
        stream = client.makefile("rb")
        stream.read(stream.read(2)[1])
        client.sendall(b"\5\0")
        *_, kind, length = stream.read(5)
        assert kind == 3  # a name
        self.hosts.append(stream.read(length).decode())
        there = socket.create_connection(("127.0.0.1", int.from_bytes(stream.read(2), "big")))
        client.sendall(b"\5\0\0\1" + bytes(6))
        threading.Thread(target=self._copy, args=(client, there), daemon=True).start()
        self._copy(there, client)

    @staticmethod
    def _copy(source, target):
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                target.sendall(data)


# ---- packages ----

WITHOUT = """
import sys
sys.modules["urllib3"] = None
import safeload
for url in ("http://127.0.0.1:9/a", "https://127.0.0.1:9/a", "hf://owner/name"):
    try:
        safeload.open(url)
    except ModuleNotFoundError as error:
        print(error, error.name)
"""


def test_without_urllib3_the_error_names_what_to_install():
    done = subprocess.run([sys.executable, "-I", "-c", WITHOUT], capture_output=True, text=True, check=True)
    text = "http, https and hf URLs need urllib3, which is not installed: pip install urllib3 urllib3"
    assert done.stdout.splitlines() == [text] * 3


@pytest.mark.parametrize("version", ["1.26.20", "2.2.3"])
def test_an_old_urllib3_is_named(monkeypatch, version):
    monkeypatch.setattr(urllib3, "__version__", version)
    with pytest.raises(UnsupportedError, match=rf"need urllib3 2.3 or later, but {version} is installed: pip install"):
        RemoteFiles({}).open("https://127.0.0.1:1/a")
