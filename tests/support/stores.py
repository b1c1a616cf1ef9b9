"""A store that lets a test act before each operation."""

from shardkeep.testing.faulty_store import FaultyStore


class BeforeStore(FaultyStore):
    """Calls `act(verb, name)` before each operation; what it raises is what the operation raises."""

    def __init__(self, inner, act):
        super().__init__(inner)
        self._act = act

    def begin(self, verb, name):
        self._act(verb, name)
        return super().begin(verb, name)
