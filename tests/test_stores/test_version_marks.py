"""Version marks of stores: ETag, Last-Modified and what filesystems report. A mark that differs is a change."""

import itertools
import struct

import numpy as np
import pytest
from builders import http_faults as faults
from builders.http_server import Server
from builders.hub import Hub
from builders.thorough import part_of

import safeload
from safeload import FormatError

pytest.importorskip("urllib3")

pytestmark = pytest.mark.usefixtures("quick_web")

COUNT = 100_000  # numbers in a tensor, so that no two tensors share the first request
ARRAYS = {name: np.arange(k, COUNT + k, dtype=np.float32) for k, name in enumerate("abc")}
MODEL = safeload.numpy.save(ARRAYS)
QUICK = {"retries": 1, "timeout": 5}
DAY, NIGHT = "Mon, 01 Jan 2024 00:00:00 GMT", "Tue, 02 Jan 2024 00:00:00 GMT"


def marks(etag=None, date=None):
    return {"ETag": etag, "Last-Modified": date}


CHANGES = {
    "the ETag is gone": (marks('"a"'), marks()),
    "an ETag appears": (marks(), marks('"a"')),
    "the date is gone": (marks(date=DAY), marks()),
    "a date appears": (marks(), marks(date=DAY)),
    "another date": (marks(date=DAY), marks(date=NIGHT)),
    "a date, then an ETag": (marks(date=DAY), marks('"a"')),
    "an ETag, then its date": (marks('"a"', DAY), marks(date=DAY)),
    "another ETag of the same date": (marks('"a"', DAY), marks('"b"', DAY)),
    "the ETag turns weak": (marks('"a"', DAY), marks('W/"a"', DAY)),
    "the ETag turns strong": (marks('W/"a"', DAY), marks('"a"', DAY)),
    "another weak ETag": (marks('W/"a"', DAY), marks('W/"b"', DAY)),
    "a weak ETag of another date": (marks('W/"a"', DAY), marks('W/"a"', NIGHT)),
    "a weak ETag without its date": (marks('W/"a"', DAY), marks('W/"a"')),
    "a weak ETag with a new date": (marks('W/"a"'), marks('W/"a"', DAY)),
    "an empty ETag": (marks('"a"'), marks("")),
}
CONSTANT = {
    "no mark": (marks(), marks()),
    "a date": (marks(date=DAY), marks(date=DAY)),
    "a strong ETag": (marks('"a"'), marks('"a"')),
    "a strong ETag of another date": (marks('"a"', DAY), marks('"a"', NIGHT)),
    "a strong ETag without its date": (marks('"a"', DAY), marks('"a"')),
    "a weak ETag and a date": (marks('W/"a"', DAY), marks('W/"a"', DAY)),
    "a weak ETag": (marks('W/"a"'), marks('W/"a"')),
}


class Plain(Server):
    """A server without marks of its own, which ignores If-Match."""

    def __init__(self, *faults):
        super().__init__({"/m.safetensors": MODEL}, etag=None, modified=False, faults=faults)

    def answer(self, request):
        headers = {name: value for name, value in request.headers.items() if name != "if-match"}
        return super().answer(request._replace(headers=headers))


def states(first, later, count=1, path=None):
    """A fault: the first answers have the marks ``first``, all others ``later``."""
    numbers = itertools.count()

    def change(answer, request):
        if answer.status in (200, 206):
            faults.change(headers=first if next(numbers) < count else later)(answer, request)

    return faults.Fault(change, path=path)


def load(url):
    return safeload.load(url, storage_options=QUICK)


def stream(url):
    with safeload.open(url, storage_options=QUICK) as opened:
        return dict(opened.stream())


def one_by_one(url):
    with safeload.open(url, storage_options=QUICK) as opened:
        return {name: opened[name] for name in opened}


WAYS = [load, stream, one_by_one]


def dealt(ways, cases=CHANGES):
    """All cases, each in one of several ways."""
    pairs = [(case, way) for k, way in enumerate(ways) for case in part_of(list(cases), k, len(ways))]
    return pytest.mark.parametrize(("case", "way"), pairs)


@dealt(WAYS)
def test_a_range_with_another_mark_is_refused(case, way):
    with Plain(states(*CHANGES[case])) as server, pytest.raises(FormatError, match="changed since it was opened"):
        way(server.url("/m.safetensors"))


@dealt(WAYS, CONSTANT)
def test_constant_marks_are_read(case, way):
    with Plain(states(*CONSTANT[case])) as server:
        arrays = way(server.url("/m.safetensors"))
    assert all(np.array_equal(arrays[name], ARRAYS[name]) for name in ARRAYS)


@pytest.mark.parametrize("case", part_of(list(CHANGES), 0, 3))
def test_the_rest_of_a_broken_range_is_compared(case):
    """The retry of a range that broke off continues in the middle of a tensor."""
    there = [states(*CHANGES[case], count=2), faults.short(70_000, first=1, times=1)]
    with Plain(*there) as server, pytest.raises(FormatError, match="changed since it was opened"):
        load(server.url("/m.safetensors"))


@pytest.mark.parametrize("case", part_of(list(CHANGES), 1, 3))
def test_the_target_of_a_new_redirect_is_compared(case):
    first, later = CHANGES[case]
    with Plain() as other, Plain() as server:
        server.faults += [states(first, first), faults.redirect(other.url("/m.safetensors"), first=1)]
        other.faults += [states(later, later)]
        with pytest.raises(FormatError, match="changed since it was opened"):
            load(server.url("/m.safetensors"))


@pytest.mark.parametrize("case", part_of(list(CHANGES), 2, 3))
def test_a_long_header_is_of_one_version(case):
    """The second request of `open` itself reads the rest of the header."""
    name = "n" * 100
    arrays = {f"{name}{k}": np.zeros(1, np.uint8) for k in range(1000)}
    model = safeload.numpy.save(arrays)
    assert struct.unpack("<Q", model[:8])[0] > 130_000
    with Plain(states(*CHANGES[case])) as server:
        server.files["/m.safetensors"] = model
        with pytest.raises(FormatError, match="changed since it was opened"):
            safeload.open(server.url("/m.safetensors"), storage_options=QUICK)


def test_later_ranges_that_differ_among_themselves_are_refused():
    with Plain() as server, safeload.open(server.url("/m.safetensors"), storage_options=QUICK) as opened:
        assert np.array_equal(opened["a"], ARRAYS["a"])
        for etag in ('"a"', '"b"'):
            server.faults[:] = [states(marks(etag), marks(etag))]
            with pytest.raises(FormatError, match="changed since it was opened"):
                opened["b"]
        server.faults.clear()
        assert np.array_equal(opened["c"], ARRAYS["c"])


# ---- the Hub ----


@dealt(["@commit", ""])
def test_a_file_of_the_hub_with_another_mark_is_refused(case, way, tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with Hub() as hub:
        repository = hub.add("o/n", {"model.safetensors": MODEL})
        hub.cdn.faults.append(states(*CHANGES[case]))
        url = f"hf://o/n{way and '@' + repository.refs['main']}/model.safetensors"
        with pytest.raises(FormatError, match="changed since it was opened"):
            safeload.load(url, storage_options={"endpoint": hub.url(), "token": False, **QUICK})


def test_a_later_answer_of_another_commit_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with Hub() as hub:
        hub.add("o/n", {"model.safetensors": MODEL})
        options = {"endpoint": hub.url(), "token": False, **QUICK}
        with safeload.open("hf://o/n/model.safetensors", storage_options=options) as opened:
            hub.signature += 1  # the redirect expires
            hub.faults.append(faults.header("X-Repo-Commit", "f" * 40))
            with pytest.raises(FormatError, match="changed since it was opened"):
                opened["a"]


# ---- URLs that expire ----

REFUSED = [400, 401, 402, 403, 404, 405, 406, 408, 409, 410, 411, 418, 421, 423, 425, 429, 451]


def expiring(code, good):
    """A fault: signed URLs of which ``good`` does not approve are answered with a status."""

    def change(answer, request):
        if "signature=" in request.path and not good(request.path):
            faults.status(code).change(answer, request)

    return faults.Fault(change)


@pytest.mark.parametrize("code", part_of(REFUSED, 0, 3))
def test_an_expired_redirect_is_followed_again(code):
    """Each signed URL serves a single request, so every range needs another one."""
    numbers, used = itertools.count(), set()

    def sign(answer, request):
        faults.redirect(f"{server.url('/signed')}?signature={next(numbers)}").change(answer, request)

    def is_new(path):
        return path not in used and not used.add(path)

    with Server({"/m.safetensors": MODEL, "/signed": MODEL}) as server:
        server.faults += [faults.Fault(sign, path="/m.safetensors"), expiring(code, is_new)]
        with safeload.open(server.url("/m.safetensors"), storage_options={"retries": 0}) as opened:
            for name in opened:
                assert np.array_equal(opened[name], ARRAYS[name])
    assert len(server.requests) <= 4 * 3


@pytest.mark.parametrize("code", part_of(REFUSED, 1, 3))
def test_a_redirect_that_stays_refused_ends_after_one_more_request(code):
    with Server({"/m.safetensors": MODEL, "/signed": MODEL}) as server:
        server.faults.append(faults.redirect("/signed?signature=1", path="/m.safetensors"))
        with safeload.open(server.url("/m.safetensors"), storage_options={"retries": 0}) as opened:
            server.faults.append(expiring(code, lambda path: False))
            server.requests.clear()
            with pytest.raises(OSError, match=str(code)):
                opened["a"]
    assert [request.path for request in server.requests] == [
        "/signed?signature=1", "/m.safetensors", "/signed?signature=1",
    ]  # fmt: skip


@pytest.mark.parametrize("code", part_of(REFUSED, 2, 3))
def test_a_signature_that_is_refused_at_first_is_asked_for_again(code):
    with Server({"/m.safetensors": MODEL, "/signed": MODEL}) as server:
        numbers = itertools.count()
        server.faults.append(faults.redirect("/signed?signature=1", path="/m.safetensors"))
        server.faults.append(expiring(code, lambda path: next(numbers) > 0))
        arrays = safeload.load(server.url("/m.safetensors"), storage_options={"retries": 0})
    assert np.array_equal(arrays["a"], ARRAYS["a"])


@pytest.mark.parametrize("code", [400, 404, 410])
def test_an_expired_url_of_the_hub_is_resolved_again(code, tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with Hub() as hub:
        hub.add("o/n", {"model.safetensors": MODEL})
        hub.cdn.faults.append(
            faults.Fault(lambda answer, _: setattr(answer, "status", code if answer.status == 403 else answer.status))
        )
        options = {"endpoint": hub.url(), "token": False, "retries": 0}
        with safeload.open("hf://o/n/model.safetensors", storage_options=options) as opened:
            for name in opened:
                hub.signature += 1
                assert np.array_equal(opened[name], ARRAYS[name])


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410])
def test_a_plain_url_is_not_asked_twice(code):
    options = {"retries": 0}
    with Plain() as server, safeload.open(server.url("/m.safetensors"), storage_options=options) as opened:
        server.requests.clear()
        server.faults.append(faults.status(code))
        with pytest.raises(OSError, match=str(code)):
            opened["a"]
    assert len(server.requests) == 1
