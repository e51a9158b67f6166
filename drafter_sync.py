"""Fix 5 of 6: actor weights reach vLLM's target AND its MTP drafter, and it is proven that they did.

Bug     A weight update loads the target only. The drafter keeps the weights that it started with: text and reward
        stay right, since the target verifies every draft, and acceptance decays silently while the policy walks away.
        Just as silent: MTP halves in the wrong order, FP8 scales of the old weights, buckets reused too early.
Rule    One push sends every tensor to both models, through vLLM's own layerwise reload (which repacks and quantises
        as at load), and afterwards reads back what the workers hold.

            trainer (Megatron)                      vLLM worker
            decoder.*, embedding, head  --------->  runner.model          target     before: only this arrow
            mtp.*                       --------->  runner.drafter.model  drafter    after: both
                      digests  <---- compare ---->  digests of what is held

        That the two then compute the same takes three conventions more, all silent when wrong (match_vllm_mimo):
            state       vLLM feeds the MTP layer the trunk state before the final norm, Megatron the one after it
            halves      eh_proj reads [embedding, hidden], MiMo's input_proj [hidden, embedding]     (in the name map)
            position 0  vLLM zeroes the embedding at position 0 of every document
Source  vllm@0.32.0 model_executor/models/mimo_mtp.py, model_executor/model_loader/reload/layerwise.py;
        megatron-core@0.19.2 transformer/multi_token_prediction.py; slime#691, miles#1926, verl#6661, SGLang#27718
Native  vLLM 0.32 has start_weight_update and start_draft_weight_update of its own. They run the same layerwise reload,
        but need a weight transfer engine chosen at start (IPC and NCCL want CUDA), load one model a session, and
        compare nothing. This module needs only worker_extension_cls and runs on 0.25.1 too.
Limits  MiMo's architecture; vLLM on one node, without pipeline parallelism. Pipeline and expert parallel trainers must
        gather names themselves. Run by no test: modules of Transformer Engine (its names are mapped) and its fused
        main_grad, CUDA IPC to more than one worker.
Use     llm = vllm.LLM(..., worker_extension_cls="drafter_sync.DrafterSyncExtension")
        sync_weights(llm, megatron_to_hf(actor.named_parameters(), hf_config))
Run     tests/test_drafter_sync.py is the specification, benchmarks/bench_sync.py weighs and times a push.
"""

import concurrent.futures
import contextlib
import inspect
import itertools
import math
import os
import random
import tempfile
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import torch


class DrafterSyncError(RuntimeError):
    """A push that did not happen, or that cannot be trusted. The message names the tensors and the engine's state."""


class SyncReport(NamedTuple):
    target_loaded: int  # parameters of the target that were written
    drafter_loaded: int  # parameters of the drafter that were written, those it shares with the target not counted
    bytes: int  # sent, in the engine's dtype
    seconds: float


# ------------------------------------------------------------------------------------------------------------------
# Names: Megatron <-> Hugging Face MiMo
# ------------------------------------------------------------------------------------------------------------------

# Megatron's name, how it is laid out, and what it is in a checkpoint, with shapes: V vocabulary, D hidden size, F
# feed-forward size, Q and K rows of all query and of all key heads. Some have two names here, for the local spec and for
# Transformer Engine's; the block inside an MTP layer is transformer_layer up to megatron-core 0.16, mtp_model_layer from
# 0.17 on.
MODEL = """
    embedding.word_embeddings.weight             vocab    model.embed_tokens.weight:V,D
    decoder.final_layernorm.weight               copy     model.norm.weight:D
    output_layer.weight                          vocab    lm_head.weight:V,D
"""
LAYER = """
    input_layernorm.weight                       copy     input_layernorm.weight:D
    self_attention.linear_qkv.layer_norm_weight  copy     input_layernorm.weight:D
    self_attention.linear_qkv.weight             qkv      self_attn.{}_proj.weight:Q,D
    self_attention.linear_qkv.bias               qkv      self_attn.{}_proj.bias:Q
    self_attention.linear_proj.weight            columns  self_attn.o_proj.weight:D,Q
    pre_mlp_layernorm.weight                     copy     post_attention_layernorm.weight:D
    mlp.linear_fc1.layer_norm_weight             copy     post_attention_layernorm.weight:D
    mlp.linear_fc1.weight                        gate_up  mlp.{}_proj.weight:F,D
    mlp.linear_fc2.weight                        columns  mlp.down_proj.weight:D,F
"""
MTP = """
    enorm.weight                                 copy     token_layernorm.weight:D
    hnorm.weight                                 copy     hidden_layernorm.weight:D
    eh_proj.weight                               halves   input_proj.weight:D,2D
    final_layernorm.weight                       copy     final_layernorm.weight:D
"""
