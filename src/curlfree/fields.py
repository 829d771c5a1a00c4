r"""Fields: the paper's parametrisations, better-scaled ones, energies, and adapters for foreign networks.

A network f turns into a score in one of two ways (Eq. 11). *Unconstrained* (U, and QC, which is U with
another loss): ``s_U = (f - x)/sigma``. *Constrained* (C): the score of an energy,
``s_C = -d/dx ||x - f||^2/(2 sigma)``. The paper prints ``s_U = (x - f)/sigma``, whose sign is opposite to
s_C's for the same f; `PaperField(f, printed_sign=True)` is that one.

Both are badly scaled: a score grows as 1/sigma, so f must cancel x ever more exactly as sigma falls, and the
energy's score needs ``f - x`` of size sqrt(sigma). With a denoiser D, ``s = (D - x)/sigma^2`` (Tweedie) and
``E = ||x - D||^2/(2 sigma^2)`` need only what a denoiser does; D itself is scaled to unit variance inside and
out by `Preconditioned` (Karras et al. 2022, arXiv:2206.00364, Table 1).

Energies are callables ``energy(x, sigma) -> (B,)``; `EnergyField` makes their score. Adapters bring networks
that were trained in other coordinates, with other targets, to ``field(x, sigma)``, once, at the boundary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from curlfree.checks import check_floating
from curlfree.operators import (
    differentiable_point,
    gradient,
    inner,
    ordinary,
    outside_inference,
    per_sample,
    second_order,
)
from curlfree.processes import Linear, Process

Network = Callable[..., Tensor]
Tangents = tuple[Tensor, ...]


class PaperField(nn.Module):
    """The paper's U: ``s_U = (f - x)/sigma`` (Eq. 11 with its sign resolved).

    Args:
        f: the network, ``f(x, sigma) -> tensor like x``.
        printed_sign: use the sign of the printed equation and of the authors' code, ``(x - f)/sigma``.
    """

    def __init__(self, f: Network, *, printed_sign: bool = False) -> None:
        super().__init__()
        self.f = f
        self.sign = -1.0 if printed_sign else 1.0

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The score."""
        return (self.f(x, sigma, **condition) - x) * (self.sign / per_sample(sigma, x))


class DenoiserField(nn.Module):
    """The well-scaled U: ``s = (D - x)/sigma^2``.

    Args:
        denoiser: ``D(x, sigma) -> tensor like x``, an estimate of E[x0 | x].
    """

    def __init__(self, denoiser: Network) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The score."""
        return (self.denoiser(x, sigma, **condition) - x) / per_sample(sigma, x).square()


class Preconditioned(nn.Module):
    """A denoiser ``D = c_skip x + c_out F(c_in x, c_noise)`` around a network F of unit variance in and out.

    Args:
        network: ``F(x, c_noise)``, where ``c_noise = ln(sigma)/4`` has shape (B,).
        data_std: the standard deviation of the data.
        data_mean: the mean of the data, one number.
    """

    def __init__(self, network: Network, *, data_std: float, data_mean: float = 0.0) -> None:
        super().__init__()
        if not 0 < data_std < math.inf:
            raise ValueError(
                f"data_std must be positive and finite, got {data_std}; with 0 the network would have no say"
            )
        self.network = network
        self.data_std, self.data_mean = data_std, data_mean

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The denoised x."""
        s, d = per_sample(sigma, x), self.data_std
        scale = (s.square() + d**2).sqrt()
        y = x - self.data_mean
        F = self.network(y / scale, sigma.log() / 4, **condition)
        return self.data_mean + y * (d / scale).square() + F * (s * d / scale)


class EnergyField(nn.Module):
    """The score of an energy, ``s = -dE/dx``: conservative whatever the energy's parameters (Eq. 9).

    Args:
        energy: ``E(x, sigma) -> (B,)``, with each sample's energy a function of that sample alone.
    """

    def __init__(self, energy: Callable[..., Tensor]) -> None:
        super().__init__()
        self.energy = energy

    def forward(self, x: Tensor, sigma: Tensor | None = None, **condition: Any) -> Tensor:
        """The score; it keeps its graph if gradients are enabled."""
        differentiable = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad(), second_order():
            point = differentiable_point(x)
            E = self.energy(point, outside_inference(sigma), **ordinary(condition))
            check_floating("the energy", E)
            if E.shape != x.shape[:1]:
                raise ValueError(
                    f"an energy returns one number per sample, shape ({x.shape[0]},), got {tuple(E.shape)}"
                )
            return -gradient(E, point, torch.ones_like(E), create_graph=differentiable)


class PaperEnergy(nn.Module):
    """The paper's C: ``E = ||x - f||^2/(2 sigma)`` (Eq. 11)."""

    def __init__(self, f: Network) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The energies, shape (B,)."""
        r = x - self.f(x, sigma, **condition)
        return inner(r, r) / (2 * sigma)


class DenoiserEnergy(nn.Module):
    """The well-scaled C: ``E = ||x - D||^2/(2 sigma^2)`` with a denoiser D."""

    def __init__(self, denoiser: Network) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The energies, shape (B,)."""
        r = x - self.denoiser(x, sigma, **condition)
        return inner(r, r) / (2 * sigma.square())

    def tangents(self, x: Tensor, sigma: Tensor, vs: Tangents, **condition: Any) -> tuple[Tensor, Tangents]:
        """The energies and their derivatives along each v, ``<x - D, v - J_D v>/sigma^2``."""
        denoiser: Any = self.denoiser
        D, products = denoiser.tangents(x, sigma, vs, **condition)
        r = x - D
        slopes = (inner(r, v - Jv) / sigma.square() for v, Jv in zip(vs, products, strict=True))
        return inner(r, r) / (2 * sigma.square()), tuple(slopes)


class ScoreNormEnergy(nn.Module):
    """The authors' C-NCSN++, not Eq. 11: ``E = ||h||^2/(2 sigma^3)`` with the raw output h of the network.

    NCSN++ returns h/sigma, so with its output s this is ``||s||^2/(2 sigma)``. The output that a Gaussian at
    noise level sigma asks for has rms sigma^1.5: 0.001 at sigma = 0.01 and 354 at sigma = 50.
    """

    def __init__(self, score: Network) -> None:
        super().__init__()
        self.score = score

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The energies, shape (B,)."""
        s = self.score(x, sigma, **condition)
        return inner(s, s) / (2 * sigma)

    def tangents(self, x: Tensor, sigma: Tensor, vs: Tangents, **condition: Any) -> tuple[Tensor, Tangents]:
        """The energies and their derivatives along each v, ``<s, J v>/sigma``."""
        score: Any = self.score
        s, products = score.tangents(x, sigma, vs, **condition)
        return inner(s, s) / (2 * sigma), tuple(inner(s, Jv) / sigma for Jv in products)


class InnerProductEnergy(nn.Module):
    """``E = -<x, f>/(2 sigma)``.

    Its score is f/sigma where f is a gradient and homogeneous of degree one (Euler), a gradient for any f.
    """

    def __init__(self, f: Network) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The energies, shape (B,)."""
        return -inner(x, self.f(x, sigma, **condition)) / (2 * sigma)


class ScalarEnergy(nn.Module):
    """The energy of a network with one output per sample, ``E = g(x, sigma)`` of shape (B, 1) or (B,)."""

    def __init__(self, g: Network) -> None:
        super().__init__()
        self.g = g

    def forward(self, x: Tensor, sigma: Tensor | None, **condition: Any) -> Tensor:
        """The energies, shape (B,)."""
        return self.g(x, sigma, **condition).reshape(x.shape[0])


class Autoencoder(nn.Module):
    """The one-layer autoencoder of Sec. 6, ``s = R h(W^T x + b) + c``, without noise levels.

    Its Jacobian is ``R diag(h'(W^T x + b)) W^T``. Tied weights, W = R, make it symmetric. For a nonlinear h
    the condition that the paper quotes, W R^T = R W^T, does not; each pair of columns must be parallel
    (`column_angles` all 0): a sum ``sum_i h_i'(x) (R_i W_i^T - W_i R_i^T)`` with independent h_i' vanishes
    only term by term.

    Args:
        size: D, the dimension of x.
        hidden: H, the number of hidden units.
        tied: use W = R.
        activation: h, applied elementwise.
        generator: the source of the initial weights, uniform in [-1, 1).
    """

    def __init__(
        self,
        size: int,
        hidden: int,
        *,
        generator: torch.Generator,
        tied: bool = False,
        activation: Callable[[Tensor], Tensor] = nn.functional.silu,
    ) -> None:
        super().__init__()

        def uniform(*shape: int) -> nn.Parameter:
            return nn.Parameter(2 * torch.rand(shape, generator=generator) - 1)

        self.R, self.b, self.c = uniform(size, hidden), uniform(hidden), uniform(size)
        self.W = self.R if tied else uniform(size, hidden)
        self.activation = activation

    def forward(self, x: Tensor, sigma: Tensor | None = None) -> Tensor:
        """The field's value at x of shape (B, D)."""
        return self.activation(x @ self.W + self.b) @ self.R.T + self.c

    def column_angles(self) -> Tensor:
        """The angles, in [0, pi/2], between the lines of the paired columns of W and R, shape (H,).

        0 where either column is zero: such a unit adds nothing to the Jacobian.
        """
        cosine = nn.functional.cosine_similarity(self.W, self.R, dim=0).abs()
        present = (self.W != 0).any(0) & (self.R != 0).any(0)
        return torch.acos(cosine.clamp(max=1.0)) * present


class LinearField(nn.Module):
    """``s = x A^T`` with a fixed matrix A of shape (D, D): Jacobian A everywhere."""

    A: Tensor

    def __init__(self, A: Tensor) -> None:
        super().__init__()
        if A.ndim != 2 or A.shape[0] != A.shape[1]:
            raise ValueError(f"a linear field needs a square matrix, got shape {tuple(A.shape)}")
        self.register_buffer("A", A)

    def forward(self, x: Tensor, sigma: Tensor | None = None) -> Tensor:
        """The field's value at x of shape (B, D)."""
        return x @ self.A.T


class Rotation(LinearField):
    """The rotation ``[-x2, x1]`` of the plane: purely skew, so NAsym = 1."""

    def __init__(self) -> None:
        super().__init__(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))

    def forward(self, x: Tensor, sigma: Tensor | None = None) -> Tensor:
        """The field's value at x of shape (B, 2)."""
        return x @ self.A.T.to(x.dtype)


class NoisePrediction(nn.Module):
    """The score of a network that predicts the noise z in a process' own coordinates: ``s = -z/sigma``.

    Args:
        network: ``z(y, t)`` with ``y = alpha(t) x``.
        process: the schedule it was trained with.
    """

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__()
        self.network, self.process = network, process

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The score."""
        t = self.process.time(sigma)
        z = self.network(per_sample(self.process.alpha(t), x) * x, t, **condition)
        return -z / per_sample(sigma, x)


class DataPrediction(nn.Module):
    """The denoiser of a network that predicts the clean data in a process' own coordinates.

    Args:
        network: ``x0(y, t)`` with ``y = alpha(t) x``.
        process: the schedule it was trained with.
    """

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__()
        self.network, self.process = network, process

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The denoised x; give it to `DenoiserField` for the score."""
        t = self.process.time(sigma)
        return self.network(per_sample(self.process.alpha(t), x) * x, t, **condition)


class AngularVelocityPrediction(nn.Module):
    """The denoiser of a v-prediction network of a variance-preserving process, ``v = alpha z - beta x0``.

    With ``y = alpha x0 + beta z`` and ``alpha^2 + beta^2 = 1``: ``x0 = alpha y - beta v`` (Salimans and Ho
    2022, arXiv:2202.00512).

    Args:
        network: ``v(y, t)``.
        process: the schedule it was trained with, variance preserving.

    Raises:
        ValueError: the process is not variance preserving.
    """

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__()
        ends = torch.tensor([process.t_min, process.t_max], dtype=torch.float64)
        variance = process.alpha(ends).square() * (1 + process.sigma(ends).square())
        if not bool((variance - 1).abs().max() < 1e-6):
            raise ValueError(
                "v-prediction needs a variance-preserving process, alpha^2 (1 + sigma^2) = 1, such as VP or "
                f"Discrete; got {type(process).__name__}"
            )
        self.network, self.process = network, process

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The denoised x; give it to `DenoiserField` for the score."""
        t = self.process.time(sigma)
        alpha = per_sample(self.process.alpha(t), x)
        y = alpha * x
        return alpha * y - alpha * per_sample(sigma, x) * self.network(y, t, **condition)


class FlowPrediction(nn.Module):
    """The denoiser of a flow-matching network on the straight path ``y = (1 - t) x0 + t z``.

    It predicts the velocity ``dy/dt = z - x0``, so ``x0 = y - t velocity`` (Lipman et al. 2023,
    arXiv:2210.02747). Data at t = 0, noise at t = 1.

    Args:
        network: ``velocity(y, t)``.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.process = network, Linear()

    def forward(self, x: Tensor, sigma: Tensor, **condition: Any) -> Tensor:
        """The denoised x; give it to `DenoiserField` for the score."""
        t = self.process.time(sigma)
        y = per_sample(1 - t, x) * x
        return y - per_sample(t, x) * self.network(y, t, **condition)
