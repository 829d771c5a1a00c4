"""The command line: `curlfree COMMAND`, each command a function whose arguments tyro turns into options.

Exit codes: 0 on success (a run that was told to stop and saved itself, too), 1 where a computation failed (a
loss or a field that is not finite), 2 on bad input, with one line that says what was expected. Anything else
is a bug and keeps its traceback. Everything beyond the standard library is imported by the command that
needs it.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")
Device = Literal["auto", "cpu", "cuda"]
Weights = Literal["ema", "raw"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after `curlfree`; by default the program's own.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        from curlfree import __version__

        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        return fail(f"unknown command {words[0]!r}; expected one of {', '.join(COMMANDS)}", 2)
    try:
        COMMANDS[words[0]](words[1:])
    except ModuleNotFoundError as error:
        return fail(f"{error}; install what the command line needs: pip install 'curlfree[train,eval]'", 2)
    except (ValueError, TypeError, OSError) as error:
        return fail(str(error), 2)
    except ArithmeticError as error:
        return fail(str(error), 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    return 0


def fail(message: str, code: int) -> int:
    """Say in one line what is wrong."""
    print(f"curlfree: {' '.join(message.split())}", file=sys.stderr)
    return code


def usage() -> str:
    """What `curlfree --help` shows."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name.ljust(width)}{command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: curlfree COMMAND ...", "", *lines, "", "`curlfree COMMAND --help` shows its options."]
    )


def parse(options: type[T], words: Sequence[str], prog: str, *markers: Any) -> T:
    """A dataclass from the command line.

    Raises:
        ModuleNotFoundError: tyro is missing.
        ValueError: an option is unknown, missing or malformed.
    """
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                options,
                args=list(words),
                prog=f"curlfree {prog}",
                config=(tyro.conf.AvoidSubcommands, *markers),
            )
    except SystemExit as end:
        if not end.code:
            raise
    raise ValueError(one_line(complaint.getvalue(), prog))


def one_line(complaint: str, prog: str) -> str:
    """The point of tyro's error message: a box in Unicode, or in ASCII a title, a rule, the text."""
    lines = complaint.splitlines()
    body = [line.strip(" │") for line in lines[1 if complaint.startswith("╭") else 2 :]]
    point, *more = (" ".join(part.split()) for part in re.split(r"(?:─|-){4,}", " ".join(body)))
    meant = re.search(r"Perhaps you meant: (--\S+)", " ".join(more))
    hint = f"; perhaps {meant[1]}" if meant else ""
    return f"{point}{hint}; see `curlfree {prog} --help`"


def prepare(words: Sequence[str]) -> None:
    """Pack a data set into one checked, memory-mapped file: `curlfree prepare KIND PATH`."""
    from curlfree.data import sources

    kinds = {
        "cifar10": sources.Cifar10,
        "cifar100": sources.Cifar100,
        "svhn": sources.Svhn,
        "imagenet32": sources.ImageNet32Batches,
        "imagenet32-png": sources.ImageNet32Pngs,
        "huggingface": sources.HuggingFace,
        "folder": sources.ImageFolder,
        "array": sources.ArrayFile,
    }
    if not words or words[0] in ("-h", "--help"):
        print("usage: curlfree prepare KIND PATH [--out FILE] [--size PIXELS] ...\n\nKinds:")
        for name, reader in kinds.items():
            print(f"  {name.ljust(16)}{(reader.__doc__ or '').splitlines()[0]}")
        print("\n`curlfree prepare KIND --help` lists the options.")
        if not words:
            raise ValueError(f"expected a kind of data, one of {', '.join(kinds)}")
        return
    kind, *rest = words
    if kind not in kinds:
        raise ValueError(f"unknown kind of data {kind!r}; expected one of {', '.join(kinds)}")
    import tyro

    from curlfree.data.packed import Filter
    from curlfree.data.packed import prepare as pack

    reader = kinds[kind]

    @dataclass(frozen=True, kw_only=True)
    class Prepare:
        """Pack a data set into one checked, memory-mapped file; call it again to continue.

        Args:
            source: what to pack.
            out: the file to make.
            size: resize the central square of each image to size x size.
            resample: how: box (area averages) or lanczos.
            overwrite: replace an existing file.
        """

        source: Annotated[reader, tyro.conf.arg(name="")]  # type: ignore[valid-type]
        out: Path = Path(f"{kind}.pack")
        size: int | None = None
        resample: Filter = "box"
        overwrite: bool = False

    options = parse(Prepare, rest, f"prepare {kind}", tyro.conf.PositionalRequiredArgs)
    packed = pack(
        options.source.open(),  # type: ignore[attr-defined]
        options.out,
        size=options.size,
        resample=options.resample,
        overwrite=options.overwrite,
        progress=sys.stderr.isatty(),
    )
    splits = ", ".join(f"{name} {last - first}" for name, (first, last) in packed.header.splits.items())
    print(f"{options.out}: {packed.header.source}; {splits}; {packed.header.shape[1:]}")


def train(words: Sequence[str]) -> None:
    """Train a field: `curlfree train PRESET --out RUN`; on an existing run, continue it."""
    from curlfree.presets import PRESETS

    if not words or words[0] in ("-h", "--help"):
        print("usage: curlfree train PRESET --out RUN [--FIELD VALUE ...]\n\nPresets:")
        for name, config in PRESETS.items():
            print(f"  {name.ljust(22)}{describe(config)}")
        print(
            "\n`curlfree train PRESET --help` lists the fields. In place of PRESET, a configuration file: \n"
            "`curlfree train RUN/config.json --out RUN` continues a run."
        )
        if not words:
            raise ValueError("expected a preset or a configuration file")
        return
    import tyro

    from curlfree.config import PackedData, RunConfig, load_config
    from curlfree.presets import preset
    from curlfree.train import train as run
    from curlfree.workers import RefusedElsewhere

    name, *rest = words
    config = load_config(Path(name)) if name.endswith(".json") else preset(name)

    @dataclass(frozen=True, kw_only=True)
    class Train:
        """Train a field; on an existing run with the same configuration, continue it.

        Args:
            out: the folder of the run.
            device: where to compute.
            config: the run.
        """

        out: Path
        device: Device = "auto"
        config: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: config)

    options = parse(Train, rest, f"train {name}")
    config = options.config
    if isinstance(config.data, PackedData):
        config = replace(config, data=replace(config.data, path=str(Path(config.data.path).resolve())))
    try:
        reached = run(config, options.out, device=options.device)
    except RefusedElsewhere:  # told by the worker that it comes from
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        return
    if reached < config.train.steps:
        file = options.out / "config.json"
        print(f"stopped at step {reached}; continue with: curlfree train {file} --out {options.out}")
    else:
        print(f"{options.out}: trained for {reached} steps")


def describe(config: Any) -> str:
    """A preset in a few words."""
    kind = type(config.field.network).__name__.removesuffix("Config")
    qc = f", lambda {config.objective.lmbda:g}" if config.objective.lmbda else ""
    return f"{kind}, {config.field.form}{qc}; {config.train.steps} steps of {config.train.batch_size}"


def sample(words: Sequence[str]) -> None:
    """Draw samples from a run: an image grid and a packed file."""
    import tyro

    from curlfree.config import SampleConfig
    from curlfree.runs import load_run
    from curlfree.sample import sample as draw
    from curlfree.workers import join

    @dataclass(frozen=True, kw_only=True)
    class Sample:
        """Draw samples from a run; call it again to continue.

        Args:
            run: the folder of the run.
            weights: the moving average of the weights, or the raw ones.
            step: of the checkpoint; the newest by default.
            device: where to compute.
            out: where to keep the samples; by default a folder within the run.
            config: what to draw.
        """

        run: tyro.conf.Positional[Path]
        weights: Weights = "ema"
        step: int | None = None
        device: Device = "auto"
        out: Path | None = None
        config: Annotated[SampleConfig, tyro.conf.arg(name="")] = field(default_factory=SampleConfig)

    options = parse(Sample, words, "sample")
    with join(options.device) as team:
        run = load_run(options.run, weights=options.weights, step=options.step, device=team.device)
        drawn = draw(run, options.config, folder=options.out, team=team, progress=sys.stderr.isatty())
        if team.leads:
            nfe = float(drawn.evaluations.double().mean())
            print(f"{drawn.folder}: {len(drawn.x)} samples, {nfe:.4g} evaluations each")


def evaluate(words: Sequence[str]) -> None:
    """Measure a run and write RUN/metrics.json."""
    import tyro

    from curlfree.evaluate import EvaluateConfig
    from curlfree.evaluate import evaluate as measure
    from curlfree.runs import load_run
    from curlfree.workers import join

    @dataclass(frozen=True, kw_only=True)
    class Evaluate:
        """Measure a run and write RUN/metrics.json; call it again to continue.

        Args:
            run: the folder of the run.
            weights: the moving average of the weights, or the raw ones.
            step: of the checkpoint; the newest by default.
            device: where to compute.
            config: what to measure.
        """

        run: tyro.conf.Positional[Path]
        weights: Weights = "ema"
        step: int | None = None
        device: Device = "auto"
        config: Annotated[EvaluateConfig, tyro.conf.arg(name="")] = field(default_factory=EvaluateConfig)

    options = parse(Evaluate, words, "evaluate")
    with join(options.device) as team:
        run = load_run(options.run, weights=options.weights, step=options.step, device=team.device)
        metrics = measure(run, options.config, team=team, progress=sys.stderr.isatty())
        if team.leads:
            for name, entry in metrics.items():
                print(f"{name.ljust(24)}{show(entry)}")
            print(f"written to {options.run / 'metrics.json'}")


def show(entry: Any) -> str:
    """A metric with its error."""
    if not isinstance(entry.get("value"), (int, float)):
        return str(entry.get("how", "see the file"))
    se = entry.get("se")
    return f"{entry['value']:.6g}" + (f" +- {se:.2g}" if isinstance(se, (int, float)) else "")


def audit(words: Sequence[str]) -> None:
    """Measure a run's asymmetry at many noise levels."""
    import torch
    import tyro

    from curlfree.build import compile_field
    from curlfree.evaluation import EvaluateConfig, Evaluation, open_data
    from curlfree.metrics import audit as measure
    from curlfree.pieces import ALONE, write_json
    from curlfree.runs import load_run
    from curlfree.sample import identity
    from curlfree.seeds import stream
    from curlfree.workers import join

    @dataclass(frozen=True, kw_only=True)
    class Audit:
        """Measure how far a run's field is from conservative, level by level, with standard errors.

        Args:
            run: the folder of the run.
            json: write the table to this file.
            plot: draw the table into this file (PNG, SVG or PDF).
            levels: noise levels, equally spaced in time.
            probes: estimates per image and level.
            images: how many held-out images or points.
            estimator: a key of `curlfree.estimators.ESTIMATORS`.
            split: of a packed file; by default the run's held-out images.
            weights: the moving average of the weights, or the raw ones.
            step: of the checkpoint; the newest by default.
            seed: of images, noise and probes.
            batch: images at a time.
            compile: compile the network first, an NCSN++ by regions; minutes that pay for large audits.
            device: where to compute.
        """

        run: tyro.conf.Positional[Path]
        json: Path | None = None
        plot: Path | None = None
        levels: int = 20
        probes: int = 1
        images: int = 256
        estimator: str = "skew"
        split: str | None = None
        weights: Weights = "ema"
        step: int | None = None
        seed: int = 0
        batch: int = 256
        compile: bool = False
        device: Device = "auto"

    options = parse(Audit, words, "audit")
    if options.levels < 1 or options.images < 2:
        raise ValueError(
            f"audit: expected --levels of at least 1 and --images of at least 2, "
            f"found {options.levels} and {options.images}"
        )
    with join(options.device) as team:
        run = load_run(options.run, weights=options.weights, step=options.step, device=team.device)
    data = open_data(run, split=options.split, n=options.images, seed=options.seed)
    model = identity(run)
    if options.compile:
        compile_field(run.config, run.field)
    task = Evaluation(run, EvaluateConfig(seed=options.seed), data, model, ALONE, False)
    x0, condition = task.clean(task.chosen(0, options.images))
    table = measure(
        run.field,
        x0,
        run.process,
        levels=options.levels,
        probes=options.probes,
        batch=options.batch,
        estimator=options.estimator,
        generator=stream(options.seed, "audit", device=torch.device(x0.device)),
        condition=condition,
    )
    print("     sigma        Asym       NAsym  work (nats)")
    for level in table.levels:
        columns = (level[name] for name in ("sigma", "asym", "nasym", "work_nats"))
        print("  ".join(f"{value:10.4g}" for value in columns))
    if options.json is not None:
        about = {"run": run.folder.name, "model": model, "data": data.name, "n": len(x0)}
        how = {"estimator": options.estimator, "probes": options.probes, "seed": options.seed}
        write_json(options.json, {"levels": table.levels} | about | how)
    if options.plot is not None:
        table.plot().savefig(options.plot)


def reproduce(words: Sequence[str]) -> None:
    """Run one of the paper's experiments: metrics, figures and a report."""
    import tyro

    from curlfree.experiments import Mode
    from curlfree.experiments import reproduce as run

    @dataclass(frozen=True, kw_only=True)
    class Reproduce:
        """Run one of the paper's experiments and write metrics.json, figures and report.html.

        Args:
            experiment: which one.
            out: the folder to write into.
            mode: the published constants ("paper"), or what should have been measured ("corrected").
            seeds: training seeds; by default the experiment's own number.
            quick: a small version for a first look.
        """

        experiment: tyro.conf.Positional[Literal["gaussian", "toy2d", "autoencoder"]]
        out: Path
        mode: Mode = "corrected"
        seeds: int | None = None
        quick: bool = False

    options = parse(Reproduce, words, "reproduce")
    record = run(
        options.experiment, out=options.out, mode=options.mode, seeds=options.seeds, quick=options.quick
    )
    print("\n".join(record.summary))
    print(f"report: {options.out / 'report.html'}")


def report(words: Sequence[str]) -> None:
    """Make report.html of training runs side by side, or again of an experiment."""
    import tyro

    from curlfree.report import report as make

    @dataclass(frozen=True, kw_only=True)
    class Report:
        """Make one self-contained page, report.html, and for training runs its figures as PNG and SVG.

        Args:
            folders: training runs, shown side by side; or one folder that `curlfree reproduce` wrote.
            out: where to write; by default the first folder.
        """

        folders: tyro.conf.Positional[tuple[Path, ...]]
        out: Path | None = None

    options = parse(Report, words, "report")
    print(make(options.folders, options.out))


def convert(words: Sequence[str]) -> None:
    """Turn a published .pth checkpoint into a run, safely."""
    import tyro

    from curlfree.convert import convert as turn

    @dataclass(frozen=True, kw_only=True)
    class Convert:
        """Turn a checkpoint of score_sde or of the paper's authors into a run, with a model card.

        Args:
            source: the .pth file.
            out: the folder to write.
            preset: which network the weights belong to.
            data: the packed file with the images that it was trained on; needed for evaluations only.
        """

        source: tyro.conf.Positional[Path]
        out: Path
        preset: Literal["ncsnpp-deep", "ncsnpp", "ncsnpp-small", "ncsnpp-tiny"] = "ncsnpp-deep"
        data: Path = Path("cifar10.pack")

    options = parse(Convert, words, "convert")
    print(turn(options.source, options.out, options.preset, options.data))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "prepare": prepare,
    "train": train,
    "sample": sample,
    "evaluate": evaluate,
    "audit": audit,
    "reproduce": reproduce,
    "report": report,
    "convert": convert,
}

if __name__ == "__main__":
    sys.exit(main())
