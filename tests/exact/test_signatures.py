"""The arguments of the samplers on all data show, although PyMC's ``BlockedStep.__new__`` hides them."""

import inspect
import re

import pytest

from pymc_sghmc import QNHMC, GammaGibbs

PARAMETERS = re.compile(r"Parameters\n-+\n(.*?)\n\n[^\n]+\n---", re.DOTALL)


@pytest.mark.parametrize("cls", [QNHMC, GammaGibbs])
def test_the_signature_has_the_documented_arguments(cls):
    signature = inspect.signature(cls)
    documented = re.findall(r"^(\w+) : ", PARAMETERS.search(inspect.getdoc(cls))[1], re.MULTILINE)
    assert list(signature.parameters) == documented
    of_init = inspect.signature(cls.__init__)
    assert list(of_init.parameters.values())[1:] == list(signature.parameters.values())


def test_subclasses_show_their_own_arguments():
    class Mine(QNHMC):
        def __init__(self, mass, model=None):
            super().__init__(mass=mass, model=model)

    class Heir(Mine):
        pass

    assert list(inspect.signature(Mine).parameters) == ["mass", "model"]
    assert inspect.signature(Heir) == inspect.signature(Mine)
