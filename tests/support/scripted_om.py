"""An Ozone Manager that answers by a script, over real gRPC."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import grpc

from ozone.manager import METHOD
from protos import ozone_manager_pb2 as pb

Answer = Callable[[pb.OMRequest], pb.OMResponse | str]


class ScriptedOm:
    """`answer` gives a response, or the text of a Java exception; a context manager."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.requests = list[pb.OMRequest]()
        self.metadata = list[dict[str, str | bytes]]()
        self._server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(
            self._serve, pb.OMRequest.FromString, pb.OMResponse.SerializeToString
        )
        service, _, name = METHOD.removeprefix("/").partition("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {name: handler}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> "ScriptedOm":
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(None).wait()

    def _serve(self, request: pb.OMRequest, context: grpc.ServicerContext) -> pb.OMResponse:
        self.requests.append(request)
        self.metadata.append({entry[0]: entry[1] for entry in context.invocation_metadata()})
        answer = self._answer(request)
        if isinstance(answer, str):
            context.abort(grpc.StatusCode.INTERNAL, answer)
        return answer


def success(request: pb.OMRequest, response: pb.OMResponse | None = None) -> pb.OMResponse:
    """An answer with this body."""
    found = pb.OMResponse(cmdType=request.cmdType, success=True, status=pb.OK)
    if response is not None:
        found.MergeFrom(response)
    return found


def refusal(request: pb.OMRequest, status: int, message: str = "") -> pb.OMResponse:
    """A refusal of the OM itself."""
    return pb.OMResponse(cmdType=request.cmdType, success=False, status=status, message=message)
