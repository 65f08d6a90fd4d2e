"""What a processor can do: SGHMC written by hand, in Numba and in NumPy, for the works of limits.py.

Each Numba function makes ``steps`` inner steps of eq. 15 of Chen et al. (2014) in one call, with
rows drawn afresh, their gradient, noise and update, and changes ``theta``, ``v`` and ``state``, the
counter of its generator, in place. ``c`` is the scale of the noise, √(2αη).

Random words are SplitMix64 of a counter, so that a processor makes several at once; normals come
from them by Box and Muller's transformation with logarithm, sine and cosine as polynomials, to eleven
digits. Sums may be taken in any order and products fused with them, as in BLAS; nothing is
assumed of their values.
"""

import math

import numpy as np

from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

__all__ = [
    "double_well",
    "double_well_numpy",
    "fill_normals",
    "logistic",
    "logistic_numpy",
    "matrix_factorisation",
    "matrix_factorisation_numpy",
    "neural_network",
    "neural_network_numpy",
]

AHEAD = 8  # rows fetched before they are needed
BLOCK = 1024  # normals made at once, a whole number of pairs: they stay in the nearest cache

compiled = njit(error_model="numpy", fastmath={"contract"})
reordered = njit(error_model="numpy", fastmath={"contract", "reassoc"})


# --- Bits -----------------------------------------------------------------------------------------


@intrinsic
def as_float(typing, bits):
    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(bits), generate


@intrinsic
def as_bits(typing, number):
    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(number), generate


@intrinsic
def prefetch(typing, array, index):
    """Ask for the cache line of a contiguous array's entry, counted as if it were flat."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(data, [args[1]]), pointer)
        builder.call(function, [address, number(0), number(3), number(1)])  # to read, keep, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


# --- Random numbers -------------------------------------------------------------------------------

GAMMA = np.uint64(0x9E3779B97F4A7C15)


@compiled
def mixed(z):
    """SplitMix64's words (Steele, Lea & Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def above_one(word):
    """Uniform in [1, 2) from the word's upper 52 bits."""
    return as_float((word >> np.uint64(12)) | np.uint64(0x3FF0000000000000))


@compiled
def logarithm(x):
    """To twelve digits."""
    bits = as_bits(x)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52  # of x/m with m between √½ and √2
    m = as_float(bits - (exponent << 52))
    f = (m - 1.0) / (m + 1.0)
    s = f * f
    p = 1 / 13
    p = p * s + 1 / 11
    p = p * s + 1 / 9
    p = p * s + 1 / 7
    p = p * s + 1 / 5
    p = p * s + 1 / 3
    return exponent * math.log(2) + 2 * f * (p * s + 1.0)


@compiled
def exponential(x):
    x = min(max(x, -708.0), 708.0)
    k = np.floor(x * (1 / math.log(2)) + 0.5)
    r = x - k * 0.6931471803691238  # log 2 in two parts
    r = r - k * 1.9082149292705877e-10
    p = 1 / 6227020800
    p = p * r + 1 / 479001600
    p = p * r + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * as_float((np.int64(k) + 1023) << 52)


@compiled
def sigmoid(x):
    return 1.0 / (1.0 + exponential(-x))


@compiled
def fill_normals(out, state):
    """Fill an array of even length with standard normals."""
    counter, half = state[0], out.size // 2
    first, second = out[:half], out[half:]
    for i in range(half):
        radius = np.sqrt(-2.0 * logarithm(2.0 - above_one(mixed(counter))))
        word = mixed(counter + GAMMA)
        counter += GAMMA + GAMMA
        # an angle within an eighth of a turn, and which quarter of the circle it starts from
        t = (above_one(word << np.uint64(2)) - 1.5) * (math.pi / 2)
        s = t * t
        c = 1 / 479001600
        c = c * s - 1 / 3628800
        c = c * s + 1 / 40320
        c = c * s - 1 / 720
        c = c * s + 1 / 24
        c = c * s - 0.5
        c = c * s + 1.0
        d = -1 / 39916800
        d = d * s + 1 / 362880
        d = d * s - 1 / 5040
        d = d * s + 1 / 120
        d = d * s - 1 / 6
        d = (d * s + 1.0) * t
        quarter = word >> np.uint64(62)
        turned = quarter & np.uint64(1) != 0
        radius = radius if quarter & np.uint64(2) == 0 else -radius
        first[i] = radius * (d if turned else c)
        second[i] = radius * (-c if turned else d)
    state[0] = counter


@compiled
def fill_rows(rows, n_rows, state):
    """Draw rows with replacement; ``n_rows`` is below 2³²."""
    counter, n = state[0], np.uint64(n_rows)
    for i in range(rows.size):
        rows[i] = np.int64(((mixed(counter) >> np.uint64(32)) * n) >> np.uint64(32))
        counter += GAMMA
    state[0] = counter


# --- The works ------------------------------------------------------------------------------------


@reordered
def dot(a, b):
    total = 0.0
    for j in range(a.size):
        total += a[j] * b[j]
    return total


@compiled
def add_multiple(out, factor, a):
    for j in range(out.size):
        out[j] += factor * a[j]


@compiled
def copy(out, a):
    for j in range(out.size):  # twice as fast as out[:] = a
        out[j] = a[j]


@compiled
def fetch_row(flat, i, d):
    """Ask for row i of a matrix of d columns, by eights: a cache line of doubles."""
    for j in range((d + 7) // 8):
        prefetch(flat, i * d + 8 * j)


@compiled
def logistic(steps, theta, v, X, y, constant, batch, eta, alpha, state):
    """Logistic regression with N(0, 1) priors.

    ``y`` are the outcomes and ``constant`` is 0; with control variates ``y`` are the probabilities
    at the centre and ``constant`` the gradient of the log-likelihood of all rows there.
    """
    n_rows, d = X.shape
    flat = X.reshape(X.size)
    rows, z, g = np.zeros(batch + AHEAD, np.int64), np.empty(d + d % 2), np.empty(d)
    c, weight = math.sqrt(2 * alpha * eta), n_rows / batch
    for _ in range(steps):
        fill_rows(rows[:batch], n_rows, state)
        fill_normals(z, state)
        for j in range(d):
            theta[j] += v[j]
            g[j] = 0.0
        for i in range(batch):
            fetch_row(flat, rows[i + AHEAD], d)
            prefetch(y, rows[i + AHEAD])
            x = X[rows[i]]
            add_multiple(g, y[rows[i]] - sigmoid(dot(x, theta)), x)
        for j in range(d):
            gradient = weight * g[j] + constant[j] - theta[j]
            v[j] += eta * gradient - alpha * v[j] + c * z[j]


@compiled
def softmax_slopes(out, b2, y, rows, weight):
    """Put what is left of the classes in the place of the scores, times a weight."""
    batch, k = out.shape
    for i in range(batch):
        largest = -np.inf
        for j in range(k):
            out[i, j] += b2[j]
            largest = max(largest, out[i, j])
        total = 0.0
        for j in range(k):
            out[i, j] = exponential(out[i, j] - largest)
            total += out[i, j]
        for j in range(k):
            out[i, j] *= -weight / total
        out[i, y[rows[i]]] += weight


@compiled
def neural_network(steps, theta, v, X, y, sizes, batch, eta, alpha, state):
    """Classes of a network with one hidden layer of sigmoids and softmax, N(0, 1) priors.

    ``theta`` is weights and biases of the hidden layer, then of the last; ``sizes`` are inputs,
    hidden units and classes.
    """
    p, h, k = sizes
    n_rows, d = X.shape[0], theta.size
    W, b = theta[: p * h].reshape(p, h), theta[p * h : p * h + h]
    W2, b2 = theta[p * h + h : d - k].reshape(h, k), theta[d - k :]
    g = np.empty(d)
    gW, gb = g[: p * h].reshape(p, h), g[p * h : p * h + h]
    gW2, gb2 = g[p * h + h : d - k].reshape(h, k), g[d - k :]
    rows, z = np.empty(batch, np.int64), np.empty(BLOCK)
    x, hidden, above = np.empty((batch, p)), np.empty((batch, h)), np.empty((batch, h))
    out = np.empty((batch, k))
    c, weight = math.sqrt(2 * alpha * eta), n_rows / batch
    for _ in range(steps):
        for j in range(d):
            theta[j] += v[j]
        fill_rows(rows, n_rows, state)
        for i in range(batch):
            copy(x[i], X[rows[i]])
        np.dot(x, W, hidden)
        for i in range(batch):
            for j in range(h):
                hidden[i, j] = sigmoid(hidden[i, j] + b[j])
        np.dot(hidden, W2, out)
        softmax_slopes(out, b2, y, rows, weight)
        np.dot(hidden.T, out, gW2)
        np.dot(out, W2.T, above)
        gb[:] = 0.0
        gb2[:] = 0.0
        for i in range(batch):
            for j in range(h):
                above[i, j] *= hidden[i, j] * (1.0 - hidden[i, j])
                gb[j] += above[i, j]
            for j in range(k):
                gb2[j] += out[i, j]
        np.dot(x.T, above, gW)
        for start in range(0, d, BLOCK):
            fill_normals(z, state)
            # Slices have no negative indices, so that the processor takes several entries at once.
            part, place, speed = g[start:][:BLOCK], theta[start:][:BLOCK], v[start:][:BLOCK]
            for j in range(part.size):
                speed[j] += eta * (part[j] - place[j]) - alpha * speed[j] + c * z[j]


@compiled
def matrix_factorisation(steps, theta, v, users, items, y, counts, batch, eta, alpha, state):
    """Ratings N(⟨user, item⟩, 1) with N(0, 1) priors; ``counts`` are users, items and their rank."""
    n_users, n_items, rank = counts
    d, n_rows = theta.size, y.size
    place = theta.reshape(n_users + n_items, rank)
    speed = v.reshape(n_users + n_items, rank)
    rows, z = np.empty(batch, np.int64), np.empty(BLOCK)
    a, b = np.zeros(batch + AHEAD, np.int64), np.zeros(batch + AHEAD, np.int64)
    ratings = np.empty(batch)
    c, factor, keep = math.sqrt(2 * alpha * eta), eta * n_rows / batch, 1.0 - alpha
    for _ in range(steps):
        # One pass over all unknowns: the likelihood's gradient goes straight into the momentum.
        for start in range(0, d, BLOCK):
            fill_normals(z, state)
            x, u = theta[start:][:BLOCK], v[start:][:BLOCK]
            for j in range(x.size):
                x[j] += u[j]
                u[j] = keep * u[j] - eta * x[j] + c * z[j]
        fill_rows(rows, n_rows, state)
        for i in range(batch):
            a[i] = users[rows[i]]
            b[i] = n_users + items[rows[i]]
            ratings[i] = y[rows[i]]
        for i in range(batch):
            fetch_row(theta, a[i + AHEAD], rank)
            fetch_row(theta, b[i + AHEAD], rank)
            fetch_row(v, a[i + AHEAD], rank)
            fetch_row(v, b[i + AHEAD], rank)
            one, other = place[a[i]], place[b[i]]
            residual = factor * (ratings[i] - dot(one, other))
            add_multiple(speed[a[i]], residual, other)
            add_multiple(speed[b[i]], residual, one)


@compiled
def double_well(steps, theta, v, eta, alpha, state):
    z, x, speed, c = np.empty(BLOCK), theta[0], v[0], math.sqrt(2 * alpha * eta)
    for start in range(0, steps, BLOCK):
        fill_normals(z, state)
        for j in range(min(BLOCK, steps - start)):
            x += speed
            speed += eta * (4.0 * x - 4.0 * x * x * x) - alpha * speed + c * z[j]
    theta[0], v[0] = x, speed


# --- The same in NumPy ----------------------------------------------------------------------------


def moved(steps, theta, v, gradient, eta, alpha, rng):
    c = math.sqrt(2 * alpha * eta)
    for _ in range(steps):
        theta += v
        v += eta * gradient(theta, rng) - alpha * v + c * rng.standard_normal(theta.size)


def logistic_numpy(X, y, constant, batch):
    weight = len(X) / batch

    def gradient(theta, rng):
        rows = rng.integers(len(X), size=batch)
        x = X[rows]
        return weight * ((y[rows] - 1 / (1 + np.exp(-(x @ theta)))) @ x) + constant - theta

    return gradient


def neural_network_numpy(X, y, sizes, batch):
    p, h, k = sizes
    ends = np.cumsum([p * h, h, h * k])
    weight, each = len(X) / batch, np.arange(batch)

    def gradient(theta, rng):
        W, b, W2, b2 = np.split(theta, ends)
        W, W2 = W.reshape(p, h), W2.reshape(h, k)
        rows = rng.integers(len(X), size=batch)
        x = X[rows]
        hidden = 1 / (1 + np.exp(-(x @ W + b)))
        out = hidden @ W2 + b2
        out = np.exp(out - out.max(axis=1, keepdims=True))
        out *= -weight / out.sum(axis=1, keepdims=True)
        out[each, y[rows]] += weight
        above = out @ W2.T * hidden * (1 - hidden)
        parts = x.T @ above, above.sum(0), hidden.T @ out, out.sum(0)
        return np.concatenate([part.ravel() for part in parts]) - theta

    return gradient


def matrix_factorisation_numpy(users, items, y, counts, batch):
    n_users, n_items, rank = counts
    weight = len(y) / batch

    def gradient(theta, rng):
        place = theta.reshape(n_users + n_items, rank)
        rows = rng.integers(len(y), size=batch)
        a, b = users[rows], n_users + items[rows]
        residual = weight * (y[rows] - np.einsum("ij,ij->i", place[a], place[b]))
        g = -place
        np.add.at(g, a, residual[:, None] * place[b])
        np.add.at(g, b, residual[:, None] * place[a])
        return g.ravel()

    return gradient


def double_well_numpy():
    return lambda theta, rng: 4 * theta - 4 * theta**3
