import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are tiny: handing them to a second thread costs more than it saves, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
