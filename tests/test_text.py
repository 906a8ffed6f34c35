"""Lone surrogates are not text."""

import pytest

from compressor.text import is_unicode


@pytest.mark.parametrize("text", ["", "plain", "ünï", "😀"])
def test_text(text):
    assert is_unicode(text)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", b"\xff".decode("utf-8", "surrogateescape")])
def test_no_text(text):
    assert not is_unicode(text)
