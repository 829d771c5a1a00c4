"""Does the cheap penalty do what Algorithm 1 on the whole batch does, step for step?

From one U network (given, or trained here first), fine-tunes with every arm and seed for the same number of
steps, on the same batches, noise and dropout, and measures held-out score matching and sigma^4 Asym with
common random numbers on the averaged weights:

* `none`: lambda = 0;
* `Alg. 1`: est~ on the whole batch. Its gradient is computed by the detached dual, which equals Algorithm 1's
  for the same probes (tests/test_fast.py); its seconds are those of the authors' code, measured here;
* `ours`: skew on the "auto" fraction of the batch in every step;
* `ours every`: skew on k times that fraction in every k-th step with k times the weight.

    python benchmarks/finetune.py --train train.packed --test train.packed --state STATE \
        --out benchmarks/records/finetune --page docs/benchmarks/finetune.md

The command may be interrupted and repeated: training goes on from STATE/base, finished arms are kept. That
folder holds the U network in files of less than 16 MiB; the other benchmarks take it as ``--checkpoint``.
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from authors_style import AuthorsNet
from measure import (
    RecordFile,
    arguments,
    header,
    load_record,
    open_device,
    release,
    say,
    synchronize,
    write_page,
)
from subjects import load_images, load_state, save_state, weights_of
from torch import Tensor, nn
from variance import two_stages

import curlfree as cf
from curlfree.budget import penalty_noise
from curlfree.estimators import rademacher
from curlfree.fast import Gradient, prepare
from curlfree.nets.ncsnpp import PRESETS, NCSNpp
from curlfree.penalty import AUTO_FRACTION
from curlfree.seeds import stream, stream_seed

PROCESS = cf.VE(0.01, 50.0)
CONFIG = (  # what a record must agree in to be continued
    *("preset", "base_steps", "held_out", "asym_images", "batch", "steps", "every"),
    *("lmbda", "lr", "warmup", "ema", "seed"),
)


@dataclass(frozen=True)
class Arm:
    """How the penalty is taken: on `samples` of the batch, in every `every`-th step.

    Args:
        estimator: of the asymmetry.
        samples: how many of the batch; 0 for no penalty.
        every: in which steps.
    """

    estimator: str = "skew"
    samples: int = 0
    every: int = 1


def arms(batch: int, every: int) -> dict[str, Arm]:
    few = max(1, round(AUTO_FRACTION * batch))
    return {
        "none": Arm(),
        "Alg. 1": Arm("paper", batch),
        "ours": Arm("skew", few),
        "ours every": Arm("skew", min(batch, every * few), every),
    }


def noisy(x0: Tensor, sigma: Tensor, z: Tensor) -> Tensor:
    return x0 + sigma[:, None, None, None] * z


class Trainer:
    """A network in training: score matching and a penalty, Adam, a moving average of the weights.

    Args:
        net: the network; trained in place.
        images: the training images, on its device.
        args: batch, learning rate, warm-up, moving average, backend.
        seed: of all draws.
        arm: the penalty.
    """

    def __init__(self, net: NCSNpp, images: Tensor, args: argparse.Namespace, seed: int, arm: Arm) -> None:
        self.net, self.images, self.args, self.seed, self.arm = net, images, args, seed, arm
        self.device = images.device
        net.train()
        if args.backend != "none":
            prepare(net, backend=args.backend)
        self.average = copy.deepcopy(net).eval().requires_grad_(False)  # in the same layout, not compiled
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.Adam(self.parameters, lr=args.lr, fused=fused)
        self.generator = torch.Generator(self.device)
        settings = {"generators": (self.generator,), "autocast": torch.bfloat16}
        self.matching = Gradient(self._matching, self.parameters, **settings)
        self.penalty = Gradient(self._penalty, self.parameters, **settings)

    def _matching(self, x0: Tensor, sigma: Tensor, z: Tensor) -> Tensor:
        masks = self.net.draw_masks(len(x0), self.generator)
        return (sigma**2 * cf.dsm(self.net, x0, sigma, z, condition={"masks": masks})).mean()

    def _penalty(self, x: Tensor, sigma: Tensor, weight: Tensor) -> Tensor:
        masks = self.net.draw_masks(len(x), self.generator)
        return cf.qc_loss(
            self.net,
            x,
            sigma,
            weight=weight,
            estimator=self.arm.estimator,
            form="dual",
            generator=self.generator,
            condition={"masks": masks},
        )

    def step(self, n: int, lmbda: float) -> None:
        """Step number n, counted from 1."""
        batch = self.args.batch

        def source(name: str) -> torch.Generator:
            return stream(self.seed, name, n, device=self.device)

        rows = torch.randint(len(self.images), (batch,), generator=source("rows"), device=self.device)
        sigma = PROCESS.sample_sigma(batch, source("sigma")).to(self.device, torch.float32)
        x0 = self.images[rows]
        z = torch.randn(x0.shape, generator=source("noise"), device=self.device)
        self.optimizer.zero_grad(set_to_none=False)
        self.generator.manual_seed(stream_seed(self.seed, "dropout", n) % 2**62)
        self.matching(x0, sigma, z)
        if self.arm.samples and n % self.arm.every == 0:
            few = slice(0, self.arm.samples)
            weight = lmbda * self.arm.every * sigma[few] ** 4
            self.generator.manual_seed(stream_seed(self.seed, "penalty", n) % 2**62)
            self.penalty(noisy(x0[few], sigma[few], z[few]), sigma[few], weight)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * min(1.0, n / self.args.warmup)
        self.optimizer.step()
        decay = min(self.args.ema, (1 + n) / (10 + n))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), [p.data for p in self.net.parameters()], 1 - decay
            )

    def run(self, first: int, last: int, lmbda: float, end: float = math.inf) -> int:
        """Steps first + 1 to last, until the time is over; returns the last one made."""
        for n in range(first + 1, last + 1):
            self.step(n, lmbda)
            if n % 100 == 0:
                synchronize(self.device)
                if time.time() > end:
                    return n
        synchronize(self.device)
        return last


@torch.no_grad()
def held_out(net: NCSNpp, images: Tensor, asym_images: int) -> dict[str, Tensor]:
    """Weighted score matching and sigma^4 Asym of each held-out image, with common random numbers."""
    device, loss, asym = images.device, [], []
    generator = torch.Generator(device).manual_seed(12345)
    sigmas = PROCESS.sample_sigma(len(images), torch.Generator().manual_seed(12345)).to(device, torch.float32)
    for start in range(0, len(images), 256):
        x0, sigma = images[start : start + 256], sigmas[start : start + 256]
        z = torch.randn(x0.shape, generator=generator, device=device)
        loss.append(sigma**2 * cf.dsm(net, x0, sigma, z))
        if start < asym_images:
            x = noisy(x0, sigma, z)
            asym.append(sigma**4 * cf.asymmetry(net, x, sigma, generator=generator))
    return {"loss": torch.cat(loss).double(), "asym": torch.cat(asym)[:asym_images].double()}


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Everything to go on with, by name."""
    state = {f"net.{k}": v for k, v in trainer.net.state_dict().items()}
    state |= {f"average.{k}": v for k, v in trainer.average.state_dict().items()}
    for i, p in enumerate(trainer.parameters):
        for name, value in trainer.optimizer.state.get(p, {}).items():
            state[f"adam.{i}.{name}"] = value
    return state


def restore(trainer: Trainer, state: dict[str, Tensor]) -> None:
    """Put a state back; Adam's moments get the layout of the weights, which its fused form asks for."""
    trainer.net.load_state_dict(weights_of(state, "net"))
    trainer.average.load_state_dict(weights_of(state, "average"))
    for i, p in enumerate(trainer.parameters):
        if f"adam.{i}.step" in state:
            trainer.optimizer.state[p] = {"step": state[f"adam.{i}.step"]} | {
                name: torch.empty_like(p).copy_(state[f"adam.{i}.{name}"])
                for name in ("exp_avg", "exp_avg_sq")
            }


def base(args: argparse.Namespace, images: Tensor, file: RecordFile, end: float) -> tuple[dict, dict] | None:
    """Weights of the U network and their average; None if the time was not enough to train it."""
    device, path = images.device, args.state / "base"
    if args.base is not None:
        found = load_state(args.base, device)
        return weights_of(found, "net"), weights_of(found, "average")
    trainer = Trainer(NCSNpp(PRESETS[args.preset], seed=0).to(device), images, args, args.seed, Arm())
    step = 0
    if path.is_dir():
        found = load_state(path, device)
        step = int(found.pop("step"))
        restore(trainer, found)
    start, began = time.time(), step
    while step < args.base_steps and time.time() < end:
        step = trainer.run(step, min(step + 1000, args.base_steps), 0.0, end)
        save_state(path, state_of(trainer) | {"step": torch.tensor(step)})
        say(f"U: step {step}, {time.time() - start:.0f} s")
    if step > began:
        loss = held_out(trainer.average, args.test_images, 0 if step < args.base_steps else 256)["loss"]
        file.data["base"] = {"steps": step, "loss": float(loss.mean())}
        file.save()
    if step < args.base_steps:
        return None
    weights = copy.deepcopy(trainer.net.state_dict())
    return weights, copy.deepcopy(trainer.average.state_dict())


def authors_seconds(args: argparse.Namespace, weights: dict, images: Tensor) -> float:
    """The median time of a step of Algorithm 1 in the authors' style."""
    device, net = images.device, NCSNpp(PRESETS[args.preset])
    net.load_state_dict(weights)
    theirs = AuthorsNet.like(net.to(device).train())
    x0 = images[: args.batch]
    sigma = PROCESS.sample_sigma(len(x0), torch.Generator().manual_seed(0)).to(device, torch.float32)
    z = torch.randn_like(x0)
    seconds = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        x = noisy(x0, sigma, z)
        two_stages(theirs, x, sigma, z, rademacher(x), args.lmbda)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def run(args: argparse.Namespace, file: RecordFile, device: torch.device) -> None:
    end = time.time() + args.limit
    torch.backends.cudnn.benchmark = device.type == "cuda"
    config = PRESETS[args.preset]
    images = load_images(args.train, config, "train", device=device)
    args.test_images = load_images(args.test, config, "test", args.held_out, device)
    found = base(args, images, file, end - args.reserve)
    if found is None:
        say("U is not trained yet: repeat the command")
        return
    weights, average = found
    if "noise" not in file.data:
        measure_noise(args, weights, file, device)
    if "authors_seconds" not in file.data:
        file.data["authors_seconds"] = authors_seconds(args, weights, images)
        file.save()
        say(f"a step of Alg. 1 in the authors' style: {file.data['authors_seconds']:.3f} s")
    for name, seed in todo(args, file):
        if time.time() > end - args.reserve:
            say(f"{name}, seed {seed}: no time left; repeat the command")
            return
        release(device)
        net = NCSNpp(config).to(device)
        net.load_state_dict(weights)
        trainer = Trainer(net, images, args, 1000 + seed, arms(args.batch, args.every)[name])
        trainer.average.load_state_dict(average)
        curve: list[dict[str, float]] = []
        values, done, seconds, first = {}, 0, 0.0, 0.0
        for step in sorted({0, *args.at, args.steps}):
            start = time.time()
            if done == 0 and step > 0:  # compiling and recording is start-up, not training
                done = trainer.run(0, min(args.every, step), args.lmbda)
                first = time.time() - start
                start = time.time()
            done = trainer.run(done, step, args.lmbda)
            seconds += time.time() - start
            values = held_out(trainer.average, args.test_images, args.asym_images)
            curve.append({"step": step, "seconds": seconds} | {k: float(v.mean()) for k, v in values.items()})
        file.results.setdefault(name, {})[str(seed)] = {
            "curve": curve,
            "start_up": first,
            "values": {k: [float(f"{x:.7g}") for x in v.tolist()] for k, v in values.items()},
        }
        file.save()
        say(f"{name}, seed {seed}: {curve[-1]}, start-up {first:.0f} s")
    for line in verdicts(file.data):
        say(line)


def todo(args: argparse.Namespace, file: RecordFile) -> Iterator[tuple[str, int]]:
    """The arms and seeds without a result, seed by seed."""
    for seed in range(args.seeds):
        for name in arms(args.batch, args.every):
            if (not args.arms or name in args.arms) and str(seed) not in file.results.get(name, {}):
                yield name, seed


def measure_noise(args: argparse.Namespace, weights: dict, file: RecordFile, device: torch.device) -> None:
    """The rule of `curlfree.budget` on this network, for lambda and weight as used here and in the paper."""
    net = NCSNpp(PRESETS[args.preset]).to(device).train()
    net.load_state_dict(weights)
    file.data["noise"] = {}
    for label, lmbda, weighting in (
        ("here", args.lmbda, cf.sigma4),
        ("the paper's", 1e-4, cf.sigma2),
    ):
        generator = torch.Generator(device).manual_seed(0)
        x0 = args.test_images[: args.noise_samples]
        sigma = PROCESS.sample_sigma(len(x0), torch.Generator().manual_seed(0)).to(device, torch.float32)
        noise = penalty_noise(net, x0, sigma, lmbda=lmbda, qc_weighting=weighting, generator=generator)
        file.data["noise"][label] = vars(noise) | {"fraction": noise.fraction, "lmbda": lmbda}
        say(f"noise, {label} weight: {file.data['noise'][label]}")
    file.save()


def intervals(ours: dict[str, Any], theirs: dict[str, Any], what: str) -> dict[str, Any]:
    """The ratio of means ours / theirs, with 95 % intervals over seeds (t) and over images (bootstrap)."""
    seeds = sorted(ours.keys() & theirs.keys())
    a = np.array([ours[s]["values"][what] for s in seeds])
    b = np.array([theirs[s]["values"][what] for s in seeds])
    logs = np.log(a.mean(1) / b.mean(1))
    found: dict[str, Any] = {"ratio": float(a.mean() / b.mean()), "seeds": len(seeds)}
    if len(seeds) > 1:
        from scipy.stats import t

        half = t.ppf(0.975, len(seeds) - 1) * logs.std(ddof=1) / math.sqrt(len(seeds))
        found["over_seeds"] = [float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))]
    rng = np.random.default_rng(0)
    rows = rng.integers(a.shape[1], size=(2000, a.shape[1]))
    draws = a.mean(0)[rows].mean(1) / b.mean(0)[rows].mean(1)
    found["over_images"] = [float(q) for q in np.quantile(draws, [0.025, 0.975])]
    return found


def verdicts(record: dict[str, Any]) -> list[str]:
    """What must hold, each with yes or NO; only what has been measured."""
    config, results, lines = record["config"], record["results"], []
    last = {name: [run["curve"][-1] for run in runs.values()] for name, runs in results.items()}
    if {"none", "Alg. 1"} <= last.keys():
        ratio = mean(last["Alg. 1"], "asym") / mean(last["none"], "asym")
        ok = "yes" if ratio <= 0.5 else "NO: raise --lmbda"
        lines.append(f"Alg. 1 halves sigma^4 Asym (against lambda = 0): ratio {ratio:.3f}: {ok}")
    for name in [n for n in results if n.startswith("ours") and "Alg. 1" in results]:
        for what, label in (("asym", "sigma^4 Asym"), ("loss", "score matching")):
            found = intervals(results[name], results["Alg. 1"], what)
            high = max(found["over_images"][1], found.get("over_seeds", [0, 0])[1])
            ok = "yes" if high < 1.05 else "NO"
            lines.append(
                f"{name}, {label} over Alg. 1's: {found['ratio']:.3f}, "
                f"upper end {high:.3f} of the paired intervals below 1.05: {ok}"
            )
    for label, noise in record.get("noise", {}).items():
        used = arms(config["batch"], config["every"])["ours"].samples / config["batch"]
        lines.append(f"fraction by the rule, {label} weight: {noise['fraction']:.3g}; used: {used:.3g}")
    return lines


def page(record: dict, folder: Path) -> list[str]:
    config, results = record["config"], record["results"]
    lines = header("Fine-tuning with the penalty on a part of the batch", "finetune", record)
    lines += [
        f"`{config['preset']}`, U trained for {record.get('base', {}).get('steps', 'given')} steps, then",
        f"{config['steps']} steps with lambda = {config['lmbda']} on sigma^4 Asym, batch {config['batch']},",
        f"bfloat16; {config['held_out']} held-out images, common random numbers, averaged weights.",
        "",
        "| arm | seeds | score matching | sigma^4 Asym | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, runs in results.items():
        last = [run["curve"][-1] for run in runs.values()]
        steps = config["steps"] - min(config["every"], config["steps"])
        seconds = record["authors_seconds"] * steps if name == "Alg. 1" else mean(last, "seconds")
        lines.append(
            f"| {name} | {len(last)} | {mean(last, 'loss'):.4f} | {mean(last, 'asym'):.4g} | {seconds:.1f} |"
        )
    if results:
        first = [run["curve"][0] for run in next(iter(results.values())).values()]
        lines.append(f"| (before) | | {mean(first, 'loss'):.4f} | {mean(first, 'asym'):.4g} | 0 |")
    lines += ["", "Ratios to Alg. 1, with 95 % intervals over seeds and over images:", ""]
    for name in [n for n in results if n.startswith("ours") and "Alg. 1" in results]:
        for what, label in (("loss", "score matching"), ("asym", "sigma^4 Asym")):
            r = intervals(results[name], results["Alg. 1"], what)
            seeds = "[{:.3f}, {:.3f}]".format(*r["over_seeds"]) if "over_seeds" in r else "-"
            pixels = "[{:.3f}, {:.3f}]".format(*r["over_images"])
            lines.append(f"- {name}, {label}: {r['ratio']:.3f}, seeds {seeds}, images {pixels}")
    for label, noise in record.get("noise", {}).items():
        lines += [
            "",
            f"Gradient noise with {label} weight (lambda = {noise['lmbda']}): score matching "
            f"{noise['score_matching']:.3g}, penalty {noise['penalty']:.3g} per sample; the rule's fraction "
            f"is {noise['fraction']:.3g}.",
        ]
    lines += ["", *(f"- {line}" for line in verdicts(record))]
    if results:
        lines += ["", f"![Asymmetry and loss against steps and seconds]({draw(record, folder)})"]
    return lines


def mean(rows: list[dict[str, float]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def draw(record: dict, folder: Path) -> str:
    """The curves, as an SVG beside the page; returns its name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row")
    for name, runs in record["results"].items():
        curves = [run["curve"] for run in runs.values()]
        steps = [point["step"] for point in curves[0]]
        for row, what in enumerate(("asym", "loss")):
            values = [mean([c[i] for c in curves], what) for i in range(len(steps))]
            seconds = [mean([c[i] for c in curves], "seconds") for i in range(len(steps))]
            if name == "Alg. 1":
                seconds = [record["authors_seconds"] * step for step in steps]
            axes[row][0].plot(steps, values, marker="o", label=name)
            axes[row][1].plot(seconds, values, marker="o", label=name)
    axes[0][0].set(ylabel="sigma^4 Asym", yscale="log")
    axes[1][0].set(ylabel="score matching", xlabel="steps")
    axes[1][1].set(xlabel="seconds", xscale="symlog")
    axes[0][0].legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "finetune.svg", metadata={"Date": None})
    return "finetune.svg"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--preset", default="ncsnpp-small", choices=PRESETS)
    parser.add_argument("--base", type=Path, help="weights of a U network, safetensors; trained here without")
    parser.add_argument("--base-steps", type=int, default=20_000)
    parser.add_argument("--train", nargs="*", default=[], help="training images (subjects.py)")
    parser.add_argument("--test", nargs="*", default=[], help="held-out images (subjects.py)")
    parser.add_argument("--held-out", type=int, default=2048)
    parser.add_argument("--asym-images", type=int, default=1024)
    parser.add_argument("--noise-samples", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--at", type=int, nargs="*", default=[50, 100, 200, 400, 700])
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--lmbda", type=float, default=0.03)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--ema", type=float, default=0.99)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="*", help="only these")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; 'none' for eager regions")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all")
    parser.add_argument("--reserve", type=float, default=60, help="seconds below which nothing is started")
    parser.add_argument("--state", type=Path, required=True, help="the folder of the U network in training")
    args = parser.parse_args()
    if not args.only_page:
        device = open_device(args.device)
        config = {name: getattr(args, name) for name in CONFIG}
        run(args, RecordFile(args.out, config, device), device)
    if args.page and (args.out / "record.json").is_file():
        write_page(args.page, page(load_record(args.out), args.page.parent))


if __name__ == "__main__":
    main()
