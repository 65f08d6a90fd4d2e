"""Jumps of a log-density, which gradients can't see.

Where an unknown crosses a condition, such as the place of a change, the density may jump. There is
no gradient there, and a sampler without a Metropolis test draws from another density, at the right
temperature. Knows graphs and functions of a position; no steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pymc.logprob.utils import ParameterValueError
from pytensor import scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.type import TensorType
from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.compat import toposort
from pymc_sghmc.protocols import Array

__all__ = ["conditional_unknowns", "jumping_unknowns"]

ROUNDING = (ps.Ceil, ps.Floor, ps.IntDiv, ps.Mod, ps.RoundHalfAwayFromZero, ps.RoundHalfToEven,
            ps.Sign, ps.Trunc)  # fmt: skip
# Functions that are constant somewhere, or have steps.
FLAT = (*ROUNDING, ps.Abs, ps.Cast, ps.Clip, ps.ScalarMaximum, ps.ScalarMinimum, ps.Switch)
N_CELLS = 20  # of a line; the least even one is looked into
SCALES = 3.0, 0.1  # of the line, times 1 + |θ|
JITTERS = 0.5, 0.1, 0.02, 0.0  # at the starting point itself both sides may happen to be equal
# Of a change, what is left when its interval is 2⁻¹² or 2⁻⁴⁰ as long: nothing, unless it is a jump.
N_HALVINGS = 40
FEW_HALVINGS = 12
REMAINS = 1e-3
REMAINS_OF_FEW = 1 / 256
ROUND_OFF = 1e4  # times the precision


def conditional_unknowns(
    graph: TensorVariable, unknowns: Sequence[TensorVariable]
) -> list[TensorVariable]:
    """Return the parameters on which a condition, an index or a rounded number depends.

    Conditions that bound the support don't count: beyond it the density is zero. Nor do conditions
    that hold almost nowhere, such as ``eq(p, 0)`` of a probability: they are there for rounding.
    """
    moved_by = {unknown: {unknown} for unknown in unknowns}
    flat: set[Variable] = set()  # variables that may be constant on a set of positive probability
    rare: set[Variable] = set()  # conditions that hold almost nowhere
    jumps_with: set[Variable] = set()
    for node in toposort([graph], []):
        if isinstance(node.op, Shape | Shape_i):
            continue
        moving = [v for v in _inputs_that_matter(node) if v in moved_by]
        if not moving:
            continue
        movers = set().union(*(moved_by[v] for v in moving))
        moved_by.update(dict.fromkeys(node.outputs, movers))
        if _may_be_flat(node, flat, rare):
            flat.update(node.outputs)
        if _holds_almost_nowhere(node, moving, flat, rare):
            rare.update(node.outputs)
        elif any(_is_continuous(v) for v in node.outputs):
            steps = [v for v in moving if not _is_continuous(v) and v not in rare]
            if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ROUNDING):
                steps = moving
            jumps_with.update(*(moved_by[v] for v in steps))
    return [unknown for unknown in unknowns if unknown in jumps_with]


def _inputs_that_matter(node: Apply) -> list[Variable]:
    """Return the inputs by which the value may jump inside the support."""
    if isinstance(node.op, CheckAndRaise):
        return node.inputs[:1]
    is_switch = isinstance(getattr(node.op, "scalar_op", None), ps.Switch)
    if is_switch and any(map(_is_nowhere, node.inputs[1:])):
        return node.inputs[1:]
    return node.inputs


def _may_be_flat(node: Apply, flat: set[Variable], rare: set[Variable]) -> bool:
    """Whether a result may be constant on a set of positive probability, as ``maximum(x, 0)``."""
    scalar_op = getattr(node.op, "scalar_op", None)
    if isinstance(scalar_op, ps.Switch) and node.inputs[0] in rare:
        return any(v in flat for v in node.inputs[1:])
    has_inner_graph = hasattr(node.op, "fgraph")
    return has_inner_graph or isinstance(scalar_op, FLAT) or any(v in flat for v in node.inputs)


def _holds_almost_nowhere(
    node: Apply, moving: list[Variable], flat: set[Variable], rare: set[Variable]
) -> bool:
    """Whether a node is an equation of a continuous variable, or such a condition reshaped."""
    if isinstance(node.op, DimShuffle):
        return node.inputs[0] in rare
    is_equation = isinstance(getattr(node.op, "scalar_op", None), ps.EQ)
    return is_equation and all(_is_continuous(v) and v not in flat for v in moving)


def _is_continuous(variable: Variable) -> bool:
    return isinstance(variable.type, TensorType) and variable.type.dtype.startswith("float")


def _is_nowhere(variable: Variable) -> bool:
    """Whether a branch is log 0."""
    while variable.owner is not None and isinstance(variable.owner.op, Elemwise | DimShuffle):
        [variable, *others] = variable.owner.inputs
        if others:
            return False
    return isinstance(variable, Constant) and bool(np.all(np.isneginf(variable.data)))


def jumping_unknowns(
    logp: Callable[[Array], Any],
    start: Array,
    unknowns: Mapping[str, slice],
    reach: Array | None = None,
) -> list[str]:
    """Return the names of the unknowns at which ``logp(position)`` jumps, around a starting point.

    Parameters
    ----------
    logp : callable
    start : array of shape (d,)
    unknowns : dict of {str: slice}
        Names of those in question, and where they lie in the position.
    reach : array of shape (d,), optional
        How far a chain comes from the starting point. By default nothing is known of that.
    """
    rng = np.random.default_rng(0)

    def at(position: Array) -> float:
        try:
            with np.errstate(all="ignore"):
                return float(logp(position.astype(start.dtype)))
        except ParameterValueError:
            return np.nan

    jittered = (start + jitter * rng.standard_normal(start.shape) for jitter in JITTERS)
    centre = next((position for position in jittered if np.isfinite(at(position))), start)
    precision = np.finfo(start.dtype).eps
    found = []
    for name, where in unknowns.items():
        way = np.zeros(start.shape)
        signs = rng.choice([-1.0, 1.0], way[where].shape)
        if reach is None:
            way[where] = signs * (1 + np.abs(centre[where]))
            lines = [scale * way for scale in SCALES]
        else:
            way[where] = signs * reach[where]
            lines = [way]
        if any(_jumps(lambda t, w=line: at(centre + t * w), precision) for line in lines):
            found.append(name)
    return found


def _jumps(density: Callable[..., float], precision: float) -> bool:
    """Tell whether ``density(t)`` jumps somewhere between −1 and 1.

    A grid shows where the density changes least evenly. Halving the interval there again and again
    makes the change vanish, unless it is a jump. Values that aren't finite are left alone.
    """
    grid, width = np.linspace(-1, 1, N_CELLS + 1, retstep=True)
    values = np.array([density(t) for t in grid])
    with np.errstate(invalid="ignore", over="ignore"):
        changes = np.diff(values)
        padded = np.pad(changes, 1, mode="edge")
        slopes = (padded[:-2] + padded[2:]) / 2 / width  # of the neighbouring cells
        uneven = np.abs(changes - slopes * width)
    uneven = np.nan_to_num(uneven, nan=-1.0, posinf=-1.0)
    k = np.argmax(uneven)
    a, b = grid[k : k + 2]
    return _remains(density, a, b, slopes[k], precision)


def _remains(
    density: Callable[[float], float], a: float, b: float, slope: float, precision: float
) -> bool:
    """Tell whether the change from a to b, but for the slope, remains in ever smaller intervals."""
    low, high = (density(t) - slope * t for t in (a, b))
    first = abs(high - low)
    for n in range(N_HALVINGS):
        if n == FEW_HALVINGS and abs(high - low) < REMAINS_OF_FEW * first:
            return False
        middle = (a + b) / 2
        value = density(middle) - slope * middle
        if not np.isfinite([low, value, high]).all():
            return False
        if abs(value - low) > abs(high - value):
            b = middle
            high = value
        else:
            a = middle
            low = value
    return abs(high - low) > max(REMAINS * first, ROUND_OFF * precision * max(abs(low), abs(high)))
