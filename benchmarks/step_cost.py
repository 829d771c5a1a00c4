"""What does a training step cost: U, C and QC, in the authors' style and in ours?

One step is the gradient of one training loss, dropout on (what Adam and the moving average add is the same
for all). Arms, each on its own copy of one network:

* `U authors`, `C authors`, `Alg. 1 authors`: the same function in the authors' style (`authors_style.py`);
* `U eager`, `C ... double backward`, `paper one backward`, `skew double backward`: our network, eager;
* `U`: our network compiled by region, bfloat16 by autocast, replayed as a CUDA graph;
* `QC`: the same with the penalty in every step on a fraction of the batch ("auto" by default);
* `QC every`: with the penalty in every k-th step on k times that fraction; its step time is amortised, and
  the longest step is stated;
* `C h^2`, `C denoiser`: both energies in the same way, but in float32 (TF32), see `curlfree.fast.energy_dsm`.

    python benchmarks/step_cost.py --batch 128 --question step --out benchmarks/records/step_cost \
        --page docs/benchmarks/step-cost.md
    python benchmarks/step_cost.py --batch 32 --question baseline ...

Each command is one run: it measures U again, and every ratio and verdict is within it. A record holds many
runs. Eager arms come first, while no graph holds memory.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from authors_style import AuthorsNet
from measure import (
    RecordFile,
    Step,
    arguments,
    count_flops,
    device_name,
    header,
    load_record,
    measure,
    open_device,
    release,
    say,
    spread,
    write_page,
)
from torch import Tensor, nn
from variance import two_stages

import curlfree as cf
from curlfree.build import ScoreDenoiser
from curlfree.estimators import rademacher
from curlfree.fast import Gradient, check_tangents, energy_dsm, prepare
from curlfree.nets.ncsnpp import PRESETS, NCSNpp
from curlfree.penalty import AUTO_FRACTION

LMBDA = 1e-4
PROCESS = cf.VE(0.01, 50.0)
EXPECTED = {"U authors": 0.103, "Alg. 1 authors": 1.811}  # seconds, one H200, batch 32, deep network
TIME, MEMORY, FASTER = {128: 1.25, 32: 1.5}, {128: 1.3}, {32: 20.0}  # what QC must reach, by batch
QUESTIONS = {
    "step": ("U", "QC", "U again"),
    "every": ("U", "QC every", "U again"),
    "baseline": ("U authors", "Alg. 1 authors", "U", "QC"),
    "penalty": ("U eager", "paper one backward", "skew double backward", "U", "QC", "skew dual full batch"),
    "energy": (
        *("C authors", "C h^2 double backward", "C denoiser double backward"),
        *("U", "C h^2", "C denoiser"),
    ),
}


class Data:
    """Batches on the device: random images, noise levels, unit noise.

    Args:
        net: for the shapes.
        batch: images in a batch.
        device: where.
    """

    def __init__(self, net: NCSNpp, batch: int, device: torch.device) -> None:
        config, self.generator = net.config, torch.Generator(device).manual_seed(0)
        shape = (4, batch, config.channels, config.size, config.size)
        self.x0 = torch.rand(shape, generator=self.generator, device=device)
        self.z = torch.randn(shape, generator=self.generator, device=device)
        self.sigma = PROCESS.sample_sigma(4 * batch, self.generator).to(device, torch.float32).view(4, batch)
        self.next = 0

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        self.next = (self.next + 1) % 4
        return self.x0[self.next], self.sigma[self.next], self.z[self.next]


def noisy(x0: Tensor, sigma: Tensor, z: Tensor) -> Tensor:
    return x0 + sigma[:, None, None, None] * z


class Arms:
    """The arms at one batch size: each a method that returns the step and a note.

    Args:
        preset: the network.
        batch: images in a batch.
        every: k of the penalty in every k-th step.
        backend: of torch.compile.
        device: where.
    """

    def __init__(self, preset: str, batch: int, every: int, backend: str, device: torch.device) -> None:
        self.net = NCSNpp(PRESETS[preset], seed=0).to(device).train()
        self.fast: NCSNpp | None = None
        self.data = Data(self.net, batch, device)
        self.batch, self.every, self.backend, self.device = batch, every, backend, device
        self.chosen = max(1, round(AUTO_FRACTION * batch))
        self.generator = torch.Generator(device).manual_seed(1)

    def steps(self) -> Iterator[tuple[str, Callable[[], Step]]]:
        """The arms in the order in which they run: eager ones first."""
        yield "U authors", lambda: self.authors("U")
        yield "Alg. 1 authors", lambda: self.authors("QC")
        yield "C authors", lambda: self.authors("C")
        yield "U eager", self.u_eager
        yield "paper one backward", lambda: self.double("paper")
        yield "skew double backward", lambda: self.double("skew")
        yield "C h^2 double backward", lambda: self.energy(cf.ScoreNormEnergy(self.net))
        yield "C denoiser double backward", lambda: self.energy(cf.DenoiserEnergy(ScoreDenoiser(self.net)))
        yield "U", self.u
        yield "QC", lambda: self.qc(self.chosen, 1)
        yield "QC every", lambda: self.qc(min(self.batch, self.every * self.chosen), self.every)
        yield "skew dual full batch", lambda: self.qc(self.batch, 1)
        yield "C h^2", lambda: self.energy_dual(cf.ScoreNormEnergy(self.prepared()))
        yield "C denoiser", lambda: self.energy_dual(cf.DenoiserEnergy(ScoreDenoiser(self.prepared())))
        yield "U again", self.u

    def prepared(self) -> NCSNpp:
        if self.fast is None:
            self.fast = NCSNpp(self.net.config, seed=0).to(self.device).train()
            prepare(self.fast, backend=self.backend)
        return self.fast

    def forget(self) -> None:
        """Drop all gradients."""
        for net in (self.net, self.fast):
            if net is not None:
                net.zero_grad()

    def gradient(self, net: nn.Module, loss: Callable[..., Tensor]) -> Gradient:
        return Gradient(
            loss, net.parameters(), generators=(self.generator,), autocast=torch.bfloat16, record=self.graphs
        )

    graphs = True

    def matching(self, net: NCSNpp) -> Gradient:
        def loss(x0: Tensor, sigma: Tensor, z: Tensor) -> Tensor:
            masks = net.draw_masks(len(x0), self.generator)
            return (sigma**2 * cf.dsm(net, x0, sigma, z, condition={"masks": masks})).mean()

        return self.gradient(net, loss)

    def u(self) -> Step:
        net = self.prepared()
        matching = self.matching(net)
        return lambda: cleared(net, lambda: matching(*self.data()))

    def qc(self, chosen: int, every: int) -> Step:
        """Score matching on the batch, and the penalty on its first `chosen` samples, k times its weight."""
        net = self.prepared()

        def loss(x: Tensor, sigma: Tensor, weight: Tensor) -> Tensor:
            masks = net.draw_masks(len(x), self.generator)
            return cf.qc_loss(
                net, x, sigma, weight=weight, generator=self.generator, condition={"masks": masks}
            )

        matching, penalty = self.matching(net), self.gradient(net, loss)

        def both() -> None:
            x0, sigma, z = self.data()
            matching(x0, sigma, z)
            few = slice(0, chosen)
            x, level = noisy(x0[few], sigma[few], z[few]), sigma[few]
            penalty(x, level, LMBDA * every * level**2)

        return lambda: cleared(net, both)

    def authors(self, kind: str) -> Step:
        net = AuthorsNet.like(self.net)
        energy = cf.EnergyField(cf.ScoreNormEnergy(net))

        def step() -> None:
            x0, sigma, z = self.data()
            if kind == "QC":
                x = noisy(x0, sigma, z)
                two_stages(net, x, sigma, z, rademacher(x, self.generator), LMBDA, power=2)
            else:
                field = energy if kind == "C" else net
                (sigma**2 * cf.dsm(field, x0, sigma, z)).mean().backward()

        return lambda: cleared(net, step, none=True)

    def u_eager(self) -> Step:
        def step() -> None:
            x0, sigma, z = self.data()
            (sigma**2 * cf.dsm(self.net, x0, sigma, z)).mean().backward()

        return lambda: cleared(self.net, step, none=True)

    def double(self, estimator: str) -> Step:
        """A live estimator on the whole batch, one backward through the graph of its products."""

        def step() -> None:
            x0, sigma, z = self.data()
            x = noisy(x0, sigma, z)
            loss = (sigma**2 * cf.dsm(self.net, x0, sigma, z)).mean()
            weight = LMBDA * sigma**2
            loss = loss + cf.qc_loss(
                self.net,
                x,
                sigma,
                weight=weight,
                estimator=estimator,
                form="double",
                generator=self.generator,
            )
            loss.backward()

        return lambda: cleared(self.net, step, none=True)

    def energy(self, energy: nn.Module) -> Step:
        field = cf.EnergyField(energy)

        def step() -> None:
            x0, sigma, z = self.data()
            (sigma**2 * cf.dsm(field, x0, sigma, z)).mean().backward()

        return lambda: cleared(field, step, none=True)

    def energy_dual(self, energy: nn.Module) -> Step:
        net = self.prepared()

        def loss(x0: Tensor, sigma: Tensor, z: Tensor) -> Tensor:
            masks = net.draw_masks(len(x0), self.generator)
            return (sigma**2 * energy_dsm(energy, x0, sigma, z, condition={"masks": masks})).mean()

        gradient = self.gradient(net, loss)
        return lambda: cleared(net, lambda: gradient(*self.data()))


def cleared(net: nn.Module, step: Step, *, none: bool = False) -> None:
    """One step's gradient: from zeros, which recorded gradients are added to, or from none, as is usual."""
    net.zero_grad(set_to_none=none)
    step()


def run(args: argparse.Namespace, file: RecordFile, device: torch.device) -> None:
    start = time.time()
    end = start + args.limit
    arms = Arms(args.preset, args.batch, args.every, args.backend, device)
    wanted = {*(args.arms or QUESTIONS[args.question]), "U"}
    this: dict[str, Any] = {"batch": args.batch, "backend": args.backend, "arms": {}}
    file.results[time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(start))] = this
    this["set_up"] = time.time() - start
    for name, make in arms.steps():
        if name not in wanted:
            continue
        left = end - time.time()
        if left < args.reserve:
            say(f"{name}: no time left ({left:.0f} s)")
            continue
        torch.backends.cudnn.benchmark = device.type == "cuda" and "authors" not in name
        this["arms"][name] = result = one(arms, make, args.repeats, left / 4, this["arms"].get("U", {}), name)
        file.save()
        say(f"{name}: {1e3 * result.get('median', math.nan):.2f} ms, {result}")
    this["verdicts"] = verdicts(this, args.preset, device_name(device) or "")
    file.save()
    for line in this["verdicts"]:
        say(line)
    ready = "median" in this["arms"].get("QC", {})  # what the check needs is compiled
    if arms.fast is None or not ready or end - time.time() < args.reserve:
        this["self_check"] = "not run"
    else:
        x0, sigma, z = (t[: arms.chosen] for t in arms.data())
        masks = {"masks": arms.fast.draw_masks(arms.chosen, arms.generator)}
        try:
            check_tangents(arms.fast, noisy(x0, sigma, z), sigma, condition=masks, autocast=torch.bfloat16)
            this["self_check"] = "passed"
        except ValueError as error:
            this["self_check"] = str(error)
    say(f"self-check: {this['self_check']}")
    file.save()


def one(
    arms: Arms, make: Callable[[], Step], repeats: int, limit: float, u: dict[str, Any], name: str
) -> dict[str, Any]:
    """An arm's result: timed, with its operations counted."""
    step: Step | None = None
    result: dict[str, Any] = {}
    for graphs in (True, False):  # timed, then counted
        release(arms.device)
        arms.graphs = graphs
        try:
            step = make()
            if graphs:
                result = measure(step, arms.device, repeats=repeats, limit=limit)
            else:
                result["flop"] = count_flops(step)
        except torch.OutOfMemoryError as error:
            result["error"] = str(error).splitlines()[0]
        step = None
        arms.forget()
    release(arms.device)
    if name == "QC every" and "median" in u and "median" in result:
        result |= {"longest": result["median"], "every": arms.every}
        result["samples"] = min(arms.batch, arms.every * arms.chosen)
        result["median"] = u["median"] + (result["longest"] - u["median"]) / arms.every
        if "flop" in result and "flop" in u:
            result["flop"] = u["flop"] + (result["flop"] - u["flop"]) / arms.every
    return result


def verdicts(this: dict[str, Any], preset: str, hardware: str) -> list[str]:
    """What the step must reach, each with yes or NO; only what this run has measured."""
    batch, arms = this["batch"], {n: row for n, row in this["arms"].items() if "median" in row}
    weights = 4 * parameters(preset)
    lines = []

    def judge(what: str, found: float, bound: str, ok: bool) -> None:
        lines.append(f"{what}: {found:.3g}, {bound}: {'yes' if ok else 'NO'}")

    if preset == "ncsnpp-deep" and batch == 32 and "H200" in hardware:
        for name in EXPECTED.keys() & arms.keys():
            ratio = arms[name]["median"] / EXPECTED[name]
            judge(
                f"{name} over {1e3 * EXPECTED[name]:.0f} ms", ratio, "1 within 0.15", abs(ratio - 1) <= 0.15
            )
    for name in [n for n in ("QC", "QC every") if n in arms and "U" in arms]:
        if batch in TIME:
            ratio = arms[name]["median"] / arms["U"]["median"]
            judge(f"{name} / U, time", ratio, f"at most {TIME[batch]}", ratio <= TIME[batch])
        if batch in MEMORY and arms["U"]["peak_bytes"]:
            ratio = (arms[name]["peak_bytes"] + weights) / (arms["U"]["peak_bytes"] + weights)
            judge(f"{name} / U, memory", ratio, f"at most {MEMORY[batch]}", ratio <= MEMORY[batch])
        if batch in FASTER and "Alg. 1 authors" in arms:
            ratio = arms["Alg. 1 authors"]["median"] / arms[name]["median"]
            judge(f"Alg. 1 authors / {name}", ratio, f"at least {FASTER[batch]:g}", ratio >= FASTER[batch])
    if {"U", "QC"} <= arms.keys():
        total = this["set_up"] + sum(arms[n]["start_up"] for n in ("U", "QC"))
        judge("start-up of U and QC (s)", total, "at most 180", total <= 180)
    return lines


def parameters(preset: str) -> int:
    with torch.device("meta"):
        return sum(math.prod(p.shape) for p in NCSNpp(PRESETS[preset]).parameters())


def page(record: dict) -> list[str]:
    config = record["config"]
    lines = header("The cost of a training step", "step_cost", record)
    lines += [
        f"`{config['preset']}` ({config['parameters']:,} parameters), dropout on; one step is the gradient",
        "of one training loss. Median; spread: the middle half of the repetitions; host: the part of it that",
        "Python takes to launch the work (where it is nearly all, the GPU waits for it). Memory: the peak",
        "of what a step allocates, and the parameters; reserved: all that the process held. TFLOP/s:",
        "products and convolutions as counted, by the median. Ratios are within one run.",
        "",
    ]
    for started, this in record["results"].items():
        arms = this["arms"]
        ours, theirs = arms.get("U", {}), arms.get("U authors", {})
        lines += [
            f"## Batch {this['batch']}, run of {started}",
            "",
            "| step | ms | spread | host | / U | / U authors | GiB | memory / U | reserved | TFLOP/s "
            "| start-up (s) |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, row in arms.items():
            if "median" not in row:
                lines.append(f"| {name} | {row['error']} |" + " |" * 9)
                continue
            ratio = [f"{row['median'] / u['median']:.3g}" if "median" in u else "-" for u in (ours, theirs)]
            weights = 4 * config["parameters"]
            peak, least = row["peak_bytes"], ours.get("peak_bytes")
            memory = f"{(peak + weights) / 2**30:.2f}" if peak else "-"
            more = f"{(peak + weights) / (least + weights):.2f}" if peak and least else "-"
            reserved = f"{row['reserved_bytes'] / 2**30:.1f}" if row["reserved_bytes"] else "-"
            speed = f"{row['flop'] / row['median'] / 1e12:.3g}" if "flop" in row else "-"
            label = name
            if "longest" in row:
                longest = f"longest {1e3 * row['longest']:.1f} ms"
                label += f" {row['every']} (amortised; {row['samples']} samples, {longest})"
            lines.append(
                f"| {label} | {1e3 * row['median']:.2f} | {spread(row['seconds'])} "
                f"| {1e3 * row['host']:.1f} | {' | '.join(ratio)} "
                f"| {memory} | {more} | {reserved} | {speed} | {row['start_up']:.1f} |"
            )
        lines += ["", *(f"- {verdict}" for verdict in this.get("verdicts", []))]
        lines += [
            "",
            f"Self-check of the tangents and their gradients: {this.get('self_check', 'not run')}.",
            "",
        ]
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--preset", default="ncsnpp-deep", choices=PRESETS)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--question", choices=QUESTIONS, default="step", help="which arms")
    parser.add_argument("--arms", nargs="*", help="these arms in place of a question's")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit", type=float, default=540, help="seconds for all arms")
    parser.add_argument("--reserve", type=float, default=20, help="seconds below which no arm is started")
    args = parser.parse_args()
    if not args.only_page:
        device = open_device(args.device)
        config = {"preset": args.preset, "parameters": parameters(args.preset)}
        file = RecordFile(args.out, config, device)
        run(args, file, device)
    write_page(args.page, page(load_record(args.out)))


if __name__ == "__main__":
    main()
