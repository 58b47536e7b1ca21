"""Each of the twenty rules that operators asked for is held by a test that names it.

A test names a rule where its docstring says "Operator rule R9", or "Operator rules R4,
R9". The rules: progress and ETA (R1, R2); pause, states and their store (R3 to R7);
manual jobs (R8); limits (R9, R10); no healthy word without data (R11); backlog and
counters (R12, R13); JSON (R14); repairs from proven bytes, undone and planned (R15 to
R17); output to pipes (R18); history (R19); replicas that are not to be compared (R20).
"""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
RULES = {f"R{number}" for number in range(1, 21)}
_NAMED = re.compile(r"Operator rules? (R\d+(?:,\s+R\d+)*)")


def rules_named() -> dict[str, list[str]]:
    """The tests that name each rule."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "Operator rule" not in text or path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            for names in _NAMED.findall(ast.get_docstring(node) or ""):
                for name in re.findall(r"R\d+", names):
                    found.setdefault(name, []).append(f"{path.name}::{node.name}")
    return found


def test_every_rule_is_named_by_a_test_and_no_other_is() -> None:
    assert set(rules_named()) == RULES
