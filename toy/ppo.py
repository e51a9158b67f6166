"""The arithmetic of PPO: log-probs, entropy, advantages. Nothing here knows of MTP."""

import torch


def label_logprobs(logits_TV, batch, temperature):
    """Log-probs of the response tokens under the tempered policy, from which vLLM samples."""
    logprobs_TV = (logits_TV.float() / temperature).log_softmax(-1)
    return logprobs_TV.gather(1, batch["labels"][0, :, None])[:, 0][batch["loss_mask"][0]]


def mean_entropy(logits_NV, temperature):
    """Of the tempered policy, in nats, over the tokens."""
    logprobs_NV = (logits_NV.float() / temperature).log_softmax(-1)
    return -(logprobs_NV.exp() * logprobs_NV).sum(-1).mean()


def estimate_advantages(rewards, values, args):
    """GAE of one response: advantage and return of each token; values[t] is before token t."""
    advantages, running, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta, next_value = reward + args.gamma * next_value - value, value
        running = delta + args.gamma * args.gae_lambda * running
        advantages.insert(0, running)
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    return torch.tensor(advantages), torch.tensor(returns)
