"""Effects of groups found in a model's graph: a row sees its own group's coefficients alone.

Knows models and their graphs, no quadrature and no chain.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

from pymc.model import Model
from pytensor.graph.basic import Apply
from pytensor.graph.replace import clone_replace
from pytensor.tensor.random.op import RandomVariable

from pymc_sghmc.checks import quoted
from pymc_sghmc.compat import ancestors, index_entries, toposort
from pymc_sghmc.hierarchy.clustered_rows import ClusteredRows, ClusterEffect, axis_of, refused
from pymc_sghmc.models.graphs import array_of, data_leaves, is_fixed, slice_rows
from pymc_sghmc.models.row_axes import RowAxis, row_axes

__all__ = ["Clustering", "clustered_rows", "named_effects"]


class Clustering(NamedTuple):
    """How rows depend on effects of groups."""

    likelihood: int  # which one has the rows
    indices: list[Any]  # number of the group of each row, once for each place that picks by it
    rows: ClusteredRows


def named_effects(
    model: Model, names: Iterable[str], point: Mapping[str, Any]
) -> list[ClusterEffect]:
    """Return the parameters of these names, as effects without an axis yet.

    Raises
    ------
    ValueError
        If one isn't an unknown with several entries.
    """
    found = []
    given = list(names)
    for name in given:
        rv = next((rv for rv in model.free_RVs if rv.name == name), None)
        if rv is None:
            known = [rv.name for rv in model.free_RVs if rv.type.ndim > 0]
            behind = ancestors([v for v in model.deterministics if v.name == name])
            made_of = [rv.name for rv in model.free_RVs if rv.name in known and rv in behind]
            of = f", but computed from {quoted(made_of)}" if made_of else ""
            raise ValueError(
                f"marginalize={given!r}: {name!r} is no parameter of the model{of}. Name the "
                "parameters that have a prior of their own and several entries: "
                f"{quoted(known) or 'there are none'}."
            )
        value = model.rvs_to_values[rv]
        if not value.dtype.startswith("float"):
            raise ValueError(
                f"marginalize={given!r}: {name!r} is discrete. Name effects of groups."
            )
        if value.type.ndim == 0:
            raise ValueError(
                f"marginalize={given!r}: {name!r} is one number. Name effects of groups, with an "
                "entry for each group."
            )
        [prior] = model.logp(vars=[rv], sum=False)
        op = rv.owner.op
        plain = model.rvs_to_transforms[rv] is None
        is_known = plain and isinstance(op, RandomVariable)
        parameters = model.replace_rvs_by_values(op.dist_params(rv.owner)) if is_known else []
        found.append(
            ClusterEffect(
                rv=rv,
                value=value,
                axis=0,
                shape=np.shape(point[value.name]),
                prior=prior,
                parameters=parameters,
            )
        )
    return found


def clustered_rows(
    model: Model,
    effects: Sequence[ClusterEffect],
    terms: Sequence[pt.TensorVariable],
    others: Sequence[pt.TensorVariable],
    shapes: Mapping[str, tuple[int, ...]],
) -> Clustering:
    """Find how rows depend on effects.

    Parameters
    ----------
    model : pm.Model
    effects : list of ClusterEffect
    terms : list of TensorVariable
        Log-likelihood by row of each group of rows.
    others : list of TensorVariable
        The rest of the model's log-density, that of the effects left out.
    shapes : dict of {str: tuple}
        Of the model's unknowns.
    """
    values = {effect.value: effect for effect in effects}
    for effect in effects:
        if effect.value in ancestors(others):
            raise refused(
                effect.rv.name,
                "another parameter, a potential or a likelihood that isn't cut into "
                "minibatches depends on it, too",
            )
        if others_in := [
            e.rv.name for e in effects if e is not effect and e.value in ancestors([effect.prior])
        ]:
            raise refused(effect.rv.name, f"its prior depends on {quoted(others_in)}")
    using = [k for k, term in enumerate(terms) if not values.keys().isdisjoint(ancestors([term]))]
    if len(using) != 1:
        reason = (
            "no rows depend on it"
            if not using
            else ("likelihoods with different numbers of rows depend on it")
        )
        raise refused(effects[0].rv.name, reason)
    [k] = using
    term = terms[k]
    placed: list[ClusterEffect] = []
    for i, effect in enumerate(effects):
        effect, term = _placed(effect, term, placed, effects[i + 1 :])
        placed.append(effect)
    by_node = {
        node: (node, axis) for effect in placed for node, axis in _picks(effect, term, placed)
    }
    picked = list(by_node.values())
    inputs = [node.outputs[0].type() for node, _ in picked]
    new = {node.outputs[0]: x for (node, _), x in zip(picked, inputs, strict=True)}
    [term] = clone_replace([term], new, rebuild_strict=False)
    for effect in placed:
        if effect.value in ancestors([term]):
            raise refused(
                effect.rv.name, "rows don't see it by the number of their group alone, as u[group]"
            )
    views = [(node.inputs[0], axis, index_entries(node)) for node, axis in picked]
    indices = [entries[axis] for _, axis, entries in views]  # type: ignore[index]
    sizes = {effect.shape[effect.axis] for effect in placed}
    if len(sizes) > 1:
        fewest = min(placed, key=lambda effect: effect.shape[effect.axis])
        raise refused(
            fewest.rv.name, f"the effects have different numbers of groups, {sorted(sizes)}"
        )
    [n_groups] = sizes
    wanted = [view for view, _, _ in views] + [effect.prior for effect in placed]
    needed = set(ancestors(wanted))
    for value in set(model.value_vars) & needed - values.keys():
        if n_groups in shapes[value.name]:
            raise refused(
                placed[0].rv.name,
                f"it is combined with {value.name!r}, which has an entry for each "
                "group, too. Name both, if both are effects of these groups",
            )
    n_seen = _n_seen(views, placed, model, shapes)
    rows = ClusteredRows(
        effects=placed,
        index=indices[0],
        picked=views,
        term=term,
        inputs=inputs,
        n_groups=n_groups,
        n_seen=n_seen,
    )
    return Clustering(likelihood=k, indices=indices, rows=rows)


def _n_seen(
    views: Sequence[tuple[Any, int, Any]],
    effects: Sequence[ClusterEffect],
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
) -> int:
    """Numbers of one group in all that rows pick from."""
    held = {v: np.zeros(shapes[v.name], dtype=v.dtype) for v in model.value_vars}
    held |= {e.value: np.zeros(e.shape, dtype=e.value.dtype) for e in effects}
    found = list(dict.fromkeys(view for view, _, _ in views))
    needed = [{v: x for v, x in held.items() if v in ancestors([view])} for view in found]
    sizes = [view.size.eval(x, mode="FAST_COMPILE") for view, x in zip(found, needed, strict=True)]
    return sum(map(int, sizes)) // effects[0].shape[effects[0].axis]


def _placed(
    effect: ClusterEffect,
    term: pt.TensorVariable,
    placed: Sequence[ClusterEffect],
    left: Sequence[ClusterEffect],
) -> tuple[ClusterEffect, pt.TensorVariable]:
    """Find the axis of an effect on which groups lie; free its length, in the term, too.

    Effects that are ``left``, which rows may see combined with it, are taken to have theirs where
    they have as many entries.
    """
    if effect.value not in ancestors([term]):
        raise refused(effect.rv.name, "the rows of the other effects don't depend on it")
    for axis in map(int, np.argsort(effect.shape)[::-1]):  # most entries first
        count = effect.shape[axis]
        shape: list[int | None] = list(effect.shape)
        shape[axis] = None
        value = effect.value.type.clone(shape=tuple(shape))(effect.value.name)
        wanted = [term, effect.prior, *effect.parameters]
        new = {effect.value: value}
        one = effect._replace(axis=axis, value=value)
        cloned = slice_rows(wanted, new, count, value.shape[axis], {one.axis_from_last})
        loose, prior, *parameters = cloned
        leaves = data_leaves(pt.add(loose.sum(), prior.sum()))
        shapes = {leaf: np.shape(array_of(leaf)) for leaf in leaves}
        tables = {v: 0 for v, s in shapes.items() if s[0] == count}
        tables |= {v: axis for v, s in shapes.items() if s == tuple(effect.shape)}
        one = one._replace(prior=prior, parameters=parameters, tables=tables)
        alike = [e._replace(axis=e.shape.index(count)) for e in left if count in e.shape]
        if _picks(one, loose, [*placed, one, *alike]):
            break
    else:
        raise refused(
            effect.rv.name,
            "rows don't pick the numbers of their group from it, as u[group]; u[a][b] is u[a[b]]",
        )
    if not one.is_normal and not isinstance(axis_of(one.prior, one), int):
        raise refused(one.rv.name, "its prior isn't computed group by group")
    return one, loose


def _picks(
    effect: ClusterEffect, term: pt.TensorVariable, effects: Sequence[ClusterEffect]
) -> list[tuple[Apply, int]]:
    """Nodes that pick an effect's entries, maybe combined with others', with the axis of groups."""
    axes: dict[Any, RowAxis] = {}
    found = []
    for one in effects:
        axes |= one.axes
    axes = row_axes([term], axes)
    for node in toposort([term], []):
        axis = axes.get(node.inputs[0]) if node.inputs else None
        entries = index_entries(node)
        if entries is None or not isinstance(axis, int) or axis >= len(entries):
            continue
        if effect.value not in ancestors(node.inputs[:1]):
            continue
        by_row = entries[axis]
        plain = all(i == axis or _is_plain(entry) for i, entry in enumerate(entries))
        known = getattr(by_row, "ndim", 0) == 1 and not _unknown(by_row, effect)
        if plain and known and not is_fixed(by_row):  # an entry for each row
            found.append((node, axis))
    return found


def _is_plain(entry: Any) -> bool:
    return isinstance(entry, slice) or getattr(entry, "ndim", 0) == 0


def _unknown(variable: pt.TensorVariable, effect: ClusterEffect) -> bool:
    return effect.value in ancestors([variable]) or not variable.dtype.startswith(("int", "uint"))
