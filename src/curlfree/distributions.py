r"""Data whose density and score are known at every noise level: the truth for models of small dimension.

With noise, the density of ``x = x0 + sigma z`` is that of the data convolved with N(0, sigma^2 I), and its
score is ``s(x, sigma) = grad log p_sigma(x)``, a curl-free field. Each distribution here is a mixture of
products of one-dimensional kernels k_sigma,

    p_sigma(x) = sum_i w_i prod_d k_sigma(x_d - c_id),    s_d = sum_i r_i (log k_sigma)'(x_d - c_id),

with r_i the share of component i in p_sigma(x). `GaussianMixture` has Gaussian kernels. `Checkerboard` has
eight boxes, whose kernel is a difference of normal distribution functions; it is computed from their
logarithms (scaled erfc), so that the tails keep their relative precision. `Spirals` is a continuum of boxes
(or of points) along two curves: its sum over i is an integral, by Gauss-Legendre panels a few sigma long,
of which only those near the point are visited. The relative error stays below 1e-8 within 10 sigma of the
support for sigma in [0.01, 50].

Everything is computed in double precision and returned in the type of `x`.

The data are those of the paper's Section 3.2 (Table 1). The defaults are the constants of the authors'
public code (https://github.com/chen-hao-chao/qcsbm), which differ from the paper's text by scale and noise:

    set            public code (default)                    text of the paper
    8-Gaussian     radius 8/sqrt(2), std 1/sqrt(2)          radius 1, no std: `eight_gaussians(1, 1/8)`
    Spirals        3 pi sqrt(w), U(0, 0.5)^2, x 2.3/3       pi sqrt(w), no noise: `Spirals.text()`
    Checkerboard   cells of side 3                          cells of side 1: `Checkerboard.text()`
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

import numpy as np
import torch
from torch import Tensor

from curlfree.checks import check_floating, check_sigma

_NODES = 16  # Gauss-Legendre nodes of one panel of the curve
_PANEL = 4.0  # the length of a panel in units of sigma; error 2e-9 at 10 sigma from the support
_MIN_PANELS = 4
_CHUNK = {"cpu": 2**20, "cuda": 2**25}  # numbers in the largest intermediate of the search for near panels


class Distribution(ABC):
    """Clean data with an exact log-density and score at every noise level; its mean is zero or `data_mean`.

    Args:
        event_shape: the shape of one sample.
        uniforms: how many uniform numbers one sample is made from.
    """

    def __init__(self, event_shape: tuple[int, ...], uniforms: int) -> None:
        self.event_shape = event_shape
        self._uniforms = uniforms

    @property
    @abstractmethod
    def data_std(self) -> float:
        """Root mean square over coordinates of the standard deviation, for a prior with matching moments."""

    @abstractmethod
    def _transform(self, u: Tensor) -> Tensor:
        """Map uniform numbers (n, uniforms) to samples (n, *event)."""

    @abstractmethod
    def _log_prob(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        """The log-density of double-precision x."""

    @abstractmethod
    def _score(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        """The score at double-precision x."""

    def sample(self, n: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw n independent clean samples, on the generator's device, shape (n, *event)."""
        u = torch.rand(n, self._uniforms, generator=generator, device=generator.device, dtype=torch.float64)
        return self._transform(u).to(dtype)

    def log_prob(self, x: Tensor, sigma: Tensor | None = None) -> Tensor:
        """The log-density in nats of ``x0 + sigma z``.

        Args:
            x: points, shape (B, *event).
            sigma: noise levels, shape (B,); None for the clean data.

        Returns:
            Shape (B,); minus infinity outside the support of clean data.
        """
        x64, sigma64 = self._checked(x, sigma)
        return self._log_prob(x64, sigma64).to(x.dtype)

    def score(self, x: Tensor, sigma: Tensor | None = None) -> Tensor:
        """The gradient of `log_prob` in x, a curl-free field.

        Args:
            x: points, shape (B, *event).
            sigma: noise levels, shape (B,); None for the clean data.

        Returns:
            Shape of x.

        Raises:
            ValueError: clean data with a discontinuous density has no score.
        """
        x64, sigma64 = self._checked(x, sigma)
        return self._score(x64, sigma64).to(x.dtype)

    def entropy(self, sigma: float | None = None, points: int = 2**16) -> float:
        """The differential entropy in nats, ``-E log p_sigma``: the least NLL that a model can have.

        The expectation is a scrambled Sobol sum with a fixed seed; on the sets of this module its error is
        below 5e-4 nats with the default number of points.

        Args:
            sigma: the noise level; None for the clean data.
            points: number of points of the sum, a power of two.

        Returns:
            The entropy.
        """
        noise = 0 if sigma is None else math.prod(self.event_shape)
        sobol = torch.quasirandom.SobolEngine(self._uniforms + noise, scramble=True, seed=0)
        u = sobol.draw(points, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
        x = self._transform(u[:, : self._uniforms])
        if sigma is None:
            return -float(self.log_prob(x).mean())
        z = torch.special.ndtri(u[:, self._uniforms :]).view_as(x)
        return -float(self.log_prob(x + sigma * z, x.new_full((points,), sigma)).mean())

    def _checked(self, x: Tensor, sigma: Tensor | None) -> tuple[Tensor, Tensor | None]:
        check_floating("x", x)
        if x.shape[1:] != self.event_shape:
            raise ValueError(
                f"{type(self).__name__} needs x of shape (B, {', '.join(map(str, self.event_shape))}), "
                f"got {tuple(x.shape)}"
            )
        if sigma is None:
            return x.double(), None
        check_sigma(sigma, x)
        return x.double(), sigma.double()


class GaussianMixture(Distribution):
    """A mixture of isotropic Gaussians; with std 0 and data as means, the empirical score of those data.

    Args:
        means: the centres, shape (M, *event).
        std: the standard deviation of every component, or one for each, shape (M,).
        weights: the shares of the components, shape (M,), normalised here; uniform when None.

    Raises:
        ValueError: shapes do not match, a std is negative or a weight is.
    """

    def __init__(self, means: Tensor, std: float | Tensor = 1.0, weights: Tensor | None = None) -> None:
        check_floating("means", means)
        if means.ndim < 2:
            raise ValueError(f"means must have shape (M, *event), got {tuple(means.shape)}")
        super().__init__(tuple(means.shape[1:]), 1 + means[0].numel())
        count = len(means)
        self.means = means.double()
        self.std = torch.as_tensor(std, dtype=torch.float64, device=means.device).expand(count)
        weights = torch.ones(count) if weights is None else weights
        self.weights = weights.to(self.means) / weights.sum()
        if not bool(self.means.isfinite().all()):
            raise ValueError("a mixture needs finite means, got NaN or inf")
        good = bool((self.weights >= 0).all()) and bool((self.std >= 0).all() & self.std.isfinite().all())
        if self.weights.shape != (count,) or not good:
            raise ValueError(
                f"a mixture of {count} needs {count} weights >= 0 with a positive sum and finite std >= 0, "
                f"got weights of shape {tuple(weights.shape)} from {weights.min():g} with sum "
                f"{weights.sum():g}, std from {self.std.min():g}"
            )

    @property
    def data_mean(self) -> Tensor:
        """The mean, shape (*event)."""
        return torch.tensordot(self.weights, self.means, 1)

    @property
    def data_std(self) -> float:  # noqa: D102
        spread = (self.means - self.data_mean).flatten(1).square().mean(1)
        return float((self.weights @ (spread + self.std.square())).sqrt())

    def _transform(self, u: Tensor) -> Tensor:
        edges = self.weights.cumsum(0).to(u.device)[:-1]
        k = torch.searchsorted(edges, u[:, 0].contiguous(), right=True)
        z = torch.special.ndtri(u[:, 1:].clamp(1e-16, 1 - 1e-16)).reshape(len(u), *self.event_shape)
        std = self.std.to(u.device)[k].view(-1, *(1 for _ in self.event_shape))
        return self.means.to(u.device)[k] + std * z

    def _components(self, x: Tensor, sigma: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Log-weighted densities (B, M), offsets to the means (B, M, D) and variances (B, M)."""
        offset = self.means.to(x.device).flatten(1) - x.flatten(1)[:, None]
        variance = self.std.to(x.device).square().expand(len(x), -1)
        if sigma is not None:
            variance = variance + sigma.square()[:, None]
        elif bool((self.std == 0).any()):
            raise ValueError("GaussianMixture with std = 0 has no density without noise; pass sigma")
        log_norm = 0.5 * offset.shape[-1] * torch.log(2 * math.pi * variance)
        log_k = self.weights.to(x.device).log() - log_norm - 0.5 * offset.square().sum(-1) / variance
        return log_k, offset, variance

    def _log_prob(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        return self._components(x, sigma)[0].logsumexp(1)

    def _score(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        log_k, offset, variance = self._components(x, sigma)
        return torch.einsum("bm,bmd->bd", log_k.softmax(1) / variance, offset).view_as(x)


def eight_gaussians(radius: float = 8 / math.sqrt(2), std: float = 1 / math.sqrt(2)) -> GaussianMixture:
    """Eight equal Gaussians on a circle, in the scale of the public code.

    The text of the paper has radius 1 and states no standard deviation; ``eight_gaussians(1, 1/8)`` keeps
    the code's ratio of the two.
    """
    angle = torch.arange(1, 9, dtype=torch.float64) * (math.pi / 4)
    return GaussianMixture(radius * torch.stack([angle.cos(), angle.sin()], 1), std)


class Checkerboard(Distribution):
    """The uniform distribution on eight squares of a four-by-four board.

    A sample is ``cell * (4w - 2, t - 2s + floor(4w - 2) mod 2)`` with w, t in [0, 1), s in {0, 1} and the
    modulo that is not negative. The entropy of the clean data is ``log(8 cell^2)``.

    Args:
        cell: the side of one square.
    """

    def __init__(self, cell: float = 3.0) -> None:
        super().__init__((2,), 3)
        self.cell = cell
        column = torch.arange(-2, 2).repeat_interleave(2)
        row = column % 2 - 2 * torch.arange(2).repeat(4)
        self.corners = cell * torch.stack([column, row], 1).double()

    @classmethod
    def text(cls) -> Self:
        """The scale of the paper's text."""
        return cls(cell=1.0)

    @property
    def data_std(self) -> float:  # noqa: D102
        return 4 * self.cell / math.sqrt(12)

    def entropy(self, sigma: float | None = None, points: int = 2**16) -> float:  # noqa: D102
        return math.log(8 * self.cell**2) if sigma is None else super().entropy(sigma, points)

    def _transform(self, u: Tensor) -> Tensor:
        x1 = 4 * u[:, 0] - 2
        x2 = u[:, 1] - 2 * torch.floor(2 * u[:, 2]) + torch.remainder(torch.floor(x1), 2)
        return self.cell * torch.stack([x1, x2], 1)

    def _boxes(self, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        offset = x[:, None] - self.corners.to(x.device)
        log_k, slope = _box_kernel(offset, sigma[:, None, None], self.cell)
        return log_k.sum(-1), slope

    def _log_prob(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        if sigma is None:
            offset = x[:, None] - self.corners.to(x.device)
            inside = ((offset >= 0) & (offset < self.cell)).all(-1).any(-1)
            return torch.where(inside, -self.entropy(), -math.inf)
        return self._boxes(x, sigma)[0].logsumexp(1) - math.log(8)

    def _score(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        if sigma is None:
            raise ValueError("Checkerboard has no score without noise; pass sigma")
        log_k, slope = self._boxes(x, sigma)
        return (log_k.softmax(1)[..., None] * slope).sum(1)


class Spirals(Distribution):
    r"""Two spirals, one the other's negative: ``scale (+-) (c(n) + noise w)``, ``c(n) = n (-cos n, sin n)``.

    Here n = end sqrt(u) and u, w1, w2 are uniform in [0, 1). The noise is one-sided, as in the public code.

    Args:
        end: the angle at which the curves end.
        noise: the side of the square over which each point of the curve is spread; 0 for the bare curve.
        scale: a factor on both coordinates.
        paired: draw samples in pairs x, -x, as the public code does (both arms share their draws); pairs
            are neighbours in the sample. Such samples are not independent.
    """

    def __init__(
        self,
        end: float = 3 * math.pi,
        noise: float = 0.5,
        scale: float = 2.3 / 3,
        *,
        paired: bool = False,
    ) -> None:
        super().__init__((2,), 4)
        self.end, self.noise, self.scale, self.paired = end, noise, scale, paired
        self._angles = np.linspace(0, end, 4097)
        self._lengths = (self._angles * np.hypot(1, self._angles) + np.arcsinh(self._angles)) / 2

    @classmethod
    def text(cls) -> Self:
        """The scale of the paper's text, without noise: singular unless sigma is given."""
        return cls(end=math.pi, noise=0.0, scale=1.0)

    @property
    def data_std(self) -> float:  # noqa: D102
        corners, log_w = self._panels(32, torch.device("cpu"))
        centres = corners + self.noise / 2
        second_moment = (log_w.exp()[..., None] * centres.square()).sum((0, 1)).mean() + self.noise**2 / 12
        return self.scale * math.sqrt(second_moment)

    def sample(self, n: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:  # noqa: D102
        if not self.paired:
            return super().sample(n, generator, dtype)
        half = super().sample((n + 1) // 2, generator, dtype)
        return torch.stack([half, -half], 1).flatten(0, 1)[:n]

    def _transform(self, u: Tensor) -> Tensor:
        sign = 1 - 2 * torch.floor(2 * u[:, 3:])
        return self.scale * sign * (_curve(self.end * u[:, :1].sqrt()) + self.noise * u[:, 1:3])

    def _panels(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Lower corners (2 count, nodes, 2) and log-weights (2 count, nodes) of both arms, in `count` panels.

        The panels have equal lengths along the curve; the density of n is ``2n / end^2``.
        """
        edges = np.interp(np.linspace(0, self._lengths[-1], count + 1), self._lengths, self._angles)
        nodes, weights = np.polynomial.legendre.leggauss(_NODES)
        half = np.diff(edges)[:, None] / 2
        n = torch.from_numpy(edges[:-1, None] + half * (1 + nodes)).to(device)
        log_w = torch.log(n * torch.from_numpy(half * weights).to(device) / self.end**2)
        corners = _curve(n[..., None])
        return torch.cat([corners, -corners - self.noise]), torch.cat([log_w, log_w])

    def _quadrature(self, y: Tensor, sigma: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Split a batch in groups of rows and find the panels near each row.

        Yields:
            The rows' indices, and for every visited panel its row within the group, the log-densities of
            its nodes (pairs, nodes) and the slopes of the log-kernels (pairs, nodes, 2).
        """
        wanted = (self._lengths[-1] / (_PANEL * sigma.detach())).clamp(min=_MIN_PANELS)
        level, chunk = torch.ceil(2 * torch.log2(wanted)).long(), _CHUNK.get(y.device.type, 2**20)
        for lv in level.unique().tolist():
            corners, log_w = self._panels(round(2 ** (lv / 2)), y.device)
            middle = corners.mean(1) + self.noise / 2
            reach = (corners - corners.mean(1, keepdim=True)).norm(dim=-1).amax(1) * 1.1
            rows = (level == lv).nonzero()[:, 0]
            for group in rows.split(max(1, chunk // (2 * len(middle)))):
                gap = (y.detach()[group, None] - middle).abs() - self.noise / 2
                distance = gap.clamp(min=0).norm(dim=-1)
                limit = distance.amin(1).square() + 64 * sigma.detach()[group].square()
                row, panel = ((distance - reach).clamp(min=0).square() <= limit[:, None]).nonzero().T
                offset = y[group][row, None] - corners[panel]
                log_k, slope = self._kernel(offset, sigma[group][row, None, None])
                yield group, row, log_w[panel] + log_k.sum(-1), slope

    def _kernel(self, offset: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        return _box_kernel(offset, sigma, self.noise) if self.noise else _gaussian_kernel(offset, sigma)

    def _log_prob(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        y = x / self.scale
        if sigma is None:
            return self._clean_log_prob(y) - 2 * math.log(self.scale)
        groups, values = [], []
        for group, row, log_p, _ in self._quadrature(y, sigma / self.scale):
            top = _row_max(log_p, row, len(group))
            total = torch.zeros_like(top).index_add(0, row, (log_p - top[row, None]).exp().sum(1))
            groups.append(group)
            values.append(total.log() + top)
        result = torch.cat(values)[torch.cat(groups).argsort()]
        return result - 2 * math.log(self.scale)

    def _score(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        if sigma is None:
            raise ValueError("Spirals has no score without noise; pass sigma")
        groups, values = [], []
        for group, row, log_p, slope in self._quadrature(x / self.scale, sigma / self.scale):
            share = (log_p - _row_max(log_p, row, len(group))[row, None]).exp()
            total = x.new_zeros(len(group)).index_add(0, row, share.sum(1))
            weighted = x.new_zeros(len(group), 2).index_add(0, row, (share[..., None] * slope).sum(1))
            groups.append(group)
            values.append(weighted / total[:, None])
        result = torch.cat(values)[torch.cat(groups).argsort()]
        return result / self.scale

    def _clean_log_prob(self, y: Tensor) -> Tensor:
        """The exact density of the spread curve: the measure of the n whose square contains y.

        Between the turning points of its two coordinates the curve is monotone in both, so that this set
        is an interval on each piece; its ends are found by bisection.
        """
        if not self.noise:
            raise ValueError("Spirals without noise lies on curves and has no density; pass sigma")
        y = torch.cat([y, -y])[..., None]
        ends = self._turning_points().to(y)
        left, right = ends[:-1].expand(*y.shape[:2], -1), ends[1:].expand(*y.shape[:2], -1)
        rising = _curve(right, dim=1) > _curve(left, dim=1)
        below, above = (_crossing(level, left, right, rising) for level in torch.stack([y - self.noise, y]))
        first = torch.minimum(below, above).amax(1)
        last = torch.maximum(below, above).amin(1)
        measure = (last.square() - first.square()).where(last > first, 0.0).sum(-1) / self.end**2
        return torch.log(measure.view(2, -1).mean(0) / self.noise**2)

    def _turning_points(self) -> Tensor:
        """The ends of the curve and the zeros of the two coordinates' derivatives in n, ascending."""
        n = torch.linspace(0, self.end, 1025, dtype=torch.float64)
        found = [n[:1], n[-1:]]
        for slope in (lambda n: n * n.sin() - n.cos(), lambda n: n.sin() + n * n.cos()):
            change = (slope(n[1:-1]).sign() * slope(n[2:]).sign() < 0).nonzero()[:, 0] + 1
            left, right = n[change], n[change + 1]
            rising = slope(right) > slope(left)
            for _ in range(60):
                middle = (left + right) / 2
                low = (slope(middle) < 0) == rising
                left, right = torch.where(low, middle, left), torch.where(low, right, middle)
            found.append(left)
        return torch.cat(found).sort().values


def _curve(n: Tensor, dim: int = -1) -> Tensor:
    """``n (-cos n, sin n)``, where the dimension `dim` of n has size 1 or is one per coordinate."""
    first, second = n.tensor_split(2, dim) if n.shape[dim] == 2 else (n, n)
    return torch.cat([-first * first.cos(), second * second.sin()], dim)


def _crossing(level: Tensor, left: Tensor, right: Tensor, rising: Tensor) -> Tensor:
    """Where the coordinates of the curve, monotone on each [left, right], pass `level`; else the nearer end.

    All shapes are (B, 2, pieces) or broadcast to it.
    """
    for _ in range(54):
        middle = (left + right) / 2
        low = (_curve(middle, dim=1) < level) == rising
        left, right = torch.where(low, middle, left), torch.where(low, right, middle)
    return left


def _row_max(log_p: Tensor, row: Tensor, rows: int) -> Tensor:
    """The largest value in each row's panels, without gradient."""
    top = log_p.new_full((rows,), -math.inf)
    return top.scatter_reduce(0, row, log_p.detach().amax(1), "amax")


def _gaussian_kernel(offset: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of N(offset; 0, sigma^2) and its derivative."""
    log_k = -0.5 * (offset / sigma).square() - torch.log(sigma) - 0.5 * math.log(2 * math.pi)
    return log_k, -offset / sigma.square()


def _box_kernel(offset: Tensor, sigma: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """The logarithm of the uniform density on [0, width], blurred by sigma, and its derivative.

    The kernel is ``(Phi(u) - Phi(l)) / width`` with u = offset / sigma and l = u - width / sigma. It is
    even about width / 2; on the side where u + l <= 0 the difference loses no digits in the tail.
    """
    right = offset > width / 2
    upper = torch.where(right, width - offset, offset) / sigma
    h = width / sigma
    log_upper = torch.special.log_ndtr(upper)
    log_mass = log_upper + torch.log(-torch.expm1(torch.special.log_ndtr(upper - h) - log_upper))
    log_pdf = -0.5 * upper.square() - 0.5 * math.log(2 * math.pi)
    slope = -(log_pdf - log_mass).exp() * torch.expm1(h * (upper - h / 2)) / sigma
    return log_mass - math.log(width), torch.where(right, -slope, slope)
