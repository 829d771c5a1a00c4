"""In which precision may the penalty run? Its gradient against float32's, level by level.

For each noise level the gradient of the penalty over the same samples, noise, probes and dropout masks is
computed in several ways and compared with the one entirely in float32 (no TF32), by cosine and relative
error:

    tf32            both passes in TF32
    q fp32          q = (J - J^T) v in float32, the parameter pass in bfloat16 autocast
    q tf32          q in TF32, the parameter pass in bfloat16 autocast: what training does on a GPU
    bf16            both passes in bfloat16 autocast
    bf16 compiled   as `q tf32`, with the compiled regions of training

and the gradient of an energy's score matching (`curlfree.fast.energy_dsm`), of the authors' energy (h^2) and
of the well-scaled one (denoiser), with the one in float32:

    C h^2, C denoiser                     both passes in TF32, also where training is in bfloat16
    C h^2 compiled, C denoiser compiled   the same with the compiled regions of training

    python benchmarks/precision.py --checkpoint model.safetensors --preset ncsnpp-small \
        --data cifar10.packed --out benchmarks/records/precision --page docs/benchmarks/precision.md

On a CPU there is no TF32: the arms that differ by it alone coincide there.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from measure import RecordFile, arguments, header, load_record, open_device, release, say, write_page
from subjects import load_images, load_network
from torch import Tensor

import curlfree as cf
from curlfree.build import ScoreDenoiser
from curlfree.estimators import rademacher
from curlfree.fast import Energy, energy_dsm, prepare
from curlfree.nets.ncsnpp import PRESETS, NCSNpp
from curlfree.operators import frozen, inner
from curlfree.penalty import directional, products

PROCESS = cf.VE(0.01, 50.0)
ARMS = ("tf32", "q fp32", "q tf32", "bf16", "bf16 compiled")
ENERGIES: dict[str, Callable[[NCSNpp], Energy]] = {
    "C h^2": cf.ScoreNormEnergy,
    "C denoiser": lambda net: cf.DenoiserEnergy(ScoreDenoiser(net)),
}
ENERGY_ARMS = tuple(f"{name}{how}" for name in ENERGIES for how in ("", " compiled"))


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow TF32 or not."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def gradient(
    net: NCSNpp, x: Tensor, sigma: Tensor, v: Tensor, masks: tuple[Tensor, ...], arm: str
) -> tuple[Tensor, Tensor]:
    """q, and the gradient of the mean of 1/2 ||q||^2, as one vector each."""
    device = x.device.type
    condition = {"masks": masks}
    half = arm not in ("fp32", "tf32")
    with tf32(arm not in ("fp32", "q fp32")):
        with frozen(net), torch.autocast(device, torch.bfloat16, enabled=arm == "bf16"):
            _, (Jv,), (JTv,) = products(net, x.clone().requires_grad_(), sigma, (v,), condition)
        q = Jv - JTv
        with torch.autocast(device, torch.bfloat16, enabled=half):
            _, (Jv, Jq) = directional(net, x, sigma, (v, q), condition)
        surrogate = (inner(q, Jv) - inner(v, Jq)).mean()
        found = torch.autograd.grad(surrogate, list(net.parameters())[1:], allow_unused=True)
    return q.flatten(), torch.cat([g.flatten() for g in found if g is not None])


def energy_gradient(
    energy: Energy, net: NCSNpp, x0: Tensor, sigma: Tensor, z: Tensor, masks: tuple[Tensor, ...], half: bool
) -> Tensor:
    """The gradient of an energy's score matching, in float32 or as training takes it, as one vector."""
    with tf32(half), torch.autocast(x0.device.type, torch.bfloat16, enabled=half):
        loss = (sigma**2 * energy_dsm(energy, x0, sigma, z, condition={"masks": masks})).mean()
        found = torch.autograd.grad(loss, list(net.parameters())[1:], materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def compare(a: Tensor, b: Tensor) -> dict[str, float]:
    a, b = a.double(), b.double()
    return {"cosine": float(a @ b / (a.norm() * b.norm())), "error": float((a - b).norm() / b.norm())}


def run(args: argparse.Namespace, file: RecordFile, device: torch.device) -> None:
    net = load_network(args.preset, args.checkpoint, device).train()
    compiled = load_network(args.preset, args.checkpoint, device).train()
    prepare(compiled, backend=args.backend)
    images = load_images(args.data, net.config, "test", args.samples, device)
    for level in PROCESS.levels(args.levels).tolist():
        if f"{level:.6g}" in file.results:
            continue
        generator = torch.Generator(device).manual_seed(round(1e6 * level))
        sigma = torch.full((len(images),), level, device=device)
        z = torch.randn(images.shape, generator=generator, device=device)
        x = images + level * z
        v = rademacher(x, generator)
        masks = net.draw_masks(len(x), generator)
        q, reference = gradient(net, x, sigma, v, masks, "fp32")
        row: dict[str, object] = {"q_norm": float(q.norm()), "gradient_norm": float(reference.norm())}
        for arm in ARMS:
            mine = compiled if arm == "bf16 compiled" else net
            own_q, own = gradient(mine, x, sigma, v, masks, "q tf32" if arm == "bf16 compiled" else arm)
            row[arm] = {"gradient": compare(own, reference), "q": compare(own_q, q)}
        for name, make in ENERGIES.items():
            draws = (images, sigma, z, masks)
            reference = energy_gradient(make(net), net, *draws, half=False)
            for arm, mine in ((name, net), (f"{name} compiled", compiled)):
                own = energy_gradient(make(mine), mine, *draws, half=True)
                row[arm] = {"gradient": compare(own, reference)}
        file.results[f"{level:.6g}"] = row
        file.save()
        release(device)
        cosines = [f"{arm} {row[arm]['gradient']['cosine']:.5f}" for arm in (*ARMS, *ENERGY_ARMS)]
        say(f"sigma {level:.4g}: " + ", ".join(cosines))


def page(record: dict) -> list[str]:
    config = record["config"]
    lines = header("The precision of the penalty's gradient", "precision", record)
    lines += [
        f"`{config['preset']}`, {config['network']}, {config['samples']} images of {config['images']} per",
        "level, dropout on. Against the gradient in float32: cosine (relative error); beside it the relative",
        "error of q = (J - J^T) v.",
        "",
    ]
    table: Callable[[list[str]], str] = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    shown = (*ARMS, *ENERGY_ARMS)
    lines += [table(["sigma", *shown]), table(["---"] * (1 + len(shown)))]
    for level, row in record["results"].items():
        cells = [level]
        for arm in ARMS:
            g, q = row[arm]["gradient"], row[arm]["q"]
            cells.append(f"{g['cosine']:.4f} ({g['error']:.3f}); q {q['error']:.3f}")
        for arm in ENERGY_ARMS:
            g = row[arm]["gradient"]
            cells.append(f"{g['cosine']:.4f} ({g['error']:.3f})")
        lines.append(table(cells))
    least = {a: min(row[a]["gradient"]["cosine"] for row in record["results"].values()) for a in shown}
    lines += ["", "Smallest cosine, which must be above 0.99 for what training does:", ""]
    lines += [f"- {a}: {c:.4f}: {'yes' if c > 0.99 else 'NO'}" for a, c in least.items()]
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--preset", default="ncsnpp-small", choices=PRESETS)
    parser.add_argument("--checkpoint", type=Path, help="weights, safetensors; random ones without")
    parser.add_argument("--data", nargs="*", default=[], help="test images (subjects.py); noise without")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--levels", type=int, default=12)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args()
    if not args.only_page:
        device = open_device(args.device)
        config = {
            "preset": args.preset,
            "network": "trained" if args.checkpoint else "random weights",
            "images": "the test set" if args.data else "uniform noise",
            "samples": args.samples,
            "levels": args.levels,
        }
        run(args, RecordFile(args.out, config, device), device)
    write_page(args.page, page(load_record(args.out)))


if __name__ == "__main__":
    main()
