"""The dependency direction and the habits of the style guide hold in every module."""

import ast
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Who may import whom, from the bottom up: packages of one row never import each other.
RANKS = (
    ("merkle",),
    ("protos", "runtime"),
    ("ozone", "chunktable"),
    ("repair", "sweep", "proof"),
    ("dnagent", "live", "scm", "spark", "replicator"),
    ("admin",),
)
PACKAGES = tuple(package for rank in RANKS for package in rank)
ALLOWED = {
    package: {below for rank in RANKS[:number] for below in rank}
    for number, rank in enumerate(RANKS)
    for package in rank
}
# One module each may know these libraries, so that replacing one is a change in one
# place.
ONLY_IMPORTER = {
    "rocksdict": {"ozone/rocks.py", "ozone/key_values.py"},
    "fastcrc": {"merkle/checksum.py", "merkle/kernels.py"},
    "crcmod": {"merkle/checksum.py", "merkle/kernels.py"},
    "xxhash": {"merkle/checksum.py"},
    "blake3": {"proof/lthash.py", "replicator/hashing.py", "replicator/windows.py"},
    "hashlib": {
        "merkle/checksum.py",
        "ozone/descriptor.py",
        "proof/inventory.py",
        "proof/item.py",
        "repair/replica_plan.py",
        "replicator/hashing.py",
        "runtime/access.py",
        "runtime/audit_chain.py",
        "runtime/audit_check.py",
        "runtime/s3_signing.py",
    },
    "yaml": {"ozone/descriptor.py"},
}
# Messages of a wire are converted to values here, and seen nowhere else.
KNOWS_MESSAGES = {
    "dnagent/client.py",
    "dnagent/messages.py",
    "dnagent/repair_server.py",
    "dnagent/server.py",
    "ozone/datanode.py",
    "ozone/datanode_client.py",
    "ozone/hadoop_rpc.py",
    "ozone/manager.py",
    "ozone/manager_messages.py",
    "ozone/scm_client.py",
    "ozone/scm_membership.py",
    "repair/peers.py",
    "replicator/master/client.py",
    "replicator/master/messages.py",
    "replicator/master/server.py",
    "replicator/master/view_messages.py",
    "replicator/verifier/client.py",
    "replicator/verifier/messages.py",
    "replicator/verifier/server.py",
    "runtime/rpc.py",
    "scm/client.py",
    "scm/messages.py",
    "scm/server.py",
}


@cache
def modules() -> Sequence[Path]:
    return sorted(
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "_pb2" not in path.name
    )


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> frozenset[str]:
    names = set[str]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return frozenset(names)


def test_imports_point_down_only() -> None:
    upward = dict[str, set[str]]()
    for path in modules():
        package = path.relative_to(ROOT).parts[0]
        ours = {name.split(".")[0] for name in imported(path)} & set(PACKAGES)
        upward[relative(path)] = ours - {package} - ALLOWED[package]
    assert {name: found for name, found in upward.items() if found} == {}


def test_a_library_with_one_home_is_imported_nowhere_else() -> None:
    astray = [
        f"{relative(path)}: {name}"
        for path in modules()
        for name in imported(path)
        if relative(path) not in ONLY_IMPORTER.get(name.split(".")[0], {relative(path)})
    ]
    assert astray == []


def test_messages_are_seen_only_where_they_are_converted() -> None:
    seen = {
        relative(path)
        for path in modules()
        if path.parent.name != "protos"
        and re.search(r"^(from|import) .*_pb2", path.read_text(), re.MULTILINE)
    }
    assert seen == KNOWS_MESSAGES


# It stands for botocore, which reads the environment by itself.
READS_AS_BOTOCORE = "runtime/s3_account.py"
# Written, not read: a worker of Spark looks there when an error ends it.
TOLD_TO_SPARK = 'os.environ["SPARK_HIDE_TRACEBACK"] = "1"'


def test_a_module_opens_with_what_it_is_for() -> None:
    assert [relative(path) for path in modules() if not ast.get_docstring(tree_of(path))] == []


def test_an_init_module_has_no_logic_and_no_side_effects() -> None:
    packages = [path for path in modules() if path.name == "__init__.py"]
    assert len(packages) >= len(PACKAGES)
    assert [relative(path) for path in packages if len(tree_of(path).body) != 1] == []


def test_only_the_command_line_reads_the_environment() -> None:
    readers = [
        relative(path)
        for path in modules()
        if path.name != "cli.py"
        and path.parts[-2] != "admin"
        and relative(path) != READS_AS_BOTOCORE
        and re.search(
            r"\bos\.(environ|getenv)\b|\bsys\.argv\b",
            path.read_text().replace(TOLD_TO_SPARK, ""),
        )
    ]
    assert readers == []


def test_generated_modules_are_fresh() -> None:
    """`make protos` notes what it compiled; a .proto changed since then fails here."""
    noted = dict(
        line.split()[::-1] for line in (ROOT / "protos/generated.sha256").read_text().splitlines()
    )
    now = {
        f"protos/{p.name}": hashlib.sha256(p.read_bytes()).hexdigest()
        for p in (ROOT / "protos").glob("*.proto")
    }
    assert noted == now, "run `make protos`"


def test_no_folder_of_tests_bears_a_package_name() -> None:
    assert not {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} & set(PACKAGES)


def test_no_module_imports_itself_in_a_circle() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}
    imports = {name: imported(path) & names.keys() for name, path in names.items()}
    circles = []
    for name in names:
        reached, waiting = set[str](), list(imports[name])
        while waiting:
            module = waiting.pop()
            if module not in reached:
                reached.add(module)
                waiting += imports[module]
        if name in reached:
            circles.append(name)
    assert circles == []
