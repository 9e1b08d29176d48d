"""The first URL that a process opens: its host is connected to while the HTTP client is imported."""

import os
import subprocess
import sys

import numpy as np
import pytest
from builders import inside
from builders.http_server import CERTIFICATE, Server
from builders.threads import until

from safeload.numpy import save

pytest.importorskip("urllib3")
pytestmark = [
    pytest.mark.inner,
    pytest.mark.usefixtures("quick_web"),
    pytest.mark.skipif(os.name != "posix" or sys.platform == "darwin", reason="the system may have a proxy"),
]

FILES = {"/a.safetensors": save({"a": np.arange(9, dtype=np.float32)})}
# Imports urllib3 only when a line has come.
PROGRAM = inside.program("""
import sys
class Gate:
    def find_spec(self, name, path=None, target=None):
        if name == "urllib3":
            sys.meta_path.remove(self)
            print("importing", flush=True)
            sys.stdin.readline()
sys.meta_path.insert(0, Gate())
import threading
import safeload
try:
    with safeload.open(sys.argv[1], storage_options=eval(sys.argv[2])) as checkpoint:
        print(*checkpoint.keys(), flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
from builders.inside import dialing
assert not dialing._dials
assert not [thread for thread in threading.enumerate() if thread.name == "safeload"]
""")


def opened(url, options=None, ready=lambda: None, **environment):
    """Open a URL in a process of its own; ``ready`` is called before the HTTP client is imported."""
    command = [sys.executable, "-I", "-W", "error", "-c", PROGRAM, url, repr(options or {})]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    with child:
        assert child.stdout.readline() == "importing\n"
        ready()
        output, _ = child.communicate("\n", 60)
    assert child.returncode == 0
    return output.strip()


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_the_connection_is_open_before_the_client_is_imported(tls):
    with Server(FILES, tls=tls) as server:
        options = {"verify": str(CERTIFICATE)}
        assert opened(server.url("/a.safetensors"), options, lambda: until(lambda: server.connections == 1)) == "a"
        assert server.connections == 1


def test_a_proxy_is_asked_and_not_the_host():
    with Server(FILES) as server, Server({}) as proxy:
        proxy.content = lambda path: FILES.get(path.removeprefix(server.url()))
        assert opened(server.url("/a.safetensors"), http_proxy=proxy.url()) == "a"
        assert (server.connections, proxy.connections) == (0, 1)


def test_wrong_options_close_the_connection():
    with Server(FILES) as server:
        ready = lambda: until(lambda: server.connections == 1)  # noqa: E731
        assert opened(server.url("/a.safetensors"), {"retries": -1}, ready) == "ValueError"
        until(lambda: not server._sockets)
        assert not server.requests


def test_a_host_that_refuses_is_the_error_of_the_request():
    assert opened("http://127.0.0.1:1/a.safetensors", {"retries": 0}) == "RemoteError"
