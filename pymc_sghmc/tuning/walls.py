"""How far a posterior of few unknowns is from a Gaussian, unknown by unknown, and how steep its walls are.

The logarithm of a scale that the data hardly tell has a long tail on one side and a wall on the
other. Knows passes over the data, no settings.
"""

import numpy as np

__all__ = ["walls"]

FAR = 2.0  # sds
OFF = 0.5  # of the force that a Gaussian would have there, from which on it is none
REACHED = 8.0  # fall of log p within which chains come by
STEADY = 2.0  # over the curvature: the largest learning rate
MOST = 12  # unknowns that are looked at
STEP = 1e-3  # sds, of differences
SOME = 5000  # rows or groups, of each kind, that tell


def walls(passes, fit) -> tuple:
    """Return the largest learning rate for what lies 2 sds out, and whether that is like a Gaussian's.

    Parameters
    ----------
    passes : Passes
    fit : GaussianFit
    """
    coordinates = fit.metric
    d = fit.mean.size
    limit = np.inf
    is_near = True
    some = tuple(np.linspace(0, n - 1, min(n, SOME)).astype(int) for n in passes.data.n_rows)
    top, slope = passes.log_density(fit.mean, some)

    def along(direction, x):
        """Log-density and force relative to the centre, where that of all is none."""
        shift = coordinates.to_theta(x * direction)
        logp, grad = passes.log_density(fit.mean + shift, some)
        force = direction @ coordinates.pull_back(grad - slope)
        return logp - top - slope @ shift, float(force)

    for i in np.unique(np.linspace(0, d - 1, MOST).astype(int)):
        direction = coordinates.pull_back(np.eye(d)[i])
        direction /= max(np.linalg.norm(direction), 1e-300)
        for side in (-FAR, FAR):
            if abs(along(direction, side)[1] / -side - 1) <= OFF:
                continue
            is_near = False
            for x in (0.5 * side, 0.75 * side, side):
                (logp, here), (_, there) = along(direction, x), along(direction, x + STEP)
                curvature = (here - there) / STEP
                if -logp < REACHED and curvature > 0:
                    limit = min(limit, STEADY / curvature)
    return limit, is_near
