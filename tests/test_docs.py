"""The documentation is true: its code runs, and everything that it names exists.

The table of equations is checked both ways against the docstrings, which cite the paper as "Eq. 14",
"Eqs. 10, 13 to 16", "Alg. 1", "Table 1" or "Fig. A2".
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import curlfree as cf
from curlfree import cli
from curlfree.config import save_config
from curlfree.presets import PRESETS

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted((ROOT / "src").rglob("*.py"))

MAIN = {"Eq.": 16, "Alg.": 1, "Fig.": 4, "Table": 4}
APPENDIX = {"Eq.": 11, "Fig.": 4, "Table": 5}
LABELS = {f"{kind} {n}" for kind, last in MAIN.items() for n in range(1, last + 1)} | {
    f"{kind} A{n}" for kind, last in APPENDIX.items() for n in range(1, last + 1)
}
NUMBER = r"A?\d+"
CITATION = re.compile(
    rf"(?<!\w)(Eq|Alg|Fig|Table)(?:orithm)?s?\.? ({NUMBER}(?:(?:, and |, | and | to ){NUMBER}(?!\w))*)"
)
# "(Karras et al. 2022, arXiv:2206.00364, Table 1)" is a citation of another work.
ELSEWHERE = re.compile(r"(?:19|20)\d\d(?:, arXiv:\d+\.\d+)?(?:, Appendix \w)?, $")
NAME = re.compile(r"`((?:curlfree|cf)(?:\.\w+)+)")
SCRIPT = re.compile(r"`((?:docs|examples|benchmarks)/[\w/]+\.(?:py|sh|json))`")
TEST = re.compile(r"`(tests/\w+\.py)::(\w+)`")


def numbers(text: str) -> Iterator[str]:
    """The numbers in "10, 13 to 16": 10, 13, 14, 15, 16."""
    words = re.findall(rf"{NUMBER}|to", text)
    for i, word in enumerate(words):
        if word != "to":
            yield word
            continue
        prefix = "A" if words[i + 1].startswith("A") else ""
        first, last = (int(w.removeprefix("A")) for w in (words[i - 1], words[i + 1]))
        yield from (f"{prefix}{n}" for n in range(first + 1, last))


def citations(text: str) -> set[str]:
    """The labels of the paper that a docstring cites."""
    text = " ".join(text.split())
    return {
        f"{match[1]}{'' if match[1] == 'Table' else '.'} {n}"
        for match in CITATION.finditer(text)
        if not ELSEWHERE.search(text[: match.start()])
        for n in numbers(match[2])
    }


def docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """The docstrings in a syntax tree, with the dotted name of what they belong to."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield name, ast.get_docstring(node) or ""
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield from docstrings(child, f"{name}.{child.name}")


@cache
def cited() -> dict[str, set[str]]:
    """The labels cited by the docstring of each module, class and function."""
    found = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for name, text in docstrings(ast.parse(path.read_text(encoding="utf-8")), module):
            found[name] = citations(text)
    return found


@cache
def table() -> dict[str, str]:
    """The rows of docs/equations.md by their labels."""
    rows = {}
    for line in (ROOT / "docs" / "equations.md").read_text(encoding="utf-8").splitlines():
        label = line.removeprefix("| ").split(" | ")[0]
        if label in LABELS:
            assert label not in rows, f"{label} has two rows"
            rows[label] = line
    return rows


def is_module(name: str) -> bool:
    return (ROOT / "src" / name.replace(".", "/")).with_suffix(".py").is_file() or (
        ROOT / "src" / name.replace(".", "/") / "__init__.py"
    ).is_file()


def covers(entry: str, name: str) -> bool:
    """Whether an entry of the table stands for `name`: for itself, what it is in, or what is in a module."""
    return f"{name}.".startswith(f"{entry}.") or (is_module(name) and entry.startswith(f"{name}."))


def test_citations_are_read_as_they_are_meant() -> None:
    assert citations("Eqs. 10, 13 to 16, shape") == {"Eq. 10", "Eq. 13", "Eq. 14", "Eq. 15", "Eq. 16"}
    assert citations("(Eqs. 5,\n    A4) and Eq. A6.") == {"Eq. 5", "Eq. A4", "Eq. A6"}
    assert citations("Eqs. A2, A3 and Alg. 1; Fig. A2, Table 1") == {
        "Eq. A2", "Eq. A3", "Alg. 1", "Fig. A2", "Table 1"
    }  # fmt: skip
    assert citations("(Karras et al. 2022, arXiv:2206.00364, Table 1)") == set()
    assert citations("(Song et al. 2021, Alg. 2 and 4)") == set()


def test_the_table_of_equations_is_complete() -> None:
    assert table().keys() == LABELS
    for label, row in table().items():
        held = (NAME.search(row) or SCRIPT.search(row)) and TEST.search(row)
        assert held or "not run" in row or "not reproduced" in row, f"{label}: no function and test"


def test_every_citation_in_a_docstring_is_in_the_table() -> None:
    entries = {label: NAME.findall(row) for label, row in table().items()}
    missing = [
        f"{name} cites {label}"
        for name, labels in cited().items()
        for label in sorted(labels)
        if not any(covers(entry, name) for entry in entries.get(label, []))
    ]
    assert not missing, "\n".join(missing)


def test_every_function_in_the_table_cites_its_equation() -> None:
    silent = [
        f"{entry} does not cite {label}"
        for label, row in table().items()
        for entry in NAME.findall(row)
        if not any(label in labels for name, labels in cited().items() if f"{name}.".startswith(f"{entry}."))
    ]
    assert not silent, "\n".join(silent)


def resolve(name: str) -> object:
    """What a dotted name stands for, ``cf`` being curlfree."""
    first, *rest = name.split(".")
    path, found = "curlfree", importlib.import_module("curlfree")
    assert first in ("curlfree", "cf")
    for part in rest:
        path = f"{path}.{part}"
        found = importlib.import_module(path) if is_module(path) else getattr(found, part)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_and_tests_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in NAME.findall(text):
        resolve(name)
    for file, test in TEST.findall(text):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert test in functions, f"{page.name}: {file} has no {test}"
    for script in SCRIPT.findall(text):
        assert (ROOT / script).exists(), f"{page.name}: no {script}"
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), f"{page.name}: no {link}"


def blocks(page: Path) -> str:
    """The Python of a page as one program whose line numbers are the page's."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = (line == "```python") if fence else inside
    return "\n".join(lines)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p).strip()], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_code_on_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(page), str(page), "exec"), {"__name__": "page"})


def commands() -> list[str]:
    """The `curlfree` commands in the shell blocks of all pages, continued lines joined, without torchrun."""
    found = []
    for page in PAGES:
        for block in re.findall(
            r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            for line in block.replace("\\\n", " ").splitlines():
                words = re.match(r"(?:curlfree|.*torchrun .* -m curlfree) (.*)", line)
                found += [words[1]] if words else []
    return sorted(set(found))


class Understood(Exception):
    """The command line was accepted."""


@pytest.mark.parametrize("command", commands())
def test_documented_commands_are_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cli.parse

    def parse(*arguments: Any) -> None:
        real(*arguments)
        raise Understood

    monkeypatch.setattr(cli, "parse", parse)
    monkeypatch.chdir(tmp_path)
    words = command.split()
    for word in words:
        if word.endswith("config.json"):
            Path(word).parent.mkdir(parents=True)
            save_config(PRESETS["tiny-u"], Path(word))
    with pytest.raises(Understood):
        cli.main(words)


def test_the_readme_shows_numbers_of_the_committed_benchmark_only() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    generated = (ROOT / "docs" / "benchmarks" / "estimators.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in readme.splitlines() if line.startswith("| ") and " F)" not in line]
    measured = [line for line in rows if re.search(r"\| [\d.e+-]+ ± ", line)]
    assert measured
    for line in measured:
        assert line in generated


def test_the_drawn_graph_is_that_of_algorithm_1() -> None:
    spec = importlib.util.spec_from_file_location("draw_graph", ROOT / "docs" / "draw_graph.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    sys.modules["draw_graph"] = draw
    spec.loader.exec_module(draw)
    assert draw.svg(draw.example()) == (ROOT / "docs/figures/algorithm1.svg").read_text(encoding="utf-8")

    run, other, single = draw.example(), draw.example(), draw.example()
    run.backward()
    cf.algorithm1(lambda x, _: other.value(x), other.x, None, other.v)
    cf.qc_loss(
        lambda x, _: single.value(x), single.x, None, weight=1.0, estimator="paper", probe=lambda *_: single.v
    ).backward()
    for name, parameter in run.parameters.items():
        torch.testing.assert_close(parameter.grad, other.parameters[name].grad)
        torch.testing.assert_close(parameter.grad, single.parameters[name].grad)

    primary, secondary = draw.reachable(run.loss.grad_fn), draw.reachable(run.vJ.grad_fn)
    assert set(secondary) < set(primary)
    assert run.s.grad_fn not in primary


def test_every_module_has_its_place_in_the_api_pages() -> None:
    pages = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert len(set(shown)) == len(shown)
    modules = {name for name in cited() if is_module(name)}
    assert modules - set(shown) == {"curlfree", "curlfree.__main__", "curlfree.nets"}
