"""trueup eval, the running half: the same prompts through real engines, continued after a kill, and why they differ."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trueup.evaluate.command import add_options, evaluate_command
from trueup.evaluate.engines import Run
from trueup.evaluate.judge import cut_at_stop, extract
from trueup.evaluate.plan import Plan, problems_of, sha256_of
from trueup.evaluate.records import Evaluation
from trueup.evaluate.run import evaluate_model, make_plan, plan_runs
from trueup.learner.model import MINI
from trueup.samplers import EngineError, Sampling
from trueup.tasks import load_task

DATA = Path(__file__).parent / "data"
SETTINGS = dict(limit=24, max_tokens=60, batch=8)


@pytest.fixture
def planted(tmp_path):
    """The mini model with a generation_config that would change every response, if an engine read it."""
    folder = tmp_path / "planted"
    shutil.copytree(MINI, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps(config | {"do_sample": True, "top_k": 20, "temperature": 0.5, "repetition_penalty": 1.3})
    )
    return folder


def ids_of(evaluation: Evaluation) -> list[list[int]]:
    return [answer.ids for item in evaluation.items for answer in item.answers]


@pytest.mark.engine
def test_a_planted_generation_config_changes_no_engine_and_is_reported(planted, tmp_path, engines, policy, tokenizer):
    results = evaluate_model(
        str(planted), "sums", ["transformers:bf16", "vllm:bf16"], tmp_path / "out", null="none", **SETTINGS
    )
    asked = results[0].settings["prompts_sha256"]
    for result in results:
        assert result.settings["engine_prompts_sha256"] == asked  # the ids that the engine says it saw
        assert result.settings["generation_config"] == {"top_k": 20, "temperature": 0.5, "repetition_penalty": 1.3}
        # The same as engines of the original model, which has no such settings, in one batch.
        sampler = engines(result.name)
        sampler.load(policy.weights(), 0)
        sampling = Sampling(max_tokens=60, stop_token_ids=tuple(result.settings["stop_token_ids"]), temperature=0)
        prompts = [item.prompt_ids for item in result.items]
        rollouts, margins = sampler.generate_with_margins(prompts, sampling)
        plain = [rollouts.response(row).tolist() for row in range(len(rollouts))]
        equal = sum(one == two for one, two in zip(plain, ids_of(result)))
        # Another batch may decide a tie the other way; a penalty of 1.3 would change nearly all of 24.
        assert equal >= 22
        # Greedy: the sampled token is the best, so the runner-up's probability is what the margin leaves it.
        own = rollouts.sampler_logprobs
        assert (margins >= 0).all() and ((own - margins).exp() <= 1 - own.exp() + 1e-5).all()


def test_a_killed_evaluation_continues_where_it_was_and_leaves_no_engine_behind(tmp_path, engines, policy):
    out = tmp_path / "killed"
    program = (
        "import sys; from trueup.evaluate.run import evaluate_model; "
        f"evaluate_model('mini', 'sums', ['transformers:bf16'], {str(out)!r}, null='none', limit=40, max_tokens=60, batch=2, "
        "progress=lambda progress: print(progress.done, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) >= 6:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while (left := engines_at_work(out)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    parts = {file: file.stat().st_mtime_ns for file in (out / "parts").rglob("*.parquet")}
    assert 3 <= len(parts) < 20 and not list(out.glob("*.parquet.tmp"))

    seen, kept = [], {}

    def watch(progress):
        if not seen:
            kept.update({file: file.stat().st_mtime_ns for file in parts})
        seen.append(progress.done)

    settings = dict(null="none", limit=40, max_tokens=60, batch=2)
    (continued,) = evaluate_model("mini", "sums", ["transformers:bf16"], out, progress=watch, **settings)
    assert kept == parts and seen[0] == 2 * len(parts) and seen[-1] == 40
    assert not (out / "parts" / "transformers-bf16").exists()
    # What one engine answers in the same batches without a break.
    sampler = engines("transformers:bf16")
    sampler.load(policy.weights(), 0)
    whole, sampling = [], Sampling(max_tokens=60, stop_token_ids=(1,), temperature=0)
    for start in range(0, 40, 2):
        rollouts = sampler.generate([item.prompt_ids for item in continued.items[start : start + 2]], sampling)
        whole += [rollouts.response(row).tolist() for row in range(2)]
    assert ids_of(continued) == whole
    problems = load_task("sums", heldout=40).heldout
    assert [item.question for item in continued.items] == [problem.prompt for problem in problems]
    # Other settings in the same folder are refused, with the difference.
    with pytest.raises(ValueError, match=r"max_tokens=60, now 30"):
        evaluate_model("mini", "sums", ["transformers:bf16"], out, **settings | {"max_tokens": 30})


def engines_at_work(out: Path) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(out).encode() in words:
            found.append(file.parent.name)
    return found


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"engines": ["vlm:bf16"]}, "Did you mean vllm"),
        ({"engines": ["transformers", "transformers:bf16"]}, "named twice"),
        ({"engines": []}, "no engine is named"),
        ({"samples": 4}, "the same answer"),
        ({"limit": 0}, "nothing to ask"),
        ({"null": "both"}, "expected first, each, none"),
        ({"stop": [""]}, "empty stop string"),
        ({"max_tokens": 100_000}, "positions of the model"),
        ({"task": f"choice:{DATA / 'choice_small.jsonl'}", "samples": 2, "temperature": 1.0}, "scored, not sampled"),
    ],
)
def test_what_cannot_work_is_refused_before_an_engine_starts(tmp_path, changes, words):
    given = dict(model="mini", task="sums", engines=["transformers"], out=tmp_path, limit=4, max_tokens=20) | changes
    with pytest.raises(ValueError, match=words):
        evaluate_model(**given)
    assert not list(tmp_path.glob("*.parquet"))


def test_the_null_answers_the_same_problems_in_other_company():
    plan, asked = plan_of(batch=8)
    first, again = Run("vllm:bf16"), Run("vllm:bf16", again=True)
    one, two = first.chunks(plan, len(asked)), again.chunks(plan, len(asked))
    assert sorted(sum(one, [])) == sorted(sum(two, [])) == list(range(len(asked)))
    assert max(map(len, two)) == 5 and sum(two, []) != sum(one, [])
    company = {row: set(chunk) for chunk in one for row in chunk}
    assert all(set(chunk) != company[row] for chunk in two for row in chunk)
    assert [run.name for run in plan_runs(["transformers", "transformers:fp32"], "each")] == [
        "transformers:bf16",
        "transformers:bf16, again",
        "transformers:fp32",
        "transformers:fp32, again",
    ]


def plan_of(**changes) -> tuple[Plan, object]:
    given = dict(
        model="mini", task="sums", limit=24, samples=1, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, max_tokens=60,
        stop=(), seed=0, batch=8,
    )  # fmt: skip
    return make_plan(**given | changes)


def test_a_plan_is_read_back_as_it_was_written(tmp_path):
    plan, _ = plan_of(stop=("\n\n", ";"))
    plan.save(tmp_path)
    assert Plan.load(tmp_path) == plan
    plan.check_same(tmp_path)


def test_prompt_hashes_depend_on_where_a_row_ends():
    assert sha256_of([[1, 2], [3]]) != sha256_of([[1], [2, 3]])
    assert sha256_of([[1, 2], [3]]) == sha256_of([[1, 2], [3]])


def test_a_single_file_is_asked_whole_and_in_order():
    file = DATA / "gsm8k_test_small.jsonl"
    _, problems = problems_of(f"gsm8k:{file}", 0, None)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [problem.prompt.split("\n\n")[0] for problem in problems] == [row["question"].strip() for row in rows]
    _, few = problems_of(f"gsm8k:{file}", 0, 3)
    assert few == problems[:3]


def test_a_stop_string_ends_text_ids_and_log_probs_together(tokenizer):
    ids = tokenizer.encode("24+77=101;101+26=127;#127")
    text, kept = cut_at_stop(ids, tokenizer, [";#", "="])
    assert text == "24+77" and tokenizer.decode(ids[:kept]) == "24+77="
    assert cut_at_stop(ids, tokenizer, ["x"]) == ("24+77=101;101+26=127;#127", None)
    assert cut_at_stop(ids, tokenizer, []) == ("24+77=101;101+26=127;#127", None)


def test_the_answer_that_the_verifier_read_is_kept():
    task = load_task(f"gsm8k:{DATA / 'gsm8k_test_small.jsonl'}")
    assert extract(task, "so 3\n#### 18") == "18"
    assert extract(task, r"so \boxed{4}") is None  # not the form that it asks for
    assert extract(load_task("sums"), "1+2=3;#3") == "3" and extract(load_task("sums"), "3") is None
    assert extract(Unmarked(), r"#### 3, or \boxed{4}") == "4" and extract(Unmarked(), "so 18") is None


class Unmarked:
    """A task that does not say what it reads: the last marked answer is taken."""


# --- multiple choice ---------------------------------------------------------------------------------------------


def test_choices_are_read_in_every_layout_and_bad_rows_are_named(tmp_path):
    task = load_task(f"choice:{DATA / 'choice_small.jsonl'}")
    assert [problem.answer for problem in task.heldout] == ["46", "35", "seven", "trout", "boil", "71", "rain", "48"]
    assert task.heldout[0].prompt == "Question: 12+34=\nAnswer:"
    assert task.heldout[4].prompt == "She put the kettle on the stove and waited for the water to"
    lettered = load_task(f"choice:{DATA / 'choice_small.jsonl'},letters=true", heldout=1)
    assert lettered.heldout[0].prompt == "12+34=\nA. 36\nB. 46\nC. 47\nD. 56\nAnswer:"
    for row, words in [
        ({"question": "a", "choices": ["x", "y"], "answer": 2}, "index from 0 to 1"),
        ({"question": "a", "choices": ["x"], "answer": 0}, "2 to 26 texts"),
        ({"question": "a", "answer": 0}, "no choices"),
        ({"question": " ", "choices": ["x", "y"], "answer": 0}, "expected text"),
    ]:
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row))
        with pytest.raises(ValueError, match=f"rows.jsonl:1: .*{words}"):
            load_task(f"choice:{file}")
    with pytest.raises(ValueError, match="for trueup eval"):
        _ = task.train
    with pytest.raises(ValueError, match="not a parameter"):
        load_task(f"choice:{DATA / 'choice_small.jsonl'},normal=bytes")


def test_choices_from_parquet_are_those_from_jsonl(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    rows = [json.loads(line) for line in (DATA / "choice_small.jsonl").read_text().splitlines()][:2]
    table = pa.table(
        {"question": [row["question"] for row in rows], "choices": [row["choices"] for row in rows], "answer": [1, 0]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    task = load_task(f"choice:{tmp_path / 'rows.parquet'}")
    assert task.heldout == load_task(f"choice:{DATA / 'choice_small.jsonl'}", heldout=2).heldout


def test_context_and_choice_together_are_the_tokens_of_the_whole_text(tokenizer):
    task = load_task(f"choice:{DATA / 'choice_small.jsonl'}")
    for problem in task.heldout:
        for choice, (context, ids) in zip(problem.extra["choices"], task.encode(problem, tokenizer)):
            assert context + ids == tokenizer.encode(f"{problem.prompt} {choice}", add_special_tokens=False)
            assert tokenizer.decode(ids) == f" {choice}"


def test_a_norm_decides_between_a_short_and_a_long_choice():
    task = load_task(f"choice:{DATA / 'choice_small.jsonl'},norm=bytes")
    assert task.likelihood([-1.0, -2.0], "abcdef") == -0.5
    assert load_task(f"choice:{DATA / 'choice_small.jsonl'}").likelihood([-1.0, -2.0], "abcdef") == -3.0
    assert load_task(f"choice:{DATA / 'choice_small.jsonl'},norm=tokens").likelihood([-1.0, -2.0], "abcdef") == -1.5


@pytest.mark.engine
@pytest.mark.parametrize("spec", ["transformers:bf16", "vllm:bf16"])
def test_the_likeliest_choice_is_taken_and_scored(spec, engines, policy, tokenizer):
    from trueup.evaluate.likelihood import Chooser
    from trueup.learner.model import load_causal_lm

    sampler = engines(spec)
    sampler.load(policy.weights(), 0)
    task = load_task(f"choice:{DATA / 'choice_small.jsonl'}")
    encoded = [task.encode(problem, tokenizer) for problem in task.heldout]
    answers, prompts, tokens = Chooser(sampler, task, task.heldout, encoded)([1, 0, 7], seed=0)
    model = load_causal_lm("mini", "bf16", "eager")
    for row, (answer,), prompt in zip([1, 0, 7], answers, prompts):
        # By hand: log-softmax of the whole text, summed over the choice.
        sums = []
        for context, ids in encoded[row]:
            whole = torch.tensor([context + ids])
            with torch.no_grad():
                logprobs = model(whole).logits[0, :-1].float().log_softmax(-1)
            own = logprobs.gather(1, whole[0, 1:, None])[len(context) - 1 :, 0]
            sums.append(float(own.sum()))
        choices = task.heldout[row].extra["choices"]
        best, second = sorted(sums, reverse=True)[:2]
        assert answer.margins[0] == pytest.approx(best - second, rel=0.03, abs=0.2)
        if best - second > 0.4:  # closer calls than the engines' rounding may fall either way
            assert answer.text == choices[sums.index(best)]
        assert sum(answer.logprobs) == pytest.approx(sums[choices.index(answer.text)], rel=0.03, abs=0.1)
        assert answer.correct == float(answer.text == task.heldout[row].answer)
        assert prompt == encoded[row][0][0]
    assert tokens == sum(len(context) + len(ids) for row in [1, 0, 7] for context, ids in encoded[row])


# --- the verb --------------------------------------------------------------------------------------------------------


def test_sampled_answers_with_a_stop_string_through_the_verb(tmp_path, capsys):
    """K = 2 at temperature 1, cut at `;#`, with the null; then the same command again, which asks nothing any more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    add_options(parser)
    words = "mini --task sums --engine transformers --limit 6 --samples 2 --temperature 1 --stop ;# --max-tokens 40 --batch 4"
    arguments = parser.parse_args([*words.split(), "--out", str(tmp_path), "--json"])
    assert evaluate_command(arguments) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert summary["samples"] == 2 and summary["items"] == 6 and len(summary["engines"]) == 2
    assert summary["pairs"][0]["null"] and set(summary["engines"][0]["pass_at_k"]) == {"1", "2"}
    assert summary["why"]["causes"] == []
    assert "transformers:bf16: 0 of 24 answers so far" in said.err
    first, again = (Evaluation.load(tmp_path / f"transformers-bf16{end}.parquet") for end in ("", "-again"))
    answers = [answer for item in first.items for answer in item.answers]
    assert len(answers) == 12 and not any(";#" in answer.text for answer in answers)
    assert any(answer.finish_reason == "stop" and answer.ids[-1] != 1 for answer in answers)
    assert all(len(answer.ids) == len(answer.logprobs) and answer.margins is None for answer in answers)
    # The null is another draw, of the same problems.
    assert ids_of(first) != ids_of(again) and [item.key for item in first.items] == [item.key for item in again.items]
    assert (tmp_path / "report.html").is_file() and not list(tmp_path.glob("*.log"))
    written = (tmp_path / "transformers-bf16.parquet").stat().st_mtime_ns
    assert evaluate_command(arguments) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert (tmp_path / "transformers-bf16.parquet").stat().st_mtime_ns == written
    # And the files are what compare reads.
    both = parser.parse_args(
        [
            "compare",
            str(tmp_path / "transformers-bf16.parquet"),
            f"b={tmp_path / 'transformers-bf16-again.parquet'}",
            "--json",
        ]
    )
    assert evaluate_command(both) == 0
    assert [engine["name"] for engine in json.loads(capsys.readouterr().out)["engines"]] == ["transformers:bf16", "b"]


@pytest.mark.parametrize(
    "words", ["mini", "mini --task sums", "a b --task sums --engine vllm", "compare", "compare x --task sums"]
)
def test_the_verb_says_what_is_missing(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    add_options(parser)
    with pytest.raises(ValueError, match="trueup eval|one model at a time"):
        evaluate_command(parser.parse_args(words.split()))


def test_an_engine_that_fails_says_why_and_leaves_its_log(tmp_path):
    """Weights that are gone by the time the engine starts: the plan is made, the process cannot load."""
    folder = tmp_path / "model"
    shutil.copytree(MINI, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="transformers:bf16: "):
        evaluate_model(str(folder), "sums", ["transformers"], tmp_path / "out", null="none", **SETTINGS)
    assert (tmp_path / "out" / "transformers-bf16.log").is_file()
