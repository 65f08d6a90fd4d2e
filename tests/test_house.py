"""The structure of the package: which wing imports which, read off the imports themselves."""

import ast
import subprocess

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pymc_sghmc"
GROUND = {
    "bambi_draws", "checks", "compat", "exceptions", "interrupts", "memory", "phases", "protocols",
    "pymc_hooks", "records", "schedules", "threads",
}  # fmt: skip
# What each wing may import besides the ground, from the top of the house down.
WINGS = {
    "predictions": {"diagnostics", "models", "rows"},
    "samplers": {"step", "tuning"},
    "exact": {"models", "runs"},
    "updating": {"step", "diagnostics", "models"},
    "step": {"diagnostics", "hierarchy", "tuning", "rows", "gradients", "loops", "models", "runs"},
    "diagnostics": {"gradients", "models"},
    "hierarchy": {"tuning", "gradients", "rows", "loops", "models"},
    "tuning": {"gradients"},
    "gradients": {"rows", "loops", "models"},
    "rows": {"models"},
    "loops": set(),
    "models": set(),
    "runs": set(),
}
FACES = {"__init__", "loaders"}  # what a user imports

TYPED = 0.9  # of the parameters of public functions, at least

FILES = sorted(PACKAGE.rglob("*.py"))
AT_THE_ROOT = {
    "pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md",
    ".github", ".ci", ".gitignore", ".pre-commit-config.yaml", ".readthedocs.yaml", "conda.recipe",
    "pymc_sghmc", "examples", "tests", "docs",
}  # fmt: skip


def imports(tree):
    """Yield the parts of the path below the package, and the name, of each import from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pymc_sghmc":
            for alias in node.names:
                yield (*node.module.split(".")[1:], alias.name)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "pymc_sghmc":
                    yield tuple(alias.name.split(".")[1:])


def broken_rules(wing, tree):
    """Say which imports of a file in this wing, or on the ground, break the table."""
    allowed = GROUND | (WINGS[wing] | {wing} if wing in WINGS else set())
    for path in imports(tree):
        if not path or path[0] not in allowed:
            yield f"imports {'.'.join(path)}"
        if any(part.startswith("_") for part in path):
            yield f"takes the private name {'.'.join(path)}"


def name(path):
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_run_down_the_table(path):
    place = path.relative_to(PACKAGE).parts
    if len(place) == 1 and path.stem in FACES:
        return  # a face may show all of the house
    wing = place[0] if len(place) > 1 else "ground"
    assert not list(broken_rules(wing, ast.parse(path.read_text())))


def test_an_import_up_the_table_is_found():
    wrong = ast.parse("from pymc_sghmc.step.step import StochasticGradientStep")
    assert list(broken_rules("gradients", wrong)) == ["imports step.step.StochasticGradientStep"]
    assert list(broken_rules("ground", wrong))
    assert not list(broken_rules("samplers", wrong))
    private = ast.parse("from pymc_sghmc.models.graphs import _name")
    assert list(broken_rules("exact", private)) == ["takes the private name models.graphs._name"]


def test_the_table_has_no_circle():
    for wing, below in WINGS.items():
        assert not any(wing in WINGS[other] for other in below)
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"} == set(
        WINGS
    )


@pytest.mark.parametrize("wing", sorted(set(WINGS) - {"diagnostics"}))
def test_the_face_of_a_wing_is_a_sentence(wing):
    body = ast.parse((PACKAGE / wing / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def public_parameters(tree):
    """Yield the parameters, but for self and cls, of functions and methods with a public name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (node.name[0] != "_" or node.name[:2] == "__"):
            found = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from (arg for arg in found if arg.arg not in {"self", "cls"})


def test_signatures_say_what_they_take():
    parameters = [arg for path in FILES for arg in public_parameters(ast.parse(path.read_text()))]
    typed = [arg for arg in parameters if arg.annotation is not None]
    assert len(typed) >= TYPED * len(parameters)


def test_a_parameter_without_a_type_is_found():
    tree = ast.parse("class A:\n    def f(self, a, *, b: int): ...\n    def _g(self, c): ...")
    assert [(arg.arg, arg.annotation is None) for arg in public_parameters(tree)] == [
        ("a", True),
        ("b", False),
    ]


def test_nothing_else_lies_at_the_root():
    root = Path(__file__).parents[1]
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("git is asked for what belongs to the project, and isn't there")
    found = {path.split("/")[0] for path in listed.stdout.splitlines()}
    assert found - AT_THE_ROOT == set()
