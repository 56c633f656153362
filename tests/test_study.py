"""Studies: the grid, real runs that are stopped and continued, and what the pages say."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from trueup.config import ConfigError
from trueup.configfile import load_config
from trueup.study import load_study, study
from trueup.study.runner import available_cores

STUDIES = Path(__file__).parent.parent / "configs" / "studies"

TINY = {
    "base": {
        "algorithm": "ppo",
        "sampler": {"engine": "transformers", "precision": "fp32"},
        "batch": {"prompts": 4, "samples": 2, "minibatches": 2, "prompt_length": 32, "response_length": 40},
        "learner": {"dtype": "fp32", "attention": "eager", "lr": 1e-4},
        "steps": 12,
        "log": {"checkpoint_every": 0},
    },
    "arms": {
        "none": {"correction": "none"},
        "tis": ["correction=tis"],
        "broken": {"critic.model": "./no-such-critic"},
    },
    "seeds": [3],
    "evaluate": {"every": 6, "problems": 16},
}


def write(folder: Path, given: dict, name: str = "tiny.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(given, sort_keys=False))
    return path


def made(tmp_path: Path, **keys):
    """A study of the tiny base with these keys instead."""
    return load_study(write(tmp_path, {key: value for key, value in TINY.items() if key != "arms"} | keys))


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_a_grid_is_the_product_of_its_axes_with_readable_names(tmp_path):
    grid = {
        "sampler.precision": ["fp32", "bf16"],
        "learner.lr": ["2e-5", 1e-3],
        "size": {"small": {"batch": {"prompts": 2}}, "tis5": {"correction": {"preset": "tis", "high": 5}}},
    }
    found = made(tmp_path, grid=grid)
    assert [arm.name for arm in found.arms] == [
        f"{precision}-lr={rate}-{size}"
        for precision in ("fp32", "bf16")
        for rate in ("2e-5", "0.001")
        for size in ("small", "tis5")
    ]
    last = found.arm("bf16-lr=0.001-tis5")
    assert last.config.sampler.precision == "bf16" and last.config.learner.lr == 1e-3
    assert last.config.correction.high == 5 and last.config.batch.prompts == 4
    assert found.arm("fp32-lr=2e-5-small").config.batch.prompts == 2
    assert found.arm("fp32-lr=2e-5-small").config.batch.samples == 2  # a nested override changes what it names only
    assert found.arm("fp32-lr=2e-5-small").config.learner.lr == 2e-5
    assert last.labels == {"sampler.precision": "bf16", "learner.lr": "lr=0.001", "size": "tis5"}


def test_an_arm_overrides_the_set_and_the_set_the_base(tmp_path):
    found = made(tmp_path, set={"correction": "tis", "steps": 5}, arms={"a": None, "b": {"correction": "mis"}}, seeds=2)
    a, b = found.arms
    assert a.config.steps == 5 and a.config.correction == load_config({"correction": "tis"}).correction
    assert b.config.correction == load_config({"correction": "mis"}).correction
    assert found.seeds == (0, 1) and b.at(1).seed == 1 and b.config.log.eval_every == 6
    assert found.pairs == (("b", "a"),)


def test_every_study_that_ships_resolves():
    paths = sorted(STUDIES.glob("*.yaml"))
    assert len(paths) >= 6
    for path in paths:
        assert load_study(path).file.title, path


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"arms": {"a": None}, "sedes": 3}, "unknown key 'sedes'; did you mean seeds?"),
        ({}, "no arms; give `arms:`"),
        ({"arms": {"a/b": None}}, "becomes a folder"),
        ({"arms": {"a": {"sampler.presicion": "int8"}}}, "arm a: unknown key 'sampler.presicion'; did you mean"),
        ({"arms": {"a": ["correction"]}}, "'correction' is not KEY=VALUE"),
        ({"arms": {"a": "tis"}}, "arms.a"),
        ({"arms": {"a": {"seed": 3}}}, "seed is the study's to set"),
        ({"arms": {"a": None, "b": {"steps": 7}}}, "steps is 12 in arm a and 7 in arm b"),
        ({"arms": {"a": None, "b": {"task": "sums:addends=3"}}}, "task is 'sums' in arm a"),
        ({"arms": {"a": None, "b": {"correction": "none"}}}, "arms a and b are the same run"),
        ({"grid": {"correction": ["none", "tis"]}, "arms": {"tis": None}}, "two arms are called 'tis'"),
        ({"grid": {"correction": []}}, "grid.correction has no values"),
        ({"grid": {"size": [1, 2]}}, "grid.size is no configuration key"),
        ({"grid": {"correction": [{"preset": "tis"}]}}, "needs a name"),
        ({"arms": {"a": None, "b": {"steps": 12}}, "compare": "c"}, "same run"),
        ({"arms": {"a": None, "b": {"correction": "tis"}}, "compare": "bb"}, "'bb', which is no arm; did you mean b?"),
        ({"arms": {"a": None, "b": {"correction": "tis"}}, "compare": [["a", "a"]]}, "'a' against itself"),
        ({"arms": {"a": None}, "seeds": [1, 1]}, "seeds=[1, 1]"),
        ({"arms": {"a": None}, "seeds": 0}, "seeds=0"),
        ({"arms": {"a": None}, "against": {"by": "correction"}}, "is not an axis of the grid"),
        ({"arms": {"a": None}, "base": "no-such.yaml"}, "does not exist"),
    ],
)
def test_a_study_that_cannot_run_is_refused_before_its_first_run(tmp_path, keys, says):
    with pytest.raises(ConfigError) as error:
        made(tmp_path, **keys)
    assert says in str(error.value)


def test_a_missing_study_names_the_nearest(tmp_path):
    write(tmp_path, TINY)
    with pytest.raises(ConfigError, match="did you mean .*tiny.yaml"):
        load_study(tmp_path / "tiy.yaml")


def test_a_run_that_needs_more_cores_than_there_are_is_refused():
    assert len(available_cores(1, 1)) == 1
    with pytest.raises(ConfigError, match="lower threads"):
        available_cores(1, 2)


# --- real runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped_and_continued(tmp_path_factory):
    """(study file, its folder, what the stopped call said, results of the call that continued)."""
    folder = tmp_path_factory.mktemp("study")
    path, out = write(folder, TINY), folder / "out"
    code = "import sys; from trueup.study import study; print(study(sys.argv[1], sys.argv[2], cores=1)['stopped_by'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics, deadline = out / "runs" / "none" / "seed-3" / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=200)
    saved = sorted(path.name for path in metrics.with_name("checkpoints").glob("step-*"))
    return path, out, said, saved, study(path, out, cores=1)


def test_a_stopped_study_saves_and_a_later_call_continues(stopped_and_continued):
    _, out, said, saved, results = stopped_and_continued
    assert "SIGTERM: runs in progress (1) stop after their step" in said and said.splitlines()[-1] == "SIGTERM"
    assert len(saved) == 1 and 1 <= int(saved[0].removeprefix("step-")) < 12
    log = (out / "runs" / "none" / "seed-3.log").read_text()
    assert log.count("--- ") == 2 and "--resume" in log and "resuming after step" in log
    arms = {arm["name"]: arm["runs"][0] for arm in results["arms"]}
    assert arms["none"]["state"] == "done" and arms["none"]["steps"] == 12
    assert [step for step, _ in arms["none"]["accuracy"]] == [0, 6, 12]
    assert not (out / "runs" / "tis" / "seed-3.log").read_text().count("--resume")


def test_a_failing_arm_is_recorded_and_the_others_go_on(stopped_and_continued):
    _, out, _, _, results = stopped_and_continued
    assert (results["done"], results["failed"], results["runs"]) == (2, 1, 3)
    broken = next(arm for arm in results["arms"] if arm["name"] == "broken")
    assert broken["done"] == 0 and "no-such-critic" in broken["runs"][0]["says"]
    assert "no-such-critic" in (out / broken["runs"][0]["log"]).read_text()
    assert "1 failed" in (out / "README.md").read_text() and "no-such-critic" in (out / "index.html").read_text()


def test_arms_of_a_seed_start_from_one_checkpoint_and_the_same_prompts(stopped_and_continued):
    shared = stopped_and_continued[-1]["shared"]
    assert len(shared) == 1 and shared[0]["runs"] == 2
    assert len(shared[0]["prompts"]) == 1 and len(shared[0]["starts"]) == 1


def test_every_number_leads_to_its_run(stopped_and_continued):
    _, out, _, _, results = stopped_and_continued
    assert json.loads((out / "study.json").read_text())["comparisons"] == results["comparisons"]
    arm = next(arm for arm in results["arms"] if arm["name"] == "tis")
    run = arm["runs"][0]
    rows = [json.loads(line) for line in (out / run["folder"] / "metrics.jsonl").read_text().splitlines()]
    assert run["final"] == rows[-1]["eval/accuracy"]
    assert run["tokens"] == sum(row["mismatch/tokens"] for row in rows)
    assert (
        f"]({run['folder']})" in (out / "README.md").read_text()
        and f'href="{run["folder"]}/"' in (out / "index.html").read_text()
    )
    # The command beside an arm makes the same run: its file and the seed resolve to what the run was.
    assert load_config(out / arm["config"], ["seed=3"]) == load_config(out / run["folder"] / "config.yaml")


def test_what_is_done_is_not_run_again(stopped_and_continued):
    path, out, *_ = stopped_and_continued
    before = (out / "runs" / "tis" / "seed-3.log").stat().st_mtime_ns
    again = study(path, out, only="tis")
    assert again["done"] == 2 and (out / "runs" / "tis" / "seed-3.log").stat().st_mtime_ns == before


def test_a_changed_study_is_refused_with_the_difference(stopped_and_continued, tmp_path):
    _, out, *_ = stopped_and_continued
    changed = write(tmp_path, TINY | {"set": {"learner.lr": 3e-4}})
    with pytest.raises(ConfigError) as error:
        study(changed, out)
    assert "learner.lr: 0.0001 -> 0.0003" in str(error.value) and "steps" not in str(error.value)


def test_more_seeds_may_be_added(stopped_and_continued, tmp_path):
    _, out, *_ = stopped_and_continued
    results = study(write(tmp_path, TINY | {"seeds": [3, 4]}), out, page_only=True)
    assert results["done"] == 2 and results["runs"] == 6
    assert [run["state"] for run in results["arms"][0]["runs"]] == ["done", "waiting"]


def test_two_studies_do_not_share_a_folder(stopped_and_continued, tmp_path):
    _, out, *_ = stopped_and_continued
    with open(out / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in use by another study, begun by process"):
            study(write(tmp_path, TINY | {"seeds": [3, 4]}), out)


def test_a_page_needs_runs_and_an_arm_that_exists(tmp_path):
    path = write(tmp_path, TINY)
    with pytest.raises(ConfigError, match="holds no run"):
        study(path, tmp_path / "out", page_only=True)
    with pytest.raises(ConfigError, match="--only tsi: no such arm; arms: none, tis, broken"):
        study(path, tmp_path / "out", only="tsi")


def test_importing_a_study_needs_no_engine():
    code = "import sys, trueup.study; assert not {'vllm', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
