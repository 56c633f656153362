"""Judging answers: numbers exactly, formulas by math-verify, nothing evaluated, nothing raised, nothing slow."""

import subprocess
import sys
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.tasks import equivalence
from trueup.tasks.answers import (
    MAX_LENGTH,
    boxed_answer,
    final_answer,
    hashed_answer,
    read_number,
    same_answer,
    tagged_answer,
)
from trueup.tasks.arithmetic import compute

SAME = [
    ("18", "18"),
    ("18", " 18. "),
    ("18", "**18**"),
    ("18", "$18"),
    ("18", r"\$18.00"),
    ("18", "$18$"),
    ("18", "18 dollars"),
    ("18", r"18\text{ cm}"),
    ("3 apples", "3 apple"),
    ("1000", "1,000"),
    ("1000", "1{,}000.0"),
    ("7", "007"),
    ("3", "3.0"),
    ("-5", "-$5"),
    ("-5", "$-5"),
    ("-5", "−5"),
    ("1/2", "0.5"),
    ("0.5", r"\frac{1}{2}"),
    ("-0.5", r"-\dfrac{1}{2}"),
    (".5", "0.50"),
    ("50", "50%"),
    ("50%", "0.5"),
    ("50%", "50 percent"),
    ("1e3", "1000"),
    ("Paris", "paris."),
    (r"\text{Evelyn}", "Evelyn"),
    # math-verify's part
    (r"\sqrt{2}", r"2^{1/2}"),
    ("x+y", "y+x"),
    ("2x^2+1", "1 + 2*x^2"),
    ("18", "12+6"),
    ("(1,2)", "(1, 2)"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("5", "x=5"),
]
DIFFERENT = [
    ("18", "19"),
    ("18", "181"),
    ("18", "-18"),
    ("18", "18 million"),
    ("3 cats", "3 dogs"),
    ("1/3", "0.333333"),
    ("1000", "1,00"),
    ("50", "0.5"),
    ("5", "5 x"),
    ("5", "5 pi"),
    ("10", "10 or 12"),
    ("5", ""),
    ("", ""),
    ("5", "five"),
    ("1/2", "1/0"),
    ("Paris", "pairs"),
    ("no", "on"),
    ("x", "y"),
    (r"\sqrt{2}", r"\sqrt{3}"),
    ("x+y", "x-y"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_answers_that_mean_the_same_are_the_same(gold, answer):
    assert same_answer(gold, answer)
    assert same_answer(answer, gold)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_answers_that_mean_something_else_are_not(gold, answer):
    assert not same_answer(gold, answer)
    assert not same_answer(answer, gold)


def test_numbers_alone_need_no_formula_checker(monkeypatch):
    monkeypatch.setattr("trueup.tasks.answers.equivalent", lambda gold, answer: pytest.fail("asked for two numbers"))
    assert same_answer("1,234.50", "$1234.5")
    assert not same_answer("18", "19")
    assert not same_answer("18", "eighteen, I think")


@given(st.fractions(max_denominator=10**6).filter(lambda value: abs(value) < 10**12))
def test_a_number_is_read_as_the_fraction_that_it_is(value):
    assert read_number(str(value)).value == value
    assert read_number(f"{int(value):,}").value == int(value)


@given(st.integers(min_value=-(10**30), max_value=10**30), st.integers(min_value=-(10**30), max_value=10**30))
def test_integers_are_the_same_only_if_equal(first, second):
    assert same_answer(str(first), f"{second:,}") == (first == second)


PIECES = r"0 1 12 , . $ % / ^ _ { } ( ) [ ] | \ \frac \sqrt \text \boxed{ \pi \sum_ = < + - * ! x y __import__('os') ' "
PIECES += "\n #### <answer> </answer> nan inf 1e999 \u0660 \u221e \ud800 \x00"


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES.split(" ")), max_size=12).map("".join)))
def test_no_text_makes_the_readers_of_answers_raise(text):
    for read in (hashed_answer, boxed_answer, tagged_answer, final_answer, read_number, compute):
        read(text)


@settings(max_examples=40, deadline=None)
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES.split(" ")), max_size=8).map("".join)))
def test_no_text_makes_the_judge_raise(text):
    assert same_answer(r"\frac{x}{2}", text) in (True, False)
    assert same_answer(text, "7") in (True, False)


def test_an_answer_longer_than_the_limit_is_wrong():
    assert not same_answer("1" * (MAX_LENGTH + 1), "1" * (MAX_LENGTH + 1))
    assert read_number("1" * (MAX_LENGTH + 1)) is None


@pytest.fixture
def short_time(monkeypatch):
    """A judge that gives up after half a second, started for the test and gone after it."""
    monkeypatch.setattr(equivalence, "TIMEOUT", 0.5)
    monkeypatch.setattr(equivalence, "_process", None)
    yield
    if equivalence._process:
        equivalence._process.kill()
        equivalence._process.wait()


@pytest.mark.parametrize(
    "bomb", ["9^{9^{9^{9}}}", "99999999!", r"\sum_{i=1}^{10^{12}} i^{i}", "(" * 200 + "1" + ")" * 200]
)
def test_a_formula_that_would_take_forever_is_wrong_in_bounded_time_from_any_thread(short_time, bomb):
    verdicts = []
    start = time.monotonic()
    thread = threading.Thread(target=lambda: verdicts.append(same_answer(r"\sqrt{7}", bomb)))
    thread.start()
    thread.join(60)
    assert verdicts == [False]
    assert time.monotonic() - start < 30
    assert same_answer("x+y", "y+x"), "the next formula must find a judge again"


def test_a_response_that_is_code_is_not_run(tmp_path):
    trace = tmp_path / "trace"
    for code in (
        f"__import__('os').system('touch {trace}')",
        f"open('{trace}','w')",
        rf"\text{{open('{trace}','w')}}",
        rf"\operatorname{{exec}}(\mathrm{{open('{trace}','w')}})",
        f"1+1 if open('{trace}','w') else 2",
    ):
        assert not same_answer("7", code)
        assert not same_answer(r"\frac{x}{7}", code)
        assert not equivalence.equivalent("7", code)
        assert compute(code) is None
    assert not trace.exists()


def test_the_judging_process_has_no_way_from_text_to_code():
    check = """
import os, subprocess, sympy
from trueup.tasks.equivalence import _comparer
same = _comparer()
assert same("0.5", "1/2") and sympy.sympify("-12") == -12 and sympy.sympify("2.5") == 2.5
for attempt in (
    lambda: sympy.sympify("__import__('os').getcwd()"),
    lambda: sympy.sympify("2**10"),
    lambda: os.system("true"),
    lambda: subprocess.run(["true"]),
    lambda: sympy.lambdify(sympy.Symbol("x"), sympy.Symbol("x")),
):
    try:
        attempt()
    except (PermissionError, ValueError, sympy.SympifyError):
        continue
    raise SystemExit("not refused")
"""
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_last_mark_holds_the_answer():
    assert hashed_answer("first #### 3\nthen #### 4 \nmore") == "4"
    assert boxed_answer(r"\boxed{1} and \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert boxed_answer(r"cut short: \boxed{1") is None
    assert tagged_answer("<answer>1</answer> no, <answer> 2\n3 </answer>") == "2\n3"
    assert tagged_answer("</answer><answer>") is None
    assert final_answer("\\boxed{3}, checked.\n#### 4") == "4"
    assert final_answer("#### Step 4\nso \\boxed{5}") == "5"
    assert final_answer("\\boxed{5}\n#### 6\n\\boxed{7") == "6"
    assert final_answer("  Paris ") == "Paris"


def test_arithmetic_is_computed_exactly_and_lists_its_numbers():
    assert compute("(1 + 2) * 3 / 4") == (Fraction(9, 4), [1, 2, 3, 4])
    assert compute("-2-3") == (-5, [2, 3])
    for text in ("2**9", "1/0", "1.5", "x", "f(1)", "True", "1+", "a.b", "[1][0]", "", "(" * 150, "9" * 300):
        assert compute(text) is None
