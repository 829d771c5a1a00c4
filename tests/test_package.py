"""The package as it is installed: what importing it brings in, what a wheel holds, who may import whom."""

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "curlfree"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}
OPTIONAL = ("scipy", "matplotlib", "tyro", "rich", "torchdiffeq", "torchmetrics", "datasets", "PIL", "jinja2",
            "tensorboard", "torchvision", "wandb")  # fmt: skip

# Bottom to top: a module of a layer may import those below it, and nothing else of the package.
LAYERS = ("checks", "mended", "operators", "estimators", "penalty", "objectives")
LEAVES = {
    "processes": {"checks"},
    "seeds": set(),
    "noise": set(),
    "nets": {"nets", "operators", "checks"},
    "data": {"data", "seeds", "checks"},
}
CORE = (*LAYERS, "processes", "fields", "fieldcheck", "metrics", "distributions")
PROGRAM = {
    "cli",
    "train",
    "runs",
    "config",
    "presets",
    "build",
    "checkpoint",
    "experiments",
    "report",
    "figures",
}


def imports(path: Path, *, top_only: bool = False) -> Iterator[str]:
    """The modules that a file imports; with `top_only` those that importing it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy: set[ast.AST] = set()
    for node in ast.walk(tree):
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if guarded or isinstance(node, ast.FunctionDef):
            lazy.update(ast.walk(node))
    for node in ast.walk(tree):
        if top_only and node in lazy:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT / "src").parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def parts(path: Path, *, top_only: bool = False) -> set[str]:
    """The direct members of the package (modules and folders) that a file imports."""
    names = {name.split(".")[1] for name in imports(path, top_only=top_only) if name.startswith("curlfree.")}
    return names & {name.split(".")[0] for name in MODULES}


def reachable(module: str) -> set[str]:
    """All members of the package that are imported together with a module."""
    files = {name: path for name, path in MODULES.items() if name.split(".")[0] == module}
    found, todo = {module}, set().union(*(parts(path, top_only=True) for path in files.values()))
    while todo - found:
        name = (todo - found).pop()
        found.add(name)
        todo |= set().union(*(parts(p, top_only=True) for n, p in MODULES.items() if n.split(".")[0] == name))
    return found - {module}


def test_importing_curlfree_imports_no_optional_package() -> None:
    program = f"import sys, curlfree; print(*[m for m in {OPTIONAL!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_every_public_name_exists_and_is_listed_once() -> None:
    import curlfree

    assert len(set(curlfree.__all__)) == len(curlfree.__all__)
    assert all(hasattr(curlfree, name) for name in curlfree.__all__)


@pytest.mark.parametrize("height", range(len(LAYERS)))
def test_layers_import_downwards_only(height: int) -> None:
    below = {*LAYERS[:height]}
    assert parts(SOURCE / f"{LAYERS[height]}.py") <= below


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_import_little(leaf: str) -> None:
    files = [path for name, path in MODULES.items() if name.split(".")[0] == leaf]
    assert files
    for path in files:
        assert parts(path) <= LEAVES[leaf], path


@pytest.mark.parametrize("module", CORE)
def test_the_core_does_not_know_the_program(module: str) -> None:
    assert not reachable(module) & PROGRAM


def test_the_report_needs_no_torch() -> None:
    found = set(imports(SOURCE / "report.py"))
    assert not any(name.split(".")[0] == "torch" for name in found)


def test_the_wheel_holds_everything_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("curlfree-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"curlfree/{path.relative_to(SOURCE)}"
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"curlfree/py.typed", "curlfree/templates/report.html.j2"} <= expected
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("LICENSE") for name in names)
