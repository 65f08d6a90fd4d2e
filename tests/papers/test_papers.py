"""The papers' experiments: each runs with --quick, and killed runs go on where they were."""

import os
import subprocess
import sys

import numpy as np
import pymc as pm
import pytest

from conftest import ROOT
from scipy import stats

PAPERS = ROOT / "examples/papers"
sys.path.insert(0, str(PAPERS))

# Without data of ours, and with.
ALONE = ["sghmc_simulated", "qnhmc_table1"]
ON_DATA = ["sghmc_mnist", "sghmc_movielens", "qnhmc_table2", "qnhmc_table3"]


def run(name, folder, *options):
    flags = os.environ["PYTENSOR_FLAGS"].replace("mode=FAST_COMPILE", "mode=CVM")
    return subprocess.run(
        [sys.executable, PAPERS / f"{name}.py", folder, "--quick", *options],
        env={**os.environ, "PYTENSOR_FLAGS": flags},
        capture_output=True,
        text=True,
    )


def check_outputs(name, folder, done):
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [table] = folder.glob(f"{name}*.md")
    text = table.read_text(encoding="utf-8")
    assert f"python examples/papers/{name}.py" in text
    assert "|---" in text
    assert "nan" not in text
    assert table.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # quickly: what they share, piece by piece below
@pytest.mark.parametrize("name", ALONE)
def test_experiments_without_data_run(name, tmp_path):
    check_outputs(name, tmp_path, run(name, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_DATA)
def test_experiments_on_data_run(name, tmp_path, data):
    check_outputs(name, tmp_path, run(name, tmp_path))


def test_all_experiments_are_tested():
    scripts = {path.stem for path in PAPERS.glob("*.py")} - {"common", "hmc_bfgs", "movielens"}
    assert scripts == {*ALONE, *ON_DATA}


@pytest.fixture
def common():
    import common

    return common


def averages(common, path, settings=None, **options):
    options = {"chains": 2, "draws": 10, "burn_in": 4, **options}
    return common.Predictions(
        path,
        settings or {"learning_rate": 0.4e-6 * 4},
        lambda point: point["x"] * np.array([1.0, 2.0]),
        lambda mean: {"total": mean.sum()},
        **options,
    )


def draw(common, chain, index):
    return common.Draw(chain, index, {"x": np.array(float(10 * chain + index + 1))})


def test_predictions_are_averaged_after_burn_in(common, tmp_path):
    predictions = averages(common, tmp_path / "run.npz")
    for index in range(10):
        for chain in range(2):
            predictions(None, draw(common, chain, index))
    assert predictions.is_finished
    exact = np.mean(np.arange(5, 11))
    np.testing.assert_allclose(predictions.mean([0]), exact * np.array([1, 2]))
    np.testing.assert_allclose(predictions.mean(), (exact + 5) * np.array([1, 2]))
    last = predictions.curves[1][-1]
    assert (last["draw"], last["draw_total"]) == (10, 20 * 3)
    np.testing.assert_allclose([last["total"], last["all_total"]], [3 * exact + 30, 3 * exact + 15])
    assert "total" not in predictions.curves[0][3]
    assert "total" in predictions.curves[0][4]


def test_a_killed_run_goes_on_from_what_it_has_saved(common, tmp_path):
    path = tmp_path / "run.npz"
    killed = averages(common, path, save_seconds=-1)  # saves at each draw
    for chain, n in ((0, 7), (1, 5)):
        for index in range(n):
            killed(None, draw(common, chain, index))
    again = averages(common, path)
    assert again.made == [7, 5]
    assert not again.is_finished
    assert again.curves == killed.curves
    assert again.seconds == killed.seconds > 0
    assert [float(point["x"]) for point in again.points] == [7.0, 15.0]
    # pm.sample gives both chains as many draws as the slower one needs: one makes two too many
    for chain, made in ((0, 7), (1, 5)):
        for index in range(5):
            point = {"x": np.array(float(10 * chain + made + index + 1))}
            again(None, common.Draw(chain, index, point))
    assert again.is_finished
    np.testing.assert_allclose(again.mean(), (np.mean(np.arange(5, 11)) + 5) * np.array([1, 2]))
    assert averages(common, path).is_finished
    assert common.saved(path)["together"] == {"total": again.mean().sum()}
    longer = averages(common, path, draws=12)
    assert longer.made == [10, 10]
    assert not longer.is_finished


def test_a_run_with_other_settings_is_not_overwritten(common, tmp_path):
    path = tmp_path / "run.npz"
    settings = {"learning_rate": 0.4e-6 * 4, "shape": (1, 2)}
    averages(common, path, settings, save_seconds=-1)(None, draw(common, 0, 0))
    assert averages(common, path, settings).made == [1, 0]
    with pytest.raises(SystemExit, match="other settings"):
        averages(common, path, settings | {"learning_rate": 0.1})


def test_sampling_goes_on_with_the_draws_that_are_owed(common, tmp_path, monkeypatch):
    with pm.Model() as model:
        x = pm.Gamma("x", 2.0, 2.0)
        step = pm.Metropolis([x])

    def predictions(draws):
        return common.Predictions(
            tmp_path / "run.npz",
            {},
            lambda point: np.exp(point["x_log__"]),
            lambda mean: {"mean": mean},
            chains=1,
            draws=draws,
            burn_in=0,
        )

    starts, seeds, sample = [], [], pm.sample

    def spy(*args, initvals, random_seed, **kwargs):
        starts.append(initvals[0])
        seeds.append(random_seed)
        return sample(*args, initvals=initvals, random_seed=random_seed, **kwargs)

    monkeypatch.setattr(pm, "sample", spy)
    options = {"initvals": [{"x": 1.5}], "var_names": ["x"], "progressbar": False, "cores": 1}
    parts = []
    for draws in (3, 8):
        done = predictions(draws)
        idata = common.sample(model, step, done, seed=1, **options)
        parts.append(idata.posterior["x"].values[0])
    assert [len(part) for part in parts] == [3, 5]
    assert starts[0] == {"x": 1.5}
    assert np.exp(starts[1]["x_log__"]) == pytest.approx(parts[0][-1])
    assert seeds[0] != seeds[1]
    np.testing.assert_allclose(done.mean(), np.concatenate(parts).mean())
    assert common.sample(model, step, predictions(8), seed=1, **options) is None


def test_ratings_are_read_from_grouplens_own_file(tmp_path):
    import movielens

    path = tmp_path / "ratings.dat"
    path.write_text("1::1193::5::978300760\n1::661::3::978302109\n7::1193::4::978301968\n")
    ratings, folds = movielens.read_ratings(path)
    np.testing.assert_array_equal(ratings.user, [0, 0, 1])
    np.testing.assert_array_equal(ratings.movie, [1, 0, 1])
    np.testing.assert_array_equal(ratings.rating, [5, 3, 4])
    assert len(folds) == 3
    assert folds.max() < movielens.N_FOLDS
    assert movielens.mean_of_each_movie(ratings, ratings).tolist() == [4.5, 3.0, 4.5]
    assert movielens.rmse(np.array([9.0, 3.0, 4.0]), ratings) == 0  # kept within 1 to 5


def test_the_factorisation_is_the_papers_and_its_predictions_are_its_means():
    import movielens

    rng = np.random.default_rng(0)
    user, movie = rng.integers(4, size=30), rng.integers(3, size=30)
    ratings = movielens.Ratings(user, movie, rng.integers(1, 6, size=30).astype(float))
    model = movielens.factorisation(ratings, 4, 3, rank=2)
    point = movielens.start(model, rng, scale=1.0)
    precisions = {"lam_U": 0.5, "lam_V": 2.0, "lam_a": 3.0, "lam_b": 0.7, "tau": 1.3}
    predicted = movielens.predictor(ratings, ratings.rating.mean())(point)
    exact = sum(stats.gamma(1).logpdf(lam) + np.log(lam) for lam in precisions.values())
    for name in movielens.NAMES:
        sd = precisions[f"lam_{name}"] ** -0.5
        exact += stats.norm(0, sd).logpdf(point[name]).sum()
    exact += stats.norm(predicted, precisions["tau"] ** -0.5).logpdf(ratings.rating).sum()
    logs = {f"{name}_log__": np.log(lam) for name, lam in precisions.items()}
    assert model.compile_logp()(point | logs) == pytest.approx(exact)
    fixed = movielens.factorisation(ratings, 4, 3, 2, precisions)
    assert [rv.name for rv in fixed.free_RVs] == list(movielens.NAMES)
