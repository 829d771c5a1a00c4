"""The numbers of docs/errors.md that can be computed here are those that come out here."""

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import curlfree as cf
from curlfree.experiments import gaussian as g
from curlfree.experiments.toy2d_eval import prior_mismatch
from curlfree.experiments.toy2d_page import PAPER
from curlfree.experiments.toy2d_train import PROBLEMS
from curlfree.presets import PRESETS

ROOT = Path(__file__).parent.parent


@cache
def item(number: int) -> str:
    """The text of one error, in one line."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {number}\. (.*?)(?=^##)", page + "\n##", re.DOTALL | re.MULTILINE)
    assert found is not None
    return " ".join(found[1].split())


def test_arrival_times() -> None:
    wide = g.wide_target()
    exact = f"{math.log(math.hypot(3, 3) / 0.1):.4f}"
    assert wide["epsilons"] == [0.0, 1e-3, 1e-2, 5e-2]
    assert {f"{t:.4f}" for t in [wide["C"][0], *wide["U"]]} == {exact}
    assert f"ln(√18/0.1) = {exact} without error and for U at ε = 1e-3, 1e-2, 5e-2" in item(2)
    _, first, second, last = wide["C"]
    assert f"{first:.4f} for C at ε = 1e-3 and {second:.4f} at ε = 1e-2; at ε = 5e-2 C drives" in item(2)
    assert last is None


def test_what_the_stabilising_constants_leave() -> None:
    x, weight = g.polar_nodes((0.0, 0.3, 0.6, 0.65, 1.0, 3.0, 6.0, 11.0))
    mass = weight * g.mixture(x)
    field = g.PerturbedGaussian(1e-3, g.tangential)
    assert float(mass.sum()) == pytest.approx(1.0, abs=1e-9)
    assert f"{float(mass[field.density(x) < g.FLOOR].sum()):.1%}".replace("%", " %") in item(3)
    for epsilon in g.EPSILONS[1:]:
        left = g.expectations(g.PerturbedGaussian(epsilon, g.tangential))["esm"] / epsilon
        assert f"{left:.1%} of ε".replace("%", " %") in item(3)


@pytest.mark.parametrize(("power", "said"), [(0, "off by less than 1 %"), (1, "+78 %"), (2, "+436 %")])
def test_the_bias_of_a_mean_of_ratios(power: int, said: str) -> None:
    generator = torch.Generator().manual_seed(0)
    D, probes = 256, 4000
    basis = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))[0]
    K = torch.randn(D, D, generator=generator, dtype=torch.float64)
    K = 0.05 * (K - K.T) / (K - K.T).norm()
    S = basis @ torch.diag(torch.arange(1.0, D + 1, dtype=torch.float64) ** -power) @ basis.T
    J = S / S.norm() + K
    x = torch.zeros(probes, D, dtype=torch.float64)
    ratios = cf.normalized_asymmetry(
        lambda x, sigma: x @ J.T, x, estimator="skew", generator=torch.Generator().manual_seed(1)
    )
    exact = float(K.square().sum() / J.square().sum())
    bias, error = float(ratios.mean()) / exact - 1, float(ratios.std()) / math.sqrt(probes) / exact
    assert said in item(8)
    assert f"{exact:.2%}".replace("%", " %") in item(8)
    if power == 0:
        assert abs(bias) < 0.01
    else:
        assert abs(bias - int(said.strip("+ %")) / 100) < error / 4


def test_the_cost_of_algorithm_1() -> None:
    record = json.loads((ROOT / "benchmarks" / "records" / "variance.json").read_text(encoding="utf-8"))
    cost = record["flops"]
    assert f"falls from {cost['algorithm1']:.2f} to {cost['paper']:.2f} forward passes" in item(12)


def test_scales_and_weights() -> None:
    assert f"{0.01**1.5:.3g} at σ = 0.01, {50**1.5:.0f} at σ = 50" in item(6)
    assert f"at σ = 0.01 is {(50 / 0.01) ** 2:.1e}".replace("e+0", "e") in item(15)
    assert f"λ = {PRESETS['paper-8gaussians-qc'].objective.lmbda:g}" in item(9)
    assert f"{cf.eight_gaussians().means.norm(dim=1)[0]:.2f}" in item(11)


def test_what_the_prior_costs() -> None:
    sets = [PROBLEMS[name] for name in ("8gaussian", "spirals", "checkerboard")]
    gaussian, spirals, checkerboard = (f"{prior_mismatch(s.data, cf.VE(0.1, 3.0)):.2f}" for s in sets)
    assert f"{gaussian} nat for 8-Gaussian, {spirals} for the spirals and {checkerboard} for the ch" in item(
        17
    )
    entropies = [s.data.entropy(points=2**13) for s in sets]
    assert "{:.2f}, {:.2f} and {:.2f} nats".format(*entropies) in item(17)
    published = [PAPER[name]["U"]["nll"][0] for name in ("8gaussian", "spirals", "checkerboard")]
    above = [p - e for p, e in zip(published, entropies, strict=True)]
    assert "values are {:.2f}, {:.2f} and {:.2f} above".format(*above) in item(17)
