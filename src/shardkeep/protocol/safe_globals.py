"""What the user told torch to be safe in a pickle (`torch.serialization.add_safe_globals`)."""

from __future__ import annotations

import torch

from shardkeep.format.stand_ins import Names, names_of


def safe_globals() -> Names:
    """Return those classes and functions, by the module and name that a pickle has for them."""
    return names_of(torch.serialization.get_safe_globals())
