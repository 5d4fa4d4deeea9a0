"""The table of faults names all tests that carry the marker, and no others."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TABLE = TESTS.parent / "serving" / "FAULTS.md"
MARKER = "pytest.mark.faults"


def marked(file: Path) -> set[str]:
    """Return the tests of a file that carry the marker, by themselves or all."""
    functions, are_all = {}, False
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[node.name] = MARKER in map(ast.unparse, node.decorator_list)
        elif isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node):
            are_all = MARKER in map(ast.unparse, ast.walk(node.value))
    return {
        f"{file.relative_to(TESTS)}::{name}"
        for name, is_marked in functions.items()
        if name.startswith("test_") and (are_all or is_marked)
    }


def test_every_fault_has_its_outcome_and_its_tests():
    text = TABLE.read_text("utf-8")
    (table,) = re.findall(r"<!-- faults:begin -->(.*)<!-- faults:end -->", text, re.S)
    rows = [row.strip("| ").split(" | ") for row in table.strip().splitlines()[2:]]
    assert {len(row) for row in rows} == {5}
    named = {name for row in rows for name in re.findall(r"`(\S+\.py\S*)`", row[-1])}
    for whole in [name for name in named if "::" not in name]:
        named = named - {whole} | marked(TESTS / whole)
    there = set().union(*map(marked, TESTS.rglob("*.py")))
    assert named == there, named ^ there
    assert all(".py" in row[-1] for row in rows)
