"""What a step says: always reward, KL, ESS and the fraction cut; loud where E[rho] is not 1."""

import io

import pytest
from rich.console import Console

from trueup.console import RunConsole, step_line

NAN = float("nan")


def metrics(**changes) -> dict:
    base = {
        "step": 7,
        "reward/mean": 0.1234,
        "mismatch/kl_k3": 1.26e-4,
        "mismatch/ess_token": 0.9876,
        "mismatch/rho_mean": 1.0,
        "mismatch/rho_mean_low": 0.99,
        "mismatch/rho_mean_high": 1.01,
        "correction/truncated_fraction": 0.01,
        "correction/masked_fraction": 0.025,
        "response/length_mean": 41.6,
        "time/step": 3.21,
        "throughput/tokens_per_second": 12345.6,
    }
    return base | {name.replace("__", "/"): value for name, value in changes.items()}


def shown(line: str) -> str:
    """The line as a console without colours prints it."""
    console = Console(file=io.StringIO(), width=300, highlight=False)
    console.print(line, soft_wrap=True)
    return console.file.getvalue().rstrip("\n")


def test_a_step_shows_reward_kl_ess_and_the_fraction_cut():
    expected = "step    7  reward 0.123  KL 1.3e-04  ESS 0.988  cut 3.5%  len 42  3.2 s  12,346 tok/s"
    assert shown(step_line(metrics())) == expected


def test_without_a_correction_nothing_is_cut():
    given = metrics()
    del given["correction/truncated_fraction"], given["correction/masked_fraction"]
    assert "cut 0.0%" in step_line(given)


@pytest.mark.parametrize("low, high, mean", [(1.06, 1.2, 1.13), (0.5, 0.9, 0.7)])
def test_a_mean_ratio_whose_interval_is_clear_of_1_is_shouted(low, high, mean):
    line = step_line(metrics(mismatch__rho_mean=mean, mismatch__rho_mean_low=low, mismatch__rho_mean_high=high))
    assert f"E[rho] {mean:.2f} is not 1" in shown(line)
    assert "[red]" in line


@pytest.mark.parametrize("low, high", [(0.9, 1.1), (1.01, 1.04), (0.96, 0.99), (NAN, NAN)])
def test_a_mean_ratio_near_1_or_without_an_interval_is_not_mentioned(low, high):
    assert "rho" not in step_line(metrics(mismatch__rho_mean_low=low, mismatch__rho_mean_high=high))


def test_an_evaluation_is_shown_on_the_steps_that_have_one():
    assert "held-out 61.5%" in shown(step_line(metrics(eval__accuracy=0.6152)))
    assert "held-out" not in step_line(metrics())


def test_skipped_updates_are_shown():
    assert "2 updates skipped" in shown(step_line(metrics(policy__skipped_updates=2.0)))
    assert "skipped" not in step_line(metrics(policy__skipped_updates=0.0))


def test_a_metric_that_is_not_a_number_is_shown_as_such():
    assert "KL nan" in shown(step_line(metrics(mismatch__kl_k3=NAN)))


def test_where_nobody_watches_there_are_lines_and_no_bar():
    console = RunConsole(Console(file=io.StringIO(), width=40, highlight=False))
    console.start(0, 2)
    console.step(metrics())
    console.step(metrics(step=8))
    console.stop()
    lines = console.console.file.getvalue().splitlines()
    assert [line[:9] for line in lines] == ["step    7", "step    8"]  # one line a step, however narrow


def test_where_somebody_watches_a_bar_counts_the_steps():
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True, highlight=False)
    console = RunConsole(terminal)
    console.start(3, 5)
    console.step(metrics())
    assert console._progress.tasks[0].completed == 4
    console.stop()
    assert "4/5" in terminal.file.getvalue()


def test_by_default_a_run_speaks_on_standard_error(capsys):
    RunConsole().say("hello")
    captured = capsys.readouterr()
    assert captured.err == "hello\n" and captured.out == ""
