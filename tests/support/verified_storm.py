"""The storm around a replication whose target has a verifier.

The verifier is killed at any step of its own, and its link loses calls and answers. A
syncer may be stopped, for longer than its lease, between its look at the lease and the
arrival of what it sent.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from proof.item import HashAlgorithm, Profile
from replicator.refresh import groups_of
from replicator.verifier.client import VerifierClient
from replicator.verifier.server import VerifierService
from tests.support.bucket_sync import InlineExecutor
from tests.support.kill_points import KilledError
from tests.support.replication_history import properties
from tests.support.replication_storm import ReplicationStorm
from tests.support.storm_syncer import StormSyncer
from tests.support.verifier_link import IndexHome, LinkFaults, VerifierHost, VerifierLink

T = TypeVar("T")
_WRITE_KEYS = "/treefold.verifier.v1.Verifier/WriteKeys"


class _StormLink(VerifierLink):
    """The link of the syncers: what the verifier does is none of their deeds."""

    def __init__(self, host: VerifierHost, storm: "VerifiedStorm") -> None:
        super().__init__(host)
        self._storm = storm

    def unary_unary(self, method: str, **serializers: Any) -> Callable[..., Any]:
        """See grpc.Channel."""
        call = super().unary_unary(method, **serializers)

        def stormy(request: Any, timeout: float) -> Any:
            self._storm.before_call(method, request)
            answer = call(request, timeout=timeout)
            self._storm.after_call()
            return answer

        return stormy

    def _serve(self, method: str, call: Callable[[], T], context: Any = None) -> T:
        with self._storm.verifier_acting():
            return super()._serve(method, call, context)


class VerifiedStorm(ReplicationStorm):
    """A storm with a verifier beside the target."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        groups = groups_of(self.target.capabilities)
        profile = Profile(b"s" * 32, HashAlgorithm.BLAKE3, groups)
        self._epochs = folder / "verifier" / "epochs.json"
        home = folder / "verifier" / "index"
        home.mkdir(parents=True)
        self.verifier_host = VerifierHost(
            IndexHome(home, profile),
            self.target.store(),
            self.clock,
            InlineExecutor,
            self._strike_verifier,
            partial(VerifierService, epochs_file=self._epochs),
        )
        self._verifier_kills = self.rng.choice((0.0, 0.03, 0.1))
        # Of a delete in which a syncer is to be stopped.
        self._late_key = ""
        self.link = _StormLink(self.verifier_host, self)
        self.link.faults = LinkFaults(
            loses=self._fails, forgets=self._fails, repeats=lambda: self._fails() and self._fails()
        )

    def heal(self) -> None:
        """See ReplicationStorm."""
        self._verifier_kills = 0.0
        super().heal()
        known = [key for key in sorted(self.source.objects) if key in self.target.objects]
        if known:
            self._late_key = self.rng.choice(known)
            self._note(f"delete {self._late_key}")
            self.source.remove(self._late_key)
            self.history.note(self.source, self.source.newest_index)
            self._await_proof(0)
            self._check_equal()

    def before_call(self, method: str, request: Any) -> None:
        """A syncer calls the verifier, and may be stopped before that arrives."""
        node = self._acting
        self._kill_now()
        if method != _WRITE_KEYS or node is None:
            return
        self.marks["verified write"] += 1
        held = set(self.target.objects)
        if any(one.delete and one.key == self._late_key for one in request.writes):
            self._stall_in_delete(node)
        elif self._in_stall or self.rng.random() >= self._stalls:
            return
        else:
            self._stall(node, "verified put", request.writes[0].key)
        if self._may_write(node):
            return
        self.marks["late verified write"] += 1
        if self._newest_epoch() <= node.epoch:
            # The verifier has not heard of the next holder. A key that was absent may
            # be so again, and a delete has no condition.
            late = {one.key for one in request.writes if one.delete or one.key not in held}
            self.history.tainted |= dict.fromkeys(late, self.clock.ms)

    def after_call(self) -> None:
        """A syncer has the verifier's answer."""
        self._look()
        self._kill_now()

    def verifier_acting(self) -> "_NobodyActs":
        """While the verifier acts, no syncer does."""
        return _NobodyActs(self)

    def _stall_in_delete(self, node: StormSyncer) -> None:
        """Stop a syncer until the key exists again, and the next one has copied it; the
        verifier may have been restarted then.
        """
        key, self._late_key = self._late_key, ""
        self._note(f"put {key}")
        self.source.write(key, b"written anew", properties("late", "x"))
        self.history.note(self.source, self.source.newest_index)

        def is_copied() -> bool:
            found = self.target.objects.get(key)
            return found is not None and found.body == b"written anew"

        self._stall(node, "verified delete", key, until=is_copied)
        if self.rng.random() < 0.5:
            self.verifier_host.life.is_over = True

    def _newest_epoch(self) -> int:
        """The verifier has to refuse whatever comes by an older one."""
        if not self._epochs.exists():
            return 0
        return max(json.loads(self._epochs.read_bytes()).values(), default=0)

    def _kill_now(self) -> None:
        if self._acting is not None and not self._in_stall and self.rng.random() < self._kills:
            raise KilledError

    def _fails(self) -> bool:
        return self.rng.random() < self._errors

    def _strike_verifier(self) -> None:
        if self.rng.random() < self._verifier_kills:
            self._note("the verifier is killed")
            self.marks["verifier killed"] += 1
            self.verifier_host.kill()

    def _client(self) -> VerifierClient:
        return self.link.client()

    def _node(self, name: str, parent: Path) -> StormSyncer:
        node = super()._node(name, parent)
        node.verifier = self._client
        return node


class _NobodyActs:
    def __init__(self, storm: VerifiedStorm) -> None:
        self._storm = storm

    def __enter__(self) -> None:
        self._outer, self._storm._acting = self._storm._acting, None

    def __exit__(self, *_error: object) -> None:
        self._storm._acting = self._outer
