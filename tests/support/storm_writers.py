"""Those who write to the two buckets of a storm, at random and at any moment."""

import random
from collections.abc import Sequence

from replicator.stores.port import ObjectProperties
from tests.support.memory_store import MemoryStore


class StormWriters:
    """Writers of a source, and a stranger who writes to its target.

    What appears and vanishes between two listings is seen by nobody without a feed, so
    that nothing could be said of it. So what has `appeared` does not vanish before the
    storm forgets it.
    """

    def __init__(
        self,
        rng: random.Random,
        source: MemoryStore,
        target: MemoryStore,
        *,
        bodies: Sequence[bytes],
        is_dense: bool,
        feeds: tuple[bool, bool] = (False, False),
    ) -> None:
        """Where it `is_dense`, each object often becomes again what it was. `feeds`
        tells which side reports each change.
        """
        self.appeared = set[tuple[str, str]]()
        self._rng = rng
        self._source, self._target = source, target
        self._bodies = bodies
        self._is_dense = is_dense
        self._feeds = feeds
        self._owners = 0
        # Of keys that were removed from the target.
        self._removed = dict[str, ObjectProperties]()

    def change_source(self, key: str, acts: Sequence[int] = (0, 1, 2, 3)) -> None:
        """Remove it (0), flip a bit (1), give it other properties (2) or write it
        (3, and where it does not exist), whichever is drawn.
        """
        found = self._source.objects.get(key)
        match self._rng.choice(acts):
            case 0 if found and self._may_vanish("source", key):
                self._source.remove(key)
            case 1 if found and found.body:
                at = self._rng.choice((0, len(found.body) // 2))
                flipped = bytes([found.body[at] ^ 1])
                body = found.body[:at] + flipped + found.body[at + 1 :]
                self._source.write(key, body, found.properties)
            case 2 if found:
                self._source.touch(key, self._properties(is_visible=False))
            case _:
                if not found:
                    self.appeared.add(("source", key))
                properties = self._properties(is_visible=True)
                self._source.write(key, self._rng.choice(self._bodies), properties)

    def change_target(self, key: str) -> None:
        """Remove it, or write it."""
        found = self._target.objects.get(key)
        if found and self._rng.random() < 0.5 and self._may_vanish("target", key):
            self._removed[key] = found.properties
            self._target.remove(key)
            return
        if not found:
            self.appeared.add(("target", key))
        # Where the answer to a write has no time, the same bytes with other properties
        # have the stamp of our own write: nothing tells them apart, also if the key was
        # gone in between.
        body = self._rng.choice(self._bodies) if self._is_dense else self._rng.randbytes(5)
        new = self._properties(is_visible=True)
        kept = found.properties if found else self._removed.get(key, new)
        self._target.write(key, body, kept)

    def _may_vanish(self, side: str, key: str) -> bool:
        return self._feeds[side == "target"] or (side, key) not in self.appeared

    def _properties(self, *, is_visible: bool) -> ObjectProperties:
        """New ones each time where nothing shows that they changed and came back."""
        self._owners += 1
        owner = "a" if self._is_dense else self._rng.choice("ab")
        if not is_visible and not self._feeds[0]:
            owner = str(self._owners)
        return ObjectProperties(
            metadata=(("owner", owner),),
            tags=(("team", "x" if self._is_dense else self._rng.choice("xy")),),
        )
