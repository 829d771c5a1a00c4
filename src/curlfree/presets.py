r"""The named runs.

Two dimensions: `8gaussians-u`, `-c` and `-qc` with the well-conditioned network (other sets by
``--data.name``); `paper-8gaussians-*` have the paper's network and constants (Section 3.2).

Images: `cifar10-u`, `-c` and `-qc` have the constants of the paper's Section 5 as its public code has them
(https://github.com/chen-hao-chao/qcsbm): NCSN++ deep, noise from 0.01 to 50, Adam with learning rate 2e-4
and 5,000 steps of warm-up, gradients clipped at norm 1, moving average 0.999, batches of 128, dropout 0.1,
lambda = 1e-4 on the penalty weighted by sigma^2. Its estimator is ours: the skew form, on the "auto" part of
the batch (`curlfree.penalty.AUTO_FRACTION`). `cifar10-small-*` are short runs with a smaller network,
`tiny-*` runs of seconds for tests.
"""

from dataclasses import replace

from curlfree.config import (
    FieldConfig,
    Form,
    ObjectiveConfig,
    OptimConfig,
    PackedData,
    RunConfig,
    ToyData,
    TrainConfig,
)
from curlfree.nets.mlp import FilmMLPConfig, PaperMLPConfig
from curlfree.nets.ncsnpp import PRESETS as NETWORKS
from curlfree.nets.ncsnpp import NCSNppConfig
from curlfree.processes import VE

_TOY = RunConfig(
    name="8gaussians-u",
    data=ToyData(),
    process=VE(0.1, 30.0),
    field=FieldConfig(network=FilmMLPConfig()),
    objective=ObjectiveConfig(),
    optim=OptimConfig(lr=2e-3, warmup=100),
    train=TrainConfig(steps=3000, batch_size=1024, checkpoint_every=1000, validation_samples=4096),
)
_TOY_QC = ObjectiveConfig(lmbda=0.1, weighting="sigma4", fraction=1 / 4)

_PAPER_TOY = replace(
    _TOY,
    name="paper-8gaussians-u",
    process=VE(0.1, 3.0),
    field=FieldConfig(network=PaperMLPConfig()),
    optim=OptimConfig(lr=7.5e-4, warmup=0, ema=0.0),
    train=replace(_TOY.train, steps=2000, batch_size=5000),
)
# The code's loss lacks the 1/2 of Eq. 5: its lambda of 0.1 is 0.05 here.
_PAPER_TOY_QC = ObjectiveConfig(lmbda=0.05, estimator="trace", form="double")

_CIFAR10 = RunConfig(
    name="cifar10-u",
    data=PackedData(path="cifar10.pack", flip=True),
    process=VE(0.01, 50.0),
    field=FieldConfig(network=NETWORKS["ncsnpp-deep"]),
    objective=ObjectiveConfig(),
    optim=OptimConfig(),
    train=TrainConfig(precision="bfloat16", compile=True, channels_last=True, images=64),
)
_CIFAR10_QC = ObjectiveConfig(lmbda=1e-4, fraction="auto")
_SMALL = replace(
    _CIFAR10,
    name="cifar10-small-u",
    field=FieldConfig(network=NETWORKS["ncsnpp-small"]),
    train=replace(_CIFAR10.train, steps=20_000, checkpoint_every=2000),
)
_TINY = replace(
    _CIFAR10,
    name="tiny-u",
    data=PackedData(),
    field=FieldConfig(
        network=NCSNppConfig(size=16, width=8, multipliers=(1, 2), blocks=1, attention=(8,), dropout=0.1)
    ),
    optim=OptimConfig(lr=1e-3, warmup=10),
    train=TrainConfig(
        steps=100,
        batch_size=16,
        log_every=10,
        checkpoint_every=50,
        validation_samples=64,
        tensorboard=False,
    ),
)


def _variant(
    config: RunConfig, name: str, form: Form = "score", objective: ObjectiveConfig | None = None
) -> RunConfig:
    field = replace(config.field, form=form)
    return replace(config, name=name, field=field, objective=objective or config.objective)


PRESETS: dict[str, RunConfig] = {
    config.name: config
    for config in (
        _TOY,
        _variant(_TOY, "8gaussians-c", "energy"),
        _variant(_TOY, "8gaussians-qc", objective=_TOY_QC),
        _PAPER_TOY,
        _variant(_PAPER_TOY, "paper-8gaussians-c", "paper-energy"),
        _variant(_PAPER_TOY, "paper-8gaussians-qc", objective=_PAPER_TOY_QC),
        _CIFAR10,
        _variant(_CIFAR10, "cifar10-c", "paper-energy"),
        _variant(_CIFAR10, "cifar10-c-scaled", "energy"),
        _variant(_CIFAR10, "cifar10-qc", objective=_CIFAR10_QC),
        _SMALL,
        _variant(_SMALL, "cifar10-small-c", "energy"),
        _variant(_SMALL, "cifar10-small-qc", objective=_CIFAR10_QC),
        _TINY,
        _variant(_TINY, "tiny-c", "energy"),
        _variant(_TINY, "tiny-qc", objective=ObjectiveConfig(lmbda=1e-4, fraction=0.5)),
    )
}


def preset(name: str) -> RunConfig:
    """The run of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; expected one of {', '.join(PRESETS)}")
    return PRESETS[name]
