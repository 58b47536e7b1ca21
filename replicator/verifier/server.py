"""The verifier's gRPC service: proofs for verifiers and operators, and writes.

It stands beside its store, so that listing, reading and patching cross no region. What
crosses is the messages of a comparison and, where the verifier takes writes, the bytes
that the target lacks.
"""

import hmac
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from proof.answers import TargetAnswers
from proof.wire import decode_question, encode_answer
from protos import verifier_pb2 as pb
from replicator.refresh import IndexedBucket, RefreshProgress
from replicator.verifier.applier import Applier, CheckRun
from replicator.verifier.audit import VerifierAudit
from replicator.verifier.key_applier import KeyApplier
from replicator.verifier.messages import (
    batch_result_to,
    delete_response_to,
    deletes_from,
    description_to,
    facts_to,
    index_state_to,
    key_results_to,
    key_writes_from,
    keys_from,
    patch_from,
    patch_order_from,
    run_from,
    total_to,
    writes_from,
)
from replicator.verifier.object_windows import ObjectWindows
from replicator.verifier.run_fence import RunFence
from replicator.verifier.values import (
    PATCHED_BYTES_MAX,
    PATCHES_MAX,
    Description,
    IndexState,
    RangePatch,
    WritesRefusedError,
)
from runtime.access import Access
from runtime.errors import BusyError, OperationInterruptedError, UsageError
from runtime.rpc import Handler

SERVICE = "treefold.verifier.v1.Verifier"
# While a refresh or a patch goes on, an answer goes out this often.
_BEAT_S = 5.0
# Between two looks at whether one who waits should stop.
_STOP_CHECK_S = 0.2
# Refreshes and patches at a time, each with its own thread; all patches are in memory.
_LONG_CALLS = 4
# A patch waits this long for those before it.
_WAIT_S = 30.0
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)


class VerifierService:
    """The Verifier service of one bucket: it converts messages into calls."""

    def __init__(
        self,
        bucket: IndexedBucket,
        *,
        access: Access,
        audit: VerifierAudit | None = None,
        epochs_file: Path | None = None,
    ) -> None:
        """`access` is that of the server to which it is added. With `audit`, which
        records them, it takes writes. `epochs_file` is as for RunFence.

        Raises:
            ConfigError, DiskError: the file of epochs cannot be read.
        """
        self._bucket = bucket
        self._access = access
        self._audit = audit
        self._applier = (
            Applier(
                bucket.store,
                bucket.index,
                bucket.profile,
                writing=bucket.writing,
                new_executor=bucket.new_executor,
            )
            if audit
            else None
        )
        self._answers = TargetAnswers(
            bucket.index, bucket.profile, ObjectWindows(bucket.store).answer
        )
        self._digest = bucket.profile.digest
        self._keys = (
            KeyApplier(bucket.store, bucket.index, bucket.profile, self._applier)
            if self._applier
            else None
        )
        self._fence = RunFence(bucket.writing, epochs_file)
        self._stopping = threading.Event()
        # Two listings at a time would cost twice and find the same.
        self._refreshing = threading.Lock()
        self._patching = threading.BoundedSemaphore(_LONG_CALLS)
        self._long_calls = bucket.new_executor(2 * _LONG_CALLS, "long-call")

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
            "DeleteItems": unary(self.delete, pb.DeleteRequest.FromString, _serialize),
            "PatchObject": grpc.stream_stream_rpc_method_handler(
                self.patch, pb.PatchPiece.FromString, _serialize
            ),
            "BeginRun": unary(self.begin_run, pb.BeginRunRequest.FromString, _serialize),
            "WriteKeys": unary(self.write_keys, pb.WriteKeysRequest.FromString, _serialize),
        }
        assert set(handlers) == set(pb.DESCRIPTOR.services_by_name["Verifier"].methods_by_name)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def close(self) -> None:
        """Stop refreshes and patches, and wait for writes under way."""
        self._stopping.set()
        self._long_calls.shutdown(cancel_futures=True)
        if self._applier:
            self._applier.close()

    def describe(
        self, _request: pb.DescribeRequest, _: grpc.ServicerContext
    ) -> pb.DescribeResponse:
        """The bucket, the profile and its secret, and what the index knows."""
        store = self._bucket.store
        return description_to(
            Description(
                store.address,
                takes_writes=self._applier is not None,
                profile=self._bucket.profile,
                index=self.state(),
                lists_all_keys=store.capabilities.lists_all_keys,
                roles_enforced=self._access.is_enforced,
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
            StoreError: the store could not be listed or read.
        """
        self._check_profile(request.profile_digest)
        if request.HasField("begins"):
            self._fence.begin(run_from(request.begins))
        start, seen = self._bucket.start(), [RefreshProgress()]
        # The other side waits for it, so that both hold still from one moment on.
        yield pb.RefreshProgress()

        def work() -> RefreshProgress:
            return self.refresh_now(
                read_since_s=request.read_since_ms // 1000,
                prefix=request.prefix,
                stopped=lambda: not context.is_active(),
                note=lambda progress: seen.__setitem__(0, progress),
            )

        progress = yield from self._beats(
            work,
            lambda: pb.RefreshProgress(objects=seen[0].objects, bytes_read=seen[0].bytes_read),
        )
        settled = self._bucket.settled_root(start, request.prefix)
        damaged = self._bucket.key_hashes(progress.damaged_keys)
        found = replace(
            self.state(), settled=settled, damaged=damaged, unsettled=progress.unsettled
        )
        yield pb.RefreshProgress(
            objects=progress.objects,
            bytes_read=progress.bytes_read,
            index=index_state_to(found),
        )

    def refresh_now(
        self,
        *,
        read_since_s: int = 0,
        prefix: str = "",
        stopped: Callable[[], bool],
        note: Callable[[RefreshProgress], None] = lambda _progress: None,
    ) -> RefreshProgress:
        """List the store and bring the index up to date, after any refresh under way.

        Raises:
            StoreError: the store could not be listed or read.
            OperationInterruptedError: `stopped`, or the process stops.
        """

        def is_stopped() -> bool:
            return self._stopping.is_set() or stopped()

        while not self._refreshing.acquire(timeout=_STOP_CHECK_S):
            if is_stopped():
                raise OperationInterruptedError("the refresh was stopped")
        try:
            refresher = self._bucket.refresher(is_stopped)
            return refresher.refresh(read_since_s=read_since_s, prefix=prefix, note=note)
        finally:
            self._refreshing.release()

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
        self, requests: Iterator[pb.WriteBatch], context: grpc.ServicerContext
    ) -> Iterator[pb.BatchResult]:
        """Apply batches in order; each answer has the root after its batch.

        Raises:
            WritesRefusedError: this verifier takes no writes.
            UsageError: another profile, or an invalid batch.
            RunSupersededError: a later run has begun.
            DiskError: it cannot be recorded in the audit file.
        """
        applier, audit = self._writable()
        who = self._caller(context)
        for request in requests:
            self._check_profile(request.profile_digest)
            writes, check_run = writes_from(request), self._run_check(request)
            audit.put(who, request.batch, writes)
            result = applier.apply(request.batch, writes, check_run)
            yield batch_result_to(result)

    def begin_run(
        self, request: pb.BeginRunRequest, _: grpc.ServicerContext
    ) -> pb.BeginRunResponse:
        """Let a run write, and none before it of its pair.

        Raises:
            WritesRefusedError: this verifier takes no writes.
            UsageError: another profile, or an invalid name.
            RunSupersededError: a run of a newer epoch has begun.
            DiskError: its epoch cannot be kept.
        """
        self._writable()
        self._check_profile(request.profile_digest)
        self._fence.begin(run_from(request.run))
        return pb.BeginRunResponse()

    def write_keys(
        self, request: pb.WriteKeysRequest, context: grpc.ServicerContext
    ) -> pb.WriteKeysResponse:
        """Apply changes of different keys, each for itself.

        Raises:
            WritesRefusedError: this verifier takes no writes.
            UsageError: another profile, or an invalid request.
            RunSupersededError, RunUnknownError: the run may not write.
            OperationInterruptedError: nobody waits for the answer any more; nothing
                was written.
            DiskError: it cannot be recorded in the audit file.
        """
        _, audit = self._writable()
        assert self._keys is not None
        self._check_profile(request.profile_digest)
        writes, check_run = key_writes_from(request), self._run_check(request)
        if not context.is_active():
            # The syncer has written it by itself meanwhile, and may have gone on.
            raise OperationInterruptedError("the syncer has given this up")
        audit.write_keys(self._caller(context), writes)
        return key_results_to(self._keys.apply(writes, check_run))

    def delete(self, request: pb.DeleteRequest, context: grpc.ServicerContext) -> pb.DeleteResponse:
        """Delete the objects that are still these items.

        Raises:
            WritesRefusedError: this verifier takes no writes.
            UsageError: another profile, or an invalid request.
            RunSupersededError: a later run has begun.
            DiskError: it cannot be recorded in the audit file.
        """
        applier, audit = self._writable()
        self._check_profile(request.profile_digest)
        items = deletes_from(request)
        note = partial(audit.delete, self._caller(context))
        result = applier.delete(items, note, self._run_check(request))
        return delete_response_to(len(items), result)

    def patch(
        self, requests: Iterator[pb.PatchPiece], context: grpc.ServicerContext
    ) -> Iterator[pb.PatchResult]:
        """Replace ranges of one object.

        Raises:
            WritesRefusedError: this verifier takes no writes.
            UsageError: another profile, or the pieces are invalid.
            PreconditionFailedError: the target holds another object than the base.
            DigestMismatchError: the result is not what was ordered.
            BusyError: too many patches are under way.
            RunSupersededError: a later run has begun.
            DiskError: it cannot be recorded in the audit file.
        """
        applier, audit = self._writable()
        with self._patch_turn():
            header = next(requests, None)
            if header is None or header.WhichOneof("piece") != "header":
                raise UsageError("a patch begins with its header")
            self._check_profile(header.header.profile_digest)
            check_run = self._run_check(header.header)
            order, patches = patch_order_from(header.header), _patches(requests)
            audit.patch(self._caller(context), order, patches)
            facts, root = yield from self._beats(
                lambda: applier.patch(
                    order,
                    patches,
                    stopped=lambda: self._stopping.is_set() or not context.is_active(),
                    check_run=check_run,
                ),
                pb.PatchResult,
            )
        yield pb.PatchResult(facts=facts_to(facts), items=root.count, total=total_to(root))

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

    def _run_check(
        self, request: pb.WriteBatch | pb.DeleteRequest | pb.PatchHeader | pb.WriteKeysRequest
    ) -> CheckRun:
        """What refuses the run that a request names; it does so at once, before the
        change is recorded, and once more while nobody else writes.

        Raises:
            RunSupersededError: a later run has begun.
        """
        check = partial(
            self._fence.check, run_from(request.run) if request.HasField("run") else None
        )
        check()
        return check

    def _caller(self, context: grpc.ServicerContext) -> str:
        return self._access.requester(context, str(context.peer()))

    def _writable(self) -> tuple[Applier, VerifierAudit]:
        if self._applier is None or self._audit is None:
            raise WritesRefusedError(
                "this verifier takes no writes",
                hint="Set writes = true in its configuration, or sync without --verifier.",
            )
        return self._applier, self._audit

    def _beats(self, work: Callable[[], _T], beat: Callable[[], _M]) -> Generator[_M, None, _T]:
        """Work in another thread, with an answer now and then while it goes on."""
        future = self._long_calls.submit(work)
        while not wait((future,), timeout=_BEAT_S).done:
            yield beat()
        return future.result()

    @contextmanager
    def _patch_turn(self) -> Iterator[None]:
        if not self._patching.acquire(timeout=_WAIT_S):
            raise BusyError(f"{_LONG_CALLS} patches are under way at this verifier")
        try:
            yield
        finally:
            self._patching.release()


def _patches(pieces: Iterator[pb.PatchPiece]) -> list[RangePatch]:
    """All patches of a call, within the limits."""
    found, size = list[RangePatch](), 0
    for piece in pieces:
        if piece.WhichOneof("piece") != "patch":
            raise UsageError("a patch has one header")
        found.append(patch_from(piece.patch))
        size += len(piece.patch.data)
        if len(found) > PATCHES_MAX or size > PATCHED_BYTES_MAX:
            raise UsageError(
                f"a change has over {PATCHES_MAX} patches or {PATCHED_BYTES_MAX} bytes"
            )
    return found


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
