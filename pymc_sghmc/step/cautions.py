"""What a step says before it samples, or as it begins: warnings, and what it has found.

Knows gradients, models and settings; changes nothing.
"""

import logging
import warnings

from functools import partial

import numpy as np

from pymc.stats.convergence import SamplerWarning, WarningType

from pymc_sghmc.hierarchy.centring import centring_of
from pymc_sghmc.hierarchy.marginal import marginal_of
from pymc_sghmc.hierarchy.placement import TOLERANCE
from pymc_sghmc.models.graphs import minibatch_outputs
from pymc_sghmc.models.jumps import jumping_unknowns
from pymc_sghmc.step.explain import suspects
from pymc_sghmc.tuning.budget import MANY
from pymc_sghmc.tuning.chain_tuning import ByHand

__all__ = [
    "begin",
    "change",
    "notice",
    "refuse_missing_values",
    "tell",
    "warn_of_jumps",
    "warn_of_other_steps",
]

_log = logging.getLogger("pymc.sghmc")  # below PyMC's own, which shows it

WRONG = 0.1  # posterior sds by which the gradient may be off as nodes are few
MANY_VALUES = 100_000  # of effects in a draw, which memory may not hold
MANY_ROWS = 1000  # more aren't needed to see a jump
FEW_DRAWS = 50  # of tuning, too few to measure by
STACKLEVEL = 4  # a function here, the step's and the sampler's __init__, and who calls it


def warn_of_other_steps(sampler, model, density, data):
    """Warn of other steps beside this one that see other data."""
    others = ", ".join(name for name, _ in density.given_types)
    if others and minibatch_outputs([model.logp()]):
        warnings.warn(
            f"{sampler} leaves {others} to other steps, and the model has a "
            "pm.Minibatch. Unless these are stochastic-gradient steps, too, they sample a density "
            "that changes at every call, and the posterior is wrong: use the model of all data "
            "with batch_size.",
            UserWarning,
            stacklevel=STACKLEVEL,
        )
    if data is not None and density.likelihood_needs_others:
        needed = ", ".join(density.needed_by_likelihood)
        warnings.warn(
            f"{sampler}(data=...) leaves {needed} to other steps. These see only the "
            "rows that the model itself holds, and make the posterior wrong, unless they are "
            "stochastic-gradient steps with the same data.",
            UserWarning,
            stacklevel=STACKLEVEL,
        )


def warn_of_jumps(sampler, gradient, unknowns, position):
    """Warn where the log-density jumps with an unknown, which no gradient sees."""
    if not gradient.density.conditional:
        return
    minibatch = gradient.order.probe(np.random.default_rng(0))
    some = tuple(idx[:: 1 + len(idx) // MANY_ROWS] for idx in minibatch.rows)
    minibatch = minibatch._replace(rows=some)
    places = {name: unknowns.places[name] for name in gradient.density.conditional}
    jumping = jumping_unknowns(lambda theta: gradient(theta, minibatch)[0], position, places)
    if jumping:
        warnings.warn(
            f"{sampler}: the log-density jumps where a condition, an index or a rounded "
            f"number changes with {', '.join(jumping)}. Gradients don't see it, so that the "
            "posterior comes out wrong, whatever its temperature. Make the condition smooth, such "
            "as pm.math.sigmoid((x - c) / width) for x > c, or leave these unknowns out of vars "
            "and give them to pm.Slice or pm.Metropolis.",
            UserWarning,
            stacklevel=STACKLEVEL,
        )


def begin(sampler, data):
    """Say that a set-up begins; refuse minibatches of one row, of which noise can't be measured."""
    if 1 in data.noisy_batch_sizes:
        raise ValueError(
            "batch_size=1: automatic settings need at least 2 rows in a minibatch to measure "
            "how they differ. Raise batch_size."
        )
    _log.info(f"Setting up {sampler}...")


def refuse_missing_values(data):
    """Refuse data with missing values, where the density isn't finite."""
    if data.odd_values() == "missing values":
        raise ValueError(
            "The data of the likelihood have missing values. Drop these rows, or impute them "
            "beforehand."
        ) from None


def tell(sampler, tuner, tuning, learning_rate, seconds):
    """Log what was set up and chosen, and warn where there is no mode."""
    kinds = "plain minibatches", "control variates", "second-order control variates"
    kind = kinds[tuning.order]
    kind = "all data" if tuner.gradient.is_exact else kind
    shape = tuner.setup.metric.kind
    settings = f"learning_rate={learning_rate:.3g}"
    if tuning.friction is not None:
        settings += f", friction={tuning.friction:.3g}"
    d = tuner.gradient.density.d
    shape += " preconditioner"
    if (centring := centring_of(tuner.gradient.density)) is not None:
        found = centring.by_name().items()
        shape += f" ({', '.join(f'{name} centred by {w.mean():.2f}' for name, w in found)})"
    marginal = marginal_of(tuner.gradient.density)
    n = tuning.rows
    if n is not None:
        kind += f" of {n} rows" if marginal is None else f" of {n} groups"
    out = ""
    if marginal is not None:
        out = f", {', '.join(marginal.names)} integrated out of {marginal.n_clusters:,} groups"
        out += f" by {marginal.n_nodes} nodes"
        if WRONG > marginal.error >= TOLERANCE:
            out += (
                f" (which give another gradient than fewer, by {marginal.error:.2g} posterior sds)"
            )
    _log.info(
        f"{sampler}: {kind}, {shape} of {d} unknown{'s' * (d > 1)}{out}, {settings}; "
        f"{round(100 * tuning.bias, 1) + 0.0:.1f} % bias of variances predicted. Setting up took "
        f"{tuner.setup.passes:.0f} passes over the data, {seconds:.1f} s."
    )
    if tuner.gradients[2] is not None and tuner.setup.noise.second_order is None:
        _log.info(
            f"{sampler}: two standard deviations from the centre second-order control variates "
            "would be too noisy with so few rows; those of first order take their place."
        )
    if tuning.order == 1 and d > MANY and tuner.gradient.density.group_coefficients:
        _log.info(
            f"{sampler}: of so many unknowns the standard deviations of single ones may be off by "
            "a tenth, as their noise isn't known well. A larger batch_size makes it less."
        )
    if marginal is not None:
        _warn_of_groups(sampler, marginal, tuner, tuning)
    if not tuner.setup.fit.is_mode:
        _log.warning(
            f"{sampler} found no mode around which the posterior is near a Gaussian: "
            f"{suspects(tuner.gradient.density)}. Its settings may be far off, and "
            "temperatures can't show what chains don't reach: look at R-hat. Pass centre=, or use "
            "NUTS."
        )


def _warning(text, n_updates):
    return SamplerWarning(WarningType.BAD_PARAMS, text, "warn", n_updates)


def _warn_of_groups(sampler, marginal, tuner, tuning):
    """Warn where integrals of effects are wrong, slow, or leave a funnel."""
    names = ", ".join(marginal.names)
    if (n_values := marginal.n_groups * marginal.k) >= MANY_VALUES:
        _log.info(
            f"{sampler}: a draw with {names} takes {8e-6 * n_values:,.1f} MB or more, 1,000 draws "
            f"of four chains {0.032 * n_values / 1e3:,.0f} GB. Where that is too much, name what "
            "to record without them in pm.sample(var_names=...), pass recover=False to the step, "
            "and draw them afterwards by recover_effects."
        )
    if marginal.error >= WRONG:
        _log.warning(_off(sampler, marginal))
    is_noisy = tuning.order < 2 and not tuner.gradient.is_exact
    if is_noisy and not tuner.setup.is_gaussian:
        _log.warning(
            f"{sampler}: the posterior isn't near a Gaussian, as where the scale of effects is "
            "hardly known, and minibatches are much noisier in some places than in others. "
            "Standard deviations may come out off by a tenth or more. Leave batch_size out: each "
            f"step takes all {marginal.counts.sum():,} rows then."
        )


def _off(sampler, marginal):
    is_known = np.isfinite(marginal.error)
    by = (
        f"by {marginal.error:.2g} posterior sds or more" if is_known else "by nobody knows how much"
    )
    return (
        f"{sampler}: {', '.join(marginal.names)} can't be integrated out well: the gradient is "
        f"off {by}, and so may be means, as where rows of a group fit several values of its "
        "effects, or these have a long tail, as the log of one that may be near 0. Don't trust "
        "the results before a run without marginalize, or NUTS, agrees."
    )


def change(old, new, n_updates) -> SamplerWarning | None:
    """Say that a chain that was lost while tuning goes on with another gradient, if it does."""
    if old.order == new.order:
        return None
    text = (
        "While tuning, the chain was lost with second-order control variates; it goes on with "
        "those of first order. They need more rows for the same effective draws."
    )
    return _warning(text, n_updates)


def notice(sampler, tuner, chain, position) -> SamplerWarning | None:
    """Say after a draw that isn't for tuning, once, what may be wrong, if anything."""
    words = partial(_warning, n_updates=chain.n_updates)
    if chain.n_kept and not chain.is_far and tuner.is_far(chain.tuning, chain.state, position):
        chain.is_far = True
        return words(
            f"{sampler}: the chain went so far from the posterior's centre that second-order "
            "control variates are noisy there, and may have sent it off. Don't trust its draws "
            "from "
            'here on before a run with gradient="control_variates", or a larger batch_size, agrees.'
        )
    marginal = marginal_of(tuner.gradient.density)
    if chain.n_kept == 1 and marginal is not None and marginal.error >= WRONG:
        return words(_off(sampler, marginal))  # data may have changed since the step was made
    if chain.n_kept != 1 or isinstance(chain.tuning, ByHand) or not tuner.is_tuned:
        return None
    if 0 < chain.n_tuned < FEW_DRAWS:
        return words(
            f"{sampler}: tune={chain.n_tuned} is too little to measure the gradient's noise by. "
            f"Its settings may be wrong: use at least tune={FEW_DRAWS}, better 500."
        )
    if chain.tuning.bias > 2 * tuner.settings.target_bias:
        return words(
            f"{sampler}: variances are predicted to come out {100 * chain.tuning.bias:.0f} % too "
            "large at the given settings. Lower learning_rate, or leave it to the step."
        )
    return None
