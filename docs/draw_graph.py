"""Draw the graph that autograd builds in Algorithm 1 (Figs. 2 and A1 of the paper), from the graph itself.

    python docs/draw_graph.py docs/figures/algorithm1.svg

The field is the smallest that shows everything, ``s(x) = tanh(x A) B``. Each box is a node of the real
graph, found by walking ``grad_fn.next_functions``; its colour tells which step of Algorithm 1 made it.
Arrows point the way that gradients flow: blue in step (4), red in step (5).
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STAGES = {
    "leaf": ("parameters, x", "#f2f2f2"),
    "s": ("the field s(x)", "#fff4d6"),
    "1": ("step (1): vJ", "#dff0df"),
    "2": ("step (2): sg[vJ]J", "#e6e2f5"),
    "3": ("step (3): loss", "#fbe3ea"),
}
BLUE, RED = "#1f5fbf", "#c8281e"
WIDTH, HEIGHT, COLUMN, ROW, TOP, LEFT = 118, 26, 146, 44, 96, 24


@dataclass
class Node:
    """A node of autograd's graph."""

    function: Any
    stage: str
    label: str
    column: int = 0
    row: float = 0.0
    inputs: list["Node"] = field(default_factory=list)


@dataclass
class Algorithm1:
    """The tensors of Algorithm 1 for one sample, with the graph that they hang in."""

    parameters: dict[str, Tensor]
    x: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        """Steps (1) to (3), as in `curlfree.penalty.algorithm1`."""
        self.s = self.value(self.x)
        (self.vJ,) = torch.autograd.grad((self.v * self.s).sum(), self.x, create_graph=True)
        self.sg = self.vJ.detach().requires_grad_()
        (self.vJJ,) = torch.autograd.grad((self.sg * self.s).sum(), self.x, create_graph=True)
        self.loss = (self.vJ * self.vJ).sum() - (self.vJJ * self.v).sum()

    def value(self, x: Tensor) -> Tensor:
        """The field."""
        return torch.tanh(x @ self.parameters["A"]) @ self.parameters["B"]

    def backward(self) -> None:
        """Steps (4) and (5)."""
        self.loss.backward(retain_graph=True)
        self.vJ.backward(self.sg.grad)


def example() -> Algorithm1:
    """A field with 12 parameters at one point."""
    generator = torch.Generator().manual_seed(0)
    a, b, x, v = (torch.randn(n, generator=generator) for n in ((2, 3), (3, 2), (1, 2), (1, 2)))
    parameters = {"A": a.requires_grad_(), "B": b.requires_grad_()}
    return Algorithm1(parameters, x.requires_grad_(), v)


def reachable(start: Any) -> list[Any]:
    """The functions that a backward pass from `start` visits, in the order of a depth-first walk."""
    found, todo = [], [start]
    while todo:
        function = todo.pop()
        if function is not None and function not in found:
            found.append(function)
            todo += [following for following, _ in function.next_functions]
    return found


def nodes(run: Algorithm1) -> list[Node]:
    """All nodes of the graph, with the stage that made each."""
    leaves = {id(run.x): "x", id(run.sg): "sg[vJ]"} | {id(p): name for name, p in run.parameters.items()}
    stages = {"s": run.s, "1": run.vJ, "2": run.vJJ, "3": run.loss}
    made: dict[Any, Node] = {}
    for stage, tensor in stages.items():
        for function in reachable(tensor.grad_fn):
            if function not in made:
                variable = getattr(function, "variable", None)
                label = function.name().removesuffix("0").removesuffix("Backward")
                if variable is not None:
                    stage_of, label = "leaf", leaves[id(variable)]
                else:
                    stage_of = stage
                made[function] = Node(function, stage_of, label)
    for node in made.values():
        node.inputs = [made[f] for f, _ in node.function.next_functions if f is not None]
    return list(made.values())


def place(graph: list[Node]) -> None:
    """Columns by the longest way from a leaf, rows by the mean row of a node's neighbours."""
    changed = True
    while changed:
        changed = False
        for node in graph:
            column = 1 + max((i.column for i in node.inputs), default=-1)
            changed |= column != node.column
            node.column = column
    columns = [[n for n in graph if n.column == c] for c in range(1 + max(n.column for n in graph))]
    tallest = max(map(len, columns))
    users: dict[int, list[Node]] = {id(n): [] for n in graph}
    for node in graph:
        for i in node.inputs:
            users[id(i)].append(node)
    for column in columns:
        spread(column, tallest)
    for sweep in range(40):
        for column in columns if sweep % 2 else columns[::-1]:
            for node in column:
                near = [n.row for n in node.inputs + users[id(node)]]
                node.row = sum(near) / len(near)
            column.sort(key=lambda n: n.row)
            spread(column, tallest)


def spread(column: list[Node], tallest: int) -> None:
    """Equal distances, in the middle."""
    for i, node in enumerate(column):
        node.row = i + (tallest - len(column)) / 2


def arrow(a: tuple[float, float], b: tuple[float, float], color: str, shift: float) -> str:
    """A curve from box a, leaving on its left, to box b, arriving on its right."""
    x1, y1, x2, y2 = a[0], a[1] + HEIGHT / 2 + shift, b[0] + WIDTH, b[1] + HEIGHT / 2 + shift
    x2 += 4
    bend = max(24.0, (x1 - x2) / 2)
    curve = f"M{x1:.0f} {y1:.1f}C{x1 - bend:.0f} {y1:.1f} {x2 + bend:.0f} {y2:.1f} {x2:.0f} {y2:.1f}"
    return (
        f'<path d="{curve}" fill="none" stroke="{color}" stroke-width="1.4" marker-end="url(#{color[1:]})"/>'
    )


def svg(run: Algorithm1) -> str:
    """The picture."""
    graph = nodes(run)
    place(graph)
    primary, secondary = reachable(run.loss.grad_fn), reachable(run.vJ.grad_fn)
    at = {id(n): (LEFT + n.column * COLUMN, TOP + n.row * ROW) for n in graph}
    width = int(2 * LEFT + WIDTH + COLUMN * max(n.column for n in graph))
    height = int(TOP + HEIGHT + 24 + ROW * max(n.row for n in graph))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        "<defs>",
        *(
            f'<marker id="{c[1:]}" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
            f'<path d="M0 0L6 3L0 6z" fill="{c}"/></marker>'
            for c in (BLUE, RED)
        ),
        "</defs>",
    ]
    for i, (text, ground) in enumerate(STAGES.values()):
        x = LEFT + i * 190
        lines.append(f'<rect x="{x}" y="16" width="16" height="16" fill="{ground}" stroke="#666"/>')
        lines.append(f'<text x="{x + 22}" y="29">{text}</text>')
    for i, (text, color) in enumerate(
        {
            "step (4), loss.backward(): the primary component": BLUE,
            "step (5), vJ.backward(sg[vJ].grad): the secondary component": RED,
        }.items()
    ):
        x = LEFT + i * 420
        lines.append(f'<path d="M{x} 56h34" stroke="{color}" stroke-width="2.5"/>')
        lines.append(f'<text x="{x + 42}" y="61">{text}</text>')
    for node in graph:
        for i in node.inputs:
            both = node.function in primary and node.function in secondary
            if node.function in primary:
                lines.append(arrow(at[id(node)], at[id(i)], BLUE, -2.5 if both else 0))
            if node.function in secondary:
                lines.append(arrow(at[id(node)], at[id(i)], RED, 2.5 if both else 0))
    cut = next(n for n in graph if getattr(n.function, "variable", None) is run.sg)
    end = next(n for n in graph if n.function is run.vJ.grad_fn)
    (x1, y1), (x2, y2) = at[id(cut)], at[id(end)]
    lines.append(
        f'<path d="M{x1 + WIDTH / 2:.0f} {y1:.1f}L{x2 + WIDTH / 2:.0f} {y2 + HEIGHT + 4:.1f}" fill="none" '
        f'stroke="{RED}" stroke-width="1.6" stroke-dasharray="6 4" marker-end="url(#{RED[1:]})"/>'
    )
    names = {run.s.grad_fn: "s", run.vJ.grad_fn: "vJ", run.vJJ.grad_fn: "sg[vJ]J", run.loss.grad_fn: "loss"}
    for node in graph:
        x, y = at[id(node)]
        name = names.get(node.function)
        bold = f'<tspan font-weight="bold">{name}</tspan>: ' if name else ""
        lines.append(
            f'<rect x="{x}" y="{y:.1f}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
            f'fill="{STAGES[node.stage][1]}" stroke="#444" stroke-width="{2.2 if name else 1}"/>'
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 17.5:.1f}" text-anchor="middle">'
            f"{bold}{node.label}</text>"
        )
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg(example()), encoding="utf-8")
