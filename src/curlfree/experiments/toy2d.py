"""U, C and QC on the two-dimensional sets of Sec. 3.2: Table 1, as printed and as it should be measured.

What is trained is in `toy2d_train`, how it is measured in `toy2d_eval`, tables and figures in `toy2d_page`
and `toy2d_figures`. This module puts them together: for every set and arm it trains all seeds at once,
measures each, and keeps both in the folder ``arms``, from where an interrupted run, or one in the other mode,
takes what is there. A kept file is used only if it was made from the same constants.

In paper mode the paper's three arms are measured by the authors' program's rules. Corrected mode does that,
too, and measures these models (with averaged weights) and ours by the exact score, density and data.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from curlfree.experiments import toy2d_figures, toy2d_page
from curlfree.experiments.records import Record
from curlfree.experiments.toy2d_eval import LEVELS, Sizes, corrected, prior_mismatch, published, with_weights
from curlfree.experiments.toy2d_page import EXACT, PUBLISHED_EXACT
from curlfree.experiments.toy2d_train import (
    PAPER_ARMS,
    PLUS_ARMS,
    PROBLEMS,
    Arm,
    Problem,
    Recipe,
    Trained,
    paper_recipe,
    plus_recipe,
    train,
)
from curlfree.nets.stacked import select
from curlfree.operators import Field
from curlfree.processes import VE
from curlfree.provenance import provenance

SEEDS = 5
VERSION = 2  # of networks, draws, training and evaluation: what was kept by another is not used again
STEPS, BATCH = 4000, 1000
DEMO_SET, DEMO_ARMS, DEMO_STEPS, DEMO_BATCH = "checkerboard", ("C+", "U+", "QC+"), 2000, 256
DEMO_SIZES = Sizes(level=2000, nll=2000, samples=2000)


@dataclass(frozen=True)
class Task:
    """One arm on one set.

    Args:
        key: the set, a key of `PROBLEMS`.
        name: the arm's name.
        arm: what is trained.
        recipe: how.
        seeds: how many consecutive seeds, all in one program.
        by_rules: whether it is measured by the rules of the authors' program.
        by_truth: whether it is measured by the exact score.
    """

    key: str
    name: str
    arm: Arm
    recipe: Recipe
    seeds: int
    by_rules: bool
    by_truth: bool

    @property
    def problem(self) -> Problem:
        """The set."""
        return PROBLEMS[self.key]

    @property
    def process(self) -> VE:
        """The noise levels that the model knows, with a prior that fits."""
        return self.recipe.process(self.problem.data.data_std)

    @property
    def stem(self) -> str:
        """The name of its files."""
        return f"{self.key}-{self.name}".replace(" ", "_").replace("+", "plus").replace("~", "")


def plan(mode: str, quick: bool, seeds: int) -> list[Task]:
    """What is trained, in order: few arms on one set, the paper's arms, or everything."""
    truth = mode == "corrected"
    tasks = []
    for key, problem in PROBLEMS.items():
        if quick and key != DEMO_SET:
            continue
        if not (quick and truth):
            recipe = paper_recipe(DEMO_STEPS if quick else problem.steps)
            recipe = replace(recipe, batch=DEMO_BATCH) if quick else recipe
            tasks += [Task(key, name, arm, recipe, seeds, True, truth) for name, arm in PAPER_ARMS.items()]
        if truth:
            recipe = plus_recipe(DEMO_STEPS, DEMO_BATCH) if quick else plus_recipe(STEPS, BATCH)
            names = DEMO_ARMS if quick else tuple(PLUS_ARMS)
            tasks += [Task(key, name, PLUS_ARMS[name], recipe, seeds, False, True) for name in names]
    return tasks


def run(*, mode: str, seeds: int | None, quick: bool, out: Path) -> Record:
    """Train and measure the arms of a mode on its sets.

    Args:
        mode: "paper" (its arms by the rules of its program) or "corrected" (those and ours, by truth).
        seeds: how many consecutive seeds; 5 by default, 1 with `quick`.
        quick: three of our arms on one set, few steps and points.
        out: folder for the figures, and for the folder ``arms`` with models and measurements.

    Returns:
        The record.
    """
    count = seeds if seeds is not None else 1 if quick else SEEDS
    tasks = plan(mode, quick, count)
    return measure(tasks, DEMO_SIZES if quick else Sizes(), mode=mode, quick=quick, out=out)


def measure(tasks: Sequence[Task], sizes: Sizes, *, mode: str, quick: bool, out: Path) -> Record:
    """Train, measure and draw what is asked; `run` asks for what belongs to a mode.

    Args:
        tasks: sets and arms.
        sizes: how many points a measurement takes.
        mode: what the record is called.
        quick: whether it is the small version.
        out: as in `run`.
    """
    from rich.console import Console
    from rich.progress import Progress

    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = out / "arms"
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"published": {}, "corrected": {}, "sets": {}}
    fields: toy2d_figures.Fields = {}
    with threads(1 if quick else torch.get_num_threads()), Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=sum(task.recipe.steps for task in tasks))
        for task in tasks:
            progress.update(bar, description=f"{task.problem.title}: {task.name}")
            known = values["sets"].setdefault(task.key, {})
            if task.by_truth and EXACT not in known:
                known |= truth(task, sizes, device, folder)
            if task.by_rules and PUBLISHED_EXACT not in known:
                known[PUBLISHED_EXACT] = perfect(task, sizes, device, folder)
            trained = kept_model(task, device, folder, lambda: progress.advance(bar))
            average = with_weights(trained.field, trained.average)
            if task.by_rules:
                found = by_rules(task, trained.field, sizes, device, folder)
                values["published"].setdefault(task.key, {})[task.name] = found
            if task.by_truth:
                found = by_truth(task, average, sizes, device, folder)
                values["corrected"].setdefault(task.key, {})[task.name] = found
            shown = average if task.by_truth else trained.field
            fields.setdefault(task.key, {})[task.name] = select(shown, 0)
    return Record(
        experiment="toy2d",
        title="U, C and QC on two-dimensional data (Sec. 3.2, Table 1)",
        mode=mode,
        quick=quick,
        summary=toy2d_page.summary(values),
        config={
            "tasks": [describe(task) for task in tasks],
            "sizes": asdict(sizes),
            "levels": list(LEVELS),
        },
        seeds=list(range(max(task.seeds for task in tasks))),
        values=values,
        tables=toy2d_page.tables(values),
        plots=toy2d_figures.draw(values, fields, {(t.key, t.name): t.process for t in tasks}, out),
        disagreements=toy2d_page.disagreements(values),
        provenance=provenance(
            time.perf_counter() - begin,
            torch.cuda.get_device_name() if device.type == "cuda" else None,
        ),
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on so many threads; for the demo's small batches more would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe(task: Task) -> dict[str, Any]:
    """The constants that a model is made from, as plain JSON."""
    return {
        "version": VERSION,
        "set": task.key,
        "arm": task.name,
        "lambda": task.arm.lmbda,
        "estimator": task.arm.estimator,
        "seeds": task.seeds,
        **asdict(task.recipe),
    }


def by_rules(
    task: Task, field: nn.Module, sizes: Sizes, device: torch.device, folder: Path
) -> list[dict[str, Any]]:
    """Each seed's model measured by the rules of the authors' program."""
    found: list[dict[str, Any]] = kept(
        folder / f"{task.stem}.paper.json",
        describe(task) | {"sizes": asdict(sizes)},
        lambda: published(field, task.problem, range(task.seeds), sizes, device),
    )
    return found


def by_truth(
    task: Task, field: nn.Module, sizes: Sizes, device: torch.device, folder: Path
) -> list[dict[str, Any]]:
    """Each seed's model measured by the exact score."""
    found: list[dict[str, Any]] = kept(
        folder / f"{task.stem}.corrected.json",
        describe(task) | {"sizes": asdict(sizes), "all_levels": list(LEVELS)},
        lambda: corrected(field, task.problem, task.process, range(task.seeds), sizes, device),
    )
    return found


def truth(task: Task, sizes: Sizes, device: torch.device, folder: Path) -> dict[str, Any]:
    """The exact score through the evaluation of the models, the entropy, the mismatch of the priors."""
    data, narrow = task.problem.data, VE(0.1, 3.0)
    wide = plus_recipe(1, 1).process(data.data_std)

    def measure() -> dict[str, Any]:
        return {
            EXACT: corrected(exact_score(task.problem), task.problem, wide, [0], sizes, device),
            "entropy": data.entropy(0.1),
            "entropy_clean": data.entropy(),
            "mismatch_paper": prior_mismatch(data, narrow),
            "mismatch_narrow": prior_mismatch(data, replace(narrow, data_std=data.data_std)),
            "mismatch": prior_mismatch(data, wide),
        }

    constants = {"version": VERSION, "set": task.key, "sizes": asdict(sizes), "levels": list(LEVELS)}
    found: dict[str, Any] = kept(folder / f"{task.key}.truth.json", constants, measure)
    return found


def perfect(task: Task, sizes: Sizes, device: torch.device, folder: Path) -> list[dict[str, Any]]:
    """The exact score by the rules of the authors' program: what a perfect model would be printed with."""
    found: list[dict[str, Any]] = kept(
        folder / f"{task.key}.perfect.json",
        {"version": VERSION, "set": task.key, "sizes": asdict(sizes)},
        lambda: published(exact_score(task.problem), task.problem, [0], sizes, device),
    )
    return found


def exact_score(problem: Problem) -> Field:
    """The exact score of a set as a field."""

    def score(x: Tensor, sigma: Tensor | None, /, **condition: Any) -> Tensor:
        return problem.data.score(x, sigma)

    return score


def kept(path: Path, constants: dict[str, Any], measure: Callable[[], Any]) -> Any:
    """What a file holds if it was made from these constants; otherwise measure, and write it."""
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["constants"] == json.loads(json.dumps(constants)):
            return found["values"]
    values = json.loads(json.dumps(measure(), allow_nan=False))
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"constants": constants, "values": values}, indent=1), encoding="utf-8")
    part.replace(path)
    return values


def kept_model(task: Task, device: torch.device, folder: Path, advance: Callable[[], None]) -> Trained:
    """The trained models of a task: read if they were made from the same constants, otherwise trained."""
    path, seeds = folder / f"{task.stem}.safetensors", range(task.seeds)
    constants = json.dumps(describe(task))
    field = task.arm.build(task.problem, seeds).to(device).requires_grad_(False)
    if path.is_file():
        with safe_open(path, framework="pt", device=str(device)) as file:
            if (file.metadata() or {}).get("constants") == constants:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                last, average = (
                    {name.removeprefix(part): t for name, t in tensors.items() if name.startswith(part)}
                    for part in ("last.", "average.")
                )
                field.load_state_dict(last)
                for _ in range(task.recipe.steps):
                    advance()
                return Trained(field, average)
    trained = train(task.arm, task.recipe, task.problem, seeds, device=device, advance=advance)
    tensors = {f"last.{name}": t for name, t in trained.field.state_dict().items()}
    tensors |= {f"average.{name}": t for name, t in trained.average.items()}
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"constants": constants})
    part.replace(path)
    return trained
