"""Feature metrics against independent double-precision formulas, torchmetrics and Monte Carlo."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from curlfree.features import extract, fid, inception_score, kid, load_network
from curlfree.pieces import load_tensors, save_tensors


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def two_sets(n: int = 300, d: int = 12, offset: float = 0.0, m: int | None = None) -> tuple[Tensor, Tensor]:
    g = generator(n + d)
    A = torch.randn(d, d, generator=g, dtype=torch.float64) / d**0.5
    real = torch.randn(n, d, generator=g, dtype=torch.float64) @ A + offset
    fake = 1.2 * torch.randn(m or n, d, generator=g, dtype=torch.float64) @ A + offset + 0.2
    return real, fake


def fid_by_sqrtm(real: np.ndarray, fake: np.ndarray) -> float:
    S1, S2 = np.cov(real, rowvar=False), np.cov(fake, rowvar=False)
    shift = real.mean(0) - fake.mean(0)
    return float(shift @ shift + np.trace(S1 + S2 - 2 * scipy.linalg.sqrtm(S1 @ S2).real))


def fid_by_torchmetrics(real: Tensor, fake: Tensor) -> float:
    class Given(nn.Module):
        num_features = real.shape[1]

        def forward(self, x: Tensor) -> Tensor:
            return x

    metric = FrechetInceptionDistance(feature=Given()).set_dtype(torch.float64)
    metric.update(real, real=True)
    metric.update(fake, real=False)
    return float(metric.compute())


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_fid_equals_scipy_and_torchmetrics(offset: float) -> None:
    real, fake = two_sets(offset=offset, m=200)
    value = fid(real, fake).value
    assert value == pytest.approx(fid_by_sqrtm(real.numpy(), fake.numpy()), rel=1e-6)

    assert value == pytest.approx(fid_by_torchmetrics(real, fake), rel=1e-6)


def test_fid_of_singular_covariances_is_exact() -> None:
    # Features on a line each: S_i = s_i^2 u_i u_i^T, so tr (S1 S2)^(1/2) = s1 s2 |<u1, u2>|.
    g = generator()
    a, b = (torch.randn(50, generator=g, dtype=torch.float64) for _ in range(2))
    u1, u2 = torch.zeros(2, 80, dtype=torch.float64)
    u1[0], u2[0], u2[1] = 1, 0.6, 0.8
    s1, s2 = float(a.std()), float(b.std())
    shift = a.mean() * u1 - b.mean() * u2
    expected = float(shift @ shift) + s1**2 + s2**2 - 2 * s1 * s2 * 0.6
    real, fake = a[:, None] * u1, b[:, None] * u2
    assert fid(real, fake).value == pytest.approx(expected, abs=1e-12)
    assert fid(real, real).value == pytest.approx(0, abs=1e-12)


def test_fid_keeps_the_digits_that_torchmetrics_loses_with_fewer_images_than_features() -> None:
    real, _ = two_sets(30, 120)
    assert abs(fid(real, real).value) < 1e-11
    assert abs(fid_by_torchmetrics(real, real)) > 1e-9


def test_standard_errors_of_fid_and_is_match_repeated_draws() -> None:
    real, _ = two_sets(4000, 6)
    A = 1.3 * torch.linalg.cholesky(real.T.cov())
    values, errors, scores, score_errors = [], [], [], []
    for seed in range(150):
        fake = 0.3 + torch.randn(500, 6, generator=generator(seed), dtype=torch.float64) @ A.T
        for estimate, v, e in (
            (fid(real, fake), values, errors),
            (inception_score(fake), scores, score_errors),
        ):
            v.append(estimate.value)
            e.append(estimate.se)
    # The standard deviation of 150 values is known to 6 %.
    assert np.mean(errors) == pytest.approx(np.std(values, ddof=1), rel=0.2)
    assert np.mean(score_errors) == pytest.approx(np.std(scores, ddof=1), rel=0.2)


def test_inception_score_equals_the_definition() -> None:
    logits = 3 * torch.randn(400, 10, generator=generator(), dtype=torch.float64)
    p = scipy.special.softmax(logits.numpy(), axis=1)
    expected = math.exp(np.mean(np.sum(p * (np.log(p) - np.log(p.mean(0))), axis=1)))
    state = torch.get_rng_state()
    assert inception_score(logits).value == pytest.approx(expected, rel=1e-10)
    assert torch.equal(state, torch.get_rng_state())


def test_inception_score_of_perfect_classes_is_their_number() -> None:
    assert inception_score(100 * torch.eye(7).repeat(3, 1)).value == pytest.approx(7, rel=1e-12)


def test_kid_equals_the_definition_on_its_blocks() -> None:
    real, fake = two_sets(90, 12, m=70)
    order = generator(5)
    rows = torch.randperm(90, generator=order)[:60], torch.randperm(70, generator=order)[:60]
    values = []
    for start in range(0, 60, 20):
        x, y = (part[r[start : start + 20]].numpy() for part, r in zip((real, fake), rows, strict=True))
        kxx, kyy, kxy = ((f @ g.T / 12 + 1) ** 3 for f, g in ((x, x), (y, y), (x, y)))
        off = ~np.eye(20, dtype=bool)
        values.append(kxx[off].mean() + kyy[off].mean() - 2 * kxy.mean())
    estimate = kid(real, fake, block=20, generator=generator(5))
    assert estimate.value == pytest.approx(np.mean(values), rel=1e-10)
    assert estimate.se == pytest.approx(np.std(values, ddof=1) / math.sqrt(3), rel=1e-10)


def test_kid_is_unbiased_and_agrees_with_random_subsets() -> None:
    real, fake = two_sets(2000, 5)
    null = kid(real[:1000], real[1000:], block=50, generator=generator())
    assert abs(null.value) < 4 * null.se
    with torch.random.fork_rng():
        torch.manual_seed(0)
        metric = KernelInceptionDistance(feature=nn.Identity(), subsets=50, subset_size=50)
        metric.update(real, real=True)
        metric.update(fake, real=False)
        expected = float(metric.compute()[0])
    estimate = kid(real, fake, block=50, generator=generator())
    assert abs(estimate.value - expected) < 4 * estimate.se
    assert estimate.value > 4 * estimate.se


@pytest.mark.parametrize(
    ("real", "fake", "message"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 2), "one dimension, got 3"),
        (torch.zeros(1, 3), torch.zeros(4, 3), "N > 1"),
        (torch.full((4, 3), math.nan), torch.zeros(4, 3), "finite"),
    ],
)
def test_bad_features_are_refused(real: Tensor, fake: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fid(real, fake)
    with pytest.raises(ValueError, match=message):
        kid(real, fake, block=2, generator=generator())


def test_kid_needs_two_blocks() -> None:
    with pytest.raises(ValueError, match="two blocks"):
        kid(torch.zeros(10, 2), torch.zeros(10, 2), block=6, generator=generator())


class Net(nn.Module):
    """A fixed network with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.conv(images.float() / 255).relu().mean((2, 3))
        return features, self.head(features)


IMAGES = torch.arange(2 * 3 * 8 * 8).remainder(256).to(torch.uint8).view(2, 3, 8, 8)
NET = Net()


def test_networks_from_files_and_modules_agree(tmp_path) -> None:
    torch.jit.trace(NET.eval(), IMAGES).save(tmp_path / "net.ts")
    batch = torch.export.Dim("batch")
    program = torch.export.export(NET, (IMAGES,), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "net.pt2")
    expected = extract(NET, IMAGES)
    for spec in (str(tmp_path / "net.ts"), str(tmp_path / "net.pt2"), f"{__name__}:NET"):
        network, identity = load_network(spec)
        found = extract(network, IMAGES)
        assert found.keys() == {"features", "logits"}
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])
        assert ("sha256:" in identity) == (":NET" not in spec)


def test_a_wrong_network_is_refused(tmp_path) -> None:
    (tmp_path / "net.ts").write_bytes(b"no network")
    with pytest.raises(ValueError, match="expected a TorchScript file"):
        load_network(str(tmp_path / "net.ts"))
    torch.export.save(torch.export.export(NET, (IMAGES,)), tmp_path / "net.pt2")
    whole = (tmp_path / "net.pt2").read_bytes()
    text = whole.index(b'"graph_module"')
    altered = whole[:text] + b"\xff" + whole[text + 1 :]
    for damaged in (b"no network", whole[: len(whole) // 2], altered):
        (tmp_path / "net.pt2").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"net\.pt2: expected a torch\.export file"):
            load_network(str(tmp_path / "net.pt2"))
    with pytest.raises(ValueError, match="which is no file"):
        load_network(str(tmp_path / "other.ts"))
    with pytest.raises(ValueError, match="cannot import"):
        load_network("math:nothing")
    with pytest.raises(TypeError, match="uint8"):
        extract(NET, IMAGES.float())
    with pytest.raises(ValueError, match=r"shape \(2, D\)"):
        extract(lambda images: images.float(), IMAGES)


def test_the_canonical_network_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch_fidelity", None)
    with pytest.raises(ValueError, match=r"curlfree\[inception\]"):
        load_network("inception")


def test_kept_tensors_come_back_and_damage_is_refused(tmp_path) -> None:
    path = tmp_path / "reference.safetensors"
    tensors = {"features": torch.randn(20, 5, generator=generator()), "n": torch.tensor(20)}
    save_tensors(path, tensors, {"network": "a"})
    for name, value in load_tensors(path, {"network": "a"}).items():
        assert torch.equal(value, tensors[name])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(ValueError, match="expected a file about"):
        load_tensors(path, {"network": "b"})
    whole = path.read_bytes()
    for cut in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="truncated or altered"):
            load_tensors(path)
    for place in (len(whole) - 1, len(whole) - 80, whole.index(b"network")):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="truncated or altered"):
            load_tensors(path)
    with pytest.raises(ValueError, match="no such file"):
        load_tensors(tmp_path / "nothing")
