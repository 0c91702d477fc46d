from __future__ import annotations

import time
from contextlib import suppress

import pytest
from llguidance import LLMatcher

from headgate.errors import RequestError
from headgate.text.constraints import grammar
from headgate.text.ebnf import is_ebnf, lark_of
from headgate.text.grammar_check import _any_bytes, complaint_about

JSON = r"""
# JSON, in the style of llama.cpp
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def allows(written: str, text: str) -> bool:
    lark = lark_of(written, param="ebnf")
    assert complaint_about(lark) == ""
    matcher = LLMatcher(_any_bytes(), lark, log_level=0)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("written", "matched", "others"),
    [
        (JSON, ["{}", '{"a": [1, -2.5, {"b": null}], "é\\n": "\\u00e9"} '], ['{"a" 1}', "[1]", '{"a":1,}', "{"]),
        ('root ::= "a" [a-z]* "end"', ["aend", "aendend"], ["aen", "end"]),
        ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab"]),
        ('root ::= "(" root ")" | [0-9]+', ["((12))", "1"], ["((1)", "()"]),
        ('root ::= "(" root ")" [a-z]* "end" | "x"', ["(x)end", "((x)end)endend"], ["(x)", "(x)en"]),
        ('root ::= sum\nsum ::= sum "+" term | term\nterm ::= [0-9]+ | "(" sum ")"', ["1+(2+3)"], ["1+", "+1"]),
        (r"root ::= [-a] [a-] [a\-b] [^\]] [\u00e9]", ["-a-xé", "a-bbé"], ["-ac]é"]),
        ("root ::= .{2}", ["éx", "\n\n"], ["x", "xxx"]),
        ('root ::= one-1 one-1 # twice\none-1 ::= "x"', ["xx"], ["x"]),
        ('root ::= "a"? ("b" "c"){1,2} | ""', ["abcbc", ""], ["bcbcbc", "a"]),
        ('root ::= "\\"\\t\\x41"', ['"\tA'], ['"A']),
    ],
)
def test_an_answer_matches_a_grammar_in_ebnf(written: str, matched: list[str], others: list[str]):
    assert is_ebnf(written)
    assert all(allows(written, text) for text in matched)
    assert not any(allows(written, text) for text in others)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('root ::= "a" (="b")', r"lookaheads are not supported \('\(=' in line 1\)"),
        ("root ::= <[17]>", "tokens of the model are not supported"),
        ('root ::= "a"\n  !<think>', r"tokens of the model are not supported \('!<think>' in line 2\)"),
        ('root ::= TagDispatch(("a", b))', "macros are not supported"),
        ("root ::= item", "rule root refers to item, which is not defined"),
        ('item ::= "x"', "has no rule root"),
        ('root ::= "x"\nroot ::= "y"', "rule root is defined twice"),
        ('root ::= "x', "unexpected '\"' in line 1"),
        ('root ::= "x" ::= "y"', "unexpected '::=' in line 1"),
        ('root ::= ("x"\n', "the group that begins in line 1 has no end"),
        ('root ::= "x")', r"unexpected '\)' in line 1"),
        ("root ::= []", "the set of characters in line 1 is empty"),
        (r"root ::= [\d]", r"the escape \\d in line 1 is not supported"),
        (r'root ::= "\ud800"', r"\\ud800 in line 1 is not a character"),
        ('root ::= "x"{,3}', r"unexpected '\{,3\}' in line 1"),
        ('root ::= "x"**', r"unexpected '\*' in line 1"),
        ("root ::= " + "(" * 100 + '"x"' + ")" * 100, "groups are nested more than 64 deep"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(written: str, message: str):
    with pytest.raises(RequestError, match=message) as refused:
        lark_of(written, param="ebnf")
    assert refused.value.param == "ebnf"


def test_a_grammar_without_rules_of_ebnf_is_lark():
    assert not is_ebnf('start: "::=" /a::=b/')
    assert not is_ebnf("")


def test_a_grammar_in_lark_is_passed_on_except_for_ids_of_tokens():
    lark = '?start: sum\nsum: sum "+" NUMBER | NUMBER\n%import common.NUMBER\n'
    assert grammar(lark) == lark
    with pytest.raises(RequestError, match="ids of tokens"):
        grammar('start: "a" <[17]>')
    with pytest.raises(RequestError, match="unknown special token"):
        grammar('start: "a" <|end|>')
    with pytest.raises(RequestError, match="the maximum is 262144"):
        grammar("root ::= " + '"a"' * 100_000)


@pytest.mark.parametrize(
    "written",
    [
        "root ::= "
        + "".join(f'a{i}\na{i} ::= a{i + 1} a{i + 1}\nb{i} ::= "x" ' for i in range(60))
        + '\na60 ::= "x"',
        'root ::= (((("a"{1,99}){1,99}){1,99}){1,99}){1,99}',
        'root ::= "x"{999999}',
        "root ::= " + "|".join(f'"{i}" root' for i in range(20_000)),
        'root ::= ("a" | "b")* "a" ("a" | "b"){5000}',
        "\n" * 200_000,
        '"' * 200_000,
        "root ::= " + '"x"' + "*" * 200_000,
        "root ::= " + "[" * 20_000,
        'root ::= "x" ' + "<" * 50_000,
        'root ::= "' + '\\"' * 20_000,
        'start: "' + '\\"' * 50_000,
        "start: /" + "\\/" * 50_000,
    ],
)
def test_every_grammar_is_converted_or_refused_in_bounded_time(written: str):
    started_s = time.thread_time()
    with suppress(RequestError):
        grammar(written)
    assert time.thread_time() - started_s < 5
