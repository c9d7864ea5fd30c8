"""services.envs.answer_form: what may be evaluated, and what must not."""

import pytest

from services.envs import answer_form

HOSTILE = [
    "__import__('os').system('touch canary')",
    "().__class__.__bases__[0].__subclasses__()",
    "[].append(1)",
    "[x for x in (1,2)]",
    "[open('/etc/passwd')]",
    "lambda: 0",
    "'a' * 99999999999",
    "x if x else x",
    "f'{1}'",
    "print(1)",
    "sin.__globals__",
    "S('exec(1)')",
    "x[0]",
    "(",
    "\0",
    "(" * 5000 + ")" * 5000,
    "",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_code_is_nothing(text):
    assert not answer_form.is_arithmetic(text)
    assert not answer_form.is_formula(text)
    assert not answer_form.is_list(text)


@pytest.mark.parametrize(
    "text", ["9**9**9**9", "2**(99**99)", "((9**99)**99)**99", "x**1001", "9**(1/1e-99)", "9" * 40, "(a+b+c+d+e)**99"]
)
def test_what_computes_for_long_is_nothing(text):
    assert not answer_form.is_formula(text) and not answer_form.is_arithmetic(text)


@pytest.mark.parametrize("text", ["49*(85 - 1)/14 - 42 - 73", "8*(5*1 - 2)", "-3+4", " 24 "])
def test_arithmetic(text):
    assert answer_form.is_arithmetic(text) and answer_form.is_formula(text)


def test_decimals_are_arithmetic_where_they_are_asked_for():
    assert answer_form.is_arithmetic("1.5 * (2 + .5)", decimals=True)
    assert not answer_form.is_arithmetic("1.5") and not answer_form.is_arithmetic("9.**9.**9.", decimals=True)


@pytest.mark.parametrize(
    "text",
    [
        "7*X**9 - 2*X**6 + 7*X**4 + C",
        "-X**5/7 - X**3/2 + C",
        "x*asin(3*x) + sqrt(1 - 9*x**2)/3 + C",
        "2*x**(3/2)/3 + E**(2*x) - exp(-x)*cos(x) + C",
        "120384*z**7 - 30400*z",
    ],
)
def test_formulas(text):
    assert answer_form.is_formula(text) and not answer_form.is_arithmetic(text)


@pytest.mark.parametrize("text", ["x + Integral(x, x)", "Integral(x)", "factorial(9)", "True", "foo", "x = 1", "x^2"])
def test_what_is_no_formula(text):
    assert not answer_form.is_formula(text)


def test_lists():
    assert answer_form.is_list("[1, 2, ['Q', -3.5]]") and answer_form.is_list(" (1, 2)")
    assert not answer_form.is_list("1 2 3") and not answer_form.is_list("{1: 2}") and not answer_form.is_list("[1, x]")


@pytest.mark.parametrize(
    "text", ["-" * 1900 + "1", "(" * 1900, "[" * 1900, "1" + "+1" * 900, "sin(" * 300 + "x" + ")" * 300]
)
def test_what_is_nested_deeply_is_judged_and_raises_nothing(text):
    assert answer_form.is_formula(text) in (True, False)
    assert answer_form.is_arithmetic(text) in (True, False)
    assert not answer_form.is_list(text)
