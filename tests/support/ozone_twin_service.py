"""A whole Ozone in memory, as a service: its OM, gateway and datanode on loopback."""

from contextlib import ExitStack
from types import TracebackType

from tests.support.ozone_twin import OzoneTwin
from tests.support.ozone_twin_datanode import TwinDatanode
from tests.support.ozone_twin_gateway import TwinGateway
from tests.support.ozone_twin_om import TwinOm
from tests.support.s3_servers import S3Endpoint
from tests.support.scripted_om import ScriptedOm


class TwinService:
    """A context manager; `om_address` and `s3_endpoint` are where clients ask."""

    def __init__(self) -> None:
        self.twin = OzoneTwin()
        self._om = ScriptedOm(TwinOm(self.twin))
        self._gateway = TwinGateway(self.twin)
        self._datanode = TwinDatanode(self.twin)
        self._stack = ExitStack()
        self.om_address = self._om.address
        self.s3_endpoint: S3Endpoint = self._gateway.endpoint

    def __enter__(self) -> "TwinService":
        for server in (self._om, self._gateway, self._datanode):
            self._stack.enter_context(server)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def calls(self) -> int:
        """Requests to the OM so far."""
        return len(self._om.requests)
