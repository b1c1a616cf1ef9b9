"""The protocol of objects that give and take their own state, as in `torch.distributed.checkpoint.stateful`."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved and restored, such as a module, an optimizer or a data loader; no base class."""

    def state_dict(self) -> dict[str, Any]:
        """Return the object's state. Also called when loading: what is returned is then filled in place."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, possibly in another run."""
        ...


StatefulT = TypeVar("StatefulT", bound=Stateful)
