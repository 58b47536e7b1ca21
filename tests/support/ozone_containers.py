"""Many closed containers of a real Ozone cluster, without a start of Java for each, and
damage that SCM knows of.
"""

import itertools
import random
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial

from botocore.exceptions import ClientError

from merkle.tree import ContainerId
from ozone.scm_client import ScmClient
from tests.support.ozone import OzoneCluster, eventually
from tests.support.ozone_damage import block_files, flip
from tests.support.s3_servers import S3Bucket

_TRIES = 5


def closed_with(
    cluster: OzoneCluster, bucket: S3Bucket, sizes: Sequence[int], *, count: int
) -> list[ContainerId]:
    """So many closed containers whose roots SCM knows, by ID: each with a block of each
    size and no other. No two blocks hold the same.
    """
    found, numbers = list[ContainerId](), itertools.count()
    with bucket.endpoint.client() as s3:

        def is_written(number: int, size: int) -> bool:
            body = random.Random(number).randbytes(size)
            # After a datanode was stopped the gateway cannot write for a while.
            with suppress(ClientError):
                s3.put_object(Bucket=bucket.name, Key=f"key-{number}", Body=body)
                return True
            return False

        others = cluster.begin_to_close()
        # Blocks are allocated ahead of keys, so that a container may get another one.
        for _ in range(_TRIES):
            begun = set[ContainerId]()
            while len(begun) < count - len(found):
                for size in sizes:
                    written = partial(is_written, next(numbers), size)
                    eventually("the gateway writes", written, 120)
                begun.update(cluster.begin_to_close(but=others))
            found += [
                one
                for one in cluster.await_closed(sorted(begun))
                if sorted(path.stat().st_size for path in block_files(cluster, 1, one))
                == sorted(sizes)
            ]
            if len(found) >= count:
                return sorted(found)[:count]
    raise AssertionError(f"{len(found)} of {count} containers have blocks of {sizes}")


def damage(cluster: OzoneCluster, containers: Sequence[ContainerId]) -> None:
    """Flip a byte of one replica of each container, and wait until SCM reports that its
    replicas differ. Ozone's reconciliation finds nothing to do by the trees, and ends
    with a scan, which finds the damage.
    """
    for at, container_id in enumerate(containers):
        [path] = block_files(cluster, 1 + at % 3, container_id)
        flip(path, 100)
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
