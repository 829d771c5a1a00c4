r"""Configurations: everything that decides a training run, as frozen dataclasses that validate themselves.

A run is a `RunConfig`; the named ones are in `curlfree.presets`. Variants come from overriding fields, on the
command line or by `dataclasses.replace`. `save_config` and `load_config` keep the resolved configuration as
JSON, where a part with several kinds is stored under the name of its kind (`KINDS`), for instance
``{"process": {"ve": {"sigma_min": 0.01, ...}}}``. A key that is no field is refused: nothing is ignored
silently. `curlfree.build` makes fields and data from a configuration.
"""

import json
import math
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from curlfree.estimators import ESTIMATORS
from curlfree.nets.mlp import FilmMLPConfig, PaperMLPConfig
from curlfree.nets.ncsnpp import NCSNppConfig
from curlfree.penalty import AUTO_FRACTION, DUALS
from curlfree.pieces import write_bytes
from curlfree.processes import VE, VP, Linear

Toy = Literal["8gaussians", "spirals", "checkerboard"]
Precision = Literal["float32", "bfloat16", "float64"]
Form = Literal["score", "energy", "paper-energy"]
T = TypeVar("T")


def _expect(ok: bool, name: str, expected: str, found: object) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, found {found!r}")


@dataclass(frozen=True, kw_only=True)
class ToyData:
    """Fresh samples of a two-dimensional distribution whose score is known, in every step.

    Args:
        name: which one.
    """

    name: Toy = "8gaussians"

    def __post_init__(self) -> None:
        _expect(self.name in typing.get_args(Toy), "data.name", f"one of {typing.get_args(Toy)}", self.name)


@dataclass(frozen=True, kw_only=True)
class PackedData:
    """Images from a file made by `curlfree prepare`.

    Args:
        path: the file.
        split: the images to train on.
        validation: the images of the held-out loss, if the file has them.
        flip: mirror each image with probability one half; wrong for digits and letters.
        unlabelled: the share of images whose class a conditional network does not see, for guidance.
    """

    path: str = "images.pack"
    split: str = "train"
    validation: str = "test"
    flip: bool = False
    unlabelled: float = 0.1

    def __post_init__(self) -> None:
        _expect(0 <= self.unlabelled <= 1, "data.unlabelled", "a share in [0, 1]", self.unlabelled)


@dataclass(frozen=True, kw_only=True)
class FieldConfig:
    """A network and how it becomes a field.

    Args:
        network: the network.
        form: "score" (U and QC); "energy", C in the well-scaled form ``||x - D||^2/(2 sigma^2)``; or
            "paper-energy", C as the authors' code has it.
    """

    network: NCSNppConfig | FilmMLPConfig | PaperMLPConfig
    form: Form = "score"

    def __post_init__(self) -> None:
        _expect(
            self.form in typing.get_args(Form), "field.form", f"one of {typing.get_args(Form)}", self.form
        )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Score matching weighted by sigma^2, and the penalty (Eqs. 12, A4, A5).

    Args:
        lmbda: the penalty's factor; 0 for U and C.
        weighting: the level's weight in the penalty: "sigma2" (the paper's) or "sigma4".
        estimator: of the asymmetry, a key of `curlfree.estimators.ESTIMATORS`.
        form: "dual" (one ordinary backward, for "skew" and "paper") or "double" (double backward, any).
        fraction: the part of each batch that the penalty is evaluated on; "auto" is
            `curlfree.penalty.AUTO_FRACTION`, at which the penalty's own noise does not matter at the paper's
            lambda (`curlfree.budget` measures the bound for others).
        every: evaluate the penalty in every k-th step only, with k times the weight.
        probes: estimates per sample.
    """

    lmbda: float = 0.0
    weighting: Literal["sigma2", "sigma4"] = "sigma2"
    estimator: str = "skew"
    form: Literal["dual", "double"] = "dual"
    fraction: float | Literal["auto"] = 1.0
    every: int = 1
    probes: int = 1

    def __post_init__(self) -> None:
        _expect(0 <= self.lmbda < math.inf, "objective.lmbda", "a number of at least 0", self.lmbda)
        _expect(
            self.weighting in ("sigma2", "sigma4"), "objective.weighting", "sigma2 or sigma4", self.weighting
        )
        names = ", ".join(ESTIMATORS)
        _expect(self.estimator in ESTIMATORS, "objective.estimator", f"one of {names}", self.estimator)
        _expect(self.form in ("dual", "double"), "objective.form", "dual or double", self.form)
        _expect(
            self.form == "double" or self.estimator in DUALS,
            "objective.form",
            f"'double' with estimator {self.estimator!r} ('dual' exists for {' and '.join(DUALS)})",
            self.form,
        )
        ok = self.fraction == "auto" or (not isinstance(self.fraction, str) and 0 < self.fraction <= 1)
        _expect(ok, "objective.fraction", "a share in (0, 1] or 'auto'", self.fraction)
        _expect(self.every >= 1, "objective.every", "at least 1", self.every)
        _expect(self.probes >= 1, "objective.probes", "at least 1", self.probes)

    @property
    def share(self) -> float:
        """The fraction as a number."""
        return AUTO_FRACTION if self.fraction == "auto" else self.fraction


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Adam with linear warm-up and clipped gradients, and the moving average of the weights.

    Args:
        lr: the learning rate.
        betas: Adam's averaging constants.
        eps: Adam's epsilon.
        warmup: steps over which the learning rate rises linearly.
        clip: the largest norm of a gradient.
        ema: the decay d of the moving average; in step n it is ``min(d, (1 + n)/(10 + n))``.
    """

    lr: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup: int = 5000
    clip: float = 1.0
    ema: float = 0.999

    def __post_init__(self) -> None:
        _expect(0 < self.lr < math.inf, "optim.lr", "a positive number", self.lr)
        _expect(all(0 <= b < 1 for b in self.betas), "optim.betas", "two numbers in [0, 1)", self.betas)
        _expect(self.eps > 0, "optim.eps", "a positive number", self.eps)
        _expect(self.warmup >= 0, "optim.warmup", "at least 0", self.warmup)
        _expect(self.clip > 0, "optim.clip", "a positive number", self.clip)
        _expect(0 <= self.ema < 1, "optim.ema", "a number in [0, 1)", self.ema)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and in which way to train.

    Args:
        steps: steps of the whole run; a finished run goes on if this is raised.
        batch_size: samples per step, over all workers.
        accumulate: parts into which a worker's share of the batch is cut to save memory.
        precision: of the forward pass; weights are float32 with "bfloat16".
        compile: compile the network: an NCSN++ by regions, also inside an energy, and a GPU replays its
            steps as CUDA graphs (`curlfree.fast`); any other network as a whole.
        channels_last: keep images channel by channel together, faster on GPUs.
        log_every: steps between two lines of the log.
        checkpoint_every: steps between two checkpoints.
        keep: how many of the latest checkpoints to keep, beside the best one.
        validation_samples: held-out samples of the loss that decides which checkpoint is best; 0 for none.
        images: samples drawn for TensorBoard and Weights & Biases at each checkpoint; 0 for none.
        tensorboard: write TensorBoard's files.
        wandb: log to Weights & Biases, too.
    """

    steps: int = 600_000
    batch_size: int = 128
    accumulate: int = 1
    precision: Precision = "float32"
    compile: bool = False
    channels_last: bool = False
    log_every: int = 100
    checkpoint_every: int = 5000
    keep: int = 2
    validation_samples: int = 512
    images: int = 0
    tensorboard: bool = True
    wandb: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "log_every", "checkpoint_every", "keep"):
            _expect(getattr(self, name) >= 1, f"train.{name}", "at least 1", getattr(self, name))
        for name in ("validation_samples", "images"):
            _expect(getattr(self, name) >= 0, f"train.{name}", "at least 0", getattr(self, name))
        _expect(
            self.precision in typing.get_args(Precision),
            "train.precision",
            f"one of {typing.get_args(Precision)}",
            self.precision,
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run.

    Args:
        name: of the preset it comes from.
        seed: of everything random.
        init: a run whose weights to start from, for the paper's second stage (QC from a U checkpoint).
        data: what to train on.
        process: the noise levels.
        field: the model.
        objective: the loss.
        optim: the optimiser.
        train: length, batches, precision, logs.
    """

    name: str
    seed: int = 0
    init: str | None = None
    data: ToyData | PackedData
    process: VE | VP | Linear
    field: FieldConfig
    objective: ObjectiveConfig
    optim: OptimConfig
    train: TrainConfig


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What to draw, and how.

    Args:
        n: how many images or points.
        sampler: "pc" (reverse diffusion with Langevin steps), "sde" (without them), "ode" (RK45), "heun"
            (EDM's few steps) or "euler" (DDIM).
        steps: noise levels of the samplers with fixed steps; by default 1000, for heun 18, for euler 100.
        snr: the signal-to-noise ratio of the Langevin steps.
        corrector_steps: Langevin steps per level.
        batch_norms: their step size from norms averaged over the batch, as in the authors' code; an image
            then depends on its batch.
        rtol: relative tolerance of the ODE.
        atol: absolute tolerance of the ODE.
        per_sample: control the ODE's error in each sample, not in the batch as a whole.
        churn: heun's fresh noise (S_churn); 0 is deterministic.
        denoise: end with Tweedie's step, the mean of x0 given x.
        label: the class of all images; by default image i has class i modulo the number of classes.
        guidance: the weight w of classifier-free guidance; 1 is the plain conditional score.
        seed: of everything random.
        batch: samples at a time.
    """

    n: int = 64
    sampler: Literal["pc", "sde", "ode", "heun", "euler"] = "heun"
    steps: int | None = None
    snr: float = 0.16
    corrector_steps: int = 1
    batch_norms: bool = False
    rtol: float = 1e-5
    atol: float = 1e-5
    per_sample: bool = False
    churn: float = 0.0
    denoise: bool = True
    label: int | None = None
    guidance: float = 1.0
    seed: int = 0
    batch: int = 64

    def __post_init__(self) -> None:
        least = {"n": 1, "batch": 1, "corrector_steps": 0, "churn": 0, "snr": 0}
        for name, bound in least.items():
            _expect(getattr(self, name) >= bound, name, f"at least {bound}", getattr(self, name))
        for name in ("rtol", "atol"):
            _expect(getattr(self, name) > 0, name, "a positive tolerance", getattr(self, name))
        _expect(self.steps is None or self.steps >= 2, "steps", "at least 2", self.steps)


# Fields in which a run may differ from the one that it continues: they do not change the weights at a step.
# (A packed file is known by its checksum, wherever it lies.)
FREE = frozenset(
    (
        "data.packed.path",
        "train.steps",
        "train.log_every",
        "train.checkpoint_every",
        "train.keep",
        "train.images",
        "train.tensorboard",
        "train.wandb",
    )
)
KINDS: dict[str, type] = {
    "toy": ToyData,
    "packed": PackedData,
    "ve": VE,
    "vp": VP,
    "linear": Linear,
    "ncsnpp": NCSNppConfig,
    "film-mlp": FilmMLPConfig,
    "paper-mlp": PaperMLPConfig,
}


def encode(config: object) -> Any:
    """A configuration as plain JSON data."""
    if is_dataclass(config) and not isinstance(config, type):
        entries = {item.name: encode(getattr(config, item.name)) for item in fields(config)}
        kind = next((name for name, cls in KINDS.items() if cls is type(config)), None)
        return entries if kind is None else {kind: entries}
    return [encode(item) for item in config] if isinstance(config, tuple) else config


def decode(cls: type[T], data: object, where: str = "") -> T:
    """The configuration in plain JSON data.

    Raises:
        ValueError: a key that is no field, a missing field, or a value of the wrong type, each by name.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'the configuration'}: expected an object, found {data!r}")
    hints = typing.get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    if unknown := sorted(data.keys() - known.keys()):
        raise ValueError(f"{prefix}{unknown[0]}: unknown key; expected one of {', '.join(known)}")
    for name, item in known.items():
        if name not in data and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{prefix}{name}: missing")
    return cls(**{name: _value(hints[name], value, f"{prefix}{name}") for name, value in data.items()})


def _value(hint: Any, value: object, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    kinds = {name: cls for name, cls in KINDS.items() if cls is hint or cls in arguments}
    if kinds:
        if not isinstance(value, dict) or len(value) != 1 or not kinds.keys() >= value.keys():
            raise ValueError(f"{where}: expected one of {', '.join(kinds)}, found {value!r}")
        ((kind, entries),) = value.items()
        return decode(kinds[kind], entries, where)
    if is_dataclass(hint):
        return decode(typing.cast(type, hint), value, where)
    if origin is types.UnionType or origin is typing.Union:
        words = [w for a in arguments if typing.get_origin(a) is Literal for w in typing.get_args(a)]
        return value if value is None or value in words else _value(arguments[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], item, where) for item in value)
    if origin is Literal and value in arguments:
        return value
    if hint is float and type(value) in (int, float):
        return float(typing.cast(float, value))
    if hint in (int, bool, str) and type(value) is hint:
        return value
    expected = f"one of {arguments}" if origin is Literal else getattr(hint, "__name__", str(hint))
    raise ValueError(f"{where}: expected {expected}, found {value!r}")


def save_config(config: RunConfig, path: Path) -> None:
    """Write a configuration as JSON, whole or not at all."""
    write_bytes(path, (json.dumps(encode(config), indent=2) + "\n").encode())


def load_config(path: Path) -> RunConfig:
    """Read a configuration.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a valid configuration; the message names the field.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such configuration")
    try:
        return decode(RunConfig, json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def flatten(entries: Any, where: str = "") -> dict[str, Any]:
    """Nested entries as one level, with keys such as ``train.steps``."""
    if not isinstance(entries, dict):
        return {where: entries}
    parts = [flatten(value, f"{where}.{name}" if where else name) for name, value in entries.items()]
    return {name: value for part in parts for name, value in part.items()}


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """The fields in which two configurations differ, as ``train.steps: 100 != 200``."""
    a, b = flatten(encode(one)), flatten(encode(other))
    return [f"{key}: {a.get(key)} != {b.get(key)}" for key in sorted(a | b) if a.get(key) != b.get(key)]
