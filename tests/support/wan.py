"""The link between two regions, as a process beside the tests: delay, bandwidth, cuts,
and every byte counted by the kind of request that moved it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.support.processes import LineProcess
from tests.support.s3_servers import S3Endpoint


@dataclass(frozen=True, slots=True)
class Crossing:
    """What crossed; `to` is towards the server."""

    requests: int
    bytes_to: int
    bytes_from: int

    @property
    def length_bytes(self) -> int:
        """All bytes in both directions."""
        return self.bytes_to + self.bytes_from


@dataclass(frozen=True, slots=True)
class Traffic:
    """What crossed a link, by the kind of request (`GET object`, `GET bucket?versions`;
    `other` is what is not HTTP/1.1).
    """

    connections: int
    kinds: Mapping[str, Crossing]

    @property
    def total(self) -> Crossing:
        """What crossed in all."""
        found = self.kinds.values()
        return Crossing(
            sum(kind.requests for kind in found),
            sum(kind.bytes_to for kind in found),
            sum(kind.bytes_from for kind in found),
        )


class WanLink(LineProcess):
    """A link to a server on loopback; a context manager that ends it."""

    def __init__(self, target: str, *, delay_ms: float = 0.0, mbit: float = 0.0) -> None:
        """`target` is HOST:PORT; the delay is one way, and `mbit` (megabit/s, 0 for no
        limit) holds for each direction.
        """
        super().__init__(
            "tests.support.wan_proxy",
            *("--to", target, "--delay-ms", str(delay_ms), "--mbit", str(mbit)),
        )

    def through(self, endpoint: S3Endpoint) -> S3Endpoint:
        """The endpoint as it is reached across this link."""
        return replace(endpoint, url=f"http://{self.address}")

    def traffic(self) -> Traffic:
        """What crossed since the start or the latest `reset`."""
        found = self._ask("stats")
        return Traffic(
            found["connections"], {k: Crossing(*row) for k, row in found["kinds"].items()}
        )

    def reset(self) -> None:
        """Count from nothing again."""
        self._ask("reset")

    def shape(self, *, delay_ms: float, mbit: float) -> None:
        """Change delay and bandwidth, for what enters the link from now on."""
        self._ask(f"shape {delay_ms} {mbit}")

    def cut(self) -> None:
        """Reset all connections, and new ones as they come."""
        self._ask("cut")

    def mend(self) -> None:
        """Let connections through again."""
        self._ask("mend")

    def _ask(self, command: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask(command)
        assert "error" not in answer, answer
        return answer
