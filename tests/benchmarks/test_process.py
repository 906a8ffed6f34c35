"""Seconds and peak memory are those of the program alone, and a program that fails says why."""

import sys

import pytest
from _process import Failed, last_line, run


def test_memory_of_the_measuring_process_is_not_counted():
    ballast = bytearray(300_000_000)  # resident: a bytearray is zeroed
    ballast[::4096] = b"x" * len(ballast[::4096])
    found = run([sys.executable, "-c", "pass"])
    assert found["peak_bytes"] < 100_000_000
    assert found["seconds"] < 30


def test_memory_of_the_program_is_counted():
    found = run([sys.executable, "-c", "x = b'x' * 200_000_000"])
    assert found["peak_bytes"] > 200_000_000


def test_a_program_that_fails_is_quoted():
    with pytest.raises(Failed, match=r"^no such format$"):
        run([sys.executable, "-c", "import sys; print('fine'); sys.exit('no such format')"])


def test_progress_bars_say_nothing():
    assert last_line("broken\n\r 50%|##  | 1/2 [00:01<00:01, 1.8s/it]\r\n\n") == "broken"
    assert last_line("") == "no output"
