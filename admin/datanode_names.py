"""The host names of datanodes, beside their UUIDs in whatever a command prints."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from typing import Self

from merkle.replica import PeerId
from runtime.setting_values import split_address
from scm.client import ControllerClient
from scm.datanodes import Datanode
from scm.views import ContainerStatus, JobStatus, OrderStatus

# What may be the ID of a datanode in a text.
_ID = re.compile(r"[\w-]+")


# Shorter beginnings are no easier to read.
_PREFIX_CHARACTERS_MIN = 8


def unique_prefixes(ids: Iterable[str]) -> dict[str, str]:
    """The shortest beginning of each ID that no other has, of at least eight
    characters: commands take it for the whole ID.
    """
    known = sorted(set(ids))
    found = dict[str, str]()
    for before, one, after in zip(["", *known], known, [*known[1:], ""], strict=False):
        shared = max(_shared_characters(one, other) for other in (before, after))
        found[one] = one[: max(_PREFIX_CHARACTERS_MIN, shared + 1)]
    return found


class DatanodeNames:
    """Host names by UUID; a datanode that is not known has none."""

    def __init__(self, datanodes: Iterable[Datanode]) -> None:
        self._hosts = {one.peer: host_of(one) for one in datanodes}
        self._prefixes = unique_prefixes(self._hosts)

    @classmethod
    def of_controller(cls, controller: ControllerClient) -> Self:
        """Those of all datanodes that ever reported to a controller."""
        return cls(view.datanode for view in controller.datanodes())

    @classmethod
    def of_containers(cls, views: Iterable[ContainerStatus]) -> Self:
        """Those of the holders of some containers."""
        return cls(one.datanode for view in views for one in view.replicas)

    def host(self, datanode: str) -> str:
        """The host name; empty if it is not known."""
        return self._hosts.get(PeerId(datanode), "")

    def short(self, datanode: str) -> str:
        """The shortest beginning of the UUID that no other known datanode has; of one
        that is not known the whole.
        """
        return self._prefixes.get(datanode, datanode)

    def text(self, text: str) -> str:
        """The text with the host name after each UUID: `UUID (host)`."""
        return _ID.sub(self._with_host, text)

    def job(self, one: JobStatus) -> JobStatus:
        """A job to be printed: host names are in all its texts."""
        return replace(
            one, detail=self.text(one.detail), orders=tuple(map(self._order, one.orders))
        )

    def json(self, value: object) -> object:
        """A JSON value in which each object with the `id` of a datanode has its
        `hostname` too.
        """
        if isinstance(value, list):
            return [self.json(one) for one in value]
        if not isinstance(value, dict):
            return value
        made = dict[str, object]()
        for key, one in value.items():
            made[key] = self.json(one)
            if key == "id" and "hostname" not in value and (host := self.host(str(one))):
                made["hostname"] = host
        return made

    def _with_host(self, found: re.Match[str]) -> str:
        host = self.host(found[0])
        return f"{found[0]} ({host})" if host else found[0]

    def _order(self, part: OrderStatus) -> OrderStatus:
        progress = part.progress
        peers = (replace(one, peer=PeerId(self.text(one.peer))) for one in progress.peers)
        evidence = (replace(one, detail=self.text(one.detail)) for one in progress.evidence)
        named = replace(
            progress,
            message=self.text(progress.message),
            peers=tuple(peers),
            evidence=tuple(evidence),
        )
        return replace(part, peer=PeerId(self.text(part.peer)), progress=named)


def host_of(datanode: Datanode) -> str:
    """The name that the datanode gives itself, otherwise the host of its address."""
    return datanode.hostname or split_address(datanode.address)[0]


def _shared_characters(one: str, other: str) -> int:
    both = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
