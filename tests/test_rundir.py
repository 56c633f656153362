"""The run directory: one process at a time, and a kill at any moment loses at most the running step."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trueup.configfile import load_config
from trueup.learner.model import load_causal_lm, load_tokenizer
from trueup.rollouts import Rollouts
from trueup.rundir import RunDirectory, RunDirectoryError, write_text


class Saved:
    """Stands in for a model or tokenizer: writes one small file, as save_pretrained would."""

    def __init__(self, name: str, text: str = "{}", fails: bool = False):
        self.name, self.text, self.fails = name, text, fails

    def save_pretrained(self, folder):
        (folder / self.name).write_text(self.text)
        if self.fails:
            raise OSError("No space left on device")


@pytest.fixture
def run(tmp_path):
    made = RunDirectory.create(tmp_path / "run")
    made.start(load_config({"steps": 3}))
    yield made
    made.close()


def save(run: RunDirectory, step: int, keep: int = 2, text: str = "{}", fails: bool = False):
    model = Saved("config.json", text)
    tensors = {"optimizer/first": torch.tensor([float(step)])}
    return run.save_checkpoint(step, model, Saved("tokenizer.json", fails=fails), tensors, {"step": step}, keep)


def entries(folder) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- one run, one process ---------------------------------------------------------------------------------------------


def test_a_new_run_holds_its_resolved_configuration(tmp_path):
    config = load_config({"algorithm": "ppo"}, ["correction=tis", "learner.lr=1e-6"])
    run = RunDirectory.create(tmp_path / "deep" / "run")
    run.start(config)
    assert load_config(tmp_path / "deep" / "run" / "config.yaml") == config
    assert run.metrics() == [] and run.checkpoints() == [] and run.load_checkpoint() is None
    assert entries(run.path) == ["config.yaml", "lock"]
    run.close()


def test_a_run_is_reopened_with_its_configuration(run):
    run.close()
    again, config = RunDirectory.reopen(run.path)
    assert config == load_config({"steps": 3}) and again.path == run.path
    again.close()


def test_a_folder_that_holds_a_run_is_not_overwritten(run):
    run.close()
    with pytest.raises(RunDirectoryError, match="already holds a run; continue it with --resume, or .* with --out"):
        RunDirectory.create(run.path)
    assert load_config(run.path / "config.yaml").steps == 3


@pytest.mark.parametrize("leftover", ["metrics.jsonl", "checkpoints"])
def test_somebody_elses_files_are_not_taken_over(tmp_path, leftover):
    (tmp_path / leftover).mkdir()
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        RunDirectory.create(tmp_path)


def test_a_run_killed_before_it_has_a_configuration_can_be_started_again(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.rewind(0)  # what a trainer does first; the configuration comes when everything is loaded
    run.close()
    RunDirectory.create(tmp_path / "run").close()


def test_a_start_that_fails_leaves_the_folder_free(tmp_path):
    RunDirectory.create(tmp_path / "run").close()  # and then the model was not found
    again = RunDirectory.create(tmp_path / "run")
    again.close()


def test_a_full_disk_is_named_and_not_left_fuller(run, monkeypatch):
    save(run, 1)

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("trueup.rundir.save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save(run, 2)
    assert caught.value.errno == errno.ENOSPC
    assert entries(run.checkpoints_path) == ["step-000001"]


def test_what_is_not_finite_is_null_in_the_metrics(run):
    run.append_metrics({"step": 1, "policy/loss": float("nan"), "policy/grad_norm": float("inf")})
    assert run.metrics() == [{"step": 1, "policy/loss": None, "policy/grad_norm": None}]


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(RunDirectoryError, match="holds no run to resume .*; leave --resume out to start one"):
        RunDirectory.reopen(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_second_handle_is_refused_until_the_first_is_closed(run):
    with pytest.raises(RunDirectoryError, match="is in use by another process; wait for it, or choose another folder"):
        RunDirectory.reopen(run.path)
    run.close()
    run.close()  # twice does no harm
    again, _ = RunDirectory.reopen(run.path)
    again.close()


def test_a_killed_process_leaves_its_run_free_and_a_living_one_does_not(tmp_path):
    program = """
        import sys, time
        from trueup.configfile import load_config
        from trueup.rundir import RunDirectory
        run = RunDirectory.create(sys.argv[1])
        run.start(load_config({"steps": 3}))
        run.append_metrics({"step": 1})
        print("ready", flush=True)
        time.sleep(60)
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "run")], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(RunDirectoryError, match="is in use by another process"):
            RunDirectory.reopen(tmp_path / "run")
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    run, config = RunDirectory.reopen(tmp_path / "run")
    assert config.steps == 3 and run.metrics() == [{"step": 1}]
    run.close()


# --- metrics and rollouts ---------------------------------------------------------------------------------------------


def test_metrics_are_one_json_object_a_line(run):
    run.append_metrics({"step": 1, "reward/mean": 0.5})
    run.append_metrics({"step": 2, "reward/mean": 1e-7})
    lines = run.metrics_path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == run.metrics() == [
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 1e-7},
    ]  # fmt: skip


@pytest.mark.parametrize("cut", range(1, 32))
def test_a_line_that_a_kill_left_half_written_is_passed_over(run, cut):
    run.append_metrics({"step": 1, "reward/mean": 0.5})
    whole = run.metrics_path.read_text()
    line = json.dumps({"step": 2, "reward/mean": 0.75})
    assert cut < len(line)
    run.metrics_path.write_text(whole + line[:cut])
    assert run.metrics() == [{"step": 1, "reward/mean": 0.5}]
    run.rewind(1)  # what a resumed run does first
    assert run.metrics_path.read_text() == whole
    run.append_metrics({"step": 2, "reward/mean": 1.0})
    assert [row["step"] for row in run.metrics()] == [1, 2]


def test_rewinding_forgets_metrics_and_rollouts_of_later_steps(run):
    rollouts = Rollouts.from_lists([[1]], [[2, 3]], [[-1.0, -2.0]])
    for step in (1, 2, 3, 10):
        run.append_metrics({"step": step})
        run.write_rollouts(step, rollouts)
    assert entries(run.path / "rollouts") == [f"step-{step:06d}.parquet" for step in (1, 2, 3, 10)]
    run.rewind(2)
    assert [row["step"] for row in run.metrics()] == [1, 2]
    assert entries(run.path / "rollouts") == ["step-000001.parquet", "step-000002.parquet"]
    assert Rollouts.from_parquet(run.path / "rollouts" / "step-000002.parquet").tokens == 2
    run.rewind(0)
    assert run.metrics() == [] and entries(run.path / "rollouts") == []


def test_a_run_that_wrote_nothing_yet_can_be_rewound(run):
    run.rewind(0)
    assert run.metrics() == []


def test_a_text_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_text(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_gives_the_trainer_its_state_back(run):
    tensors = {
        "optimizer/0/exp_avg": torch.randn(3, 4),
        "rng": torch.get_rng_state(),
        "turned": torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,  # safetensors takes contiguous tensors only
    }
    state = {"step": 5, "version": 4, "problems_taken": 320, "name": "α", "rate": 1e-6}
    folder = run.save_checkpoint(5, Saved("config.json"), Saved("tokenizer.json"), tensors, state, keep=1)
    found_folder, found_tensors, found_state = run.load_checkpoint()
    assert found_folder == folder == run.checkpoints_path / "step-000005"
    assert found_state == state and set(found_tensors) == set(tensors)
    for name, value in tensors.items():
        assert found_tensors[name].dtype == value.dtype and torch.equal(found_tensors[name], value)


def test_only_the_models_own_weights_lie_beside_its_configuration(run):
    model, tokenizer = load_causal_lm("mini", "bf16", "eager"), load_tokenizer("mini")
    folder = run.save_checkpoint(1, model, tokenizer, {"master": torch.zeros(2)}, {"step": 1}, keep=1)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert entries(folder / "trainer") == ["state.json", "state.safetensors"]
    assert not any(name.startswith("master") for name in load_file(folder / "model.safetensors"))
    again, weights = load_causal_lm(str(folder), "bf16", "eager"), dict(model.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in again.named_parameters())
    assert load_tokenizer(str(folder)).encode("1+2=") == tokenizer.encode("1+2=")


def test_the_newest_checkpoints_are_kept_and_the_newest_is_loaded(run):
    for step in (2, 9, 10, 100):
        save(run, step, keep=2)
    assert entries(run.checkpoints_path) == ["step-000010", "step-000100"]
    assert run.load_checkpoint()[2] == {"step": 100}
    save(run, 101, keep=1)
    assert entries(run.checkpoints_path) == ["step-000101"]


def test_a_checkpoint_of_the_same_step_is_replaced(run):
    save(run, 1, text="old")
    assert (save(run, 1, text="new") / "config.json").read_text() == "new"
    assert entries(run.checkpoints_path) == ["step-000001"]


def test_a_checkpoint_that_fails_midway_leaves_the_earlier_one(run):
    save(run, 1)
    with pytest.raises(OSError, match="No space"):
        save(run, 2, fails=True)
    assert run.load_checkpoint()[2] == {"step": 1}


@pytest.mark.parametrize("moment", ["tokenizer", "os.replace"])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_earlier_one(tmp_path, moment):
    program = """
        import os, signal, sys
        import torch
        from trueup import rundir
        from trueup.configfile import load_config

        class Saved:
            def __init__(self, kills=False):
                self.kills = kills
            def save_pretrained(self, folder):
                (folder / "file").write_text("half")
                if self.kills:
                    die()

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        run = rundir.RunDirectory.create(sys.argv[1])
        run.start(load_config())
        run.save_checkpoint(1, Saved(), Saved(), {"t": torch.ones(2)}, {"step": 1}, keep=1)
        if sys.argv[2] == "os.replace":
            rundir.os.replace = die
        run.save_checkpoint(2, Saved(), Saved(kills=sys.argv[2] == "tokenizer"), {"t": torch.zeros(2)}, {"step": 2}, keep=1)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "run"), moment])
    assert killed.returncode == -signal.SIGKILL
    run, _ = RunDirectory.reopen(tmp_path / "run")
    assert entries(run.checkpoints_path) == [".step-000002.tmp", "step-000001"]
    folder, tensors, state = run.load_checkpoint()
    assert folder.name == "step-000001" and state == {"step": 1} and tensors["t"].tolist() == [1, 1]
    run.close()


def test_what_a_kill_left_half_written_is_ignored_and_swept_up_by_the_next_checkpoint(run):
    save(run, 1)
    for step in (2, 7):
        leftover = run.checkpoints_path / f".step-{step:06d}.tmp"
        leftover.mkdir()
        (leftover / "model.safetensors").write_bytes(b"half")
    assert [path.name for path in run.checkpoints()] == ["step-000001"]
    folder = save(run, 2)
    assert entries(run.checkpoints_path) == ["step-000001", "step-000002"]
    assert entries(folder) == ["config.json", "tokenizer.json", "trainer"]
