"""Runs copies on the ports of two stores: retries, rate limit, bounded memory.

Each copy is a generator of requests (replicator.copy_requests) that one thread carries
out in order. Parts are written by threads of a pool beside it, so that a distant target
is kept busy.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar, assert_never

from merkle.checksum import Buffer
from merkle.errors import ReconcileError
from replicator.copy_requests import (
    AbortUpload,
    Answer,
    BeginUpload,
    CompleteUpload,
    CopyFailedError,
    CopyPart,
    DoubtSourceEtags,
    FailureReason,
    JoinPart,
    ListParts,
    PutObject,
    PutPieces,
    PutProperties,
    ReadRange,
    ReadSourceFacts,
    ReadSourceProperties,
    ReadTargetFacts,
    ReadTargetProperties,
    ReadWhole,
    Request,
    SavePart,
    SaveUpload,
    StartPart,
    Steps,
    StitchObject,
    StreamPart,
)
from replicator.copy_task import SourceChangedError
from replicator.ledger import PairLedger
from replicator.source_stream import SourceStream
from replicator.stitching import stitch
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError, StoreError
from replicator.stores.port import ObjectFacts, ObjectReader, Store, UploadedPart, WholeObject
from replicator.stores.stamps import same_stamp
from replicator.target_uploads import OwnUploads, RecordedUploads
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import RateLimiter
from runtime.retry import Backoff, Sleep, call_with_retry

T = TypeVar("T")
# Between two looks at whether a waiting thread should stop.
_CANCEL_CHECK_S = 0.2
# Of what is sent as it is read: the last piece, the one before it, and the next.
_PIECE_BYTES = 3 << 20
# Larger objects fill a link by themselves.
_SMALL_BYTES_MAX = 1 << 20
# Takes a number of threads and a name for them.
NewExecutor: TypeAlias = Callable[[int, str], Executor]


@dataclass(frozen=True, slots=True)
class CopierLimits:
    """How much is done at once: objects and parts that are being written, and bytes in
    memory. `small_objects` may be more: of what one request carries, most of the time
    is that of the way there and back.
    """

    objects: int = 8
    parts: int = 8
    memory_bytes: int = 192 << 20
    small_objects: int = 0

    @property
    def copies(self) -> int:
        """Objects being copied: while some are written, others are read."""
        return self.objects + self.small_writes

    @property
    def small_writes(self) -> int:
        """Small objects that are being written."""
        return max(self.objects, self.small_objects)


class Copier:
    """Carries out the requests of copies from one store to another. Thread-safe: each
    thread runs its own copy. `source_records_hashes`: the source has hashes of single
    objects that its listings lack.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        ledger: PairLedger,
        *,
        limits: CopierLimits,
        rate: RateLimiter,
        backoff: Backoff,
        sleep: Sleep,
        is_cancelled: Callable[[], bool],
        new_executor: NewExecutor = ThreadPoolExecutor,
    ) -> None:
        self._source = source
        self._target = target
        self._ledger = ledger
        self._rate = rate
        self._backoff = backoff
        self._sleep = sleep
        self._is_cancelled = is_cancelled
        self._budget = _ByteBudget(limits.memory_bytes)
        self._parts = new_executor(limits.parts, "part")
        self._writes = threading.BoundedSemaphore(limits.objects)
        self._small_writes = threading.BoundedSemaphore(limits.small_writes)
        self._source_etags_prove = source.capabilities.part_etags_are_md5 is not False
        self.source_records_hashes = source.capabilities.records_hashes

    @property
    def source_etags_prove(self) -> bool:
        """Whether an ETag of the source may prove the parts of a copy: as long as the
        store does not say otherwise, and none has failed to.
        """
        return self._source_etags_prove

    def close(self) -> None:
        """Wait for parts that are on their way, and end the threads."""
        self._parts.shutdown(wait=True)

    def run(self, steps: Steps[T]) -> T:
        """Run one copy to its end.

        Raises:
            ReconcileError: what the copy raises.
            OperationInterruptedError: the sync is being interrupted.
        """
        job = _Job(self._source.reader, self._budget, self._is_cancelled)
        try:
            request = next(steps)
            while True:
                try:
                    answer = self._answer(request, job)
                except ReconcileError as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            steps.close()
            job.finish()

    def _answer(self, request: Request, job: "_Job") -> Answer:
        if self._is_cancelled():
            raise OperationInterruptedError("the sync was interrupted")
        match request:
            case JoinPart():
                return job.join()
            case StartPart():
                job.start(self._parts, lambda: self._write_part(request))
                return None
            case DoubtSourceEtags():
                self._source_etags_prove = False
                return None
            case SaveUpload(key, record):
                self._ledger.save_upload(key, record)
                return None
            case SavePart(key, sent):
                self._ledger.save_part(key, sent)
                return None
            case ReadRange(facts, first, end, until):
                body = job.take_body(end - first)
                self._of_source(lambda: job.stream.read(facts, first, body, until=until))
                return body
            case ReadSourceFacts(key):
                return self._of_source(lambda: self._source.reader.facts(key))
            case ReadSourceProperties(facts):
                reader = self._source.reader
                return self._of_source(lambda: reader.properties_of(facts))
            case ReadWhole(facts):
                job.take_memory(facts.size_bytes)
                return self._of_source(lambda: self._read_whole(request))
            case BeginUpload(key, properties):
                uploads = OwnUploads(self._target, key)
                return self._retried(lambda: uploads.begin(key, properties))
            case PutPieces():
                return self._put_pieces(request, job)
            case StreamPart():
                return self._stream_part(request, job)
            case StitchObject(base):
                recorded = RecordedUploads(self._target, base.key, self._ledger)
                return self._retried(lambda: self._stitch(request, recorded))
            case _:
                return self._retried(lambda: self._call(request))

    def _read_whole(self, request: ReadWhole) -> WholeObject:
        return self._source.reader.read_whole(request.facts, with_acl=request.with_acl)

    def _call(self, request: Request) -> Answer:
        """One request to the target."""
        target = self._target
        match request:
            case ReadTargetFacts(key):
                return target.reader.facts(key)
            case ReadTargetProperties(facts):
                return target.reader.properties(facts.key, version=facts.version)
            case PutObject(key, body, properties, condition):
                self._rate.take(len(body))
                is_small = len(body) <= _SMALL_BYTES_MAX
                with self._small_writes if is_small else self._writes:
                    return target.writer.put(key, body, properties, condition)
            case PutProperties(facts, properties, tags_only):
                return target.writer.put_properties(facts, properties, tags_only=tags_only)
            case AbortUpload(key, upload):
                target.upload_writer.abort(key, upload)
                return None
            case ListParts(key, upload):
                return tuple(target.upload_reader.parts(key, upload))
            case CopyPart(key, upload, number, copied):
                return target.upload_writer.copy_part(key, upload, number, copied)
            case CompleteUpload(key, upload, parts, properties, condition, whole):
                uploads = target.upload_writer
                return uploads.complete(key, upload, parts, properties, condition, whole)
            case ReadRange() | ReadSourceFacts() | ReadSourceProperties() | ReadWhole():
                raise AssertionError(f"{request} is no call of the target")
            case StartPart() | JoinPart() | SaveUpload() | SavePart() | DoubtSourceEtags():
                raise AssertionError(f"{request} is no call of the target")
            case BeginUpload() | StitchObject() | PutPieces() | StreamPart():
                raise AssertionError(f"{request} is no call of the target")
            case _:
                assert_never(request)

    def _put_pieces(self, request: PutPieces, job: "_Job") -> ObjectFacts:
        """Write an object as it is read. A part of it is in memory at a time, and what
        is read waits in the kernel while the target is slow.
        """
        writer, facts = self._target.piece_writer, request.facts
        assert writer is not None
        job.take_memory(_PIECE_BYTES)
        with self._writes, ExitStack() as stack:
            with _source_errors(facts.key):
                pieces = stack.enter_context(self._source.reader.read(facts))
            return writer.put_pieces(
                facts,
                request.md5,
                self._pieces(request, pieces),
                request.properties,
                request.condition,
            )

    def _pieces(self, request: PutPieces, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """What is read, up to the last piece, which wants the source unchanged."""
        last, facts = b"", request.facts
        with _source_errors(facts.key):
            for piece in pieces:
                if last:
                    yield last
                if self._is_cancelled():
                    raise OperationInterruptedError("the sync was interrupted")
                self._rate.take(len(piece))
                request.take(piece)
                last = piece
            now = self._source.reader.facts(facts.key)
        if now is None or not same_stamp(now, facts):
            raise SourceChangedError(f"{facts.key} changed before its copy was complete")
        yield last

    def _stream_part(self, request: StreamPart, job: "_Job") -> UploadedPart:
        """Write a part as it is read, as `_put_pieces` writes an object."""
        writer = self._target.piece_writer
        assert writer is not None
        job.take_memory(_PIECE_BYTES)
        with self._writes:
            return writer.write_part_pieces(
                request.facts.key,
                request.upload,
                request.number,
                self._part_pieces(request, job.stream),
                request.end - request.first,
            )

    def _part_pieces(self, request: StreamPart, stream: SourceStream) -> Iterator[Buffer]:
        with _source_errors(request.facts.key):
            for piece in stream.pieces(
                request.facts, request.first, request.end, until=request.until
            ):
                if self._is_cancelled():
                    raise OperationInterruptedError("the sync was interrupted")
                self._rate.take(len(piece))
                request.take(piece)
                yield piece

    def _stitch(self, request: StitchObject, uploads: RecordedUploads) -> ObjectFacts:
        self._rate.take(request.plan.sent_bytes)
        target = replace(self._target, upload_writer=uploads)
        return stitch(target, request.base, request.plan, request.properties, request.whole)

    def _write_part(self, request: StartPart) -> UploadedPart:
        self._rate.take(len(request.body))
        return self._retried(
            lambda: self._target.upload_writer.write_part(
                request.key,
                request.upload,
                request.number,
                request.body,
                with_digest=request.with_digest,
            )
        )

    def _of_source(self, call: Callable[[], T]) -> T:
        """The answer of the source. What it refuses is no fault of the target."""
        try:
            return self._retried(call)
        except (ObjectMissingError, PreconditionFailedError):
            raise
        except StoreError as error:
            reason = FailureReason.UNAVAILABLE
            if not error.retryable:
                reason = FailureReason.SOURCE_UNREADABLE
            raise CopyFailedError(reason, error.message) from error

    def _retried(self, call: Callable[[], T]) -> T:
        return call_with_retry(call, sleep=self._sleep, backoff=self._backoff)


@contextmanager
def _source_errors(key: str) -> Iterator[None]:
    """Tell what the source says apart from what the target says.

    Raises:
        SourceChangedError: it has another version by now, or none.
        CopyFailedError: it cannot be read.
        StoreError: it did not answer; it may later.
    """
    try:
        yield
    except (ObjectMissingError, PreconditionFailedError) as error:
        raise SourceChangedError(f"{key} changed while it was read") from error
    except StoreError as error:
        if error.retryable:
            raise
        raise CopyFailedError(FailureReason.SOURCE_UNREADABLE, error.message) from error


class _ByteBudget:
    """Lends memory: a caller waits until its bytes fit. More than all that there is may
    be taken by one caller alone. Thread-safe.

    Bodies are lent again and again: new memory of the kernel takes longer than the
    bytes that are received into it.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._lent_bytes = 0
        # All of one length, that of most parts.
        self._free = list[bytearray]()
        self._changed = threading.Condition()

    def take(self, length_bytes: int, is_cancelled: Callable[[], bool]) -> None:
        """Wait for memory.

        Raises:
            OperationInterruptedError: `is_cancelled` returned True.
        """
        with self._changed:
            self._lend(length_bytes, is_cancelled)
            self._trim()

    def take_body(self, length_bytes: int, is_cancelled: Callable[[], bool]) -> bytearray:
        """Wait for memory, and get it, with any bytes in it.

        Raises:
            OperationInterruptedError: `is_cancelled` returned True.
        """
        with self._changed:
            self._lend(length_bytes, is_cancelled)
            is_free = self._free and len(self._free[0]) == length_bytes
            body = self._free.pop() if is_free else bytearray(length_bytes)
            self._trim()
            return body

    def give_back(self, length_bytes: int, body: bytearray | None = None) -> None:
        """Return what was taken, with the body, at which nobody looks any more."""
        with self._changed:
            self._lent_bytes -= length_bytes
            if body:
                if self._free and len(self._free[0]) != len(body):
                    self._free.clear()
                self._free.append(body)
                self._trim()
            self._changed.notify_all()

    def _lend(self, length_bytes: int, is_cancelled: Callable[[], bool]) -> None:
        while self._lent_bytes and self._lent_bytes + length_bytes > self._total_bytes:
            if is_cancelled():
                raise OperationInterruptedError("the sync was interrupted")
            self._changed.wait(_CANCEL_CHECK_S)
        self._lent_bytes += length_bytes

    def _trim(self) -> None:
        while self._free:
            free_bytes = len(self._free) * len(self._free[0])
            if self._lent_bytes + free_bytes <= self._total_bytes:
                break
            self._free.pop()


class _Job:
    """The parts of one copy that are on their way, the memory that it has, and what it
    reads from.
    """

    def __init__(
        self, source: ObjectReader, budget: _ByteBudget, is_cancelled: Callable[[], bool]
    ) -> None:
        self.stream = SourceStream(source)
        self._budget = budget
        self._is_cancelled = is_cancelled
        self._outcomes = queue.SimpleQueue[UploadedPart | BaseException]()
        self._on_their_way = 0
        # Memory of what was read last, until a part takes it over.
        self._read_bytes = 0
        self._body: bytearray | None = None

    def start(self, pool: Executor, write: Callable[[], UploadedPart]) -> None:
        """Hand a part to the pool, and the memory of its body with it."""
        length_bytes, self._read_bytes = self._read_bytes, 0
        body, self._body = self._body, None

        def run() -> None:
            outcome: UploadedPart | BaseException
            try:
                outcome = write()
            except BaseException as error:  # noqa: BLE001 - the joining thread raises it
                outcome = error
            self._budget.give_back(length_bytes, body)
            self._outcomes.put(outcome)

        self._on_their_way += 1
        pool.submit(run)

    def join(self) -> UploadedPart:
        """The outcome of any part."""
        assert self._on_their_way
        while True:
            try:
                outcome = self._outcomes.get(timeout=_CANCEL_CHECK_S)
                break
            except queue.Empty:
                if self._is_cancelled():
                    raise OperationInterruptedError("the sync was interrupted") from None
        self._on_their_way -= 1
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def take_memory(self, length_bytes: int) -> None:
        """Borrow memory for the next object, and return that of the last body."""
        self._drop_body()
        self._budget.take(length_bytes, self._is_cancelled)
        self._read_bytes = length_bytes

    def take_body(self, length_bytes: int) -> memoryview:
        """Borrow memory for the next body, and return that of the last one."""
        self._drop_body()
        self._body = self._budget.take_body(length_bytes, self._is_cancelled)
        self._read_bytes = length_bytes
        return memoryview(self._body)

    def finish(self) -> None:
        """Return all memory that no part holds, and end what is being read."""
        self.stream.close()
        self._drop_body()

    def _drop_body(self) -> None:
        """Return the memory of the last body."""
        self._budget.give_back(self._read_bytes, self._body)
        self._read_bytes, self._body = 0, None
