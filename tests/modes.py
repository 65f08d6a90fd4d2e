"""How the tests compile and sample: small models take longer to compile than to run."""

from pytensor.compile.mode import Mode, predefined_modes, register_mode
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.link.vm import VMLinker

# In Python, and without the rewrites that simplify graphs: they take two thirds of the time that
# FAST_COMPILE takes. What is left makes graphs ready to run, and PyMC's checks of parameters minus
# infinity.
UNSIMPLIFIED = "UNSIMPLIFIED"
if UNSIMPLIFIED not in predefined_modes:
    few = RewriteDatabaseQuery(
        include=[
            "merge",
            "useless",
            "py_only",
            "canonicalize_db",
            "local_check_parameter_to_ninf_switch",
        ]
    )
    register_mode(UNSIMPLIFIED, Mode(VMLinker(use_cloop=False, c_thunks=False), few))

FAST = {"mode": UNSIMPLIFIED}  # the quickest to compile
PYTHON = {"mode": "FAST_COMPILE"}  # in Python, for hundreds of draws or many rows
C = {"mode": "CVM"}  # for runs of many thousands of steps
QUIET = {"progressbar": False, "compute_convergence_checks": False}  # of pm.sample
