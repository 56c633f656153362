"""Why two evaluations differ: where responses part, how answers flip, and causes that are no arithmetic, each planted."""

import math

import pytest
from chromium import BINARY, Chromium

from trueup.evaluate.checks import DIFFERS, NOTE, SAME, UNTESTED, checklist
from trueup.evaluate.compare import compare
from trueup.evaluate.divergence import diverge, first_difference, flip_kind
from trueup.evaluate.page import in_words
from trueup.evaluate.records import Answer, Evaluation, Item, content_key
from trueup.evaluate.why import print_why, why, write_page
from trueup.learner.model import load_tokenizer
from trueup.samplers import Sampling
from trueup.tasks import load_task
from trueup.tasks.base import Problem
from trueup.tasks.prompts import encode_prompt

SETTINGS = {
    "model": "some/model",
    "task": "gsm8k",
    "engine": "transformers:bf16",
    "precision": "bf16",
    "temperature": 0.0,
    "top_k": -1,
    "max_tokens": 60,
    "stop": [],
    "stop_token_ids": [1],
    "bos_token_id": 5,
    "tokenizer_sha256": "a",
    "chat_template_sha256": "t",
    "model_sha256": "m",
    "generation_config": {},
}


def evaluation(name, answers, prompts=None, **settings) -> Evaluation:
    """answers: one Answer, or a list of them, a problem."""
    items = []
    for place, given in enumerate(answers):
        question = f"question {place}"
        prompt = prompts[place] if prompts else [5, 40 + place, 7]
        given = given if isinstance(given, list) else [given]
        items.append(Item(content_key(question, "4"), question, "4", given, prompt))
    return Evaluation(name, items, SETTINGS | settings)


def answer(
    text="so 4\n#### 4", correct=1.0, ids=(1,), margins=None, finish="stop", extracted="4", logprobs=None
) -> Answer:
    return Answer(text, correct, extracted, list(ids), finish, logprobs, margins)


def named(evaluations, status=DIFFERS) -> dict[str, str]:
    return {check.name: check.evidence for check in checklist(evaluations) if check.status == status}


# --- where they part -------------------------------------------------------------------------------------------------


def test_first_difference_of_sequences():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference("", "") is None


def test_a_move_is_the_sum_of_leads_where_they_part_and_the_difference_where_they_agree():
    one = evaluation(
        "a", [answer(ids=[7, 8, 9, 1], margins=[3.0, 1.0, 0.2, 2.0]), answer(ids=[7, 1], margins=[4.0, 4.0])]
    )
    two = evaluation(
        "b", [answer(ids=[7, 8, 6, 1], margins=[3.5, 0.9, 0.1, 9.0]), answer(ids=[7, 1], margins=[4.0, 4.0])]
    )
    found = diverge(one, two)
    assert (found.responses, found.identical, found.positions, found.lengths) == (2, 1, [2], [4])
    assert found.moves == [pytest.approx(0.3)]
    # Agreeing positions: moves .5, .1, 0, 0; fewer than 200 are close, so all count, and the largest is the bound.
    assert found.noise_bound == pytest.approx(0.5)
    assert found.tie_bound is None and found.calls == {"tie": 1}  # within the noise of this pair
    assert not found.flips


def test_noise_is_measured_where_a_flip_could_happen():
    """200 close positions move by .1, 300 confident ones by 5: the bound is that of the close ones."""
    one = evaluation("a", [answer(ids=[7] * 500, margins=[1.0] * 200 + [20.0] * 300)])
    two = evaluation("b", [answer(ids=[7] * 500, margins=[1.1] * 200 + [25.0] * 300)])
    assert diverge(one, two).noise_bound == pytest.approx(0.1)


def test_calls_compare_with_the_null_and_then_with_the_pair():
    close = [1.0] * 300
    first = evaluation("a", [answer(ids=[7] * 300 + [8], margins=close + [move]) for move in (0.04, 0.2, 3.0)])
    again = evaluation(
        "a, again", [answer(ids=[7] * 300 + [8], margins=[1.05] * 300 + [move]) for move in (0.04, 0.2, 3.0)]
    )
    other = evaluation("b", [answer(ids=[7] * 300 + [9], margins=[1.4] * 300 + [0.0]) for _ in range(3)])
    found = diverge(first, other, [(first, again)])
    assert found.tie_bound == pytest.approx(0.05, abs=0.01) and found.noise_bound == pytest.approx(0.4)
    assert found.calls == {"tie": 1, "noise": 1, "disagreement": 1}
    assert "1 is a near-tie" in in_words(found) and "1 is a real disagreement" in in_words(found)


def test_without_ids_texts_are_compared_and_without_margins_calls_are_unknown():
    one = evaluation("a", [Answer("so 4", 1.0), Answer("six", 0.0)])
    two = evaluation("b", [Answer("so 5", 0.0), Answer("six", 0.0)])
    found = diverge(one, two)
    assert (found.unit, found.positions, found.calls) == ("characters", [3], {"unknown": 1})
    assert [flip.gained for flip in found.flips] == [False]


def test_problems_are_paired_by_what_they_ask_not_by_place():
    one = evaluation("a", [answer(ids=[2]), answer(ids=[3])])
    two = evaluation("b", [answer(ids=[2]), answer(ids=[3])])
    two.items.reverse()
    assert diverge(one, two).identical == 2


RIGHT = answer("a b\n#### 4")


@pytest.mark.parametrize(
    "wrong, kind",
    [
        (answer("a c\n#### 5", 0.0, extracted="5"), "reasoning"),
        (answer("a c so it is 4", 0.0, extracted=None), "format"),
        (answer("a c so it", 0.0, extracted=None, finish="length"), "truncation"),
        (answer("a b\n", 0.0, extracted=None), "stop"),
        (answer("a b\n#### 4\n#### 9", 0.0, extracted="9"), "stop"),
        (answer("a b\n#### 4", 0.0), "verifier"),
        (answer("a c\n#### 4", 0.0, extracted="4"), "format"),
    ],
)
def test_a_flip_is_named_by_what_the_wrong_answer_lacks(wrong, kind):
    found = diverge(evaluation("a", [RIGHT]), evaluation("b", [wrong]))
    assert [flip.kind for flip in found.flips] == [kind]
    back = diverge(evaluation("b", [wrong]), evaluation("a", [RIGHT]))
    assert [(flip.kind, flip.gained) for flip in back.flips] == [(kind, True)]


def test_choices_part_in_the_choice_taken():
    one = evaluation(
        "a", [answer("trout", ids=[3, 4], margins=[0.5]), answer("rain", ids=[2], margins=[1.0])], kind="choice"
    )
    two = evaluation(
        "b", [answer("eagle", 0.0, ids=[6], margins=[0.25]), answer("rain", ids=[2], margins=[1.5])], kind="choice"
    )
    found = diverge(one, two)
    assert (found.unit, found.identical, found.moves) == ("choices", 1, [0.75])
    assert [flip_kind(flip.pair, "choices") for flip in found.flips] == ["reasoning"]


# --- causes that are no arithmetic -----------------------------------------------------------------------------------


def test_nothing_planted_nothing_found():
    answers = [answer(ids=[7, 8, 1]), answer(ids=[7, 1])]
    found = checklist([evaluation("a", answers), evaluation("b", answers, engine="vllm:bf16")])
    assert not [check for check in found if check.status == DIFFERS]
    assert {
        "doubled BOS",
        "system prompt",
        "chat template",
        "tokenizer",
        "stop",
        "sampling settings",
        "max length",
        "model",
    } <= {check.name for check in found if check.status == SAME}


@pytest.fixture(scope="module")
def chat():
    """The mini tokenizer with a chat template that puts in a system message of its own, as some do."""
    tokenizer = load_tokenizer("mini")
    tokenizer.chat_template = (
        "{% if messages[0].role != 'system' %}<S>Be kind.</S>{% endif %}"
        "{% for m in messages %}<{{ m.role[0] | upper }}>{{ m.content }}</{{ m.role[0] | upper }}>{% endfor %}"
        "{% if add_generation_prompt %}<A>{% endif %}"
    )
    return tokenizer


def prompts_of(chat, *system) -> list[list[int]]:
    return [
        encode_prompt(Problem([*system, {"role": "user", "content": f"what is {place}+{place}?"}], ""), chat)
        for place in range(4)
    ]


def test_a_doubled_bos_is_named_in_one_engine_and_in_all():
    answers = [answer() for _ in range(4)]
    plain = [[5, 40 + place, 7] for place in range(4)]
    doubled = [[5, *ids] for ids in plain]
    one, two = evaluation("a", answers, plain), evaluation("b", answers, doubled)
    for pair in ([one, two], [two, one]):
        assert "doubled BOS" in named(pair) and not named(pair).keys() - {"doubled BOS"}
    both = [evaluation("a", answers, doubled), evaluation("b", answers, doubled)]
    assert "every prompt of b begins with the beginning-of-sequence token 5 twice" in [
        c.evidence for c in checklist(both)
    ]
    # One token more in front that is not doubled is another fault.
    assert "BOS" in named([evaluation("a", answers, [ids[1:] for ids in plain]), one])


def test_a_changed_system_prompt_is_named_and_shown(chat):
    answers = [answer() for _ in range(4)]
    one = evaluation("a", answers, prompts_of(chat))
    two = evaluation("b", answers, prompts_of(chat, {"role": "system", "content": "Be brief."}))
    found = [check for check in checklist([one, two], chat.decode) if check.status == DIFFERS]
    assert [check.name for check in found] == ["system prompt"]
    assert "a has 'kind', b has 'brief'" in found[0].evidence and "4 of 4 prompts" in found[0].evidence


def test_a_missing_generation_prompt_and_another_template_are_the_chat_template(chat):
    answers = [answer() for _ in range(4)]
    whole = prompts_of(chat)
    cut = [ids[:-3] for ids in whole]
    assert set(named([evaluation("a", answers, whole), evaluation("b", answers, cut)])) == {"chat template"}
    other = [[9, *ids[1:]] for ids in whole]
    assert "chat template" in named(
        [evaluation("a", answers, whole), evaluation("b", answers, other, chat_template_sha256="u")]
    )
    # Another question in one prompt is neither.
    one_other = [whole[0], whole[1][:-8] + [20] + whole[1][-7:], *whole[2:]]
    assert set(named([evaluation("a", answers, whole), evaluation("b", answers, one_other)])) == {"prompt"}


def test_prompts_that_are_not_known_are_untested_not_the_same():
    one, two = (evaluation(name, [answer(), answer()]) for name in "ab")
    for item in two.items:
        item.prompt_ids = None
    assert {"doubled BOS", "system prompt", "chat template"} <= set(named([one, two], UNTESTED))
    # A harness's logs hold the texts: those say something, but not whether a token was added in front of them.
    for each, text in ((one, "x"), (two, "x")):
        each.settings["prompt_texts_sha256"] = text
    assert set(named([one, two], UNTESTED)) == {"doubled BOS"} and "system prompt" in named([one, two], SAME)
    two.settings["prompt_texts_sha256"] = "y"
    assert "prompt" in named([one, two])


def texts(*written) -> list[Answer]:
    return [answer(text, ids=range(len(text))) for text in written]


def test_a_different_stop_string_is_named_from_settings_and_from_texts():
    long = texts("one\n\ntwo", "three\n\nfour", "five\n\nsix", "seven")
    short = texts("one", "three", "five", "seven")
    assert "stop strings: a has []" in named([evaluation("a", long), evaluation("b", short, stop=["\n\n"])]).get(
        "stop", ""
    )
    one, two = evaluation("a", long), evaluation("b", short)
    for pair in ([one, two], [two, one]):
        assert r"b stops at '\n\n', a goes on past it (3 responses)" in named(pair)["stop"]
    kept = texts("one\n\n", "three\n\n", "five\n\n", "seven")
    assert (
        r"a keeps '\n\n' at the end of its texts, b cuts it"
        in named([evaluation("a", kept), evaluation("b", short)])["stop"]
    )


def test_a_stop_string_is_told_from_a_model_that_wavers_between_ending_and_going_on():
    """Three short answers that end in the stop id are the model's own doing; and without ids, so few could be."""
    long = [answer(f"{word}\n\nmore", ids=[7, 8, 9, 1]) for word in ("one", "two", "three")]
    short = [answer(word, ids=[7, 1]) for word in ("one", "two", "three")]
    assert "stop" not in named([evaluation("a", long), evaluation("b", short)])
    bare = {"stop": None, "stop_token_ids": None}
    assert "stop" not in named([evaluation("a", long, **bare), evaluation("b", short, **bare)])
    many_long = [Answer(f"{word}\n\nmore {word}", 1.0) for word in range(20)]
    many_short = [Answer(f"{word}", 1.0) for word in range(20)]
    one, two = evaluation("a", many_long, **bare), evaluation("b", many_short, **bare)
    assert r"b stops at '\n\n" in named([one, two])["stop"]
    # The same answers, but b does write the string elsewhere.
    many_short[0] = Answer("0\n\nother", 1.0)
    assert "stop" not in named([one, evaluation("b", many_short, **bare)])


def test_a_stop_string_is_found_in_sampled_answers_that_share_no_beginning():
    """30 problems; a writes two paragraphs each time, b never, in other words."""
    one = evaluation("a", texts(*(f"first {place}.\n\nthen {place}" for place in range(30))), temperature=1.0)
    two = evaluation("b", texts(*(f"begin with {place}." for place in range(30))), temperature=1.0)
    assert r"b stops at '\n\n', a goes on" in named([one, two])["stop"]


def test_responses_cut_at_the_limit_are_no_stop_string():
    cut = [answer(text, finish="length", ids=range(10, 15)) for text in ("one ", "two ", "three ", "four ")]
    whole = [answer(text, ids=range(10, 19)) for text in ("one .a", "two .b", "three .c", "four .d")]
    assert set(named([evaluation("a", cut), evaluation("b", whole)])) == {"max length"}


def test_an_engine_that_goes_on_past_a_stop_id_is_named():
    one = evaluation("a", [answer("x", ids=[7, 1]), answer("y", ids=[8, 1])])
    two = evaluation("b", [answer("x", ids=[7, 1, 9, 9]), answer("y", ids=[8, 1, 9])])
    assert "b goes on past the stop id 1 in 2 responses" in named([one, two])["stop"]


@pytest.fixture(scope="module")
def warm(engines, tokenizer):
    """warm(top_k, seed) -> the mini model's answers at temperature 2, as somebody would log them: the settings name no top_k."""
    from trueup.learner.model import Policy, load_causal_lm

    sampler = engines("transformers:bf16")
    sampler.load(Policy(load_causal_lm("mini", "bf16", "eager")).weights(), 0)
    prompts = [encode_prompt(problem, tokenizer) for problem in load_task("sums").heldout[:60]]

    def run(name: str, top_k: int, seed: int, **settings) -> Evaluation:
        stops = (tokenizer.eos_token_id,)
        sampling = Sampling(max_tokens=60, stop_token_ids=stops, n=2, temperature=2.0, top_k=top_k, seed=seed)
        rollouts = sampler.generate(prompts, sampling)
        answers = [[] for _ in prompts]
        for row, group in enumerate(rollouts.group.tolist()):
            ids = rollouts.response(row).tolist()
            start = int(rollouts.offsets[row])
            logprobs = rollouts.sampler_logprobs[start : start + len(ids)].tolist()
            answers[group].append(Answer(tokenizer.decode(ids), 0.0, None, ids, rollouts.finish_reason[row], logprobs))
        found = evaluation(name, answers, prompts, temperature=2.0, **settings)
        del found.settings["top_k"]
        return found

    return run


def test_top_k_from_a_generation_config_is_found_in_the_answers_alone(warm):
    checkpoint = {"generation_config": {"top_k": 20}}
    full, cut = warm("full", -1, 0, **checkpoint), warm("cut", 20, 1, **checkpoint)
    for pair in ([full, cut], [cut, full]):
        evidence = named(pair)["generation_config"]
        assert "acts in cut" in evidence and "the checkpoint's generation_config says top_k=20" in evidence
    for seed in (2, 3, 4):
        assert "generation_config" not in named([full, warm("same", -1, seed, **checkpoint)])


def test_top_k_in_the_settings_is_named_with_the_checkpoints_wish():
    one = evaluation("a", [answer()], generation_config={"top_k": 20})
    two = evaluation("b", [answer()], generation_config={"top_k": 20}, top_k=20)
    assert (
        "top_k: a -1, b 20; the checkpoint's generation_config says top_k=20" in named([one, two])["sampling settings"]
    )
    # Where both were told otherwise, it still deserves a word.
    assert "the checkpoint asks for top_k=20" in named([one, one], NOTE)["generation_config"]


def test_a_repetition_penalty_is_found_where_greedy_answers_part():
    """At 20 first differences b takes a new token where a repeats one of the prompt."""
    repeated, new = answer("repeated", ids=[8, 5, 1]), answer("new", ids=[8, 60, 1])
    one, two = evaluation("a", [repeated] * 20), evaluation("b", [new] * 20)
    assert "a repetition penalty acts in b" in named([one, two])["sampling settings"]
    # Half in each direction is what rounding does.
    assert not named([evaluation("a", [repeated, new] * 10), evaluation("b", [new, repeated] * 10)])


def test_other_limits_models_and_vocabularies_are_named():
    base = evaluation("a", [answer()])
    for changes, cause in [
        ({"max_tokens": 30}, "max length"),
        ({"model_sha256": "n"}, "model"),
        ({"tokenizer_sha256": "b"}, "tokenizer"),
        ({"temperature": 1.0}, "sampling settings"),
    ]:
        assert set(named([base, evaluation("b", [answer()], **changes)])) == {cause}
    assert "precision" in named([base, evaluation("b", [answer()], precision="int8")], NOTE)


def test_equal_texts_of_other_ids_are_the_tokenizer():
    one = evaluation("a", [answer("same", ids=[2, 3, 1]) for _ in range(5)])
    two = evaluation("b", [answer("same", ids=[4, 1]) for _ in range(5)])
    assert "5 of 5 equal texts" in named([one, two])["tokenizer"]
    # Only the stop token more: one engine returns it, the other does not.
    bare = evaluation("b", [answer("same", ids=[2, 3]) for _ in range(5)])
    assert "tokenizer" not in named([one, bare])


def test_many_cut_responses_are_noted():
    one = evaluation("a", [answer(finish="length"), answer()])
    assert "a 50.0%" in named([one, one], NOTE)["truncation"]


# --- the whole -------------------------------------------------------------------------------------------------------


HOSTILE = "</script><script>document.title='hit'</script><img src=x onerror=alert(1)> \u202e #### 5"


@pytest.fixture
def compared():
    long = "step " * 300
    first = evaluation(
        "transformers:bf16",
        [
            answer(f"We add {place} and 1.\n#### {place}", 1.0, [7, 8, 9, 1], [2.0, 1.0, 0.05, 3.0])
            for place in range(20)
        ]
        + [answer(long + "so 4\n#### 4", 1.0, [7] * 300 + [8, 1], [2.0] * 302)],
        run="first",
    )
    again = evaluation("transformers:bf16, again", [item.answers[0] for item in first.items], run="again")
    other = evaluation(
        "vllm:int8",
        [
            answer(f"We sum {place} and 1.\n#### 3", 0.0, [7, 8, 6, 1], [2.1, 1.1, 0.04, 3.0], extracted="3")
            for place in range(19)
        ]
        + [answer(HOSTILE, 0.0, [7, 8, 6, 1], [2.1, 1.1, 4.0, 3.0], extracted="5")]
        + [answer(long + "so 5\n#### 5", 0.0, [7] * 300 + [9, 1], [2.1] * 302, extracted="5")],
        run="first",
        engine="vllm:int8",
        precision="int8",
    )
    evaluations = [first, again, other]
    return evaluations, compare(evaluations), why(evaluations)


def test_why_holds_every_pair_of_the_comparison_and_the_null(compared):
    evaluations, comparison, found = compared
    pairs = {(pair["a"], pair["b"]) for pair in comparison["pairs"]}
    assert (
        {(one.first, one.second) for one in found.divergences}
        == pairs
        == {
            ("transformers:bf16", "transformers:bf16, again"),
            ("transformers:bf16", "vllm:int8"),
        }
    )
    assert not found.causes and len(found.divergences[1].flips) == 21
    import json

    assert json.loads(json.dumps(found.to_json()))["causes"] == []


def test_the_terminal_says_why(compared, capsys):
    from rich.console import Console

    print_why(compared[2], Console(width=120))
    said = capsys.readouterr().out
    assert "0 of 21 responses (0.0%) are the same token for token" in said
    assert "0 gained, 21 lost; through 21 reasoning" in said
    assert "compute" in said and "stop" in said


@pytest.mark.skipif(BINARY is None, reason="no Chromium here")
def test_the_page_is_self_contained_and_fits_every_window(compared, tmp_path):
    evaluations, comparison, found = compared
    page = write_page(tmp_path / "report.html", evaluations, comparison, found)
    assert "<img" not in page.read_text() and page.read_text().count("<script>") == 1
    browser = Chromium(tmp_path / "profile")
    try:
        for width in (1280, 400):
            for scheme in ("light", "dark"):
                browser.open(page, width, scheme)
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                assert browser.requests() == [page.resolve().as_uri()] and not browser.errors()
        assert "hit" not in browser.evaluate("document.title")
        assert browser.evaluate("document.querySelectorAll('details.response').length") == 21
        # Both texts are there, and the mark stands where they part.
        marks = browser.evaluate("[...document.querySelectorAll('.side mark')].slice(0, 2).map(m => m.textContent)")
        assert marks == ["add", "sum"]
        sides = browser.evaluate("[...document.querySelectorAll('.side .written')].slice(0, 2).map(m => m.textContent)")
        assert sides[0].startswith("We add 0 and 1.") and sides[1].startswith("We sum 0 and 1.")
        assert browser.evaluate("document.body.textContent").count("characters the same]") == 2
    finally:
        browser.close()


def test_rounding_is_measured_on_the_null_and_on_engines_of_one_precision(compared):
    first, again, other = compared[0]
    exact = compared[2].divergences[1]
    assert exact.tie_bound == 0.0 and exact.calls.get("tie", 0) == 0  # the null repeated exactly
    assert all(math.isfinite(move) for move in exact.moves)
    # A second bf16 engine, whose margins lie .2 beside the first one's, shows how far rounding reaches.
    near = evaluation(
        "vllm:bf16",
        [
            answer(item.answers[0].text, ids=item.answers[0].ids, margins=[m + 0.2 for m in item.answers[0].margins])
            for item in first.items
        ],
        run="first",
        engine="vllm:bf16",
    )
    found = {(one.first, one.second): one for one in why([first, again, near, other]).divergences}
    assert all(one.tie_bound == pytest.approx(0.2) for one in found.values())
    assert found["transformers:bf16", "vllm:int8"].calls["tie"] == 19  # moves of .05 + .04
    assert found["transformers:bf16", "transformers:bf16, again"].null
