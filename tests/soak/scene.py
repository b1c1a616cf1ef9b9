"""Where the jobs of a soak save: a disk, a bucket, or a disk with a bucket behind it; and what stands between."""

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
    far: str = ""
    server: S3Server | None = None

    @classmethod
    def of(cls, store: StoreKind, folder: Path, server: S3Server | None) -> Scene:
        """Find an unused location; below the directory, if it is on a disk."""
        if store == "local":
            return cls(store, str(folder / "root"))
        if server is None:
            raise ValueError(f"{store}: there is no server")
        url = server.url(f"soak-{secrets.token_hex(4)}/run")
        return cls(store, url, server=server) if store == "s3" else cls(store, str(folder / "root"), url, server)

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
        return {"root": self.root, "promote_to": self.far, "options": options, "direct": direct, "bulk": True}

    def checkers(self, ledger: Ledger) -> list[Checker]:
        """Make a reader of each root, the one that is saved to first."""
        return [self._checker(url, ledger) for url in (self.root, self.far) if url]

    def lose_near(self, ledger: Ledger) -> None:
        """Lose the disk, and what was only there."""
        ledger.update()
        ledger.acked.clear()
        ground_of(self.root, {}).wipe()

    def _checker(self, url: str, ledger: Ledger) -> Checker:
        options, environment = {}, {}
        if url.startswith("s3://") and self.server is not None:
            options, environment = self.server.options, self.server.environment
        return Checker(
            ground_of(url, options),
            ledger,
            kinds_of(bulk=self.server is not None),
            far=url == self.far,
            options=options,
            environment=environment,
        )
