"""The whole loop, as a user runs it: subprocesses, real engines, files that can be used afterwards."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from trueup.advantages import signal_groups
from trueup.collect import ProblemStream
from trueup.config import ConfigError
from trueup.configfile import load_config
from trueup.learner.model import MINI
from trueup.rollouts import Rollouts

SMALL = [
    "algorithm=ppo",
    "batch.prompts=8",
    "batch.samples=4",
    "batch.minibatches=2",
    "batch.prompt_length=32",
    "batch.response_length=64",
    "learner.lr=1e-4",
    "learner.attention=eager",
    "log.eval_problems=32",
    "log.checkpoint_every=2",
]
EXACT = ["sampler.engine=transformers", "sampler.precision=fp32", "learner.dtype=fp32"]
# What a run measures of the machine, not of the training.
OF_THE_MACHINE = ("time/", "throughput/", "memory/")


def trueup(*arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trueup.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Six steps without interruption, on the reference engine in float32."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = trueup("train", *SMALL, *EXACT, "steps=6", "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_a_run_leaves_what_the_design_promises(whole_run):
    folder, summary = whole_run
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 7)) and rows[-1]["version"] == 6
    names = """reward/mean reward/std response/length_mean response/truncated_fraction policy/entropy policy/clip_fraction
        policy/kl_old policy/grad_norm policy/loss critic/explained_variance mismatch/kl_k1 mismatch/kl_k3
        mismatch/prob_diff_mean mismatch/prob_diff_max mismatch/log_rho_abs_mean mismatch/rho_mean mismatch/rho_mean_low
        mismatch/rho_mean_high mismatch/rho_max mismatch/ess_token mismatch/ess_sequence mismatch/missing_fraction
        correction/truncated_fraction correction/masked_fraction correction/weight_mean delivery/canary_kl staleness/mean
        time/step time/rollout time/logprobs time/update time/delivery time/correction throughput/tokens_per_second
        throughput/rollout_tokens_per_second memory/peak_bytes"""
    assert not [name for name in names.split() if name not in rows[-1]]
    assert all(value == value for row in rows for value in row.values())
    assert "eval/accuracy" in rows[-1] and summary["accuracy_after"] == rows[-1]["eval/accuracy"]
    assert load_config(folder / "config.yaml").steps == 6
    assert [path.name for path in sorted((folder / "rollouts").iterdir())] == [
        f"step-{n:06d}.parquet" for n in range(1, 7)
    ]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    rollouts = Rollouts.from_parquet(folder / "rollouts" / "step-000006.parquet")
    assert len(rollouts) == 32 and set(rollouts.step.tolist()) == {6} and set(rollouts.learner_version.tolist()) == {5}
    assert (
        float((rollouts.learner_logprobs - rollouts.sampler_logprobs).abs().max()) < 1e-3
    )  # the same engine in float32
    assert set(rollouts.reward.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(whole_run, tmp_path, how):
    folder = tmp_path / "resumed"
    interrupt(how, folder, "steps=6", after=3)
    assert 3 <= len(metrics_of(folder)) < 6
    (folder / "metrics.jsonl").open("a").write('{"step": 4, "rew')  # what a kill in mid-write leaves
    done = trueup("train", "--resume", "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    for found, expected in zip(metrics_of(folder), metrics_of(whole_run[0]), strict=True):
        assert found.keys() == expected.keys()
        for name in found:
            if not name.startswith(OF_THE_MACHINE):
                assert found[name] == expected[name], name
    for step in range(1, 7):
        mine, theirs = (
            Rollouts.from_parquet(run / "rollouts" / f"step-{step:06d}.parquet") for run in (folder, whole_run[0])
        )
        assert torch.equal(mine.response_ids, theirs.response_ids)
        assert torch.equal(mine.learner_logprobs, theirs.learner_logprobs)


def interrupt(how: signal.Signals, folder: Path, *settings: str, after: int) -> tuple[int, str]:
    """Start a run, send the signal when step `after` is on disk, return its exit status and what it said."""
    command = [sys.executable, "-m", "trueup.cli", "train", *SMALL, *EXACT, *settings, "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline, metrics = time.time() + 120, folder / "metrics.jsonl"
    while time.time() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= after):
        time.sleep(0.05)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_finishes_the_step_and_says_how_to_go_on(tmp_path, how):
    folder = tmp_path / "run"
    status, said = interrupt(how, folder, "steps=500", "log.checkpoint_every=0", after=2)
    assert status == 0, said
    last = metrics_of(folder)[-1]["step"]
    assert f"stopped by {how.name} after step {last}" in said and f"trueup train --resume --out {folder}" in said
    assert (folder / "checkpoints" / f"step-{last:06d}" / "model.safetensors").exists()


@pytest.mark.engine
def test_int8_rollouts_with_tis_learn_and_the_checkpoint_deploys(tmp_path):
    """The demo in small: accuracy rises, and plain transformers and plain vLLM find the accuracy that the run reports."""
    folder = tmp_path / "run"
    settings = [
        "correction=tis",
        "sampler.precision=int8",
        "steps=4",
        "batch.prompts=32",
        "batch.samples=8",
        "batch.minibatches=4",
    ]
    settings += ["learner.lr=2e-4", "log.eval_problems=256"]
    done = trueup("train", *SMALL, *settings, "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1
    assert summary["last"]["mismatch/kl_k3"] > 1e-5 and summary["last"]["delivery/below_step_fraction"] > 0
    rollouts = Rollouts.from_parquet(folder / "rollouts" / "step-000004.parquet")
    assert set(rollouts.engine) == {"vllm:int8"} and set(rollouts.sampler_version.tolist()) == {3}
    check = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "deployed.py"),
            str(folder / "checkpoints" / "step-000004"),
            "256",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert check.returncode == 0, check.stderr
    found = json.loads(check.stdout.splitlines()[-1])
    assert found["transformers"] == pytest.approx(summary["accuracy_after"], abs=0.005)
    assert found["vllm"] == pytest.approx(summary["accuracy_after"], abs=0.02)  # other kernels, bf16


@pytest.mark.engine
def test_dapo_on_bf16_rollouts_fills_its_batches_with_signal(tmp_path):
    folder = tmp_path / "run"
    settings = [
        "algorithm=dapo",
        "steps=2",
        "reward.max_refills=20",
        "sampler.precision=bf16",
        "reward.overlong_buffer=16",
        "log.trackers=[tensorboard]",
    ]
    done = trueup("train", *SMALL, *settings, "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    rows = metrics_of(folder)
    assert all(0 < row["reward/signal_fraction"] < 1 for row in rows)  # of those drawn
    rollouts = Rollouts.from_parquet(folder / "rollouts" / "step-000002.parquet")
    assert signal_groups(rollouts.reward, rollouts.group).all()  # of those kept
    assert len(Rollouts.from_parquet(folder / "rollouts" / "step-000002.parquet")) == 32
    assert list((folder / "tensorboard").glob("events*"))


def test_staleness_is_told_apart_from_mismatch(tmp_path):
    """An exact sampler that is up to three steps behind: rho is 1, and the policy ratio holds all of the staleness."""
    folder = tmp_path / "run"
    settings = ["steps=5", "batch.response_length=40", "delivery.every=4", "log.checkpoint_every=0"]
    settings += ["log.eval_problems=4"]
    done = trueup("train", *SMALL, *EXACT, *settings, "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    rows = metrics_of(folder)
    assert [row["version"] for row in rows] == [0, 0, 0, 4, 4]
    assert [row["staleness/mean"] for row in rows] == [0, 1, 2, 3, 0]
    assert all(row["mismatch/kl_k3"] < 1e-8 and row["mismatch/rho_max"] < 1.001 for row in rows)
    first, *growing, fresh = [row["staleness/kl"] for row in rows]
    assert first == fresh == 0 and 1e-7 < growing[0] < growing[1] < growing[2]
    for step in range(1, 6):
        rollouts = Rollouts.from_parquet(folder / "rollouts" / f"step-{step:06d}.parquet")
        assert set(rollouts.learner_version.tolist()) == set(rollouts.sampler_version.tolist()) == {4 * (step > 4)}


@pytest.mark.engine
def test_grpo_on_int4_rollouts_with_frozen_scales_runs_and_its_scales_are_saved(tmp_path):
    folder = tmp_path / "run"
    settings = ["algorithm=grpo", "steps=2", "sampler.precision=int4", "delivery.scales=frozen", "log.eval_problems=4"]
    done = trueup("train", *SMALL, *settings, "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    rows = metrics_of(folder)
    assert all(row["delivery/below_step_fraction"] > 0.9 and row["mismatch/kl_k3"] > 1e-6 for row in rows)
    rollouts = Rollouts.from_parquet(folder / "rollouts" / "step-000002.parquet")
    assert set(rollouts.engine) == {"vllm:int4"}
    saved = {}
    for path in (folder / "checkpoints" / "step-000002" / "trainer").glob("*.safetensors"):
        saved |= load_file(path)
    assert any(name.startswith("delivery/scales/weight/") for name in saved)


def test_a_stop_during_an_evaluation_still_saves(tmp_path):
    """The signal comes when the step's other writing is done and its checkpoint is not due."""
    folder = tmp_path / "run"
    code = """
        import os, signal, sys
        from trueup.collect import Collector
        measured = Collector.accuracy

        def interrupted(self, model, calls=[]):
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return measured(self, model)

        Collector.accuracy = interrupted
        from trueup.cli import main
        sys.exit(main(sys.argv[1:]))
    """
    arguments = ["train", *SMALL, *EXACT, "steps=9", "log.checkpoint_every=0", "log.eval_every=2", "--out", str(folder)]
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "stopped by SIGTERM after step 2" in done.stderr, done.stderr
    assert (folder / "checkpoints" / "step-000002" / "model.safetensors").exists()


def test_problems_that_do_not_fit_are_left_out_and_counted():
    stream = ProblemStream(range(10), seed=1, fits=lambda problem: problem % 2 == 0)
    assert sorted(stream.take(5)) == [0, 2, 4, 6, 8]
    assert stream.skipped == stream.taken - 5
    with pytest.raises(ConfigError, match="no prompt of 10 training problems in a row fits"):
        ProblemStream([SimpleNamespace(prompt="long")] * 10, seed=1, fits=lambda problem: False).take(1)


def test_problems_come_in_a_seeded_order_and_each_once_an_epoch():
    stream = ProblemStream(range(10), seed=1)
    first, second = [stream.take(10) for _ in range(2)]
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    again = ProblemStream(range(10), seed=1)
    again.taken = 7
    assert again.take(5) == first[7:] + second[:2]
    assert ProblemStream(range(10), seed=2).take(10) != first


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["train", "model=./nowhere"], "does not exist; give a Hugging Face model folder"),
        (["train", "sampler.presicion=int8"], "did you mean sampler.precision?"),
        (["train", "task=summs"], "sums"),
        (["train", "configs/sums-pp.yaml"], "does not exist"),
        (["train", *EXACT, "--out", "{tmp}/a", "batch.prompt_length=5"], "batch.prompt_length is 5: raise it"),
        (["train", "--out", "{tmp}/a", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["train", "model=no-such-model"], "neither as a folder nor on the hub; give a folder, a hub name"),
        (["train", "batch.response_length=2000", "--out", "{tmp}/b"], "reads at most 1024; lower one"),
        (["train", "--resume"], "--resume needs --out"),
        (["train", "--resume", "--out", "{tmp}/c"], "holds no run to resume"),
        (["train", "task=jsonl:{tmp}/rows.jsonl"], "rows.jsonl:2"),
    ],
)
def test_bad_input_exits_2_and_names_the_remedy(tmp_path, arguments, says):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    done = trueup(*[argument.format(tmp=tmp_path) for argument in arguments])
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_folder_with_a_run_is_not_overwritten(whole_run):
    done = trueup("train", *SMALL, *EXACT, "--out", whole_run[0])
    assert done.returncode == 2 and "already holds a run; continue it with --resume" in done.stderr


def test_print_config_shows_every_field_resolved():
    done = trueup(
        "train", "configs/sums-ppo-int8-tis.yaml", "seed=3", "--print-config", cwd=Path(__file__).parent.parent
    )
    assert done.returncode == 0, done.stderr
    config = load_config(yaml.safe_load(done.stdout))
    assert config.seed == 3 and config.advantage.kind == "gae" and config.sampler.precision == "int8"


@pytest.mark.parametrize("verb", ["train", "explain", "measure", "eval", "study", "report", "mini"])
def test_every_verb_has_help_with_an_example(verb):
    done = trueup(verb, "--help")
    assert (
        done.returncode == 0 and f"example: trueup {verb}" in " ".join(done.stdout.split()) and "--json" in done.stdout
    )


def test_the_package_imports_without_any_engine():
    code = (
        "import sys, trueup, trueup.mismatch, trueup.correction; assert not {'vllm', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_mini_model_is_the_default():
    assert load_config().model == "mini" and (MINI / "model.safetensors").exists()
