"""The Gaussian example of Sec. 3.1: printed numbers, the flow's closed forms, the construction of Eq. A6."""

import math
from itertools import pairwise

import pytest
import torch
from scipy.integrate import dblquad

from curlfree.experiments import gaussian as g
from curlfree.experiments import gaussian_page as page

EPSILONS = (1e-3, 1e-2, 5e-2)


@pytest.fixture(scope="module")
def progress() -> list[str]:
    return []


@pytest.fixture(scope="module")
def paper(progress) -> dict:
    return g.paper_mode(progress.append)


@pytest.mark.parametrize("arm", ["C", "U"])
def test_the_printed_step_counts_come_out_digit_for_digit(paper, arm):
    assert paper[arm]["steps"] == list(g.PAPER[arm]["steps"])


def test_progress_is_called_once_a_field(paper, progress):
    assert progress == [f"paper mode: {arm}" for arm in g.DIRECTIONS for _ in g.EPSILONS]


@pytest.mark.parametrize("key", ["asym", "nasym"])
def test_the_printed_asymmetries_come_out_to_every_printed_digit(paper, key):
    printed = [f"{value:.2e}" for value in g.PAPER["U"][key]]
    assert [f"{value:.2e}" for value in paper["U"][key]] == printed


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("arm", ["C", "U"])
def test_the_construction_of_a6_has_the_loss_epsilon(arm, epsilon):
    field = g.PerturbedGaussian(epsilon, g.DIRECTIONS[arm], std=1.0, softening=0.0, floor=0.0)
    assert g.expectations(field)["esm"] == pytest.approx(epsilon, rel=1e-10)


def test_quadrature_of_the_stabilised_loss_agrees_with_scipy():
    field = g.PerturbedGaussian(1e-3, g.tangential)

    def integrand(angle: float, r: float) -> float:
        x = r * torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        return float(r * field.density(x) * 0.5 * field.error(x).square().sum())

    sector = math.pi / 10  # mu has ten mirror axes
    loss = sum(
        20 * dblquad(integrand, a, b, 0.0, sector, epsabs=0.0, epsrel=1e-6)[0]
        for a, b in [(0, 0.5), (0.5, 1)]
    )
    assert g.expectations(field)["esm"] == pytest.approx(loss, rel=1e-5)


def test_the_stabilisers_remove_most_of_the_loss():
    assert g.expectations(g.PerturbedGaussian(1e-3, g.tangential))["esm"] < 1e-3 / 100


def test_the_printed_asymmetry_of_u_diverges_logarithmically_at_the_centre():
    field = g.PerturbedGaussian(1e-3, g.tangential, softening=0.0, floor=0.0)
    asym = [g.expectations(field, (hole, 0.03, 0.1, 0.3, 1.0))["asym"] for hole in (1e-3, 1e-4, 1e-5)]
    centre = torch.zeros(1, 2, dtype=torch.float64)
    decade = 2 * 1e-3 * float(g.mixture(centre)) * 2 * math.pi * math.log(10)
    assert asym[1] - asym[0] == pytest.approx(decade, rel=1e-3)
    assert asym[2] - asym[1] == pytest.approx(decade, rel=1e-3)


@pytest.mark.parametrize("epsilon", g.EPSILONS)
def test_rotation_leaves_the_continuous_arrival_times_alone(epsilon):
    start = g.starting_points()
    radii = (g.stop_radius(), g.ARRIVED)
    arrivals, _ = g.flow(g.PerturbedGaussian(epsilon, g.tangential), start, radii=radii, until=0.6)
    for radius, times in zip(radii, arrivals, strict=True):
        exact = g.STD**2 * (start.norm(dim=1) / radius).log()
        torch.testing.assert_close(torch.tensor(times, dtype=torch.float64), exact, rtol=1e-7, atol=0.0)


def test_the_conservative_error_delays_every_arrival():
    start = g.starting_points()
    times = [
        g.flow(g.PerturbedGaussian(epsilon, g.radial), start, radii=(g.ARRIVED,), until=0.6)[0][0]
        for epsilon in g.EPSILONS
    ]
    for earlier, later in pairwise(times):
        assert all(a < b for a, b in zip(earlier, later, strict=True))


def test_as_printed_the_conservative_model_is_late_and_then_diverges():
    wide = g.wide_target()
    exact = math.log(math.hypot(3, 3) / g.ARRIVED)
    assert wide["U"] == pytest.approx([exact] * 4, rel=1e-8)
    assert wide["C"][0] == pytest.approx(exact, rel=1e-8)
    assert exact + 0.1 < wide["C"][1] < wide["C"][2]
    assert wide["C"][3] is None
    assert all(radius < g.starting_points().norm(dim=1).min() for radius in g.basin_radii()[1:])


def test_halving_the_step_brings_u_to_the_time_without_error():
    exact = g.STD**2 * math.log(float(g.starting_points().norm(dim=1).max()) / g.stop_radius())
    field = g.PerturbedGaussian(g.EPSILONS[-1], g.tangential)
    errors = []
    for k in (3, 5, 7):
        count, _, elapsed = g.descend(
            field, g.starting_points(), step=g.STEP / 2**k, decay=math.inf, limit=1000
        )
        assert count is not None
        errors.append(abs(elapsed - exact))
        assert errors[-1] < g.STEP / 2**k
    assert errors[2] < 5e-3 * exact


def test_the_page_shows_the_printed_counts_beside_ours(paper):
    values = {"paper_mode": paper}
    steps, _ = page.tables(values)
    assert [row[1:] for row in steps.rows] == [
        [c, c, u, u] for c, u in zip(g.PAPER["C"]["steps"], g.PAPER["U"]["steps"], strict=True)
    ]
    assert "digit for digit" in page.summary(values)[0]
    assert "exchanged" in page.disagreements(values)[0].why
