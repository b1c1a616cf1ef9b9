"""What takes the place of promotions where there is no root to promote to: nothing is done, and nothing fails."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shardkeep.manage.entries import Entry


class NoPromotions:
    """As `Promotions`, to nowhere."""

    def distrust(self, names: Collection[str]) -> None:
        """Nothing is there."""

    def take_root(self) -> list[Entry]:
        """Nothing is there."""
        return []

    def begin(self, session: str) -> None:
        """Begin nothing."""

    def after(self, saved: Any, *, newest: bool = False) -> None:
        """Begin nothing."""

    def skip(self) -> None:
        """Count nothing."""

    def failed(self) -> list[int]:
        """None has."""
        return []

    def end(self, numbers: Collection[int]) -> list[BaseException]:  # noqa: ARG002 - there are none
        """Wait for nothing."""
        return []

    def wait(self, timeout_s: float | None = None) -> list[BaseException]:  # noqa: ARG002 - it is over
        """Wait for nothing."""
        return []

    def finish(self, timeout_s: float | None, *, newest: bool) -> list[BaseException]:  # noqa: ARG002 - it is over
        """Wait for nothing."""
        return []

    def cancel(self) -> None:
        """Nothing is under way."""

    def stop(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""

    def has(self, name: str) -> bool:  # noqa: ARG002 - whatever it is called
        """Nothing is there."""
        return False

    def is_pinned(self, name: str) -> bool:  # noqa: ARG002 - whatever it is called
        """Nothing is there."""
        return False
