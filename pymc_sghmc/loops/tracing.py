"""One inner step of a sampler as a graph.

A sampler's ``update`` is written in plain array operations. Here it is called once on symbolic
arrays, with a symbolic gradient and a symbolic generator. The graph that it returns is the whole
inner step, gradient included, so the rule is written in one place only.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Apply
from pytensor.graph.replace import clone_replace
from pytensor.tensor.shape import SpecifyShape

from pymc_sghmc.compat import ancestors, is_row_selection, toposort
from pymc_sghmc.loops.backends import FetchedRows
from pymc_sghmc.protocols import Array, Target, Update

__all__ = [
    "NotTraceable",
    "TracedStep",
    "coordinate_arrays",
    "traced_step",
    "without_shape_checks",
]

Variable = Any  # a PyTensor variable


class NotTraceable(TypeError):
    """An update rule that cannot become one compiled step."""


class TracedStep(NamedTuple):
    """Inputs and outputs of an inner step, in the order of `backends.CompiledStep`."""

    state: tuple[Variable, ...]
    normals: Variable  # all normals of a step, one after another
    rows: list[Variable]  # row numbers, for each group of rows that is not used whole
    fixed: list[Variable]  # settings, reference point, coordinates, inputs of the gradient
    outputs: list[Variable]
    batches: tuple[Variable, ...] = ()  # rows that the loop fetches
    fetched: tuple[FetchedRows, ...] = ()  # what these are
    n_normals: int = 1  # vectors of normals in a step
    has_logp: bool = False

    @property
    def inputs(self) -> list[Variable]:
        """All inputs."""
        return [*self.state, self.normals, *self.batches, *self.rows, *self.fixed]

    def with_fetched_rows(self, dtype: np.dtype[Any]) -> "TracedStep":
        """Let the loop fetch the rows ``array[row]`` that the step selects from its fixed inputs.

        In a model of double precision, numbers of single precision become double when they are
        fetched, not again in every product.
        """
        selections: dict[tuple[Variable, Variable], list[Variable]] = {}
        for variable in dict.fromkeys(ancestors(self.outputs)):
            if not is_row_selection(variable):
                continue
            array, row = variable.owner.inputs
            if array in self.fixed and row in self.rows:
                selections.setdefault((array, row), []).append(variable)
        batches = []
        fetched = []
        replacements = {}
        for (array, row), variables in selections.items():
            shape = (None, *array.type.shape[1:])
            batch = pt.tensor(dtype=_fetched_dtype(array, dtype), shape=shape)
            batches.append(batch)
            fetched.append(
                FetchedRows(
                    array=self.fixed.index(array),
                    group=self.rows.index(row),
                    ndim=batch.type.ndim,
                    dtype=batch.dtype,
                )
            )
            replacements.update(dict.fromkeys(variables, batch))
        return self._replace(
            outputs=clone_replace(self.outputs, replacements, rebuild_strict=False),
            batches=tuple(batches),
            fetched=tuple(fetched),
        )


def traced_step(
    update: Update, state: Any, target: Target, settings: dict[str, Any], with_logp: bool
) -> TracedStep:
    """Call ``update`` on symbolic arrays.

    Parameters
    ----------
    update : callable
        A sampler's ``update``.
    state : NamedTuple of arrays
        The number of axes and the dtype of its arrays are taken.
    target : Target
        Its gradient is traced. The number of axes of its coordinates' arrays is taken.
    settings : dict
        Settings of ``update``: numbers, or arrays of shape (d,). Their number of axes is taken.
    with_logp : bool
        Whether each step computes the log-density, even if that costs more than the gradient alone.

    Raises
    ------
    NotTraceable
        If ``update`` asks for more than one gradient.
    """
    dtype = state.position.dtype
    symbol = partial(_symbol, dtype=dtype, d=state.position.size)
    symbolic_state = type(state)(
        *(symbol(name, part) for name, part in zip(state._fields, state, strict=True))
    )
    arguments = {name: symbol(name, value) for name, value in settings.items()}
    reference_point = symbol("reference_point", state.position)
    coordinates = {name: symbol(name, array) for name, array in coordinate_arrays(target).items()}
    gradient = _SymbolicGradient(
        target.gradient.symbolic,
        target.coordinates.on_graph(coordinates),
        with_logp,
    )
    generator = _SymbolicGenerator()
    others = {name: symbol for name, symbol in arguments.items() if name != "learning_rate"}
    new, _ = update(symbolic_state, gradient, arguments["learning_rate"], generator, **others)
    sums = [
        ((reference_point - gradient.position) * gradient.gradient).sum(),  # virial
        (gradient.gradient**2).sum(),
        (new[1] ** 2).sum() if len(new) > 1 else pt.zeros((), dtype=dtype),  # of the momentum
        pt.zeros((), dtype=dtype) if gradient.logp is None else gradient.logp,
    ]
    outputs = [*(part.astype(dtype) for part in new), pt.stack(sums).astype("float64")]
    normals, outputs = generator.joined(without_shape_checks(outputs), symbolic_state.position)
    return TracedStep(
        state=symbolic_state,
        normals=normals,
        rows=gradient.rows,
        fixed=[*arguments.values(), reference_point, *coordinates.values(), *gradient.fixed],
        outputs=outputs,
        n_normals=len(generator.drawn),
        has_logp=gradient.logp is not None,
    )


def coordinate_arrays(target: Target) -> dict[str, Array]:
    """Return the arrays of a target's coordinates, by name."""
    return dict(target.coordinates.arrays)


class _SymbolicGradient:
    """Stands for a target while ``update`` is called on symbolic arrays."""

    def __init__(self, symbolic: Callable[..., Any], coordinates: Any, with_logp: bool) -> None:
        self._symbolic = symbolic
        self._coordinates = coordinates
        self._with_logp = with_logp
        self.position: Variable = None

    def draw_minibatch(self, rng: Any) -> None:
        """Return nothing: the rows are inputs of the compiled step."""

    def __call__(self, position: Variable, minibatch: None) -> tuple[None, Variable]:
        if self.position is not None:
            raise NotTraceable("update takes more than one gradient")
        self.position = self._coordinates.to_theta(position)
        self.logp, self.gradient, self.rows, self.fixed = self._symbolic(
            self.position, self._with_logp
        )
        return None, self._coordinates.pull_back(self.gradient)


class _SymbolicGenerator:
    """Stands for a generator: its normals are an input of the compiled step."""

    def __init__(self) -> None:
        self.drawn: list[Variable] = []

    def standard_normal(self, shape: Any, dtype: Any) -> Variable:
        self.drawn.append(pt.vector("normals", dtype=dtype))
        return self.drawn[-1]

    def joined(
        self, outputs: list[Variable], position: Variable
    ) -> tuple[Variable, list[Variable]]:
        """Return all normals of a step as one vector, and the outputs as a function of it."""
        if len(self.drawn) == 1:
            return self.drawn[0], outputs
        normals = pt.vector("normals", dtype=position.dtype)
        d = position.shape[0]
        parts = {drawn: normals[i * d : (i + 1) * d] for i, drawn in enumerate(self.drawn)}
        return normals, clone_replace(outputs, parts, rebuild_strict=False)


def without_shape_checks(outputs: list[Variable]) -> list[Variable]:
    """Leave out checks of shapes, for whose messages Numba takes seconds.

    Set-up has evaluated the same graph with its checks. What says that a length is one stays, as
    operations broadcast by it.
    """
    found: dict[Variable, Variable] = {}
    for node in toposort(outputs, ()):
        inputs = [found.get(v, v) for v in node.inputs]
        if isinstance(node.op, SpecifyShape) and not _tells_of_ones(node):
            found[node.outputs[0]] = inputs[0]
        elif any(new is not old for new, old in zip(inputs, node.inputs, strict=True)):
            copy = node.clone_with_new_inputs(inputs, strict=False)
            found.update(zip(node.outputs, copy.outputs, strict=True))
    return [found.get(v, v) for v in outputs]


def _tells_of_ones(node: Apply) -> bool:
    before = node.inputs[0].type.shape
    after = node.outputs[0].type.shape
    return any(new == 1 and old != 1 for old, new in zip(before, after, strict=True))


def _fetched_dtype(array: Variable, dtype: np.dtype[Any]) -> Any:
    return np.promote_types(array.dtype, dtype) if array.dtype == "float32" else array.dtype


def _symbol(name: str, value: Any, dtype: np.dtype[Any], d: int) -> Variable:
    """Return a symbolic input with as many axes as the value has.

    Axes with an entry for each of the ``d`` parameters have this length, which leaves operations
    out that only tell or check it. Other lengths may change, as the rank of a low-rank metric does.
    """
    shape = [d if length == d else None for length in np.shape(value)]
    return pt.TensorType(dtype, shape)(name)
