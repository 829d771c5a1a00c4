"""The page of training runs, from files alone."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from curlfree.config import ObjectiveConfig, RunConfig, save_config
from curlfree.report import report
from curlfree.run_page import NOT_RUN, run_page
from curlfree.run_record import read_log, read_runs
from runs import image_config
from test_report import Page
from training import TOY, with_train

LEVELS = (10.0, 0.1)


def line(step: int, *, nats: float | None = None, rate: float = 2.0, loss: float = 3.0) -> dict:
    levels = [{"sigma": s, "score_matching": loss, "asymmetry_nats": nats} for s in LEVELS]
    row = {"step": step, "loss": loss, "score_matching": loss, "qc": nats, "grad_norm": 1.5, "lr": 0.01}
    return {**row, "levels": levels, "steps_per_second": rate}


def checkpoint(step: int, work: float) -> dict:
    levels = [{"sigma": s, "work_nats": work} for s in LEVELS]
    return {"step": step, "held_out_score_matching": 2.5, "levels": levels}


def start(step: int) -> dict:
    return {"step": step, "provenance": {"commit": f"abc{step}", "hardware": {"device": "a processor"}}}


def metric(value: float, se: float | None, n: int = 64, how: str = "in some way", **more: object) -> dict:
    return {"value": value, "se": se, "n": n, "how": how, **more}


def write(folder: Path, config: RunConfig, rows: list[dict], metrics: dict | None = None) -> Path:
    folder.mkdir(parents=True)
    save_config(config, folder / "config.json")
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if metrics is not None:
        model = {"step": 4, "weights": "ema", "sha256": "0"}
        (folder / "metrics.json").write_text(json.dumps({"model": model, "metrics": metrics}))
    return folder


def add_samples(folder: Path, x: np.ndarray) -> None:
    from PIL import Image

    place = folder / "samples" / "heun-0"
    place.mkdir(parents=True)
    np.savez(place / "samples.npz", x=x)
    if x.ndim == 4:
        Image.fromarray(x.reshape(-1, *x.shape[2:])).save(place / "grid.png")
    about = {"sampler": "heun", "weights": "ema", "step": 4, "seed": 0, "nfe": {"mean": 35.0}}
    (place / "samples.json").write_text(json.dumps(about))


LEVEL_ROWS = [{"sigma": s, "value": 1.0, "se": 0.1, "n": 64} for s in LEVELS]
MEASURED = {
    "loss": metric(1.25, 0.125, levels=LEVEL_ROWS),
    "nll": metric(2.5, 0.5, unit="bits/dim", probe_se=0.0625, solver_error=0.001),
    "fid": metric(7.75, None, n=32, ci=[7.5, 8.0]),
    "nfe": metric(40.0, 1.0, tolerances=[{"rtol": 0.01, "atol": 0.01, "value": 40.0, "se": 1.0, "n": 2}]),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run of U on images, measured and sampled, and one of QC that was only begun."""
    root = tmp_path_factory.mktemp("runs")
    images = image_config(path=str(root / "images.pack"))
    log = [start(0), line(2), line(4), checkpoint(4, 6.0)]
    u = write(root / "u", images, log, MEASURED)
    add_samples(u, np.zeros((4, 4, 4, 3), np.uint8))
    qc = with_train(images, steps=7)
    qc = RunConfig(**{**vars(qc), "objective": ObjectiveConfig(lmbda=0.5), "init": str(u)})
    return [u, write(root / "qc", qc, [start(0), line(2, nats=3.0)])]


@pytest.fixture(scope="module")
def made(pair: list[Path]) -> Path:
    return report(pair, pair[0].parent / "report")


def rows(path: Path) -> dict[str, list[str]]:
    """The rows of all tables of a page by their first cells."""
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", path.read_text(encoding="utf-8")):
        first, *cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)
        found[first] = cells
    return found


def test_the_page_is_whole_and_loads_nothing(made):
    page, text = Page(), made.read_text(encoding="utf-8")
    page.feed(text)
    assert page.open == []
    sources = [a[n] for _, a in page.elements for n in ("src", "srcset") if n in a]
    assert sources and all(str(source).startswith("data:image/") for source in sources)
    assert not re.search(r"https?://|@import|url\(", text)
    assert not {"script", "link"} & {tag for tag, _ in page.elements}


def test_metrics_stand_side_by_side_with_errors_numbers_and_how(made):
    found = rows(made)
    assert found["loss"] == ["1.25 ± 0.12 (64)", NOT_RUN]
    assert found["nll, bits/dim"] == ["2.5 ± 0.5 (64)", NOT_RUN]
    assert found["nll: the probes&#39; part of se"] == ["0.0625", "–"]
    assert found["fid"] == ["7.75 [7.5, 8] (32)", NOT_RUN]
    assert found["kid"] == found["work_nats"] == [NOT_RUN, NOT_RUN]
    assert "score_error" not in found
    assert "<strong>nll</strong>: in some way" in made.read_text(encoding="utf-8")


def test_differences_training_and_provenance_are_told(made, pair):
    found = rows(made)
    assert found["objective.lmbda"] == ["0", "0.5"]
    assert found["train.steps"] == ["100", "7"]
    assert found["init"] == ["–", str(pair[0])]
    assert "optim.lr" not in found
    assert found["steps made"] == ["4", "2"]
    assert found["seconds of training"] == ["2", "1"]
    assert found["asymmetry of penalised samples, nats"] == ["–", "3"]
    assert found["asymmetry, held out, nats"] == ["6", "–"]
    assert found["commit"] == ["abc0", "abc0"]


def test_the_figures_lie_beside_the_page(made):
    names = {"loss", "asymmetry", "loss_by_level", "asymmetry_by_level", "optimiser", "measured"}
    names |= {"samples_u_heun-0"}
    ends = (".svg", ".png", ".dark.svg", ".dark.png")
    assert {f"{name}{end}" for name in names for end in ends} | {"report.html"} == {
        path.name for path in made.parent.iterdir()
    }


def test_a_page_is_a_function_of_the_files(tmp_path):
    folder = write(tmp_path / "toy", TOY, [], {"loss": MEASURED["loss"]})
    first, second = (report([folder], tmp_path / place) for place in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()


def test_a_run_in_the_plane_and_one_without_a_log(tmp_path):
    folder = write(tmp_path / "toy", TOY, [])
    add_samples(folder, np.array([[0.0, 1.0], [2.0, -3.0]]))
    page = run_page([folder], tmp_path / "figures")
    assert [plot.name for plot in page.plots] == ["samples_toy_heun-0"]
    assert page.summary == ["toy (test): nothing logged yet."]
    (metrics,) = (table for table in page.tables if table.title == "Metrics")
    names = [row[0] for row in metrics.rows]
    assert "score_error" in names and not {"fid", "kid"} & set(names)
    assert report([folder]) == folder / "report.html"


def test_seconds_add_up_over_a_restart_and_a_cut_line_is_left_out(tmp_path):
    rows = [start(0), line(10, rate=5.0), start(15), line(20, rate=1.0), checkpoint(20, 1.0)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 30, "lo')
    log = read_log(path)
    assert [row["seconds"] for row in log.steps] == [2.0, 7.0]  # 10 steps at 5/s, then 5 at 1/s
    assert log.held_out[0]["seconds"] == 7.0
    assert len(log.starts) == 2


def test_runs_with_the_same_name_are_told_apart(tmp_path):
    folders = [write(tmp_path / place / "run", TOY, []) for place in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]


DAMAGED = [
    ("config.json", "{}", "config.json: name: missing"),
    ("log.jsonl", '{"step": 1}\n', "log.jsonl: line 1: expected a line of a run's log"),
    ("log.jsonl", "nothing\n", "log.jsonl: line 1"),
    ("metrics.json", "[1]", "expected a JSON object, found list"),
    ("metrics.json", "{", "expected JSON"),
    ("metrics.json", '{"tables": []}', "as `curlfree evaluate` writes it"),
    ("metrics.json", '{"model": {}, "metrics": {"loss": {"value": 1}}}', 'loss: expected "value", "n"'),
    ("samples/heun-0/samples.npz", "no zip", "expected samples"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
    folder = write(tmp_path / "toy", TOY, [], MEASURED)
    add_samples(folder, np.zeros((2, 2)))
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        report([folder])


def test_folders_of_the_wrong_kinds_are_refused(tmp_path):
    run = write(tmp_path / "run", TOY, [])
    experiment, empty = tmp_path / "experiment", tmp_path / "empty"
    experiment.mkdir()
    empty.mkdir()
    (experiment / "metrics.json").write_text("{}")
    with pytest.raises(ValueError, match="found none"):
        report([])
    with pytest.raises(ValueError, match=r"empty: expected a training run .* found neither"):
        report([run, empty])
    with pytest.raises(ValueError, match="experiment: expected training runs, or one folder"):
        report([run, experiment])
    with pytest.raises(ValueError, match="each run once, found it 2 times"):
        report([run, run / ".." / "run"])
    with pytest.raises(ValueError, match="expected a folder for the page, found a file"):
        report([run], run / "config.json")
    assert not list(tmp_path.rglob("report.html"))
