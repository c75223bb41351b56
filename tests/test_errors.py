"""Errors: what a handler and another process can read from them."""

import pickle

import pytest

from graphshard import errors
from graphshard.errors import GraphshardError, OptionsError, UnsupportedModel


def test_text_code_and_message():
    error = UnsupportedModel("GS299", "tied over two roots")
    assert str(error) == "GS299: tied over two roots"
    assert (error.code, error.message) == ("GS299", "tied over two roots")


def test_every_error_is_a_graphshard_error():
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    others = [k for k in kinds if not issubclass(k, GraphshardError | UserWarning)]
    assert len(kinds) > 2
    assert others == []


def test_bad_options_are_value_errors():
    with pytest.raises(ValueError, match="GS102"):
        raise OptionsError("GS102", "unknown option")


def test_an_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(UnsupportedModel("GS299", "tied over two roots")))
    assert isinstance(error, UnsupportedModel)
    assert (error.code, error.message) == ("GS299", "tied over two roots")
