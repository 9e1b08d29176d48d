"""hf:// URLs: one request to the Hub's API for each revision, then ranges of the commit; tokens stay with the Hub."""

import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from builders import inside

pytest.importorskip("huggingface_hub")
pytest.importorskip("urllib3")

from builders import http_faults
from builders.hub import Hub, Repository
from builders.inside import RemoteFiles, local
from builders.inside import http_client as retries

from safeload import FormatError, UnsupportedError
from safeload.errors import RemoteError, RemotePermissionError

pytestmark = pytest.mark.store_packages

CONTENT = hashlib.shake_256(b"weights").digest(2_000_000)
FILES = {
    "config.json": b"{}",
    "model.safetensors": CONTENT,
    "original/consolidated.pth": CONTENT[::-1],
    "a b%.bin": CONTENT[:5000],
}
FILE = "hf://owner/name/model.safetensors"


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no cache"))
    inside.tune(monkeypatch, retry_pause=0.001)
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


@pytest.fixture
def files(server):
    return RemoteFiles({"endpoint": server.url(), "token": False})


def read(store):
    memory = bytearray(store.size)
    store.read_into(0, memory)
    store.confirm()
    return bytes(memory)


def test_a_file_takes_one_request_of_each_kind_and_one_for_its_bytes(server, files):
    store = files.open(FILE)
    assert (store.path, store.size) == (FILE, len(CONTENT))
    assert server.kinds == {"api": 1, "resolve": 1, "cdn": 1}
    assert store.read_at(0, 1000) == CONTENT[:1000]
    assert server.kinds == {"api": 1, "resolve": 1, "cdn": 1}
    memory = bytearray(500_000)
    store.read_spans([local.Span(300_000, memoryview(memory))])
    assert memory == CONTENT[300_000:800_000]
    assert server.kinds == {"api": 1, "resolve": 1, "cdn": 2}
    assert all("if-match" in request.headers for request in server.cdn.requests[1:])


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_read_right(name, files):
    assert read(files.open(f"hf://owner/name/{name}")) == FILES[name]


def test_many_files_at_once_take_one_request_to_the_api(server, files):
    with ThreadPoolExecutor(16) as pool:
        stores = list(pool.map(lambda k: files.open(FILE), range(32)))
    assert {read(store) for store in stores} == {CONTENT}
    assert server.kinds["api"] == 1


def test_folders_are_those_of_the_list_of_files(server, files):
    assert files.listing("hf://owner/name") == [
        ("a b%.bin", False), ("config.json", False), ("model.safetensors", False), ("original", True),
    ]  # fmt: skip
    assert files.listing("hf://owner/name/") == files.listing("hf://owner/name")
    assert files.listing("hf://owner/name/original") == [("consolidated.pth", False)]
    assert files.is_folder("hf://owner/name")
    assert files.is_folder("hf://owner/name/original/")
    assert not files.is_folder("hf://owner/name/orig")
    assert not files.is_folder("hf://owner/other")
    assert server.kinds == {"api": 2}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("hf://o/n", ("model", "o/n", None, "")),
        ("hf://models/o/n/x", ("model", "o/n", None, "x")),
        ("hf://datasets/o/n@v1.0/a/b.bin", ("dataset", "o/n", "v1.0", "a/b.bin")),
        ("hf://spaces/o/n/", ("space", "o/n", None, "")),
        ("hf://o/n@refs%2Fpr%2F1/x", ("model", "o/n", "refs/pr/1", "x")),
        ("hf://o/n@refs/pr/1/x", ("model", "o/n", "refs/pr/1", "x")),
        ("hf://o/n@refs/convert/parquet/x", ("model", "o/n", "refs/convert/parquet", "x")),
        ("hf://o/n@feature%2Fa/x@2", ("model", "o/n", "feature/a", "x@2")),
    ],
)
def test_a_url_is_divided_as_by_huggingface_hub(url, place, server, files):
    from huggingface_hub import HfFileSystem

    kind, repo, revision, path = place
    page = {"model": "", "dataset": "datasets/", "space": "spaces/"}[kind] + repo
    server.repositories[page] = Repository()
    server.repositories[page].commit({path or "x": b"content"}, revision or "main")
    if path:
        assert files.open(url).read_at(0, 100) == b"content"
    else:
        assert files.listing(url) == [("x", False)]
    fs = HfFileSystem(endpoint=server.url(), token=False, skip_instance_cache=True)
    found = fs.resolve_path(url.replace("hf://models/", "hf://"))
    theirs = (found.repo_type, found.repo_id, found.revision, found.path_in_repo.strip("/"))
    assert theirs == (kind, repo, revision or "main", path)


@pytest.mark.parametrize(
    "url", ["hf://", "hf://gpt2", "hf://o/", "hf://buckets/o/n/x", "hf://datasets/o", "hf://o@v/n"]
)
def test_what_names_no_repository_is_refused(url, files):
    with pytest.raises(UnsupportedError, match=r"hf://owner/name\[@revision\]"):
        files.open(url)


def test_a_branch_that_moves_is_read_at_its_commit(repository, files):
    before = repository.refs["main"]
    first = files.open(FILE)
    repository.commit({**FILES, "model.safetensors": CONTENT[::-1]})
    assert read(first) == read(files.open(FILE)) == CONTENT
    assert files.public(FILE) == f"hf://owner/name@{before}/model.safetensors"
    assert read(RemoteFiles(files._options).open(FILE)) == CONTENT[::-1]


def test_another_process_reads_the_same_commit(server, repository, files):
    store = files.open(FILE)
    again, path = pickle.loads(pickle.dumps((files, files.public(FILE))))
    repository.commit({**FILES, "model.safetensors": CONTENT[::-1]})
    other = again.open(path)
    assert other.version == store.version
    assert read(other) == CONTENT


def test_a_file_that_changes_beneath_its_commit_is_an_error(server, files):
    store = files.open(FILE)
    [path] = server.cdn.files
    server.cdn.files[path] = CONTENT[::-1]
    memory = bytearray(10)
    with pytest.raises(FormatError, match="changed since it was opened"):
        store.read_spans([local.Span(1_000_000, memoryview(memory))])
    assert memory == bytes(10)


def test_a_signed_url_that_has_expired_is_made_anew(server, files):
    store = files.open(FILE)
    server.signature += 1
    assert read(store) == CONTENT
    assert server.kinds["api"] == 1
    assert server.kinds["resolve"] == 2


def test_the_token_goes_to_the_hub_and_nowhere_else(server, repository, caplog, tmp_path):
    caplog.set_level(logging.DEBUG, logger="safeload")
    repository.private = True
    files = RemoteFiles({"endpoint": server.url(), "token": server.token})
    store = files.open(FILE)
    assert read(store) == CONTENT
    assert all(request.headers["authorization"] == f"Bearer {server.token}" for request in server.requests)
    assert all("authorization" not in request.headers for request in server.cdn.requests)
    texts = [repr(value) for value in (files, store, files.backend(FILE), pickle.dumps(files))]
    assert caplog.text
    assert server.token not in "".join([*texts, caplog.text])


# ---- a branch that moves while its file is opened ----


def test_a_branch_that_moves_meanwhile_is_read_at_the_commit_of_the_api(server, repository, monkeypatch, files):
    answer, before = server.answer, repository.refs["main"]

    def then_move(request):
        reply = answer(request)
        if request.path.startswith("/api/"):
            repository.commit({**FILES, "model.safetensors": CONTENT[::-1]})
        return reply

    monkeypatch.setattr(server, "answer", then_move)
    store = files.open(FILE)
    assert store.version[1] == before
    assert read(store) == CONTENT
    assert {request.path for request in server.requests if "/resolve/" in request.path} == {
        f"/owner/name/resolve/{before}/model.safetensors"
    }


def test_a_small_file_is_read_at_its_commit_after_its_branch_has_moved(server, repository, files):
    repository.commit({"small": CONTENT[:900]})
    store = files.open("hf://owner/name/small", window=100)
    repository.commit({"small": CONTENT[-900:]})
    assert read(store) == CONTENT[:900]
    assert server.kinds == {"api": 1, "resolve": 2}


def refused(files, url=FILE):
    with pytest.raises(OSError, match="hf://") as caught:
        files.open(url)
    assert caught.value.__context__ is None
    return caught.value


def test_a_private_repository_is_not_found_without_its_token(server, repository):
    repository.private = True
    error = refused(RemoteFiles({"endpoint": server.url(), "token": False}))
    assert isinstance(error, FileNotFoundError)
    assert str(error) == f"{FILE}: no such model, or it is private; check the name, or log in with `hf auth login`"


def test_a_wrong_token_is_refused_and_not_shown(server, repository):
    error = refused(RemoteFiles({"endpoint": server.url(), "token": "hf_another-token-of-mine"}))
    assert isinstance(error, RemotePermissionError)
    assert "Invalid credentials; log in with `hf auth login`, or set HF_TOKEN" in str(error)
    assert "another-token" not in f"{error}{error!r}{error.__dict__}"


def test_a_gated_repository_says_so(server, repository, files):
    repository.gated = True
    assert files.listing("hf://owner/name")
    error = refused(files)
    assert isinstance(error, RemotePermissionError)
    page = f"{server.url().rstrip('/')}/owner/name"
    assert f"accept its terms at {page}, and log in with `hf auth login`" in str(error)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://owner/other/x", "no such model, or it is private"),
        ("hf://datasets/owner/other/x", "no such dataset, or it is private"),
        ("hf://owner/name@none/x", "the model has no such branch, tag or commit"),
        ("hf://owner/name/x", "the repository has no such file"),
    ],
)
def test_what_is_missing_is_not_found(url, message, server, files):
    error = refused(files, url)
    assert isinstance(error, FileNotFoundError)
    assert f"{url}: {message}" in str(error)
    assert server.url() not in str(error)


@pytest.mark.parametrize("url", ["hf://name", "hf://name/", "hf://name@main"])
def test_a_name_without_an_owner_is_looked_up(url, server, repository, files):
    """Old models, such as gpt2, moved to an owner; the Hub redirects to them."""
    server.moved["name"] = "owner/name"
    for call in (files.open, files.listing, files.is_folder):
        with pytest.raises(UnsupportedError, match=f"{url}: names have an owner: open hf://owner/name"):
            call(url)


def test_a_busy_hub_is_asked_again_when_it_says(server, files):
    busy = http_faults.status(429, headers={"RateLimit": '"api";r=0;t=1'}, path="/api/models/owner/name", times=1)
    server.faults = [busy]
    assert files.open(FILE).size == len(CONTENT)
    first, second = [request.time for request in server.requests if request.path.startswith("/api/")]
    assert second - first >= 0.9


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_stays_busy_is_an_error_after_some_tries(status, server, files):
    server.faults = [http_faults.status(status)]
    with pytest.raises(RemoteError, match=f"{status}.*{FILE}"):
        files.open(FILE)
    assert server.kinds == {"api": retries.RETRIES + 1}


def saying(content):
    head = {"Content-Length": str(len(content))}
    return http_faults.Fault(http_faults.change(content=content, begin=0, end=len(content), headers=head))


@pytest.mark.parametrize(
    "name", [5, None, True, 1.5, ["x"], {}, "", "/x", "x/", "a//b", "..", "a/../b", "./a", "a\0", "\ud800"]
)
def test_a_list_of_other_than_paths_is_an_error(name, server, files):
    content = json.dumps({"id": "o/n", "sha": "a" * 40, "siblings": [{"rfilename": "x"}, {"rfilename": name}]}).encode()
    server.faults = [saying(content)]
    for call in (files.open, files.listing, files.is_folder):
        with pytest.raises(RemoteError, match="has an invalid path:"):
            call("hf://owner/name")


@pytest.mark.parametrize(
    "answer",
    [{}, [], 5, "x", None, {"sha": 5}, {"sha": ""}, {"sha": "../x"}, {"sha": "a", "siblings": 5},
     {"sha": "a", "siblings": ["x"]}, {"sha": "a", "siblings": [{}]}, {"sha": "a", "siblings": {"rfilename": "x"}}],
)  # fmt: skip
def test_an_answer_without_commit_or_list_is_an_error(answer, server, files):
    content = json.dumps(answer).encode()
    server.faults = [saying(content)]
    with pytest.raises(RemoteError):
        files.open(FILE)


def test_a_hub_that_nobody_reaches_is_an_error():
    with pytest.raises(RemoteError, match="hf://owner/name"):
        RemoteFiles({"endpoint": "http://127.0.0.1:9", "token": False}).open(FILE)


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match=r"'tokn', expected one of connect_timeout, endpoint, .*, token, verify"):
        RemoteFiles({"tokn": "x"}).open(FILE)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "SAFELOAD_OFFLINE"])
def test_nothing_is_asked_offline(variable, server, files, monkeypatch):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UnsupportedError, match=variable):
        files.open(FILE)
    assert not server.kinds


def test_the_environment_of_huggingface_hub_holds(server, repository):
    repository.private = True
    code = inside.program(f"from builders.inside import RemoteFiles; print(RemoteFiles().open({FILE!r}).size)")
    environment = {**os.environ, "HF_ENDPOINT": server.url(), "HF_TOKEN": server.token}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{len(CONTENT)}\n", done.stderr


def test_an_upload_is_a_commit(server, files, tmp_path):
    (tmp_path / "new.bin").write_bytes(CONTENT[:4000])
    writer = RemoteFiles({"endpoint": server.url(), "token": server.token})
    old = writer.open(FILE)
    writer.backend(FILE).upload(str(tmp_path / "new.bin"), "hf://owner/name/sub/new.bin")
    assert read(writer.open("hf://owner/name/sub/new.bin")) == CONTENT[:4000]
    assert writer.listing("hf://owner/name/sub") == [("new.bin", False)]
    assert read(old) == CONTENT


def test_an_upload_that_is_refused_leaves_nothing(server, repository, files, tmp_path):
    (tmp_path / "new.bin").write_bytes(b"x")
    with pytest.raises(RemotePermissionError, match="may not write"):
        files.backend(FILE).upload(str(tmp_path / "new.bin"), "hf://owner/name/new.bin")
    assert len(repository.commits) == 1
    with pytest.raises(UnsupportedError, match="path of a file in the repository"):
        files.backend(FILE).upload(str(tmp_path / "new.bin"), "hf://owner/name")


def _read_in_child(store, queue):
    queue.put(hashlib.sha256(read(store)).hexdigest())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_reads_on(files):
    store = files.open(FILE)
    read(store)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(store, queue))
    child.start()
    assert queue.get(timeout=20) == hashlib.sha256(CONTENT).hexdigest()
    child.join()


def test_without_huggingface_hub_the_error_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match="pip install huggingface_hub"):
        RemoteFiles().open(FILE)


def test_an_empty_repository_is_an_empty_folder(server, files):
    server.repositories["owner/empty"] = Repository()
    server.repositories["owner/empty"].commit({})
    assert files.is_folder("hf://owner/empty")
    assert files.listing("hf://owner/empty") == []


def test_an_answer_of_the_api_that_is_nonsense_is_an_error(server, files):
    def nonsense(answer, request):
        answer.content = json.dumps({"id": "owner/name"}).encode()
        answer.begin, answer.end = 0, len(answer.content)
        answer.headers["Content-Length"] = str(len(answer.content))

    server.faults = [http_faults.Fault(nonsense)]
    with pytest.raises(RemoteError, match="did not report the commit"):
        files.open(FILE)
