"""The moving average of a network's weights, which samples and metrics use unless asked otherwise."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Ema:
    """An exponential moving average of all parameters of a module.

    In step n the decay is ``min(decay, (1 + n)/(10 + n))``, so that the average forgets the initial weights
    early on (the rule of the authors' code).

    Args:
        module: whose parameters to follow.
        decay: the decay in the long run; 0 for no averaging.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in module.named_parameters()
        }

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Move the average towards the module's present parameters.

        Args:
            module: the module that was followed so far.
            step: how many steps were made, 1 after the first one.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = list(self.weights.values())
        torch._foreach_lerp_(averages, [p.detach() for p in module.parameters()], 1 - decay)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over an average that was saved."""
        for name, average in self.weights.items():
            average.copy_(weights[name])
