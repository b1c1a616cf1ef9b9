"""
Azure's Blob Storage on this machine, for tests: Azurite, which Microsoft makes for that (`npm install azurite`).

    with AzureServer() as server:
        store = open_place(server.url("tests/a"), **server.options)

It is found by the variable SHARDKEEP_AZURITE, which has the path of `azurite-blob`, or on PATH. All it keeps is in its
memory, and it ends with the process that started it, also if that is killed.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import hmac
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import urlencode

from shardkeep.errors import CheckpointError
from shardkeep.options import setting

CONTAINER = "shardkeep-tests"
_ACCOUNT = "tester"
_VERSION = "2021-08-06"
"""Of the protocol that requests of this module speak."""
_START_S = 60.0
_LOOK_S = 0.05
_PR_SET_PDEATHSIG = 1


def azurite() -> str | None:
    """Find the program."""
    return setting("SHARDKEEP_AZURITE") or shutil.which("azurite-blob")


class AzureServer:
    """Azurite, as long as the context lasts."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self.port = 0
        self.key = base64.b64encode(secrets.token_bytes(32)).decode()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> AzureServer:  # noqa: PYI034 - Python 3.10 has no Self
        """Start it, wait until it answers, and make a container."""
        program = azurite()
        if program is None:
            raise CheckpointError("no program `azurite-blob`", hint="npm install azurite, and set SHARDKEEP_AZURITE")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        libc = ctypes.CDLL(None, use_errno=True)
        with TemporaryFile() as log:
            self._process = subprocess.Popen(
                [program, "--inMemoryPersistence", "--disableTelemetry", "--silent", "--blobPort", str(self.port)],
                env={"PATH": setting("PATH") or os.defpath, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{self.key}"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - calls nothing else
            )  # fmt: skip
            until = time.monotonic() + _START_S
            while not self._answers():
                if self._process.poll() is not None or time.monotonic() > until:
                    self.__exit__()
                    log.seek(0)
                    raise CheckpointError(f"{program} does not answer; it said: {log.read()[-2000:]!r}")
                time.sleep(_LOOK_S)
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    @property
    def endpoint(self) -> str:
        """Where the account answers."""
        return f"http://127.0.0.1:{self.port}/{_ACCOUNT}"

    @property
    def options(self) -> dict[str, Any]:
        """How a store there is opened."""
        return {"endpoint": self.endpoint, "account_name": _ACCOUNT, "account_key": self.key}

    @property
    def environment(self) -> dict[str, str]:
        """The same, as environment variables."""
        return {
            "AZURE_STORAGE_ENDPOINT": self.endpoint, "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
        }  # fmt: skip

    @property
    def connection_string(self) -> str:
        """The same, as Azure's portal would show it."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={self.key};BlobEndpoint={self.endpoint};"
        )

    def url(self, path: str = "", bucket: str = CONTAINER) -> str:
        """Name a place there."""
        return f"az://{bucket}/{path}".rstrip("/")

    def signature(self, rights: str = "racwdl", bucket: str = CONTAINER) -> str:
        """Sign a token that has some rights for a container and its blobs, for an hour."""
        end = (datetime.now(timezone.utc) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        where = f"/blob/{_ACCOUNT}/{bucket}"
        signed = self._signed(f"{rights}\n\n{end}\n{where}\n\n\nhttps,http\n{_VERSION}\nc" + "\n" * 7)
        return urlencode({"sv": _VERSION, "sr": "c", "sp": rights, "se": end, "spr": "https,http", "sig": signed})

    def make_bucket(self, name: str) -> None:
        """Make a container, if there is none of that name."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
        signed = self._signed("\n".join([*lines, f"/{_ACCOUNT}/{_ACCOUNT}/{name}", "restype:container"]))
        headers["Authorization"] = f"SharedKey {_ACCOUNT}:{signed}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("PUT", f"/{_ACCOUNT}/{name}?restype=container", headers=headers)
            answer = connection.getresponse()
            if answer.status >= 300 and answer.status != http.HTTPStatus.CONFLICT:  # there is one
                raise CheckpointError(f"no container {name}: {answer.status} {answer.read()!r}")
        finally:
            connection.close()

    def _answers(self) -> bool:
        try:
            self.make_bucket(CONTAINER)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _signed(self, text: str) -> str:
        return base64.b64encode(hmac.digest(base64.b64decode(self.key), text.encode(), hashlib.sha256)).decode()
