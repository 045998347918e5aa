"""The option of the tests that pytest must know before it has seen `tests/`: see tests/conftest.py."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--script", action="append", default=[], metavar="FILE", help="run the script tests on this copy (repeatable)"
    )
