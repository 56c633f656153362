"""Tasks: specs, prompts and rewards, on small data that lies beside the tests."""

import json
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trueup.tasks import Problem, load_task
from trueup.tasks.prompts import decode_response, encode_prompt

DATA = Path(__file__).parent / "data"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)


def tokenizer(template: str | None = None, bos: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    """One token a character, and one each for <s> and </s>; optionally put around every text."""
    vocabulary = {"<s>": 0, "</s>": 1, "?": 2} | {chr(code): code for code in range(32, 127) if chr(code) != "?"}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    if bos or eos:
        parts = ["<s>"] * bos + ["$A"] + ["</s>"] * eos
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(parts), special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="?")
    made.chat_template = template
    return made


def text_of(ids: list[int]) -> str:
    return "".join({0: "<s>", 1: "</s>"}.get(token) or chr(token) for token in ids)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]


@pytest.mark.parametrize(
    ("prompt", "settings", "expected"),
    [
        ("2+2=", {}, "2+2="),
        ("2+2=", {"bos": True}, "<s>2+2="),
        ("2+2=", {"bos": True, "eos": True}, "<s>2+2="),
        ("<s>2+2=", {"bos": True}, "<s>2+2="),
        ("2+2=", {"template": TEMPLATE}, "<user>2+2=<model>"),
        (CHAT, {"template": TEMPLATE}, "<system>Be brief.<user>2+2=<model>"),
        ("2+2=", {"template": "{{ bos_token }}" + TEMPLATE}, "<s><user>2+2=<model>"),
        ("2+2=", {"template": "{{ bos_token }}" + TEMPLATE, "bos": True}, "<s><user>2+2=<model>"),
        ("2+2=", {"template": TEMPLATE, "bos": True}, "<s><user>2+2=<model>"),
    ],
)
def test_a_prompt_is_templated_where_there_is_a_template_and_has_the_start_token_at_most_once(
    prompt, settings, expected
):
    assert text_of(encode_prompt(Problem(prompt, "4"), tokenizer(**settings))) == expected


def test_prompts_that_cannot_be_encoded_say_why():
    with pytest.raises(ValueError, match="needs a chat template"):
        encode_prompt(Problem(CHAT, "4"), tokenizer())
    with pytest.raises(ValueError, match=r"refuses a prompt with the roles \['system', 'user'\]: no system"):
        encode_prompt(Problem(CHAT, "4"), tokenizer("{{ raise_exception('no system') }}"))
    with pytest.raises(ValueError, match="no tokens"):
        encode_prompt(Problem("", "4"), tokenizer())


def test_a_response_is_decoded_without_special_tokens_and_with_its_spaces():
    assert decode_response([0, *map(ord, "a , b  ."), 1], tokenizer()) == "a , b  ."


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm9k", "Did you mean 'gsm8k'"),
        ("reasoning-gym:countdown", "Did you mean 'reasoning_gym'"),
        ("", "known: sums, gsm8k, reasoning_gym, jsonl"),
        ("reasoning_gym", "names no dataset"),
        ("reasoning_gym:countdwon", "near names: countdown"),
        ("reasoning_gym:countdown,min_number=3", "Did you mean 'min_numbers'"),
        ("reasoning_gym:countdown,seed=3", "has no parameter 'seed'"),
        ("reasoning_gym:countdown,min_numbers", "write key=value"),
        ("reasoning_gym:countdown,min_numbers=9,max_numbers=3", "refuses min_numbers=9, max_numbers=3"),
        ("jsonl:", "names no file"),
        ("jsonl:a.jsonl,heldout=", "names no file"),
    ],
)
def test_a_spec_that_cannot_be_read_says_what_could_be_meant(spec, message):
    with pytest.raises(ValueError, match=message):
        load_task(spec)


def test_nothing_held_out_is_refused():
    with pytest.raises(ValueError, match="heldout=0 leaves nothing"):
        load_task("sums", heldout=0)


def test_sums_are_loaded_by_name():
    task = load_task("sums:addends=3,digits=2", seed=1, heldout=7)
    assert task.name == "sums" and len(task.heldout) == 7
    assert task.score(Problem("1+2=", "3"), "#3") == 1.0


def folder(path: Path) -> Path:
    for split in ("train", "test"):
        (path / f"{split}.jsonl").write_text((DATA / f"gsm8k_{split}_small.jsonl").read_text())
    return path


def test_gsm8k_reads_a_folder_and_rewards_the_number_after_the_last_mark(tmp_path):
    task = load_task(f"gsm8k:{folder(tmp_path)}", heldout=5)
    assert (len(task.train), len(task.heldout)) == (20, 5)
    problem = task.heldout[0]
    assert problem.answer == "18" and "#### <number>" in problem.prompt
    rewards = {
        "16 - 3 - 4 = 9, 9 * 2 = 18.\n#### 18": 1.0,
        "#### $18.00": 1.0,
        "#### 17\nNo:\n#### 18": 1.0,
        "#### 18\nNo:\n#### 17": 0.0,
        "18": 0.0,
        "#### eighteen": 0.0,
        "#### 18 or 17": 0.0,
        "": 0.0,
    }
    assert {response: task.score(problem, response) for response in rewards} == rewards


def test_gsm8k_solutions_score_1_against_themselves_and_0_against_other_numbers():
    task = load_task(f"gsm8k:{DATA / 'gsm8k_train_small.jsonl'}")
    problems = [*task.train, *task.heldout]
    for problem in problems:
        for other in problems:
            assert task.score(problem, f"So.\n#### {other.answer}") == (problem.answer == other.answer)


def test_gsm8k_names_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no .*train.jsonl and no .*test.jsonl"):
        load_task(f"gsm8k:{tmp_path}")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1?", "answer": "It is 2. #### 2"}\n\n{"question": "1+1?", "answer": "two"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:3: the answer ends in 'two'; expected ####"):
        load_task(f"gsm8k:{file}")
    file.write_text('{"question": "1+1?"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: expected the texts question and answer, found question"):
        load_task(f"gsm8k:{file}")


def test_gsm8k_comes_from_the_hub_through_the_datasets_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'trueup\[hub\]'"):
        load_task("gsm8k")
    rows = {
        split: [json.loads(line) for line in (DATA / f"gsm8k_{split}_small.jsonl").open()]
        for split in ("train", "test")
    }
    library = types.ModuleType("datasets")
    library.load_dataset = lambda name, subset: rows if (name, subset) == ("openai/gsm8k", "main") else None
    monkeypatch.setitem(sys.modules, "datasets", library)
    task = load_task("gsm8k")
    assert (len(task.train), len(task.heldout)) == (20, 20) and task.heldout[0].answer == "18"


def write(path: Path, *rows: dict | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_jsonl_takes_text_or_messages_and_the_other_usual_names(tmp_path):
    train = write(
        tmp_path / "train.jsonl",
        {"prompt": "2+2=", "answer": 4, "source": "mine"},
        {"prompt": CHAT, "answer": "4"},
        {"question": "Half?", "answer": r"So \boxed{\frac{1}{2}}."},
        {"problem": "Capital of France?", "solution": "Paris"},
    )
    write(tmp_path / "test.jsonl", {"prompt": "3+3=", "answer": "6"})
    task = load_task(f"jsonl:{train},heldout=test.jsonl")
    assert [problem.answer for problem in task.train] == ["4", "4", r"\frac{1}{2}", "Paris"]
    assert task.train[1].prompt == CHAT and task.heldout[0].prompt == "3+3="
    assert task.score(task.train[0], "4") == task.score(task.train[0], r"It is \boxed{4.0}.") == 1.0
    assert task.score(task.train[2], "<answer>0.5</answer>") == task.score(task.train[3], "paris") == 1.0
    assert task.score(task.train[0], "It is 4, I think") == task.score(task.train[3], "London") == 0.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"promt": "2+2=", "answer": "4"}, "no prompt: expected one of .* found promt, answer; should .*'prompt'"),
        ({"prompt": "2+2="}, "no answer: expected one of answer, solution, found prompt"),
        ({"prompt": "2+2=", "answer": None}, r"no answer: .* found prompt, answer \(null\)"),
        ({"prompt": "2+2=", "answer": " "}, "the answer is ' '; expected text or a number"),
        ({"prompt": "2+2=", "answer": ["4"]}, r"the answer is \['4'\]"),
        ({"prompt": "", "answer": "4"}, "the prompt is ''; expected text or a list of chat messages"),
        ({"prompt": [], "answer": "4"}, "expected text or a list of chat messages"),
        ({"prompt": [{"role": "human", "content": "2+2="}], "answer": "4"}, "is no chat message"),
        ({"prompt": [{"role": "assistant", "content": "4"}], "answer": "4"}, "ends with the assistant's message"),
        ('{"prompt": ', "not JSON"),
        ('["2+2=", "4"]', "list .* expected an object"),
    ],
)
def test_a_bad_jsonl_row_is_named_by_file_and_line(tmp_path, row, message):
    file = write(tmp_path / "rows.jsonl", {"prompt": "1+1=", "answer": "2"}, "", row)
    with pytest.raises(ValueError, match=f"rows.jsonl:3: .*{message}"):
        load_task(f"jsonl:{file}")


def test_jsonl_holds_out_a_share_that_depends_on_nothing_but_the_prompts(tmp_path):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(200)]
    task = load_task(f"jsonl:{write(tmp_path / 'a.jsonl', *rows, *rows)}", seed=1)
    train, heldout = ({problem.prompt for problem in split} for split in (task.train, task.heldout))
    assert not train & heldout and len(train | heldout) == 200 and 8 <= len(heldout) <= 40
    random.Random(0).shuffle(rows)
    again = load_task(f"jsonl:{write(tmp_path / 'b.jsonl', *rows)}", seed=2)
    assert {problem.prompt for problem in again.heldout} == heldout


def test_jsonl_files_that_cannot_be_split_or_found_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_task(f"jsonl:{tmp_path / 'none.jsonl'}")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        load_task(f"jsonl:{tmp_path}")
    with pytest.raises(ValueError, match="no rows"):
        load_task(f"jsonl:{write(tmp_path / 'empty.jsonl')}")
    one = write(tmp_path / "one.jsonl", {"prompt": "1+1=", "answer": "2"})
    with pytest.raises(ValueError, match="too few to hold one in 10 out"):
        load_task(f"jsonl:{one}")
    with pytest.raises(ValueError, match="nothing is left to train on"):
        load_task(f"jsonl:{one},heldout=one.jsonl")
    two = write(tmp_path / "two.jsonl", {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"})
    with pytest.warns(UserWarning, match="1 rows of .* left out of training"):
        assert [problem.prompt for problem in load_task(f"jsonl:{two},heldout=one.jsonl").train] == ["1+2="]


def test_reasoning_gym_problems_are_a_function_of_seed_and_index():
    first, again, other = (load_task("reasoning_gym:chain_sum", seed=seed, heldout=20) for seed in (0, 0, 1))
    assert again.train[7] == first.train[7] and again.train[7].prompt != again.train[8].prompt
    assert other.train[7] != first.train[7] and other.heldout[:20] == first.heldout[:20]
    assert not {p.prompt for p in first.train[:200]} & {p.prompt for p in first.heldout[:20]}
    assert len(first.heldout) == 20 and len(first.train) > 10_000
    with pytest.raises(IndexError, match="problem 20 of 20"):
        first.heldout[20]


def test_reasoning_gym_is_scored_by_its_own_verifier_in_the_last_answer_tags():
    task = load_task("reasoning_gym:chain_sum,min_terms=2,max_terms=2")
    problem = task.train[0]
    assert "<answer>" in problem.prompt
    assert task.score(problem, f"<answer>1</answer> hm <answer> {problem.answer} </answer>") == 1.0
    assert task.score(problem, problem.answer) == 0.0
    assert task.score(problem, "<answer></answer>") == 0.0
    assert 0 < task.score(problem, f"<answer>about {problem.answer}</answer>") < 1


@pytest.mark.parametrize(
    "dataset",
    ["countdown", "puzzle24", "coin_flip", "binary_matrix", "spiral_matrix", "string_insertion", "n_queens",
     "game_of_life_halting", "complex_arithmetic", "gsm_symbolic", "word_ladder", "basic_arithmetic"],
)  # fmt: skip
def test_reasoning_gym_references_score_1_and_nonsense_scores_little(dataset):
    task = load_task(f"reasoning_gym:{dataset}", heldout=3)
    for problem in task.heldout:
        assert task.score(problem, f"<answer>{problem.answer}</answer>") == 1.0
        for nonsense in ("nan", "nan+nanj", "inf", "", "x", "0 ", "1e99999999", "[", "__import__('os')", "9" * 20_000):
            assert task.score(problem, f"<answer>{nonsense}</answer>") < 0.5


def test_number_puzzles_are_judged_without_running_the_answer(tmp_path):
    trace = tmp_path / "trace"
    task = load_task("reasoning_gym:puzzle24")
    problem = task.train[0]
    assert task.score(problem, f"<answer>{problem.answer}</answer>") == 1.0
    assert task.score(problem, "<answer>6*4*1*1</answer>") == 0.0, "other numbers than the given ones"
    for name in ("puzzle24", "countdown", "binary_matrix", "n_queens", "spiral_matrix", "string_insertion"):
        task = load_task(f"reasoning_gym:{name}")
        assert task.score(task.train[0], f"<answer>[open('{trace}','w')]</answer>") == 0.0
    assert not trace.exists()


@pytest.mark.parametrize("dataset", ["simple_integration", "polynomial_multiplication", "codeio", "composite"])
def test_reasoning_gym_datasets_that_run_code_are_refused_by_name(dataset):
    with pytest.raises(ValueError, match=f"reasoning_gym:{dataset} is not offered: "):
        load_task(f"reasoning_gym:{dataset}")


def test_reasoning_gym_datasets_that_nobody_audited_are_refused_if_they_evaluate(monkeypatch):
    monkeypatch.setattr("trueup.tasks.reasoning_gym.EVALUATES_ITS_OWN", set())
    with pytest.raises(ValueError, match=r"its code calls eval\(\.\.\.\)"):
        load_task("reasoning_gym:bitwise_arithmetic")


def test_reasoning_gym_datasets_that_differ_between_processes_are_refused_unless_hashing_is_fixed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
        load_task("reasoning_gym:ransom_note")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert load_task("reasoning_gym:ransom_note").train[0].prompt


def test_reasoning_gym_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match=r"pip install 'trueup\[gym\]'"):
        load_task("reasoning_gym:countdown")


def test_a_task_asks_for_no_library_that_it_does_not_use():
    check = (
        "import sys; from trueup.tasks import load_task; load_task('sums'); "
        f"load_task('jsonl:{DATA / 'gsm8k_train_small.jsonl'}'); "
        "libraries = {'torch', 'sympy', 'datasets', 'reasoning_gym', 'transformers'} & sys.modules.keys(); "
        "assert not libraries, libraries"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
