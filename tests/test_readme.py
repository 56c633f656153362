"""What the README promises: its commands are understood, its Python runs, its links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for _, block in BLOCKS for line in block.splitlines()]
TRAIN = [command for command in COMMANDS if command.startswith("trueup train") and "--resume" not in command]


def test_the_first_screen_names_both_commands_and_shows_what_the_demo_prints():
    first = "\n".join(README.splitlines()[:40])
    assert "make demo" in first and "make test" in first and "held-out greedy accuracy after" in first


@pytest.mark.parametrize("command", TRAIN)
def test_each_training_command_is_understood(command):
    words = [sys.executable, "-m", "trueup.cli", *shlex.split(command)[1:]]
    if "--print-config" not in words:
        words.append("--print-config")
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "correction:" in done.stdout


def test_the_python_example_runs():
    (code,) = [block for kind, block in BLOCKS if kind == "python"]
    log_pi = torch.log(torch.tensor([0.5, 0.25, 0.8]))
    names = dict(
        sampler_logprobs=torch.log(torch.tensor([0.4, 0.25, 0.2])),
        learner_logprobs=log_pi,
        offsets=torch.tensor([0, 2, 3]),
        loss_mask=torch.ones(3, dtype=torch.bool),
        token_loss=-log_pi,
    )
    exec(code, names)
    # rho = 1.25, 1, 4; TIS cuts the last at 2
    assert names["fixed"].weights_N.tolist() == pytest.approx([1.25, 1.0, 2.0])
    assert names["stats"]["mismatch/rho_max"] == pytest.approx(4.0)


@pytest.mark.parametrize("goal", ["demo", "test"])
def test_make_knows_both_goals(goal):
    done = subprocess.run(["make", "--dry-run", goal], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and ("trueup train configs/demo.yaml" in done.stdout or "pytest" in done.stdout)


def test_links_lead_to_files():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
