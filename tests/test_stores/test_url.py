"""URLs of weights: what is one, what messages show of it, and which are opened without being asked for."""

import os
import random
from urllib.parse import unquote, urlsplit

import pytest
from builders.inside import RemoteFiles
from builders.inside import base_urls as urls

import safeload.remote
from safeload import UnsupportedError
from safeload.errors import RemoteError


@pytest.mark.parametrize(
    ("path", "is_url"),
    [
        ("https://host/a", True),
        ("HTTP://host/a", True),
        ("filecache::s3://bucket/key", True),
        ("C://folder/a", False),
        ("C:\\folder", False),
        ("https:/host/a", False),
        ("folder/https://host", False),
        ("://host", False),
        ("", False),
        ("1s://x", False),
    ],
)
def test_a_scheme_makes_a_url(path, is_url):
    assert urls.is_url(path) is is_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a", "https://host/a"),
        ("HTTPS://Host/a?b#c", "https://Host/a"),
        ("https://me:s3cr3t@host:8/a?s3cr3t", "https://host:8/a"),
        ("https://s3cr3t@host/a@b", "https://host/a@b"),
        ("https://host?s3cr3t", "https://host"),
        ("https://host#s3cr3t", "https://host"),
        ("https://me:s3@cr3t@host/a", "https://host/a"),
        ("https://me:s3cr3t/s3cr3t@host/a", "https://host/a"),
        ("https://me:s3cr3t?s3cr3t@host/a?s3cr3t", "https://host/a"),
        ("https://me:s3cr3t#s3cr3t@host", "https://host"),
        ("https://[fe80::1]:8/a?s3cr3t", "https://[fe80::1]:8/a"),
        ("https://[::1]/a@b?s3cr3t", "https://[::1]/a@b"),
        ("https://me:s3cr3t@[::ffff:1.2.3.4]/a", "https://[::ffff:1.2.3.4]/a"),
        ("https://host/a?key=b::s3cr3t", "https://host/a"),
        ("https://host/a?key=b::https://s3cr3t@other/c?s3cr3t", "https://host/a::https://other/c"),
        ("hf://owner/name@refs%2Fpr%2F1/a", "hf://owner/name@refs%2Fpr%2F1/a"),
        ("abfss://container@account.dfs.core.windows.net/a?s3cr3t", "abfss://container@account.dfs.core.windows.net/a"),
        ("s3://key:s3cr3t@bucket/a", "s3://bucket/a"),
        ("zip://inner.npz::https://me:s3cr3t@host/a.zip?s3cr3t", "zip://inner.npz::https://host/a.zip"),
        ("filecache::/a?s3cr3t", "filecache::/a"),
        ("simplecache::https::s3cr3t@", "simplecache::https::s3cr3t@"),
        ("https://\n/a", "https://\n/a"),
        ("http://u:s3cr3t", "http://u:***"),
        ("http://u:s3cr3t/s3cr3t", "http://u:***"),
        ("http://u:s3cr3t\\s3cr3t/a", "http://u:***"),
        ("http://u:s3cr3t\\@host/a", "http://host/a"),
        ("http://u:1/s3cr3t@host/", "http://u:1/***@host/"),
        ("http://u:/s3cr3t@host/a", "http://u:/***@host/a"),
        ("http:///u:s3cr3t@host/a", "http:///***@host/a"),
        ("https:///u:s3cr3t/s3cr3t@host:8/a?s3cr3t", "https:///***@host:8/a"),
        ("s3:///key:s3cr3t@bucket/a", "s3:///***@bucket/a"),
        ("https:///a@b", "https:///a@b"),
        ("http://u:1?s3cr3t@host/", "http://u:1"),
        ("http://u:1#s3cr3t@host/", "http://u:1"),
        ("http://a@u:s3cr3t/s3cr3t@host/a", "http://host/a"),
        ("http://u:s3cr3t/x@v:s3cr3t", "http://v:***"),
        ("sftp://u:s3cr3t", "sftp://u:***"),
        ("s3://key:s3cr3t/s3cr3t@bucket/a", "s3://bucket/a"),
        ("s3://arn:aws:s3:us-west-2:123:accesspoint/a/b@c", "s3://arn:aws:s3:us-west-2:123:accesspoint/a/b@c"),
        ("s3://arn:s3cr3t/s3cr3t@bucket/a", "s3://bucket/a"),
        ("http://arn:s3cr3t", "http://arn:***"),
        ("simplecache::http://u:s3cr3t", "simplecache::http://u:***"),
        ("github://owner:name@main/a", "github://owner:name@main/a"),
        ("az://u:s3cr3t@host/a", "az://host/a"),
        ("file://C:/a@b", "file://C:/a@b"),
    ],
)
def test_what_may_be_secret_is_not_shown(url, shown):
    assert urls.shown(url) == shown
    assert urls.shown(shown) == shown


@pytest.mark.parametrize(
    "url", ["ftp://host/a", "filecache::https://host/a", "zip://a::file:///b", "local://x", "s3a://b"]
)
def test_only_plain_urls_are_opened_without_being_asked_for(url):
    with pytest.raises(UnsupportedError, match="needs storage_options="):
        urls.check_allowed(f"{url}?s3cr3t", asked=False)
    urls.check_allowed(url, asked=True)


def test_an_address_of_ipv6_is_not_a_chain():
    urls.check_allowed("https://[fe80::1]/a?b=c::d", asked=False)
    assert urls.links("https://[fe80::1]/a?b=c::d") == ["https://[fe80::1]/a?b=c::d"]
    assert urls.links("zip://a::cached::s3://b/c") == ["zip://a", "cached", "s3://b/c"]


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "SAFELOAD_OFFLINE"])
def test_a_variable_forbids_the_network(variable, monkeypatch):
    for value, offline in [("1", True), ("true", True), ("YES", True), ("0", False), ("", False)]:
        monkeypatch.setenv(variable, value)
        assert urls.offline() == (variable if offline else None)
    monkeypatch.setenv(variable, "on")
    for url in ("https://host/a?s3cr3t", "filecache::hf://owner/name", "filecache::s3://bucket/key"):
        with pytest.raises(UnsupportedError, match=f"{variable} is set") as caught:
            urls.check_allowed(url, asked=True)
        assert "s3cr3t" not in str(caught.value)
    urls.check_allowed("hf://owner/name", asked=False)  # the cache can have it
    with pytest.raises(UnsupportedError, match=f"{variable} is set"):
        urls.check_online("hf://owner/name")
    urls.check_allowed("memory://a", asked=False)
    urls.check_allowed("file:///a", asked=False)


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("https://host/a/b.json", "https://host/a", "b.json"),
        ("https://host/a/b.json?sig=x/y", "https://host/a?sig=x/y", "b.json"),
        ("https://host/a/?s", "https://host?s", "a"),
        ("s3://bucket/a?b", "s3://bucket", "a?b"),
        ("hf://owner/name@main/a", "hf://owner/name@main", "a"),
    ],
)
def test_a_url_is_divided_and_joined(url, folder, name):
    assert urls.split(url) == (folder, name)
    assert urls.join(*urls.split(url)) == url.replace("/?", "?")
    assert urls.join(folder, "other").startswith(folder.partition("?")[0] + "/other")


def test_urls_of_files_become_paths():
    assert urls.local_path("file:///a%20b/c").replace("\\", "/").endswith("/a b/c")
    with pytest.raises(UnsupportedError, match="three slashes"):
        urls.local_path("file://folder/a")
    for url in ("file:///a?b", "file:///a#b", "file:///a%2fb", "file:///a%00", "file://u@localhost/a"):
        with pytest.raises(UnsupportedError, match="file:// URL must"):
            urls.local_path(url)
    if os.name == "nt":
        for url in ("file://C:/a b/c", "file:///C:/a%20b/c", "FILE:///c:/a b/c"):
            assert urls.local_path(url).lower() == r"c:\a b\c"
    else:
        with pytest.raises(UnsupportedError, match="three slashes"):
            urls.local_path("file://C:/a")


def test_what_is_pickled_has_no_secret():
    options = {
        "key": "s3cr3t", "endpoint_url": "https://me:s3cr3t@host?s3cr3t", "anon": True, "region": {"token": "s3cr3t"},
        "client_kwargs": {"endpoint_url": "http://host", "aws_secret_access_key": "s3cr3t"}, "headers": {"A": "s3cr3t"},
        "project": ["s3cr3t"],
    }  # fmt: skip
    assert RemoteFiles(options).public_options() == {
        "endpoint_url": "https://host", "anon": True, "region": {},
        "client_kwargs": {"endpoint_url": "http://host"}, "headers": {},
    }  # fmt: skip
    assert RemoteFiles(None).public_options() is None
    for url in ("http://u:1/s3cr3t@host/", "http://u:s3cr3t", "s3://k:s3/cr3t@b"):
        with pytest.raises(UnsupportedError, match="escape it as %40") as caught:
            RemoteFiles().public(url)
        assert "s3cr3t" not in str(caught.value)
    files = RemoteFiles(options)
    assert "s3cr3t" not in repr(files) + repr(files.__reduce__())
    with pytest.raises(UnsupportedError, match="the query of this URL may be a secret"):
        files.public("https://host/a?s3cr3t")
    assert files.public("https://me:s3cr3t@host/a") == "https://host/a"


@pytest.mark.parametrize(
    ("page", "url"),
    [
        ("https://huggingface.co/owner/name", "hf://owner/name"),
        ("https://huggingface.co/owner/name/tree/v1.0", "hf://owner/name@v1.0"),
        ("https://hf.co/owner/name/blob/main/model.safetensors?download=true", "hf://owner/name/model.safetensors"),
    ],
)
def test_a_page_of_the_hub_is_told_from_a_file(page, url):
    with pytest.raises(UnsupportedError, match=f"this is a web page of the Hub: open {url} instead$"):
        RemoteFiles().open(page)
    urls.check_no_page("https://huggingface.co/owner/name/resolve/main/model.safetensors")
    urls.check_no_page("https://host/owner/name")


# ---- connections ----


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("HTTP://Host.Example:080/a", "http://host.example/a"),
        ("https://host:443", "https://host/"),
        ("https://host:", "https://host/"),
        ("http://host:443/", "http://host:443/"),
        ("http://host./a", "http://host./a"),
        ("http://127.0.0.1:8000/a//b/", "http://127.0.0.1:8000/a//b/"),
        ("http://my_host-1/a", "http://my_host-1/a"),
        ("http://[2001:DB8:0::1]:80/a", "http://[2001:db8::1]/a"),
        ("http://[0:0::1]:8/", "http://[::1]:8/"),
        ("http://[fe80::1%eth0]/", "http://[fe80::1%25eth0]/"),
        ("http://[fe80::1%25eth0]/", "http://[fe80::1%25eth0]/"),
        ("http://u:p@x@host/a", "http://host/a"),
        ("http://@host/a", "http://host/a"),
        ("http://host/a b\u00e9?c d#e", "http://host/a%20b%C3%A9?c%20d"),
        ("http://host/a/./b/../c", "http://host/a/c"),
        ("http://host/a/%2e%2E/%2e/c", "http://host/c"),
        ("http://host/../../a/..", "http://host/"),
        ("http://host/a%2Fb%5c%41", "http://host/a%2Fb%5c%41"),
        ("http://host/100%/%zz?%", "http://host/100%25/%25zz?%25"),
        ("http://host/?", "http://host/?"),
        ("http://host?a/b", "http://host/?a/b"),
        ("http://host/a;b=c,d@e:f!$&'()*+", "http://host/a;b=c,d@e:f!$&'()*+"),
        ("http://host/[a]|<b>", "http://host/%5Ba%5D%7C%3Cb%3E"),
    ],
)
def test_a_connection_gets_a_url_that_all_read_alike(url, text):
    web, _ = urls.web_url(urls.divided(url))
    assert web.text == text
    assert urls.web_url(urls.divided(text))[0] == web


@pytest.mark.parametrize(
    ("url", "credentials"),
    [
        ("http://host/", None),
        ("http://@host/", None),
        ("http://me@host/", ("me", "")),
        ("http://me:@host/", ("me", "")),
        ("http://:s@host/", ("", "s")),
        ("http://m%65:a:b%40%2F@host/", ("me", "a:b@/")),
        ("http://me:s3@cr3t@host/", ("me", "s3@cr3t")),
    ],
)
def test_user_and_password_are_divided_from_the_host(url, credentials):
    assert urls.web_url(urls.divided(url))[1] == credentials


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://a\\@b/", "backslash"),
        ("http://a/b\\c", "backslash"),
        ("http://a/?\\", "backslash"),
        ("http://a\t/", "control"),
        ("http://a/\r\nX: 1", "control"),
        ("http://a/\x00", "control"),
        ("http://a/\x7f", "control"),
        ("http://a /", "not a valid host name"),
        ("http:// a/", "not a valid host name"),
        ("http://u s@a/", "space"),
        ("http://a%41/", "not a valid host name"),
        ("http://a%2fb/", "not a valid host name"),
        ("http://a..b/", "not a valid host name"),
        ("http://.a/", "not a valid host name"),
        ("http://a:b:80/", "not a valid host name"),
        ("http://a;b/", "not a valid host name"),
        ("http://a\u3002b/", "host"),
        ("http://\u24d4/", "host"),
        ("http://a\u00a0/", "host"),
        ("http://" + "a" * 64 + "/", "not a valid host name"),
        ("http://a:0/", "port"),
        ("http://a:65536/", "port"),
        ("http://a:+80/", "port"),
        ("http://a:8 0/", "port"),
        ("http://a:\u0668/", "port"),
        ("http://a:-1/", "port"),
        ("http://u:s3cr3t", "port"),
        ("http://u:s3/cr3t@a/", "port"),
        ("http://[::1", "IPv6"),
        ("http://[::1]x/", "port"),
        ("http://[::g]/", "IPv6"),
        ("http://[1.2.3.4]/", "IPv6"),
        ("http://[]/", "IPv6"),
        ("http://[fe80::1%]/", "IPv6"),
        ("http://::1/", "host|port"),
        ("http:///a", "no host"),
        ("http://u@/a", "no host"),
        ("http://:80/", "no host"),
        ("http:/a", "not http"),
        ("http:a", "not http"),
        ("ftp://a/", "not http"),
        ("http://a/\ud800", "surrogate"),
    ],
)
def test_a_url_that_may_be_read_in_two_ways_is_refused(url, reason):
    with pytest.raises(urls.UrlError, match=reason) as caught:
        urls.web_url(urls.divided(url))
    assert "s3" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("x", "https://host:8/a/x"),
        ("./x?y#z", "https://host:8/a/x?y"),
        ("../../x", "https://host:8/x"),
        ("/x", "https://host:8/x"),
        ("?x", "https://host:8/a/b?x"),
        ("#x", "https://host:8/a/b?q"),
        ("//Other/x", "https://other/x"),
        ("HTTPS://Other:443", "https://other/"),
        ("http://other/", "http://other/"),
        ("%2e%2e/x", "https://host:8/x"),
        ("a b", "https://host:8/a/a%20b"),
        ("/@x:y", "https://host:8/@x:y"),
        ("https:x", None),
        ("https:/x", None),
        ("x:y", None),
        ("ftp://other/", None),
        ("//u:p@other/", None),
        ("https://u@other/", None),
        ("https://@other/", None),
        ("https://other\\@host/", None),
        ("\\\\other/x", None),
        ("/\\other", None),
        ("//", None),
        ("///x", None),
        ("//other:x/", None),
        ("/x\ny", None),
        ("//other\u3002example/", None),
    ],
)
def test_redirects_are_resolved(location, text):
    web, _ = urls.web_url(urls.divided("https://host:8/a/b?q"))
    if text is not None:
        assert web.redirected(location).text == text
    else:
        with pytest.raises(urls.UrlError):
            web.redirected(location)


def test_every_library_divides_the_url_of_a_connection_alike():
    """Random texts of what delimits something: they are refused, or urllib3 and urllib agree with the parser."""
    parse_url = pytest.importorskip("urllib3.util").parse_url
    choice, accepted = random.Random(7), 0
    parts = [
        "a",
        "b.c",
        "@",
        ":",
        "/",
        "?",
        "#",
        "\\",
        "%",
        "%2f",
        "%40",
        "[",
        "]",
        "::1",
        ".",
        "..",
        "80",
        " ",
        "\t",
        "\u00e9",
        ";",
    ]
    for _ in range(20_000):
        text = "http://" + "".join(choice.choices(parts, k=choice.randint(1, 8)))
        try:
            web, _ = urls.web_url(urls.divided(text))
        except urls.UrlError:
            continue
        accepted += 1
        theirs, also = parse_url(web.text), urlsplit(web.text)
        assert (theirs.auth, theirs.host, theirs.port or 80) == (None, web.host, web.port), text
        assert (also.username, also.hostname, also.port or 80) == (None, web.host.strip("[]"), web.port), text
        assert theirs.path.lower() == web.path.lower(), text
    assert accepted > 500


# ---- names ----

NAMES = [
    "a#1",
    "b?c",
    "d%41",
    "e%2Ff",
    "%2e%2e",
    "..%2Fx",
    "g h",
    "\u00e9\u4e2d",
    "a+b",
    "a@b",
    "a;b=c&d",
    "~",
    "'\"<",
    "a\nb",
    "\udcff",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "folder", ["http://host/a", "https://host:8/a%20b?sig=x/y", "http://host", "file:///a", "file://", "s3://bucket/a",
               "memory://", "hf://owner/name@main", "simplecache::https://host/a?s", "zip://a::http://host/b.zip?c",
               "filecache::file:///a b"]
)  # fmt: skip
def test_names_are_data(folder, name):
    url = urls.join(folder, name)
    assert urls.split(url) == (folder, name)
    assert urls.links(url)[1:-1] == urls.links(folder)[1:-1]
    if folder.startswith("http"):
        web, _ = urls.web_url(urls.divided(url))
        assert web.path.startswith(urls.web_url(urls.divided(folder))[0].path.rstrip("/") + "/")
        assert unquote(web.path.rpartition("/")[2], errors="surrogateescape") == name
        assert web.query == urls.divided(folder).query
    if folder == "file:///a" and os.name != "nt":
        assert urls.local_path(url) == f"/a/{name}"


@pytest.mark.parametrize(
    ("folder", "name"),
    [("s3://b", "a?versionId=1"), ("gs://b/c", "a#12"), ("gcs://b", "a?generation=1"), ("az://b", "a?VersionId=1"),
     ("simplecache::s3://b", "a?versionId=1")],
)  # fmt: skip
def test_a_name_is_no_version_of_another_file(folder, name):
    with pytest.raises(UnsupportedError, match="version"):
        RemoteFiles({}).join(folder, name)


@pytest.mark.parametrize("folder", ["s3://b", "gs://b/c", "memory://", "zip://a::s3://b/c.zip", "simplecache::s3://b"])
@pytest.mark.parametrize("name", ["a::filecache::b", "]::ab::", "a::s3::", "::memory::", ":::gs::b"])
def test_a_name_is_no_link_of_a_chain(folder, name):
    """An index of a stranger's could have a shard read from elsewhere."""
    with pytest.raises(UnsupportedError, match="another link of a chain"):
        RemoteFiles({}).join(folder, name)
    assert urls.split(urls.join("https://host/a", name)) == ("https://host/a", name)


@pytest.mark.parametrize("name", ["a::b", "::", "a::b.safetensors", "a:::"])
def test_colons_of_a_name_are_data(name):
    assert urls.split(urls.join("s3://b/c", name)) == ("s3://b/c", name)


def test_urls_of_archives_and_caches_are_divided_at_the_link_that_names_the_file():
    assert urls.split("zip://a/b::https://host/c.zip?d") == ("zip://a::https://host/c.zip?d", "b")
    assert urls.split("simplecache::https://host/a/b%23?d") == ("simplecache::https://host/a?d", "b#")
    assert urls.join("zip://::cached::s3://c/d", "x") == "zip:///x::cached::s3://c/d"
    assert urls.split("memory://a") == ("memory://", "a")


SIGNED = "https://user:pa%2Fss%40word@host/a?X-Amz-Signature=deadbeefcafe12345678&sig=abc%2Bdef%2F123456%3D&v=12"


@pytest.mark.parametrize(
    "text",
    ["deadbeefcafe12345678", "abc+def/123456=", "abc%2bdef%2f123456%3d", "abc%2Bdef%2F123456%3D", "pa/ss@word",
     "pa%2fss%40word", "pa%2Fss%40word", "X-Amz-Signature=deadbeefcafe12345678&sig=abc%2Bdef%2F123456%3D&v=12"],
)  # fmt: skip
@pytest.mark.parametrize("chained", [False, True])
def test_no_message_has_a_secret_in_any_spelling(chained, text, monkeypatch, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    from fsspec.registry import _registry

    class Refusing(fsspec.AbstractFileSystem):
        protocol, cachable, says = "https", False, ""

        def info(self, path, **options):
            raise ValueError(self.says)

        exists = ls = cat_file = info

        def get_file(self, path, target, **options):
            raise ValueError(self.says)

    monkeypatch.setitem(_registry, "https", Refusing)
    location = safeload.remote.of_fsspec(Refusing(), SIGNED)
    files, path = location.files, location.path
    if chained:
        files, path = RemoteFiles({"simplecache": {"cache_storage": str(tmp_path)}}), f"simplecache::{SIGNED}"

    def told(message):
        Refusing.says = message
        with pytest.raises(RemoteError) as caught:
            files.open(path)
        return str(caught.value)

    for message in (f"wrong signature {text}", f"{{'a': b'{text}'}}", f"no file at host:443/{text}."):
        assert text not in told(message)
    assert "version 12 of a file" in told("version 12 of a file")
