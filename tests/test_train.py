import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from curlfree import checkpoint as ckpt
from curlfree.build import build_data, build_field, build_process, compile_field
from curlfree.cli import main
from curlfree.config import FieldConfig, ObjectiveConfig, RunConfig, load_config, save_config
from curlfree.ema import Ema
from curlfree.nets.ncsnpp import NCSNpp, NCSNppConfig
from curlfree.objectives import dsm, total_loss
from curlfree.operators import per_sample
from curlfree.runlog import RunLog, cut_back
from curlfree.runs import load_run
from curlfree.step import draw, penalised_rows
from curlfree.train import stop_signals, train
from curlfree.workers import Workers, fresh_store
from training import QC, TOY, Forked, gradients, images, pack, places, shared_cases, with_train

ALONE = Workers(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return pack(tmp_path_factory.mktemp("packed"))


def log_of(run: Path) -> list[dict]:
    return [row for row in whole_log(run) if "provenance" not in row]


def whole_log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[int]:
    return [ckpt.step_of(path) for path in ckpt.checkpoints(run)]


def assert_same(one: Path, other: Path) -> None:
    a, b = (ckpt.load(ckpt.checkpoints(run)[-1]) for run in (one, other))
    assert a.state == b.state
    for left, right in ((a.model, b.model), (a.ema, b.ema), (a.optimizer, b.optimizer)):
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            assert torch.equal(tensor, right[name]), name


def run_cases(path: Path):
    return {
        "toy u": TOY,
        "toy qc": replace(TOY, objective=replace(QC, every=2, probes=2)),
        "toy c, accumulated": with_train(replace(TOY, field=replace(TOY.field, form="energy")), accumulate=3),
        "images qc, dropout, accumulated": with_train(
            images(path, dropout=0.3, classes=3), accumulate=2, channels_last=True
        ),
        "images u, dropout, bfloat16": with_train(
            replace(images(path, dropout=0.3), objective=ObjectiveConfig()), precision="bfloat16"
        ),
    }


@pytest.mark.parametrize("name", run_cases(Path()))
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, packed, name):
    config = run_cases(packed)[name]
    half = config.train.steps // 2
    assert train(config, tmp_path / "whole", device="cpu") == 2 * half
    assert train(with_train(config, steps=half), tmp_path / "parts", device="cpu") == half
    assert train(config, tmp_path / "parts", device="cpu") == 2 * half
    assert_same(tmp_path / "whole", tmp_path / "parts")
    whole, parts = log_of(tmp_path / "whole"), log_of(tmp_path / "parts")
    assert [row["step"] for row in whole] == [row["step"] for row in parts]
    assert whole[-1] == parts[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["toy u", "toy qc"])
def test_a_resumed_run_on_a_gpu_ends_with_the_same_bits(tmp_path, name):
    config = run_cases(Path())[name]
    train(config, tmp_path / "whole", device="cuda")
    train(with_train(config, steps=config.train.steps // 2), tmp_path / "parts", device="cuda")
    train(config, tmp_path / "parts", device="cuda")
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_each_start_is_in_the_log_with_its_provenance(tmp_path):
    for steps in (2, 4, 4):
        train(with_train(TOY, steps=steps), tmp_path, device="cpu")
    starts = [row for row in whole_log(tmp_path) if "provenance" in row]
    assert [row["step"] for row in starts] == [0, 2]
    assert all(row["provenance"]["versions"]["torch"] == torch.__version__ for row in starts)


def test_training_leaves_the_global_generators_alone(tmp_path, packed):
    before = torch.get_rng_state()
    train(with_train(images(packed, dropout=0.3), steps=1), tmp_path, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_gradient_is_that_of_the_objective(packed):
    """Against `total_loss` with the exact asymmetry, on the same draws, in float64."""
    objective = ObjectiveConfig(lmbda=0.7, weighting="sigma4", estimator="exact", form="double", every=3)
    config = with_train(replace(TOY, objective=objective), precision="float64")
    found = gradients(config, ALONE, step=5)
    field = build_field(config)
    (batch,) = build_data(config, ALONE.device).batches.run(5, 6)
    draws = draw(config, build_process(config), batch, 5, ALONE)
    assert draws.penalised.tolist() == list(range(12))
    x = draws.x0 + per_sample(draws.sigma, draws.x0) * draws.z
    sm = dsm(field, draws.x0, draws.sigma, draws.z)
    loss = total_loss(
        sm, field, x, draws.sigma, lmbda=0.0 + 3 * 0.7, qc_weighting=lambda s: s**4, estimator="exact"
    )
    loss.total.backward()
    for name, parameter in field.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_the_penalty_is_evaluated_in_every_kth_step_only():
    config = replace(TOY, objective=replace(QC, every=3))
    (batch,) = build_data(config, ALONE.device).batches.run(0, 1)
    counts = [len(draw(config, build_process(config), batch, step, ALONE).penalised) for step in range(6)]
    assert counts == [0, 0, 6, 0, 0, 6]


def relative(found, expected) -> float:
    difference = sum(float((found[n] - g).double().square().sum()) for n, g in expected.items())
    return math.sqrt(difference / sum(float(g.double().square().sum()) for g in expected.values()))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_workers_and_accumulated_parts_add_up_to_one_batch(world, accumulate):
    config = with_train(replace(TOY, objective=QC), precision="float64")
    whole = gradients(config, ALONE)
    share = with_train(config, accumulate=accumulate)
    each = [gradients(share, Workers(rank, world, ALONE.device)) for rank in range(world)]
    total = {name: sum(g[name] for g in each) for name in whole}
    assert relative(total, whole) < 1e-14


def test_two_gloo_processes_have_the_gradients_of_one(tmp_path, packed):
    script = Path(__file__).with_name("training.py")
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error::FutureWarning", script, packed, tmp_path],
            env=os.environ | place,
        )
        for place in places()
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    for name, config in shared_cases(packed).items():
        shared, alone = load_file(tmp_path / f"{name}.safetensors"), gradients(config, ALONE)
        assert shared.keys() == alone.keys()
        assert relative(shared, alone) < (1e-12 if "64" in name else 1e-5), name


def main_into(words: list[str], said: Path) -> None:
    """The command line, with what it says to the user in a file."""
    with open(said, "a") as sys.stderr:
        sys.exit(main(words))


def test_what_one_worker_refuses_all_refuse_and_it_is_said_once(tmp_path, packed):
    """Rank 0 alone: another learning rate. Rank 1 alone: no copy of the data; other weights to begin with."""
    config = replace(images(packed), train=replace(TOY.train, steps=1, batch_size=4, validation_samples=0))
    u, qc, said = tmp_path / "u", tmp_path / "qc", tmp_path / "said"
    train(config, u, device="cpu")
    train(replace(config, seed=4), tmp_path / "u, too", device="cpu")
    faster = replace(config, optim=replace(config.optim, lr=0.02))
    moved = replace(config, data=replace(config.data, path=str(tmp_path / "gone.pack")))
    second = replace(config, init=str(u))
    for out, configs, expected in (
        (u, (faster, faster), r"holds a run with another configuration \(optim\.lr: 0\.01 != 0\.02\)"),
        (u, (config, moved), r"gone\.pack"),
        (qc, (second, replace(second, init=str(tmp_path / "u, too"))), "worker 1 begins with other weights"),
    ):
        pair = []
        for each, place in zip(configs, places(), strict=True):
            file = tmp_path / f"{place['RANK']}.json"
            save_config(each, file)
            words = ["train", str(file), f"--out={out}", "--device=cpu"]
            pair.append(Forked(main_into, words, said, place=place))
        for process in pair:
            process.join(120)
        assert [process.exitcode for process in pair] == [2, 2]
        assert re.fullmatch(rf"curlfree: .*{expected}.*\n", said.read_text())
        said.unlink()


def test_restarted_workers_find_each_other_whatever_the_dead_left_behind(monkeypatch):
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    for attempt in range(3):
        server.set("hello 1", "of one that was killed")
        with ThreadPoolExecutor(3) as pool:
            stores = list(pool.map(lambda rank: fresh_store(rank, 3), range(3)))
        stores[0].set("rank 0", f"attempt {attempt}")
        assert {store.get("rank 0").decode() for store in stores} == {f"attempt {attempt}"}
        assert not server.check(["rank 0"])


@pytest.mark.parametrize(("batch", "fraction"), [(12, 0.5), (10, 0.3), (7, 1.0), (128, 1 / 32), (5, 0.01)])
def test_every_row_is_penalised_equally_often(batch, fraction):
    g = torch.Generator().manual_seed(1)
    n, draws = max(1, round(fraction * batch)), 4000
    rows = [penalised_rows(batch, fraction, g) for _ in range(draws)]
    assert all(len(r) == n and bool((r.diff() >= 0).all()) for r in rows)
    mean = torch.bincount(torch.cat(rows), minlength=batch).double() / draws
    p = n / batch
    assert float((mean - p).abs().max()) < 5 * math.sqrt(p / draws) + 1e-12
    if batch % 2 == 0 and n % 2 == 0:
        assert all(int((r < batch // 2).sum()) == n // 2 for r in rows)


def test_channels_last_changes_nothing_but_the_order_of_memory(packed):
    config = with_train(images(packed), precision="float64")
    plain, last = gradients(config, ALONE), gradients(with_train(config, channels_last=True), ALONE)
    assert relative(last, plain) < 1e-12


def test_bfloat16_keeps_float32_weights_and_nearly_the_gradient(packed):
    config = replace(images(packed), objective=ObjectiveConfig())
    full, half = gradients(config, ALONE), gradients(with_train(config, precision="bfloat16"), ALONE)
    assert {g.dtype for g in half.values()} == {torch.float32}
    assert 0 < relative(half, full) < 0.1


def compiled_cases(path: Path) -> dict[str, RunConfig]:
    """Runs of which something is compiled: the least network with each kind of region."""
    least = NCSNppConfig(size=8, width=4, multipliers=(1,), blocks=1, attention=(), dropout=0.3)
    base = images(path)
    u = replace(base, field=FieldConfig(network=least), objective=ObjectiveConfig())
    return {
        "images u": u,
        "images qc": replace(u, objective=replace(base.objective, fraction="auto")),
        "images c": replace(u, field=replace(u.field, form="energy")),
        "images c as the paper": replace(u, field=replace(u.field, form="paper-energy")),
        "toy u": TOY,
        "toy c": replace(TOY, field=replace(TOY.field, form="energy")),
        "toy qc": replace(TOY, objective=QC),
    }


@pytest.fixture
def recompile():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", compiled_cases(Path()))
def test_compiled_steps_have_the_gradient_of_eager_ones(packed, name, recompile):
    config = with_train(compiled_cases(packed)[name], precision="float64")
    eager = gradients(config, ALONE)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*falls back to double backward")
        assert relative(gradients(with_train(config, compile=True), ALONE), eager) < 1e-9
    # An energy of a network without tangents of its own is differentiated twice, which runs eagerly.
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 0 if name == "toy c" else graphs > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_resumed_compiled_run_ends_with_the_same_bits(tmp_path, packed, monkeypatch, recompile):
    monkeypatch.setattr("curlfree.train.compile_field", partial(compile_field, backend="eager"))
    config = compiled_cases(packed)["images qc"]
    config = with_train(config, precision="bfloat16", compile=True, channels_last=True)
    train(config, tmp_path / "whole", device="cpu")
    train(with_train(config, steps=2), tmp_path / "parts", device="cpu")
    train(config, tmp_path / "parts", device="cpu")
    assert_same(tmp_path / "whole", tmp_path / "parts")
    weights = ckpt.load(ckpt.checkpoints(tmp_path / "whole")[-1]).model
    assert {w.dtype for w in weights.values()} == {torch.float32}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["images u", "images qc", "images c"])
def test_recorded_training_on_a_gpu_is_the_eager_one(tmp_path, packed, name, recompile):
    """Warm-up, recording and replays, and a run that is continued, against the loop without any of it."""
    config = compiled_cases(packed)[name]
    config = replace(config, optim=replace(config.optim, lr=1e-4))
    config = with_train(config, precision="float64", steps=12, log_every=1)
    train(config, tmp_path / "eager", device="cuda")
    train(with_train(config, compile=True, steps=8), tmp_path / "recorded", device="cuda")
    train(with_train(config, compile=True), tmp_path / "recorded", device="cuda")
    rows = [[row for row in log_of(tmp_path / run) if "loss" in row] for run in ("eager", "recorded")]
    assert [row["step"] for row in rows[1]] == list(range(1, 13))
    for one, other in zip(*rows, strict=True):
        assert other["score_matching"] == pytest.approx(one["score_matching"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_a_penalty_whose_compiled_tangents_are_wrong_goes_back_to_double_backward(packed, monkeypatch):
    config = with_train(compiled_cases(packed)["images qc"], precision="float64")
    eager = gradients(replace(config, objective=replace(config.objective, form="double")), ALONE)
    tangents = NCSNpp.tangents

    def wrong(net, x, sigma, vs, *rest, **named):
        value, products = tangents(net, x, sigma, vs, *rest, **named)
        return value, tuple(1.5 * p for p in products)

    monkeypatch.setattr("training.compile_field", lambda config, field, backend: None)
    monkeypatch.setattr(NCSNpp, "tangents", wrong)
    with pytest.warns(UserWarning, match="falls back to double backward"):
        found = gradients(with_train(config, compile=True), ALONE)
    assert relative(found, eager) < 1e-12


def test_the_average_is_that_of_its_recursion():
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    ema = Ema(module, 0.3)
    expected = torch.zeros(1, 2)
    for n in range(1, 6):
        module.weight.data.fill_(float(n))
        ema.update(module, n)
        d = min(0.3, (1 + n) / (10 + n))
        expected = d * expected + (1 - d) * n
    torch.testing.assert_close(ema.weights["weight"], expected)
    none = Ema(module, 0.0)
    module.weight.data.fill_(9.0)
    none.update(module, 1)
    assert torch.equal(none.weights["weight"], module.weight)


def test_a_run_lowers_the_loss_and_the_penalty_the_asymmetry(tmp_path):
    """Same seed, same draws: only lambda differs."""
    base = with_train(
        TOY, steps=100, batch_size=64, checkpoint_every=20, log_every=50, validation_samples=256
    )
    qc = replace(base, objective=ObjectiveConfig(lmbda=3.0, weighting="sigma4"))
    monitor = replace(base, objective=ObjectiveConfig(lmbda=1e-9, weighting="sigma4"))
    last = {}
    for name, config in (("qc", qc), ("u", monitor)):
        train(config, tmp_path / name, device="cpu")
        rows = log_of(tmp_path / name)
        held_out = [row["held_out_score_matching"] for row in rows if "held_out_score_matching" in row]
        assert held_out[-1] < held_out[0]
        last[name] = sum(row["qc"] for row in rows if "qc" in row)
    assert last["qc"] < 0.5 * last["u"]


def test_a_loss_that_is_not_finite_ends_the_run_and_nothing_is_saved(tmp_path):
    broken = replace(TOY, optim=replace(TOY.optim, lr=1e30))
    with pytest.raises(FloatingPointError, match=r"step \d+: the loss or its gradient is not finite.*sigma"):
        train(broken, tmp_path, device="cpu")
    assert steps_of(tmp_path) == []


def test_sigterm_saves_and_ends_and_the_run_goes_on_from_there(tmp_path, monkeypatch):
    """Also when it comes again while the checkpoint is written."""
    original, save = RunLog.step, ckpt.save

    def step(self: RunLog, numbers) -> None:
        if numbers.step == 2:
            signal.raise_signal(signal.SIGTERM)
        original(self, numbers)

    def interrupted(*arguments) -> Path:
        signal.raise_signal(signal.SIGTERM)
        return save(*arguments)

    monkeypatch.setattr(RunLog, "step", step)
    monkeypatch.setattr(ckpt, "save", interrupted)
    reached = train(TOY, tmp_path / "stopped", device="cpu")
    assert 2 < reached < TOY.train.steps and steps_of(tmp_path / "stopped")[-1] == reached
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.undo()
    assert train(TOY, tmp_path / "stopped", device="cpu") == TOY.train.steps
    train(TOY, tmp_path / "whole", device="cpu")
    assert_same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_second_interrupt_ends_at_once_unless_torchrun_repeats_each(monkeypatch, torchrun):
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with nullcontext() if torchrun else pytest.raises(KeyboardInterrupt), stop_signals() as received:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert received == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM] + [signal.SIGINT] * torchrun
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_the_same(tmp_path, capsys):
    train(TOY, tmp_path / "whole", device="cpu")
    train(TOY, tmp_path / "hurt", device="cpu")
    file = ckpt.checkpoints(tmp_path / "hurt")[-1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="truncated"):
        assert load_run(tmp_path / "hurt").step == 4
    assert train(TOY, tmp_path / "hurt", device="cpu") == 8
    assert "checkpoint-00000008" in capsys.readouterr().err
    assert_same(tmp_path / "whole", tmp_path / "hurt")


def test_damaged_checkpoints_are_set_aside_and_an_intact_one_always_survives(tmp_path, capsys):
    """Steps 4 and 6 are damaged: the run goes on from 2, and at 3 the damaged ones count for nothing."""
    config = with_train(TOY, steps=6, checkpoint_every=2, keep=2, validation_samples=0)
    train(config, tmp_path / "whole", device="cpu")
    train(replace(config, train=replace(config.train, keep=3)), tmp_path / "hurt", device="cpu")
    for step in (4, 6):
        file = ckpt.path_of(tmp_path / "hurt", step) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    train(with_train(config, steps=3), tmp_path / "hurt", device="cpu")
    assert steps_of(tmp_path / "hurt") == [2, 3]
    said = capsys.readouterr().err
    assert all(f"checkpoint-0000000{n}" in said and f"now refused-0000000{n}" in said for n in (4, 6))
    for step in (2, 3):
        ckpt.verify(ckpt.path_of(tmp_path / "hurt", step))
    assert train(config, tmp_path / "hurt", device="cpu") == 6
    assert_same(tmp_path / "whole", tmp_path / "hurt")


def test_a_state_that_is_damaged_meanwhile_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    original = RunLog.step

    def step(self: RunLog, numbers) -> None:
        if numbers.step == 5:
            (ckpt.path_of(tmp_path, 2) / "state.json").write_text("{")
        original(self, numbers)

    monkeypatch.setattr(RunLog, "step", step)
    assert train(with_train(TOY, checkpoint_every=2, keep=3), tmp_path, device="cpu") == TOY.train.steps
    assert "its held-out loss is taken as not measured" in capsys.readouterr().err
    assert steps_of(tmp_path) == [4, 6, 8]


def test_another_configuration_is_refused_by_field_but_more_steps_are_not(tmp_path):
    train(with_train(TOY, steps=2), tmp_path, device="cpu")
    with pytest.raises(ValueError, match=r"optim\.lr: 0\.01 != 0\.02"):
        train(replace(TOY, optim=replace(TOY.optim, lr=0.02)), tmp_path, device="cpu")
    assert train(with_train(TOY, steps=3, log_every=1), tmp_path, device="cpu") == 3
    assert load_config(tmp_path / "config.json").train.steps == 3
    assert train(with_train(TOY, steps=3, log_every=1), tmp_path, device="cpu") == 3


def test_other_data_and_wrong_images_are_refused(tmp_path, packed):
    config = with_train(images(packed), steps=1)
    train(config, tmp_path / "run", device="cpu")
    original = packed.read_bytes()
    pack(packed.parent, seed=1)
    with pytest.raises(ValueError, match="other data"):
        train(with_train(config, steps=2), tmp_path / "run", device="cpu")
    packed.write_bytes(original)
    large = replace(config.field.network, size=16, attention=(8,))
    with pytest.raises(ValueError, match=r"data.path: expected images .* \(3, 16, 16\).* found \(3, 8, 8\)"):
        train(replace(config, field=replace(config.field, network=large)), tmp_path / "b", device="cpu")
    few = images(packed, classes=2)
    with pytest.raises(ValueError, match=r"expected labels below field.network.classes = 2, found 2"):
        train(few, tmp_path / "c", device="cpu")


def test_a_run_has_one_writer(tmp_path):
    train(with_train(TOY, steps=1), tmp_path, device="cpu")
    child = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); "
        "print(1, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", child, tmp_path / ".lock"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline()
        with pytest.raises(ValueError, match="another process is training"):
            train(TOY, tmp_path, device="cpu")
    finally:
        holder.kill()
        holder.wait()


def test_the_second_stage_starts_from_the_weights_of_the_first(tmp_path):
    train(TOY, tmp_path / "u", device="cpu")
    still = replace(TOY.optim, lr=1e-30)
    qc = with_train(replace(TOY, objective=QC, optim=still, init=str(tmp_path / "u")), steps=1)
    train(qc, tmp_path / "qc", device="cpu")
    u = ckpt.load(ckpt.checkpoints(tmp_path / "u")[-1])
    first = ckpt.load(ckpt.checkpoints(tmp_path / "qc")[-1])
    assert all(torch.equal(first.model[name], u.model[name]) for name in u.model)
    d = 2 / 11  # of the first step's average
    for name in u.ema:
        torch.testing.assert_close(first.ema[name], d * u.ema[name] + (1 - d) * u.model[name])
    wider = replace(qc, field=replace(TOY.field, network=replace(TOY.field.network, width=16)))
    with pytest.raises(ValueError, match=r"has shape \(.*, expected \(16, .*choose the network"):
        train(wider, tmp_path / "wider", device="cpu")
    with pytest.raises(FileNotFoundError, match="init"):
        train(replace(qc, init=str(tmp_path / "nothing")), tmp_path / "none", device="cpu")


def test_the_second_stage_always_begins_with_the_same_checkpoint(tmp_path, monkeypatch):
    """Killed before its first checkpoint, while the first stage went on; then from another working folder."""
    u, qc = tmp_path / "u", tmp_path / "qc"
    train(with_train(TOY, steps=4), u, device="cpu")
    config = with_train(replace(TOY, objective=QC, init="u"), steps=2)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(RunLog, "step", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(config, qc, device="cpu")
    assert steps_of(qc) == []
    train(TOY, u, device="cpu")
    assert steps_of(u) == [4, 8]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = replace(config, init="../u")
    ckpt.path_of(u, 4).rename(u / "away")
    with pytest.raises(ValueError, match=r"began with the checkpoint at step 4 of .*u, which is gone"):
        train(config, qc, device="cpu")
    shutil.copytree(u / "away", u / "checkpoint-00000004")
    (u / "checkpoint-00000004" / "ema.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match="or holds other weights"):
        train(config, qc, device="cpu")
    shutil.rmtree(u / "checkpoint-00000004")
    (u / "away").rename(u / "checkpoint-00000004")
    train(config, qc, device="cpu")
    first, again = (row["provenance"]["init"] for row in whole_log(qc) if "provenance" in row)
    manifest = json.loads((u / "checkpoint-00000004" / "manifest.json").read_text())
    assert first == again and first["run"] == str(u) and first["step"] == 4
    assert first["sha256"] == {name: manifest[name]["sha256"] for name in ckpt.FILES[:2]}
    shutil.rmtree(u)
    assert train(with_train(config, steps=3), qc, device="cpu") == 3


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train\.batch_size: expected a multiple of 1 workers x 5"):
        train(with_train(TOY, accumulate=5), tmp_path, device="cpu")


def test_load_run_gives_the_field_with_either_weights(tmp_path):
    train(TOY, tmp_path, device="cpu")
    averaged, raw, early = (
        load_run(tmp_path),
        load_run(tmp_path, weights="raw"),
        load_run(tmp_path, step=4),
    )
    saved = ckpt.load(ckpt.checkpoints(tmp_path)[-1])
    for run, weights in ((averaged, saved.ema), (raw, saved.model)):
        assert run.step == 8 and not run.field.training
        assert all(torch.equal(p, weights[name]) for name, p in run.field.named_parameters())
    assert early.step == 4 and averaged.process == TOY.process and averaged.config == TOY
    with pytest.raises(FileNotFoundError, match=r"there are \[4, 8\]"):
        load_run(tmp_path, step=5)
    with pytest.raises(FileNotFoundError, match="no run here"):
        load_run(tmp_path / "elsewhere")


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_back(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'
    cut_back(log, 5)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_the_log_has_the_losses_and_the_asymmetry_by_level(tmp_path):
    config = with_train(replace(TOY, objective=QC), steps=4, log_every=4, batch_size=64, tensorboard=True)
    train(config, tmp_path, device="cpu")
    rows = log_of(tmp_path)
    steps, held_out = rows
    assert steps["step"] == 4 and len(steps["levels"]) == len(held_out["levels"]) == 8
    assert steps["loss"] == pytest.approx(steps["score_matching"] + QC.lmbda * steps["qc"], rel=1e-5)
    assert all(level["asymmetry_nats"] > 0 for level in steps["levels"])
    assert all(level["work_nats"] > 0 for level in held_out["levels"])
    assert held_out["held_out_score_matching"] == pytest.approx(
        ckpt.load_state(ckpt.checkpoints(tmp_path)[-1]).validation
    )
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("estimator", ["est", "paper"])
def test_a_negative_estimate_has_no_root_and_does_not_end_the_run(tmp_path, estimator):
    objective = replace(QC, estimator=estimator, form="double", fraction=1.0)
    config = with_train(replace(TOY, objective=objective), steps=12, log_every=1, checkpoint_every=12)
    assert train(config, tmp_path, device="cpu") == 12
    found = {level["asymmetry_nats"] for row in log_of(tmp_path)[:-1] for level in row["levels"]}
    assert None in found and all(value >= 0 for value in found - {None})


class StubWandb(ModuleType):
    """What the log uses of Weights & Biases: runs by their id, each a list of what was logged."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, list[tuple[int, dict]]] = {}
        self.settings: list[dict] = []
        self.Image = lambda pixels: pixels

    def init(self, **settings):
        self.settings.append(settings)
        rows = self.runs.setdefault(settings["id"], [])
        return SimpleNamespace(log=lambda row, step: rows.append((step, row)), finish=lambda: None)


def test_weights_and_biases_gets_one_run_for_all_starts_with_its_images(tmp_path, packed, monkeypatch):
    stub = StubWandb()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    config = with_train(images(packed), wandb=True, images=3, log_every=1, validation_samples=0)
    for steps in (2, 4):
        train(with_train(config, steps=steps), tmp_path / "one", device="cpu")
    train(with_train(config, steps=1, images=0), tmp_path / "other", device="cpu")
    one, other = stub.runs.values()
    assert [settings["resume"] for settings in stub.settings] == ["allow"] * 3
    assert {step for step, row in one if "loss" in row} == {1, 2, 3, 4}
    assert [step for step, _ in one] == sorted(step for step, _ in one)
    shown = {step: row["samples"] for step, row in one if "samples" in row}
    assert shown.keys() == {2, 4} and all(len(samples) == 3 for samples in shown.values())
    assert shown[4][0].shape == (8, 8, 3) and shown[4][0].dtype.name == "uint8"
    assert {step for step, _ in other} == {0, 1}
