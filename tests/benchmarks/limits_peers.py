"""Inner steps of other packages for the works of limits.py.

Each function imports its package, so that ImportError says what is missing, and returns a function
that makes some inner steps and says how many. Settings are those of the other contenders, η the
learning rate of eq. 15 and α = .1, in the package's terms.

BlackJAX: its gradient estimators and its integrator of SGHMC in a jitted ``lax.scan`` that draws a
fresh minibatch at every step; its own ``sghmc`` repeats one minibatch for all steps of a draw.
SGMCMCJax: its kernel, which draws a fresh minibatch at every step, in the same way. posteriors: its
update in a Python loop on rows drawn by PyTorch. NumPyro: HMCECS, leapfrog steps of subsampled HMC
with Taylor's proxy, twenty to a draw, the draw's own costs included. nutpie: gradients on all rows,
those of its first draws.
"""

from functools import partial

import numpy as np

__all__ = ["nutpie", "of"]

FRICTION = 0.1
STEPS = 100  # inner steps per call


def of(work, start, data, batch, eta, sizes=None):
    """Functions that make the contenders of a work: its ``data`` are rows, None for none."""
    given = work, start, data, batch, eta, sizes
    found = {
        "blackjax": partial(blackjax, *given),
        "SGMCMCJax": partial(sgmcmcjax, *given),
        "posteriors": partial(posteriors, *given),
    }
    if work == "double_well":
        del found["SGMCMCJax"]  # It needs data.
    if work == "logistic_control_variates":
        del found["posteriors"]  # It has none.
        found["HMCECS (NumPyro)"] = partial(hmcecs, start, *data, batch, eta)
    return found


# --- JAX ------------------------------------------------------------------------------------------


def jax_densities(work, sizes):
    """Log-density of the prior, and of a row, at a flat position."""
    import jax

    from jax import numpy as jnp

    def logprior(theta):
        return -0.5 * theta @ theta

    def logistic(theta, row):
        x, y = row
        return y * (x @ theta) - jnp.logaddexp(0.0, x @ theta)

    def neural_network(theta, row):
        (p, h, k), (x, y) = sizes, row
        W, b, W2, b2 = jnp.split(theta, np.cumsum([p * h, h, h * k]))
        hidden = jax.nn.sigmoid(x @ W.reshape(p, h) + b)
        return jax.nn.log_softmax(hidden @ W2.reshape(h, k) + b2)[y]

    def matrix_factorisation(theta, row):
        (n_users, _, rank), ((i, j), y) = sizes, row
        place = theta.reshape(-1, rank)
        return -0.5 * (y - place[i] @ place[n_users + j]) ** 2

    found = {
        "logistic": logistic,
        "logistic_control_variates": logistic,
        "neural_network": neural_network,
        "matrix_factorisation": matrix_factorisation,
    }
    return logprior, found[work]


def scanned(step, state, steps):
    """Repeat ``step(key, state, data) -> state`` in one compiled call."""
    import jax

    @partial(jax.jit, static_argnums=2)
    def many(key, state, steps, data):
        def one(carry, _):
            key, state = carry
            key, used = jax.random.split(key)
            return (key, step(used, state, data)), None

        return jax.lax.scan(one, (key, state), length=steps)[0]

    return many


def jax_block(step, state, data, steps):
    import jax

    many, carry = scanned(step, state, steps), [jax.random.key(1), state]

    def block():
        carry[:] = jax.block_until_ready(many(*carry, steps, data))
        assert all(np.isfinite(part).all() for part in jax.tree.leaves(carry[1]))
        return steps

    return block


def blackjax(work, start, data, batch, eta, sizes):
    import blackjax
    import jax

    from jax import numpy as jnp

    jax.config.update("jax_enable_x64", True)
    # Their momentum is v/√η, their friction α/√η.
    step_size = eta**0.5
    move = blackjax.sgmcmc.diffusions.sghmc(alpha=FRICTION / step_size)
    state = jnp.asarray(start), jnp.zeros(start.size)
    if work == "double_well":
        gradient = jax.grad(lambda x: (2 * x**2 - x**4).sum())

        def step(key, state, _):
            return move(key, *state, gradient(state[0]), step_size)

        return jax_block(step, state, (), 100 * STEPS)
    n_rows, data = len(data[0]), jax.tree.map(jnp.asarray, data)
    gradient = blackjax.sgmcmc.gradients.grad_estimator(*jax_densities(work, sizes), n_rows)
    if work == "logistic_control_variates":
        gradient = blackjax.sgmcmc.gradients.control_variates(gradient, state[0], data)

    def step(key, state, data):
        rows_key, noise_key = jax.random.split(key)
        rows = jax.random.randint(rows_key, (batch,), 0, n_rows)
        minibatch = jax.tree.map(lambda array: array[rows], data)
        return move(noise_key, *state, gradient(state[0], minibatch), step_size)

    return jax_block(step, state, data, STEPS if start.size < 1000 else 10)


def sgmcmcjax(work, start, data, batch, eta, sizes):
    import jax

    from jax import numpy as jnp
    from sgmcmcjax import kernels

    jax.config.update("jax_enable_x64", True)
    logprior, loglikelihood = jax_densities(work, sizes)
    steps = STEPS if start.size < 1000 else 10
    settings = {
        "dt": eta,
        "L": steps,
        "loglikelihood": lambda theta, *row: loglikelihood(theta, row),
        "logprior": logprior,
        "data": tuple(map(jnp.asarray, data)),
        "batch_size": batch,
        "alpha": FRICTION,
    }
    if work == "logistic_control_variates":
        built = kernels.build_sghmcCV_kernel(**settings, centering_value=jnp.asarray(start))
    else:
        built = kernels.build_sghmc_kernel(**settings)
    initial, kernel, _ = built
    key = jax.random.PRNGKey(1)
    compiled, state = jax.jit(kernel), initial(key, jnp.asarray(start))
    carry = [0, key, state]

    def block():
        i, key, state = carry
        key, used = jax.random.split(key)
        state = jax.block_until_ready(compiled(i, used, state))
        assert np.isfinite(state.diffusion_state[0]).all()
        carry[:] = i + 1, key, state
        return steps

    return block


def hmcecs(start, X, y, batch, eta):
    import jax
    import numpyro
    import numpyro.distributions as dist

    from numpyro.infer import HMC, HMCECS

    jax.config.update("jax_enable_x64", True)

    def model(X, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([start.size]).to_event(1))
        with numpyro.plate("N", len(X), subsample_size=batch):
            x = numpyro.subsample(X, event_dim=1)
            outcome = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=outcome)

    draws, leaps, step_size = 10, 20, eta**0.5
    inner = HMC(
        model,
        step_size=step_size,
        trajectory_length=leaps * step_size,
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    proxy = HMCECS.taylor_proxy({"beta": jax.numpy.asarray(start)})
    kernel = HMCECS(inner, num_blocks=100, proxy=proxy)
    data = jax.numpy.asarray(X), jax.numpy.asarray(y)
    state = [kernel.init(jax.random.key(1), 0, None, data, {})]

    @jax.jit
    def many(state, data):
        return jax.lax.fori_loop(0, draws, lambda _, s: kernel.sample(s, data, {}), state)

    def block():
        state[0] = jax.block_until_ready(many(state[0], data))
        assert np.isfinite(state[0].z["beta"]).all()
        return draws * leaps

    return block


# --- PyTorch and PyMC -----------------------------------------------------------------------------


def posteriors(work, start, data, batch, eta, sizes):
    import posteriors
    import torch

    from torch.nn import functional

    torch.set_num_threads(1)

    def logistic(theta, x, y):
        return -functional.binary_cross_entropy_with_logits(x @ theta, y, reduction="sum")

    def neural_network(theta, x, y):
        p, h, k = sizes
        W, b, W2, b2 = torch.split(theta, [p * h, h, h * k, k])
        hidden = torch.sigmoid(x @ W.reshape(p, h) + b)
        return -functional.cross_entropy(hidden @ W2.reshape(h, k) + b2, y, reduction="sum")

    def matrix_factorisation(theta, pairs, y):
        n_users, _, rank = sizes
        place = theta.reshape(-1, rank)
        mean = (place[pairs[:, 0]] * place[n_users + pairs[:, 1]]).sum(1)
        return -0.5 * ((y - mean) ** 2).sum()

    def double_well(theta, minibatch):
        return (2 * theta**2 - theta**4).sum(), torch.tensor([])

    if work == "double_well":
        log_posterior, draw = double_well, lambda: None
    else:
        found = {
            "logistic": logistic,
            "neural_network": neural_network,
            "matrix_factorisation": matrix_factorisation,
        }
        loglikelihood, weight = found[work], len(data[0]) / batch
        data = [torch.from_numpy(array) for array in data]
        if work == "logistic":
            data[1] = data[1].double()

        def log_posterior(theta, minibatch):
            prior = -0.5 * theta @ theta
            return prior + weight * loglikelihood(theta, *minibatch), torch.tensor([])

        def draw():
            rows = torch.randint(len(data[0]), (batch,))
            return [array[rows] for array in data]

    # Their momentum is v/√η, their friction α/√η.
    transform = posteriors.sgmcmc.sghmc.build(
        log_posterior, lr=eta**0.5, alpha=FRICTION / eta**0.5, momenta=0.0
    )
    state = [transform.init(torch.from_numpy(start))]
    steps = 50 if start.size < 1000 else 5

    def block():
        for _ in range(steps):
            state[0], _ = transform.update(state[0], draw())
        assert torch.isfinite(state[0].params).all()
        return steps

    return block


def nutpie(model):
    import nutpie

    compiled, seeds = nutpie.compile_pymc_model(model), iter(range(10**9))

    def block():
        idata = nutpie.sample(
            compiled,
            draws=10,
            tune=20,
            chains=1,
            cores=1,
            seed=next(seeds),
            progress_bar=False,
            save_warmup=True,
        )
        groups = idata.warmup_sample_stats, idata.sample_stats
        return int(sum(np.asarray(group["n_steps"]).sum() for group in groups))

    return block
