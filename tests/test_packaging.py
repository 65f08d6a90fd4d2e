"""What is said in several files about the package is the same in each, and the checks of a release work."""

import ast
import re
import runpy
import sys
import tomllib

from pathlib import Path

import pytest
import yaml

import pymc_sghmc

ROOT = Path(__file__).parents[1]
OPTIONAL = {
    "dask",
    "fsspec",
    "h5py",
    "jax",
    "pyarrow",
    "zarr",
}  # imported where a user asks for them
VERSION = r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?"  # PEP 440, of ours


def text(name):
    path = ROOT / name
    if not path.exists():
        pytest.skip(f"{name} is in a checkout, not in the sdist")
    return path.read_text(encoding="utf-8")


def pyproject():
    return tomllib.loads(text("pyproject.toml"))


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0].lower()


def spaceless(requirements):
    return sorted(requirement.replace(" ", "") for requirement in requirements)


def imported(tree):
    """Yield the first part of what a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def imports_of(folder):
    trees = (ast.parse(path.read_text("utf-8")) for path in (ROOT / folder).rglob("*.py"))
    return set().union(*map(imported, trees)) - set(sys.stdlib_module_names)


def test_what_is_imported_is_declared():
    declared = {name_of(requirement) for requirement in pyproject()["project"]["dependencies"]}
    assert imports_of("pymc_sghmc") - OPTIONAL - {"pymc_sghmc"} == declared


def test_the_example_needs_no_more_than_its_extra():
    project = pyproject()["project"]
    extra = {name_of(requirement) for requirement in project["optional-dependencies"]["examples"]}
    declared = {name_of(requirement) for requirement in project["dependencies"]}
    needed = set(imported(ast.parse(text("examples/quickstart.py"))))
    assert needed - set(sys.stdlib_module_names) - {"pymc_sghmc"} <= declared | extra
    assert extra <= needed


def test_the_conda_recipe_asks_for_the_same():
    project = pyproject()["project"]
    recipe = text("conda.recipe/recipe.yaml").replace("matplotlib-base", "matplotlib")
    needed = yaml.safe_load(recipe)["requirements"]
    python = "python" + project["requires-python"]
    assert spaceless(needed["run"]) == sorted([python, *spaceless(project["dependencies"])])
    build = pyproject()["build-system"]["requires"]
    assert spaceless(needed["host"]) == sorted([python, "pip", *spaceless(build)])


def test_the_conda_recipe_says_the_same():
    project = pyproject()["project"]
    recipe = yaml.safe_load(text("conda.recipe/recipe.yaml"))
    assert recipe["package"]["name"] == project["name"]
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]


def test_one_version_stands_in_all_files():
    fallback = pyproject()["tool"]["hatch"]["version"]["fallback-version"]
    assert re.fullmatch(VERSION, fallback)
    assert f'default="{fallback}"' in text("conda.recipe/recipe.yaml")
    release = fallback.partition(".dev")[0]
    assert yaml.safe_load(text("CITATION.cff"))["version"] in {fallback, release}
    newest = re.search(r"^## \[(.*?)\]", text("docs/reference/changelog.md"), re.MULTILINE)[1]
    assert newest == release


def test_the_package_knows_its_version():
    assert re.fullmatch(VERSION, pymc_sghmc.__version__)


def test_the_citation_names_the_papers():
    citation = yaml.safe_load(text("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors", "version"} <= set(citation)
    assert citation["authors"] == pyproject()["project"]["authors"]
    assert citation["license"] == pyproject()["project"]["license"]
    papers = [(p["authors"][0]["family-names"], p["year"]) for p in citation["references"]]
    assert papers == [("Chen", 2014), ("Welling", 2011), ("Fu", 2016)]
    page = text("docs/reference/citing.md")
    for paper in citation["references"]:
        assert paper["collection-title"] in page
        assert f"({paper['year']}), *{paper['title']}*".lower() in page.lower()


def test_classifiers_are_those_that_are_tested():
    versions = {
        classifier.rpartition(" ")[2]
        for classifier in pyproject()["project"]["classifiers"]
        if re.search(r":: 3\.\d+$", classifier)
    }
    job = yaml.safe_load(text(".github/workflows/tests.yml"))["jobs"]["tests"]
    matrix = job["strategy"]["matrix"]
    tested = {*matrix["python"], *(more["python"] for more in matrix["include"])}
    assert versions == tested
    lowest = min(versions, key=lambda version: int(version.partition(".")[2]))
    assert pyproject()["project"]["requires-python"] == f">={lowest}"


def test_both_places_ask_for_the_same_linter():
    pinned = {name_of(r): r.partition("==")[2] for r in extra("dev") if "==" in r}
    hooks = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert [hook["rev"] for hook in hooks if "ruff" in hook["repo"]] == [f"v{pinned['ruff']}"]


def extra(name):
    return pyproject()["project"]["optional-dependencies"][name]


@pytest.mark.parametrize("runs", ["python examples/quickstart.py", "python -m pytest"])
def test_the_readme_has_one_command_that_is_complete(runs):
    (command,) = re.findall(rf"^pip install .* && {runs}.*$", text("README.md"), re.MULTILINE)
    (extras,) = re.findall(r'pip install "\.\[([\w,]+)\]" && ', command)
    assert set(extras.split(",")) <= set(pyproject()["project"]["optional-dependencies"])
    blocks = re.findall(r"^```\w*\n(.*?)^```", text("README.md"), re.MULTILINE | re.DOTALL)
    assert f"{command}\n" in blocks


def test_nothing_is_said_to_be_published():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    wrong = re.compile(r"pip install (-\S+ )*[\"']?pymc[-_]sghmc")
    assert not [str(path) for path in pages if wrong.search(path.read_text("utf-8"))]


def workflows():
    folder = ROOT / ".github/workflows"
    return sorted(folder.glob("*.yml")) if folder.is_dir() else []


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.stem)
def test_workflows_run_parts_that_exist(path):
    parts = set(re.findall(r"^#   \.ci/run ([\w-]+)", text(".ci/run"), re.MULTILINE))
    assert parts == {
        "lint", "docs-quick", "docs", "package", "example", "tests", "process", "slow", "upstream"
    }  # fmt: skip
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        of_matrix = set(job.get("strategy", {}).get("matrix", {}).get("part", []))
        assert of_matrix <= parts
        for step in job.get("steps", []):
            if "run" in step:
                part = re.match(r"\.ci/run (\$\{\{ matrix\.part \}\}|[\w-]+)", step["run"])[1]
                assert part in parts or of_matrix
            else:
                assert re.search(r"@(v\d+|[0-9a-f]{40}|release/v1)$", step["uses"])


def test_the_publishing_job_alone_may_ask_for_a_token():
    jobs = yaml.safe_load(text(".github/workflows/release.yml"))["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert not any("permissions" in job for name, job in jobs.items() if name != "publish")
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}


@pytest.fixture(scope="module")
def check():
    text(".ci/check_package.py")
    return runpy.run_path(str(ROOT / ".ci/check_package.py"))


METADATA = "Metadata-Version: 2.4\nName: pymc-sghmc\nVersion: 0.1.0\nProject-URL: Repository, x\n"
CHANGELOG = "# Changelog\n\n## [0.1.0] - 2027-01-02\n"
CITATION = "version: 0.1.0\ndate-released: 2027-01-02\n"


def test_a_release_is_refused_for_each_reason(check):
    problems = check["release_problems"]
    assert problems(METADATA, CHANGELOG, CITATION) == []
    dev = METADATA.replace("0.1.0", "0.1.0.dev3+g1234567")
    assert "not that of a tag" in problems(dev, CHANGELOG, CITATION)[0]
    nowhere = METADATA.replace("Repository", "Homepage")
    (said,) = problems(nowhere, CHANGELOG, CITATION)
    assert "no Repository" in said
    (said,) = problems(METADATA, CHANGELOG.replace("2027-01-02", "unreleased"), CITATION)
    assert "changelog" in said
    (said,) = problems(METADATA, CHANGELOG, CITATION.replace("0.1.0", "0.1.0.dev0"))
    assert "another version" in said
    (said,) = problems(METADATA, CHANGELOG, "version: 0.1.0\n")
    assert "date-released" in said


def test_files_that_do_not_belong_are_found(check):
    good = dict.fromkeys(check["REQUIRED"], 10)
    assert check["sdist_problems"](good, set(good)) == []
    assert check["sdist_problems"](good | {"docs/data.npz": 2**21}, set()) == [
        "docs/data.npz has 2.0 MiB"
    ]
    (said,) = check["sdist_problems"](good | {"docs/_build/index.html": 10}, set(good))
    assert "docs/_build/index.html" in said
    (said,) = check["sdist_problems"](dict.fromkeys(set(good) - {"LICENSE"}, 10), set())
    assert said == "LICENSE is missing"
    names = ["pymc_sghmc/__init__.py", "pymc_sghmc-0.1.0.dist-info/METADATA"]
    assert check["wheel_problems"](names) == []
    wrong = ["tests/conftest.py", "pymc_sghmc/__pycache__/checks.pyc"]
    assert len(check["wheel_problems"](names + wrong)) == 2
