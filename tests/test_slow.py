"""The list of slow tests: it names tests that exist, and is used."""

import ast

from pathlib import Path

import pytest

from slow import function_of, listed, measured, too_slow

ROOT = Path(__file__).parents[1]


def functions(path):
    """Return the names of what a file defines, as pytest writes them, and of its docstrings."""
    module = path.with_suffix("").as_posix().replace("/", ".")
    found = {module}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found |= {node.name, f"{module}.{node.name}"}
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{module}.{node.name}.{method.name}" for method in methods}
            found |= {f"{node.name}::{method.name}" for method in methods}
    return found


def unknown(names):
    """Return those names that no file has."""
    by_file = {}
    missing = []
    for name in names:
        file, _, function = function_of(name).partition("::")
        path = Path(file)
        if not (ROOT / path).is_file():
            missing.append(name)
            continue
        if file not in by_file:
            by_file[file] = functions(path)
        if function not in by_file[file]:
            missing.append(name)
    return missing


def test_slow_tests_exist():
    names = listed()
    assert names == sorted(set(names))
    assert unknown(names) == []


def test_a_name_that_is_gone_is_found():
    gone = ["tests/test_slow.py::test_gone[0]", "tests/gone.py::test_slow_tests_exist"]
    assert unknown([*gone, "tests/test_slow.py::test_slow_tests_exist"]) == gone


def test_the_default_run_has_none_of_them(request):
    """In a run of all files; of this file alone, there is nothing to see."""
    if "not slow" not in request.config.option.markexpr:
        pytest.skip("slow tests were asked for")
    assert {item.nodeid for item in request.session.items}.isdisjoint(listed())


@pytest.mark.parametrize(("times", "expected"), [
    ({"a": 1.6}, set()),  # the quickest case of its function
    ({"a": 2.6}, {"a"}),
    ({"a[0]": 1.6, "a[1]": 1.7}, {"a[1]"}),
    ({"a[0]": 0.5, "a[1]": 1.6, "b": 1.0}, {"a[1]"}),
])  # fmt: skip
def test_the_quickest_case_may_take_longer(times, expected):
    text = "\n".join(f"{seconds}s call     {name}" for name, seconds in times.items())
    assert too_slow(measured(text)) == expected
