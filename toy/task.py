"""The task: counting. Warm-up teaches mostly "+1"; the reward is the share of "+2" steps.

Tokens are numbers modulo the vocabulary. PPO thus drives the policy away from what the drafter
learned at first, so that a drafter that is not kept in step proposes "+1" in vain.
"""

import torch

MAX_PROMPT = 6
WARMUP_SHARE_OF_PLUS_TWO = 0.3  # under a half, so that reward has to move the policy's arg-max


def make_sequences(num, length, vocab, generator, lag=1):
    """`[num, length]` tokens counting by +1 or +2 modulo the vocabulary, each from `lag` before.

    With a lag of 2 two counters take turns: a drafter that sees the last token alone is lost.
    """
    steps = 1 + (torch.rand(num, length, generator=generator) < WARMUP_SHARE_OF_PLUS_TWO).long()
    steps[:, :lag] = torch.randint(vocab, (num, lag), generator=generator)
    rounds = torch.nn.functional.pad(steps, (0, -length % lag)).view(num, -1, lag)
    return rounds.cumsum(1).flatten(1)[:, :length] % vocab


def make_prompts(num, response_tokens, vocab, generator, lag=1):
    """(prompt, response length) pairs; 2 tokens or more: after one, vLLM 0.32 pads the prefill."""
    sequences = make_sequences(num, MAX_PROMPT, vocab, generator, lag).tolist()
    prompt_lengths = torch.randint(2, MAX_PROMPT + 1, (num,), generator=generator).tolist()
    shortest = response_tokens // 2
    lengths = torch.randint(shortest, response_tokens + 1, (num,), generator=generator).tolist()
    triples = zip(sequences, prompt_lengths, lengths, strict=True)
    return [(sequence[:n], length) for sequence, n, length in triples]


def token_rewards(sample, vocab, lag=1):
    """1.0 for each response token that is the token `lag` before it plus 2, else 0.0."""
    tokens, first = sample["prompt"] + sample["response"], len(sample["prompt"])
    pairs = zip(tokens[first - lag :], tokens[first:], strict=False)
    return [float((token - before) % vocab == 2) for before, token in pairs]
