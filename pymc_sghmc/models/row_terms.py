"""What control variates can remember of each row, so that a minibatch needs no second visit to θ̂.

The log-likelihood of a row depends on the unknowns through a few numbers ζ, such as its linear
predictor, and ∇Σ wᵢ ℓᵢ = Jᵀ(w c) with cᵢ = ∂ℓᵢ/∂ζᵢ and J = ∂ζ/∂θ. Remember ĉᵢ of all rows at the
centre θ̂: where J is the same everywhere, as for Xβ, the difference of the gradients at θ and θ̂ of
the same rows is Jᵀ(w (c − ĉ)), at the price of one gradient. Where it isn't, as for what all rows
share or for (τz)[group], Jᵀ(w ĉ) is taken at θ̂, without the way from there to ℓ.

Knows graphs of row-wise log-likelihoods; knows no model, no data and no sampler. A graph is cut
only where every operation is known to keep rows apart; of all others it says None.
"""

import math

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.subtensor import AdvancedSubtensor
from pytensor.tensor.variable import TensorVariable

from pymc_sghmc.compat import index_entries
from pymc_sghmc.models.frontier import frontier, is_multiple, shared_zetas
from pymc_sghmc.models.graphs import slice_rows
from pymc_sghmc.models.linearity import fixed_jacobians, simplified
from pymc_sghmc.models.row_axes import row_axes

__all__ = [
    "ByZeta",
    "RowTerms",
    "by_zeta",
    "difference",
    "row_cuts",
    "row_terms",
    "summed_if_shared",
]

MAX_NUMBERS = 16  # remembered of each row, besides its log-likelihood


class Cut(NamedTuple):
    """One ζ: through it the log-likelihood of a row depends on the unknowns."""

    zeta: Any  # (n, ...), or (1, ...) where all rows share it
    cotangent: Any  # c = ∂ℓ/∂ζ of each row, (n, ...)
    shape: tuple[int, ...]  # of c of one row
    fixed: bool  # whether ∂ζ/∂θ is the same at every θ
    # of all cuts of a group: what rows share, by way of which they see unknowns
    through: Sequence[TensorVariable] = ()

    @property
    def size(self) -> int:
        """Numbers in c of one row."""
        return math.prod(self.shape)

    @property
    def shared(self) -> bool:
        """Whether all rows share it."""
        return self.zeta.type.broadcastable[0]

    @property
    def flat_zeta(self) -> TensorVariable:
        """ζ as a matrix, (n or 1, size)."""
        return self.zeta.reshape((1 if self.shared else self.zeta.shape[0], self.size))


class RowTerms(NamedTuple):
    """What to remember of each row at the centre, and how to make use of it."""

    # of each group of rows (n, 1 + numbers): ℓ, then the cotangents side by side
    terms: list[TensorVariable]
    variables: list[TensorVariable]
    cuts: list[list[Cut]]  # of each group, a list of Cut


def row_terms(
    log_likelihoods: Sequence[TensorVariable],
    variables: Sequence[TensorVariable],
    batches: Sequence[Sequence[TensorVariable]],
    point: Mapping[str, Any],
) -> RowTerms | None:
    """Cut log-likelihoods where a row depends on few numbers.

    Parameters
    ----------
    log_likelihoods : list of TensorVariable
        Of each group of rows, (n,): computed row by row.
    variables : list of TensorVariable
        The unknowns.
    batches : list of list of TensorVariable
        Of each group, the inputs that hold its data, rows first.
    point : dict
        Values of the unknowns by name; their shapes count.

    Returns
    -------
    RowTerms or None
        None where an operation isn't known to keep rows apart, where a row would need more than
        ``MAX_NUMBERS`` numbers, or where the unknowns enter a row in no simpler way.
    """
    found = row_cuts(log_likelihoods, variables, batches, point)
    if found is None:
        return None
    _, cuts = found
    terms = [
        pt.concatenate(
            [ll[:, None], *(cut.cotangent.reshape((ll.shape[0], cut.size)) for cut in group)],
            axis=1,
        )
        for ll, group in zip(log_likelihoods, cuts, strict=True)
    ]
    return RowTerms(terms, list(variables), cuts)


def row_cuts(
    log_likelihoods: Sequence[TensorVariable],
    variables: Sequence[TensorVariable],
    batches: Sequence[Sequence[TensorVariable]],
    point: Mapping[str, Any],
    linear: bool = False,
) -> tuple[list[TensorVariable], list[list[Cut]]] | None:
    """Return log-likelihoods without PyMC's checks, and the cuts of each group, or None."""
    # Checks look at all rows but let values through: they are no part of a cut.
    unchecked = [_without_checks(log_likelihood) for log_likelihood in log_likelihoods]
    if linear:
        unchecked = [simplified(ll, fixed_jacobians(ll, variables)) for ll in unchecked]
    groups = zip(unchecked, batches, strict=True)
    cuts = [_cuts(ll, variables, own, point, linear) for ll, own in groups]
    return None if None in cuts else (unchecked, cuts)  # type: ignore[return-value]


def difference(
    rows: RowTerms,
    weights: Sequence[TensorVariable],
    cached: Sequence[TensorVariable],
    centre: Sequence[TensorVariable],
) -> list[TensorVariable]:
    """Difference between θ and θ̂ of the gradient of the weighted log-likelihood of some rows.

    Parameters
    ----------
    rows : RowTerms
    weights : list of TensorVariable
        Of each group, (n,).
    cached : list of TensorVariable
        Of each group, ``rows.terms`` of the same rows at θ̂ without the first column.
    centre : list of TensorVariable
        θ̂, like ``rows.variables``, which are θ.

    Returns
    -------
    list of TensorVariable
        With respect to each variable.
    """
    moving = {}
    resting = {}
    for cuts, w, old in zip(rows.cuts, weights, cached, strict=True):
        start = 0
        for cut in cuts:
            c = cut.cotangent
            c_hat = old[:, start : start + cut.size]
            c_hat = c_hat[:, 0] if c.ndim == 1 else c_hat.reshape(c.shape, ndim=c.ndim)
            start += cut.size
            by_row = w.dimshuffle(0, *["x"] * (c.ndim - 1))
            # A copy of ζ, so that what one ζ owes to another isn't counted twice
            if cut.fixed:
                moving[pt.tensor_copy(cut.zeta)] = summed_if_shared(cut, by_row * (c - c_hat))
            else:
                moving[pt.tensor_copy(cut.zeta)] = summed_if_shared(cut, by_row * c)
                resting[pt.tensor_copy(cut.zeta)] = summed_if_shared(cut, by_row * c_hat)
    gradient = _pull_back(rows.variables, moving)
    if resting:
        to_centre = dict(zip(rows.variables, centre, strict=True))
        at_centre = clone_replace(_pull_back(rows.variables, resting), to_centre)
        gradient = [a - b for a, b in zip(gradient, at_centre, strict=True)]
    return gradient


def summed_if_shared(cut: Cut, cotangents: TensorVariable) -> TensorVariable:
    """Cotangents of ζ from those of each row."""
    total = cotangents.sum(axis=0, keepdims=True) if cut.shared else cotangents
    return total.astype(cut.zeta.dtype)


def _pull_back(
    variables: Sequence[TensorVariable], cotangents: Mapping[TensorVariable, TensorVariable]
) -> list[TensorVariable]:
    """Jᵀ times cotangents of several ζ, for each variable."""
    if not cotangents:
        return [variable.zeros_like() for variable in variables]
    return pt.grad(None, variables, known_grads=cotangents, disconnected_inputs="ignore")


def _without_checks(log_likelihood: TensorVariable) -> TensorVariable:
    copy = FunctionGraph(outputs=[log_likelihood], clone=True, copy_inputs=False)
    include = ("canonicalize", "stabilize", "local_remove_check_parameter")
    rewritten = rewrite_graph(copy, include=include, custom_rewrite=in2out(_slices_first))
    return rewritten.outputs[0]


@node_rewriter([AdvancedSubtensor])  # type: ignore[untyped-decorator]
def _slices_first(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Write x[rows, a:b] as x[:, a:b][rows], which picks entries of the leading axis alone."""
    entries = index_entries(node)
    if entries is None or len(entries) < 2 or isinstance(entries[0], slice):
        return None
    rows, *others = entries
    if rows.type.ndim != 1 or not all(isinstance(entry, slice) for entry in others):
        return None
    return [node.inputs[0][(slice(None), *others)][rows]]


class ByZeta(NamedTuple):
    """The log-likelihood ℓ of each row as a function of its ζ, with a variable for each of these.

    Its gradient is that of a sum over rows, as the variables of a row are its own.
    """

    zetas: list[TensorVariable]  # (n, ...) each
    log_likelihood: TensorVariable  # (n,)
    gradients: list[TensorVariable]  # by each ζ
    stands_for: dict[TensorVariable, TensorVariable]  # of each variable, its ζ in the model's graph

    def gradients_of(self, value: TensorVariable) -> list[TensorVariable]:
        """Return the gradients, by each ζ, of a number of each row that depends on these."""
        return pt.grad(value.sum(), self.zetas, disconnected_inputs="ignore")


def by_zeta(
    graph: TensorVariable, zetas: Sequence[TensorVariable], through: Sequence[TensorVariable]
) -> ByZeta:
    """Write the log-likelihood of each row as a function of its ζ.

    Parameters
    ----------
    graph : TensorVariable
        ℓ of each row, (n,).
    zetas, through : list of TensorVariable
        As of `Cut`.
    """
    found = [pt.tensor(dtype=z.dtype, shape=(None, *z.type.shape[1:])) for z in zetas]
    given = dict(zip(zetas, found, strict=True))
    if through:
        own = {x: z for z, x in given.items() if _is_unknown(z)}
        unknowns = {z.owner.inputs[0]: x for x, z in own.items()}
        given |= {v: vectorize_graph(v, unknowns)[:, 0] for v in through}
    [copy] = clone_replace([graph], given, rebuild_strict=False)
    back = dict(zip(found, zetas, strict=True))
    if through:
        back |= {x: pt.broadcast_to(z, (graph.shape[0], *z.shape[1:])) for x, z in own.items()}
    gradients = pt.grad(copy.sum(), found, disconnected_inputs="ignore")
    return ByZeta(zetas=found, log_likelihood=copy, gradients=gradients, stands_for=back)


def _is_unknown(zeta: TensorVariable) -> bool:
    node = zeta.owner
    return node is not None and isinstance(node.op, DimShuffle) and node.inputs[0].owner is None


def _cuts(
    graph: TensorVariable,
    variables: Sequence[TensorVariable],
    batches: Sequence[TensorVariable],
    point: Mapping[str, Any],
    linear: bool,
) -> list[Cut] | None:
    fixed = fixed_jacobians(graph, variables)
    found = frontier(graph, row_axes([graph], dict.fromkeys(batches, 0)), fixed)
    if found is None:
        return None
    by_row, shared = found
    for of_all, through in shared_zetas(shared, fixed, variables if linear else ()):
        # nor is a multiple of one, row by row, another
        zetas = [v for v in by_row if not is_multiple(v, through or of_all, fixed)] + of_all
        shapes = _shapes(zetas, variables, point)
        if sum(map(_size, shapes)) <= MAX_NUMBERS and (
            all(fixed.get(z, True) for z in zetas) or not linear
        ):
            cotangents = _cotangents(graph, zetas, through)
            return [
                Cut(z, c, s, fixed.get(z, True), through)
                for z, c, s in zip(zetas, cotangents, shapes, strict=True)
            ]
    return None


def _shapes(
    zetas: Sequence[TensorVariable], variables: Sequence[TensorVariable], point: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """Shape of one row of each ζ, with None where the graph doesn't tell."""
    typed = {v: pt.tensor(dtype=v.dtype, shape=np.shape(point[v.name])) for v in variables}
    return [zeta.type.shape[1:] for zeta in slice_rows(zetas, typed, None, None)]


def _size(shape: tuple[Any, ...]) -> float:
    """Numbers in a shape; infinite where it isn't known."""
    return math.inf if None in shape else math.prod(shape)


def _cotangents(
    graph: TensorVariable, zetas: Sequence[TensorVariable], through: Sequence[TensorVariable]
) -> list[TensorVariable]:
    """∂ℓ/∂ζ of each row."""
    by_row = by_zeta(graph, zetas, through)
    rows = graph.zeros_like()
    return [
        c + rows.dimshuffle(0, *["x"] * (c.ndim - 1)) if c.type.broadcastable[0] else c
        for c in clone_replace(by_row.gradients, by_row.stands_for, rebuild_strict=False)
    ]
