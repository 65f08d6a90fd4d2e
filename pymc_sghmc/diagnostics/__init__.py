"""What a finished run says about its own error: temperatures and gradients."""

from pymc_sghmc.diagnostics.bias import check_bias
from pymc_sghmc.diagnostics.leave_one_out import loo
from pymc_sghmc.diagnostics.plots import plot_bias, plot_temperatures
from pymc_sghmc.diagnostics.report import BiasReport
from pymc_sghmc.diagnostics.temperatures import configurational_temperature, temperature_warnings

__all__ = [
    "BiasReport",
    "check_bias",
    "configurational_temperature",
    "loo",
    "plot_bias",
    "plot_temperatures",
    "temperature_warnings",
]
