"""What a run says while it runs: a progress bar, and one line a step."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


def step_line(metrics: dict) -> str:
    """Reward, KL, ESS and the fraction cut, always; what else the step has, after them."""
    cut = metrics.get("correction/truncated_fraction", 0.0) + metrics.get("correction/masked_fraction", 0.0)
    parts = [
        f"step {metrics['step']:>4}",
        f"reward {metrics['reward/mean']:.3f}",
        f"KL {metrics['mismatch/kl_k3']:.1e}",
        f"ESS {metrics['mismatch/ess_token']:.3f}",
        f"cut {cut:.1%}",
        f"len {metrics['response/length_mean']:.0f}",
        f"{metrics['time/step']:.1f} s",
        f"{metrics['throughput/tokens_per_second']:,.0f} tok/s",
    ]
    if metrics.get("policy/skipped_updates"):
        parts.append(f"[yellow]{metrics['policy/skipped_updates']:.0f} updates skipped[/]")
    # E[rho] must be 1 whatever the noise: outside its interval by a clear margin, something is broken.
    low, high = metrics["mismatch/rho_mean_low"], metrics["mismatch/rho_mean_high"]
    if low > 1.05 or high < 0.95:
        parts.append(f"[red]E\\[rho] {metrics['mismatch/rho_mean']:.2f} is not 1[/]")
    if "eval/accuracy" in metrics:
        parts.append(f"[bold]held-out {metrics['eval/accuracy']:.1%}[/]")
    return "  ".join(parts)


class RunConsole:
    """Lines and progress on one console; a bar only where somebody watches."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False)
        self._progress: Progress | None = None

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def start(self, first: int, steps: int) -> None:
        if not self.console.is_terminal:
            return
        columns = [
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        ]
        self._progress = Progress(*columns, console=self.console, transient=True)
        self._task = self._progress.add_task("training", total=steps, completed=first)
        self._progress.start()

    def step(self, metrics: dict) -> None:
        self.console.print(step_line(metrics), soft_wrap=True)
        if self._progress:
            self._progress.advance(self._task)

    def stop(self) -> None:
        if self._progress:
            self._progress.stop()


def print_summary(summary: dict) -> None:
    """What a run has come to, as a table on standard output."""
    last = summary["last"] or {}
    percent = lambda value: "-" if value is None else f"{value:.1%}"  # noqa: E731
    table = Table(show_header=False)
    rows = {
        "held-out greedy accuracy before": percent(summary["accuracy_before"]),
        "held-out greedy accuracy after": percent(summary["accuracy_after"]),
        "tokens/s": f"{last.get('throughput/tokens_per_second', 0):,.0f}",
        "KL(sampler, learner)": f"{last.get('mismatch/kl_k3', float('nan')):.2e}",
        "ESS per token": f"{last.get('mismatch/ess_token', float('nan')):.4f}",
        "ESS per response": f"{last.get('mismatch/ess_sequence', float('nan')):.4f}",
    }
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(f"\n{summary['run']}: {summary['steps']} steps on {summary['sampler']} rollouts", soft_wrap=True)
    console.print(table)
