"""What a budget that nothing fits says of activations that no plan can free."""

import pickle
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from offline_models import point, study, the_example
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphshard.errors import InfeasibleBudget
from graphshard.planner.infeasible import LEAST_PLAUSIBLE_BYTES
from graphshard.schedule.groups import Origin
from graphshard.schedule.shortage import Held
from graphshard.view.shortage import shortage_lines, shortage_text

TOKENS, VOCABULARY, DIM = 64, 4096, 16


def llama(recompute, depth=10):
    example = the_example()
    config = example.Config(64, depth, 4, 128, num_kv_heads=2, vocabulary=64, recompute=recompute)
    return example.sharded(config, 1, 32)


SELECTIVE, NONE = partial(llama, "selective"), partial(llama, "none")


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.embed(tokens)), tokens)


def with_loss():
    return fully_shard(WithLoss()), torch.zeros(TOKENS, dtype=torch.int64)


@cache
def shortage(build, *, whole=False):
    asked = point(budget=LEAST_PLAUSIBLE_BYTES)
    (answer,) = study(build, (asked,), whole=whole).answers()
    return answer.infeasible.shortage


def test_what_the_policy_says_must_be_saved_is_named():
    found = shortage(SELECTIVE)
    wanted = [held for held in found.held if held.wanted]
    assert {held.origin.op for held in wanted} <= {
        "mm",
        "_scaled_dot_product_flash_attention_for_cpu",
    }
    assert {held.count % 10 for held in wanted} == {0}
    assert "MUST_SAVE; PREFER_SAVE leaves it to the plan" in shortage_text(found)


@pytest.mark.parametrize("build", [SELECTIVE, NONE], ids=["selective", "none"])
def test_blocks_that_are_counted_hold_what_they_hold(build):
    few, all_of_them = shortage(build), shortage(build, whole=True)
    assert few.held == all_of_them.held


def test_nobody_is_told_to_change_what_was_not_asked_for():
    found = shortage(NONE)
    assert not any(held.wanted for held in found.held)
    assert "MUST_SAVE" not in shortage_text(found)


def test_the_logits_of_a_loss_are_called_so():
    found = shortage(with_loss)
    assert found.held[0] == Held(Origin("_log_softmax"), 4 * TOKENS * VOCABULARY, 1, False)
    (line,) = [line for line in shortage_lines(found) if "_log_softmax" in line]
    assert "1.0 MiB are results of _log_softmax, always saved: the logits of the loss" in line


def test_the_softmax_of_an_attention_is_no_loss():
    found = shortage(with_loss)
    softmax = Held(Origin("_softmax", "attention"), found.least_bytes, 1, wanted=False)
    text = shortage_text(replace(found, held=(softmax,)))
    assert "are results of _softmax in attention, always saved. What would help" in text


def test_what_is_little_is_not_worth_a_line():
    found = shortage(with_loss)
    small = replace(found, held=(Held(Origin("mm"), 1, 1, wanted=True),))
    assert shortage_text(small) == shortage_text(replace(found, held=()))


def test_the_facts_travel_with_the_error():
    error = InfeasibleBudget(shortage(with_loss))
    assert pickle.loads(pickle.dumps(error)).shortage == error.shortage
