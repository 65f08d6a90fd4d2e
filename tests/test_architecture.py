"""The picture of the architecture is that of the code."""

import runpy

from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs/draw_architecture.py"


def test_the_picture_is_up_to_date():
    script = runpy.run_path(str(SCRIPT))
    assert script["PICTURE"].read_text() == script["draw"](), "run python docs/draw_architecture.py"


def test_the_picture_shows_each_wing_and_arrow():
    script = runpy.run_path(str(SCRIPT))
    wings, arrows = script["house"]()
    drawn = script["draw"]()
    assert ("samplers", "step") in arrows
    assert ("gradients", "rows") in arrows
    assert all(f'class="wing">{wing}<' in drawn for wing in wings)
    for (a, b), n in arrows.items():
        assert (f"{a} imports {b}: {n} files" in drawn) == (b != script["GROUND"])
