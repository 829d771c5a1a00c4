r"""Processes: how data is perturbed, as schedules over one coordinate system.

A field sees ``x = x0 + sigma z`` with unit noise z (the variance-exploding coordinates of the paper and of
EDM). Any Gaussian diffusion or flow with marginals ``y_t = alpha(t) (x0 + sigma(t) z)`` is that, up to the
scale alpha; so a process is only the schedule: `sigma` as a function of time, its derivative and inverse,
the scale `alpha` of the coordinates in which a foreign network was trained, the time range and the prior.
Its SDE (Eq. 7) in y is ``dy = (alpha'/alpha) y dt + alpha sqrt(d sigma^2/dt) dw``; in x the drift is gone.

The marginal at the end of the time range is not known exactly: it is data plus sigma_max z. `data_mean` and
`data_std` give the prior its first two moments; with their defaults 0 it is the N(0, sigma_max^2) of the
paper, whose mismatch costs 0.8 nat on the paper's 8-Gaussian set.

The paper prints ``sigma_t = sigma_min (sigma_min/sigma_max)^(t/T)``; the ratio is inverted there.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curlfree.checks import can_look


@dataclass(frozen=True, kw_only=True)
class Process(ABC):
    """A schedule of noise levels over times in [t_min, t_max].

    Args:
        t_min: the time at which the noise is smallest.
        t_max: the time at which it is largest.
        data_mean: mean of the data, one number for all dimensions, for the prior.
        data_std: standard deviation of the data, one number for all dimensions, for the prior.
    """

    t_min: float = 0.0
    t_max: float = 1.0
    data_mean: float = 0.0
    data_std: float = 0.0

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor:
        """The standard deviation of the noise in ``x = x0 + sigma z`` at time t."""

    @abstractmethod
    def sigma_prime(self, t: Tensor) -> Tensor:
        """The derivative of sigma with respect to time."""

    @abstractmethod
    def time(self, sigma: Tensor) -> Tensor:
        """The time at which the noise level is sigma."""

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """The scale of the process' own coordinates ``y = alpha x``."""

    @property
    def sigma_range(self) -> tuple[float, float]:
        """The smallest and the largest noise level, in double precision."""
        ends = self.sigma(torch.tensor([self.t_min, self.t_max], dtype=torch.float64))
        return float(ends[0]), float(ends[1])

    def levels(self, n: int) -> Tensor:
        """n noise levels from the largest to the smallest, equally spaced in time, float64, shape (n,)."""
        return self.sigma(torch.linspace(self.t_max, self.t_min, n, dtype=torch.float64))

    def sample_sigma(self, n: int, generator: torch.Generator) -> Tensor:
        """n noise levels at uniformly drawn times (the U(t) of Eqs. A4 and A5), float32, shape (n,)."""
        u = torch.rand(n, generator=generator, device=generator.device)
        return self.sigma(self.t_min + (self.t_max - self.t_min) * u)

    @property
    def prior_std(self) -> float:
        """The standard deviation of the prior, ``sqrt(sigma_max^2 + data_std^2)``."""
        return math.hypot(self.sigma_range[1], self.data_std)

    def prior_sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Draw from the prior N(data_mean, prior_std^2 I), on the generator's device."""
        z = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
        return self.data_mean + self.prior_std * z

    def prior_log_prob(self, x: Tensor) -> Tensor:
        """The prior's log-density in nats at x of shape (B, *event), shape (B,)."""
        z = ((x - self.data_mean) / self.prior_std).reshape(x.shape[0], -1)
        constant = math.log(self.prior_std) + 0.5 * math.log(2 * math.pi)
        return -0.5 * z.square().sum(1) - z.shape[1] * constant

    def _check_times(self, low: float, high: float) -> None:
        if not (low <= self.t_min < self.t_max <= high):
            raise ValueError(
                f"{type(self).__name__} needs {low} <= t_min < t_max <= {high}, "
                f"got t_min={self.t_min}, t_max={self.t_max}"
            )
        if not 0 <= self.data_std < math.inf:
            raise ValueError(f"data_std must be finite and not negative, got {self.data_std}")


@dataclass(frozen=True)
class VE(Process):
    """Variance exploding, the paper's process: ``sigma(t) = sigma_min (sigma_max/sigma_min)^t``, alpha = 1.

    Args:
        sigma_min: the smallest noise level (0.01 for images in [0, 1]).
        sigma_max: the largest noise level (50 for CIFAR-10).
    """

    sigma_min: float = 0.01
    sigma_max: float = 50.0

    def __post_init__(self) -> None:
        if not (0 < self.sigma_min < self.sigma_max < math.inf):
            raise ValueError(
                "VE needs 0 < sigma_min < sigma_max, "
                f"got sigma_min={self.sigma_min}, sigma_max={self.sigma_max}"
            )
        self._check_times(0.0, 1.0)

    @property
    def _log_ratio(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def sigma(self, t: Tensor) -> Tensor:  # noqa: D102
        return self.sigma_min * torch.exp(self._log_ratio * t)

    def sigma_prime(self, t: Tensor) -> Tensor:  # noqa: D102
        return self._log_ratio * self.sigma(t)

    def time(self, sigma: Tensor) -> Tensor:  # noqa: D102
        return torch.log(sigma / self.sigma_min) / self._log_ratio

    def alpha(self, t: Tensor) -> Tensor:  # noqa: D102
        return torch.ones_like(t)


@dataclass(frozen=True)
class VP(Process):
    """Variance preserving: ``beta(t)`` linear from beta_min to beta_max, alpha^2 (1 + sigma^2) = 1.

    Args:
        beta_min: the rate at t = 0.
        beta_max: the rate at t = 1.
    """

    beta_min: float = 0.1
    beta_max: float = 20.0
    t_min: float = field(default=1e-3, kw_only=True)

    def __post_init__(self) -> None:
        if not (0 < self.beta_min < self.beta_max < math.inf):
            raise ValueError(
                f"VP needs 0 < beta_min < beta_max, got beta_min={self.beta_min}, beta_max={self.beta_max}"
            )
        if self.t_min <= 0:
            raise ValueError(f"VP needs t_min > 0 (its noise is 0 at time 0), got {self.t_min}")
        self._check_times(0.0, 1.0)

    def _integral(self, t: Tensor) -> Tensor:
        """The integral of beta from 0 to t, ``log(1 + sigma^2)``."""
        return t * (self.beta_min + 0.5 * t * (self.beta_max - self.beta_min))

    def sigma(self, t: Tensor) -> Tensor:  # noqa: D102
        return torch.sqrt(torch.expm1(self._integral(t)))

    def sigma_prime(self, t: Tensor) -> Tensor:  # noqa: D102
        beta = self.beta_min + t * (self.beta_max - self.beta_min)
        return 0.5 * beta * torch.exp(self._integral(t)) / self.sigma(t)

    def time(self, sigma: Tensor) -> Tensor:  # noqa: D102
        integral, slope = torch.log1p(sigma.square()), self.beta_max - self.beta_min
        return 2 * integral / (self.beta_min + (self.beta_min**2 + 2 * slope * integral).sqrt())

    def alpha(self, t: Tensor) -> Tensor:  # noqa: D102
        return torch.exp(-0.5 * self._integral(t))


@dataclass(frozen=True)
class Linear(Process):
    """The straight path of flow matching: ``y_t = (1 - t) x0 + t z``, so sigma = t / (1 - t)."""

    t_min: float = field(default=1e-3, kw_only=True)
    t_max: float = field(default=1 - 1e-3, kw_only=True)

    def __post_init__(self) -> None:
        if not (0 < self.t_min and self.t_max < 1):
            raise ValueError(
                f"Linear needs 0 < t_min and t_max < 1, got t_min={self.t_min}, t_max={self.t_max}"
            )
        self._check_times(0.0, 1.0)

    def sigma(self, t: Tensor) -> Tensor:  # noqa: D102
        return t / (1 - t)

    def sigma_prime(self, t: Tensor) -> Tensor:  # noqa: D102
        return (1 - t) ** -2

    def time(self, sigma: Tensor) -> Tensor:  # noqa: D102
        return sigma / (1 + sigma)

    def alpha(self, t: Tensor) -> Tensor:  # noqa: D102
        return 1 - t


@dataclass(frozen=True)
class Discrete(Process):
    """The schedule of a network with integer timesteps: noise levels in a table, log-linear in between.

    Variance preserving, so ``alpha^2 (1 + sigma^2) = 1``, as in DDPM: from its cumulative products,
    ``sigmas = tuple(((1 - a) / a).sqrt().tolist())`` with ``a = alphas_cumprod``. Times are indices.

    Args:
        sigmas: the noise level of each timestep, increasing.
    """

    sigmas: tuple[float, ...] = ()
    t_max: float = field(default=math.inf, kw_only=True)

    def __post_init__(self) -> None:
        table = torch.tensor(self.sigmas, dtype=torch.float64)
        if len(table) < 2 or not bool((table.diff() > 0).all()) or not 0 < table[0] or table[-1].isinf():
            raise ValueError(
                "Discrete needs at least two increasing, positive, finite noise levels, got "
                f"{len(table)} of them: {', '.join(f'{s:g}' for s in self.sigmas[:4])}..."
            )
        object.__setattr__(self, "t_max", min(self.t_max, len(table) - 1.0))
        self._check_times(0.0, len(table) - 1.0)

    def _covers(self, sigma: Tensor) -> Tensor:
        """Which levels are inside the table, up to rounding."""
        return (sigma >= self.sigmas[0] * (1 - 1e-4)) & (sigma <= self.sigmas[-1] * (1 + 1e-4))

    def _table(self, like: Tensor) -> Tensor:
        return torch.tensor(self.sigmas, dtype=like.dtype, device=like.device).log()

    def sigma(self, t: Tensor) -> Tensor:  # noqa: D102
        table = self._table(t)
        low = t.detach().floor().long().clamp(0, len(table) - 2)
        return torch.exp(table[low] + (t - low) * (table[low + 1] - table[low]))

    def sigma_prime(self, t: Tensor) -> Tensor:  # noqa: D102
        table = self._table(t)
        low = t.floor().long().clamp(0, len(table) - 2)
        return self.sigma(t) * (table[low + 1] - table[low])

    def time(self, sigma: Tensor) -> Tensor:  # noqa: D102
        table = self._table(sigma)
        if can_look(sigma) and not bool(self._covers(sigma).all()):
            raise ValueError(
                f"the network knows noise levels from {self.sigmas[0]:g} to {self.sigmas[-1]:g}: expected "
                f"sigma in that range, got [{sigma.min():g}, {sigma.max():g}]; give the samplers this process"
            )
        low = (torch.searchsorted(table, sigma.log().contiguous(), right=True) - 1).clamp(0, len(table) - 2)
        return low + (sigma.log() - table[low]) / (table[low + 1] - table[low])

    def alpha(self, t: Tensor) -> Tensor:  # noqa: D102
        return (1 + self.sigma(t).square()).rsqrt()
