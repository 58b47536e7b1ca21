"""Which run of a pair of buckets may write: the latest that has begun.

A run that is killed may have sent a batch that the verifier has not read yet. It would
be applied while the next run goes on, to the items that it names. So each run tells the
verifier a name of its own before it changes anything, and names itself in whatever
changes an object. What a run before it has sent is refused from then on.

The names are kept in memory. What was sent to a verifier that has ended is lost with
its connections. A syncer writes by a lease, whose epoch its runs bear. The newest epoch
of a pair is kept on disk: whoever had an older lease is refused for ever, also by a
verifier that has restarted, and must begin before it writes.
"""

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from merkle.errors import ReconcileError
from replicator.verifier.values import RUN_BYTES, RunName
from runtime.disk import Disk
from runtime.errors import ConfigError

# Pairs whose latest run is known; of others no run without an epoch is refused.
_PAIRS_MAX = 1_024
_EPOCHS = TypeAdapter(dict[str, int])


class RunSupersededError(ReconcileError):
    """A later run of the same pair has begun, so this one may not write any more."""

    code = "run_superseded"


class RunUnknownError(ReconcileError):
    """The verifier does not know a run with an epoch: it has to begin first."""

    code = "run_unknown"


class RunFence:
    """The latest run of each pair. Thread-safe."""

    def __init__(
        self,
        writing: AbstractContextManager[object],
        path: Path | None = None,
        disk: Disk | None = None,
    ) -> None:
        """`writing` is held by whoever changes objects. The file at `path` has the
        newest epoch of each pair; without one they are kept in memory.

        Raises:
            ConfigError: the file is damaged.
            DiskError: it cannot be read.
        """
        self._writing = writing
        self._path = path
        self._disk = disk or Disk()
        self._latest = OrderedDict[bytes, bytes]()
        self._epochs = OrderedDict(self._read(path) if path is not None else {})

    def begin(self, run: RunName) -> None:
        """Let this run write, and none before it of its pair. What an earlier one is
        writing has ended on return.

        Raises:
            RunSupersededError: a run of a newer epoch has begun.
            DiskError: the epoch is not on disk; nothing has begun.
        """
        with self._writing:
            known = self._epochs.get(run.pair, 0)
            if run.epoch < known:
                raise RunSupersededError(
                    f"a run of epoch {known} of this pair has begun; this is of {run.epoch}",
                    hint="If the replication was made anew under its old name, remove"
                    " epochs.json from the verifier's state folder, and restart it.",
                )
            if run.epoch > known:
                self._save(run)
            self._latest[run.pair] = run.run
            self._latest.move_to_end(run.pair)
            while len(self._latest) > _PAIRS_MAX:
                self._latest.popitem(last=False)

    def check(self, run: RunName | None) -> None:
        """Check that a later run has not begun; `writing` is held. A caller that names
        no run is not checked.

        Raises:
            RunSupersededError: one has.
            RunUnknownError: it writes by a lease, and has not begun.
        """
        if run is None:
            return
        latest = self._latest.get(run.pair)
        if latest is None and run.epoch:
            raise RunUnknownError("this run has not begun at this verifier")
        if latest is not None and latest != run.run:
            raise RunSupersededError(
                "a later run of this pair of buckets has begun",
                hint="Let one sync of a state folder run at a time.",
            )

    def _save(self, run: RunName) -> None:
        epochs = OrderedDict(self._epochs)
        epochs[run.pair] = run.epoch
        epochs.move_to_end(run.pair)
        while len(epochs) > _PAIRS_MAX:
            epochs.popitem(last=False)
        if self._path is not None:
            document = {pair.hex(): epoch for pair, epoch in epochs.items()}
            self._disk.replace(self._path, _EPOCHS.dump_json(document))
        self._epochs = epochs

    def _read(self, path: Path) -> Mapping[bytes, int]:
        if self._disk.length(path) is None:
            return {}
        try:
            found = _EPOCHS.validate_json(self._disk.read(path))
            epochs = {bytes.fromhex(pair): epoch for pair, epoch in found.items()}
            if any(len(pair) != RUN_BYTES for pair in epochs):
                raise ValueError("a pair has another length")
        except (ValidationError, ValueError) as error:
            raise ConfigError(
                f"{path}: is damaged",
                hint="Remove it once no syncer of an older lease runs any more.",
                path=str(path),
            ) from error
        return epochs
