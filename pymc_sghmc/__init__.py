"""Step methods for PyMC: SGHMC, SGLD and SGNHT on minibatches, QNHMC on all data.

``pm.sample(step=SGHMC())`` samples an ordinary PyMC model from minibatches of its
data, with settings that it finds itself. Learning-rate schedules are in `pymc_sghmc.schedules`,
checks of a finished run in `pymc_sghmc.diagnostics`, data that don't fit into memory in
`pymc_sghmc.loaders`.
"""

from importlib.metadata import PackageNotFoundError, version

from pymc_sghmc import diagnostics, loaders, schedules
from pymc_sghmc.exact.gamma_gibbs import GammaGibbs
from pymc_sghmc.exact.qnhmc import QNHMC
from pymc_sghmc.hierarchy.recovery import recover_effects
from pymc_sghmc.predictions.blocks import predict_in_blocks
from pymc_sghmc.runs.resume import resume
from pymc_sghmc.runs.run_store import RunStore
from pymc_sghmc.samplers.sghmc import SGHMC
from pymc_sghmc.samplers.sgld import SGLD
from pymc_sghmc.samplers.sgnht import SGNHT
from pymc_sghmc.updating.prior_from import prior_from

try:
    __version__ = version("pymc-sghmc")
except PackageNotFoundError:  # imported from a checkout that isn't installed
    __version__ = "0+unknown"

__all__ = [
    "QNHMC",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "GammaGibbs",
    "RunStore",
    "diagnostics",
    "loaders",
    "predict_in_blocks",
    "prior_from",
    "recover_effects",
    "resume",
    "schedules",
]
