"""Does RK45 on the device cost more than the network?

2,500 images of the deep NCSN++ by the probability-flow ODE, state in float64 on the device, with the
library's solver; the same through torchdiffeq and through SciPy on the host (the authors' way). Beside them
the bare forward pass at the same batch. The network has its published initial weights, whose output is zero;
to give the solver a flow, the score of N(1/2, (sigma^2 + 1/4^2) I) is added, which costs two operations and
is in the bare forward pass, too.

    python benchmarks/sampling.py --out benchmarks/records/sampling --page docs/benchmarks/sampling.md
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from measure import (
    RecordFile,
    arguments,
    header,
    load_record,
    open_device,
    release,
    say,
    seconds_of,
    spread,
    write_page,
)
from torch import Tensor

import curlfree as cf
from curlfree.nets.ncsnpp import PRESETS, NCSNpp
from curlfree.ode import Solver, rk45, rk45_scipy, rk45_torchdiffeq
from curlfree.operators import per_sample
from curlfree.samplers import probability_flow

PROCESS = cf.VE(0.01, 50.0)
SOLVERS: dict[str, Solver] = {
    "curlfree": rk45,
    "torchdiffeq": rk45_torchdiffeq,
    "SciPy on the host": rk45_scipy,
}


def flow(net: NCSNpp) -> Callable[[Tensor, Tensor], Tensor]:
    """The network's score plus that of a Gaussian, in bfloat16 on a GPU."""

    def field(x: Tensor, sigma: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            s = net(x, sigma)
        return s + (0.5 - x) / per_sample(sigma.square() + 0.25**2, x)

    return field


def run(args: argparse.Namespace, file: RecordFile, device: torch.device) -> None:
    torch.backends.cudnn.benchmark = device.type == "cuda"
    net = NCSNpp(PRESETS[args.preset], seed=0).to(device, memory_format=torch.channels_last).eval()
    field, shape = flow(net), (args.images, net.config.channels, net.config.size, net.config.size)
    x = PROCESS.prior_sample(shape, torch.Generator(device).manual_seed(0)).float()
    sigma = torch.full((args.images,), 1.0, device=device)

    @torch.no_grad()
    def forward() -> None:
        field(x, sigma)

    def bare() -> None:
        times = [seconds_of(forward, device) for _ in range(2 + args.repeats)][2:]
        file.results.setdefault("bare", []).extend(times)
        say(f"bare forward pass: {1e3 * statistics.median(times):.1f} ms")

    bare()
    for name, solver in SOLVERS.items():
        release(device)
        counts: list[int] = []

        def solve(solver: Solver = solver, counts: list[int] = counts) -> None:
            counts.append(
                probability_flow(field, x, PROCESS, solver=solver, rtol=args.rtol, atol=args.rtol).nfe
            )

        seconds = seconds_of(solve, device)
        file.results[name] = {"seconds": seconds, "nfe": counts[0]}
        file.save()
        say(f"{name}: {seconds:.2f} s, {counts[0]} evaluations, {1e3 * seconds / counts[0]:.1f} ms each")
        bare()
    file.save()


def page(record: dict) -> list[str]:
    config, results = record["config"], record["results"]
    bare = statistics.median(results["bare"])
    lines = header("The cost of RK45 around the network", "sampling", record)
    lines += [
        f"{config['images']:,} images, `{config['preset']}`, tolerances {config['rtol']:g}; time of a whole",
        "solution divided by its evaluations, against the bare forward pass, measured before and after each.",
        "",
        "| | evaluations | seconds | ms per evaluation | / bare |",
        "| --- | --- | --- | --- | --- |",
        f"| bare forward pass | | | {1e3 * bare:.1f} (spread {spread(results['bare'])}) | 1 |",
    ]
    for name in SOLVERS:
        row = results[name]
        each = row["seconds"] / row["nfe"]
        lines.append(
            f"| {name} | {row['nfe']} | {row['seconds']:.2f} | {1e3 * each:.1f} | {each / bare:.3f} |"
        )
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--preset", default="ncsnpp-deep", choices=PRESETS)
    parser.add_argument("--images", type=int, default=2500)
    parser.add_argument("--rtol", type=float, default=1e-3)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if not args.only_page:
        device = open_device(args.device)
        config = {"preset": args.preset, "images": args.images, "rtol": args.rtol}
        run(args, RecordFile(args.out, config, device), device)
    write_page(args.page, page(load_record(args.out)))


if __name__ == "__main__":
    main()
