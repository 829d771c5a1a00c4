r"""How much of the batch the penalty needs: its gradient noise against that of score matching.

Per step, score matching on B samples has a gradient of variance ``Var_SM / B`` (the trace of the covariance
of one sample's gradient), the penalty on rho B of them ``lambda^2 Var_QC / (rho B)``. Noise that is small
beside what is there anyway costs nothing, so

    rho = lambda^2 Var_QC / (0.05 Var_SM),  at most 1

is where the penalty adds 5 %; a larger fraction buys nothing, a smaller one adds noise. The penalty in every
k-th step only, with k times the weight, counts as rho / k. `penalty_noise` measures both variances on the
network itself; ``fraction="auto"`` of `curlfree.qc_loss` is a number that was safe where it was measured.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curlfree.checks import check_batch, check_sigma
from curlfree.estimators import gaussian
from curlfree.objectives import Weighting, dsm, sigma2
from curlfree.operators import Condition, per_sample
from curlfree.penalty import Form, qc_loss, restrict

SHARE = 0.05


@dataclass(frozen=True)
class PenaltyNoise:
    """The variances of one sample's gradient, each the trace of its covariance.

    Args:
        score_matching: of the weighted score-matching loss.
        score_matching_se: its standard error.
        penalty: of lambda times the weighted penalty.
        penalty_se: its standard error.
        samples: how many gradients they come from.
    """

    score_matching: float
    score_matching_se: float
    penalty: float
    penalty_se: float
    samples: int

    @property
    def fraction(self) -> float:
        """The part of the batch at which the penalty adds 5 % to the variance of the gradient, at most 1."""
        return min(1.0, self.penalty / (SHARE * self.score_matching))


def penalty_noise(
    field: nn.Module,
    x0: Tensor,
    sigma: Tensor,
    *,
    lmbda: float,
    weighting: Weighting = sigma2,
    qc_weighting: Weighting | None = None,
    estimator: str = "skew",
    form: Form = "auto",
    generator: torch.Generator | None = None,
    condition: Condition | None = None,
) -> PenaltyNoise:
    """Measure the gradient noise of score matching and of the penalty, one sample at a time.

    Args:
        field: the network, in the mode and state in which it is trained.
        x0: clean data, of shape (N, *event); some hundred samples give each variance to about 10 %.
        sigma: their noise levels, of shape (N,), drawn as in training.
        lmbda: the penalty's factor.
        weighting: the level's weight in both terms.
        qc_weighting: the level's weight in the penalty, if another.
        estimator: as in `qc_loss`.
        form: as in `qc_loss`.
        generator: the source of noise and probes; by default PyTorch's own.
        condition: keyword arguments for the field; tensors with N rows go with the samples.

    Returns:
        Both variances; ``.fraction`` is the recommended part of the batch.

    Raises:
        TypeError: as `qc_loss`.
        ValueError: as `qc_loss`; less than two samples.
    """
    check_batch(x0, None)
    check_sigma(sigma, x0)
    if len(x0) < 2:
        raise ValueError(f"a variance needs at least two samples, got {len(x0)}")
    parameters = [p for p in field.parameters() if p.requires_grad]
    matching, penalty = _Moments(), _Moments()
    for i in range(len(x0)):
        one = torch.arange(i, i + 1, device=x0.device)
        given = restrict(condition, one, len(x0))
        clean, level = x0[one], sigma[one]
        z = gaussian(clean, generator)
        loss = (weighting(level) * dsm(field, clean, level, z, condition=given)).mean()
        matching.add(torch.autograd.grad(loss, parameters, allow_unused=True))
        loss = qc_loss(
            field,
            clean + per_sample(level, clean) * z,
            level,
            weight=lmbda * (qc_weighting or weighting)(level),
            estimator=estimator,
            form=form,
            generator=generator,
            condition=given,
        )
        penalty.add(torch.autograd.grad(loss, parameters, allow_unused=True))
    return PenaltyNoise(*matching.variance(), *penalty.variance(), samples=len(x0))


class _Moments:
    """The sum of gradients and their squared norms."""

    def __init__(self) -> None:
        self.total: list[Tensor] = []
        self.squares: list[float] = []

    def add(self, gradients: tuple[Tensor | None, ...]) -> None:
        found = [g.double() for g in gradients if g is not None]
        self.squares.append(float(sum((g.square().sum() for g in found), torch.zeros(()))))
        self.total = [a + g for a, g in zip(self.total, found, strict=True)] if self.total else found

    def variance(self) -> tuple[float, float]:
        """The trace of the covariance, unbiased, and its standard error from the squared norms' spread."""
        n = len(self.squares)
        mean2 = float(sum((t.square().sum() for t in self.total), torch.zeros(()))) / n**2
        squares = torch.tensor(self.squares, dtype=torch.float64)
        return (float(squares.mean()) - mean2) * n / (n - 1), float(squares.std()) / math.sqrt(n)
