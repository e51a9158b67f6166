"""What `train_mimo.py --unfix` puts back, where taking the fix out is not enough."""

import contextlib

import torch


def stock_depth():
    """What stock Megatron keeps of its MTP loss, in a global of its own; read and emptied."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as stock

    names = ("loss_values", "total_values", "correct_values")
    loss, tokens, correct = (stock.tracker.pop(name).sum().item() for name in names)
    return {"loss_sum": loss * tokens, "tokens": tokens, "correct": correct}


@contextlib.contextmanager
def repeated_layer(actor, num_drafts):
    """--unfix recursion: Megatron's mtp_use_repeated_layer; depth j attends to depth j alone."""
    config, block = actor.config, actor.mtp
    before = config.mtp_num_layers, block.mtp_use_repeated_layer
    config.mtp_num_layers, block.mtp_use_repeated_layer = num_drafts, True
    try:
        yield
    finally:
        config.mtp_num_layers, block.mtp_use_repeated_layer = before


def unswap(named_tensors):
    """--unfix parity: eh_proj's columns as Megatron has them; vLLM loads them without a word."""
    for name, tensor in named_tensors:
        is_joint = name.endswith("input_proj.weight")
        yield name, torch.cat(tensor.chunk(2, 1)[::-1], 1) if is_joint else tensor
