"""How long do precision and recall of 50,000 features take, and are they those of brute force?

Gaussian features of 2,048 numbers with a shared low-dimensional part (so that neither is 0 or 1); the whole
sets on the device in float32, and a subset against all pairs of distances in float64.

    python benchmarks/neighbours.py --out benchmarks/records/neighbours --page docs/benchmarks/neighbours.md
"""

import argparse
from pathlib import Path

import torch
from measure import RecordFile, header, load_record, open_device, say, seconds_of, write_page
from torch import Tensor

from curlfree.neighbours import precision_recall

K = 3


def features(n: int, size: int, shift: float, seed: int, device: torch.device) -> Tensor:
    """Vectors that vary in 8 directions, and slightly in all others."""
    generator = torch.Generator(device).manual_seed(seed)
    few = torch.randn(n, 8, generator=generator, device=device) + shift
    axes = torch.randn(8, size, generator=torch.Generator(device).manual_seed(99), device=device) / 8**0.5
    return few @ axes + 0.05 * torch.randn(n, size, generator=generator, device=device)


def brute_force(real: Tensor, fake: Tensor) -> tuple[float, float]:
    """Precision and recall from whole matrices of distances in float64."""
    real, fake = real.double(), fake.double()

    def covered(x: Tensor, centres: Tensor) -> float:
        radii = torch.cdist(centres, centres).kthvalue(K + 1, dim=1).values  # itself is the nearest
        return float((torch.cdist(x, centres) <= radii).any(1).double().mean())

    return covered(fake, real), covered(real, fake)


def run(args: argparse.Namespace, file: RecordFile, device: torch.device) -> None:
    real, fake = (features(args.n, args.size, s, i, device) for i, s in enumerate((0.0, 0.7)))
    seconds = [seconds_of(lambda: precision_recall(real, fake, K), device) for _ in range(args.repeats)]
    found = precision_recall(real, fake, K)
    few = precision_recall(real[: args.subset], fake[: args.subset], K)
    expected = brute_force(real[: args.subset], fake[: args.subset])
    file.results.update(
        seconds=seconds,
        precision=found.precision,
        recall=found.recall,
        subset={"ours": [few.precision, few.recall], "brute force": list(expected)},
    )
    file.save()
    say(f"{args.n} x {args.size}: {min(seconds):.2f} to {max(seconds):.2f} s; {file.results['subset']}")


def page(record: dict) -> list[str]:
    config, results = record["config"], record["results"]
    lines = header("The cost of precision and recall", "neighbours", record)
    ours, exact = results["subset"]["ours"], results["subset"]["brute force"]
    times = ", ".join(f"{s:.2f}" for s in results["seconds"])
    return [
        *lines,
        f"{config['n']:,} against {config['n']:,} vectors of {config['size']:,} numbers, k = {K}: "
        f"{times} s (the first with start-up); precision {results['precision']:.4f}, "
        f"recall {results['recall']:.4f}.",
        "",
        f"The first {config['subset']:,} of each: precision {ours[0]:.5f}, recall {ours[1]:.5f}; by brute",
        f"force in float64 {exact[0]:.5f}, {exact[1]:.5f}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=50_000)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--subset", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the record")
    parser.add_argument("--page", type=Path, help="write the documentation page from the record")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.only_page:
        device = open_device(args.device)
        config = {"n": args.n, "size": args.size, "subset": args.subset}
        run(args, RecordFile(args.out, config, device), device)
    write_page(args.page, page(load_record(args.out)))


if __name__ == "__main__":
    main()
