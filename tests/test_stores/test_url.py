"""URLs of weights: what is one, what messages show of it, and which are opened without being asked for."""

import os

import pytest

from safeload import UnsupportedError
from safeload.stores import url as urls
from safeload.stores.options import public_options
from safeload.stores.remote_files import RemoteFiles


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
    ],
)
def test_what_may_be_secret_is_not_shown(url, shown):
    assert urls.shown(url) == shown
    assert urls.shown(shown) == shown


@pytest.mark.parametrize(
    "url", ["ftp://host/a", "filecache::https://host/a", "zip://a::file:///b", "local://x", "s3a://b"]
)
def test_only_plain_urls_are_opened_without_being_asked_for(url):
    with pytest.raises(UnsupportedError, match="only with storage_options="):
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
    for url in ("https://host/a?s3cr3t", "hf://owner/name", "filecache::s3://bucket/key"):
        with pytest.raises(UnsupportedError, match=f"{variable} is set") as caught:
            urls.check_allowed(url, asked=True)
        assert "s3cr3t" not in str(caught.value)
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
    assert public_options(options) == {
        "endpoint_url": "https://host", "anon": True, "region": {},
        "client_kwargs": {"endpoint_url": "http://host"}, "headers": {},
    }  # fmt: skip
    assert public_options(None) is None
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
    with pytest.raises(UnsupportedError, match=f"this is a page of the Hub: open {url}$"):
        RemoteFiles().open(page)
    urls.check_no_page("https://huggingface.co/owner/name/resolve/main/model.safetensors")
    urls.check_no_page("https://host/owner/name")
