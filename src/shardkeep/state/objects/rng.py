"""The random number generators of a process, as an object that can stand in a state."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shardkeep.errors import StateMismatch


class RNG:
    """
    The generators of Python, NumPy, torch, and this process's accelerator, each rank's own.

    Put one into the state, under a name of your choice: ``{"model": model, "rng": sk.RNG()}``. A rank gets back what
    the rank of the same number saved. On more ranks than saved, the new ones are seeded from what rank 0 saved and
    their own number: the same on every resume, and different from each other. On fewer, what is left over is dropped.
    """

    __per_rank__ = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every generator."""
        version, words, gauss = random.getstate()
        legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one is what scripts use
        state = {
            "python": {"version": version, "words": np.array(words, np.int64), "gauss": gauss},
            "numpy": {
                "kind": legacy["bit_generator"],
                "words": legacy["state"]["key"].copy(),
                "position": legacy["state"]["pos"],
                "has_gauss": legacy["has_gauss"],
                "gauss": legacy["gauss"],
            },
            "torch": torch.get_rng_state(),
        }
        if (device := _accelerator()) is not None:
            state["accelerator"] = device.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set every generator; that of an accelerator only where there was and is one."""
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(np.asarray(python["words"]).tolist()), python["gauss"]))
        np.random.set_state(  # noqa: NPY002
            (numpy["kind"], np.asarray(numpy["words"]), numpy["position"], numpy["has_gauss"], numpy["gauss"])
        )
        torch.set_rng_state(torch.as_tensor(state["torch"]))
        device = _accelerator()
        if device is not None and "accelerator" in state:
            device.set_rng_state(torch.as_tensor(state["accelerator"]))

    def load_rank_states(self, states: Mapping[int, Mapping[str, Any]], rank: int, world_size: int) -> None:  # noqa: ARG002
        """Take this rank's own state, or a seed where this rank was not there when it was saved."""
        if rank in states:
            self.load_state_dict(states[rank])
            return
        if not states:
            raise StateMismatch("the checkpoint holds no generator's state", hint="exclude the RNG from this load")
        first = torch.as_tensor(states[min(states)]["torch"]).numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(first + rank.to_bytes(8, "little")).digest()[:8], "little")
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # noqa: NPY002
        torch.manual_seed(seed % (1 << 63))


def _accelerator() -> Any:
    """Return torch's module for the accelerator, if one is used in this process."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else torch.get_device_module(device)
