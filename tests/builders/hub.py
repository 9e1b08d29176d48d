"""A stand-in for the Hugging Face Hub on this machine: the part of its API that huggingface_hub and safeload use.

Files are given by a server of their own, as by the Hub's CDN, which refuses requests that carry a token.
`python -m builders.hub FOLDER owner/name` gives the files of a folder from a process of its own, as
`builders.http_server` does.
"""

import argparse
import base64
import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from builders.http_faults import size_of
from builders.http_server import Answer, Request, Server, obey

# Files of at least this many bytes are on the CDN; the Hub itself gives the others.
LARGE = 1000


@dataclass
class Repository:
    """What the Hub has of a repository.

    Attributes:
        commits: files by commit; of large ones the path.
        refs: the commit of each branch and tag.
        private: whether only `Hub.token` may see it.
        gated: whether its files are refused: all tokens may see that it is there.
    """

    commits: dict[str, dict[str, bytes | Path]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: Mapping[str, bytes | Path], ref: str = "main") -> str:
        """Adds a commit, of which these are all files."""
        said = json.dumps([len(self.commits), sorted((name, size_of(content)) for name, content in files.items())])
        oid = hashlib.sha1(said.encode()).hexdigest()
        self.commits[oid] = dict(files)
        self.refs[ref] = oid
        return oid

    def files(self, revision: str) -> tuple[str, dict[str, bytes | Path]] | None:
        """The commit of a revision, and its files."""
        oid = self.refs.get(revision, revision)
        return (oid, self.commits[oid]) if oid in self.commits else None


class Hub(Server):
    """The Hub. Enter it, and give ``endpoint=hub.url()``.

    Args:
        options: of `Server`.

    Attributes:
        repositories: by the path of their page: ``owner/name``, ``datasets/owner/name``.
        moved: the new path of a page, by its old one.
        token: that private repositories are for.
        cdn: the server of large files.
        signature: that the CDN's URLs must have; those with an older one are answered 403.
    """

    tag_length = 40

    def __init__(self, **options: Any) -> None:
        super().__init__({}, **options)
        self.repositories: dict[str, Repository] = {}
        self.moved: dict[str, str] = {}
        self.token = "hf_" + "T0kenOfTheTests"
        self.signature = 1
        self.cdn = _Cdn(self)
        self._server.RequestHandlerClass.do_POST = _post

    def add(self, page: str, files: Mapping[str, Any]) -> Repository:
        """A new repository with one commit."""
        self.repositories[page] = repository = Repository()
        repository.commit(files)
        return repository

    def __enter__(self) -> "Hub":
        self.cdn.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.cdn.__exit__(*exception)

    @property
    def kinds(self) -> Counter[str]:
        """How many requests of each kind there were: "api", "resolve" and "cdn"."""
        found = Counter("resolve" if "/resolve/" in request.path else "api" for request in self.requests)
        found["cdn"] = len(self.cdn.requests)
        return +found

    def answer(self, request: Request) -> Answer:
        """What the Hub answers."""
        parts = [unquote(part) for part in urlsplit(request.path).path.strip("/").split("/")]
        api = parts[0] == "api"
        if api:
            parts = parts[2:] if parts[1] == "models" else parts[1:]
        count = 3 if parts[0] in ("datasets", "spaces") else 2
        page, rest = "/".join(parts[:count]), parts[count:]
        page = self.moved.get(page, page)
        known = self.repositories.get(page)
        refused = self._refused(known, request, page, api and rest != ["auth-check"])
        if refused is not None:
            return refused
        assert known is not None
        if api:
            return self._api(known, page, rest)
        return self._resolve(known, page, rest[1], "/".join(rest[2:]), request)

    def _refused(self, known: Repository | None, request: Request, page: str, lists: bool) -> Answer | None:
        sent = request.headers.get("authorization")
        if sent is not None and sent != f"Bearer {self.token}":
            return _error(401, None, "Invalid credentials in Authorization header")
        if known is None or (known.private and sent is None):
            return _error(401 if sent is None else 404, "RepoNotFound", "Repository not found")
        if known.gated and not lists:
            return _error(403, "GatedRepo", f"Access to model {page} is restricted and you are not in the list")
        return None

    def _api(self, known: Repository, page: str, rest: list[str]) -> Answer:
        found = known.files(rest[1] if rest[:1] in (["revision"], ["tree"]) else "main")
        if rest == ["auth-check"]:
            return _json({})
        if found is None:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        oid, files = found
        if rest[:1] == ["tree"]:
            return _json([{"type": "file", "oid": oid, "path": path, "size": size_of(files[path])} for path in files])
        name = "/".join(page.split("/")[-2:])
        return _json({"id": name, "sha": oid, "siblings": [{"rfilename": path} for path in files], "tags": []})

    def _resolve(self, known: Repository, page: str, revision: str, path: str, request: Request) -> Answer:
        found = known.files(revision)
        if found is None:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        oid, files = found
        if path not in files:
            return _error(404, "EntryNotFound", "Entry not found")
        content = files[path]
        if isinstance(content, Path):  # too large to read it all for each request
            digest = hashlib.sha256(f"{content} {content.stat()}".encode()).hexdigest()
        else:
            digest = hashlib.sha256(content).hexdigest()
        if size_of(content) < LARGE:
            self.files[unquote(urlsplit(request.path).path)] = content
            answer = super().answer(request)
            answer.headers["X-Repo-Commit"] = oid
            return answer
        self.cdn.files[f"/{digest}"] = content
        to = self.cdn.url(f"/{digest}?Signature=signed{self.signature}-{id(self)}")
        headers = {"X-Repo-Commit": oid, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(size_of(content))}
        return Answer(302, {"Content-Length": "0", "Location": to, **headers})

    def write(self, request: Request, body: bytes) -> Answer:
        """What the Hub answers to an upload: a commit by one request, after one that asks how files are to be sent."""
        parts = [unquote(part) for part in urlsplit(request.path).path.strip("/").split("/")]
        page, what = "/".join(parts[2:4]), parts[4]
        known = self.repositories.get(page)
        if known is None or request.headers.get("authorization") != f"Bearer {self.token}":
            return _error(403, None, "you may not write to this repository")
        if what == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            return _json({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        files = dict(known.commits[known.refs[parts[5]]])
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "deletedFile":
                del files[item["value"]["path"]]
        oid = known.commit(files, parts[5])
        return _json({"success": True, "commitOid": oid, "commitUrl": self.url(f"/{page}/commit/{oid}")})


class _Cdn(Server):
    def __init__(self, hub: Hub) -> None:
        super().__init__({}, etag="strong")
        self.hub = hub

    def answer(self, request: Request) -> Answer:
        if "authorization" in request.headers or "cookie" in request.headers:
            return Answer(400, {"Content-Length": "0", "X-Seen": "a token"})
        if f"Signature=signed{self.hub.signature}-" not in request.path:
            return Answer(403, {"Content-Length": "0"})
        return super().answer(request)


def _post(handler: Any) -> None:
    headers = {name.lower(): value for name, value in handler.headers.items()}
    length = headers.get("content-length")
    body = handler.rfile.read(int(length)) if length is not None else _chunks(handler.rfile)
    request = Request("POST", handler.path, headers, time.monotonic())
    handler.owner.begun(request)
    handler.owner.done()
    answer = handler.owner.write(request, body)
    for fault in handler.owner.faults:
        fault.apply(answer, request)
    handler._send(answer)


def _chunks(file: Any) -> bytes:
    found = b""
    while size := int(file.readline(), 16):
        found += file.read(size)
        file.readline()
    file.readline()
    return found


def _json(value: Any, status: int = 200, **headers: str) -> Answer:
    body = json.dumps(value).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    return Answer(status, headers, body, 0, len(body))


def _error(status: int, code: str | None, message: str) -> Answer:
    answer = _json({"error": message}, status)
    answer.headers["X-Error-Message"] = message
    if code is not None:
        answer.headers["X-Error-Code"] = code
    return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    options = parser.parse_args()
    with Hub() as hub:
        repository = hub.repositories[options.name] = Repository()
        repository.commit({path.name: path for path in sorted(options.folder.iterdir())})
        print(hub.url(), flush=True)
        obey(hub, hub.cdn)


if __name__ == "__main__":
    main()
