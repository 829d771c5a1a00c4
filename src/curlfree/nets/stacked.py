"""Networks side by side: S copies of one network, with parameters stacked, as one network.

The batch is S * B points, the first B for the first copy and so on: ``x.view(S, B, ...)``. A point only meets
the parameters of its own copy, so that fields, penalties and metrics work on the flattened batch unchanged,
and a loss that is the sum of the copies' own losses gives each copy its own gradient: S runs in one program.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap


class Stacked(nn.Module):
    """S networks of one structure as one, each on its own part of the batch.

    Args:
        networks: the networks; their parameters are copied. Their buffers must be equal.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        if not networks:
            raise ValueError("Stacked needs at least one network, got none")
        self._names = [name for name, _ in networks[0].named_parameters()]
        columns = zip(*(network.parameters() for network in networks), strict=True)
        self.stacks = nn.ParameterList(torch.stack([p.detach() for p in column]) for column in columns)
        self._shared = [name for name, _ in networks[0].named_buffers()]
        for i, buffer in enumerate(networks[0].buffers()):
            self.register_buffer(f"shared_{i}", buffer.clone(), persistent=False)
        self._skeleton = (copy.deepcopy(networks[0]).requires_grad_(False),)  # in a tuple: not a submodule

    @property
    def copies(self) -> int:
        """S, how many networks there are."""
        return len(next(iter(self.stacks)))

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Map x of shape (S * B, *event) and levels of shape (S * B,) to a tensor like x.

        Raises:
            ValueError: the batch is not a multiple of S.
        """
        if len(x) % self.copies:
            raise ValueError(
                f"{self.copies} networks need a batch of as many equal parts, got {len(x)} points"
            )
        parameters = dict(zip(self._names, self.stacks, strict=True))
        shared = dict(zip(self._shared, self.buffers(), strict=True))
        (skeleton,) = self._skeleton

        def one(own: dict[str, Tensor], points: Tensor, levels: Tensor) -> Tensor:
            return functional_call(skeleton, own | shared, (points, levels))

        parts = vmap(one)(parameters, x.unflatten(0, (self.copies, -1)), level.view(self.copies, -1))
        return parts.flatten(0, 1)


def select(field: nn.Module, index: int) -> nn.Module:
    """A copy of a field, all of whose parameters are stacked, with the index-th network alone."""
    single = copy.deepcopy(field)
    for parameter in single.parameters():
        parameter.data = parameter.data[index : index + 1].clone()
    return single


@torch.no_grad()
def clip_gradients(stacked: nn.Module, copies: int, limit: float) -> Tensor:
    """Scale each copy's gradient so that its norm is at most `limit`.

    Args:
        stacked: a module all of whose parameters are stacked.
        copies: S.
        limit: the largest norm.

    Returns:
        The norms before, shape (S,).
    """
    gradients = [p.grad for p in stacked.parameters() if p.grad is not None]
    norms = torch.stack([g.reshape(copies, -1).square().sum(1) for g in gradients]).sum(0).sqrt()
    factors = (limit / (norms + 1e-6)).clamp(max=1)
    for g in gradients:
        g.mul_(factors.view(-1, *[1] * (g.ndim - 1)))
    return norms
