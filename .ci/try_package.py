"""Import every module of the installed package, sample a small model, and print its version.

Run ``python try_package.py WHAT`` in an environment that has the package and nothing else: what is
needed and not declared as a dependency fails here.
"""

import logging
import os
import pkgutil
import sys

from importlib import import_module
from pathlib import Path

# Nothing is to be fast here, and little to be compiled.
os.environ["PYTENSOR_FLAGS"] = "mode=FAST_COMPILE," + os.environ.get("PYTENSOR_FLAGS", "")

import numpy as np
import pymc as pm

import pymc_sghmc


def sample() -> int:
    """Sample with PyMC's progress bar, as it stands by default; return the number of draws."""
    y = np.random.default_rng(1).normal(size=1000)
    with pm.Model():
        mu = pm.Normal("mu", 0, 10)
        pm.Normal("y", mu, 1, observed=y)
        idata = pm.sample(
            tune=50, draws=20, chains=1, cores=1, step=pymc_sghmc.SGHMC(batch_size=100)
        )
    return int(idata.posterior["mu"].size)


if __name__ == "__main__":
    folder = Path(pymc_sghmc.__file__).parent
    if "site-packages" not in folder.parts:
        sys.exit(f"{folder} is not an installed package")
    if "+unknown" in pymc_sghmc.__version__:
        sys.exit("the installed package does not know its version")
    modules = list(pkgutil.walk_packages(pymc_sghmc.__path__, "pymc_sghmc."))
    for module in modules:
        import_module(module.name)
    logging.getLogger("pymc").setLevel(logging.ERROR)
    if sample() != 20:
        sys.exit("sampling lost draws")
    print(f"{sys.argv[1]}: pymc_sghmc {pymc_sghmc.__version__}, {len(modules)} modules, sampled")
