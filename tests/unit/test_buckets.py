"""When gradients are summed over ranks: bucket by bucket, while the backward still runs."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from steadfast.parallel.buckets import GradientBuckets, PlainSum


# A letter is the gradient of a parameter, "+" the sum of a bucket and "|" the end of the backward.
@pytest.mark.parametrize("events", ["fe+dc+ba+|", "fdce++ba+|", "abcdef+++|", "fe+cbad++|", "dfe+ba|++", "abcdf|+++"])
def test_buckets_of_two_are_summed_in_their_order_when_each_is_full(events: str) -> None:
    recorded: list[str] = []
    sums: list[list[float]] = []

    def record_sum(flat: Tensor) -> None:
        recorded.append("+")
        sums.append(flat.tolist())

    params = {name: nn.Parameter(torch.ones(2)) for name in "abcdef"}
    for name, param in params.items():
        param.register_post_accumulate_grad_hook(lambda _, name=name: recorded.append(name))
    buckets = GradientBuckets(params.values(), 2 * params["a"].nbytes, PlainSum())
    buckets.begin(Mock(sum=record_sum))
    order = events.replace("+", "").strip("|")
    for names, last in (("abcdef", False), (order, True)):
        buckets.expect(last)
        for name in names:
            (("abcdef".index(name) + 1) * params[name]).sum().backward()
        recorded.append("|")
        buckets.finish()
    assert "".join(recorded) == f"abcdef|{events}"
    # Each sum has the gradients of both backwards, the last parameter first, and a flag for each parameter.
    gradients = [float(number * (1 + order.count(name))) for number, name in enumerate("abcdef", 1)]
    assert sums == [[gradients[last]] * 2 + [gradients[last - 1]] * 2 + [1.0, 1.0] for last in (5, 3, 1)]
