"""What is asked of a model's minibatches: the exact mean over all of them, or a refusal in words."""

import re

from functools import cache

import numpy as np
import pytest

from modes import FAST
from pytensor.graph.basic import equal_computations
from targets import gradient_of, on_rows


@cache
def compiled(model):
    """A model's own log-density and gradient."""
    outputs = [model.logp(), model.dlogp()]
    return model.compile_fn(outputs, inputs=model.value_vars, point_fn=False, **FAST)


def random_point(model, scale=0.4, seed=3):
    """Values of the unknowns, and the same raveled."""
    rng = np.random.default_rng(seed)
    start = model.initial_point()
    values = [
        np.asarray(start[v.name] + scale * rng.normal(size=start[v.name].shape), dtype=v.dtype)
        for v in model.value_vars
    ]
    return values, np.concatenate([value.ravel() for value in values])


def mean_over_rows(gradient, position):
    """Mean over all minibatches, from those of one row: both are linear in the rows."""
    first = [np.array([0]) for _ in gradient.data.n_rows]
    base = [np.array(out, dtype=float) for out in on_rows(gradient, position, *first)]
    total = list(base)
    for k, n_rows in enumerate(gradient.data.n_rows):
        results = [
            on_rows(gradient, position, *first[:k], np.array([i]), *first[k + 1 :])
            for i in range(n_rows)
        ]
        for j in range(2):
            total[j] = total[j] + np.mean([r[j] for r in results], axis=0) - base[j]
    return total


def check_exact(model, full_model, batch_size, rtol=1e-10, n_groups=1):
    """The mean of all minibatch gradients is the model's own, and the model stays as it was."""
    names = [v.name for v in (*model.basic_RVs, *model.deterministics, *model.value_vars)]
    full = compiled(full_model)
    graph = model.logp(vars=[*model.observed_RVs, *model.potentials])
    values, position = random_point(model)
    before = full(*values)
    gradient = gradient_of(model, batch_size)
    assert len(gradient.data.groups) == n_groups
    logp, grad = mean_over_rows(gradient, position)
    scale = abs(before[1]).max()
    np.testing.assert_allclose(logp, before[0], rtol=rtol)
    np.testing.assert_allclose(grad, before[1], rtol=rtol, atol=rtol * scale)

    assert names == [v.name for v in (*model.basic_RVs, *model.deterministics, *model.value_vars)]
    assert equal_computations([graph], [model.logp(vars=[*model.observed_RVs, *model.potentials])])
    after = full(*values)
    np.testing.assert_array_equal(after[1], before[1])
    return gradient


def refusal(model, batch_size, *parts):
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        gradient_of(model, batch_size)
    for part in parts:
        assert part in str(error.value)
    return str(error.value)
