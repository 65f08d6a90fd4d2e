"""How the tests compile and sample: small models take longer to compile than to run."""

FAST = {"mode": "FAST_COMPILE"}  # in Python: the quickest to compile
C = {"mode": "CVM"}  # for runs of many draws
QUIET = {"progressbar": False, "compute_convergence_checks": False}  # of pm.sample
