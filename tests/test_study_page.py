"""What a study says: its numbers against hand-written run directories, and its pages."""

import json

import chromium
import pytest
from test_study import TINY, write

from trueup.study import load_study
from trueup.study.markdown import markdown
from trueup.study.page import page
from trueup.study.results import gather
from trueup.study.runs import all_runs


@pytest.fixture(scope="module")
def twelve_arms(tmp_path_factory):
    """Results of a study of twelve arms and three seeds whose run directories were written by hand; one arm collapses, one
    run failed."""
    folder = tmp_path_factory.mktemp("twelve")
    grid = {"sampler.precision": ["fp32", "bf16"], "correction": ["none", "ppo-is", "is", "tis", "mis", "icepop"]}
    given = {key: value for key, value in TINY.items() if key != "arms"} | {"grid": grid, "seeds": 3}
    loaded = load_study(write(folder, given | {"against": {"by": "correction"}}))
    runs = all_runs(loaded, folder / "out")
    for run in runs:
        run.folder.mkdir(parents=True)
        if run.arm.name == "bf16-mis" and run.seed == 2:
            run.note(state="failed", says="ValueError: <img src=x onerror=alert(1)>", seconds=1.0)
            continue
        (run.folder / "config.yaml").write_text(run.config.to_yaml())
        run.note(state="done", accuracy_before=0.25, seconds=9.0)
        with open(run.folder / "metrics.jsonl", "w") as file:
            for step in range(1, 13):
                file.write(json.dumps(row(step, run.seed, run.arm.name)) + "\n")
    return gather(loaded, runs)


def row(step: int, seed: int, arm: str) -> dict:
    gap = 1e-3 if arm.startswith("bf16") else 1e-6
    made = {
        "step": step,
        "time/step": 2.0,
        "mismatch/tokens": 100.0,
        "policy/entropy": 0.1 / step,
        "policy/grad_norm": 1.0,
    }
    made |= {"mismatch/kl_k3": gap * step, "mismatch/prob_diff_mean": gap, "mismatch/ess_token": 1 - gap}
    made |= {"mismatch/ess_sequence": 1 - 9 * gap, "reward/mean": 0.3, "response/length_mean": 36.0 + step % 3}
    made |= {"correction/truncated_fraction": gap, "correction/masked_fraction": gap}
    if step % 6 == 0:
        made["eval/accuracy"] = 0.5 + 0.01 * seed + 0.001 * (step % 5) - (0.2 + 0.001 * seed) * (arm == "bf16-none")
    return made


def test_results_by_hand(twelve_arms):
    arm = next(arm for arm in twelve_arms["arms"] if arm["name"] == "bf16-none")
    assert [run["final"] for run in arm["runs"]] == pytest.approx([0.302, 0.311, 0.32])
    assert arm["outcomes"]["final"]["mean"] == pytest.approx(0.311)
    # 0.25 at step 0, 0.301 at step 6, 0.302 at step 12
    assert arm["runs"][0]["area"] == pytest.approx((0.25 / 2 + 0.301 + 0.302 / 2) / 2)
    assert arm["measured"]["correction/cut"]["mean"] == pytest.approx(2e-3)
    assert arm["runs"][0]["tokens"] == 1200 and arm["runs"][0]["seconds"] == 24
    assert arm["curves"]["eval/accuracy"]["steps"] == [0, 6, 12]
    comparison = next(row for row in twelve_arms["comparisons"]["final"] if row["a"] == "bf16-none")
    assert comparison["b"] == "fp32-none" and comparison["mean"] == pytest.approx(-0.201)
    assert comparison["p_t_holm"] < 0.001 and comparison["p_flip"] == 0.25
    short = next(row for row in twelve_arms["comparisons"]["final"] if row["a"] == "bf16-mis")
    assert short["seeds"] == [0, 1]
    line = twelve_arms["against"]["outcomes"]["final"]["none"]
    assert [point["x"] for point in line] == pytest.approx([1e-6, 1e-3])


def test_the_pages_say_what_was_found_and_what_could_not_be(twelve_arms):
    text, html = markdown(twelve_arms), page(twelve_arms)
    for said in (
        "bf16-none against fp32-none",
        "lower by 20.1 points",
        "35 of 36 runs done, 1 failed",
        "smallest p that the exact permutation test can give is 0.5",  # two seeds in common with the failed run's arm
        "trueup train arms/bf16-tis.yaml seed=0",
        "Same start",
    ):
        assert said in text and said in html, said


def test_the_page_escapes_what_it_was_given(twelve_arms):
    nasty = "<script>alert(1)</script>"
    html = page(
        twelve_arms | {"title": nasty, "question": nasty, "notes": nasty, "task": nasty, "model": nasty, "file": nasty}
    )
    assert nasty not in html and "<img src=x" not in html
    assert html.count("&lt;script&gt;alert(1)") >= 6 and "&lt;img src=x" in html
    assert "<script>" not in markdown(twelve_arms | {"title": nasty, "question": nasty, "notes": nasty})


def test_the_page_of_a_study_that_has_just_begun(twelve_arms):
    arms = [
        arm
        | {"runs": [{"seed": 0, "state": "waiting", "folder": "f", "log": "l", "steps": 0}], "curves": {}, "done": 0}
        | {"outcomes": {}, "measured": {}, "seconds": None, "tokens": None}
        for arm in twelve_arms["arms"]
    ]
    empty = {name: [{"a": "x", "b": "y", "seeds": []}] for name in twelve_arms["comparisons"]}
    begun = twelve_arms | {"arms": arms, "comparisons": empty, "shared": [], "against": None}
    for made in (page(begun), markdown(begun)):
        assert "No two arms have two seeds in common yet" in made


@pytest.mark.skipif(chromium.BINARY is None, reason="needs Chromium")
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (400, "dark")])
def test_a_browser_shows_the_page_whole(twelve_arms, tmp_path, width, scheme):
    file = tmp_path / "index.html"
    file.write_text(page(twelve_arms))
    browser = chromium.Chromium(tmp_path / "profile")
    try:
        browser.open(file, width, scheme)
        assert browser.errors() == [] and len(browser.requests()) == 1
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelectorAll('svg.plot').length") == 14
        assert browser.evaluate("document.querySelectorAll('.matrix svg').length") >= 12 * 7
    finally:
        browser.close()
