"""All lists of our packages are alike, and the wheel holds every module."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from admin.lazy_commands import missing_extra
from spark.pack import LIBRARIES
from spark.pack import PACKAGES as EXECUTOR_PACKAGES
from tests.tidy.test_layers import PACKAGES, RANKS, ROOT, imported, modules

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Directories with modules that are no part of the product.
NOT_PRODUCT = {"tests", "benchmarks", "tools"}


def test_the_ranks_name_every_package_there_is() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - NOT_PRODUCT
    assert found == set(PACKAGES)
    assert sum(map(len, RANKS)) == len(PACKAGES)


def test_the_wheel_and_the_type_checker_take_every_package() -> None:
    tool = PYPROJECT["tool"]
    assert set(tool["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(PACKAGES)
    assert set(tool["mypy"]["packages"]) == {*PACKAGES, "benchmarks", "tools"}


def test_the_core_without_extras_is_small() -> None:
    """The installed size of what ours requires, directly or not: a machine with only an
    agent, a controller and the commands for them.

    Files count in whole blocks, as `du` counts. Bytecode, which `pip` writes besides,
    counts as much as its sources. Folders and large bytecode are the margin below 155
    MiB: where this gave 140, `du` found 153.
    """
    installed_bytes, waiting, seen = 0, list(PYPROJECT["project"]["dependencies"]), set[str]()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        package = distribution(name)
        waiting += package.requires or []
        for file in package.files or []:
            if file.suffix != ".pyc":
                blocks = file.locate().stat().st_blocks * 512
                installed_bytes += blocks * (2 if file.suffix == ".py" else 1)
    ours = sum(path.stat().st_size for path in modules())
    assert "botocore" not in seen
    assert installed_bytes + 2 * ours <= 141 << 20, installed_bytes + 2 * ours


def test_every_package_of_an_extra_is_named_with_it_where_it_is_missing() -> None:
    """Those that a command imports; numba is done without, and Spark says it itself."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    # Of the packages of two extras the first is enough.
    for extra in ("tls", "sweep", "bucket"):
        for text in extras[extra]:
            name = Requirement(text).name
            if name in ("treefold", "botocore"):
                continue
            named = missing_extra(ModuleNotFoundError(name=f"{name}.inner"))
            assert named is not None
            assert named.hint == f"pip install 'treefold[{extra}]'"
    named = missing_extra(ModuleNotFoundError(name="cryptography"), "bucket")
    assert named is not None
    assert named.hint == "pip install 'treefold[bucket]'"
    assert missing_extra(ModuleNotFoundError(name="admin.nothing")) is None


def test_setup_compiles_the_kernels_of_every_package() -> None:
    """Each process that starts before the first one is through would compile them."""
    setup = (ROOT / "tools" / "setup.sh").read_text()
    packages = {path.parent.name for path in ROOT.glob("*/*kernels.py")} & set(PACKAGES)
    assert packages == set(re.findall(r"(\w+)/\*kernels\.py", setup))


def test_the_architecture_draws_the_ranks() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (drawn,) = re.findall(r"^(merkle +<-.*)$", page, re.MULTILINE)
    assert [set(re.findall(r"\w+", rank)) for rank in drawn.split("<-")] == [set(r) for r in RANKS]


def test_executors_get_the_libraries_that_tasks_import() -> None:
    tasks = "spark.bucket_index, replicator.verified_ranges, replicator.listing_shards"
    stores = "replicator.stores.local, replicator.stores.s3"
    code = (
        f"import sys, {tasks}, {stores}; print(*{{one.partition('.')[0] for one in sys.modules}})"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    owners = packages_distributions()
    loaded = {
        canonicalize_name(one) for name in told.stdout.split() for one in owners.get(name, [])
    }
    waiting, given = [*LIBRARIES, "pyspark", "setuptools"], set[str]()
    while waiting:
        name = canonicalize_name(Requirement(waiting.pop()).name)
        if name not in given:
            given.add(name)
            waiting += distribution(name).requires or [] if name in loaded else []
    assert loaded <= given


def test_executors_get_what_the_engine_imports() -> None:
    """The packages that `spark` and `replicator`, whose tasks it runs, import, directly
    or not, and no others.
    """
    names = {
        package: set[str]().union(
            *(imported(path) for path in modules() if path.relative_to(ROOT).parts[0] == package)
        )
        for package in PACKAGES
    }
    needed, waiting = set[str](), ["spark", "replicator"]
    while waiting:
        package = waiting.pop()
        needed.add(package)
        imports = {name.split(".")[0] for name in names[package]} & set(PACKAGES)
        waiting += sorted(imports - needed)
    assert set(EXECUTOR_PACKAGES) == needed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of a wheel that was built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder / "contents")
    return folder / "contents"


def test_every_module_is_in_the_wheel_and_the_command_runs_from_there(wheel: Path) -> None:
    expected = {str(path.relative_to(ROOT)): path.read_bytes() for path in modules()}
    held = {
        str(path.relative_to(wheel)): path.read_bytes()
        for path in wheel.rglob("*.py")
        # Examples, which are data.
        if not path.relative_to(wheel).parts[0].endswith(".data")
    }
    assert {name: text for name, text in held.items() if "_pb2" not in name} == expected
    # What is not packed, no module imports: the command would end in some of its parts.
    roots = {name.split(".")[0] for path in modules() for name in imported(path)}
    assert roots & NOT_PRODUCT == set()
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import admin.cli, protos.controller_pb2 as p;"
        "print(admin.cli.__file__, p.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(wheel)],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{wheel}/admin/cli.py", f"{wheel}/protos/controller_pb2.py"]


def test_data_files_are_in_the_wheel(wheel: Path) -> None:
    """Whatever a package reads beside its modules: templates, volumes of the demo."""
    data = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).glob("**/data/*")
        if path.is_file()
    }
    assert data
    assert all((wheel / name).is_file() for name in data)


def test_what_an_operator_needs_is_in_the_wheel(wheel: Path) -> None:
    """Units, examples, alerts, documents and manual pages, by the links between
    them.
    """
    (data,) = wheel.glob("*.data/data/share")
    for folder, place in (("deploy", "treefold/deploy"), ("docs", "treefold/docs")):
        expected = {path.relative_to(ROOT / folder): path for path in (ROOT / folder).rglob("*.*")}
        assert expected
        for name, path in expected.items():
            # An example that somebody has compiled.
            if path.is_file() and "__pycache__" not in path.parts:
                assert (data / place / name).read_bytes() == path.read_bytes()
    pages = {path.name for path in (ROOT / "man").iterdir()}
    assert {path.name for path in (data / "man" / "man1").iterdir()} == pages


def test_generated_modules_import_as_plain_packages() -> None:
    for path in (ROOT / "protos").glob("*_pb2_grpc.py"):
        roots = {
            node.module.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        assert roots <= {"protos"}
