"""What multiplies a parameter wherever rows use it: a scale, or a factor that mixes its entries.

Knows graphs and the unknowns' shapes, no model and no data.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from pymc.pytensorf import compile
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable, equal_computations
from pytensor.graph.op import Op
from pytensor.tensor.basic import Join, get_underlying_scalar_constant_value
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Dot, Sum
from pytensor.tensor.shape import Reshape, Shape, Shape_i
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor

from pymc_sghmc.compat import ancestors, indexes_leading_axes, toposort
from pymc_sghmc.hierarchy.log_scale import log_of
from pymc_sghmc.models.unknowns import Unknowns
from pymc_sghmc.protocols import Array

__all__ = [
    "Mixing",
    "Product",
    "are_equal",
    "products",
    "sign_of",
    "told_by",
]

SIZES = (
    0.1,
    1.0,
    1.0,
    3.0,
    3.0,
    10.0,
)  # of unknowns at which a scale has to be above zero, and ...
NEAR = (0.1, 1.0)  # at which graphs are compared
LARGE = (100.0, 1e3, 1e5)  # ... at which it mustn't be below: it may overflow


Axes = tuple[int | None, ...]  # of the value, that those of a view of it are


class Mixing(NamedTuple):
    """A matrix with which the rows see correlated effects, Cz."""

    factor: Any  # C, (n, n), lower triangular, in the model's variables
    axis: int  # of the value, along which it mixes
    turned: bool  # whether C is the transpose of the variable that it is a view of
    # in the rows' graphs, each with the view of the value that it is a product of
    products: list["Product"]

    def over(self, entries: Variable) -> Variable:
        """Numbers of each of the n effects, (n,), as broadcast to the value."""
        return entries.dimshuffle(*((0, "x") if self.axis == 0 else ("x", 0)))

    def along(self, function: Callable[..., Variable], value: Variable) -> Variable:
        """Apply a function of columns, (n, m), to a value."""
        return function(value) if self.axis == 0 else function(value.T).T


class Product(NamedTuple):
    """A parameter times what multiplies it, in the rows' graphs, and the parameter alone there."""

    product: Variable
    alone: Variable


class Multiplied(NamedTuple):
    """What multiplies a parameter wherever rows use it: neither where nothing alike does."""

    scale: Variable | None = None  # with the axes of the parameter
    mixing: Mixing | None = None
    products: Sequence[Product] = ()  # all of them; none where they stand in each other


class View(NamedTuple):
    """A parameter in the rows' graphs, or what is linear in it with weights that are constant.

    Attributes
    ----------
    axes : tuple of int or None
        Which axis of the parameter each of its own axes is. None of a new one, and of one along
        which entries were added up, picked or moved.
    weighted : frozenset of int or None
        Axes of the parameter along which constants multiply it.
    scale : TensorVariable, optional
        What multiplies it so far, with the axes of the parameter.
    made_of : tuple of TensorVariable
        What that scale is the product of.
    """

    axes: Axes
    weighted: frozenset[int | None] = frozenset()
    scale: Any = None
    made_of: tuple[Variable, ...] = ()


def products(
    value: Variable, terms: Sequence[Variable], moving: set[Variable], unknowns: Unknowns
) -> Multiplied:
    """Find what multiplies ``value`` wherever it is used: a scale with its axes, or a factor."""
    reading = _Reading(value, unknowns)
    for node in toposort(terms, []):
        if isinstance(node.op, Shape | Shape_i) or moving.isdisjoint(node.inputs):
            continue
        moving.update(node.outputs)
        others = [v for v in node.inputs if v in moving and v not in reading.views]
        if not reading.understands(node, others):
            return Multiplied()
    return reading.found()


class _Reading:
    """What is known of a parameter after some nodes of the rows' graphs."""

    def __init__(self, value: Variable, unknowns: Unknowns) -> None:
        self.value = value
        self.unknowns = unknowns
        self.views = {value: View(axes=tuple(range(value.type.ndim)))}
        self.scales: dict[tuple[Variable, ...], Variable] = {}  # of views that something else uses
        self.scaled: list[Product] = []
        self.mixings: list[Mixing] = []
        self.is_nested = False  # whether a product stands in another

    def understands(self, node: Apply, others: Sequence[Variable]) -> bool:
        """Take in a node, of whose inputs ``others`` depend on unknowns and are no views.

        Returns False where the parameter is used there without any scale or factor.
        """
        viewed = [v for v in node.inputs if v in self.views]
        if not viewed:
            return True
        if len(viewed) == 1:
            [variable] = viewed
            if others:
                known = self._is_scaled(node, variable, others)
                known = known or self._is_mixed(node, variable, others)
            else:
                known = self._is_view(node, variable)
        else:
            known = not others and self._is_sum(node, viewed)
        return known or self._ends(viewed)

    def _is_view(self, node: Apply, variable: Variable) -> bool:
        """Take in a node that makes a view of another."""
        view = self.views[variable]
        axes = _axes_after(node, variable, view.axes)
        if axes is None:
            return False
        weighted = view.weighted | _weighted(node, variable, view.axes)
        self.views[node.outputs[0]] = view._replace(axes=axes, weighted=weighted)
        return True

    def _is_scaled(self, node: Apply, variable: Variable, others: Sequence[Variable]) -> bool:
        """Take in a product of a view and a scale that is above zero."""
        view = self.views[variable]
        if node.op != pt.mul or _repeats(node, variable, view.axes):
            return False
        factor = _aligned(reduce(pt.mul, others), view.axes, self.value.type.ndim)
        if factor is None or not sign_of(factor, self.unknowns).is_positive:
            return False
        self.is_nested = self.is_nested or view.scale is not None
        self.scaled.append(Product(node.outputs[0], _without(node, others)))
        self.views[node.outputs[0]] = view._replace(
            scale=factor if view.scale is None else view.scale * factor,
            made_of=(*view.made_of, *map(_root, others)),
        )
        return True

    def _is_mixed(self, node: Apply, variable: Variable, others: Sequence[Variable]) -> bool:
        """Take in a product of a view and a triangular factor."""
        view = self.views[variable]
        is_matrix = self.value.type.ndim == 2 and len(others) == 1 and _is_product(node.op)
        if not is_matrix or view.scale is not None:
            return False
        mixing = _mixing(node, variable, view.axes)
        if mixing is None or mixing.axis in view.weighted:
            return False
        if not _is_triangular(mixing, self.value, self.unknowns):
            return False
        same = [one for one in self.mixings if _is_same(one, mixing)]
        self.mixings += [] if same else [mixing]
        (same or [mixing])[0].products.append(Product(node.outputs[0], variable))
        return True

    def _is_sum(self, node: Apply, viewed: Sequence[Variable]) -> bool:
        """Take in a sum of views that nothing multiplies yet, such as differences of entries."""
        if any(self.views[v].scale is not None for v in viewed) or not _is_sum_of(node, viewed):
            return False
        self.views[node.outputs[0]] = View(axes=(None,) * node.outputs[0].type.ndim)
        return True

    def _ends(self, viewed: Sequence[Variable]) -> bool:
        """Keep the scales of views that something else uses; False where one has none."""
        views = [self.views[v] for v in viewed]
        self.scales |= {view.made_of: view.scale for view in views if view.scale is not None}
        return all(view.scale is not None for view in views)

    def found(self) -> Multiplied:
        """Return the only scale or factor, if there is one."""
        scales = list(self.scales.values())
        if len(scales) + len(self.mixings) != 1:
            return Multiplied()
        if self.mixings:
            return Multiplied(mixing=self.mixings[0], products=self.mixings[0].products)
        return Multiplied(scale=scales[0], products=[] if self.is_nested else self.scaled)


def _without(node: Apply, factors: Sequence[Variable]) -> Variable:
    """Return a product without some of its factors."""
    return reduce(pt.mul, [v for v in node.inputs if v not in factors])


def _is_product(op: Op) -> bool:
    """Whether an operation is a product of matrices."""
    return isinstance(op, Dot) or (isinstance(op, Blockwise) and isinstance(op.core_op, Dot))


def _mixing(node: Apply, view: Variable, axes: Axes) -> Mixing | None:
    """Know a product of matrices: which axis of the value is mixed, and by what."""
    if any(v.type.ndim != 2 for v in node.inputs):
        return None
    is_first = node.inputs[0] is view
    axis = axes[1 if is_first else 0]
    other = node.inputs[1 if is_first else 0]
    if axis is None:
        return None
    turned = is_first
    inner = other
    while inner.owner is not None and isinstance(inner.owner.op, DimShuffle):
        turned = not turned
        inner = inner.owner.inputs[0]
    return Mixing(other.T if is_first else other, axis, turned, [])


def _is_same(one: Mixing, other: Mixing) -> bool:
    """Whether two factors are one, of several likelihoods perhaps."""
    alike = (one.axis, one.turned) == (other.axis, other.turned)
    return alike and equal_computations([one.factor], [other.factor])


def _is_triangular(mixing: Mixing, value: Variable, unknowns: Unknowns) -> bool:
    """Whether the factor is square, lower triangular, and its diagonal positive at all points."""
    n = unknowns.shapes[unknowns.variables.index(value)][mixing.axis]
    found = list(_at_points(mixing.factor, unknowns, SIZES))
    return all(
        C.shape == (n, n) and not np.triu(C, 1).any() and (np.diag(C) > 0).all() for C in found
    )


def _root(scale: Variable) -> Variable:
    """One variable for all views of a scale."""
    while scale.owner is not None and isinstance(scale.owner.op, DimShuffle):
        scale = scale.owner.inputs[0]
    return scale


def _axes_after(node: Apply, view: Variable, axes: Axes) -> Axes | None:
    """Return the value's axes in a new view, which is linear in the old one."""
    op = node.op
    is_first = view is node.inputs[0]
    if isinstance(op, DimShuffle):
        return tuple(None if i == "x" else axes[i] for i in op.new_order)
    if op in (pt.mul, pt.neg, pt.tensor_copy) or (op == pt.true_div and is_first):
        return None if _repeats(node, view, axes) else axes
    picks_rows = isinstance(op, AdvancedSubtensor) and len(node.inputs) == 2
    if picks_rows and is_first and indexes_leading_axes(node):
        return (*[None] * node.inputs[1].type.ndim, *axes[1:])
    if _is_linear(node, view):
        return (None,) * node.outputs[0].type.ndim  # a single number may multiply it
    return None


def _is_linear(node: Apply, view: Variable) -> bool:
    """Whether a node adds up, picks or moves entries of a view, with weights that are constant."""
    op = node.op
    if isinstance(op, CumOp):
        return op.mode == "add"
    if isinstance(op, Subtensor | Reshape):
        return view is node.inputs[0]
    if isinstance(op, Join):  # whose first input may be the axis
        joined = [v for v in node.inputs if v.type.ndim == view.type.ndim]
        return all(v is view or _is_zero(v) for v in joined)
    return isinstance(op, Sum) or _is_product(op)


def _is_sum_of(node: Apply, views: Sequence[Variable]) -> bool:
    """Whether a node adds or subtracts views and nothing else."""
    is_sum = node.op in (pt.add, pt.sub)
    return is_sum and all(v in views or _is_zero(v) for v in node.inputs)


def _is_zero(variable: Variable) -> bool:
    """Whether all entries of an array are the constant zero."""
    value = get_underlying_scalar_constant_value(variable, raise_not_constant=False)
    return not isinstance(value, Variable) and not value.any()


def _repeats(node: Apply, view: Variable, axes: Axes) -> bool:
    """Whether the only entry along an axis of the value is used several times."""
    before = view.type.broadcastable
    after = node.outputs[0].type.broadcastable
    places = zip(before, after, axes, strict=True)
    return any(one and not now and axis is not None for one, now, axis in places)


def _weighted(node: Apply, view: Variable, axes: Axes) -> set[int | None]:
    """Axes of the value along which constants that multiply it may differ."""
    constants = [v for v in node.inputs if v is not view] if node.op == pt.mul else []
    return {
        axis
        for constant in constants
        for one, axis in zip(constant.type.broadcastable, axes, strict=True)
        if not one
    }


def _aligned(scale: Variable, axes: Axes, ndim: int) -> Variable | None:
    """``scale`` with the axes of the value that it multiplies a view of, or None."""
    order: list[int | str] = ["x"] * ndim
    for place, axis in enumerate(axes):
        if scale.type.broadcastable[place]:
            continue
        if axis is None:
            return None
        order[axis] = place
    return scale.dimshuffle(order)


def told_by(graphs: Sequence[Variable]) -> list[Variable]:
    """Return the inputs of graphs, other than constants and data of the model."""
    leaves = (v for v in dict.fromkeys(ancestors(graphs)) if v.owner is None)
    return [v for v in leaves if not isinstance(v, Constant | SharedVariable)]


class Sign(NamedTuple):
    """What values of a scale say of its sign."""

    is_positive: bool
    comes_to_zero: bool  # at some points, by rounding alone: its logarithm is known there


def sign_of(scale: Variable, unknowns: Unknowns) -> Sign:
    """Look at a scale at points of all sizes, where it is to be above zero."""
    values = list(_at_points(scale, unknowns, SIZES))
    is_negative = not all((value >= 0).all() for value in values)
    if is_negative or any((value < 0).any() for value in _at_points(scale, unknowns, LARGE)):
        return Sign(is_positive=False, comes_to_zero=False)
    if all((value > 0).all() for value in values):
        return Sign(is_positive=True, comes_to_zero=False)
    is_known = all(np.isfinite(log).all() for log in _at_points(log_of(scale), unknowns, SIZES))
    return Sign(is_positive=is_known, comes_to_zero=is_known)


def are_equal(one: Variable, other: Variable, unknowns: Unknowns) -> bool:
    """Whether two graphs have the same values at points near zero, up to rounding."""
    rounding = np.sqrt(np.finfo(one.dtype).eps)
    differences = _at_points(one - other, unknowns, NEAR)
    sizes = _at_points(one, unknowns, NEAR)
    return all(
        np.abs(difference).max(initial=0.0) <= rounding * np.abs(size).max(initial=0.0)
        for difference, size in zip(differences, sizes, strict=True)
    )


def _at_points(graph: Variable, unknowns: Unknowns, sizes: Sequence[float]) -> Iterator[Array]:
    """Yield values of a graph at unknowns of these sizes, with either sign."""
    shapes = dict(zip(unknowns.variables, unknowns.shapes, strict=True))
    used = told_by([graph])
    if not shapes.keys() >= set(used):
        yield np.array(np.nan)
        return
    function = compile(used, graph, mode="FAST_COMPILE")
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        for size in sizes:
            point: list[Any] = [rng.normal(0, size, shapes[v]) for v in used]
            for sign in (1, -1):
                try:
                    yield function(
                        *((sign * x).astype(v.dtype) for x, v in zip(point, used, strict=True))
                    )
                except np.linalg.LinAlgError:  # no factor of a matrix that overflows
                    yield np.array(np.nan)
