"""The examples do what their documentation says."""

import difflib
import importlib.util
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
