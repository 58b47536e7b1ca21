"""The parts of a controller, which another kind of cluster and tests replace."""

from collections.abc import Callable
from dataclasses import dataclass

from merkle.tree import ContainerId
from scm.automatic import AutomaticMode
from scm.dispatcher import Dispatcher
from scm.job_index import JobIndex
from scm.limits import ControllerLimits
from scm.ozone_rounds import OzoneRun
from scm.registry import Registry


@dataclass(frozen=True, slots=True)
class ControllerParts:
    """A callable for each part."""

    registry: Callable[..., Registry] = Registry
    job_index: Callable[[ControllerLimits], JobIndex] = JobIndex
    dispatcher: Callable[..., Dispatcher] = Dispatcher
    automatic: Callable[..., AutomaticMode] = AutomaticMode
    # The rounds of a new job, if Ozone is to do them; None for orders to agents.
    first_run: Callable[[ContainerId], OzoneRun | None] = lambda _: None
