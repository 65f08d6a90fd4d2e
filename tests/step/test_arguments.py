"""Arguments that the samplers share: shown with every sampler, written and checked once."""

import ast
import doctest
import inspect
import pickle
import pydoc
import re
import textwrap
import warnings

from pathlib import Path
from typing import Unpack, get_args, get_type_hints

import cloudpickle
import numpy as np
import pymc as pm
import pytest

from model_collection.small import linear_regression
from modes import FAST
from table import SAMPLERS, PaperSGLD

from pymc_sghmc import QNHMC, SGHMC, SGLD, GammaGibbs, schedules
from pymc_sghmc.step.arguments import ARGUMENTS, SharedArguments, checked, compared
from pymc_sghmc.step.step import StochasticGradientStep

PACKAGE = Path(__file__).parents[2] / "pymc_sghmc"

BY_HAND = {"learning_rate": 1e-4, "batch_size": 10, "n_steps": 2, "compile_kwargs": FAST}
CLASSES = list(dict.fromkeys(sampler.cls for sampler in SAMPLERS))
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
every_class = pytest.mark.parametrize("cls", CLASSES)


@pytest.fixture(scope="module")
def model():
    return linear_regression()


def documented(doc):
    """Types and texts of a docstring's Parameters, by name."""
    section = inspect.cleandoc(doc).split("Parameters\n----------\n")[1]
    section = re.split(r"\n\n\S[^\n]*\n---", section)[0]
    parts = re.findall(r"^(\w+) : (.+)\n((?:    .*\n?)+)", section, re.MULTILINE)
    return {name: (kind, " ".join(text.split())) for name, kind, text in parts}


def own_arguments(cls):
    """Names that stand in the source of a sampler's ``__init__``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))
    return [argument.arg for argument in tree.body[0].args.kwonlyargs]


def source_doc(cls):
    """A class's docstring as it stands in the file."""
    [doc] = [
        ast.get_docstring(node)
        for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(cls))))
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    ]
    return doc


@every_class
def test_signature_shows_all_arguments_with_types_and_defaults(cls):
    of_class, of_init = inspect.signature(cls), inspect.signature(cls.__init__)
    names = ["vars", *own_arguments(cls), *ARGUMENTS]
    assert list(of_class.parameters) == names
    assert list(of_init.parameters) == ["self", *names]
    variables, *others = of_class.parameters.values()
    assert variables.kind is variables.POSITIONAL_OR_KEYWORD
    assert variables.default is None
    assert {parameter.kind for parameter in others} == {KEYWORD_ONLY}
    assert all(p.annotation is not p.empty for p in of_class.parameters.values())
    hints = get_type_hints(SharedArguments)
    for name, argument in ARGUMENTS.items():
        assert of_class.parameters[name].default is argument.default
        assert of_class.parameters[name].annotation == hints[name]


@every_class
def test_help_shows_all_arguments_in_the_order_of_the_signature(cls):
    shown = documented(cls.__doc__)
    assert list(shown) == list(inspect.signature(cls).parameters)
    text = pydoc.plain(pydoc.render_doc(cls))
    for name, (kind, words) in shown.items():
        assert f"{name} : {kind}" in text
        assert words.endswith(".")


@every_class
def test_documented_defaults_are_those_of_the_signature(cls):
    for name, (kind, _) in documented(cls.__doc__).items():
        default = inspect.signature(cls).parameters[name].default
        words = '"' + default + '"' if isinstance(default, str) else repr(default)
        assert kind.endswith("optional" if default is None else f"default {words}")


@every_class
def test_a_class_keeps_its_own_text_and_its_examples(cls):
    own, whole = source_doc(cls), inspect.cleandoc(cls.__doc__)
    text = documented(SharedArguments.__doc__)
    assert set(documented(own)) == {"vars", *own_arguments(cls)}
    assert {name: documented(whole)[name] for name in text} == text
    start, end = (part.strip() for part in own.split("\n\nRaises\n------"))
    assert whole.startswith(start + "\nbatch_size : ")
    assert whole.endswith("\n\nRaises\n------\n" + end)
    examples = doctest.DocTestParser().get_examples(cls.__doc__)
    assert examples
    assert [e.source for e in examples] == [
        e.source for e in doctest.DocTestParser().get_examples(own)
    ]
    found = doctest.DocTestFinder().find(cls, module=inspect.getmodule(cls))
    assert [len(test.examples) for test in found if test.name == cls.__name__] == [len(examples)]


def test_each_shared_argument_is_written_in_one_file():
    # exact/ stands beside these samplers and may not know their arguments
    files = [path for path in PACKAGE.rglob("*.py") if "exact" not in path.parts]
    sources = {path.name: " ".join(path.read_text().split()) for path in files}
    for _, text in documented(SharedArguments.__doc__).values():
        assert [file for file, source in sources.items() if text in source] == ["arguments.py"]
    for cls in CLASSES:
        assert not {*own_arguments(cls), *documented(source_doc(cls))} & set(ARGUMENTS)


def test_types_and_texts_are_declared_in_one_order():
    hints = get_type_hints(SharedArguments, include_extras=True)
    assert list(hints) == list(ARGUMENTS) == list(documented(SharedArguments.__doc__))
    assert all(get_args(hint)[1] is ARGUMENTS[name] for name, hint in hints.items())


@every_class
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("batch_sise", "batch_size"),
        ("batchsize", "batch_size"),
        ("center", "centre"),
        ("marginalise", "marginalize"),
        ("step_size", "learning_rate"),
    ],
)
@pytest.mark.parametrize("blocked", [True, False])
def test_an_argument_that_is_nearly_right_is_named(model, cls, name, meant, blocked):
    with pytest.raises(TypeError, match=f"no argument '{name}'. Did you mean '{meant}'"):
        cls(model=model, blocked=blocked, **{name: 3}, **BY_HAND)


@every_class
def test_unknown_argument_is_refused_with_those_there_are(model, cls):
    with pytest.raises(TypeError) as error:
        cls(model=model, qqq=3, **BY_HAND)
    names = ", ".join(["vars", *own_arguments(cls), *ARGUMENTS])
    assert str(error.value) == f"{cls.__name__} has no argument 'qqq'. It has {names}."


@pytest.mark.parametrize("cls", [*CLASSES, QNHMC])
def test_a_number_in_the_place_of_variables_is_a_batch_size(model, cls):
    with model, pytest.raises(TypeError, match=r"\(500\): the first argument is vars"):
        cls(500)


def test_qnhmc_says_that_it_uses_all_rows(model):
    with model, pytest.raises(TypeError, match=r"uses all rows .* and has no batch_size"):
        QNHMC(batch_size=100)
    with model, pytest.raises(TypeError, match=r"uses all rows .* and has no data=.*SGHMC"):
        QNHMC(data={"x": np.zeros(100)})


@pytest.mark.parametrize("cls", [*CLASSES, QNHMC, GammaGibbs])
def test_a_step_outside_a_model_says_where_to_make_it(cls):
    with pytest.raises(TypeError, match=r"(?s)with model:.*Bambi.*with model.backend.model:"):
        cls()


@every_class
@pytest.mark.parametrize("vars", ["beta", ["beta"]])
def test_variables_may_be_given_by_name(model, cls, vars):
    with model:
        step = cls(vars, **BY_HAND)
    assert [var.name for var in step.vars] == ["beta"]


def test_a_name_of_no_variable_is_refused_with_those_there_are(model):
    with model, pytest.raises(ValueError, match=r"no variable 'betta'.*'beta'"):
        SGHMC("betta")


@every_class
def test_what_the_step_is_handed_by_the_sampler_is_no_argument(model, cls):
    with pytest.raises(TypeError, match="'own'"):
        cls(model=model, own={}, **BY_HAND)


def test_a_typo_costs_nothing_but_the_call(model, monkeypatch):
    made = []
    monkeypatch.setattr("pymc_sghmc.step.step.gradients", lambda *args: made.append(args))
    rng, given = np.random.default_rng(3), {"beta": np.ones(2)}
    arguments = {"rng": rng, "initial_point": given, "centre": given, **BY_HAND}
    before = dict(arguments)
    variables, state = list(model.value_vars), rng.bit_generator.state
    with model, pytest.raises(TypeError, match=r"no argument 'frictoin'. Did you mean 'friction'"):
        SGHMC(integrator="euler", frictoin=0.5, **arguments)
    assert not made  # it is seen before any work is done
    assert arguments == before
    assert list(given) == ["beta"]
    assert model.value_vars == variables
    assert rng.bit_generator.state == state


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("n_steps", [0, 2.5, "1", True], "must be a whole number of inner steps, at least 1."),
        (
            "temperature",
            [-1, np.inf, np.nan, "1", [1.0]],
            "must be a finite number, 1 for the posterior, 0 for optimisation.",
        ),
        (
            "target_bias",
            [0, 1, "much", np.nan],
            "must be a number between 0 and 1, the relative bias of the variances that automatic "
            "settings may cost.",
        ),
        (
            "gradient",
            ["exact", None],
            'must be "auto", "plain", "control_variates" or "second_order".',
        ),
        ("compile_kwargs", ["NUMBA", 1], "must be a dict, such as {'mode': 'NUMBA'}."),
        ("learning_rate", [0, -1.0, np.inf], "must be finite and above zero."),
        (
            "learning_rate",
            ["fast", None],
            'pass "auto", a number above zero or a schedule t -> rate from pymc_sghmc.schedules. '
            "About 0.01 times the smallest posterior variance is a cautious start.",
        ),
    ],
)
def test_bad_value_is_refused_in_words(name, values, words):
    for value in values:
        sentence = f"{name}={value!r}: {words}"
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            checked({name: value})


def test_values_are_the_given_ones_and_defaults():
    assert checked({}) == {name: argument.default for name, argument in ARGUMENTS.items()}
    values = checked({"n_steps": np.int64(3), "temperature": np.float32(2), "replace": False})
    assert values == {**checked({}), "n_steps": 3, "temperature": 2.0, "replace": False}
    assert type(values["n_steps"]) is int
    assert type(values["temperature"]) is float


def test_saved_states_are_compared_by_what_was_given():
    given = {"n_steps": np.int64(3), "target_bias": np.float32(0.25), "rng": 1, "batch_size": 5}
    settings = compared(checked(given))
    assert settings == {
        "batch_size": 5, "pool": "auto", "replace": True, "learning_rate": "auto", "n_steps": 3, "temperature": 1.0,
        "preconditioner": "auto", "gradient": "auto", "centring": "auto", "marginalize": (), "recover": True,
        "centre": None, "target_bias": 0.25,
    }  # fmt: skip
    assert type(settings["n_steps"]) is int  # PyMC's comparison looks at the types
    assert type(settings["target_bias"]) is np.float32
    schedule = compared(checked({"learning_rate": schedules.constant(1e-3)}))
    other = compared(checked({"learning_rate": schedules.constant(2e-3)}))
    assert schedule["learning_rate"].startswith("_constant")
    assert schedule != other
    assert schedule == compared(checked({"learning_rate": schedules.constant(1e-3)}))


def test_settings_hold_a_samplers_own_arguments_too(model):
    own = {"friction": 0.5, "noise_estimate": None, "integrator": "euler"}
    step = SGHMC(model=model, gradient="plain", resample_momentum_every=4, **own, **BY_HAND)
    shared = {"learning_rate": 1e-4, "batch_size": 10, "n_steps": 2, "gradient": "plain"}
    assert step.settings == {
        **compared(checked(shared)), **own, "resample_momentum_every": 4
    }  # fmt: skip
    assert step.restart_every == 4
    plain = PaperSGLD(model=model, **BY_HAND)
    assert plain.settings == compared(checked(shared))
    assert plain.restart_every is None


@every_class
def test_steps_of_single_unknowns_have_all_arguments_and_can_be_pickled(model, cls):
    compound = cls(model=model, gradient="plain", blocked=False, **BY_HAND)
    assert [step.unknowns.names for step in compound.methods] == [("beta",), ("sigma_log__",)]
    for step, dumps in zip(compound.methods, (pickle.dumps, cloudpickle.dumps), strict=True):
        step.begin_chain(np.random.default_rng(1))
        assert step.draws.n_steps == 2
        assert not step.blocked
        args, kwargs = step.__getnewargs_ex__()
        assert kwargs.keys() == {*BY_HAND, "model", "gradient", "blocked", "rng"}
        copied, point = pickle.loads(dumps(step)), model.initial_point()
        assert copied.settings == step.settings
        assert len(args) == 1
        [name] = step.unknowns.names
        old = point[name]
        new = step.step(point)[0][name]
        np.testing.assert_array_equal(copied.step(point)[0][name], new)
        assert (new != old).all()


def test_a_sampler_of_another_file_is_shown_alike():
    class Mine(StochasticGradientStep):
        """My sampler.

        Parameters
        ----------
        vars : list, optional
            Mine.
        own_one : int, default 3
            My own.

        Returns
        -------
        nothing
        """

        def __init__(self, vars=None, *, own_one: int = 3, **shared: Unpack[SharedArguments]):
            super().__init__(vars, {"own_one": own_one}, **shared)

    class Heir(Mine):
        """Its arguments are Mine's."""

    class Closed(SGLD):
        """Has one argument."""

        def __init__(self, model=None):
            super().__init__(model=model)

    names = ["vars", "own_one", *ARGUMENTS]
    assert list(inspect.signature(Mine).parameters) == list(documented(Mine.__doc__)) == names
    assert Mine.__doc__.rstrip().endswith("\n\nReturns\n-------\nnothing")
    assert inspect.signature(Heir) == inspect.signature(Mine)
    assert Heir.__doc__ == "Its arguments are Mine's."
    assert list(inspect.signature(Closed).parameters) == ["model"]
    # a class that no file holds is pickled as a whole, in which the arguments stand already
    copied = pickle.loads(cloudpickle.dumps(Mine))
    assert copied.__doc__ == Mine.__doc__
    assert list(inspect.signature(copied).parameters) == names


@every_class
@pytest.mark.parametrize("leaves_others", [True, False])
def test_warnings_point_at_the_users_line(cls, leaves_others):
    y = np.linspace(-1.0, 1.0, 40)
    with pm.Model() as model:
        x = pm.Normal("x")
        if leaves_others:
            rows = pm.Minibatch(y, batch_size=10)
            pm.Normal("y", x + pm.Normal("z"), 1, observed=rows, total_size=40)
            arguments = {"vars": [x]}
        else:
            pm.Normal("y", pm.math.switch(y < x, 0, 1), 0.5, observed=y)
            arguments = {"batch_size": 10}
    arguments |= {"model": model, "gradient": "plain", "learning_rate": 1e-4}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        cls(compile_kwargs=FAST, **arguments)
    words = "to other steps" if leaves_others else "log-density jumps"
    [warning] = [w for w in caught if words in str(w.message)]
    assert (warning.filename, warning.lineno) == (__file__, line)
