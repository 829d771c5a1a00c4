"""The examples do what their documentation says."""

import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import curlfree as cf

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_three_lines_halve_the_asymmetry_at_the_same_loss() -> None:
    before, after = load("train_before"), load("train_after")
    x0, sigma, z = before.batch(20_000, torch.Generator().manual_seed(99))
    x = x0 + sigma[:, None] * z
    loss, asymmetry = [], []
    for module in (before, after):
        net = module.train(steps=300)
        with torch.no_grad():
            loss.append(float((sigma**2 * cf.dsm(net, x0, sigma, z)).mean()))
            asymmetry.append(float((sigma**2 * cf.asymmetry(net, x, sigma)).mean()))
    assert asymmetry[1] <= 0.5 * asymmetry[0]
    assert loss[1] <= 1.05 * loss[0]
    assert loss[0] < 0.6  # it has learned: a score of zero has a loss of 1


@pytest.mark.parametrize("name", ["train"])
def test_the_penalty_is_at_most_three_lines_more(name: str) -> None:
    before, after = [(EXAMPLES / f"{name}_{k}.py").read_text().splitlines() for k in ("before", "after")]
    code = [
        line
        for line in difflib.ndiff(before[1:], after[1:])  # the first line is the docstring
        if line[:2] in ("+ ", "- ") and line[2:].strip()
    ]
    assert 1 <= len(code) <= 3, code


def test_the_script_goes_from_the_official_format_to_a_report(tmp_path: Path) -> None:
    """The whole script on a small set, about 45 s of one core."""
    files = load("make_cifar_format").write_cifar10(tmp_path, per_batch=10)
    program, out = tmp_path / "bin" / "curlfree", tmp_path / "out"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m curlfree "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", EXAMPLES / "cifar10_smoke.sh", files, out, "--unverified"],
        env={**os.environ, "PATH": path, "SMALL": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

    page = (out / "report" / "report.html").read_text(encoding="utf-8")
    rows = dict(re.findall(r"<tr><td[^>]*>(.*?)</td>(.*?)</tr>", page))
    expected = {"loss", "nll", "asym", "nasym", "work_nats", "nfe", "fid", "kid", "precision", "recall"}
    for column, run in enumerate(("u", "qc")):
        measured = json.loads((out / run / "metrics.json").read_text())
        assert measured["metrics"].keys() == expected
        assert measured["model"]["step"] == 2
        for name, metric in measured["metrics"].items():
            row = rows["nll, bits/dim" if name == "nll" else name]
            cell = re.findall(r"<td[^>]*>(.*?)</td>", row)[column]
            assert cell.startswith(f"{metric['value']:.4g} ± ") and cell.endswith(f" ({metric['n']})")
        (samples,) = (out / run / "samples").glob("*/samples.json")
        assert json.loads(samples.read_text())["n"] == 8
        assert f"Samples of {run}: heun" in page
    assert page.count(">not run<") == 2 and ">not run<" in rows["inception_score"]
    assert not re.search(r"https?://|<script|<link", page)
    assert json.loads((out / "qc" / "config.json").read_text())["init"] == str(out / "u")
    assert len(json.loads((out / "audit.json").read_text())["levels"]) == 2
