"""Where the jobs of a soak save, a disk or a bucket, and what stands between."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.object_store.proxy import Proxy
from tests.soak.checker import Checker
from tests.soak.contents import kinds_of
from tests.soak.ledger import Ledger
from tests.soak.network import options_by, rules_of
from tests.soak.places import ground_of
from tests.soak.rounds import Round, StoreKind
from tests.support.s3_server import S3Server


@dataclass(frozen=True)
class Scene:
    """Where jobs save."""

    store: StoreKind
    root: str
    server: S3Server | None = None

    @classmethod
    def of(cls, store: StoreKind, folder: Path, server: S3Server | None) -> Scene:
        """Find an unused location; below the directory, if it is on a disk."""
        if store == "local":
            return cls(store, str(folder / "root"))
        if server is None:
            raise ValueError(f"{store}: there is no server")
        return cls(store, server.url(f"soak-{secrets.token_hex(4)}/run"), server)

    @contextmanager
    def network(self, seed: int, this: Round) -> Iterator[Proxy | None]:
        """Have a network that fails as a round wants it, and is gone afterwards with all that is under way in it."""
        if self.server is None:
            yield None
            return
        with Proxy(self.server.port, seed=this.number) as proxy:
            proxy.rules = rules_of(f"{seed} {this.number} network", **this.network)
            yield proxy

    def plan(self, proxy: Proxy | None) -> dict[str, Any]:
        """Say what a job must know of it."""
        if self.server is None or proxy is None:
            return {"root": self.root}
        options, direct = options_by(self.server, proxy), self.server.options
        return {"root": self.root, "options": options, "direct": direct, "bulk": True}

    def checker(self, ledger: Ledger) -> Checker:
        """Make a reader of the root."""
        options = {} if self.server is None else self.server.options
        environment = {} if self.server is None else self.server.environment
        kinds = kinds_of(bulk=self.server is not None)
        return Checker(ground_of(self.root, options), ledger, kinds, options=options, environment=environment)
