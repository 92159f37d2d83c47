"""Parked memory: bytes leave and come back, every view stays what it was."""

from __future__ import annotations

import torch

from ram_trl.training.parking import Parked
from tests import models


def trained_step():
    model = models.tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=torch.tensor([[3, 4, 5]])).logits.square().mean().backward()
    optimizer.step()
    return model, optimizer


def test_weights_gradients_and_moments_leave_and_come_back_to_the_bit():
    model, optimizer = trained_step()
    view = model.get_input_embeddings().weight.view(-1)[5:9]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    before = [tensor.detach().clone() for tensor in tensors]
    seen = view.detach().clone()
    parked = Parked(model, optimizer)
    assert parked.nbytes >= 4 * sum(tensor.numel() for tensor in before)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    parked.back()
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
    assert torch.equal(view, seen)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    assert not view.any()


def test_a_storage_that_two_tensors_share_is_parked_once():
    flat = torch.arange(8.0)
    parked = Parked([flat[:4], flat[4:]], {"again": flat})
    assert parked.nbytes == 32
    parked.back()
    assert torch.equal(flat, torch.arange(8.0))
