# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks: their own answers are right, others are not, and no text of a model does any harm."""

import ast
import json
import operator
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.rl.config import RolloutsConfig
from jaxmoe.contrib.rl.rewards import (
    REWARDS,
    ArithmeticConfig,
    CountdownConfig,
    MatchConfig,
    PythonConfig,
    Question,
    RewardError,
)
from jaxmoe.contrib.rl.rewards.expressions import MAX_DEPTH, ExpressionError, parse

RECORDS = [{"prompt": f"{n} is ", "answer": f"number {n}"} for n in range(5)]
FUNCTIONS = """
def right(question, text):
    return question.answer in text
def large(question, text):
    return 2
def nothing(question, text):
    return None
def huge(question, text):
    return 10**400
def parsed(question, text):
    return int(text)
def indexed(question, text):
    return text.split()[3]
def looked_up(question, text):
    return {}[text]
number = 3
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with questions and functions."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "q.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
    (folder / "regex.jsonl").write_text(json.dumps({"prompt": "a", "answer": r"\b42\b"}) + "\n")
    (folder / "reward_functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture
def task_of(place, monkeypatch):
    """A function that builds the task of a name."""
    monkeypatch.syspath_prepend(place)
    path = str(place / "q.jsonl")
    configs = {
        "arithmetic": ArithmeticConfig(operators="+-*/", digits=3),
        "countdown": CountdownConfig(numbers=4, largest=25),
        "match": MatchConfig(path=path),
        "python": PythonConfig(path=path, function="reward_functions:right"),
    }
    assert configs.keys() == REWARDS.keys()
    return lambda name: configs[name].build()


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.rows(1)
def test_questions_depend_on_their_arguments_alone_and_their_answers_are_right(name, task_of):
    task, again = task_of(name), task_of(name)
    for step in (0, 7):
        questions = task.prompts(step, 40, 3)
        assert again.prompts(step, 40, 3) == questions and len(questions) == 40
        assert questions != task.prompts(step + 1, 40, 3) and questions != task.prompts(step, 40, 4)
        assert all(task.score(question, f" {question.answer}\n") == 1.0 for question in questions)
        assert all(task.score(question, "") == 0.0 for question in questions)
    for arguments in ((-1, 1, 0), (0, 0, 0), (0, 1, -1)):
        with pytest.raises(ValueError, match="prompts need number >= 1"):
            task.prompts(*arguments)


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40) | st.text("0123456789+-*/() .x", max_size=60))
def test_any_text_has_a_reward_between_0_and_1(text):
    for config in (ArithmeticConfig(), CountdownConfig(), CountdownConfig(partial=0.0)):
        task = config.build()
        assert 0.0 <= task.score(task.prompts(0, 1, 0)[0], text) <= 1.0


def test_arithmetic_of_all_operators_is_exact():
    operations = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    for sign, operation in operations.items():
        config = ArithmeticConfig(operators=sign, digits=2)
        for question in config.build().prompts(0, 50, 0):
            first, second = map(int, question.prompt.removesuffix("=").split(sign))
            assert max(first, second) <= 99
            assert operation(first, second) == int(question.answer)
    task = ArithmeticConfig().build()
    question = Question("3+4=", "7")
    assert [task.score(question, text) for text in ("7", " 7 ", "07", "7.", "8")] == [1, 1, 0, 0, 0]


def test_countdown_counts_the_numbers_and_the_value():
    task = CountdownConfig(partial=0.25).build()
    question = Question("3,5,7=22:", "3*5+7")
    rewards = {
        "7 + 3*5": 1.0,
        "(5*3)+7": 1.0,
        "3+5+7": 0.25,  # all numbers, another value
        "22": 0.0,
        "3*5+7+0": 0.0,  # a number too many
        "15+7": 0.0,
        "3*5+7=22": 0.0,
        "7/(5-5)": 0.0,
        "__import__('os')": 0.0,
        "-3*5+7": 0.0,
        "3**5+7": 0.0,
    }
    assert {text: task.score(question, text) for text in rewards} == rewards
    drawn = task.prompts(0, 30, 0)
    assert all(question.prompt.endswith(f"={parse(question.answer).value}:") for question in drawn)


def test_countdown_solutions_use_the_operators_that_are_allowed_only():
    for allowed in ("-/", "*/", "-", "*"):
        drawn = CountdownConfig(operators=allowed, largest=12).build().prompts(0, 20, 0)
        assert {sign for one in drawn for sign in one.answer if sign in "+-*/"} <= set(allowed)
    with pytest.raises(ValueError, match="leaves nothing for numbers that do not divide"):
        CountdownConfig(operators="/")


EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(str),
    lambda parts: st.one_of(
        st.tuples(parts, st.sampled_from(["+", "-", "*", "/", " + ", " / "]), parts).map("".join),
        parts.map(lambda text: f"({text})"),
    ),
    max_leaves=12,
)


def _by_python(text):
    """The value of an expression by Python's own grammar."""
    operations = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
    }

    def value(node):
        if isinstance(node, ast.Constant):
            return Fraction(str(node.value))
        return operations[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text.strip(), mode="eval").body)


@settings(max_examples=100, deadline=None)
@given(text=EXPRESSIONS.filter(lambda text: not any(s.startswith("0") for s in _numbers(text))))
def test_expressions_have_the_value_that_python_gives(text):
    try:
        wanted = _by_python(text)
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="divides by 0"):
            parse(text)
        return
    found = parse(text)
    assert found.value == wanted
    assert list(found.numbers) == [int(number) for number in _numbers(text)]


def _numbers(text):
    return "".join(c if c.isdigit() else " " for c in text).split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ends early"),
        ("1+", "ends early"),
        ("(1", "ends early"),
        ("1 2", "'2' is left over"),
        ("1)", "'\\)' is left over"),
        ("x", "neither a number nor"),
        ("1.5", "neither a number nor"),
        ("1\n", "neither a number nor"),
        ("\N{ARABIC-INDIC DIGIT ONE}", "neither a number nor"),
        ("1" * 10, "no number of at most 9 digits"),
        ("+1", "is no number"),
        ("1" * 201, "201 characters, at most 200"),
        ("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1), "more than 20 parentheses"),
    ],
)
@pytest.mark.rows(1)
def test_what_is_no_expression_is_refused(text, message):
    with pytest.raises(ExpressionError, match=message):
        parse(text)


def test_every_question_of_a_file_comes_once_in_an_epoch(place):
    task = MatchConfig(path=str(place / "q.jsonl")).build()
    asked = [question for step in range(5) for question in task.prompts(step, 4, 1)]
    for epoch in range(4):
        prompts = sorted(question.prompt for question in asked[5 * epoch : 5 * epoch + 5])
        assert prompts == [record["prompt"] for record in RECORDS]


def test_match_compares_or_searches(place):
    exact = MatchConfig(path=str(place / "q.jsonl")).build()
    question = Question("1 is ", "number 1")
    assert [exact.score(question, text) for text in ("number 1\n", "a number 1")] == [1.0, 0.0]
    regex = MatchConfig(path=str(place / "regex.jsonl"), compare="regex").build()
    [question] = regex.prompts(0, 1, 0)
    assert [regex.score(question, text) for text in ("so 42.", "so 421")] == [1.0, 0.0]


def test_a_function_must_return_a_reward(place, monkeypatch):
    monkeypatch.syspath_prepend(place)
    question = Question("a", "b")
    for name, value in (("large", "2"), ("nothing", "None"), ("huge", "1000")):
        config = PythonConfig(path=str(place / "q.jsonl"), function=f"reward_functions:{name}")
        with pytest.raises(RewardError, match=f"a number from 0 to 1, and it returned {value}"):
            config.build().score(question, "x")


@pytest.mark.parametrize(
    ("name", "words", "kind"),
    [
        ("parsed", "raised ValueError: invalid literal for int", ValueError),
        ("indexed", "raised IndexError: list index out of range", IndexError),
        ("looked_up", "raised KeyError: 'no ", KeyError),
    ],
)
def test_an_exception_of_a_function_is_an_error_that_names_it(
    name, words, kind, place, monkeypatch, caplog
):
    monkeypatch.syspath_prepend(place)
    text = "no number" + "!" * 100
    with pytest.raises(RewardError) as raised:
        _python(place, f"reward_functions:{name}").score(Question("a", "b"), text)
    message = str(raised.value)
    assert f"rl.reward.function=reward_functions:{name} {words}" in message
    assert message.endswith(f", for the text {text[:40]!r}")
    assert isinstance(raised.value.__cause__, kind)
    assert f"in {name}" in caplog.text  # the traceback


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: ArithmeticConfig(operators="^"), r"operators='\^' must be one or more of"),
        (lambda _: ArithmeticConfig(operators=""), "operators='' must be one or more of"),
        (lambda _: ArithmeticConfig(digits=0), "digits=0 must be from 1 to 18"),
        (lambda _: CountdownConfig(numbers=1), "numbers=1 must be from 2 to 8"),
        (lambda _: CountdownConfig(largest=0), "largest=0 must be from 1"),
        (lambda _: CountdownConfig(partial=1.0), "partial=1.0 must be at least 0 and below 1"),
        (lambda _: RolloutsConfig(reward=MatchConfig()), "rl.reward.path is empty"),
        (lambda _: RolloutsConfig(reward=PythonConfig()), "function='' must be module:function"),
        (lambda _: MatchConfig(path="no/such/file").build(), "no/such/file cannot be read"),
        (
            lambda place: MatchConfig(path=str(place / "bad.jsonl")).build(),
            "line 2 must be an object with a text in the field 'answer'",
        ),
        (
            lambda place: MatchConfig(path=str(place / "plus.jsonl"), compare="regex").build(),
            r"the answer '\+' is no regular expression: .* set rl.reward.compare to exact",
        ),
        (lambda place: _python(place, "no_such_module:f"), "no_such_module cannot be imported"),
        (lambda place: _python(place, "reward_functions:f"), "has no function f"),
        (lambda place: _python(place, "reward_functions:number"), "has no function number"),
    ],
)
@pytest.mark.rows(1)
def test_settings_that_give_no_task_are_refused_in_words(make, message, place, monkeypatch):
    monkeypatch.syspath_prepend(place)
    (place / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    (place / "plus.jsonl").write_text('{"prompt": "a", "answer": "+"}\n')
    with pytest.raises(ValueError, match=message):
        make(place)


def test_a_function_of_the_working_directory_is_found(tmp_path, monkeypatch):
    """By commands that Python does not start in it, and after modules of everywhere else."""
    (tmp_path / "q.jsonl").write_text(json.dumps(RECORDS[0]))
    for name in ("rewards_here", "json"):
        (tmp_path / f"{name}.py").write_text("def dumps(question, text):\n    return 0.25\n")
    monkeypatch.chdir(tmp_path)
    before = [path for path in sys.path if path]
    monkeypatch.setattr(sys, "path", before)
    question = Question("a", "b")
    assert _python(tmp_path, "rewards_here:dumps").score(question, "x") == 0.25
    with pytest.raises(RewardError, match=r"raised TypeError: dumps\(\) takes 1 positional"):
        _python(tmp_path, "json:dumps").score(question, "x")  # of Python's own json
    assert sys.path == before


def _python(place, function):
    return PythonConfig(path=str(place / "q.jsonl"), function=function).build()
