import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import curlfree.build
from curlfree import cli
from curlfree.config import load_config, save_config
from curlfree.presets import PRESETS
from training import TOY, with_train


def run(capsys, *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    capsys.readouterr()
    try:
        code = cli.main([str(word) for word in words])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return code, said.out, said.err


def refused(capsys, *words: object) -> str:
    """The one line of a command that exits with 2."""
    code, _, err = run(capsys, *words)
    assert code == 2 and err.startswith("curlfree: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_help(capsys, command):
    code, out, err = run(capsys, command, "--help")
    assert code == 0 and out.startswith(f"usage: curlfree {command}") and not err


def test_the_help_lists_commands_presets_and_fields(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(f"  {name} " in out for name in cli.COMMANDS)
    assert run(capsys)[0] == 2
    out = run(capsys, "train", "--help")[1]
    assert all(f"  {name} " in out for name in PRESETS)
    out = run(capsys, "train", "cifar10-qc", "--help")[1]
    assert all(
        flag in out for flag in ("--train.steps", "--objective.lmbda", "--field.network.width", "--out")
    )
    assert "--unverified" in run(capsys, "prepare", "cifar10", "--help")[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fly"], "unknown command 'fly'; expected one of prepare, train"),
        (["train"], "expected a preset"),
        (["train", "nothing", "--out", "x"], "unknown preset 'nothing'; expected one of 8gaussians-u"),
        (["train", "8gaussians-u"], "--out"),
        (["train", "8gaussians-u", "--out", "x", "--train.stps", "3"], "perhaps --train.steps"),
        (["train", "8gaussians-u", "--out", "x", "--train.steps", "few"], "--train.steps: invalid literal"),
        (["train", "8gaussians-u", "--out", "x", "--train.steps", "0"], "expected at least 1, found 0"),
        (["train", "8gaussians-u", "--out", "x", "--device", "tpu"], "tpu"),
        (["train", "nowhere.json", "--out", "x"], "nowhere.json: no such configuration"),
        (["train", "tiny-u", "--out", "x", "--data.path", "no.pack"], "no.pack: no such file"),
        (["prepare"], "expected a kind of data, one of cifar10"),
        (["prepare", "mnist"], "unknown kind of data 'mnist'"),
        (["prepare", "cifar10", "nowhere"], "nowhere: no such folder or archive"),
        (["sample", "nowhere"], "no run here"),
        (["evaluate", "nowhere"], "no run here"),
        (["audit", "nowhere"], "no run here"),
        (["audit", "nowhere", "--levels", "0"], "expected --levels of at least 1"),
        (["reproduce", "everything", "--out", "x"], "everything"),
        (["report"], "expected the folder of a run or of `curlfree reproduce`, found none"),
        (["report", "nowhere"], "nowhere: expected a training run (config.json)"),
        (["convert", "nowhere.pth", "--out", "x"], "nowhere.pth"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(capsys, *words)
    assert not list(tmp_path.rglob("checkpoint*"))


def test_a_failed_computation_is_one_line_and_exit_code_1(capsys, tmp_path):
    save_config(TOY, tmp_path / "c.json")
    code, _, err = run(
        capsys, "train", tmp_path / "c.json", "--out", tmp_path / "run", "--optim.lr", 1e30, "--device", "cpu"
    )
    assert code == 1 and "is not finite" in err.splitlines()[-1]


def test_a_missing_package_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert "pip install 'curlfree[train,eval]'" in refused(capsys, "train", "tiny-u", "--out", "x")


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(_: object) -> None:
        raise AttributeError("bug")

    monkeypatch.setitem(cli.COMMANDS, "report", broken)
    with pytest.raises(AttributeError, match="bug"):
        cli.main(["report", "x"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    save_config(with_train(TOY, steps=3), folder / "wanted.json")
    words = ["train", folder / "wanted.json", "--out", folder / "run", "--train.steps", 4, "--device", "cpu"]
    assert cli.main([str(word) for word in words]) == 0
    return folder / "run"


def test_overrides_are_in_the_resolved_configuration(trained):
    assert load_config(trained / "config.json") == with_train(TOY, steps=4)


def test_training_again_continues_and_another_configuration_is_refused(capsys, trained):
    config = trained / "config.json"
    code, out, _ = run(capsys, "train", config, "--out", trained, "--device", "cpu")
    assert code == 0 and out == f"{trained}: trained for 4 steps\n"
    message = refused(capsys, "train", config, "--out", trained, "--optim.lr", 0.5, "--device", "cpu")
    assert "optim.lr: 0.01 != 0.5" in message


def test_audits_and_evaluations_compile_the_network_if_asked(capsys, trained, tmp_path, monkeypatch):
    made, compile_field = [], curlfree.build.compile_field

    def quickly(config, field):
        made.append(field)
        compile_field(config, field, backend="eager")

    monkeypatch.setattr("curlfree.build.compile_field", quickly)
    monkeypatch.setattr("curlfree.measures.compile_field", quickly)
    tables = [tmp_path / "eager.json", tmp_path / "compiled.json"]
    for table, options in zip(tables, ([], ["--compile"]), strict=True):
        words = ("--levels", 2, "--images", 4, "--json", table, "--device", "cpu", *options)
        assert run(capsys, "audit", trained, *words)[0] == 0
    eager, compiled = (json.loads(table.read_text())["levels"] for table in tables)
    assert [row["asym"] for row in compiled] == pytest.approx([row["asym"] for row in eager], rel=1e-3)
    words = ("--metrics", "asymmetry", "--levels", 2, "--audit-n", 4, "--device", "cpu")
    assert run(capsys, "evaluate", trained, *words, "--audit-compile")[0] == 0
    assert len(made) == 2


def test_audit_writes_the_table_of_the_contract(capsys, trained, tmp_path):
    table, plot = tmp_path / "audit.json", tmp_path / "audit.png"
    code, out, _ = run(
        capsys,
        "audit",
        trained,
        "--levels",
        3,
        "--images",
        8,
        "--json",
        table,
        "--plot",
        plot,
        "--device",
        "cpu",
    )
    written = json.loads(table.read_text())
    names = {"sigma", "asym", "asym_se", "nasym", "nasym_se", "work_nats", "work_nats_se", "n"}
    assert code == 0 and len(written["levels"]) == 3 and all(names <= row.keys() for row in written["levels"])
    assert [row["sigma"] for row in written["levels"]] == pytest.approx([20.0, 2.0**0.5, 0.1])
    assert written["model"]["step"] == 4 and all(row["n"] == 8 for row in written["levels"])
    assert len(out.splitlines()) == 4 and plot.read_bytes()[:4] == b"\x89PNG"
    assert "unknown estimator" in refused(capsys, "audit", trained, "--estimator", "best", "--device", "cpu")


def test_sample_and_evaluate_write_into_the_run(capsys, trained):
    code, out, _ = run(capsys, "sample", trained, "--n", 5, "--steps", 4, "--device", "cpu")
    folder = Path(out.split(":")[0])
    assert code == 0 and np.load(folder / "samples.npz")["x"].shape == (5, 2)
    code, out, _ = run(capsys, "evaluate", trained, "--metrics", "loss", "--n", 8, "--device", "cpu")
    assert code == 0 and json.loads((trained / "metrics.json").read_text())["metrics"]["loss"]["n"]


def test_prepare_packs_and_refuses_to_overwrite(capsys, tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((3, 8, 8, 3), np.uint8))
    words = ["prepare", "array", tmp_path / "images.npy", "--out", tmp_path / "images.pack"]
    code, out, _ = run(capsys, *words)
    assert code == 0 and "train 3" in out
    assert "exists already" in refused(capsys, *words)
    assert run(capsys, *words, "--overwrite")[0] == 0


def test_reproduce_and_report_hand_their_options_over(capsys, tmp_path, monkeypatch):
    asked = []

    def reproduce(experiment: str, **options: object) -> object:
        asked.append((experiment, options))
        return SimpleNamespace(summary=["first", "second"])

    monkeypatch.setattr("curlfree.experiments.reproduce", reproduce)
    monkeypatch.setattr(
        "curlfree.report.report", lambda *given: asked.append(given) or tmp_path / "report.html"
    )
    words = ["reproduce", "toy2d", "--mode", "paper", "--seeds", 2, "--quick", "--out", tmp_path]
    code, said, _ = run(capsys, *words)
    assert code == 0 and said == f"first\nsecond\nreport: {tmp_path}/report.html\n"
    assert asked == [("toy2d", {"out": tmp_path, "mode": "paper", "seeds": 2, "quick": True})]
    for words, given in (
        (["report", "gaussian"], ((Path("gaussian"),), None)),
        (["report", "u", "qc", "--out", "both"], ((Path("u"), Path("qc")), Path("both"))),
    ):
        assert run(capsys, *words)[:2] == (0, f"{tmp_path}/report.html\n")
        assert asked[-1] == given


@pytest.mark.parametrize(
    "lines",
    [
        ("╭─ Box ─╮", "│ A: b   │", "│ ────── │", "│ Perhaps you meant: │", "│   --x INT │", "╰─────╯"),
        (" Box ", " ----- ", "  A: b ", "  ------ ", "  Perhaps you meant:  ", "    --x INT", ""),
    ],
)
def test_a_box_becomes_one_line(lines):
    assert cli.one_line("\n".join(lines), "train") == "A: b; perhaps --x; see `curlfree train --help`"
