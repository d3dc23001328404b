# SPDX-License-Identifier: Apache-2.0
"""The pretended device finds the mistakes that a GPU would, and counts what it would do."""

import numpy as np
import pytest
import torch
from pretended_device import pretended_device

MISTAKES = {
    "operands on two devices": lambda x: x + torch.ones(3, 4),
    "an index on the other device": lambda x: x[torch.tensor([1])],
    "weights left on the CPU": lambda x: torch.nn.Linear(4, 2)(x),
    "a constant made on the CPU": lambda x: torch.cat((x, torch.zeros(3, 4))),
    "numpy() without cpu()": lambda x: x.numpy(),
    "an array of it": lambda x: np.asarray(x),
    "a function of numpy": lambda x: np.sqrt(x),
    "a generator of the CPU": lambda x: torch.rand(
        3, generator=torch.Generator().manual_seed(0), device=x.device
    ),
    "noise by a generator of the CPU": lambda x: x.normal_(generator=torch.Generator()),
}
WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 3).any()),
    "int": lambda x: range(int(x.sum())),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 3],
    "boolean index of an assignment": lambda x: x.__setitem__(x > 3, x[:1, :1]),
    "masked_select": lambda x: x.masked_select(x > 3),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x[:, 1].long(), dim=0),
}


@pytest.fixture
def x():
    with pretended_device() as counted:
        tensor = torch.arange(12.0).reshape(3, 4).to("cuda")
        counted.clear()
        tensor.counted = counted
        yield tensor


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_raises(x, mistake):
    with pytest.raises((RuntimeError, TypeError), match=r"cuda|device"):
        MISTAKES[mistake](x)


@pytest.mark.parametrize("wait", WAITS)
def test_waiting_for_a_value_or_a_size_is_counted(x, wait):
    WAITS[wait](x)
    assert len(x.counted.synchronisations) == 1


def test_operations_are_counted_and_views_are_not(x):
    y = (x.reshape(4, 3).T[1:] * 2 + x[:2]).softmax(-1)
    assert x.counted.operations.total() == 3 and not x.counted.synchronisations
    assert y.device.type == "cuda" and y.is_cuda
    with torch.inference_mode():  # where operations arrive undivided
        torch.nn.functional.linear(y, y)
    assert x.counted.operations.total() == 4


def test_transfers_are_counted_in_bytes(x):
    here = x.cpu()
    torch.zeros(5).to(x.device), torch.tensor([1, 2], device="cuda")
    torch.zeros(3, 4).copy_(x)
    assert here.numpy().shape == (3, 4)
    assert x.counted.uploads == [20, 16] and x.counted.downloads == [48, 48]


def test_a_module_moves_there_and_learns_there(x):
    layer = torch.nn.Linear(4, 2).to("cuda")
    assert layer.weight.is_cuda and isinstance(layer.weight, torch.nn.Parameter)
    before = layer.weight.cpu()
    optimiser = torch.optim.AdamW(layer.parameters())
    layer(x).square().mean().backward()
    optimiser.step()
    assert layer.weight.is_cuda and not torch.equal(layer.weight.cpu(), before)
