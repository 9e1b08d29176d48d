"""The only parser of URLs. Messages, joins, origins and connections use its results and never parse a URL again.

Servers, proxies and libraries disagree on spellings such as a backslash before "@". Therefore a URL for a connection is
rebuilt from its parts, using only characters with a single interpretation, or refused.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from ..core.text import is_absent, show
from ..errors import UnsupportedError

# A scheme has at least two letters, unlike a Windows drive. fsspec's chains begin with "scheme::".
_BEGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:://|::)")
# Between two links of a chain. IPv6 addresses and queries can contain "::" too, but without a scheme after it.
_CHAINED = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]+(?:://|::))")
# RFC 3986, appendix B: scheme, authority, path, query, fragment. Missing parts are None.
_PARTS = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)
_PORT = re.compile(r"[0-9]{1,5}")
# A place that cannot be a user and a password: no colon, IPv6, or a port.
_SOUND_PLACE = re.compile(r"[^:]*|\[[^\]]*\](?::[0-9]*)?|[^:]*:[0-9]{0,5}", re.DOTALL)
# S3 access points, which contain colons.
_ARN = re.compile(r"arn:aws[a-z-]*:s3[a-z-]*:")

# In these schemes, a repository, a container, or owner and repository precede "@".
_NAMED, _NAMED_TWICE = ("hf", "abfs", "abfss", "az"), ("github",)

_WEB = {"http": 80, "https": 443}
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
# May include the interface of a link-local address, with or without an escaped "%".
_IPV6 = re.compile(r"\[([0-9A-Fa-f:.]+)(?:%(?:25)?([A-Za-z0-9._~-]{1,32}))?\]")
# Some readers drop these characters, some treat them as delimiters.
_FORBIDDEN = {
    r"[\x00-\x1f\x7f]": "it has a control character",
    r"\\": "it has a backslash: escape it as %5C",
    "[\ud800-\udfff]": "it has a lone surrogate",
}
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_IN_PATH, _IN_QUERY = "/%:@!$&'()*+,;=~", "/?%:@!$&'()*+,;=~"
# fsspec's filesystems cut these endings off a name.
_S3, _GS = re.compile(r"\?versionId="), re.compile(r"#[0-9]+$|\?generation=")
_VERSIONED = {"s3": _S3, "s3a": _S3, "gs": _GS, "gcs": _GS} | dict.fromkeys(
    ("az", "abfs", "abfss"), re.compile(r"(?i)\?versionid=")
)
# Shorter values in a query are words and numbers, which may appear in messages.
_LONG_VALUE = 12
# Links of a chain without a path of their own.
CACHES = frozenset(("filecache", "simplecache", "blockcache", "cached"))

# Schemes allowed without `storage_options`: a path in a configuration must not reach every filesystem of fsspec.
PLAIN = ("https", "http", "hf", "s3", "gs", "az", "file", "memory")
# Hosts of the Hub's pages.
_PAGES = ("huggingface.co", "www.huggingface.co", "hf.co")
# Schemes without network access.
_HERE = ("file", "memory")
# Variables to forbid the network; huggingface_hub reads the first variable in the same way.
_OFFLINE = ("HF_HUB_OFFLINE", "SAFELOAD_OFFLINE")


class UrlError(ValueError):
    """A URL without a unique interpretation. The message gives the reason and quotes nothing."""


@dataclass(frozen=True, repr=False)
class Url:
    """A URL, or a link of a chain, as written."""

    scheme: str  # in lower case
    credentials: str | None  # before "@", escaped: user and password
    place: str | None  # host and port, or a bucket; None for a link without "://", such as "filecache"
    path: str
    query: str | None
    fragment: str | None

    def __repr__(self) -> str:
        return f"<Url {self.shown}>"

    @property
    def text(self) -> str:
        """The URL, with the scheme in lower case and all secrets."""
        if self.place is None:
            return f"{self.scheme}{self.path}{self.tail}"
        before = "" if self.credentials is None else f"{self.credentials}@"
        return f"{self.scheme}://{before}{self.place}{self.path}{self.tail}"

    @property
    def tail(self) -> str:
        """Query and fragment, with their marks."""
        query = "" if self.query is None else f"?{self.query}"
        return query if self.fragment is None else f"{query}#{self.fragment}"

    @property
    def hides_place(self) -> bool:
        """Whether place and path can be parts of a password that contains "/", "?" or "#", or has lost its "@"."""
        if self.place is None or self.scheme in ("file", "ollama") or _ARN.match(self.place):
            return False
        if _SOUND_PLACE.fullmatch(self.place) is None:
            return True
        # If there is no place, a slash too many may precede user and password.
        return ":" in (self.place or self.path) and "@" in self.path and not self.place.startswith("[")

    @property
    def _names_place(self) -> bool:
        """Whether the text before "@" is part of a name."""
        if self.credentials is None:
            return False
        return self.scheme in _NAMED_TWICE or (self.scheme in _NAMED and ":" not in self.credentials)

    @property
    def shown(self) -> str:
        """The URL for messages, reprs and pickles: without user, password, query and fragment, which may be secret."""
        if self.place is None:
            return f"{self.scheme}{self.path}"
        begin = f"{self.scheme}://"
        if self._names_place:
            return f"{begin}{self.credentials}@{self.place}{self.path}"
        if not self.hides_place:
            return f"{begin}{self.place}{self.path}"
        if _SOUND_PLACE.fullmatch(self.place) is not None:  # host and port, or a user and the beginning of a password
            return f"{begin}{self.place}/***@{self.path.rpartition('@')[2]}"
        _, at, rest = f"{self.path}{self.tail}".rpartition("@")
        return divided(f"{begin}{rest}").shown if at else f"{begin}{self.place.partition(':')[0]}:***"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Secrets to mask in other libraries' messages: user, password, query and its values, escaped or not."""
        if self.place is None or self.shown == self.text:
            return ()
        user, _, password = ("" if self._names_place else self.credentials or "").partition(":")
        texts = [password, *([] if password else [user]), self.query or ""]
        if self.hides_place:
            texts += [self.place.partition(":")[2], self.path]
        values = (field.partition("=")[2] for field in (self.query or "").split("&"))
        texts += [value for value in values if len(value) >= _LONG_VALUE]
        # As written, unescaped, and fully escaped in upper and lower case.
        every = [_quoted(_decoded(text), "") for text in texts]
        lower = [re.sub("%..", lambda match: match[0].lower(), text) for text in every]
        return tuple({*texts, *map(_decoded, texts), *every, *lower} - {""})


@dataclass(frozen=True, repr=False)
class WebUrl:
    """An http or https URL with a single interpretation: lower case, ASCII, escaped, without credentials."""

    scheme: str
    host: str  # IPv6 addresses in brackets
    port: int
    path: str  # begins with "/"
    query: str | None

    def __repr__(self) -> str:
        return f"<WebUrl {self.shown}>"

    @property
    def origin(self) -> tuple[str, str, int]:
        """The scope of credentials: scheme, host and port."""
        return self.scheme, self.host, self.port

    @property
    def place(self) -> str:
        """Host and port; the default port is omitted."""
        return self.host if self.port == _WEB[self.scheme] else f"{self.host}:{self.port}"

    @property
    def shown(self) -> str:
        """The URL for messages, without the query."""
        return divided(f"{self.scheme}://{self.place}{self.path}").shown

    @property
    def text(self) -> str:
        """The URL for a connection."""
        return f"{self.scheme}://{self.place}{self.path}" + ("" if self.query is None else f"?{self.query}")

    def redirected(self, location: str) -> WebUrl:
        """Resolve the target of a redirect (RFC 3986, 5.2)."""
        _check_characters(location)
        scheme, place, path, query, _ = _matched(location).groups()
        if scheme is not None or place is not None:
            if place is None:
                raise UrlError("it is not http or https")
            if "@" in place:
                raise UrlError("it contains a user name or a password")
            return web_url(Url((scheme or self.scheme).lower(), None, place, path, query, None))[0]
        if not path:
            path, query = self.path, self.query if query is None else query
        elif not path.startswith("/"):
            path = f"{self.path.rpartition('/')[0]}/{path}"
        return replace(self, path=_web_path(path), query=None if query is None else _escaped(query, _IN_QUERY))


def is_url(path: str) -> bool:
    """Return whether a path is a URL, or an fsspec chain such as ``filecache::s3://bucket/key``."""
    return ("://" in path or "::" in path) and _BEGIN.match(path) is not None


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, or of the first link of a chain, in lower case."""
    return re.split(r"://|::", url, maxsplit=1)[0].lower()


def links(url: str) -> list[str]:
    """Split a chain into its links; a plain URL is a chain with a single link."""
    return _CHAINED.split(url)


def divided(url: str) -> Url:
    """Parse a URL, or a link of a chain."""
    match = _matched(url)
    if "://" not in url or match[1] is None or match[2] is None:
        path, mark, rest = re.fullmatch("([^?#]*)([?#]?)(.*)", url, re.DOTALL).groups()  # type: ignore[union-attr]
        return Url("", None, None, path, rest if mark == "?" else None, rest if mark == "#" else None)
    credentials, at, place = match[2].rpartition("@")
    return Url(match[1].lower(), credentials if at else None, place, match[3], match[4], match[5])


def parsed(url: str) -> tuple[Url, ...]:
    """Parse a URL into the links of its chain."""
    return tuple(map(divided, links(url)))


def shown(url: str) -> str:
    """Return a URL or a chain without its secrets, for messages, reprs and pickles."""
    return "::".join(link.shown for link in parsed(url))


def web_url(url: Url) -> tuple[WebUrl, tuple[str, str] | None]:
    """Return the URL to connect to, and the user and password if the URL has them."""
    if url.scheme not in _WEB or url.place is None:
        raise UrlError("it is not http or https")
    _check_characters(url.text)
    host, colon, digits = (url.place, "", "") if url.place.endswith("]") else url.place.rpartition(":")
    if not colon:
        host, digits = url.place, ""
    if digits and (_PORT.fullmatch(digits) is None or not 0 < int(digits) < 1 << 16):
        raise UrlError("its port is not a number from 1 to 65535: escape / in a password as %2F, ? as %3F and # as %23")
    if not host:
        raise UrlError("it has no host")
    port = int(digits) if digits else _WEB[url.scheme]
    query = None if url.query is None else _escaped(url.query, _IN_QUERY)
    web = WebUrl(url.scheme, _web_host(host), port, _web_path(url.path), query)
    if not url.credentials:
        return web, None
    if " " in url.credentials:
        raise UrlError("it has a space before the host: escape it as %20")
    user, _, password = url.credentials.partition(":")
    return web, (_decoded(user), _decoded(password))


def split(url: str, literal: bool = False) -> tuple[str, str]:
    """Return the folder of a URL, without a final slash, and the last name in it; a query stays with the folder."""
    before, link, after = _naming(url)
    if not literal and _is_escaped(link, url):
        folder, _, name = link.path.rstrip("/").rpartition("/")
        decoded = _decoded(name)
        return f"{before}{replace(link, path=folder).text}{after}", name if {"/", "\0"} & set(decoded) else decoded
    folder, _, name = f"{link.place or ''}{link.path}{link.tail}".rstrip("/").rpartition("/")
    return f"{before}{replace(link, place=folder, path='', query=None, fragment=None).text}{after}", name


def join(folder: str, name: str, literal: bool = False) -> str:
    """Return the URL of a bare name in a folder; http, https and file escape marks in it, and a query is kept."""
    before, link, after = _naming(folder)
    if not literal and _is_escaped(link, folder):
        path = f"{link.path.rstrip('/')}/{_quoted(name, '')}"
        return f"{before}{replace(link, path=path, fragment=None).text}{after}"
    if (version := _VERSIONED.get(link.scheme)) is not None and version.search(name):
        raise UrlError("the name ends in a version suffix, which this store would read as a version of another file")
    path = f"{link.path}{link.tail}".rstrip("/")
    joined = f"{before}{replace(link, path=f'{path}/{name}', query=None, fragment=None).text}{after}"
    if len(links(joined)) != len(links(folder)):
        raise UrlError("the name contains ::, which would start another link of a chained URL")
    return joined


def escaped(url: str) -> str:
    """Return the ``file://`` URL of an unescaped path."""
    begin, mark, path = url.partition("://")
    return f"{begin}{mark}{_quoted(path, '/:')}"


def unescaped(url: str) -> str:
    """Undo `escaped`."""
    begin, mark, path = url.partition("://")
    return f"{begin}{mark}{_decoded(path)}"


def _matched(text: str) -> re.Match[str]:
    match = _PARTS.fullmatch(text)
    assert match is not None  # it matches any str
    return match


def _check_characters(text: str) -> None:
    for pattern, fault in _FORBIDDEN.items():
        if re.search(pattern, text):
            raise UrlError(fault)


def _web_host(host: str) -> str:
    if host.startswith("["):
        import ipaddress  # only here: it is rarely needed

        match = _IPV6.fullmatch(host)
        try:
            address = ipaddress.IPv6Address(match[1] if match is not None else "").compressed
        except ValueError:
            raise UrlError("its host is not a valid IPv6 address") from None
        return f"[{address}%25{match[2]}]" if match is not None and match[2] else f"[{address}]"
    plain = host.lower()
    if not plain.isascii():
        try:
            import idna  # a dependency of huggingface_hub and requests
        except ImportError:
            if not is_absent("idna"):
                raise
            raise UrlError("its host is not ASCII: install idna, or write the host in its xn--... form") from None
        try:
            plain = str(idna.encode(plain, strict=True, std3_rules=True).decode())
        except UnicodeError:
            plain = ""
    if _HOST.fullmatch(plain) is None:
        raise UrlError("its host is not a valid host name")
    return plain


def _web_path(path: str) -> str:
    """Escape a path and remove dot segments, escaped dots included, as browsers do."""
    kept: list[str] = []
    segments = _escaped(path, _IN_PATH).removeprefix("/").split("/")
    for number, segment in enumerate(segments):
        dots = segment.lower().replace("%2e", ".")
        if dots == ".." and kept:
            kept.pop()
        if dots not in (".", ".."):
            kept.append(segment)
        elif number == len(segments) - 1:
            kept.append("")
    return "/" + "/".join(kept)


def _escaped(text: str, safe: str) -> str:
    """Escape forbidden characters of a path or a query; existing escapes stay as they are."""
    return _quoted(_LONE_PERCENT.sub("%25", text), safe)


def _quoted(text: str, safe: str) -> str:
    from urllib.parse import quote  # only here and below: most paths are local, and the import takes milliseconds

    return quote(text.encode("utf-8", "surrogateescape"), safe=safe)


def _decoded(path: str) -> str:
    from urllib.parse import unquote

    return unquote(path, "utf-8", "surrogateescape")


def _naming(url: str) -> tuple[str, Url, str]:
    """Return the first link of a chain that is not a cache, whose path names the file, and what is before and after."""
    chain = parsed(url)
    at = next((k for k, link in enumerate(chain) if (link.scheme or link.path) not in CACHES), len(chain) - 1)
    before, after = ([link.text for link in part] for part in (chain[:at], chain[at + 1 :]))
    return "::".join([*before, ""]), chain[at], "::".join(["", *after])


def _is_escaped(link: Url, url: str) -> bool:
    """Return whether the path is escaped: fsspec, which reads chains, treats only http and https paths as escaped."""
    return link.scheme in _WEB or (link.scheme == "file" and len(links(url)) == 1)


# ---- rules: schemes, chains and networks ----


def of_page(url: str) -> str | None:
    """Return the ``hf://`` URL for a page of huggingface.co, or None for other URLs."""
    link = divided(url)
    names = link.path.strip("/").split("/")
    if link.scheme not in _WEB or (link.place or "").lower() not in _PAGES:
        return None
    kind = f"{names.pop(0)}/" if names[:1] in (["datasets"], ["spaces"]) else ""
    if len(names) < 2 or not all(names[:2]):
        return None
    (owner, name), inner, revision = names[:2], names[2:], "main"
    if len(inner) > 1 and inner[0] in ("resolve", "blob", "tree", "raw"):
        revision, inner = inner[1], inner[2:]
    at = "" if revision == "main" else f"@{revision}"
    return "/".join((f"hf://{kind}{owner}/{name}{at}", *inner))


def needs_query(url: str) -> bool:
    """Return whether a URL has a query or a fragment, without which it would lead elsewhere."""
    return any(link.tail for link in parsed(url) if link.place is not None)


def check_allowed(url: str, asked: bool) -> None:
    """Refuse URLs the caller may not have meant to open."""
    scheme = scheme_of(url)
    chained = len(links(url)) > 1
    if scheme == "ollama":  # `core.opening` resolves the names that callers pass themselves
        text = "it leads to files of this machine, so it cannot be in a list, a plan, an index or a destination"
        raise UnsupportedError(f"{shown(url)}: an ollama:// name stands alone: {text}")
    if not asked and (chained or scheme not in PLAIN):
        what = "a chain of URLs" if chained else f"the scheme {show(scheme)}"
        text = f"{what} needs storage_options= (which may be empty); without it, safeload opens only {', '.join(PLAIN)}"
        raise UnsupportedError(f"{shown(url)}: {text}")
    if chained or scheme != "hf":  # `hub.Hub` looks into the cache before it needs the network
        check_online(url)


def check_online(url: str) -> None:
    """Refuse a URL that needs the network if a variable forbids it."""
    variable = offline()
    if variable is not None and any(scheme_of(link) not in _HERE for link in links(url) if "://" in link):
        raise UnsupportedError(f"{shown(url)}: {variable} is set, which forbids network access")


def check_no_page(url: str) -> None:
    """Refuse a page of the Hub, which is HTML about a model or a file."""
    plain = shown(url)
    page = of_page(plain)
    if page is not None and "/resolve/" not in plain and "/raw/" not in plain:
        raise UnsupportedError(f"{plain}: this is a web page of the Hub: open {page} instead")


def offline() -> str | None:
    """Return the variable that forbids the network, or None."""
    return next((name for name in _OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def public(url: str) -> str:
    """Return a URL without secrets that still leads to its file."""
    if needs_query(url):
        text = "may be a secret and must stay in this process: it cannot go into a pickle, a plan or a journal"
        raise UnsupportedError(f"{shown(url)}: the query of this URL {text}")
    if any(link.hides_place for link in parsed(url)):
        raise UnsupportedError(f"{shown(url)}: the @ of this path may end a password: escape it as %40")
    return shown(url)


def local_path(url: str) -> str:
    """Return the path of a ``file://`` URL."""
    if os.name == "nt":
        # fsspec's `unstrip_protocol` writes two slashes before a drive.
        url = re.sub(r"^(file://)([a-z]:/)", r"\1/\2", url, flags=re.IGNORECASE)
    link = divided(url)
    if link.credentials is not None or (link.place or "").lower() not in ("", "localhost"):
        raise UnsupportedError(f"{shown(url)}: a file:// URL must have three slashes before an absolute path")
    if link.tail:
        text = "a file:// URL must not have a query or a fragment: escape ? as %3F and # as %23"
        raise UnsupportedError(f"{shown(url)}: {text}")
    if re.search("%(?:2[Ff]|00)", link.path):
        raise UnsupportedError(f"{shown(url)}: a file:// URL must not have an escaped slash or NUL")
    if os.name != "nt":
        return _decoded(link.path)
    from urllib.request import url2pathname

    return url2pathname(link.path)
