"""The report: self-contained, well-formed, escaped, made from files alone."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest

from curlfree import figures
from curlfree.experiments import EXPERIMENTS, autoencoder, reproduce
from curlfree.experiments.records import (
    Disagreement,
    Plot,
    Record,
    Table,
    mean_cell,
    mean_interval,
)
from curlfree.provenance import provenance
from curlfree.report import embed, format_cell, write_report

VOID = {"meta", "img", "source", "br", "link", "input", "hr"}
HOSTILE = "<script>alert('x')</script> & \"quoted\""


class Page(HTMLParser):
    """Collects elements and checks that each is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def draw(theme: figures.Theme) -> figures.Figure:
    figure, axes = figures.panels(1, 1)
    figures.curve(
        axes[0], theme, [0, 1, 2], [1.0, 2.0, 0.5], band=([0.5, 1.5, 0.2], [1.5, 2.5, 0.9]), label="y"
    )
    return figure


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    figures.save(draw, tmp_path, "curve")
    Record(
        experiment="gaussian",
        title=f"Title {HOSTILE}",
        mode="corrected",
        quick=True,
        summary=[HOSTILE],
        config={"path": HOSTILE},
        seeds=[0, 1],
        values={"raw": [1.0, None]},
        tables=[Table(HOSTILE, ["ε", HOSTILE], [["row", 0.123456], [HOSTILE, None]], HOSTILE)],
        plots=[Plot("curve", HOSTILE, HOSTILE, HOSTILE)],
        disagreements=[Disagreement(HOSTILE, HOSTILE, HOSTILE)],
        provenance=provenance(1.5),
    ).save(tmp_path)
    return tmp_path


def parse(folder: Path) -> Page:
    page = Page()
    page.feed(write_report(folder).read_text(encoding="utf-8"))
    page.close()
    return page


def test_every_element_is_closed_and_the_page_is_complete(folder):
    page = parse(folder)
    assert page.open == []
    tags = [tag for tag, _ in page.elements]
    assert tags[:2] == ["html", "head"]
    assert {"title", "main", "h1", "table", "figure", "picture", "img"} <= set(tags)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {str(a["href"])[1:] for tag, a in page.elements if tag == "a"}
    assert targets <= set(ids)
    assert all(a.get("alt") for tag, a in page.elements if tag == "img")
    assert any(a.get("name") == "viewport" for tag, a in page.elements if tag == "meta")


def test_the_page_loads_nothing_from_anywhere(folder):
    text = write_report(folder).read_text(encoding="utf-8")
    page = parse(folder)
    for _, attributes in page.elements:
        for name in ("src", "srcset"):
            if name in attributes:
                assert str(attributes[name]).startswith("data:image/")
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert not re.search(r"https?://|@import|url\(", text)


def test_both_colour_schemes_have_their_figure(folder):
    page = parse(folder)
    (dark,) = (a["srcset"] for tag, a in page.elements if tag == "source")
    (light,) = (a["src"] for tag, a in page.elements if tag == "img")
    assert light == embed(folder, "curve")
    assert dark == embed(folder, "curve.dark") != light


def test_what_a_record_says_is_text_and_never_markup(folder):
    page = parse(folder)
    assert "script" not in {tag for tag, _ in page.elements}
    assert HOSTILE in "".join(page.text)


def test_numbers_of_the_table_are_on_the_page(folder):
    text = " ".join(parse(folder).text)
    assert "0.1235" in text
    assert "–" in text


def test_the_report_is_a_function_of_the_files(folder):
    first = write_report(folder).read_bytes()
    (folder / "report.html").unlink()
    assert write_report(folder).read_bytes() == first
    record = Record.load(folder)
    record.save(folder)
    assert Record.load(folder) == record


def test_figures_are_the_same_bytes_every_time(folder, tmp_path):
    again = tmp_path / "again"
    again.mkdir()
    for path in figures.save(draw, again, "curve"):
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_drawing_leaves_matplotlibs_settings_alone(tmp_path):
    def settings() -> dict:
        return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}

    before = settings()
    figures.save(draw, tmp_path, "curve")
    assert settings() == before
    assert not re.search(r"^\s*(import|from) .*pyplot", Path(figures.__file__).read_text(), re.MULTILINE)


def test_the_report_imports_no_torch_of_its_own():
    for name in ("report.py", "experiments/records.py", "figures.py", "experiments/__init__.py"):
        source = (Path(figures.__file__).parent / name).read_text()
        assert not re.search(r"^\s*(import|from) torch", source, re.MULTILINE)


def test_a_missing_record_or_figure_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match="found none"):
        write_report(tmp_path / "nowhere")
    (folder / "curve.dark.svg").unlink()
    with pytest.raises(ValueError, match=r"curve\.dark\.svg is missing"):
        write_report(folder)
    (folder / "metrics.json").write_text("[1, 2")
    with pytest.raises(ValueError, match="not the record"):
        write_report(folder)
    (folder / "metrics.json").write_text(json.dumps({"value": 1}))
    with pytest.raises(ValueError, match="not the record"):
        write_report(folder)


def test_a_record_refuses_what_json_cannot_hold(folder):
    record = Record.load(folder)
    record.values["raw"] = [math.nan]
    before = (folder / "metrics.json").read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        record.save(folder)
    assert (folder / "metrics.json").read_bytes() == before


def test_a_table_refuses_ragged_rows():
    with pytest.raises(ValueError, match="2 columns, got 1 cells"):
        Table("t", ["a", "b"], [["only"]])


def test_cells():
    assert [format_cell(c) for c in (None, 3, 0.000123456, 1e-9, "x")] == [
        "–",
        "3",
        "0.0001235",
        "1e-09",
        "x",
    ]


def test_the_interval_over_seeds_is_students():
    mean, half = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == pytest.approx(3.0)
    assert half == pytest.approx(2.776445105 * math.sqrt(2.5 / 5), rel=1e-9)
    assert mean_cell([2.0, 2.0]) == "2"
    with pytest.raises(ValueError, match="at least two"):
        mean_interval([1.0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"experiment": "nothing"}, ", ".join(EXPERIMENTS)),
        ({"experiment": "gaussian", "mode": "wrong"}, "corrected, paper"),
        ({"experiment": "gaussian", "seeds": 0}, "at least 1"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_written(arguments, words, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=words):
        reproduce(**arguments, out=out)
    assert not out.exists()


EVERY = [("autoencoder", "paper")] + [
    pytest.param(name, mode, marks=pytest.mark.slow)
    for name, mode in (("autoencoder", "corrected"), ("gaussian", "paper"), ("gaussian", "corrected"))
]


@pytest.mark.parametrize(("experiment", "mode"), EVERY)
def test_an_experiment_writes_its_record_figures_and_page(experiment, mode, tmp_path, monkeypatch):
    monkeypatch.setattr(autoencoder, "STEPS", 300)
    record = reproduce(experiment, out=tmp_path, mode=mode, seeds=2, quick=True)
    assert Record.load(tmp_path) == Record(
        **{**vars(record), "config": json.loads(json.dumps(record.config))}
    )
    for plot in record.plots:
        assert {f"{plot.name}{end}" for end in (".svg", ".png", ".dark.svg", ".dark.png")} <= {
            path.name for path in tmp_path.iterdir()
        }
    assert parse(tmp_path).open == []


def test_a_tree_without_history_is_named_by_the_environment(tmp_path, monkeypatch):
    package = tmp_path / "curlfree"
    package.mkdir()
    monkeypatch.setattr("curlfree.provenance.__file__", str(package / "provenance.py"))
    monkeypatch.setenv("GIT_COMMIT", "0123abcd")
    assert provenance()["commit"] == "0123abcd"
    monkeypatch.delenv("GIT_COMMIT")
    assert provenance()["commit"] is None
