"""Sizes, names and repetitions stay within the limits of the style guide."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.tidy.test_layers import PACKAGES, ROOT, modules, relative, tree_of

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
MARKDOWN_COLUMNS_MAX = 120
# As many equal lines in a row are one passage that stands twice.
PASSAGE_LINES = 6
# Share of public methods with a docstring, those of private classes too.
DOCUMENTED_MIN = 0.95

# Modules where a library without types, or with types of its own, meets ours.
UNTYPED_ADAPTERS = {
    "admin/demo/cluster.py": "stubs of gRPC return any message",
    "chunktable/manifest.py": "JSON before it is checked",
    "chunktable/s3_files.py": "pyarrow has no types",
    "chunktable/schema.py": "pyarrow has no types",
    "chunktable/writer.py": "pyarrow has no types",
    "merkle/checksum.py": "the kernels' module stands for a protocol",
    "merkle/intrinsics.py": "numba and llvmlite have no types",
    "merkle/kernels.py": "numba and llvmlite have no types",
    "proof/columns.py": "the kernels' module stands for a protocol",
    "proof/item_columns.py": "the kernels' module stands for a protocol",
    "proof/listed_rows.py": "the kernels' module stands for a protocol",
    "proof/page_kernels.py": "numba has no types",
    "proof/sqlite_pages.py": "the kernels' module stands for a protocol",
    "proof/symbols.py": "the kernels' module stands for a protocol",
    "runtime/documents.py": "JSON before it is checked",
    "runtime/renewable_channel.py": "methods of gRPC take and return any message",
    "runtime/rpc.py": "handlers of gRPC take and return any message",
    "spark/connect.py": "a served session stands for pyspark's other kind",
    "spark/jobs.py": "a method stands for pyspark's class of handlers",
    "sweep/compare.py": "pyarrow has no types",
    "sweep/exact.py": "pyarrow has no types",
    "sweep/files.py": "pyarrow has no types",
    "sweep/output.py": "pyarrow has no types",
    "sweep/work.py": "pyarrow has no types",
}
# Functions that the compiler needs in one piece.
ONE_LOOP = {
    "fold_stretches": "numba keeps a loop's state in registers; a call would spill it",
    "encode_trees": "numba keeps a loop's state in registers; a call would spill it",
}
# Public names that only a library calls, by its own rules.
CALLED_BY_LIBRARIES: dict[str, str] = {}

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in modules():
        yield relative(path), tree_of(path)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_a_module_is_not_long() -> None:
    lines = {relative(path): path.read_text().count("\n") for path in modules()}
    assert {name: count for name, count in lines.items() if count > MODULE_LINES_MAX} == {}


def test_a_function_is_not_long() -> None:
    long = {
        f"{module}: {node.name}": lines
        for module, tree in trees()
        for node in functions(tree)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
        and node.name not in ONE_LOOP
    }
    assert long == {}


def test_no_comment_is_a_banner() -> None:
    banners = {
        relative(path): re.findall(r"^\s*#\s*[-=#*~_]{3,}.*$", path.read_text(), re.MULTILINE)
        for path in modules()
    }
    assert {name: found for name, found in banners.items() if found} == {}


def test_types_are_left_out_in_listed_adapters_only() -> None:
    left_out = dict[str, list[str]]()
    for path in modules():
        names = {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
        ignored = re.findall(r"#\s*type:\s*ignore.*$", path.read_text(), re.MULTILINE)
        left_out[relative(path)] = [*sorted(names & {"Any", "cast"}), *ignored]
    unlisted = left_out.keys() - UNTYPED_ADAPTERS.keys()
    assert {name: left_out[name] for name in unlisted if left_out[name]} == {}


def test_a_listed_adapter_needs_to_be_listed() -> None:
    for name in UNTYPED_ADAPTERS:
        assert re.search(r"\bAny\b|\bcast\(|type: ignore", (ROOT / name).read_text()), name


def test_documents_of_others_are_read_within_limits_everywhere() -> None:
    """runtime.documents is the one place that knows the parsers."""
    found = [
        f"{name}: {ast.unparse(node)[:60]}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("json.loads", "json.load", "tomllib.loads", "tomllib.load")
        and name != "runtime/documents.py"
    ]
    assert found == []


def test_no_two_public_classes_share_a_name() -> None:
    homes = defaultdict[str, list[str]](list)
    for name, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_public_methods_say_what_the_caller_gets() -> None:
    missing, count = list[str](), 0
    for name, tree in trees():
        for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    count += 1
                    if ast.get_docstring(method) is None:
                        missing.append(f"{name}: {kind.name}.{method.name}")
    assert len(missing) <= count * (1 - DOCUMENTED_MIN), "\n".join(missing)


def significant_lines(text: str) -> list[tuple[int, str]]:
    """Number and text of the lines that say something: no imports, no comments, no
    docstrings, no lone brackets. Signatures are left out: who implements a port repeats
    those of the port.
    """
    passed_over = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = min(line.lineno for line in (node, *node.decorator_list))
            passed_over |= set(range(first, node.body[0].lineno))
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Expr | ast.Import | ast.ImportFrom) and (
            is_docstring or not isinstance(node, ast.Expr)
        ):
            passed_over |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if number not in passed_over and not line.strip().startswith("#") and re.search(r"\w", line)
    ]


def test_no_passage_stands_twice() -> None:
    places = defaultdict[tuple[str, ...], list[str]](list)
    for path in modules():
        lines = significant_lines(path.read_text())
        for i in range(len(lines) - PASSAGE_LINES + 1):
            passage = tuple(line for _, line in lines[i : i + PASSAGE_LINES])
            places[passage].append(f"{relative(path)}:{lines[i][0]}")
    twice = [" ~ ".join(found) for found in places.values() if len(found) > 1]
    assert twice == []


def public_names() -> Iterator[tuple[str, str]]:
    """Module and name of everything that a module offers to others by name.

    A type that only stands in the annotations of what is offered is offered with it.
    """
    for module, tree in trees():
        annotated = set[str]()
        names = list[str]()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if not _is_called_by_click(node):
                    names.append(node.name)
                if not node.name.startswith("_"):
                    annotated |= _annotations(node) - {node.name}
            elif isinstance(node, ast.Assign):
                names += [
                    name.id
                    for target in node.targets
                    for name in ast.walk(target)
                    if isinstance(name, ast.Name)
                ]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.append(node.target.id)
        yield from (
            (module, name) for name in names if not name.startswith("_") and name not in annotated
        )


def _annotations(node: ast.AST) -> set[str]:
    """Every name in the annotations of a definition, and in the bases of a class."""
    found = list[ast.expr | None]()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            found.append(inner.returns)
        elif isinstance(inner, ast.arg | ast.AnnAssign):
            found.append(inner.annotation)
        elif isinstance(inner, ast.ClassDef):
            found += inner.bases
    text = " ".join(ast.unparse(expression) for expression in found if expression is not None)
    return set(re.findall(r"\w+", text))


def _is_called_by_click(node: ast.FunctionDef | ast.ClassDef) -> bool:
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return "command(" in decorators or "group(" in decorators


def test_what_is_public_is_used_by_others() -> None:
    words = dict[str, set[str]]()
    others = [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    for path in [*others, *PAGES, ROOT / "pyproject.toml"]:
        words[relative(path)] = set(re.findall(r"\w+", path.read_text()))
    unused = [
        f"{module}: {name}"
        for module, name in public_names()
        if name not in CALLED_BY_LIBRARIES
        and not any(name in found for other, found in words.items() if other != module)
    ]
    assert unused == []


def test_prose_is_narrow() -> None:
    wide = [
        f"{relative(page)}: {line}"
        for page in PAGES
        for line in re.sub(
            r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
        ).splitlines()
        if len(line) > MARKDOWN_COLUMNS_MAX and not line.startswith(("|", "<"))
    ]
    assert wide == []


def test_the_architecture_lists_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert [package for package in PACKAGES if f"\n| `{package}` |" not in page] == []
