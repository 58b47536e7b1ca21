"""The verifier's gRPC service: proofs for whoever holds a certificate, and writes.

It stands beside its store, so that listing, reading and patching cross no region. What
crosses is the messages of a comparison and, where the verifier takes writes, the bytes
that the target lacks.
"""

import hmac
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message

from proof.answers import TargetAnswers
from proof.item import Profile
from proof.stored_index import StoredIndex
from proof.wire import decode_question, encode_answer
from protos import verifier_pb2 as pb
from replicator.refresh import Refresher, RefreshProgress
from replicator.stores.port import Store
from replicator.verifier.applier import Applier
from replicator.verifier.messages import (
    batch_result_to,
    description_to,
    facts_to,
    index_state_to,
    keys_from,
    patch_from,
    patch_order_from,
    total_to,
    writes_from,
)
from replicator.verifier.object_windows import ObjectWindows
from replicator.verifier.values import Description, IndexState, Patch, WritesRefusedError
from runtime.errors import BusyError, UsageError
from runtime.rate_limit import Clock, RateLimiter
from runtime.rpc import Handler

SERVICE = "treefold.verifier.v1.Verifier"


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket with all that a verifier has of it."""

    store: Store
    index: StoredIndex
    profile: Profile
    clock: Clock
    # Of the bytes that refreshes read.
    limiter: RateLimiter

    def refresher(self, stopped: Callable[[], bool]) -> Refresher:
        """What brings this bucket's index up to date until `stopped`."""
        return Refresher(
            self.store,
            self.index,
            self.profile,
            clock=self.clock,
            limiter=self.limiter,
            stopped=stopped,
        )


class VerifierService:
    """The Verifier service of one bucket: it converts messages into calls."""

    def __init__(self, bucket: Bucket, *, takes_writes: bool) -> None:
        self._bucket = bucket
        self._applier = (
            Applier(bucket.store, bucket.index, bucket.profile) if takes_writes else None
        )
        self._answers = TargetAnswers(
            bucket.index, bucket.profile, ObjectWindows(bucket.store).answer
        )
        self._digest = bucket.profile.digest
        # One writer of the index at a time.
        self._writing = threading.Lock()

    def register(self, server: grpc.Server) -> None:
        """Add the service to this server."""
        unary, out = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers: dict[str, Handler] = {
            "Describe": unary(self.describe, pb.DescribeRequest.FromString, _serialize),
            "Prove": unary(self.prove, pb.ProveRequest.FromString, _serialize),
            "Refresh": out(self.refresh, pb.RefreshRequest.FromString, _serialize),
            "GetFacts": unary(self.facts, pb.GetFactsRequest.FromString, _serialize),
            "WriteBatches": grpc.stream_stream_rpc_method_handler(
                self.write, pb.WriteBatch.FromString, _serialize
            ),
            "PatchObject": grpc.stream_unary_rpc_method_handler(
                self.patch, pb.PatchPiece.FromString, _serialize
            ),
        }
        assert set(handlers) == set(pb.DESCRIPTOR.services_by_name["Verifier"].methods_by_name)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def close(self) -> None:
        """Wait for writes under way."""
        if self._applier:
            self._applier.close()

    def describe(
        self, _request: pb.DescribeRequest, _: grpc.ServicerContext
    ) -> pb.DescribeResponse:
        """The bucket, the profile and its secret, and what the index knows."""
        bucket = self._bucket
        return description_to(
            Description(
                bucket.store.address, self._applier is not None, bucket.profile, self.state()
            )
        )

    def prove(self, request: pb.ProveRequest, _: grpc.ServicerContext) -> pb.ProveResponse:
        """Answer one question of a comparison.

        Raises:
            RemoteProtocolError: the question is invalid.
            ReconcileError: see TargetAnswers.answer.
        """
        answer = self._answers.answer(decode_question(request.question))
        return pb.ProveResponse(answer=encode_answer(answer))

    def refresh(
        self, request: pb.RefreshRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.RefreshProgress]:
        """Bring the index up to date with the store.

        Raises:
            UsageError: another profile.
            BusyError: a write or another refresh is under way.
            StoreError: the store could not be listed or read.
        """
        self._check_profile(request.profile_digest)
        with self._exclusively():
            progress = RefreshProgress()
            refresher = self._bucket.refresher(lambda: not context.is_active())
            for progress in refresher.run(read_since_s=request.read_since_ms // 1000):
                yield pb.RefreshProgress(objects=progress.objects, bytes_read=progress.bytes_read)
            yield pb.RefreshProgress(
                objects=progress.objects,
                bytes_read=progress.bytes_read,
                index=index_state_to(self.state()),
            )

    def refresh_now(self, *, read_since_s: int, stopped: Callable[[], bool]) -> RefreshProgress:
        """Refresh for the verifier itself; returns what was done.

        Raises:
            BusyError: a write or another refresh is under way.
            StoreError: the store could not be listed or read.
            OperationInterruptedError: `stopped`.
        """
        with self._exclusively():
            *_, progress = self._bucket.refresher(stopped).run(read_since_s=read_since_s)
            return progress

    def facts(self, request: pb.GetFactsRequest, _: grpc.ServicerContext) -> pb.GetFactsResponse:
        """Fresh facts of the objects that exist among the keys.

        Raises:
            UsageError: another profile, or an invalid key.
            StoreError: the store did not say.
        """
        self._check_profile(request.profile_digest)
        found = (self._bucket.store.reader.facts(key) for key in keys_from(request))
        return pb.GetFactsResponse(facts=[facts_to(facts) for facts in found if facts])

    def write(
        self, requests: Iterator[pb.WriteBatch], _: grpc.ServicerContext
    ) -> Iterator[pb.BatchResult]:
        """Apply batches in order; each answer has the root after its batch.

        Raises:
            WritesRefusedError: this verifier takes no writes.
            UsageError: another profile, or an invalid batch.
            BusyError: a refresh or another syncer is under way.
        """
        applier = self._writable()
        with self._exclusively():
            for request in requests:
                self._check_profile(request.profile_digest)
                yield batch_result_to(applier.apply(request.batch, writes_from(request)))

    def patch(self, requests: Iterator[pb.PatchPiece], _: grpc.ServicerContext) -> pb.PatchResult:
        """Replace ranges of one object.

        Raises:
            WritesRefusedError: this verifier takes no writes.
            UsageError: another profile, or the pieces are invalid.
            PreconditionFailedError: the target holds another object than the base.
            DigestMismatchError: the result is not what was ordered.
            BusyError: a refresh or another syncer is under way.
        """
        applier = self._writable()
        header = next(requests, None)
        if header is None or header.WhichOneof("piece") != "header":
            raise UsageError("a patch begins with its header")
        self._check_profile(header.header.profile_digest)
        with self._exclusively():
            facts, root = applier.patch(patch_order_from(header.header), _patches(requests))
        return pb.PatchResult(facts=facts_to(facts), items=root.count, total=total_to(root))

    def state(self) -> IndexState:
        """What the index knows now."""
        with self._bucket.index.snapshot() as snapshot:
            listing = self._bucket.index.listing("")
            listed_at_s = listing.began_at_s if listing and listing.is_complete else None
            return IndexState(snapshot.position, snapshot.evidence, listed_at_s)

    def _check_profile(self, digest: bytes) -> None:
        if not hmac.compare_digest(digest, self._digest):
            raise UsageError(
                "the verifier compares by another profile",
                hint="Use the state directory that was made with this verifier, or a new one.",
            )

    def _writable(self) -> Applier:
        if self._applier is None:
            raise WritesRefusedError(
                "this verifier takes no writes",
                hint="Set writes = true in its configuration, or sync without --verifier.",
            )
        return self._applier

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        if not self._writing.acquire(timeout=_WAIT_S):
            raise BusyError("a refresh or another syncer is under way at this verifier")
        try:
            yield
        finally:
            self._writing.release()


# One call waits this long for another that writes.
_WAIT_S = 5.0


def _patches(pieces: Iterator[pb.PatchPiece]) -> Iterator[Patch]:
    for piece in pieces:
        if piece.WhichOneof("piece") != "patch":
            raise UsageError("a patch has one header")
        yield patch_from(piece.patch)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
