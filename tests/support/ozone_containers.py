"""Many closed containers of a real Ozone cluster, without a start of Java for each, and
damage that SCM knows of.
"""

import random
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from merkle.replica import ContainerState
from merkle.tree import ContainerId
from ozone.hadoop_rpc import HadoopRpcClient
from ozone.scm_client import ScmClient
from tests.support.ozone import OzoneCluster, eventually
from tests.support.s3_servers import S3Bucket

_KEY_BYTES = 200_000
# For each container.
_KEYS_MAX = 3
_PROTOCOL = "org.apache.hadoop.hdds.scm.protocol.StorageContainerLocationProtocol"


def _close_request(container_id: int) -> Message:
    """SCM's request to close a container, which no command of ours sends: type 7, and
    field 12 with the container's ID.
    """
    body, rest = b"\x08", container_id
    while rest > 0x7F:
        body, rest = body + bytes([rest & 0x7F | 0x80]), rest >> 7
    body += bytes([rest])
    # Unknown fields of any message are written as they were read.
    return Empty.FromString(b"\x08\x07\x62" + bytes([len(body)]) + body)


def make_closed(cluster: OzoneCluster, bucket: S3Bucket, count: int) -> list[ContainerId]:
    """So many closed containers whose roots SCM knows, of a block each. Blocks are
    allocated ahead of keys, so that a container may get a second one.
    """
    cluster.close_open()
    made = list[ContainerId]()
    client = ScmClient([cluster.scm_address])
    closer = HadoopRpcClient(cluster.scm_address, _PROTOCOL)
    with closing(client), closing(closer), bucket.endpoint.client() as s3:
        known = {one.container_id for one in client.containers()}
        for number in range(_KEYS_MAX * count):
            data = random.Random(number).randbytes(_KEY_BYTES)
            s3.put_object(Bucket=bucket.name, Key=f"key-{number}", Body=data)
            opened = [
                one.container_id
                for one in client.containers()
                if one.container_id not in known and one.state is ContainerState.OPEN
            ]
            known.update(opened)
            for container_id in opened:
                closer.call(_close_request(container_id))
            made += opened
            if len(made) >= count:
                break
        made = made[:count]
        assert len(made) == count

        def are_closed() -> bool:
            found, replicas = client.get_containers(made), client.replicas(made)
            return all(
                found[one].state is ContainerState.CLOSED
                and len(replicas[one]) == 3
                and all(each.data_checksum is not None for each in replicas[one])
                for one in made
            )

        eventually("SCM knows the roots of all", are_closed, 120)
    return made


def block_file(cluster: OzoneCluster, datanode: int, container_id: int) -> Path:
    """The file of a container's first block on one datanode."""
    folder = f"hdds/*/current/containerDir*/{container_id}/chunks/*.block"
    return min(cluster.volume(datanode).glob(folder), key=lambda path: int(path.stem))


def damage(cluster: OzoneCluster, containers: Sequence[ContainerId]) -> None:
    """Flip a byte of one replica of each container, and wait until SCM reports that its
    replicas differ. Ozone's reconciliation finds nothing to do by the trees, and ends
    with a scan, which finds the damage.
    """
    for at, container_id in enumerate(containers):
        path = block_file(cluster, 1 + at % 3, container_id)
        with path.open("r+b") as file:
            file.seek(100)
            byte = file.read(1)[0]
            file.seek(100)
            file.write(bytes([byte ^ 1]))
    with closing(ScmClient([cluster.scm_address])) as client:
        # A scan that is younger than the least gap between two keeps the next one away.
        time.sleep(2)
        assert not any(client.reconcile(containers).values())
        eventually("all differ", lambda: len(diverged(client, containers)) == len(containers), 120)


def diverged(client: ScmClient, containers: Sequence[ContainerId]) -> list[ContainerId]:
    """Those whose replicas have different roots, or a root that is not known."""
    return [
        number
        for number, replicas in client.replicas(containers).items()
        if len({one.data_checksum for one in replicas}) != 1
        or None in {one.data_checksum for one in replicas}
    ]
