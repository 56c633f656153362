"""Evaluations, ours and those of harnesses, compared as pairs. The harness files were written by lm-evaluation-harness 0.4.13
with the mini model (see tests/data/evaluate/README.md)."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from rich.console import Console

from trueup.evaluate.compare import compare, compare_files
from trueup.evaluate.harness import read_results
from trueup.evaluate.match import MismatchedSets
from trueup.evaluate.records import Answer, Evaluation, Item, content_key
from trueup.evaluate.text import print_comparison

DATA = Path(__file__).parent / "data" / "evaluate"
SUMS = {name: next((DATA / f"lmeval-{name}").glob("samples_local_sums_*")) for name in ("hf", "vllm", "noisy")}
LIGHTEVAL = {task: next((DATA / "lighteval").rglob(f"details_local_{task}-*")) for task in ("sums", "pick")}
PICK = {name: next((DATA / f"lmeval-{name}").glob("samples_local_pick_*")) for name in ("hf", "vllm")}


def evaluation(name: str, scores, wrap: str = "{}", **settings) -> Evaluation:
    """One problem a row of `scores`, one answer a value."""
    items = []
    for number, row in enumerate(scores):
        question, reference = wrap.format(f"What is {number} + {number}?"), str(2 * number)
        answers = [Answer(f"#### {number}", float(correct)) for correct in np.atleast_1d(row)]
        items.append(Item(content_key(question, reference), question, reference, answers))
    return Evaluation(name, items, settings)


def pair_of(result: dict, first: str, second: str) -> dict:
    return next(pair for pair in result["pairs"] if (pair["a"], pair["b"]) == (first, second))


# --- records ----------------------------------------------------------------------------------------------------------


def test_an_evaluation_comes_back_from_its_file_as_it_was(tmp_path):
    key = content_key("Why?", "42")
    answers = [
        Answer("so", 1.0, "42", [3, 4], "stop", [-0.5, -0.25], [1.5, 0.0]),
        Answer("", 0.5, ids=[], logprobs=[]),  # an empty response is not a missing one
    ]
    written = Evaluation(
        "x", [Item(key, "Why?", "42", answers, [1, 2]), Item(key, "Why?", "42", answers)], {"top_k": -1}
    )
    path = tmp_path / "engine=vllm" / "x.parquet"
    written.save(path)
    assert Evaluation.load(path) == written
    assert [file.name for file in path.parent.iterdir()] == ["x.parquet"]


def test_other_versions_and_other_files_are_refused_by_name(tmp_path):
    path = tmp_path / "x.parquet"
    evaluation("x", [1]).save(path)
    table = pyarrow.parquet.read_table(path)
    later = table.replace_schema_metadata({"trueup.eval": json.dumps({"schema": 7, "name": "x", "settings": {}})})
    pyarrow.parquet.write_table(later, path)
    with pytest.raises(ValueError, match="schema 7; this trueup reads schema 1"):
        Evaluation.load(path)
    pyarrow.parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ValueError, match="not an evaluation of trueup"):
        Evaluation.load(path)
    with pytest.raises(ValueError, match="its columns are a"):
        read_results(path)


def test_the_key_of_a_problem_is_its_content():
    worked = "They eat 3 * 4 = <<3*4=12>>12.\n#### 1,012"
    assert content_key("How  many\neggs? ", "1012") == content_key("How many eggs?", worked)
    assert content_key("How many eggs?", "1013") != content_key("How many eggs?", "1012")
    assert content_key("a", "b, c") != content_key("a", "b c")  # a comma counts, except within a number
    assert content_key("caf\u00e9", "1") == content_key("cafe\u0301", "1")
    assert len(content_key("a", "b")) == 16


# --- comparing --------------------------------------------------------------------------------------------------------


def test_a_pair_is_the_table_of_discordant_problems():
    a = evaluation("a", [1] * 60 + [1] * 20 + [0] * 5 + [0] * 15)
    b = evaluation("b", [1] * 60 + [0] * 20 + [1] * 5 + [0] * 15)
    result = compare([a, b])
    pair = result["pairs"][0]
    assert (pair["both_right"], pair["only_a"], pair["only_b"], pair["both_wrong"]) == (60, 20, 5, 15)
    assert pair["difference"] == pytest.approx(-0.15)
    assert pair["p"] == pair["p_holm"] == pytest.approx(0.0040773153305053711)  # 2 P(Binomial(25, 1/2) <= 5)
    assert pair["low"] < -0.15 < pair["high"] < 0 and pair["resolved"]
    assert pair["verdict"].startswith("b is 15.0 points below a (95% interval -25.0 to -6.0), p = 0.0041")
    assert [engine["accuracy"] for engine in result["engines"]] == [0.8, 0.65]
    json.dumps(result, allow_nan=False)


def test_what_is_not_resolved_is_said_with_its_size():
    a = evaluation("a", [1] * 150 + [1] * 12 + [0] * 9 + [0] * 29)
    b = evaluation("b", [1] * 150 + [0] * 12 + [1] * 9 + [0] * 29)
    pair = compare([a, b])["pairs"][0]
    assert not pair["resolved"] and pair["more_items"] == pair["items_needed"] - 200 > 1000
    unseen = f"{100 * pair['minimum_detectable']:.1f}"
    assert "no difference resolved between a and b: -1.5 points seen" in pair["verdict"]
    assert f"at this size anything under {unseen} points would stay unseen" in pair["verdict"]
    assert f"{pair['items_needed']:,} problems, {pair['more_items']:,} more" in pair["verdict"]
    # Equivalence is the 90% interval: narrower than the 95% one.
    assert 0.015 < pair["equivalent_within"] < max(-pair["low"], pair["high"])


def test_equal_results_leave_a_bound_and_no_false_precision():
    pair = compare([evaluation("a", [1, 0] * 50), evaluation("b", [1, 0] * 50)])["pairs"][0]
    assert (pair["p"], pair["difference"], pair["items_needed"], pair["identical"]) == (1.0, 0.0, None, 1.0)
    assert pair["high"] == pytest.approx(0.037, abs=1e-3) and pair["equivalent_within"] > 0.02
    assert "they score the same on all 100 problems" in pair["verdict"]


def test_p_is_corrected_over_pairs_but_the_null_run_is_none_of_them():
    rng = np.random.default_rng(0)
    right = rng.random(200) < 0.6
    flipped = [right ^ (rng.random(200) < share) for share in (0.02, 0.1, 0.3)]
    first = evaluation("a", right, engine="a", run="first")
    again = evaluation("a, again", flipped[0], engine="a", run="again")
    result = compare([again, first, evaluation("b", flipped[1], engine="b"), evaluation("c", flipped[2], engine="c")])
    names = [(pair["a"], pair["b"], pair["null"]) for pair in result["pairs"]]
    assert names == [("a", "b", False), ("a", "c", False), ("a", "a, again", True), ("b", "c", False)]
    family = [pair for pair in result["pairs"] if not pair["null"]]
    assert min(pair["p_holm"] for pair in family) == pytest.approx(3 * min(pair["p"] for pair in family))
    null = result["pairs"][2]
    assert "p_holm" not in null and null["alpha"] == 0.05 and family[0]["alpha"] == pytest.approx(0.05 / 3)
    assert null["verdict"].startswith("the null, a run again in other batches: ")


def test_several_answers_are_compared_by_problem():
    rng = np.random.default_rng(1)
    a, b = (rng.random((80, 4)) < 0.5 for _ in range(2))
    result = compare([evaluation("a", a), evaluation("b", b)])
    pair, (engine, _) = result["pairs"][0], result["engines"]
    better = (b.mean(1) > a.mean(1)).sum(), (b.mean(1) < a.mean(1)).sum()
    assert (pair["better_b"], pair["better_a"]) == better and pair["equal"] == 80 - sum(better)
    assert pair["test"] == "sign-flip-exact" and pair["interval"] == "bootstrap"
    assert pair["difference"] == pytest.approx(b.mean() - a.mean())
    assert engine["interval"] == "bootstrap" and list(engine["pass_at_k"]) == ["1", "2", "4"]
    assert engine["pass_at_k"]["1"]["value"] == pytest.approx(a.mean())
    assert engine["pass_at_k"]["4"]["value"] == pytest.approx(a.any(1).mean())


def test_graded_scores_are_compared_too():
    a, b = evaluation("a", [0.2, 0.5, 0.7] * 10), evaluation("b", [0.4, 0.5, 1.0] * 10)
    result = compare([a, b])
    assert result["graded"] and result["pairs"][0]["test"] == "sign-flip" and result["pairs"][0]["resolved"]


@pytest.mark.parametrize("score", [float("nan"), 37.2])
def test_scores_that_are_no_shares_are_refused(score):
    with pytest.raises(ValueError, match=f"b: 'What is 1 \\+ 1\\?' has the score {score}"):
        compare([evaluation("a", [1, 0]), evaluation("b", [1, score])])


def test_sets_that_differ_are_refused_with_the_difference():
    a, b = evaluation("a", [1] * 10), evaluation("b", [1] * 12)
    b.items = b.items[2:]
    b.items[0] = Item(content_key(b.items[0].question, "5"), b.items[0].question, "5", b.items[0].answers)
    with pytest.raises(MismatchedSets) as refused:
        compare([a, b])
    said = str(refused.value)
    assert "a has 10, b has 10; 7 are in all of them" in said
    assert "in a: 3 ('What is 0 + 0?' -> '0'; 'What is 1 + 1?' -> '2'; 'What is 2 + 2?' -> '4')" in said
    assert "1 questions are the same but their references differ: 'What is 2 + 2?' has '4' and '5'" in said
    assert "--common" in said
    result = compare([a, b], common=True)
    assert (result["items"], result["left_out"]) == (7, 6)
    assert any("6 problems are not in all" in note for note in result["notes"])


def test_nothing_in_common_cannot_be_compared():
    a, b = evaluation("a", [1] * 3), evaluation("b", [1] * 9)
    b.items = b.items[5:]
    with pytest.raises(MismatchedSets, match="0 are in all of them"):
        compare([a, b], common=True)


def test_an_instruction_around_the_question_does_not_hide_it():
    a, b = evaluation("a", [1] * 15), evaluation("b", [1] * 14 + [0], wrap="Q: {}\n\nThink step by step.")
    result = compare([a, b])
    assert result["items"] == 15 and result["matched"] == "contained" and result["pairs"][0]["only_a"] == 1
    assert any("contained" in note for note in result["notes"])


def test_a_question_that_fits_two_is_not_guessed():
    a, b = evaluation("a", [1]), evaluation("b", [1])
    a.items = [Item(content_key(q, "1"), q, "1", [Answer("", 1.0)]) for q in ("one and", "and two")]
    b.items = [Item(content_key(q, "1"), q, "1", [Answer("", 1.0)]) for q in ("one and two", "and")]
    with pytest.raises(MismatchedSets, match="0 are in all of them"):
        compare([a, b])


def test_repeated_problems_are_paired_in_order():
    a, b = evaluation("a", [1, 0, 1]), evaluation("b", [1, 0, 0])
    for one in (a, b):
        one.items += evaluation("more", [0 if one is a else 1]).items
    result = compare([a, b])
    assert (result["items"], result["duplicates"]) == (4, 1)
    assert (result["pairs"][0]["only_a"], result["pairs"][0]["only_b"]) == (1, 1)
    b.items.pop()
    with pytest.raises(MismatchedSets, match="a has 4, b has 3"):
        compare([a, b])


def test_different_numbers_of_answers_are_refused():
    with pytest.raises(MismatchedSets, match="a 1, b 2"):
        compare([evaluation("a", [1, 0]), evaluation("b", [[1, 0], [0, 0]])])
    ragged = evaluation("r", [1, 0])
    ragged.items[0].answers *= 3
    with pytest.raises(ValueError, match="1 to 3 answers"):
        compare([ragged, evaluation("a", [1, 0])])


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files, filter", [(SUMS, None), (SUMS, "last"), (PICK, None)])
def test_accuracy_is_the_one_that_the_harness_reported(files, filter):
    for path in files.values():
        (found,) = read_results(path, filter=filter)
        results = json.loads(next(path.parent.glob("results_*.json")).read_text())["results"][found.settings["task"]]
        reported = results[f"{found.settings['metric']},{found.settings['filter']}"]
        assert np.mean([item.score for item in found.items]) == pytest.approx(reported)
        assert found.settings["reported"] == reported


def test_two_backends_of_lm_eval_are_compared():
    result = compare_files([SUMS["hf"], SUMS["vllm"], f"damaged={SUMS['noisy']}"])
    assert [engine["name"] for engine in result["engines"]] == ["lm-eval hf:bf16", "lm-eval vllm:bf16", "damaged"]
    assert result["items"] == 64 and result["notes"] == []
    pair = pair_of(result, "lm-eval hf:bf16", "damaged")
    rows = [[json.loads(line) for line in SUMS[name].read_text().splitlines()] for name in ("hf", "noisy")]
    scores = [[row["exact_match"] for row in of if row["filter"] == "hash"] for of in rows]
    assert pair["only_a"] == sum(a > b for a, b in zip(*scores)) == 18
    assert pair["difference"] == pytest.approx(-18 / 64)
    assert pair_of(result, "lm-eval hf:bf16", "lm-eval vllm:bf16")["identical"] == 1.0


def test_our_evaluation_agrees_with_lm_eval_of_the_same():
    """The same 64 sums, asked by `trueup eval` and by lm-eval with both of its backends."""
    result = compare_files([DATA, SUMS["hf"], SUMS["vllm"]])
    accuracy = {engine["name"]: engine["accuracy"] for engine in result["engines"]}
    assert len(accuracy) == 5 and set(accuracy.values()) == {28 / 64}
    assert result["matched"] == "content"
    for pair in result["pairs"]:
        assert pair["only_a"] == pair["only_b"] == 0
    assert pair_of(result, "vllm:bf16", "lm-eval vllm:bf16")["identical"] == 1.0


def test_a_real_difference_is_one_table_whoever_asked():
    """The mini model against one with noise in its weights: by lm-eval and by `trueup eval`."""
    pairs = [
        compare_files([SUMS["hf"], SUMS["noisy"]])["pairs"][0],
        compare_files(
            [
                DATA / "transformers-bf16.parquet",
                DATA / "noisy",
            ]
        )["pairs"][0],
    ]
    for pair in pairs:
        assert [pair[name] for name in ("both_right", "only_a", "only_b", "both_wrong")] == [10, 18, 0, 36]
        assert pair["p"] == pytest.approx(2 / 2**18) and pair["resolved"]
    assert pairs[0]["low"] == pairs[1]["low"] and pairs[0]["minimum_detectable"] == pairs[1]["minimum_detectable"]


def test_multiple_choice_is_the_choice_of_highest_likelihood():
    (found,) = read_results(PICK["hf"])
    rows = [json.loads(line) for line in PICK["hf"].read_text().splitlines()]
    for item, row in zip(found.items, rows):
        likelihood = [float(response[0]) for response in row["filtered_resps"]]
        ordered = sorted(likelihood)
        chosen = row["doc"]["choices"][int(np.argmax(likelihood))]
        assert item.answers[0].text == chosen and item.reference == row["doc"]["choices"][row["doc"]["gold"]]
        assert item.answers[0].correct == (chosen == item.reference) == row["acc"]
        assert item.answers[0].margins == [pytest.approx(ordered[-1] - ordered[-2])]
    assert compare_files(list(PICK.values()))["pairs"][0]["both_right"] == 42


def test_metrics_and_filters_are_chosen_by_name():
    (found,) = read_results(PICK["hf"], metric="acc_norm")
    assert found.settings["metric"] == "acc_norm"
    with pytest.raises(ValueError, match="no metric 'bleu' with one number a problem; it has acc, acc_norm"):
        read_results(PICK["hf"], metric="bleu")
    with pytest.raises(ValueError, match="no filter 'strict'; it has hash, last"):
        read_results(SUMS["hf"], filter="strict")


@pytest.mark.parametrize("task, ours", [("sums", SUMS["hf"]), ("pick", PICK["hf"])])
def test_lighteval_agrees_with_its_report_and_with_lm_eval(task, ours):
    (found,) = read_results(LIGHTEVAL[task])
    assert np.mean([item.score for item in found.items]) == pytest.approx(found.settings["reported"])
    result = compare_files([ours, LIGHTEVAL[task]])
    pair = result["pairs"][0]
    assert (pair["a"], pair["b"], result["matched"]) == ("lm-eval hf:bf16", "lighteval mini", "content")
    assert pair["only_a"] == pair["only_b"] == 0 and pair["identical"] == 1.0
    assert len(found.items[0].prompt_ids) > 5


def test_equal_answers_that_score_differently_are_the_verifiers_doing():
    """lighteval's `em` wants the whole text to be the answer; lm-eval's filter reads the number after #."""
    result = compare_files([SUMS["hf"], LIGHTEVAL["sums"]], metric="exact_match,em")
    assert result["pairs"][0]["judged_differently"] == 28
    assert any("28 answers are the same but scored differently" in note for note in result["notes"])


def test_flat_details_of_older_lighteval(tmp_path):
    rows = {
        "example": ["2+2=", "Sky?"],
        "full_prompt": ["Answer: 2+2=", "Answer: Sky?"],
        "predictions": ["['4']", "[-3.5, -1.25]"],
        "gold": ["['4']", "[]"],
        "choices": [[], [" red", " blue"]],
        "gold_index": [[], [1]],
        "metrics": [{"qem": 1.0, "acc": None}, {"qem": None, "acc": 1.0}],
    }
    for number, metric in enumerate(("qem", "acc")):
        path = tmp_path / f"{metric}.parquet"
        pyarrow.parquet.write_table(pa.table({name: [column[number]] for name, column in rows.items()}), path)
    (written_one,), (chosen,) = (read_results(tmp_path / f"{metric}.parquet") for metric in ("qem", "acc"))
    item = written_one.items[0]
    assert (item.question, item.reference, item.answers[0].text, item.score) == ("2+2=", "4", "4", 1.0)
    item = chosen.items[0]
    assert (item.reference, item.answers[0].text, item.answers[0].margins) == ("blue", "blue", [2.25])


def sample(**changes) -> dict:
    """A row as lm-eval writes it."""
    row = {
        "doc_id": 0,
        "doc": {"question": "2+2=", "answer": "4"},
        "target": "4",
        "arguments": {"gen_args_0": {"arg_0": "Q: 2+2=", "arg_1": {"until": ["\n"], "do_sample": True, "top_p": 0.9}}},
        "resps": [["it is 4"]],
        "filtered_resps": ["4"],
        "filter": "none",
        "metrics": ["exact_match"],
        "exact_match": 1.0,
    }
    return row | changes


def written(tmp_path: Path, *rows: dict) -> Path:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_shapes_of_lm_eval_rows(tmp_path):
    (found,) = read_results(written(tmp_path, sample()))
    answer = found.items[0].answers[0]
    assert (answer.text, answer.extracted, answer.correct) == ("it is 4", "4", 1.0)
    assert found.settings["temperature"] == 1.0 and found.settings["top_p"] == 0.9 and found.settings["stop"] == ["\n"]

    # Repeats with a score each; an answer that the filter did not find.
    repeats = sample(resps=[["4", "5"]], filtered_resps=[["4", "[invalid]"]], exact_match=[1.0, 0.0])
    (found,) = read_results(written(tmp_path, repeats))
    assert [(a.text, a.correct, a.extracted) for a in found.items[0].answers] == [("4", 1.0, "4"), ("5", 0.0, None)]

    # Before 0.4.4: arguments as lists, no list of metrics, no filter; a boolean score.
    old = {name: value for name, value in sample().items() if name not in ("metrics", "filter", "exact_match")}
    old |= {"arguments": [["Q: 2+2=", {"until": ["\n"]}]], "acc": True, "doc_hash": "x"}
    (found,) = read_results(written(tmp_path, old))
    assert found.settings["metric"] == "acc" and found.items[0].answers[0].correct == 1.0

    # acc takes the likeliest choice, acc_norm the likeliest per character.
    choices = {f"gen_args_{n}": {"arg_0": "2+2=", "arg_1": text} for n, text in enumerate((" 5", " the number four"))}
    flat = [["-4.0", "False"], ["-9.0", "False"]]
    row = sample(target="1", arguments=choices, resps=[[one] for one in flat], filtered_resps=flat)
    row |= {"metrics": ["acc", "acc_norm"], "acc": 0.0, "acc_norm": 1.0}
    for metric, chosen in (("acc", "5"), ("acc_norm", "the number four")):
        (found,) = read_results(written(tmp_path, row), metric=metric)
        assert found.items[0].answers[0].text == chosen and found.items[0].reference == "the number four"
        assert found.items[0].score == (metric == "acc_norm")

    # Contexts differ instead of choices (winogrande); the document has no question of its own.
    contexts = {"gen_args_0": {"arg_0": "Ann", "arg_1": " fell."}, "gen_args_1": {"arg_0": "Bob", "arg_1": " fell."}}
    resps = [[["-4.0", "False"]], [["-2.0", "False"]]]
    flat = [response[0] for response in resps]
    row = sample(doc={"id": 7}, target="1", arguments=contexts, resps=resps, filtered_resps=flat)
    (found,) = read_results(written(tmp_path, row))
    assert found.items[0].answers[0].text == found.items[0].reference == "Bob"

    for value in ([0, [0.1, 0.9]], [1, 0]):  # what corpus metrics collect is no score of a problem
        with pytest.raises(ValueError, match="no metric with one number a problem; found mcc"):
            read_results(written(tmp_path, sample(metrics=["mcc"], mcc=value)))
    with pytest.raises(ValueError, match=r"its first row has a, b\); expected parquet"):
        read_results(written(tmp_path, {"a": 1, "b": 2}))


def test_documents_that_share_their_question_are_told_apart(tmp_path):
    first = sample(doc={"question": "Who?", "passage": "Ann came."})
    second = sample(doc={"question": "Who?", "passage": "Bob came."})
    (found,) = read_results(written(tmp_path, first, second))
    (swapped,) = read_results(written(tmp_path, second, first))
    assert len({item.key for item in found.items}) == 2
    assert [item.key for item in found.items] == [item.key for item in reversed(swapped.items)]


def test_a_report_that_its_samples_do_not_bear_out_is_noted(tmp_path):
    for file in SUMS["hf"].parent.iterdir():
        shutil.copy(file, tmp_path)
    path = tmp_path / SUMS["hf"].name
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["doc_id"] < 60))
    result = compare_files([path, SUMS["vllm"]], common=True)
    assert any("its harness reported 0.4375, its samples average" in note for note in result["notes"])


def test_prompts_that_differ_around_the_same_questions_are_noted(tmp_path):
    (tmp_path / "chat").mkdir()
    plain = written(tmp_path, sample())
    templated = written(tmp_path / "chat", sample(arguments={"gen_args_0": {"arg_0": "<|user|>2+2=", "arg_1": {}}}))
    notes = compare_files([f"plain={plain}", f"chat={templated}"])["notes"]
    assert any("the questions are the same, but not the prompts" in note for note in notes)
    assert compare_files([f"a={plain}", f"b={plain}"])["notes"] == []


def test_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_results(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="holds no results"):
        read_results(tmp_path)
    with pytest.raises(ValueError, match="holds 2 files of results; name the one to compare") as refused:
        read_results(DATA / "lmeval-hf")
    assert PICK["hf"].name in str(refused.value)
    assert read_results(DATA / "lmeval-noisy")[0].name == "lm-eval hf:bf16"
    assert [found.name for found in read_results(DATA)][-1] == "vllm:bf16"
    with pytest.raises(ValueError, match="one evaluation in"):
        compare_files([SUMS["hf"]])


def test_equal_names_are_told_apart_by_their_paths():
    result = compare_files([SUMS["hf"], SUMS["noisy"]])
    assert [engine["name"] for engine in result["engines"]] == [
        "lm-eval hf:bf16 (lmeval-hf)",
        "lm-eval hf:bf16 (lmeval-noisy)",
    ]


def test_a_null_run_belongs_to_the_first_run_of_its_own_folder(tmp_path):
    for folder in "ab":
        for run in ("first", "again"):
            name = "x" if run == "first" else "x, again"
            evaluation(name, [1, 0, 1], engine="x", run=run).save(tmp_path / folder / f"{run}.parquet")
    result = compare_files([tmp_path / "a", tmp_path / "b"])
    pairs = [(pair["a"], pair["b"], pair["null"]) for pair in result["pairs"]]
    assert pairs == [("x (a)", "x (b)", False), ("x (a)", "x, again (a)", True), ("x (b)", "x, again (b)", True)]


def test_one_evaluation_alone_is_shown_without_pairs():
    console = Console(width=80, record=True, file=io.StringIO())
    print_comparison(compare([evaluation("only", [[1, 0], [1, 1]])]), console)
    said = console.export_text()
    assert "75.0%" in said and "pass@2" in said and "100.0%" in said


def test_the_tables_say_what_the_numbers_are():
    console = Console(width=80, record=True, file=io.StringIO())
    print_comparison(compare_files([SUMS["hf"], SUMS["noisy"]]), console)
    said = console.export_text()
    for words in (
        "64 problems, one answer each",
        "43.8%",
        "only in the first",
        "-39.1 to -17.2",
        "p, exact",
        "is 28.1 points below",
    ):
        assert words in said
