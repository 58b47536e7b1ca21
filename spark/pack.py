"""Packs our code and our libraries for executors that have neither.

The code becomes a zip, the libraries a tar archive, and Spark unpacks both. They are
copied from this process's own installation, without a network. Executors need the same
minor version of Python on the same platform, with nothing installed in it; Spark brings
pyspark.
"""

import gzip
import importlib
import importlib.util
import py_compile
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from runtime.disk import Disk
from runtime.errors import ConfigError, DiskError, UsageError

# File names in the pack, and the folders that Spark unpacks them to.
CODE = "treefold.zip"
SOURCES = "treefold-code"
ENVIRONMENT = "treefold-env"
ARCHIVE = f"{ENVIRONMENT}.tar.gz"

# The packages of ours that tasks import (tests/tidy checks the list); `replicator` has
# tasks that list a bucket.
PACKAGES = (
    "merkle",
    "protos",
    "runtime",
    "ozone",
    "chunktable",
    "sweep",
    "proof",
    "spark",
    "replicator",
)
# The libraries that PACKAGES import; their own requirements are added.
LIBRARIES = (
    "blake3",
    "botocore",
    "crcmod",
    "cryptography",
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
    "urllib3",
    "xxhash",
)
# Tasks run without it, but slower.
_OPTIONAL = ("numba",)

# Libraries compress to a third at any level, so take the fastest.
_COMPRESSION_LEVEL = 1
_NAME = re.compile(r"[A-Za-z0-9._-]+")
# What numba keeps beside bytecode.
_KERNELS = (".nbi", ".nbc")
_EXCLUDED_FOLDERS = {"tests", "include"}
# How a task that has both finds them; Spark sets its working folder.
PYTHONPATH = f"{SOURCES}:{ENVIRONMENT}"
# What no task loads: Arrow's client of Flight, and how AWS's services other than S3 are
# called, which is a third of all files.
_EXCLUDED_FILES = re.compile(r"pyarrow/.*flight.*|botocore/data/(?!s3/)[^/]+/.*")


@dataclass(frozen=True, slots=True)
class ExecutorPack:
    """The two files, and the distributions in the archive ("name version")."""

    code: Path
    environment: Path
    distributions: tuple[str, ...]


def pack(out: Path, disk: Disk) -> ExecutorPack:
    """Write both files to the folder `out`; older ones are replaced.

    Raises:
        ConfigError: a library is not installed here, or its files are not recorded.
        DiskError: a file cannot be read or written.
    """
    disk.make_folder(out)
    found = _required_distributions()
    _compile_kernels()
    _write(out / CODE, _zip_code, disk)
    _write(out / ARCHIVE, lambda path: _tar_libraries(path, found), disk)
    return ExecutorPack(
        out / CODE, out / ARCHIVE, tuple(f"{one.name} {one.version}" for one in found)
    )


def files_of(folder: Path) -> tuple[Path, Path]:
    """The code and the archive in a folder that `pack` wrote.

    Raises:
        UsageError: one is missing.
    """
    code, archive = folder / CODE, folder / ARCHIVE
    for made in (code, archive):
        if not made.is_file():
            raise UsageError(f"{made} is missing", hint="treefold sweep pack --out DIR makes it")
    return code, archive


def _required_distributions() -> tuple[Distribution, ...]:
    """The libraries and all that they require, sorted by name."""
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
                    f"{name} is not installed, and executors need it", hint=hint
                ) from error
            continue
        # Requirements of extras are not needed; those of other platforms are not
        # installed.
        needed = [one for one in found[name].requires or () if "extra ==" not in one]
        waiting += [match[0] for one in needed if (match := _NAME.match(one))]
    for one in found.values():
        # Python 3.11.2 cannot find those of packages that `setup.py` installed.
        if not any(Path(str(one.locate_file(file))).is_file() for file in one.files or ()):
            raise ConfigError(
                f"the files of {one.name} are not recorded, and executors need them",
                hint=f"pip install --force-reinstall --use-pep517 {one.name}",
            )
    return tuple(found[name] for name in sorted(found))


def _write(path: Path, write: Callable[[Path], None], disk: Disk) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
    except OSError as error:
        disk.remove(temporary)
        raise DiskError(f"{path} cannot be written: {error}", path=str(path)) from error
    disk.sync(temporary)
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def _compile_kernels() -> None:
    """Import what compiles them, where that is possible."""
    for package in PACKAGES:
        for file, name in list(_files_of(package)):
            if file.name.endswith("kernels.py"):
                with suppress(ImportError):
                    importlib.import_module(name.removesuffix(".py").replace("/", "."))


def _zip_code(path: Path) -> None:
    """All modules with their bytecode, and with the kernels that this machine compiled:
    a worker of another kind of processor compiles its own, ten seconds of them.
    """
    compiled = path.with_suffix(".pyc")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in PACKAGES:
            for file, name in _files_of(package):
                archive.write(file, name)
                if file.suffix == ".py":
                    # Unpacked, it has another time; and a source's is not looked at.
                    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
                    py_compile.compile(
                        str(file), str(compiled), name, doraise=True, invalidation_mode=mode
                    )
                    archive.write(compiled, importlib.util.cache_from_source(name))
    compiled.unlink()


def _files_of(package: str) -> Iterator[tuple[Path, str]]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).rglob("*")):
            is_kept = "__pycache__" not in file.parts or file.suffix in _KERNELS
            if file.is_file() and is_kept:
                yield file, f"{package}/{file.relative_to(folder)}"


def _tar_libraries(path: Path, distributions: Sequence[Distribution]) -> None:
    with (
        gzip.open(path, "wb", compresslevel=_COMPRESSION_LEVEL) as raw,
        tarfile.open(fileobj=raw, mode="w") as archive,
    ):
        for one in distributions:
            for file in one.files or ():
                # Scripts are installed outside of the import path and not needed.
                if ".." in file.parts or file.is_absolute() or _EXCLUDED_FOLDERS & set(file.parts):
                    continue
                if _EXCLUDED_FILES.fullmatch(str(file)):
                    continue
                installed = Path(str(one.locate_file(file)))
                if installed.is_file():
                    archive.add(installed, str(file), recursive=False)
