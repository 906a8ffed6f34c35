"""The training curve."""

import pytest

from compressor.train import curve


def history(*points):
    return [{"tokens": tokens, "tau": tau, "conditional": [tau / 4, tau / 5]} for tokens, tau in points]


def test_the_figure_shows_every_position_and_is_the_same_every_time():
    points = history((1000, 1.5), (2000, 1.8), (4000, 2.0))
    figure = curve.svg(points)
    assert figure.startswith("<?xml") and "acceptance at position 2" in figure and "position 3" not in figure
    assert figure == curve.svg(points) != curve.svg(history((1000, 1.5), (2000, 1.9), (4000, 2.0)))


def test_the_last_doubling_is_read_between_two_looks():
    assert curve.last_doubling(history((1000, 1.5), (2000, 1.8), (4000, 2.0))) == pytest.approx(0.2)
    # half of 4000 lies halfway from 1000 to 4000 on the logarithm
    assert curve.last_doubling(history((1000, 1.5), (4000, 2.0))) == pytest.approx(0.25)


def test_a_curve_that_begins_too_late_tells_nothing():
    assert curve.last_doubling(history((3000, 1.5), (4000, 2.0))) is None
