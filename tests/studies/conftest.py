"""What the tests of the small character model share."""

import pytest
import torch

from studies.miniature.model import END, Model


@pytest.fixture
def one_thread():
    """As in the study's processes: sums over threads are in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_model():
    """In float64, for prompts of up to six characters and responses of up to twenty."""
    torch.manual_seed(0)
    model = Model(6 + 20).double()
    with torch.no_grad():
        model.head.weight.mul_(4)  # far from uniform
        model.head.bias[END] += 2.5
    return model
