"""How long do precision and recall of 50,000 features take, and are they those of brute force?

Gaussian features of 2,048 numbers with a shared low-dimensional part (so that neither is 0 or 1); the whole
sets on the device in float32, and every decision for a subset against distances in float64.

    python benchmarks/neighbours.py --out benchmarks/records/neighbours --page docs/benchmarks/neighbours.md
"""

import argparse

import torch
from measure import RecordFile, arguments, header, load_record, open_device, say, seconds_of, write_page
from torch import Tensor

from curlfree.neighbours import covered, precision_recall

K = 3


def features(n: int, size: int, shift: float, seed: int, device: torch.device) -> Tensor:
    """Vectors that vary in 8 directions, and slightly in all others."""
    generator = torch.Generator(device).manual_seed(seed)
    few = torch.randn(n, 8, generator=generator, device=device) + shift
    axes = torch.randn(8, size, generator=torch.Generator(device).manual_seed(99), device=device) / 8**0.5
    return few @ axes + 0.05 * torch.randn(n, size, generator=generator, device=device)


def margins(x: Tensor, centres: Tensor) -> Tensor:
    """How deep each vector lies in a ball, squared; negative outside all: by differences in float64."""

    def distances(a: Tensor) -> Tensor:
        return torch.cdist(a.double(), centres.double(), compute_mode="donot_use_mm_for_euclid_dist")

    radii = torch.cat([distances(part).kthvalue(K + 1, dim=1).values for part in centres.split(512)])
    return torch.cat([(radii.square() - distances(part).square()).amax(1) for part in x.split(512)])


def compare(x: Tensor, centres: Tensor) -> dict[str, float | int]:
    """The decisions for some vectors, against all balls of the other set."""
    ours, depth = covered(x, centres, K), margins(x, centres)
    wrong = depth.abs()[ours != (depth >= 0)]
    return {
        "share": float(ours.double().mean()),
        "different": len(wrong),
        "deepest difference": float(wrong.max()) if len(wrong) else 0.0,
        "rounding": 1e-6 * float((centres - centres.mean(0)).square().sum(1).max()),
    }


def run(args: argparse.Namespace, file: RecordFile, device: torch.device) -> None:
    real, fake = (features(args.n, args.size, s, i, device) for i, s in enumerate((0.0, 0.7)))
    seconds = [seconds_of(lambda: precision_recall(real, fake, K), device) for _ in range(args.repeats)]
    found = precision_recall(real, fake, K)
    file.results.update(
        seconds=seconds,
        precision=found.precision,
        recall=found.recall,
        subset={
            "precision": compare(fake[: args.subset], real),
            "recall": compare(real[: args.subset], fake),
        },
    )
    file.save()
    say(f"{args.n} x {args.size}: {min(seconds):.2f} to {max(seconds):.2f} s; {file.results['subset']}")


def page(record: dict) -> list[str]:
    config, results = record["config"], record["results"]
    lines = header("The cost of precision and recall", "neighbours", record)
    times = ", ".join(f"{s:.2f}" for s in results["seconds"])
    return [
        *lines,
        f"{config['n']:,} against {config['n']:,} vectors of {config['size']:,} numbers, k = {K}: "
        f"{times} s (the first with start-up); precision {results['precision']:.4f}, "
        f"recall {results['recall']:.4f}.",
        "",
        f"The first {config['subset']:,} of each against all of the other, decision by decision, by brute",
        "force in float64 (a vector nearer to the edge of a ball than the rounding may go either way):",
        "",
        "| | inside | other decisions | the deepest of them (squared) | rounding of float32 |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {each['share']:.4f} | {each['different']} | {each['deepest difference']:.2g} | "
            f"{each['rounding']:.2g} |"
            for name, each in results["subset"].items()
        ),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--n", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--subset", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if not args.only_page:
        device = open_device(args.device)
        config = {"n": args.n, "size": args.size, "subset": args.subset}
        run(args, RecordFile(args.out, config, device), device)
    write_page(args.page, page(load_record(args.out)))


if __name__ == "__main__":
    main()
