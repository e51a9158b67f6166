"""Adam on float32 masters, with policy and MTP layer clipped apart, over Megatron's groups.

Clipped together, a large MTP gradient would shrink the policy's update (NeMo-RL#3323, SkyRL#1832).
"""

import itertools

import torch
from torch.distributed import all_reduce
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class Optimizer:
    """groups: {name: (parameters, learning rate)}; each group is clipped by its own norm."""

    def __init__(self, groups, max_norm):
        self.groups = {name: list(parameters) for name, (parameters, _) in groups.items()}
        self.max_norm = max_norm
        everything = itertools.chain(*self.groups.values())
        # Most of Adam's steps are smaller than bf16 can tell; a float32 weight is its own master.
        self.masters = {
            p: p if p.dtype == torch.float32 else p.detach().float() for p in everything
        }
        self.adam = torch.optim.Adam(
            {"params": [self.masters[p] for p in parameters], "lr": groups[name][1]}
            for name, parameters in self.groups.items()
        )

    def step(self, loss):
        """Gradients summed over data-parallel ranks, clipped, applied; {group: norm}."""
        loss.backward()
        for parameter, master in self.masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            if master.grad is not None and data_parallel_group().size() > 1:
                all_reduce(master.grad, group=data_parallel_group())
        norms = {name: self.clip(parameters) for name, parameters in self.groups.items()}
        self.adam.step()
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)
                parameter.grad = None
        return norms

    def clip(self, parameters):
        """The norm over tensor-parallel ranks: of each shard, and once of what all hold whole."""
        first = tensor_parallel_group().rank() == 0
        counted = [p for p in parameters if first or getattr(p, "tensor_model_parallel", False)]
        grads = [self.masters[p].grad for p in counted]
        # In float64 square and root undo each other exactly.
        square = get_total_norm([grad for grad in grads if grad is not None]).double().square()
        all_reduce(square, group=tensor_parallel_group())
        norm = square.sqrt().float()
        clip_grads_with_norm_([self.masters[p] for p in parameters], self.max_norm, norm)
        return norm.item()

    def state_dict(self):
        return {"adam": self.adam.state_dict(), "masters": list(self.masters.values())}

    def load_state_dict(self, state):
        self.adam.load_state_dict(state["adam"])
        with torch.no_grad():
            for (parameter, master), saved in zip(
                self.masters.items(), state["masters"], strict=True
            ):
                master.copy_(saved)
                parameter.copy_(master)


def tensor_parallel_group():
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def data_parallel_group():
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def sum_over_data_parallel(tensor):
    all_reduce(tensor, group=data_parallel_group())
    return tensor
