"""The audit: right values with right error bars, in the contract's format."""

import json
import math

import pytest
import torch
from torch import Tensor

import curlfree as cf
from cases import MLP, UNet, dense, mixture, randn, randomised, rng
from curlfree.metrics import mean_estimate, ratio_estimate, rms_estimate

A = randn(4, 4, seed=1)
S, K = (A + A.T) / 2, (A - A.T) / 2
ASYM, NORM2 = float(2 * K.square().sum()), float(A.square().sum())
X0 = randn(64, 4)
FIELD = cf.LinearField(A)
CONTRACT = ["sigma", "asym", "asym_se", "nasym", "nasym_se", "work_nats", "work_nats_se", "n"]


def truths(sigma: float) -> dict[str, float]:
    """What the audit of FIELD estimates."""
    denoiser = torch.eye(4) + sigma**2 * A
    return {
        "asym": ASYM,
        "nasym": ASYM / (2 * NORM2),
        "nasym_denoiser": float(sigma**4 * K.square().sum() / denoiser.square().sum()),
        "work_nats": 2 * math.pi * sigma**2 * float(K.square().sum().sqrt()),
    }


@pytest.mark.parametrize("estimator", ["skew", "pair", "est", "paper", "exact"])
@pytest.mark.parametrize("probe", [cf.rademacher, cf.gaussian, cf.sphere])
def test_linear_fields_within_four_standard_errors(estimator: str, probe) -> None:
    process = cf.VE(0.1, 3.0)
    x0 = randn(2000, 4)
    table = cf.audit(
        FIELD, x0, process, levels=3, estimator=estimator, probe=probe, probes=2, generator=rng(), batch=1024
    )
    assert table.column("sigma") == pytest.approx(process.levels(3).tolist())
    for row in table.levels:
        for name, truth in truths(row["sigma"]).items():
            assert abs(row[name] - truth) <= 4 * row[f"{name}_se"] + 1e-12 * truth, name
            if not (estimator == "exact" and name in ("asym", "nasym")):
                assert row[f"{name}_se"] < 0.2 * truth
        assert row["n"] == 2000
        assert row["work_nats_half"] == pytest.approx(row["work_nats"], rel=1e-9)


def test_standard_errors_cover() -> None:
    """z-scores over 200 audits have variance 1, so intervals hold what they promise.

    The relative standard error of that variance is sqrt(2/200) = 0.1; the estimators' tails add to it.
    """
    scores: dict[str, list[float]] = {name: [] for name in truths(1.0)}
    generator = rng(5)
    for _ in range(200):
        (row,) = cf.audit(
            FIELD, X0.repeat(4, 1), cf.VE(0.5, 1.0), levels=1, estimator="pair", generator=generator
        ).levels
        for name, truth in truths(row["sigma"]).items():
            scores[name].append((row[name] - truth) / row[f"{name}_se"])
    for name, z in scores.items():
        assert 0.6 < torch.tensor(z).var() < 1.5, name
        assert abs(torch.tensor(z).mean()) < 0.4, name


def test_probes_of_one_image_are_clustered() -> None:
    """Many probes on few images cannot shrink the error below the spread between images."""

    def field(x: Tensor, sigma: Tensor) -> Tensor:
        strength = x.square().sum(1, keepdim=True).detach()  # each image turns at its own speed
        return strength * torch.stack([-x[:, 1], x[:, 0]], 1)

    x0 = randn(100, 2)
    table = cf.audit(field, x0, cf.VE(1e-6, 1e-5), levels=1, probes=50, probe=cf.gaussian, generator=rng())
    row = table.levels[0]
    spread = 4 * x0.square().sum(1) ** 2
    assert row["asym_se"] == pytest.approx(float(spread.std()) / 10, rel=0.1)
    assert row["asym"] == pytest.approx(float(spread.mean()), rel=0.1)


def test_more_probes_and_images_shrink_the_error() -> None:
    one, many = (
        cf.audit(FIELD, randn(n, 4), cf.VE(), levels=1, probes=k, estimator="pair", generator=rng()).levels[0]
        for n, k in ((4000, 1), (16000, 4))
    )
    assert many["asym_se"] == pytest.approx(one["asym_se"] / 4, rel=0.25)
    assert many["work_nats_se"] == pytest.approx(one["work_nats_se"] / 2, rel=0.25)


def test_an_exact_score_is_conservative_and_a_network_is_not() -> None:
    data = mixture()
    x0 = data.sample(32, rng(), torch.float64)
    process = cf.VE(0.3, 3.0)
    for row in cf.audit(data.score, x0, process, levels=3, nodes=64, generator=rng()).levels:
        assert row["asym"] < 1e-20
        assert row["nasym"] < 1e-20
        assert row["work_nats"] < 1e-5
    for row in cf.audit(randomised(MLP(2)), x0, process, levels=3, generator=rng()).levels:
        assert row["asym"] > 3 * row["asym_se"] > 0
        assert row["work_nats"] > 3 * row["work_nats_se"] > 0


def test_the_audit_of_a_network_is_the_mean_of_its_exact_values() -> None:
    """The points are x0 + sigma z with z the first draw of the generator."""
    net, x0 = randomised(MLP(4)), randn(10, 4)
    (row,) = cf.audit(net, x0, cf.VE(0.5, 0.7), levels=1, estimator="exact", generator=rng(3)).levels
    sigma = torch.full((10,), 0.7, dtype=torch.float64)
    x = x0 + 0.7 * cf.gaussian(x0, rng(3))
    J = dense(net, x, sigma).detach()
    asym, norm2 = 0.5 * (J - J.mT).square().sum((1, 2)), J.square().sum((1, 2))
    assert row["asym"] == pytest.approx(float(asym.mean()), rel=1e-10)
    assert row["asym_se"] == pytest.approx(float(asym.std() / math.sqrt(10)), rel=1e-10)
    assert row["nasym"] == pytest.approx(float(asym.sum() / (2 * norm2.sum())), rel=1e-10)
    assert row["nasym_mean_of_ratios"] == pytest.approx(float((asym / (2 * norm2)).mean()), rel=1e-10)
    denoiser = torch.eye(4) + 0.7**2 * J
    skew2 = 0.25 * 0.7**4 * (J - J.mT).square().sum()
    assert row["nasym_denoiser"] == pytest.approx(float(skew2 / denoiser.square().sum()), rel=1e-10)


@pytest.mark.parametrize("estimator", ["exact", "trace", "paper", "skew", "pair"])
@pytest.mark.parametrize("probe", [cf.rademacher, cf.gaussian, cf.sphere])
def test_the_denoiser_is_measured_although_its_jacobian_is_small(estimator: str, probe) -> None:
    """J = -I/sigma^2 and a hundredth of a rotation: what is left of I + sigma^2 J only turns."""

    def field(x: Tensor, sigma: Tensor) -> Tensor:
        return (0.01 * torch.stack([-x[:, 1], x[:, 0]], 1) - x) / sigma[:, None] ** 2

    x0 = randn(400, 2)
    table = cf.audit(field, x0, cf.VE(0.1, 10.0), levels=2, estimator=estimator, probe=probe, generator=rng())
    for row in table.levels:
        assert abs(row["nasym_denoiser"] - 1) <= 4 * row["nasym_denoiser_se"] + 1e-9
        assert row["nasym_denoiser_se"] < 0.5


def test_the_mean_of_ratios_depends_on_the_probes_and_the_pooled_ratio_does_not() -> None:
    """Why the audit pools: the paper's mean of ratios is biased with one probe (Eq. A3)."""
    x0, pooled, ratios = randn(4000, 4), {}, {}
    for estimator in ("exact", "pair"):
        (row,) = cf.audit(
            FIELD, x0, cf.VE(0.5, 1.0), levels=1, estimator=estimator, generator=rng(), batch=4000
        ).levels
        pooled[estimator] = row["nasym"], row["nasym_se"]
        ratios[estimator] = row["nasym_mean_of_ratios"], row["nasym_mean_of_ratios_se"]
    assert abs(pooled["pair"][0] - pooled["exact"][0]) < 4 * pooled["pair"][1]
    assert abs(ratios["pair"][0] - ratios["exact"][0]) > 10 * ratios["pair"][1]


def test_a_field_of_zero() -> None:
    """J = 0 gives 0, not NaN."""
    for row in cf.audit(lambda x, s: 0 * x, X0, cf.VE(), levels=2, generator=rng()).levels:
        for name in ("asym", "asym_se", "nasym", "nasym_se", "work_nats", "work_nats_se", "nasym_denoiser"):
            assert row[name] == 0


def test_the_json_of_the_contract(tmp_path) -> None:
    table = cf.audit(FIELD, X0, cf.VE(0.1, 3.0), levels=4, images=10, generator=rng())
    text = table.to_json(tmp_path / "audit.json")
    assert json.loads((tmp_path / "audit.json").read_text()) == json.loads(text) == {"levels": table.levels}
    levels = json.loads(text)["levels"]
    assert len(levels) == 4
    for row in levels:
        assert set(CONTRACT) <= set(row)
        assert all(isinstance(row[name], float) and math.isfinite(row[name]) for name in CONTRACT[:-1])
        assert row["n"] == 10
    assert [row["sigma"] for row in levels] == sorted((row["sigma"] for row in levels), reverse=True)
    assert table.to_json() == text


def test_the_figure_shows_the_table() -> None:
    table = cf.audit(FIELD, X0, cf.VE(0.1, 3.0), levels=4, generator=rng())
    figure = table.plot()
    for axes, name in zip(figure.axes, ("asym", "nasym", "work_nats"), strict=True):
        line = axes.containers[0].lines[0]
        assert line.get_ydata() == pytest.approx(table.column(name))
        assert line.get_xdata() == pytest.approx(table.column("sigma"))


def test_levels_may_be_given() -> None:
    for levels in (torch.tensor([0.5, 2.0, 1.0]), [0.5, 2.0, 1.0]):
        table = cf.audit(FIELD, X0, cf.VE(), levels=levels, generator=rng())
        assert table.column("sigma") == [2.0, 1.0, 0.5]


def test_images_batches_and_conditions_go_together() -> None:
    """Rows of the conditioning follow their images into every batch; the batch size changes nothing."""
    labels = torch.arange(10, dtype=torch.float64)
    seen = []

    def field(x: Tensor, sigma: Tensor, label: Tensor, scale: float) -> Tensor:
        seen.append((x, label))
        assert scale == 2.0 and len(label) == len(x)
        return (1 + label[:, None]) * torch.stack([-x[:, 1], x[:, 0]], 1)

    x0 = labels[:, None].repeat(1, 2) * 100
    given = {"levels": 2, "images": 7, "condition": {"label": labels, "scale": 2.0}}
    tables = [
        cf.audit(field, x0, cf.VE(0.1, 1.0), batch=batch, generator=rng(), **given) for batch in (2, 100)
    ]
    for x, label in seen:
        assert ((x.detach() / 100 - label[:, None]).abs() < 0.1).all()
    truth = float((4 * (1 + labels[:7]) ** 2).mean())
    for table in tables:
        assert table.column("asym") == pytest.approx([truth, truth])
        assert table.column("n") == [7, 7]


def test_the_audit_measures_without_dropout() -> None:
    net, x0 = randomised(UNet()), randn(3, 2, 4, 4)
    tables = [
        cf.audit(net.train(mode), x0, cf.VE(0.1, 1.0), levels=2, generator=rng()) for mode in (True, False)
    ]
    assert tables[0] == tables[1]
    assert not net.training


def test_the_audit_leaves_the_network_as_it_was() -> None:
    net = randomised(UNet()).eval()
    before = [p.clone() for p in net.parameters()]
    with torch.enable_grad():
        cf.audit(net, randn(3, 2, 4, 4), cf.VE(0.1, 1.0), levels=2, generator=rng())
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert not net.training


def test_estimates_by_hand() -> None:
    a, b = torch.tensor([1.0, 2.0, 6.0]).double(), torch.tensor([2.0, 2.0, 8.0]).double()
    mean = mean_estimate(a)
    assert (mean.value, mean.se) == pytest.approx((3, math.sqrt(7 / 3)))
    pooled = ratio_estimate(a, b)
    residual = a - 0.75 * b
    assert pooled.value == 0.75
    assert pooled.se == pytest.approx(float(residual.std() / math.sqrt(3) / b.mean()))  # its mean is 0
    assert ratio_estimate(0 * a, 0 * b) == ratio_estimate(a, 0 * b)
    assert math.isnan(ratio_estimate(a[:1], b[:1]).se)
    root = rms_estimate(a)
    assert root.value == pytest.approx(math.sqrt(41 / 3))
    assert root.se == pytest.approx(mean_estimate(a**2).se / (2 * root.value))
    assert rms_estimate(0 * a).se == 0


def test_the_rotation_density_has_the_sign_of_equation_8() -> None:
    """ROT_ij s = ds_i/dx_j - ds_j/dx_i: for [-x2, x1] it is -2 at (1, 2) and +2 at (2, 1)."""
    found = cf.rotation_density(cf.Rotation(), randn(3, 2))
    assert torch.equal(found, torch.tensor([[0.0, -2.0], [2.0, 0.0]], dtype=torch.float64).expand(3, 2, 2))
    net, x, sigma = randomised(MLP(3)), randn(2, 3), torch.ones(2, dtype=torch.float64)
    J = dense(net, x, sigma)
    torch.testing.assert_close(cf.rotation_density(net, x, sigma), J - J.mT)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"nodes": 7}, ValueError, "nodes must be an even number of at least 6, got 7"),
        ({"nodes": 4}, ValueError, "nodes must be an even number of at least 6, got 4"),
        ({"images": 1}, ValueError, "at least two images, got 1"),
        ({"images": -1}, ValueError, "at least two images, got 0"),
        ({"batch": 0}, ValueError, "batch must be at least 1, got 0"),
        ({"x0": X0[:1]}, ValueError, "at least two images, got 1"),
        ({"x0": X0.long()}, TypeError, r"x must be floating point, got torch\.int64"),
        ({"estimator": "loop"}, ValueError, "use 'pair'"),
        ({"estimator": "hutchinson"}, ValueError, "unknown estimator 'hutchinson'; expected one of"),
        ({"probes": 0}, ValueError, "probes must be at least 1, got 0"),
        ({"levels": 0}, ValueError, "at least one noise level, got none"),
        ({"levels": torch.tensor([1.0, 0.0])}, ValueError, "sigma must be positive and finite"),
        ({"levels": torch.tensor([1.0, -1.0])}, ValueError, "sigma must be positive and finite"),
        ({"field": lambda x, s: x - x.mean(0)}, ValueError, "the field mixes samples"),
        ({"field": lambda x, s: x[:, :1]}, ValueError, r"\(2, 4\), the field returned \(2, 1\)"),
    ],
)  # fmt: skip
def test_impossible_audits_are_refused(change: dict, error: type[Exception], message: str) -> None:
    arguments = {"field": FIELD, "x0": X0, "process": cf.VE(), "generator": rng()} | change
    with pytest.raises(error, match=message):
        cf.audit(**arguments)
