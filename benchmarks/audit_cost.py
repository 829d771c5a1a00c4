"""What does it cost to measure a network's asymmetry?

Per batch and noise level, on the same images, levels and network:

* `authors`: the paper's evaluation: the network in the authors' style, est~ by two vector-Jacobian products,
  in float32 and with TF32 allowed;
* `ours`: the skew estimate with NAsym and the trace (`curlfree.audit` without the loop), the network compiled
  by region, in float32, with TF32 and in bfloat16 autocast;
* `ours with loops`: with the work around 8-node loops as well, which the authors do not have.

The estimates beside the times say whether a faster arm measures the same: mean and standard error of
sigma^4 Asym over the images, which for the authors' estimator and ours, of different variance, must agree
within their standard errors. The total is what 10,000 images at 20 levels would take.

Then `curlfree.audit` itself, loops and all, runs over 10,000 images at 20 levels, in float32 (TF32 allowed),
one level after another: a command goes on with the levels that are missing until the time is over, and the
page says how many there are and what they took.

    python benchmarks/audit_cost.py --checkpoint model.safetensors --data cifar10.packed \
        --out benchmarks/records/audit_cost --page docs/benchmarks/audit-cost.md
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

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
    spread,
    synchronize,
    write_page,
)
from precision import tf32
from subjects import load_images, load_network
from torch import Tensor

import curlfree as cf
from curlfree.estimators import rademacher, skew
from curlfree.fast import prepare
from curlfree.metrics import audit
from curlfree.nets.ncsnpp import PRESETS, NCSNpp
from curlfree.operators import inner

PROCESS = cf.VE(0.01, 50.0)
IMAGES, LEVELS = 10_000, 20
TOTAL = IMAGES * LEVELS
Z = 4.0  # standard errors by which two estimates of one number may differ
Field = Callable[[Tensor, Tensor], Tensor]


def authors(net: Field, x: Tensor, sigma: Tensor, v: Tensor) -> Tensor:
    """est~ as the paper evaluates it: two vector-Jacobian products through one graph of the network."""
    x = x.detach().requires_grad_()
    s = net(x, sigma)
    (vJ,) = torch.autograd.grad(inner(v, s).sum(), x, retain_graph=True)
    (vJJ,) = torch.autograd.grad(inner(vJ, s).sum(), x)
    return inner(vJ, vJ) - inner(vJJ, v)


@torch.no_grad()
def ours(net: Field, x: Tensor, sigma: Tensor, v: Tensor) -> Tensor:
    """The skew estimate."""
    _, J = cf.jacobian(net, x, sigma)
    return skew(J, lambda: v)[0]


def run(args: argparse.Namespace, file: RecordFile, device: torch.device) -> None:
    end = time.time() + args.limit
    torch.backends.cudnn.benchmark = device.type == "cuda"
    net = load_network(args.preset, args.checkpoint, device).eval()
    baseline = AuthorsNet.like(net)
    for p in (*net.parameters(), *baseline.parameters()):
        p.requires_grad_(False)
    prepare(net, backend=args.backend)
    images = load_images(args.data, net.config, "test", args.batch * args.batches, device)
    levels = PROCESS.levels(args.levels).tolist()

    def looped(net: Field, x: Tensor, sigma: Tensor, v: Tensor) -> Tensor:
        asym = ours(net, x, sigma, v)
        with torch.no_grad():
            cf.loop_work(net, x, sigma, generator=torch.Generator(device).manual_seed(0))
        return asym

    arms: dict[str, tuple[Callable[..., Tensor], Field, bool, torch.dtype | None]] = {
        "authors, float32": (authors, baseline, False, None),
        "authors, TF32": (authors, baseline, True, None),
        "ours, TF32": (ours, net, True, None),
        "ours, bfloat16": (ours, net, True, torch.bfloat16),
        "ours with loops, TF32": (looped, net, True, None),
        "ours with loops, bfloat16": (looped, net, True, torch.bfloat16),
        "ours, float32": (ours, net, False, None),
    }
    for name, (estimate, field, allowed, dtype) in arms.items():
        if name in file.results:
            continue
        if time.time() > end - args.reserve:
            say(f"{name}: no time left")
            continue
        release(device)
        seconds: list[float] = []
        table, start = {}, time.time()
        with tf32(allowed), torch.autocast(device.type, dtype, enabled=dtype is not None):
            for level in levels:
                values = []
                generator = torch.Generator(device).manual_seed(round(1e6 * level))
                for x0 in images.split(args.batch):
                    sigma = torch.full((len(x0),), level, device=device)
                    x = x0 + level * torch.randn(x0.shape, generator=generator, device=device)
                    v = rademacher(x, generator)
                    synchronize(device)
                    begin = time.perf_counter()
                    values.append(estimate(field, x, sigma, v))
                    synchronize(device)
                    seconds.append(time.perf_counter() - begin)
                asym = level**4 * torch.cat(values).double()
                table[f"{level:.6g}"] = [float(asym.mean()), float(asym.std()) / math.sqrt(len(asym))]
        warm = seconds[2:]
        median = statistics.median(warm)
        file.results[name] = {
            "seconds": warm,
            "median": median,
            "start_up": seconds[0],
            "whole": time.time() - start,
            "images": args.batch,
            "total": median / args.batch * TOTAL,
            "sigma4_asym": table,
        }
        file.save()
        say(f"{name}: {1e3 * median:.2f} ms per batch, {median / args.batch * TOTAL:.0f} s in all")
    whole(args, file, net, device, end)
    for line in verdicts(file.data):
        say(line)


def whole(args: argparse.Namespace, file: RecordFile, net: NCSNpp, device: torch.device, end: float) -> None:
    """The audit of the whole test set, level by level, as long as there is time."""
    images = load_images(args.data, net.config, "test", args.images, device)
    done = file.data.setdefault("audit", {})
    for level in PROCESS.levels(LEVELS).tolist():
        took = min((row["seconds"] for row in done.values()), default=0.0)  # the first one compiles
        if f"{level:.6g}" in done or time.time() + max(args.reserve, took) > end:
            continue
        synchronize(device)
        start = time.time()
        with tf32(True):
            found = audit(
                net,
                images,
                PROCESS,
                levels=[level],
                batch=args.batch,
                generator=torch.Generator(device).manual_seed(round(1e6 * level)),
            )
        synchronize(device)
        done[f"{level:.6g}"] = dict(found.levels[0]) | {"seconds": time.time() - start}
        file.save()
        say(f"audit at sigma {level:.4g}: {done[f'{level:.6g}']}")


def verdicts(record: dict) -> list[str]:
    """What must hold, each with yes or NO; only what has been measured."""
    results, lines = record["results"], []
    reference = results.get("authors, float32")
    for name, row in results.items():
        if reference is None or row is reference:
            continue
        apart = max(
            abs(a - b) / math.hypot(se_a, se_b)
            for (a, se_a), (b, se_b) in (
                (row["sigma4_asym"][level], reference["sigma4_asym"][level]) for level in row["sigma4_asym"]
            )
        )
        same = f"at most {apart:.1f} standard errors apart: {'yes' if apart < Z else 'NO'}"
        faster = reference["median"] / row["median"]
        claim = f", at least 3: {'yes' if faster >= 3 else 'NO'}" if name.startswith("ours, ") else ""
        lines.append(f"{name}: {faster:.2f} times faster than the authors' evaluation{claim}; {same}")
    return lines


def page(record: dict) -> list[str]:
    config, results = record["config"], record["results"]
    lines = header("The cost of measuring asymmetry", "audit_cost", record)
    lines += [
        f"`{config['preset']}`, {config['network']}, {config['images']}, batches of {config['batch']}.",
        "",
        "| arm | ms per batch | spread | faster than `authors, float32` | 10,000 images x 20 levels (s) |",
        "| --- | --- | --- | --- | --- |",
    ]
    base = results.get("authors, float32", {}).get("median", math.nan)
    for name, row in results.items():
        lines.append(
            f"| {name} | {1e3 * row['median']:.2f} | {spread(row['seconds'])} | {base / row['median']:.2f}x "
            f"| {row['total']:.0f} |"
        )
    lines += [
        "",
        f"sigma^4 Asym and its standard error, {config['batches'] * config['batch']} images per level, one",
        "probe each:",
        "",
        "| sigma | " + " | ".join(results) + " |",
        "| --- |" + " --- |" * len(results),
    ]
    for level in next(iter(results.values()))["sigma4_asym"]:
        cells = ["{:.4g} ± {:.2g}".format(*row["sigma4_asym"][level]) for row in results.values()]
        lines.append(f"| {level} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {verdict}" for verdict in verdicts(record))]
    audited = record.get("audit", {})
    if audited:
        seconds = sum(row["seconds"] for row in audited.values())
        n, part = next(iter(audited.values()))["n"], len(audited) / LEVELS
        more = f" ({seconds / part:.0f} s for all at that rate)" if part < 1 else ""
        lines += [
            "",
            f"`curlfree.audit` with loops, {n:,} images, {len(audited)} of {LEVELS} levels: "
            f"{seconds:.0f} s{more}.",
            "",
            "| sigma | Asym | NAsym | work (nats) | s |",
            "| --- | --- | --- | --- | --- |",
        ]
        for level, row in audited.items():
            cells = [f"{row[key]:.4g} ± {row[f'{key}_se']:.2g}" for key in ("asym", "nasym", "work_nats")]
            lines.append(f"| {level} | {' | '.join(cells)} | {row['seconds']:.1f} |")
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--preset", default="ncsnpp-deep", choices=PRESETS)
    parser.add_argument("--checkpoint", type=Path, help="weights, safetensors; initial ones without")
    parser.add_argument("--data", nargs="*", default=[], help="test images (subjects.py); noise without")
    parser.add_argument("--batch", type=int, default=125, help="10,000 images are a multiple of it")
    parser.add_argument("--batches", type=int, default=2, help="per level")
    parser.add_argument("--levels", type=int, default=8)
    parser.add_argument("--images", type=int, default=IMAGES, help="of the whole audit")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all arms")
    parser.add_argument("--reserve", type=float, default=20, help="seconds below which no arm is started")
    args = parser.parse_args()
    if not args.only_page:
        device = open_device(args.device)
        config = {
            "preset": args.preset,
            "network": "trained" if args.checkpoint else "initial weights",
            "images": "test images" if args.data else "uniform noise",
            "batch": args.batch,
            "batches": args.batches,
            "levels": args.levels,
            "audit_images": args.images,
        }
        run(args, RecordFile(args.out, config, device), device)
    write_page(args.page, page(load_record(args.out)))


if __name__ == "__main__":
    main()
