"""The embedded task: hand-written problems, disjoint splits, a verifier that nothing but the right number passes."""

import pytest

from trueup.tasks.base import Problem
from trueup.tasks.sums import Sums, from_spec, is_heldout, work_out

PROBLEM = Problem(prompt="17+5+23=", answer="45")


def test_a_worked_out_sum_adds_from_left_to_right():
    assert work_out([17, 5, 23]) == "17+5=22;22+23=45;#45"
    assert work_out([99, 99]) == "99+99=198;#198"


def test_the_worked_out_response_is_right():
    task = Sums()
    for problem in task.heldout[:50]:
        numbers = [int(number) for number in problem.prompt.rstrip("=").split("+")]
        assert problem.answer == str(sum(numbers))
        assert task.score(problem, work_out(numbers)) == 1.0


@pytest.mark.parametrize("response", ["17+5=22;22+23=45;#45", "#45", "any reasoning, even none\n#45"])
def test_only_the_number_after_the_hash_is_graded(response):
    assert Sums().score(PROBLEM, response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "#",
        "45",
        "#46",
        "#450",
        "#045",
        "#+45",
        "#-45",
        "#45 ",
        "# 45",
        "#45\n",
        "#45;",
        "#45.0",
        "#45#45",
        "#44#45",
        "#45#",
        "#٤٥",
        "17+5=22;22+23=45;",
        "#40+5",
    ],
)
def test_nothing_but_the_right_number_scores(response):
    assert Sums().score(PROBLEM, response) == 0.0


def test_a_problem_depends_on_seed_split_and_index_alone():
    one, other = Sums(seed=3), Sums(seed=3, heldout=10)
    assert one.train[123_456] == other.train[123_456]
    assert one.heldout[:10] == list(other.heldout)
    assert one.train[0] != Sums(seed=4).train[0]
    assert one.heldout[0] == Sums(seed=4).heldout[0]
    assert one.train[0] != one.train[1]
    assert one.train[-1] == one.train[999_999]


def test_the_generator_has_not_changed():
    assert [problem.prompt for problem in Sums(seed=0).train[:2]] == ["73+99+34+72=", "27+32+68+49="]
    assert [problem.prompt for problem in Sums(seed=0).heldout[:2]] == ["24+77+26+30=", "53+29+54+58="]


def test_no_train_problem_of_any_seed_is_a_heldout_problem_of_any_other():
    for task in (Sums(seed=0), Sums(seed=1), from_spec("sums:addends=3,digits=1", seed=2)):
        assert not any(is_heldout(problem.prompt) for problem in task.train[:300])
        assert all(is_heldout(problem.prompt) for problem in task.heldout[:300])


def test_prompts_have_equal_length_and_the_asked_shape():
    task = from_spec("sums:addends=5,digits=3", seed=0, heldout=7)
    assert len(task.heldout) == 7
    assert len(task.train) == 1_000_000
    for problem in task.heldout:
        assert [len(number) for number in problem.prompt.rstrip("=").split("+")] == [3] * 5


def test_the_smallest_task_still_has_both_splits():
    task = from_spec("sums:addends=2,digits=2")
    assert task.train[0].prompt != task.heldout[0].prompt


@pytest.mark.parametrize("index", [512, -513])
def test_an_index_outside_says_what_there_is(index):
    with pytest.raises(IndexError, match="of 512: ask 0 to 511"):
        Sums().heldout[index]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm8k", "not a sums task"),
        ("sums:adends=3", "'adends=3' is not a parameter"),
        ("sums:addends", "'addends' is not a parameter"),
        ("sums:addends=-3", "'addends=-3' is not a parameter"),
        ("sums:addends=3,addends=4", "addends is given twice"),
        ("sums:addends=1", "addends=1 is not in 2..64"),
        ("sums:digits=0", "digits=0 is not in 1..18"),
        ("sums:addends=3,digits=1,", "'' is not a parameter"),
        ("sums:addends=2,digits=1", "too few problems"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(spec, message):
    with pytest.raises(ValueError, match=message):
        from_spec(spec)


def test_an_empty_heldout_split_is_refused():
    with pytest.raises(ValueError, match="heldout=0"):
        Sums(heldout=0)
