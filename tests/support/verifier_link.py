"""A verifier in this process, behind a link that loses, repeats, delays and cuts.

Client and service are the product's, and so are the bytes between them; only gRPC and
its threads are left out. A killed verifier loses what it had in memory, and keeps what
its tables and its store had taken.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import grpc

from merkle.errors import ReconcileError
from proof.generations import StorageKind, TablesOpener
from proof.item import Profile
from proof.open_generation import IndexLimits
from proof.stored_index import StoredIndex
from proof.tables import ItemRow, ItemTables, TableBatch, TableView
from replicator.copier import NewExecutor
from replicator.refresh import IndexedBucket
from replicator.stores.port import Store
from replicator.verifier.audit import VerifierAudit
from replicator.verifier.client import VerifierClient
from replicator.verifier.server import VerifierService
from runtime.disk import Disk
from runtime.rate_limit import Clock
from runtime.rpc import refuse
from tests.support.identities import ANYBODY
from tests.support.stored_indexes import memory_opener

T = TypeVar("T")
# The derived state is saved often, and what came since is replayed.
LIMITS = IndexLimits(saved_changes=20)
# Of the messages that a client has sent and nobody has read.
_AHEAD_MAX = 3
_WRITE = "/treefold.verifier.v1.Verifier/WriteBatches"


class VerifierKilledError(BaseException):
    """The verifier's process ends here. No code of the product catches it."""


@dataclass
class Life:
    """A process that lives until it is killed: afterwards nothing of it acts any more,
    whatever is still on the stack.
    """

    error: type[BaseException]
    is_over: bool = False

    def check(self) -> None:
        """Go on, if the process lives."""
        if self.is_over:
            raise self.error

    def end(self) -> NoReturn:
        """Kill the process."""
        self.is_over = True
        raise self.error


class MortalTables:
    """ItemTables of a process that may be killed before or after any write."""

    def __init__(self, tables: ItemTables, life: Life, point: Callable[[], None]) -> None:
        """`point` is passed before and after each write, and may end the life."""
        self._tables, self._life, self._point = tables, life, point

    @contextmanager
    def view(self) -> Iterator[TableView]:
        """See ItemTables."""
        self._life.check()
        with self._tables.view() as view:
            yield view

    def versions(self, keys: Sequence[bytes]) -> list[list[ItemRow]]:
        """See ItemTables."""
        self._life.check()
        return self._tables.versions(keys)

    def write(self, batch: TableBatch) -> None:
        """See ItemTables."""
        self._life.check()
        self._point()
        self._tables.write(batch)
        self._point()

    def settle(self) -> None:
        """See ItemTables."""
        self._tables.settle()

    def close(self) -> None:
        """See ItemTables."""


@dataclass
class IndexHome:
    """The folder of an index whose tables are in memory, and outlive its processes."""

    folder: Path
    profile: Profile
    opener: TablesOpener = field(default_factory=memory_opener)

    def open(self, life: Life, point: Callable[[], None]) -> StoredIndex:
        """The index, for one process."""

        def opened(path: Path, building: bool) -> ItemTables:
            return MortalTables(self.opener(path, building), life, point)

        openers: Mapping[StorageKind, TablesOpener] = dict.fromkeys(StorageKind, opened)
        return StoredIndex(self.folder, self.profile, disk=Disk(), limits=LIMITS, openers=openers)


class WritingLock:
    """The lock of an index's writers, which tells whether it is held."""

    def __init__(self) -> None:
        self.is_held = False

    def __enter__(self) -> None:
        assert not self.is_held
        self.is_held = True

    def __exit__(self, *_error: object) -> None:
        self.is_held = False


@dataclass
class VerifierHost:
    """Where a verifier runs: it starts when it is asked, and may be killed."""

    home: IndexHome
    store: Store
    clock: Clock
    new_executor: NewExecutor
    point: Callable[[], None] = lambda: None
    make_service: Callable[..., VerifierService] = VerifierService
    make_bucket: type[IndexedBucket] = IndexedBucket
    kills: int = 0
    life: Life = field(default_factory=lambda: Life(VerifierKilledError, is_over=True))
    bucket: IndexedBucket = field(init=False)
    lock: WritingLock = field(default_factory=WritingLock)

    def __post_init__(self) -> None:
        # It outlives kills: test_audit_crashes has what they do to it.
        self._audit = VerifierAudit(self.home.folder.with_name("audit.jsonl"))
        weakref.finalize(self, self._audit.close)

    def start(self) -> None:
        """Start the verifier, if it does not run."""
        if not self.life.is_over:
            return
        life = self.life = Life(VerifierKilledError)
        self.lock = WritingLock()
        self.bucket = self.make_bucket(
            self.store,
            self.home.open(life, lambda: self.point()),
            self.home.profile,
            self.clock,
            self.lock,
            new_executor=self.new_executor,
        )
        handlers = _Handlers()
        self.make_service(self.bucket, access=ANYBODY, audit=self._audit).register(handlers)
        self._handlers = handlers

    def kill(self) -> NoReturn:
        """Kill it here."""
        self.kills += 1
        self.life.end()

    def handler(self, method: str) -> Any:
        """What serves a method."""
        return self._handlers.of(method)


class _Handlers:
    """A grpc.Server as far as a service registers itself."""

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        (self._handler,) = handlers

    def of(self, method: str) -> Any:
        return self._handler.service(_Details(method))


class _Details(NamedTuple):
    method: str
    invocation_metadata: tuple[()] = ()


class _Trailer(NamedTuple):
    key: str
    value: str | bytes


class LinkError(grpc.RpcError):
    """How a call ended, as gRPC says it."""

    def __init__(
        self, status: grpc.StatusCode, details: str = "", trailers: tuple[_Trailer, ...] = ()
    ) -> None:
        super().__init__(status, details)
        self._status, self._details, self._trailers = status, details, trailers

    def code(self) -> grpc.StatusCode:
        """See grpc.Call."""
        return self._status

    def details(self) -> str:
        """See grpc.Call."""
        return self._details

    def trailing_metadata(self) -> tuple[_Trailer, ...]:
        """See grpc.Call."""
        return self._trailers


def _cut() -> LinkError:
    return LinkError(grpc.StatusCode.UNAVAILABLE, "the link was cut")


class _Context:
    """A grpc.ServicerContext as far as the service uses it."""

    def __init__(self) -> None:
        self.is_alive = True
        self._trailers: tuple[_Trailer, ...] = ()

    def is_active(self) -> bool:
        return self.is_alive

    def peer(self) -> str:
        return "the link"

    def set_trailing_metadata(self, trailers: tuple[tuple[str, str | bytes], ...]) -> None:
        self._trailers = tuple(_Trailer(*one) for one in trailers)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise LinkError(code, details, self._trailers)


@dataclass
class LinkFaults:
    """What the link does to a call or a message; each is asked when it may happen."""

    loses: Callable[[], bool] = lambda: False
    """A call, or a message of a stream, before it arrives. The stream is cut."""
    forgets: Callable[[], bool] = lambda: False
    """An answer, after the verifier acted. The stream is cut."""
    repeats: Callable[[], bool] = lambda: False
    """A call is carried out twice; of a batch a copy arrives later."""
    ahead: Callable[[], int] = lambda: 0
    """So many messages more are sent before the verifier reads the next one."""


class VerifierLink:
    """A grpc.Channel to the verifier of a host."""

    def __init__(self, host: VerifierHost) -> None:
        self._host = host
        self.faults = LinkFaults()
        self.late: list[tuple[int, bytes]] = []
        """Batches that were sent, and arrive when nobody waits for them any more; each
        with the run that sent it.
        """
        self.run = 0
        """For which run the verifier acts, or did last."""
        self.method = ""
        """What the verifier does now; empty while its client acts."""

    def client(self) -> VerifierClient:
        """A client that uses this link."""
        return VerifierClient("127.0.0.1:1", channel=self)

    def close(self) -> None:
        """See grpc.Channel."""

    def deliver_late(self) -> None:
        """Let one batch arrive that nobody waits for, unless a writer of the index is
        at work.
        """
        if not self.late or self._host.lock.is_held:
            return
        (run, raw), now = self.late.pop(0), self.run
        self.run = run
        try:
            handler = self._handler(_WRITE)
            message = handler.request_deserializer(raw)
            for _ in self._served(_WRITE, handler.stream_stream, iter([message]), _Context()):
                pass
        except LinkError:
            pass
        finally:
            self.run = now

    def unary_unary(self, method: str, **serializers: Any) -> Callable[..., Any]:
        """See grpc.Channel."""

        def call(request: Any, timeout: float) -> Any:
            assert timeout > 0
            raw = serializers["request_serializer"](request)
            if self.faults.loses():
                raise _cut()
            for _ in range(2 if self.faults.repeats() else 1):
                handler = self._handler(method)
                message = handler.request_deserializer(raw)
                served = self._serve(method, partial(handler.unary_unary, message, _Context()))
                answer = handler.response_serializer(served)
            if self.faults.forgets():
                raise _cut()
            return serializers["response_deserializer"](answer)

        return call

    def unary_stream(
        self, method: str, request_serializer: Callable[[Any], bytes], response_deserializer: Any
    ) -> Callable[..., Any]:
        """See grpc.Channel; its answers stay bytes."""

        def call(request: Any, timeout: float) -> _Answers:
            assert timeout > 0
            raw = request_serializer(request)
            if self.faults.loses():
                raise _cut()
            handler, context = self._handler(method), _Context()
            message = handler.request_deserializer(raw)
            served = self._served(method, handler.unary_stream, message, context)
            return self._answers(served, handler, context, deque())

        return call

    def stream_stream(
        self, method: str, request_serializer: Callable[[Any], bytes], response_deserializer: Any
    ) -> Callable[..., Any]:
        """See grpc.Channel; its answers stay bytes."""

        def call(requests: Iterator[Any], timeout: float) -> _Answers:
            assert timeout > 0
            handler, context = self._handler(method), _Context()
            raws = map(request_serializer, requests)
            sent = deque[bytes]()
            messages = self._messages(raws, sent, handler, context, is_batch=method == _WRITE)
            served = self._served(method, handler.stream_stream, messages, context)
            left = sent if method == _WRITE else deque[bytes]()
            return self._answers(served, handler, context, left)

        return call

    def _handler(self, method: str) -> Any:
        try:
            self._host.start()
        except VerifierKilledError as error:
            raise _cut() from error
        return self._host.handler(method)

    def _messages(
        self,
        raws: Iterator[bytes],
        sent: deque[bytes],
        handler: Any,
        context: _Context,
        *,
        is_batch: bool,
    ) -> Iterator[Any]:
        """What the verifier reads of a stream. It runs while the verifier acts, and
        what it pulls is the client's.
        """
        is_over = False
        while True:
            method, self.method = self.method, ""
            try:
                wanted = 1 + min(_AHEAD_MAX, self.faults.ahead())
                while not is_over and len(sent) < wanted:
                    raw = next(raws, None)
                    if raw is None:
                        is_over = True
                    else:
                        sent.append(raw)
                if sent and self.faults.loses():
                    context.is_alive = False
                    raise _cut()
            finally:
                self.method = method
            if not sent:
                return
            raw = sent.popleft()
            if is_batch and self.faults.repeats():
                self.late.append((self.run, raw))
            yield handler.request_deserializer(raw)

    def _served(
        self, method: str, behaviour: Callable[..., Any], request: Any, context: _Context
    ) -> Iterator[Any]:
        """The answers of a stream, each made while the verifier acts."""
        answers = self._serve(method, partial(behaviour, request, context), context)
        while True:
            answer = self._serve(method, partial(next, answers, None), context)
            if answer is None:
                return
            yield answer

    def _answers(
        self,
        served: Iterator[Any],
        handler: Any,
        context: _Context,
        sent: deque[bytes],
    ) -> "_Answers":
        def answers() -> Iterator[bytes]:
            try:
                for answer in served:
                    if self.faults.forgets():
                        context.is_alive = False
                        raise _cut()
                    yield handler.response_serializer(answer)
            except BaseException:
                # What was sent is on its way, and may arrive when all is over.
                self.late += [(self.run, raw) for raw in sent]
                sent.clear()
                raise

        return _Answers(answers(), context)

    def _serve(self, method: str, call: Callable[[], T], context: _Context | None = None) -> T:
        life, before = self._host.life, self.method
        self.method = method
        try:
            life.check()
            return call()
        except ReconcileError as error:
            refuse(context or _Context(), error)
        except VerifierKilledError as error:
            raise _cut() from error
        finally:
            self.method = before


class _Answers:
    """A call whose answers are a stream."""

    def __init__(self, answers: Iterator[Any], context: _Context) -> None:
        self._answers, self._context = answers, context

    def __iter__(self) -> Iterator[Any]:
        return self._answers

    def cancel(self) -> None:
        """See grpc.Call."""
        self._context.is_alive = False
