"""What executors need that have neither our code nor our libraries: a zip of the one,
an archive of the others.

Both are made of what this process runs on, without a network. Executors need a Python
of the same minor version on the same kind of machine, and nothing installed in it;
pyspark itself comes with Spark.
"""

import gzip
import importlib.util
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from runtime.disk import Disk
from runtime.errors import ConfigError, DiskError

# Our code, and the folder that the archive of the libraries unpacks to.
CODE = "treefold.zip"
ENVIRONMENT = "treefold-env"
ARCHIVE = f"{ENVIRONMENT}.tar.gz"

# Of our packages, those that tasks import; the others are of processes that never run
# there.
PACKAGES = ("merkle", "protos", "runtime", "ozone", "chunktable", "sweep", "spark")
# What these import, without what serves commands and servers; whatever it requires
# itself comes along.
LIBRARIES = (
    "crcmod",
    "fastcrc",
    "numpy",
    "pandas",
    "protobuf",
    "pyarrow",
    "pydantic",
    "pyyaml",
    "rocksdict",
    "structlog",
    "tenacity",
    "xxhash",
)
# Tasks are slower without.
_OPTIONAL = ("numba",)

# Libraries compress to a third at any level, and this one is fast.
_LEVEL = 1
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_LEFT_OUT = {"tests", "__pycache__", "include"}


@dataclass(frozen=True, slots=True)
class ExecutorPack:
    """What was made, and of which distributions ("name version")."""

    code: Path
    environment: Path
    distributions: tuple[str, ...]


def pack(out: Path, disk: Disk) -> ExecutorPack:
    """Make both in the folder `out`, replacing what was there.

    Raises:
        ConfigError: a library is not installed here.
        DiskError: a file cannot be read or written.
    """
    disk.make_folder(out)
    found = _closure()
    _written(out / CODE, _zip_code, disk)
    _written(out / ARCHIVE, lambda path: _tar_libraries(path, found), disk)
    return ExecutorPack(
        out / CODE, out / ARCHIVE, tuple(f"{one.name} {one.version}" for one in found)
    )


def _closure() -> tuple[Distribution, ...]:
    """The libraries and all that they require, by name."""
    found: dict[str, Distribution] = {}
    waiting = [*LIBRARIES, *_OPTIONAL]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError as error:
            if name in LIBRARIES:
                hint = "pip install 'treefold[spark,fast]'"
                raise ConfigError(
                    f"{name}, which executors need, is not installed", hint=hint
                ) from error
            continue
        # What is for other systems, or for an extra, is not installed, or is not
        # needed.
        needed = [one for one in found[name].requires or () if "extra ==" not in one]
        waiting += [match[0] for one in needed if (match := _NAME.match(one))]
    return tuple(found[name] for name in sorted(found))


def _written(path: Path, write: Callable[[Path], None], disk: Disk) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
    except OSError as error:
        disk.remove(temporary)
        raise DiskError(f"{path} cannot be written: {error}", path=str(path)) from error
    disk.sync(temporary)
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def _zip_code(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in PACKAGES:
            for file, name in _files_of(package):
                archive.write(file, name)


def _files_of(package: str) -> Iterator[tuple[Path, str]]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file, f"{package}/{file.relative_to(folder)}"


def _tar_libraries(path: Path, distributions: Sequence[Distribution]) -> None:
    with (
        gzip.open(path, "wb", compresslevel=_LEVEL) as raw,
        tarfile.open(fileobj=raw, mode="w") as archive,
    ):
        for one in distributions:
            for file in one.files or ():
                # Scripts lie outside of what is imported; the interpreter makes its
                # caches anew.
                if ".." in file.parts or file.is_absolute() or _LEFT_OUT & set(file.parts):
                    continue
                place = Path(str(one.locate_file(file)))
                if place.is_file():
                    archive.add(place, str(file), recursive=False)
