"""API pages: which members a class shows, and the samplers' arguments in three tiers.

The tiers are kept here and nowhere else. An argument without a tier, and a tier's name without an
argument, are warnings of the build.
"""

import re

from sphinx.util import logging

__all__ = ["MEMBERS", "TIERS", "setup"]

# Members that the page of a class shows; of other classes none.
MEMBERS = {
    "RunStore": ["to_inference_data", "numbers"],
    "BiasReport": ["biased", "mixed", "worst"],
}

# Arguments of the stochastic-gradient samplers, in the order in which their pages show them.
TIERS = {
    "Everyday arguments": ["batch_size", "data", "marginalize", "target_bias", "vars"],
    "Occasional arguments": [
        "gradient",
        "n_steps",
        "centring",
        "recover",
        "pool",
        "replace",
        "centre",
        "temperature",
        "model",
        "initial_point",
        "compile_kwargs",
        "blocked",
        "rng",
    ],
    "The paper's settings": [
        "learning_rate",
        "friction",
        "noise_estimate",
        "preconditioner",
        "integrator",
        "resample_momentum_every",
    ],
}
SAMPLERS = {f"pymc_sghmc.{name}" for name in ("SGHMC", "SGLD", "SGNHT")}
SHARED_BY_NOT_ALL = {"friction", "noise_estimate", "integrator", "resample_momentum_every"}
ARGUMENT = re.compile(r"    \*\*(\w+)\*\*( :|$)")  # as numpydoc writes it, below ":Parameters:"

_log = logging.getLogger(__name__)


def _in_tiers(app, what, name, obj, options, lines):
    """Cut the list of parameters that numpydoc has made into one list for each tier."""
    if name not in SAMPLERS or ":Parameters:" not in lines:
        return
    begin = lines.index(":Parameters:")
    rest = (i for i in range(begin + 1, len(lines)) if re.match(r"\S", lines[i]))
    end = next(rest, len(lines))
    entries, current = {}, None
    for line in lines[begin + 1 : end]:
        if match := ARGUMENT.match(line):
            current = entries.setdefault(match[1], [])
        if current is not None:
            current.append(line)
    placed = {argument for tier in TIERS.values() for argument in tier}
    for argument in entries.keys() - placed:
        _log.warning("%s(%s=...) has no tier: add it to docs/_ext/api.py", name, argument)
    for argument in placed - entries.keys() - SHARED_BY_NOT_ALL:
        _log.warning("%s has no argument %r, which docs/_ext/api.py lists", name, argument)
    new = []
    for tier, arguments in TIERS.items():
        new += [f":{tier}:", ""]
        for argument in arguments:
            new += entries.get(argument, [])
        new.append("")
    lines[begin:end] = new


def setup(app):
    """Tell Sphinx of the tiers of arguments."""
    app.setup_extension("sphinx.ext.autodoc")
    # after numpydoc, which listens with Sphinx's usual priority of 500
    app.connect("autodoc-process-docstring", _in_tiers, priority=600)
    return {"version": "1", "parallel_read_safe": True}
