"""Which estimator of the asymmetry gives the most for its cost?

Trains a small NCSN++ on real images (16 x 16, grey, from a packed data set), then measures for each estimator

* the relative variance per probe of its value, at several noise levels, about exact Jacobians, and the
  counted FLOPs of one value, in forward passes of the network;
* the noise of its parameter gradient, tr Var / |mean|^2 per sample, with weight sigma^4 over all levels, and
  the counted FLOPs of a whole training step (score matching and penalty): on one evaluation of the network
  (`curlfree.jacobian`), or as `curlfree.qc_loss` does it, which evaluates the network again;

and their products, the second relative to the paper's Algorithm 1 with its two backward stages. Writes a
record (raw values, configuration, hardware) and, from it, the page of the documentation.

    python benchmarks/variance.py --data cifar10.packed --out benchmarks/records/variance.json \
        --page docs/benchmarks/estimators.md
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measure import FlopCounter
from torch import Tensor

import curlfree as cf
from curlfree import estimators, penalty
from curlfree.data.packed import open_packed
from curlfree.nets import NCSNpp, NCSNppConfig
from curlfree.operators import Operator, central_difference, inner, jacobian
from curlfree.provenance import provenance
from curlfree.seeds import stream

PROCESS = cf.VE(0.02, 8.0)
LEVELS = (0.05, 0.2, 0.5, 1.0, 5.0)
CONFIG = NCSNppConfig(
    channels=1, size=16, width=16, multipliers=(1, 2), blocks=2, attention=(8,), dropout=0.0
)
NAMES = {
    "algorithm1": "the paper's code: est~, two backward stages",
    "est": "est (Eq. 15), one backward",
    "paper": "est~ (Eq. 16), one backward",
    "skew": "skew, one backward",
    "skew dual": "skew, detached dual (no double backward)",
    "paper dual": "est~, detached dual (no double backward)",
    "pair": "pair (rank one)",
    "loop": "loop (finite differences)",
    "exact": "exact (Eq. 13), D products",
    "trace": "trace form (Eq. 14), D products",
    "skew qc_loss double": "skew by `qc_loss(form='double')`",
    "skew qc_loss dual": "skew by `qc_loss(form='dual')`, its choice for this network",
    "paper qc_loss double": "est~ by `qc_loss(form='double')`",
}
SOURCE = {  # whose gradient it is
    "algorithm1": "paper",
    "paper dual": "paper",
    "paper qc_loss double": "paper",
    "skew dual": "skew",
    "skew qc_loss double": "skew",
    "skew qc_loss dual": "skew",
    "trace": "exact",
}
SAMPLED = ("est", "paper", "skew", "pair")


def images(path: str) -> Tensor:
    """All images of a packed set as grey 16 x 16 in [0, 1], (N, 1, 16, 16)."""
    pixels = torch.from_numpy(np.array(open_packed(path).images)).float().div_(255).mean(-1)
    return torch.nn.functional.avg_pool2d(pixels[:, None], pixels.shape[-1] // 16)


def noisy(data: Tensor, n: int, generator: torch.Generator, sigma: Tensor | None = None):
    """A batch: clean images, levels, unit noise."""
    x0 = data[torch.randint(len(data), (n,), generator=generator)]
    sigma = PROCESS.sample_sigma(n, generator) if sigma is None else sigma.expand(n)
    return x0, sigma, torch.randn(x0.shape, generator=generator)


def train(data: Tensor, steps: int, seed: int) -> NCSNpp:
    """Score matching, an exponential average of the weights at the end."""
    net = NCSNpp(CONFIG, seed)
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(steps):
        x0, sigma, z = noisy(data, 32, stream(seed, step, "batch"))
        loss = (sigma**2 * cf.dsm(net, x0, sigma, z)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(net)
        if step % 200 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    return average.module.eval()


def value_variance(
    net: NCSNpp, data: Tensor, seed: int, photos: int, draws: int, loop_draws: int
) -> dict[str, dict]:
    """Relative variance per probe about exact Jacobians, pooled over images, for each level and estimator."""
    table = {}
    for level in LEVELS:
        generator = stream(seed, "value", str(level))
        x0, sigma, z = noisy(data, photos, generator, torch.tensor(level))
        with torch.no_grad():
            J = jacobian(net, x0 + level * z, sigma)[1].dense().double()
        row = {}
        asym = 0.5 * (J - J.mT).square().sum((1, 2))
        norm2 = J.square().sum((1, 2))
        eye = torch.eye(J.shape[1], dtype=J.dtype)
        rest = 0.5 * (J + J.mT) - J.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * eye
        row["nasym"] = float(0.5 * asym.sum() / norm2.sum())
        row["skew_to_traceless"] = float((0.5 * asym.sum() / rest.square().sum()).sqrt())
        x = x0 + level * z
        row |= {name: {"relative_variance": 0.0} for name in ("exact", "trace")}
        with torch.no_grad():
            loops = [
                cf.asymmetry(net, x, sigma, estimator="loop", generator=generator) for _ in range(loop_draws)
            ]
        values = torch.stack(loops).double()
        row["loop"] = {
            "relative_variance": float((values.var(0) / asym**2).mean()),
            "mean_over_exact": float((values.mean(0) / asym).mean()),
        }
        for name in SAMPLED:
            second, mean = 0.0, 0.0
            for matrix, a in zip(J, asym, strict=True):
                operator = Operator.from_matrix(matrix.expand(draws, -1, -1))
                draw = partial(estimators.rademacher, operator.like, generator)
                value = estimators.ESTIMATORS[name].moments(operator, draw)[0]
                second += float(value.var() / a**2) / photos
                mean += float(value.mean() / a) / photos
            row[name] = {"relative_variance": second, "mean_over_exact": mean}
        table[str(level)] = row
    return table


def two_stages(
    net: torch.nn.Module, x: Tensor, sigma: Tensor, z: Tensor, v: Tensor, lmbda: float, power: int = 4
) -> None:
    """The authors' step: Alg. 1 with the score matching loss on the same evaluation of the network."""
    x = x.detach().requires_grad_()
    s = net(x, sigma)
    (vJ,) = torch.autograd.grad(inner(v, s).sum(), x, create_graph=True)
    vJ_sg = vJ.detach().requires_grad_()
    (vJJ,) = torch.autograd.grad(inner(vJ_sg, s).sum(), x, create_graph=True)
    level = sigma[:, None, None, None]
    dsm = 0.5 * inner(s + z / level, s + z / level)
    loss = (sigma**2 * dsm + lmbda * sigma**power * (inner(vJ, vJ) - inner(vJJ, v))).mean()
    loss.backward(retain_graph=True)
    vJ.backward(vJ_sg.grad)


def one_backward(name: str) -> Callable:
    """A step with a live estimator, on the evaluation that score matching uses."""

    def step(net: NCSNpp, x: Tensor, sigma: Tensor, z: Tensor, generator: torch.Generator) -> None:
        s, J = (central_difference if name == "loop" else jacobian)(net, x, sigma)
        asym = estimators.ESTIMATORS[name].moments(J, lambda: estimators.rademacher(x, generator))[0]
        level = sigma[:, None, None, None]
        dsm = 0.5 * inner(s + z / level, s + z / level)
        (sigma**2 * dsm + sigma**4 * asym).mean().backward()

    return step


def dual_step(name: str) -> Callable:
    """A step with the detached dual, which evaluates the network again."""

    def step(net: NCSNpp, x: Tensor, sigma: Tensor, z: Tensor, generator: torch.Generator) -> None:
        level = sigma[:, None, None, None]
        dsm = cf.esm(net, x, sigma, -z / level)
        asym = penalty.dual(net, x, sigma, (estimators.rademacher(x, generator),), estimator=name)
        (sigma**2 * dsm + sigma**4 * asym).mean().backward()

    return step


def library_step(name: str, form: str) -> Callable:
    """A step as a user writes it: `cf.dsm`, and `cf.qc_loss` beside it."""

    def step(net: NCSNpp, x: Tensor, sigma: Tensor, z: Tensor, generator: torch.Generator) -> None:
        level = sigma[:, None, None, None]
        sm = (sigma**2 * cf.dsm(net, x - level * z, sigma, z)).mean()
        options = {"estimator": name, "form": form, "generator": generator}
        (sm + cf.qc_loss(net, x, sigma, weight=sigma**4, **options)).backward()

    return step


STEPS: dict[str, Callable] = {
    "algorithm1": lambda net, x, sigma, z, g: two_stages(net, x, sigma, z, estimators.rademacher(x, g), 1.0),
    **{name: one_backward(name) for name in ("est", "paper", "skew", "pair", "loop", "exact", "trace")},
    "skew dual": dual_step("skew"),
    "paper dual": dual_step("paper"),
    "skew qc_loss double": library_step("skew", "double"),
    "skew qc_loss dual": library_step("skew", "dual"),
    "paper qc_loss double": library_step("paper", "double"),
}


def flops(net: NCSNpp, data: Tensor, seed: int) -> dict[str, float]:
    """Counted FLOPs in forward passes, of one training step ("U": score matching alone) and of one value.

    For one image: the counts are proportional to the batch, and dense Jacobians need much memory.
    """
    x0, sigma, z = noisy(data, 1, stream(seed, "flops"))
    x = x0 + sigma[:, None, None, None] * z

    def count(call: Callable[[], object]) -> float:
        with FlopCounter() as counter:
            call()
        net.zero_grad()
        return counter.total

    with torch.no_grad():
        one = count(lambda: net(x, sigma))
    passes = {"U": count(lambda: cf.dsm(net, x0, sigma, z).mean().backward()) / one}
    for name, step in STEPS.items():
        passes[name] = count(lambda s=step: s(net, x, sigma, z, stream(seed, "flops probe"))) / one
        print(f"{name}: {passes[name]:.2f} F", flush=True)
    with torch.no_grad():
        for name in estimators.ESTIMATORS:
            passes[f"value {name}"] = count(lambda n=name: cf.asymmetry(net, x, sigma, estimator=n)) / one
    return {"forward_gflop": one / 1e9} | passes


def gradient(net: NCSNpp, name: str, data: Tensor, generator: torch.Generator) -> Tensor:
    """One sample's gradient of sigma^4 times the estimate, over all levels, as one vector."""
    x0, sigma, z = noisy(data, 1, generator)
    x = x0 + sigma[:, None, None, None] * z
    asym = cf.qc_loss(net, x, sigma, weight=sigma**4, estimator=name, generator=generator)
    gradients = torch.autograd.grad(asym, [p for p in net.parameters() if p.requires_grad], allow_unused=True)
    return torch.cat([g.flatten() for g in gradients if g is not None])


def gradient_noise(
    net: NCSNpp, data: Tensor, seed: int, draws: int, exact_draws: int
) -> dict[str, dict[str, float]]:
    """tr Var and |mean|^2 of the per-sample gradient; the mean is that of the quietest, skew."""
    moments = {}
    for name in ("skew", "paper", "est", "pair", "loop", "exact"):
        n = {"skew": 3 * draws, "exact": exact_draws}.get(name, draws)
        total, squares, each = 0.0, 0.0, []
        for i in range(n):
            g = gradient(net, name, data, stream(seed, "gradient", i)).double()  # same data in every arm
            total, squares = total + g, squares + float(g.square().sum())
            each.append(float(g.square().sum()))
        mean2 = float((total / n).square().sum())
        variance = (squares / n - mean2) * n / (n - 1)
        spread = torch.tensor(each).std() / math.sqrt(n)
        moments[name] = {"variance": variance, "variance_se": float(spread), "mean2": mean2 - variance / n}
        print(name, moments[name], flush=True)
    signal = moments["skew"]["mean2"]
    for m in moments.values():
        m["noise"] = m["variance"] / signal
    return moments


def page(record: dict) -> str:
    """The page of the documentation."""
    noise, cost, values = record["gradient"], record["flops"], record["value"]
    base = noise["paper"]["noise"] * cost["algorithm1"]
    hardware, config = record["provenance"]["hardware"], record["config"]
    lines = [
        "# Estimators: variance and cost",
        "",
        "*Generated by `benchmarks/variance.py` from `benchmarks/records/variance.json`; do not edit.*",
        "",
        f"A small NCSN++ ({config['parameters']:,} parameters, D = 256) trained for {config['steps']:,}",
        f"steps on {config['data']} (grey, 16 x 16), score-matching loss {config['loss']:.3f}; "
        f"seed {config['seed']},",
        f"commit `{record['provenance']['commit']}`, {hardware['device']}, torch "
        f"{record['provenance']['versions']['torch']}.",
        "",
        "## Gradient noise x cost of a training step",
        "",
        "Noise is tr Var / |mean|^2 of one sample's parameter gradient, one Rademacher probe, weight",
        "sigma^4, all noise levels; the exact loss has that of the images and levels alone, from "
        f"{config['exact_gradients']} draws.",
        "Cost is the counted FLOPs of the whole step, score matching included, in forward passes (a step",
        f"without a penalty: {cost['U']:.2f}); unless `qc_loss` is named, the penalty uses score matching's",
        "evaluation of the network where it can. The last column divides noise x cost of the paper's code by",
        "each.",
        "",
        "| estimator | gradient noise | cost (F) | noise x cost | better than the paper's code |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, label in NAMES.items():
        m = noise[SOURCE.get(name, name)]
        product = m["noise"] * cost[name]
        lines.append(
            f"| {label} | {m['noise']:.3g} ± {m['variance_se'] / m['variance'] * m['noise']:.2g} "
            f"| {cost[name]:.2f} | {product:.3g} | {base / product:.2f}x |"
        )
    lines += [
        "",
        "## Variance of the value",
        "",
        "Relative variance per Rademacher probe about exact Jacobians, "
        f"{config['photos']} images x {config['draws']:,} probes (loop: {config['loop_draws']:,}, on the",
        "network itself). ‖K‖/‖S - tr‖ compares the skew part with the symmetric part without its",
        "multiple of I,",
        "which adds nothing to these variances but est's.",
        "",
        "| sigma | NAsym | ‖K‖/‖S - tr‖ | est | est~ (paper) | skew | pair | loop | est~ / skew |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for level, row in values.items():
        v = {name: row[name]["relative_variance"] for name in (*SAMPLED, "loop")}
        lines.append(
            f"| {level} | {row['nasym']:.2e} | {row['skew_to_traceless']:.3f} | {v['est']:.3g} "
            f"| {v['paper']:.3g} | {v['skew']:.3g} | {v['pair']:.3g} | {v['loop']:.3g} "
            f"| {v['paper'] / v['skew']:.1f} |"
        )
    lines += [
        "",
        "## Variance of the value x cost",
        "",
        "The relative variance, mean over the levels, times the counted FLOPs of one value",
        "(`curlfree.asymmetry` without gradients), in forward passes. This network propagates its own",
        "tangents, so that J v costs two passes.",
        "",
        "| estimator | relative variance | cost (F) | variance x cost | better than est~ |",
        "| --- | --- | --- | --- | --- |",
    ]
    mean = {
        name: sum(row[name]["relative_variance"] for row in values.values()) / len(values)
        for name in estimators.ESTIMATORS
    }
    paper = mean["paper"] * cost["value paper"]
    for name in estimators.ESTIMATORS:
        product = mean[name] * cost[f"value {name}"]
        times = "-" if mean[name] == 0 else f"{paper / product:.3g}x"
        lines.append(f"| {name} | {mean[name]:.3g} | {cost[f'value {name}']:.2f} | {product:.3g} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a packed data set, made by `curlfree prepare`")
    parser.add_argument("--out", type=Path, required=True, help="the record, JSON")
    parser.add_argument("--page", type=Path, help="write the documentation page from the record")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--photos", type=int, default=8)
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--loop-draws", type=int, default=500)
    parser.add_argument("--gradients", type=int, default=400)
    parser.add_argument("--exact-gradients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.data:
        start = time.time()
        data = images(args.data)
        net = train(data, args.steps, args.seed)
        with torch.no_grad():
            x0, sigma, z = noisy(data, 2000, stream(args.seed, "loss"))
            loss = float((sigma**2 * cf.dsm(net, x0, sigma, z)).mean())
        record = {
            "config": {
                "data": open_packed(args.data).header.source,
                "steps": args.steps,
                "photos": args.photos,
                "draws": args.draws,
                "loop_draws": args.loop_draws,
                "gradients": args.gradients,
                "exact_gradients": args.exact_gradients,
                "seed": args.seed,
                "parameters": sum(p.numel() for p in net.parameters()),
                "loss": loss,
            },
            "flops": flops(net, data, args.seed),
            "value": value_variance(net, data, args.seed, args.photos, args.draws, args.loop_draws),
            "gradient": gradient_noise(net, data, args.seed, args.gradients, args.exact_gradients),
        }
        record["provenance"] = provenance(time.time() - start)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    if args.page:
        args.page.parent.mkdir(parents=True, exist_ok=True)
        args.page.write_text(page(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
