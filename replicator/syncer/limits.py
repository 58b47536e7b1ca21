"""How a replication is carried out: how much at once, how often, how long."""

from dataclasses import dataclass, field

from replicator.assumed_acls import DEFAULT_IN_A_ROW
from replicator.copier import CopierLimits
from replicator.copy_task import CopyLimits
from runtime.retry import Backoff

# Small objects that are written at once for each larger one: each waits for its answer
# in a thread. Across a link of 90 ms, and with a store that takes as long for a write,
# 32 of them are 170 a second at most; more of them fill a call of a verifier.
_SMALL_OBJECTS = 12


def follower_copies(objects: int = 8, parts: int = 8) -> CopierLimits:
    """What a replication copies at once, given how many large objects and parts."""
    return CopierLimits(objects, parts, small_objects=_SMALL_OBJECTS * objects)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How a replication is carried out: what is copied at once, attempts of one request
    before its key or round is tried again later, and the time between two proofs.
    Without `deletes_extras` a comparison deletes only what was copied before. `wait_s`
    is how long one unit of work waits for copies that run. `superseded_wait_s`: so long
    a key that only the target has changed is left to the other direction of a pair.
    `page_keys`: of a listing, so many keys are read at a time. `default_acls_in_a_row`:
    after so many, objects are copied before their ACL is read.
    """

    copier: CopierLimits = field(default_factory=follower_copies)
    copy: CopyLimits = field(default_factory=CopyLimits)
    backoff: Backoff = field(default_factory=lambda: Backoff(attempts_max=3, most_s=2.0))
    prove_every_s: float = 3600.0
    deletes_extras: bool = True
    wait_s: float = 0.1
    superseded_wait_s: float = 86_400.0
    page_keys: int = 1_000
    default_acls_in_a_row: int = DEFAULT_IN_A_ROW
