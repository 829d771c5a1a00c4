"""How the benchmarks measure: times, peak memory, arithmetic, and records that survive an interruption."""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from curlfree.fast import Recorded
from curlfree.provenance import provenance

Step = Callable[[], object]
WARM_UP = Recorded.WARM_UP + 2  # compiles, tunes, records, replays once


def arguments(documentation: str | None) -> argparse.ArgumentParser:
    """A parser of what every benchmark takes: a device, a record, a page."""
    parser = argparse.ArgumentParser(description=(documentation or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the record")
    parser.add_argument("--page", type=Path, help="write the documentation page from the record")
    parser.add_argument("--only-page", action="store_true", help="measure nothing")
    return parser


class FlopCounter(TorchDispatchMode):
    """Counts matrix products and convolutions, double backward included (torch's own counter cannot)."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def count_flops(step: Step) -> int:
    """The FLOPs of a step, made eagerly."""
    with torch.compiler.set_stance("force_eager"), FlopCounter() as counter:
        step()
    return counter.total


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(step: Step, device: torch.device) -> float:
    return timed(step, device)[0]


def timed(step: Step, device: torch.device) -> tuple[float, float]:
    """The seconds of a step, and how many of them the host needed to launch it."""
    synchronize(device)
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    synchronize(device)
    return time.perf_counter() - start, host


def measure(step: Step, device: torch.device, *, repeats: int, limit: float) -> dict[str, Any]:
    """Time a step.

    Args:
        step: the step; its first calls may compile and record.
        device: where it runs.
        repeats: how often it is timed after `WARM_UP` calls.
        limit: seconds after which no further repetition is started.

    Returns:
        `seconds` of each repetition, their `median`, the median of the `host`'s part, `start_up` of the
        first calls; on a GPU `peak_bytes` that the step allocated beyond what was there before, and
        `reserved_bytes` that the process held at its peak, all graphs' memory included.
    """
    end = time.perf_counter() + limit
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start_up = sum(seconds_of(step, device) for _ in range(WARM_UP))
    seconds, host = list[float](), list[float]()
    while len(seconds) < repeats and not (seconds and time.perf_counter() > end):
        whole, part = timed(step, device)
        seconds.append(whole)
        host.append(part)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else None
    return {
        "seconds": seconds,
        "median": statistics.median(seconds),
        "host": statistics.median(host),
        "start_up": start_up,
        "peak_bytes": peak,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
    }


def spread(seconds: list[float]) -> str:
    """The range of the middle half, in per cent of the median."""
    if len(seconds) < 4:
        return "-"
    low, _, high = statistics.quantiles(seconds, n=4)
    return f"{100 * (high - low) / statistics.median(seconds):.1f} %"


def release(device: torch.device) -> None:
    """Give memory back between arms."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def open_device(name: str) -> torch.device:
    """The device by name, with TF32 allowed as in the paper's time."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: expected a CUDA device, found none; use --device cpu")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    return device


def device_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name() if device.type == "cuda" else None


class RecordFile:
    """A record on disk: ``record.json`` in a folder, written whole after each change.

    Args:
        folder: where it lies; an existing record goes on if its configuration is the same.
        config: what the run is.
        device: where it runs.
    """

    def __init__(self, folder: Path, config: dict[str, Any], device: torch.device) -> None:
        self.path, self.start, self.device = folder / "record.json", time.time(), device
        folder.mkdir(parents=True, exist_ok=True)
        self.data: dict[str, Any] = {"config": config, "results": {}}
        if self.path.is_file():
            found = json.loads(self.path.read_text())
            if found["config"] != json.loads(json.dumps(config)):
                raise SystemExit(
                    f"{self.path} is the record of another configuration; use another --out, or delete it"
                )
            self.data = found

    @property
    def results(self) -> dict[str, Any]:
        return self.data["results"]

    def save(self) -> None:
        self.data["provenance"] = provenance(time.time() - self.start, device_name(self.device))
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(finite(self.data), indent=1, allow_nan=False) + "\n")
        part.replace(self.path)


def finite(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load_record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())


def header(title: str, script: str, record: dict[str, Any]) -> list[str]:
    """The first lines of a generated page."""
    source, hardware = record["provenance"], record["provenance"]["hardware"]
    made = f"`benchmarks/{script}.py` from `benchmarks/records/{script}/record.json`"
    return [
        f"# {title}",
        "",
        f"*Generated by {made}; do not edit.*",
        "",
        f"{hardware['device']}, torch {source['versions']['torch']}, commit `{source['commit']}`, "
        f"{source['seconds']:.0f} s.",
        "",
    ]


def write_page(path: Path | None, lines: list[str]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines).rstrip() + "\n")


def say(message: str) -> None:
    print(message, flush=True)
