"""Send of a large object that changed only its windows, through the verifier."""

import secrets
from collections.abc import Callable

from proof.messages import JOB_BYTES
from replicator.copy_requests import CopyFailedError, CopyResult, FailureReason
from replicator.crossing import Crossing
from replicator.deletes import Retrying
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError
from replicator.stores.port import ObjectFacts, ObjectProperties, Store
from replicator.syncer.target_verifier import TargetVerifier, VerifierSession
from replicator.verifier.values import BODY_BYTES_MAX
from replicator.window_patch import WindowPatcher


class WindowPatches:
    """Patches objects of one target, while its verifier answers. Thread-safe."""

    def __init__(
        self,
        source: Store,
        verifier: TargetVerifier,
        crossing: Crossing,
        at_target: Callable[[ObjectFacts, ObjectProperties], ObjectProperties],
        *,
        take_bytes: Callable[[int], None],
        retried: Retrying,
    ) -> None:
        """`at_target` gives what a copy gets of the properties of the source's object.
        `take_bytes` waits until the rate allows so many more bytes.
        """
        self._source = source
        self._verifier = verifier
        self._crossing = crossing
        self._at_target = at_target
        self._take_bytes = take_bytes
        self._retried = retried
        self._patcher: tuple[VerifierSession, WindowPatcher] | None = None

    def patch(self, source: ObjectFacts, target: ObjectFacts) -> CopyResult | None:
        """Make the target's object that of the source; None where it is better sent
        whole, and the target is as it was.

        Raises:
            CopyFailedError: one of the sides changed meanwhile.
            LeaseLostError: another syncer works on this.
        """
        if source.size_bytes <= BODY_BYTES_MAX or not target.size_bytes:
            return None
        return self._verifier.call(lambda session: self._patched(session, source, target))

    def _patched(
        self, session: VerifierSession, source: ObjectFacts, target: ObjectFacts
    ) -> CopyResult | None:
        try:
            read = self._source.reader.properties_of
            properties = self._at_target(source, self._retried(lambda: read(source)))
        except (ObjectMissingError, PreconditionFailedError) as error:
            raise CopyFailedError(
                FailureReason.SOURCE_CHANGED, f"{source.key} changed while it was read"
            ) from error
        made = self._of(session).patch(
            source,
            properties,
            job=secrets.token_bytes(JOB_BYTES),
            base=target,
            base_bytes=target.size_bytes,
        )
        if made is None:
            return None
        digest = self._crossing.digest(properties)
        return CopyResult(source, made.facts, made.hashes, digest, made.sent_bytes)

    def _of(self, session: VerifierSession) -> WindowPatcher:
        """The patcher of a session: all threads share its bounds."""
        known = self._patcher
        if known is None or known[0] is not session:
            known = self._patcher = (
                session,
                WindowPatcher(
                    self._source,
                    self._verifier.client,
                    session.profile,
                    take_bytes=self._take_bytes,
                ),
            )
        return known[1]
