"""The bias report in tables and in words. Knows numbers, no models and no steps."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from scipy.stats import norm

from pymc_sghmc.diagnostics.stein import DRAWS_PER_UNKNOWN

__all__ = ["BiasReport"]

SD_TOLERANCE = np.log1p(0.05)  # what counts as right: standard deviations within 5 %
MEAN_TOLERANCE = 0.1  # and means within 0.1 posterior standard deviations
VAGUE_MEAN = 0.5  # sds within which a mean must be known for a verdict
FALSE_ALARMS = 1e-4  # of each question asked of right draws; strict, for skewed posteriors
MANY = 20  # unknowns, above which the worst are printed alone


@dataclass(frozen=True, eq=False)
class BiasReport:
    """What `check_bias` found. ``print(report)`` says it in words.

    All of it is on the scale of PyMC's unconstrained unknowns, that is log σ for a HalfNormal σ.

    Attributes
    ----------
    table : pandas.DataFrame
        One row per unknown, named as ArviZ names it, with ``mean_shift`` (mean of the draws minus
        that of the posterior, in posterior standard deviations), ``temperature`` (1 for right
        draws) and ``sd_ratio`` (standard deviation of the draws over that of the posterior), each
        with its Monte Carlo standard error in a column ``..._error``.
    variables : pandas.DataFrame
        One row per variable: mean temperature and geometric mean of ``sd_ratio`` over its entries.
        The last row, ``(all)``, is over all unknowns.
    temperatures : pandas.DataFrame
        The temperatures of the run, over the target's: ``full data`` from this report,
        ``configurational`` and ``kinetic`` from the minibatches of each stochastic-gradient step.
    draws : xarray.Dataset
        ``position`` and ``gradient`` of the log-density, over (chain, draw, unknown).
    left_out : int
        Draws left out because they or their gradients are not finite.
    jumping : list of str
        Variables at which the log-density jumps: there gradients can't tell whether draws are right.
    uses_correlations : bool
        Whether ``sd_ratio`` and ``mean_shift`` allow for correlations between unknowns.
    """

    table: pd.DataFrame
    variables: pd.DataFrame
    temperatures: pd.DataFrame
    draws: xr.Dataset
    left_out: int
    jumping: list[str]
    uses_correlations: bool

    @property
    def biased(self) -> bool:
        """Whether a standard deviation is off by 5 % or a mean by 0.1 of one, and beyond chance."""
        return any(self._found(name).any() for name in ("sd", "mean", "average sd", "temperature"))

    def worst(self, n=10) -> pd.DataFrame:
        """Return the ``n`` rows of ``table`` that are furthest off, in sd or in mean."""
        sizes = [self._deviations(name)[0].abs() for name in ("sd", "mean")]
        badness = np.fmax(sizes[0] / SD_TOLERANCE, sizes[1] / MEAN_TOLERANCE).fillna(np.inf)
        return self.table.loc[badness.nlargest(n).index]

    def _deviations(self, name) -> tuple[pd.Series, pd.Series]:
        """Estimates that are zero for right draws, with their errors."""
        table = self.table if name in ("sd", "mean") else self.variables.loc[["(all)"]]
        if name == "mean":
            return table["mean_shift"], table["mean_shift_error"]
        if name == "temperature":
            return table["temperature"] - 1, table["temperature_error"]
        return np.log(table["sd_ratio"]), table["sd_ratio_error"] / table["sd_ratio"]

    def _found(self, name) -> pd.Series:
        """Those that are off by more than the tolerance and by more than chance."""
        deviation, error = self._deviations(name)
        chance = norm.isf(FALSE_ALARMS / len(deviation)) * error
        tolerance = {"mean": MEAN_TOLERANCE, "temperature": np.expm1(2 * SD_TOLERANCE)}
        bound = np.maximum(tolerance.get(name, SD_TOLERANCE), chance)
        return deviation[deviation.abs() > bound]

    def __str__(self):
        d = len(self.table)
        n = self.draws.sizes["chain"] * self.draws.sizes["draw"] - self.left_out
        verdict = self._say_jumps()
        if self.biased:
            verdict += [*self._say_sds(), *self._say_means()]
        elif not self.jumping:
            verdict += self._say_right()
        lines = [*verdict, "", f"{n} gradients of all data, {d} unknown{'s' * (d > 1)}."]
        if self.left_out:
            lines.append(f"{self.left_out} draws left out: they or their gradients aren't finite.")
        if d > 1 and not self.uses_correlations:
            lines.append(
                "Correlations are left out of sd_ratio and mean_shift: they take "
                f"{DRAWS_PER_UNKNOWN} effective draws per unknown, n_draws={DRAWS_PER_UNKNOWN * d} "
                "or more."
            )
        table = self.table
        if d > MANY:
            table = self.worst()
            lines += ["", f"The {len(table)} unknowns that are furthest off:"]
        lines += ["", _text(table)]
        if len(self.variables) > 2 and len(self.variables) <= d:
            lines += ["", "By variable:", _text(self.variables)]
        lines += ["", "Temperatures, 1 being the target:", _text(self.temperatures)]
        return "\n".join(lines)

    __repr__ = __str__

    def _say_jumps(self) -> list[str]:
        """Say where gradients can't tell."""
        if not self.jumping:
            return []
        return [
            "This can't tell: the log-density jumps where a condition, an index or a rounded number "
            f"changes with {', '.join(self.jumping)}, and gradients don't see it.",
            "Make the condition smooth, or give these unknowns to pm.Slice or pm.Metropolis and all "
            "data, which need no gradient.",
        ]

    def _say_sds(self) -> list[str]:
        """Say which standard deviations are off, and the remedy."""
        single, average = self._found("sd"), self._found("average sd")
        heat, [total] = self._found("temperature"), self.variables.loc[["(all)"]].itertuples()
        ratio, error = self.table["sd_ratio"], self.table["sd_ratio_error"]
        worst = single.abs().idxmax() if len(single) else None
        if len(average):
            text = f"Standard deviations are {_percent(total.sd_ratio, total.sd_ratio_error)}"
            if worst and len(ratio) > 1:
                text += f" on average; worst: {worst}, {_percent(ratio[worst], error[worst])}"
        elif worst:
            text = f"The standard deviation of {worst} is {_percent(ratio[worst], error[worst])}"
            if len(single) > 1:
                text += f"; {len(single)} of {len(ratio)} are off"
        elif len(heat):
            text = (
                f"The temperature is {total.temperature:.2f} ± {total.temperature_error:.2f} times "
                f"what it should be: combinations of unknowns vary too "
                f"{'much' if total.temperature > 1 else 'little'}, though no single one is seen to"
            )
        else:
            return []
        largest = max((*single, *average, *heat), key=abs)
        if largest > 0:
            return [f"{text}.", "Lower learning_rate or target_bias, or raise batch_size."]
        return [
            f"{text}.",
            "The chains haven't reached the posterior yet or move too slowly: raise tune and draws, "
            "or leave more settings to the step.",
        ]

    def _say_means(self) -> list[str]:
        """Say which means are off, and the remedy."""
        shifted = self._found("mean")
        if shifted.empty:
            return []
        worst = shifted.abs().idxmax()
        text = (
            f"The mean of {worst} is {abs(shifted[worst]):.2f} ± "
            f"{self.table['mean_shift_error'][worst]:.2f} posterior standard deviations too "
            f"{'high' if shifted[worst] > 0 else 'low'}"
        )
        if len(shifted) > 1:
            text += f"; {len(shifted)} of {len(self.table)} means are off"
        return [f"{text}.", "Raise tune if the chains disagree, else lower learning_rate."]

    def _say_right(self) -> list[str]:
        """Say how large a bias could have been missed."""
        limits = {}
        for name in ("sd", "mean", "average sd"):
            deviation, error = self._deviations(name)
            limits[name] = (deviation.abs() + 2 * error).max(skipna=False)
        average, single = (f"{100 * np.expm1(limits[k]):.0f} %" for k in ("average sd", "sd"))
        vague = not (
            limits["average sd"] <= 2 * SD_TOLERANCE and limits["mean"] <= VAGUE_MEAN
        ) or np.isinf(limits["sd"])
        text = "This can't tell" if vague else "No bias found"
        text += f": standard deviations are right within {average}"
        if len(self.table) > 1:
            each = f"within {single} each" if np.isfinite(limits["sd"]) else "not known for each"
            text += f" on average and {each}"
        text += f", means within {limits['mean']:.2f} posterior standard deviations"
        lines = [f"{text} (estimate and two standard errors)."]
        if vague:
            lines.append("That is little to go by: raise n_draws, or sample longer.")
        return lines


def _text(table) -> str:
    return table.to_string(float_format="{:.3f}".format)


def _percent(ratio, error) -> str:
    if ratio > 10:
        return f"{ratio:.3g} ± {error:.2g} times what it should be"
    digits = 0 if error >= 0.005 else 1
    direction = "large" if ratio > 1 else "small"
    return f"{100 * abs(ratio - 1):.{digits}f} ± {100 * error:.{digits}f} % too {direction}"
