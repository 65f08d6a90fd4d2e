"""Ten grouped models that were drawn at random, each beside a long run of NUTS.

`benchmarks/random_groups.py` draws them by seed, judges runs and makes the references.
"""

import pytest

from benchmarks import random_groups

SMALL = random_groups.SMALL


@pytest.mark.slow
@pytest.mark.parametrize("seed", SMALL)
def test_random_grouped_models_are_sampled_right(seed):
    plan = random_groups.plan(seed, random_groups.SMALL_MOST)
    reference = random_groups.small_reference(seed)
    row = random_groups.sample(plan, "auto", reference, cores=1)
    assert row["right"], row


def test_small_models_are_of_all_kinds():
    plans = [random_groups.plan(seed, random_groups.SMALL_MOST) for seed in SMALL]
    assert len({plan.family for plan in plans}) == len(random_groups.FAMILIES)
    assert {len(plan.groups) for plan in plans} == {1, 2, 3}
    assert {plan.slopes for plan in plans} == {"none", "independent", "correlated"}
    assert {plan.effects for plan in plans} == {"Normal", "Student t"}
    # models by Bambi are left to the benchmark
    assert {plan.form for plan in plans} == {"centred", "non-centred"}


@pytest.mark.parametrize(("key", "off"), [("mean", 0.11), ("sd", 0.06)])
def test_a_run_that_is_off_is_not_right(key, off):
    """The slow tests can fail, by the mean or the standard deviation of one parameter."""
    reference = random_groups.small_reference(SMALL[0])

    def judged(sds, errors):
        by = sds * reference["a/sd"] + errors * reference[f"a/{key} error"]
        run = reference | {f"a/{key}": reference[f"a/{key}"] + by}
        return random_groups.judge(run, reference)

    assert judged(0.8 * off, 0)["outside"] == 0
    row = judged(off, 6.5)  # 4.5 errors of the difference of two are 6.4
    assert row["outside"] == 1
    assert row["worst"] == "a"
