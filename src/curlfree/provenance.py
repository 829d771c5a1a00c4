"""Provenance: which software, which commit and which hardware made a result."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def provenance(seconds: float | None = None, device: str | None = None) -> dict[str, Any]:
    """What made a result: versions, commit, hardware and the time it took.

    Args:
        seconds: wall-clock time of the run; None while it goes on.
        device: name of the accelerator, None for the processor.
    """
    packages = ("curlfree", "torch", "numpy", "scipy", "torchdiffeq", "matplotlib")
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
        "hardware": {
            "device": device or _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
    } | ({} if seconds is None else {"seconds": round(seconds, 2)})


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree that runs, with "-dirty" if it was changed; None if it is installed.

    A copy of the tree without its history is named by the environment variable GIT_COMMIT.
    """
    here = Path(__file__)

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", here.name) is None:
        return os.environ.get("GIT_COMMIT")
    return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
