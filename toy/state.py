"""All that the next step depends on, saved so that a killed run goes on bit for bit."""

import os

import torch

from toy.optimizer import tensor_parallel_group


def save(trainer, step, args):
    """All that the next step depends on, of every rank, in one file that is whole or absent."""
    state = {
        "actor": trainer.actor.state_dict(),
        "value_head": trainer.value_head.state_dict(),
        "drafter": trainer.drafter,
        "optimizer": trainer.optimizer.state_dict(),
    }
    shards = [None] * args.tensor_parallel
    torch.distributed.all_gather_object(shards, state, group=tensor_parallel_group())
    if torch.distributed.get_rank() == 0:
        state = dict(args=vars(args), step=step, shards=shards)
        state["generator"] = trainer.generator.get_state()
        state["metrics"] = open(f"{args.out}/metrics.jsonl").read() if step else ""
        torch.save(state, f"{args.out}/state.pt.new")
        os.replace(f"{args.out}/state.pt.new", f"{args.out}/state.pt")


def restore(trainer, saved, args):
    """What `save` wrote, into what is in use; the steps after it will be made again."""
    state = saved["shards"][tensor_parallel_group().rank()]
    step, metrics = saved["step"], saved["metrics"]  # read before anything is written
    trainer.actor.load_state_dict(state["actor"])
    trainer.value_head.load_state_dict(state["value_head"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.drafter = {name: t.to(trainer.device) for name, t in state["drafter"].items()}
    trainer.generator.set_state(saved["generator"])
    if torch.distributed.get_rank() == 0:
        with open(f"{args.out}/metrics.jsonl", "w") as file:
            file.write(metrics)
    return step
