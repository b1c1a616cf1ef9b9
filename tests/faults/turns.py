"""Several saves in one process, of which one at a time takes one step, in an order drawn by lot."""

import threading
from concurrent.futures import ThreadPoolExecutor

from shardkeep.testing.faulty_store import FaultyStore


class Turns:
    """Whose turn it is. A player goes on until its next operation on a store, and then waits to be drawn again."""

    def __init__(self, rng, players):
        self._rng = rng
        self._waiting = threading.Condition()
        self._playing = set(range(players))
        self._turn = -1
        self._stays = rng.choice([0.0, 0.5, 0.8])
        self.order = []

    def step(self, player, what):
        """End this player's turn, and wait for its next."""
        with self._waiting:
            if self._turn == player and self._rng.random() >= self._stays:
                self._draw()
            while self._turn != player:
                if not self._waiting.wait(30):
                    raise AssertionError(f"player {player} waited for ever with {what}")
            self.order.append(f"{player}: {what}")

    def leave(self, player):
        with self._waiting:
            self._playing.discard(player)
            if self._turn == player:
                self._draw()

    def begin(self):
        with self._waiting:
            self._draw()

    def _draw(self):
        self._turn = self._rng.choice(sorted(self._playing)) if self._playing else -1
        self._waiting.notify_all()


class TurnStore(FaultyStore):
    """A store each operation of which is one step."""

    def __init__(self, inner, turns, player, *, dies_at=None):
        super().__init__(inner, "crash", at=dies_at)
        self._turns = turns
        self._player = player

    def dying(self, at):
        """The same, but with its process dying at this operation."""
        return TurnStore(self.inner, self._turns, self._player, dies_at=at)

    def begin(self, verb, name):
        self._turns.step(self._player, f"{verb} {name}")
        return super().begin(verb, name)


def play(turns, games):
    """Let each player play its game to the end; return what each returned or raised."""

    def main(player):
        try:
            return games[player]()
        except BaseException as exc:  # noqa: BLE001 - handed to the caller
            return exc
        finally:
            turns.leave(player)

    with ThreadPoolExecutor(len(games)) as pool:
        futures = [pool.submit(main, player) for player in range(len(games))]
        turns.begin()
        return [future.result() for future in futures]
