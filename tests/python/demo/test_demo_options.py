"""The command line of scripts/demo."""

from __future__ import annotations

import argparse

import pytest
from lab.demo.options import Shape, parse_options, parse_shape
from lab.demo.shapes import PAIRS


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("tp=2", Shape(2, 1, None)),
        ("pp=2", Shape(1, 2, None)),
        ("block=32", Shape(1, 1, 32)),
        ("tp=2,pp=1,block=32", Shape(2, 1, 32)),
        ("block=64, tp=4 ,pp=2", Shape(4, 2, 64)),
        ("tp=8,pp=8,block=1024", Shape(8, 8, 1024)),
    ],
)
def test_a_shape_is_read(text: str, shape: Shape) -> None:
    assert parse_shape(text) == shape
    assert shape.ranks == shape.tp * shape.pp
    # What is printed can be given again.
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected tp=N, pp=N and block=N"),
        ("tp", "'tp' in 'tp'"),
        ("dp=2", "'dp=2'"),
        ("tp=2,", "''"),
        ("tp=0", "tp='0'"),
        ("tp=9", "from 1 to 8"),
        ("tp=-1", "tp='-1'"),
        ("tp=two", "tp='two'"),
        # A digit to Python, but not to int().
        ("tp=\u00b2", "whole number"),
        ("block=0", "from 1 to 1024"),
        ("block=1025", "from 1 to 1024"),
        ("tp=2,tp=2", "tp is there twice"),
    ],
)
def test_a_wrong_shape_is_refused_by_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=None) as refused:
        parse_shape(text)
    assert told in str(refused.value)


def test_defaults() -> None:
    options = parse_options([])
    assert options.prefill == options.decode == Shape()
    assert (options.model, options.requests, options.connectors) == ("llama", 12, ("kvferry",))
    assert not options.check_bytes
    assert not options.matrix


def test_any_combination_of_shapes_and_model() -> None:
    options = parse_options(["--prefill", "tp=2,pp=1,block=32", "--decode", "tp=1,pp=2,block=64", "--model", "hybrid"])
    assert options.prefill == Shape(2, 1, 32)
    assert options.decode == Shape(1, 2, 64)
    assert options.model == "hybrid"


def test_mla_always_compares_bytes() -> None:
    assert parse_options(["--model", "mla"]).check_bytes
    assert parse_options(["--check-bytes"]).check_bytes


def test_the_matrix_has_its_own_defaults_and_choice() -> None:
    options = parse_options(["--matrix", "--connector", "stock", "--only", "mla,tp2-tp1"])
    assert options.matrix
    assert (options.requests, options.connectors, options.only) == (6, ("stock",), ("mla", "tp2-tp1"))
    assert parse_options(["--matrix", "--requests", "3"]).requests == 3


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--matrix --model mla", "--model"),
        ("--matrix --prefill tp=2", "--prefill"),
        ("--matrix --decode tp=2", "--decode"),
        ("--matrix --compare", "--compare"),
        ("--only mla", "--matrix"),
        ("--matrix --only nothing", "unknown pair 'nothing'"),
        ("--requests 0", "at least 1"),
        ("--model moe", "invalid choice"),
        ("--block-size 32", "unrecognized arguments"),
    ],
)
def test_options_that_do_not_go_together_end_the_program(
    line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(line.split())
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_every_pair_of_the_matrix_is_a_valid_command_line_with_a_name_of_its_own() -> None:
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)
    for pair in PAIRS:
        options = parse_options(pair.arguments())
        assert options.model == pair.model
        assert options.prefill == parse_shape(pair.prefill)
        assert options.decode == parse_shape(pair.decode)
