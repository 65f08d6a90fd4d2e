"""Why a chain can't go on, in words: which unknown, which rows, and what to try. Changes nothing."""

import numpy as np

__all__ = ["explanation", "parting_words", "suspects"]


def explanation(error, unknowns, tuner, chain, start, draw) -> str:
    """Say what isn't finite, where, and what may help.

    Parameters
    ----------
    error : NonFinite
    unknowns : Unknowns
    tuner : Tuner
    chain : Chain
    start : array of shape (d,)
        Where the draw began.
    draw : Draw
        As far as it went.
    """
    density = tuner.gradient.density
    data = tuner.gradient.data
    what = "position"
    bad = error.position
    if np.isfinite(bad).all():
        what = "gradient"
        bad = error.gradient
    if np.isfinite(bad).all():
        where = f"the log-density of {', '.join(unknowns.names)} is {error.logp:.3g}"
    else:
        first = np.flatnonzero(~np.isfinite(np.diag(bad) if np.ndim(bad) == 2 else bad))
        where = f"the {what} of {unknowns.name_of(first[0] if len(first) else 0)} is not finite"
    given = ", ".join(name for name, _ in density.given_types)
    others = f", or look at the steps that sample {given}" if given else ""
    odd = ""
    if np.isfinite(error.position).all():  # else the chain ran away, whatever the data
        odd = data.odd_values(error.minibatch)
    rows = "the data" if error.minibatch is None else "these rows of the data"
    if odd == "missing values":
        return f"{where}: {rows} have {odd}. Drop such rows"
    if chain.state is None and not tuner.setups.is_finite_at(start):
        return (
            f"{where} at the starting point. Check the model with model.debug(), or pass other "
            f"initvals to pm.sample{others}"
        )
    if odd:  # they may be bounds
        return f"{where}: {rows} have {odd}. Drop such rows, if they aren't bounds"
    eta = draw.learning_rate
    n_draws = chain.n_tuned + chain.n_kept
    advice = f"Try learning_rate={eta / 10:.2g}{others}"
    setup = tuner.setup  # none where it failed
    if tuner.settings.learning_rate is None and setup and not setup.fit.is_mode:
        advice = (
            f"No Gaussian is near this posterior: {suspects(tuner.gradient.density)}. Use NUTS for "
            "this model, or priors that keep scales away from zero and from far out"
        )
    return (
        f"{where} at inner step {chain.n_updates} (draw {n_draws} of this chain) with "
        f"learning_rate={eta:.3g}. {advice}"
    )


def suspects(density) -> str:
    """Name what may keep a posterior from being near a Gaussian."""
    if not density.group_coefficients:
        return "a funnel, a ridge or a flat direction, perhaps"
    names = ", ".join(density.group_coefficients)
    return f"the scales of {names} may be next to zero or hardly known, perhaps"


def parting_words(sampler, message, n_kept) -> str:
    """Say what becomes of the draws of a chain that ends early."""
    return (
        f"{sampler} stopped: {message}. {n_kept} draws of this chain were made before it, and "
        "PyMC returns what it would after an interruption: of several chains some may be cut "
        "short or left out. A draw marked in sample_stats.diverging repeats the one before it."
    )
