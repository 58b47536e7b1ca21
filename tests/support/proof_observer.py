"""Who sees both buckets at every moment, and so knows whether a report is true."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from proof.item import ContentHash, Profile
from replicator.crossing import Crossing
from replicator.refresh import digest_of
from replicator.stores.port import ObjectFacts, ObjectProperties
from replicator.sync import SyncReport
from tests.support.bucket_sync import Remarks
from tests.support.memory_store import MemoryObject, MemoryStore

States = dict[str, tuple[bytes | int, bytes]]


class WatchedStore(MemoryStore):
    """A store that tells an observer what a sync does to it."""

    is_foreign = False
    observer: "ProofObserver | None" = None

    def _keep(
        self,
        key: str,
        body: bytes,
        properties: ObjectProperties,
        etag: str,
        hashes: tuple[ContentHash, ...] = (),
    ) -> ObjectFacts:
        before = self.objects.get(key)
        facts = super()._keep(key, body, properties, etag, hashes)
        if self.observer is not None and not self.is_foreign:
            self.observer.note_write(key, before)
        return facts

    def _drop(self, key: str) -> None:
        if self.observer is not None and not self.is_foreign and key in self.objects:
            self.observer.note_delete(key)
        super()._drop(key)


@dataclass
class SeenSince:
    """What of each key the source had at any moment since a run began to write, and
    what the target had while it was planned; None is nothing.
    """

    replaceable: dict[str, set[bytes | None]] = field(default_factory=dict)
    is_planning: bool = True
    bodies: dict[str, set[bytes]] = field(default_factory=dict)
    properties: dict[str, set[bytes]] = field(default_factory=dict)
    lacked: set[str] = field(default_factory=set)


@dataclass
class Rot:
    """Bytes that changed behind the target's index: what they were, of which object,
    and whether the verifier has read them since.
    """

    facts: ObjectFacts
    original: bytes
    is_known: bool = False


class ProofObserver(Remarks):
    """Watches a source and a target behind a verifier. It is the syncer's progress,
    too, because that says when a comparison begins.
    """

    def __init__(
        self,
        source: MemoryStore,
        target: WatchedStore,
        profile: Profile,
        acting_run: Callable[[], int],
        guards: Callable[[], bool],
    ) -> None:
        """`acting_run` says for which run the target is changed now, `guards` whether
        the change names what it replaces, and the store checks that.
        """
        super().__init__()
        self._source, self._target, self._profile = source, target, profile
        self._crossing = Crossing.between(source.capabilities, target.capabilities)
        self._acting_run, self._guards = acting_run, guards
        self._runs = list[SeenSince]()
        self.rot = dict[str, Rot]()
        # What both sides had when a refresh began, by level.
        self._moments = list[dict[str, tuple[States, States]]]()
        self._is_open = False
        target.observer = self

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """A refresh that begins forgets what was before: a claim is of this moment."""
        super().begin(what, total, unit)
        if what.startswith("refresh"):
            self._moments, self._is_open = [self._moment()], True
        if what == "copy":
            # What is sent is read from now on.
            planned = self._runs[-1].replaceable
            self._runs[-1] = replace(self._seen_now(), replaceable=planned, is_planning=False)
        if what == "delete":
            # The source is asked for each key before it is deleted.
            self._runs[-1].lacked = self._seen_now().lacked

    def listed(self) -> None:
        """A side has been listed, as far as one page: what it was at the beginning of
        the refresh is over.
        """
        self._is_open = False

    def begin_run(self) -> int:
        """A run begins; its number."""
        seen = self._seen_now()
        for key, one in self._target.objects.items():
            seen.replaceable[key] = {one.body}
        self._runs.append(seen)
        return len(self._runs) - 1

    def look(self, key: str) -> None:
        """A key has changed at a side."""
        self._note_source(key)
        if self._runs and self._runs[-1].is_planning:
            found = self._target.objects.get(key)
            states = self._runs[-1].replaceable.setdefault(key, {None})
            states.add(found.body if found is not None else None)
        self._look()

    def rotted(self, key: str, body: bytes) -> None:
        """The bytes of the target's object are about to change without a word."""
        now = self._target.objects[key]
        known = self.rot.get(key)
        original = known.original if known and known.facts is now.facts else now.body
        self.rot[key] = Rot(now.facts, original)
        self._target.objects[key] = MemoryObject(now.facts, body, now.properties)
        self._look()

    def read(self, key: str) -> None:
        """The verifier has read an object for its index."""
        if key in self.rot:
            self.rot[key].is_known = True

    def forgot(self) -> None:
        """What the verifier has read may not be in its index."""
        for one in self.rot.values():
            one.is_known = False

    def note_write(self, key: str, before: MemoryObject | None) -> None:
        """The sync has written an object at the target."""
        now, seen = self._target.objects[key], self._runs[self._acting_run()]
        rot = self.rot.pop(key, None)
        if before is not None and before.body == now.body:
            # Properties alone: the bytes are as good or bad as before.
            if rot is not None and rot.facts is before.facts:
                self.rot[key] = Rot(now.facts, rot.original)
        else:
            assert now.body in seen.bodies.get(key, ()), f"{key}: bytes that nobody wrote lately"
            if rot is None and self._guards():
                was = before.body if before is not None else None
                assert was in seen.replaceable.get(key, {None}), f"{key}: replaced unseen"
        kept = self._digest(now.properties)
        assert kept in seen.properties.get(key, ()), f"{key}: properties that nobody gave lately"
        self.look(key)

    def note_delete(self, key: str) -> None:
        """The sync is about to delete an object at the target."""
        seen = self._runs[self._acting_run()]
        assert key in seen.lacked, f"{key}: deleted, and the source had it all the time"
        self.rot.pop(key, None)
        if seen is self._runs[-1]:
            # A claim counts what was deleted since as if it had been gone before.
            for moment in self._moments:
                for _, theirs in moment.values():
                    theirs.pop(key, None)

    def check(self, report: SyncReport) -> None:
        """What a report says was so when the last refresh began."""
        self.check_equal(report.level, is_equal=report.equal)

    def check_equal(self, level: str, *, is_equal: bool) -> None:
        """The same of a level and a word."""
        if is_equal:
            name = "listed" if level == "listed" else "deeper"
            sides = [moment[name] for moment in self._moments]
            assert any(ours == theirs for ours, theirs in sides), f"not equal at level {level}"

    def _look(self) -> None:
        if self._is_open:
            self._moments.append(self._moment())

    def _seen_now(self) -> SeenSince:
        seen = SeenSince()
        for key in {*self._source.objects, *self._target.objects}:
            self._note(key, seen)
        return seen

    def _note_source(self, key: str) -> None:
        for run in self._runs:
            self._note(key, run)

    def _note(self, key: str, seen: SeenSince) -> None:
        found = self._source.objects.get(key)
        if found is None:
            seen.lacked.add(key)
        else:
            seen.bodies.setdefault(key, set()).add(found.body)
            seen.properties.setdefault(key, set()).add(self._digest(found.properties))

    def _digest(self, properties: ObjectProperties) -> bytes:
        return digest_of(self._crossing.of(properties), self._profile)

    def _moment(self) -> dict[str, tuple[States, States]]:
        """What both sides have now, by level."""
        sides = self._source, self._target
        return {
            name: (
                self._states(sides[0], is_listed=is_listed),
                self._states(sides[1], is_listed=is_listed),
            )
            for name, is_listed in (("listed", True), ("deeper", False))
        }

    def _states(self, store: MemoryStore, *, is_listed: bool) -> States:
        """What there is of each key; of bodies only the length at level "listed". What
        rotted unread counts as it was written.
        """
        found: States = {}
        for key, one in store.objects.items():
            body, rot = one.body, self.rot.get(key)
            if store is self._target and rot and rot.facts is one.facts and not rot.is_known:
                body = rot.original
            found[key] = len(body) if is_listed else body, self._digest(one.properties)
        return found
