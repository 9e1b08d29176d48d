"""The stores of docs/remote.md on this machine: the Hub, S3 and a server of https, with the files of the examples."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from builders.http_server import CERTIFICATE, Server
from builders.hub import Hub, Repository

# Keys of AWS's documentation, which S3's stand-in accepts as any others.
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
}


class Proxy(Server):
    """Joins every connection with one server, whatever host it is for.

    Args:
        server: that one.
    """

    def __init__(self, server: Server) -> None:
        super().__init__({})
        self._place = ("127.0.0.1", server.port)

    def place_of(self, target: str) -> tuple[str, int]:
        """Where a tunnel leads."""
        return self._place


@contextmanager
def stores(folder: Path) -> Iterator[None]:
    """Serves the files of a folder as ``hf://owner/NAME``, ``s3://bucket/NAME`` and ``https://models.example/NAME``.

    The environment leads there, that of processes that are started meanwhile too. Nothing leaves this machine.
    """
    import s3fs
    from huggingface_hub import constants
    from moto.server import ThreadedMotoServer

    with ExitStack() as stack:
        hub = stack.enter_context(Hub())
        web = stack.enter_context(Server(folder, tls=True))
        proxy = stack.enter_context(Proxy(web))
        bucket = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        bucket.start()
        stack.callback(bucket.stop)
        environment = {
            "HF_ENDPOINT": hub.url(),
            "HF_TOKEN": hub.token,
            "AWS_ENDPOINT_URL": "http://{}:{}".format(*bucket.get_host_and_port()),
            "AWS_DEFAULT_REGION": "us-east-1",
            **KEYS,
            "https_proxy": proxy.url(),
            "no_proxy": "127.0.0.1",
            "SSL_CERT_FILE": str(CERTIFICATE),
        }
        stack.enter_context(patch.dict(os.environ, environment))
        # huggingface_hub reads the environment when it is imported, which may have been before.
        stack.enter_context(patch.object(constants, "ENDPOINT", hub.url()))
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        at = template.index("/{repo_id}")
        stack.enter_context(patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url() + template[at:]))
        s3fs.S3FileSystem.clear_instance_cache()  # of those that other tests have made
        for one in folder.glob("tiny-*"):
            files = {file.name: file.read_bytes() for file in one.iterdir()}
            hub.repositories[f"owner/{one.name}"] = repository = Repository()
            repository.commit(files)
            repository.commit(files, "v1")
            _upload(f"bucket/{one.name}", files)
        yield


def _upload(folder: str, files: Mapping[str, bytes]) -> None:
    import fsspec

    fs = fsspec.filesystem("s3")
    bucket = folder.partition("/")[0]
    if not fs.exists(bucket):
        fs.mkdir(bucket)
    for name, content in files.items():
        fs.pipe_file(f"{folder}/{name}", content)
