import pytest
import tiny_models
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are only slowed down by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tokenizer():
    """One id a byte, with a chat template."""
    return tiny_models.tokenizer()


@pytest.fixture
def plain_tokenizer(tokenizer):
    """The same without a chat template."""
    tokenizer.chat_template = None
    return tokenizer
