"""Fix 6 of 6: acceptance numbers that reconcile with the engine, and a replay that says why acceptance fell.

Bug     Engines name and count drafts in different ways. A renamed key read with a default becomes "rate 0, length 1";
        requests that never drafted are averaged in as zeros; a bonus token counts as an accepted draft.
Rule    One record a request: drafted, accepted, verify steps. What the engine did not say is None, counted as missing.
        rate = accepted / drafted      length = 1 + accepted / verify steps = 1 + sum of the per-position rates
            drafted 12 0 3   accepted 9 0 0   verify steps 4 0 1      the second request never drafted
            before   rate .250  length 1.417  its zeros pull both down
            after    rate .600  length 2.800  micro; macro over the two that drafted: .375 and 2.125
Replay  vLLM drafts the arg-max token, so at any temperature a draft is accepted iff it equals the token emitted. The
        trainer's drafts thus predict every decision, or else the engine drafts with other weights or conventions.
            index     0  1  2  3  4  5  6  7  8     P prompt, p prefill's token (never a draft)
            token     P  P  p 11 12 13 14 15 16     b bonus: comes with an accepted draft, has none of its own
            draft              11  b 99 14  b 16     the draft for index j stands in slot j-2
            decision            1     0  1     1     the last counts, although the stop cuts its bonus token off
Source  Read: vllm 0.32.0 v1/metrics/stats.py RequestSpecDecodeMetrics, v1/metrics/reader.py get_metrics_snapshot,
        v1/core/sched/scheduler.py update_from_output; verl 0.9.1 ray_trainer.py compute_spec_decode_metrics,
        vllm_async_server.py, async_sglang_server.py (verl#7543); sglang 0.5.10, 0.5.11 and 0.5.12
        tokenizer_manager.py _calculate_spec_decoding_metrics (sglang#23530).
Run     python spec_metrics.py      python -m pytest tests/test_spec_metrics.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import zip_longest
from statistics import fmean

# vLLM's counters in the order of SpecCounts' fields, and its vector of accepted tokens a position.
VLLM_COUNTERS = tuple(
    f"vllm:spec_decode_num_{name}" for name in ("draft_tokens", "accepted_tokens", "drafts")
)
VLLM_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
# (drafted, accepted) in SGLang: 0.5.12 on (which sends the next pair too), 0.5.11, up to 0.5.10.
SGLANG_NAMES = (
    ("spec_num_proposed_drafts", "spec_num_correct_drafts"),
    ("spec_proposed_drafts", "spec_accepted_drafts"),
    ("spec_draft_token_num", "spec_accept_token_num"),
)
SGLANG_HISTOGRAMS = (
    "spec_correct_drafts_histogram",
    "spec_accept_histogram",
)  # 0.5.12 on (sends both), before


@dataclass(frozen=True)
class SpecCounts:
    """What one request drafted, accepted and verified; ints.

    accepted_per_position[k-1]: verify steps that accepted at least k drafts; None where the engine does not say.
    emitted_tokens: tokens the request got beyond prefill's own, None where unknown; not compared by ==. They are
    accepted_tokens + verify_steps, less what a stop (eos, max_tokens) cut off, plus those of steps without a draft.
    """

    draft_tokens: int
    accepted_tokens: int
    verify_steps: int
    accepted_per_position: tuple[int, ...] | None = None
    emitted_tokens: int | None = field(default=None, compare=False)

    def __post_init__(self):
        if isinstance(self.accepted_per_position, list):  # so that equal records compare equal
            object.__setattr__(self, "accepted_per_position", tuple(self.accepted_per_position))


def counts_from_vllm(request_outputs):
    """One record a completion (n > 1 gives n), in order, from vLLM's `RequestOutput`s; None where the engine gave none.

    vLLM 0.32 with `per_request_spec_decode_metrics="summary"` or "detailed": `outputs[i].spec_decode_metrics`, left
    None by vLLM for a request aborted or ended by a stop string. A None in the list or no completion gives one None.
    Else the field of the vLLM fork that verl 0.9.1 reads, `metrics.request_spec_decode_stats` (num_draft_tokens,
    num_accepted_tokens, num_verify_steps): read there, not verified by running; one a request, so n > 1 gives None.
    `emitted_tokens` wants whole outputs (`LLM.generate`'s, or CUMULATIVE); a DELTA output has its last tokens only.
    """
    records = []
    for i, request in enumerate(_items(request_outputs, "request_outputs")):
        where = f"request_outputs[{i}]"
        completions = (
            [] if request is None else _items(getattr(request, "outputs", None), f"{where}.outputs")
        )
        fork = getattr(getattr(request, "metrics", None), "request_spec_decode_stats", None)
        fork = fork if len(completions) == 1 else None
        records += [
            _vllm_record(c, fork, f"{where}.outputs[{n}]")
            for n, c in enumerate(completions or [None])
        ]
    return records


def _vllm_record(completion, fork, where):
    record, tokens = (
        getattr(completion, name, None) for name in ("spec_decode_metrics", "token_ids")
    )
    num_tokens = None if tokens is None else len(_items(tokens, f"{where}: token_ids"))
    if record is not None:
        steps, positions = _from_histogram(getattr(record, "histogram", None), where)
        counts = (getattr(record, "num_draft_tokens", None), sum(positions), steps, positions)
        return _checked(where, *counts, num_tokens=num_tokens, max_drafts=len(positions))
    if fork is not None:
        names = ("num_draft_tokens", "num_accepted_tokens", "num_verify_steps")
        return _checked(
            where, *(getattr(fork, name, None) for name in names), num_tokens=num_tokens
        )
    return None


def counts_from_vllm_counters(before, after):
    """One record of all that ran between two `llm.get_metrics()` snapshots (the LLM needs `disable_log_stats=False`).

    For vLLM 0.25.1, which has no per-request records. A snapshot's engines are summed; several LLMs: `add_counts`.
    None without speculation, or if a counter went backwards or vanished (an engine restarted; what it did is unknown).
    The record covers many requests, so the macro means that `summarize` makes of it mean nothing.
    """
    before, after = _read_counters(before, "before"), _read_counters(after, "after")
    sums = {}
    for key in before.keys() | after.keys():  # a counter that is not in `before` started from 0
        gains = [
            new - old
            for old, new in zip_longest(before.get(key, []), after.get(key, []), fillvalue=0)
        ]
        if key not in after or min(gains, default=0) < 0:
            return None
        sums[key[0]] = _add([sums.get(key[0], []), gains])
    if not sums:
        return None
    if any(name not in sums for name in VLLM_COUNTERS):
        raise ValueError(
            f"after: got {sorted(sums)}, wanted all of {VLLM_COUNTERS}; pass the whole snapshot"
        )
    positions = sums.get(VLLM_PER_POSITION)
    totals = [sums[name][0] for name in VLLM_COUNTERS]
    return _checked(
        "after - before", *totals, positions, max_drafts=len(positions) if positions else None
    )


def _read_counters(snapshot, what):
    """{(name, labels): values}; an engine is one of the labels."""
    counters = {}
    for metric in _items(snapshot, what):
        name = getattr(metric, "name", None)
        if isinstance(name, str) and name in (*VLLM_COUNTERS, VLLM_PER_POSITION):
            labels = getattr(metric, "labels", {})
            if not isinstance(labels, Mapping):
                came = f"{what}: got labels {labels!r:.80} of {name}"
                raise TypeError(f"{came}, wanted a dict; pass what llm.get_metrics() returns")
            values = (
                getattr(metric, "values", None)
                if name == VLLM_PER_POSITION
                else [getattr(metric, "value", None)]
            )
            key = name, str(sorted(labels.items(), key=str))
            counters[key] = _add([counters.get(key, []), _counts(values, f"{what}: {name}")])
    return counters


def counts_from_sglang(meta_infos):
    """One record a request from SGLang's `meta_info` dicts, in any of its three namings; None without the keys.

    SGLang sends none for a request without a verify step, which so counts as missing. Some of the keys only: an error,
    lest a fourth naming pass for zeros. `spec_accept_length` is not read: it counts prefill's token as a step's.
    """
    return [
        _sglang_record(meta, f"meta_infos[{i}]")
        for i, meta in enumerate(_items(meta_infos, "meta_infos"))
    ]


def _sglang_record(meta, where):
    if meta is not None and not isinstance(meta, Mapping):
        wanted = "SGLang's meta_info dict (or None); pass output['meta_info']"
        raise TypeError(f"{where}: got {type(meta).__name__}, wanted {wanted}")
    meta = {key: value for key, value in (meta or {}).items() if value is not None}
    seen = [key for pair in (("spec_verify_ct",), *SGLANG_NAMES) for key in pair if key in meta]
    if not seen:
        return None
    pair = next((pair for pair in SGLANG_NAMES if pair[0] in meta and pair[1] in meta), None)
    if pair is None or "spec_verify_ct" not in meta:
        wanted = f"spec_verify_ct and a pair of {SGLANG_NAMES}; if this SGLang has new names, add them there"
        raise ValueError(
            f"{where}: got only {seen} of the keys {sorted(map(str, meta))}, wanted {wanted}"
        )
    steps, positions = _count(meta["spec_verify_ct"], f"{where}: spec_verify_ct"), None
    histogram = next((meta[key] for key in SGLANG_HISTOGRAMS if key in meta), None)
    if histogram is not None:
        histogram_steps, positions = _from_histogram(histogram, where)
        if histogram_steps != steps:
            came = f"{where}: got a histogram of {histogram_steps} steps"
            raise ValueError(f"{came}, wanted spec_verify_ct = {steps}; pass both of one request")
    return _checked(
        where,
        meta[pair[0]],
        meta[pair[1]],
        steps,
        positions,
        num_tokens=meta.get("completion_tokens"),
    )


def add_counts(segments):
    """The record of a conversation (or of a request that was aborted and resumed) from those of its segments.

    None segments are left out: rate and length then describe the segments known. All None, or no segment: None.
    """
    known = _known(segments, "segments")
    if not known:
        return None
    positions = emitted = None
    if all(c.accepted_per_position is not None or not c.verify_steps for c in known):
        positions = tuple(_add([c.accepted_per_position or () for c in known])) or None
    if all(c.emitted_tokens is not None for c in known):
        emitted = sum(c.emitted_tokens for c in known)
    return SpecCounts(*_add([astuple(c)[:3] for c in known]), positions, emitted)


def compute_spec_decode_metrics(drafts, accepts, verifies, non_padding_mask=None):
    """verl's two numbers, by verl's names and formulas, from one int a request.

    rollout/spec_accept_rate: mean over requests of accepted / drafted. rollout/spec_accept_length: mean of
    1 + accepted / verify steps. A denominator of 0 makes its term 0.0, as upstream; `summarize` leaves it out.
    non_padding_mask: a bool a request, False for the placeholders of a padded batch. Three Nones or no request: {}.
    """
    columns = {"drafts": drafts, "accepts": accepts, "verifies": verifies}
    absent = [name for name, column in columns.items() if column is None]
    if len(absent) == 3:
        return {}
    if absent:
        came = f"wanted all three lists or none, got None for {absent} only"
        raise ValueError(f"{came}; pass all three lists, or three Nones where nothing speculates")
    columns = {name: _items(column, name) for name, column in columns.items()}
    mask = [1] * len(columns["drafts"])
    if non_padding_mask is not None:
        mask = [
            int(keep) if isinstance(keep, bool) else keep
            for keep in _items(non_padding_mask, "non_padding_mask")
        ]
    lengths = [len(column) for column in (*columns.values(), mask)]
    if len(set(lengths)) > 1 or any(keep > 1 for keep in _counts(mask, "non_padding_mask")):
        came = f"got lengths {lengths} and mask {mask!r:.80}"
        raise ValueError(
            f"{came}, wanted one entry a request, in the mask a bool; take all from one batch"
        )
    kept = {
        name: [x for x, keep in zip(column, mask, strict=True) if keep]
        for name, column in columns.items()
    }
    requests = list(zip(*(_counts(column, name) for name, column in kept.items()), strict=True))
    if any(accepted > drafted for drafted, accepted, _ in requests):
        came = "accepts: got more accepted than drafted for a request"
        raise ValueError(f"{came}, wanted at most as many; count drafts only, no bonus tokens")
    if not requests:
        return {}
    return {
        "rollout/spec_accept_rate": fmean(
            accepted / drafted if drafted else 0 for drafted, accepted, _ in requests
        ),
        "rollout/spec_accept_length": fmean(
            1 + accepted / steps if steps else 0 for _, accepted, steps in requests
        ),
    }


def summarize(counts):
    """Floats to log, from one record (or None) a request. Without drafts, rates and lengths are absent, not 0 or NaN.

    spec/requests: all; spec/requests_missing of them gave no record, spec/requests_without_drafts drafted nothing.
    spec/accept_rate_micro: all accepted / all drafted; _macro: mean of accepted / drafted over requests that drafted.
        0.0 says that a whole rollout drafted in vain: warn, and ask `explain_disagreement`.
    spec/accept_length_micro: 1 + all accepted / all verify steps; _macro: mean of 1 + accepted / steps, likewise.
    spec/accept_rate_pos_k: steps that accepted a k-th draft / all verify steps, over the requests that have positions.
    spec/emitted_length: tokens emitted / verify steps, where known: below accept_length_micro if a stop cut accepted
        tokens off, above it if some steps had no draft.
    """
    counts = _items(counts, "counts")
    known = _known(counts, "counts")
    drafted = [c for c in known if c.draft_tokens]
    summary = {
        "spec/requests": float(len(counts)),
        "spec/requests_without_drafts": float(len(known) - len(drafted)),
        "spec/requests_missing": float(len(counts) - len(known)),
    }
    if not drafted:
        return summary
    total = add_counts(drafted)
    summary["spec/accept_rate_micro"] = total.accepted_tokens / total.draft_tokens
    summary["spec/accept_rate_macro"] = fmean(c.accepted_tokens / c.draft_tokens for c in drafted)
    summary["spec/accept_length_micro"] = 1 + total.accepted_tokens / total.verify_steps
    summary["spec/accept_length_macro"] = fmean(
        1 + c.accepted_tokens / c.verify_steps for c in drafted
    )
    steps, *positions = _reached(drafted)
    summary |= {
        f"spec/accept_rate_pos_{k}": accepted / steps for k, accepted in enumerate(positions, 1)
    }
    emitted = add_counts([c for c in drafted if c.emitted_tokens is not None])
    if emitted:
        summary["spec/emitted_length"] = emitted.emitted_tokens / emitted.verify_steps
    return summary


def conditional_rates(counts):
    """spec/accept_rate_cond_pos_k: steps that accepted a k-th draft / that accepted a (k-1)-th (k = 1: all steps).

    How good draft k is once those before it were right; the running product is `summarize`'s accept_rate_pos_k.
    Over the requests that drafted and have positions; absent where the denominator is 0.
    """
    reached = _reached([c for c in _known(counts, "counts") if c.draft_tokens])
    pairs = enumerate(zip(reached, reached[1:], strict=False), 1)
    return {
        f"spec/accept_rate_cond_pos_{k}": accepted / before
        for k, (before, accepted) in pairs
        if before
    }


def _reached(counts):
    """[verify steps, those that accepted at least 1 draft, at least 2, ..] of the requests that have positions."""
    counts = [c for c in counts if c.accepted_per_position is not None]
    return _add([(0,), *((c.verify_steps, *c.accepted_per_position) for c in counts)])


def replay_acceptance(token_ids, prompt_length, draft_token_ids):
    """The 0/1 decisions of a verifier that gets one draft a step, in order, from the trainer's drafts alone.

    token_ids: the whole sequence. prompt_length: its prompt's tokens. draft_token_ids[t]: the trainer's draft for
    token t+2, as from `draft_tokens`; slots before prompt_length-1 and the last two are not read. Equal to vLLM's
    `per_step_accepted` iff the engine drafts with the trainer's weights and conventions. A request that was aborted and
    resumed: one call a segment, with all tokens before it as its prompt.

    As in vLLM, which counts before the stop cuts tokens off, eos and the last token of max_tokens are drafted like any
    other. Not covered, for vLLM has no draft of its own there: the token at index max_model_len-1 (near it drafting
    stops for the whole batch: leave some room), the first token after a preemption, and a prompt of one token whose
    prefill vLLM pads to a verify step (a 0 too many at the front).
    """
    emitted, drafted = _aligned(token_ids, prompt_length, draft_token_ids)
    decisions, i = [], 0
    while i < len(emitted):
        decisions.append(int(drafted[i] == emitted[i]))
        i += (
            1 + decisions[-1]
        )  # an accepted draft brings a bonus token, for which nothing was drafted
    return decisions


def decisions_from_gains(gains):
    """The engine's 0/1 decisions from the tokens a request gained a step, minus one (vLLM 0.25.1; one draft a step).

    gains: ints from the request's first step to its last; 0 where it got none (prefill's chunks, not scheduled). The
    first token is prefill's. A last gain of 1 gives None: rejected, or accepted and its bonus token cut by the stop.
    """
    gains = [gain for gain in _counts(gains, "gains") if gain]
    if gains[:1] == [2] or any(gain > 2 for gain in gains):
        wanted = "prefill's 1 and then 1 or 2 a step (one draft a step); count one request's tokens from its first step"
        raise ValueError(f"gains: got {gains!r:.80}, wanted {wanted}")
    decisions = [gain - 1 for gain in gains[1:]]
    return [*decisions[:-1], decisions[-1] or None] if decisions else []


def explain_disagreement(
    token_ids, prompt_length, draft_token_ids, decisions, drafts_by_cause=None
):
    """Where the engine's decisions part from the replay, and which suspected fault explains them; a dict json can dump.

    First three as in `replay_acceptance`. decisions: the engine's `per_step_accepted`, or of `decisions_from_gains`.
    drafts_by_cause: {fault: the trainer's drafts with that fault planted, like draft_token_ids}.
    Returns agrees; first_step (from 0) that differs; token_index and token emitted there; trainer_draft; engine_draft,
    "== 7" if the engine accepted, "!= 7" if it rejected (all that a decision tells); None each where no step differs;
    causes, the faults whose drafts replay to exactly the engine's decisions; and message, all of it in one line.
    """
    emitted, drafted = _aligned(token_ids, prompt_length, draft_token_ids)
    decisions = _items(decisions, "decisions")
    num_steps = len(decisions)
    decisions = _counts(
        decisions[:-1] if decisions and decisions[-1] is None else decisions, "decisions"
    )
    if any(decision > 1 for decision in decisions):
        wanted = "0 or 1 a step (None only as the last); draft one token a step"
        raise ValueError(f"decisions: got {decisions!r:.80}, wanted {wanted}")
    if drafts_by_cause is not None and not isinstance(drafts_by_cause, Mapping):
        came = f"drafts_by_cause: got {type(drafts_by_cause).__name__}"
        raise TypeError(
            f"{came}, wanted a dict of fault and draft ids; leave it out where nothing is suspected"
        )
    replay = replay_acceptance(token_ids, prompt_length, draft_token_ids)
    report = dict.fromkeys(("first_step", "token_index", "token", "trainer_draft", "engine_draft"))
    if _same(replay, decisions, num_steps):
        return {
            "agrees": True,
            **report,
            "causes": [],
            "message": f"the replay takes all {num_steps} decisions",
        }
    replays = {
        str(c): replay_acceptance(token_ids, prompt_length, ids)
        for c, ids in (drafts_by_cause or {}).items()
    }
    causes = [cause for cause in replays if _same(replays[cause], decisions, num_steps)]
    message = (
        f"the engine took {num_steps} decisions, the replay {len(replay)}, equal as far as both go"
    )
    step = next(
        (
            s
            for s, (ours, engine) in enumerate(zip(replay, decisions, strict=False))
            if ours != engine
        ),
        None,
    )
    if step is not None:
        i = step + sum(decisions[:step])
        index, engine_draft = (
            int(prompt_length) + 1 + i,
            f"{'==' if decisions[step] else '!='} {emitted[i]}",
        )
        report = dict(zip(report, (step, index, emitted[i], drafted[i], engine_draft), strict=True))
        message = f"step {step}, index {index}: the engine's draft was {engine_draft}, the trainer's is {drafted[i]}"
    left = len(emitted) - num_steps - sum(decisions)
    if left and not (
        left == -1 and decisions[-1:] == [1]
    ):  # the stop may cut the last bonus token off
        message += f"; the decisions emit {abs(left)} tokens too {'few' if left > 0 else 'many'}, see replay_acceptance"
    if replays:
        message += (
            f"; explained by {causes}" if causes else f"; explained by none of {list(replays)}"
        )
    return {"agrees": False, **report, "causes": causes, "message": message}


def _same(replay, decisions, num_steps):
    return len(replay) == num_steps and replay[: len(decisions)] == decisions


def _aligned(token_ids, prompt_length, draft_token_ids):
    """The response's tokens after prefill's, which is never a draft, and the draft for each; plain ints."""
    tokens, drafts = _counts(token_ids, "token_ids"), _items(draft_token_ids, "draft_token_ids")
    start = _count(prompt_length, "prompt_length") + 1
    if not 2 <= start <= len(tokens) + 1:
        came = f"prompt_length: got {prompt_length}, wanted 1 to {len(tokens)}, the length of token_ids"
        raise ValueError(f"{came}; pass the prompt's tokens too")
    if len(drafts) < len(tokens) - 2:
        came = f"draft_token_ids: got {len(drafts)} for {len(tokens)} tokens"
        raise ValueError(
            f"{came}; pass the prompt's slots too, wanted one a token: the last two may be left out"
        )
    emitted = tokens[start:]
    return emitted, _counts(
        drafts[start - 2 : start - 2 + len(emitted)], f"draft_token_ids from slot {start - 2}"
    )


def speedup_estimate(accept_length, draft_cost_ratio):
    """Did it pay: expected tokens a second with speculation over those without, and where it breaks even.

    A plain decode step costs 1 and emits 1 token. A verify step costs 1 + draft_cost_ratio (drafting, and what
    verifying adds) and emits accept_length tokens (accept_length_micro or emitted_length of `summarize`).
    spec/speedup_estimate = accept_length / (1 + draft_cost_ratio)
    spec/break_even_accept_length = 1 + draft_cost_ratio
    spec/break_even_accepted_per_step = draft_cost_ratio; a rate, with one draft a step; above 1 it can never pay.
    """
    length, ratio = (
        _number(accept_length, "accept_length", 1),
        _number(draft_cost_ratio, "draft_cost_ratio"),
    )
    return {
        "spec/speedup_estimate": length / (1 + ratio),
        "spec/break_even_accept_length": 1 + ratio,
        "spec/break_even_accepted_per_step": ratio,
    }


def _number(value, what, low=0):
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # of numpy or torch
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{what}: got {value!r:.80} ({type(value).__name__}), wanted a number; convert it"
        )
    if not low <= value < 2**63:  # also NaN; no counter holds more
        raise ValueError(
            f"{what}: got {value!r:.80}, wanted at least {low} and less than 2**63; see its source"
        )
    return value


def _count(value, what):
    value = _number(value, what)
    if value != int(value):
        raise ValueError(f"{what}: got {value}, wanted a whole number; counts are ints")
    return int(value)


def _items(values, what):
    if hasattr(values, "tolist") and not getattr(values, "is_nested", False):  # numpy, torch
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(
            f"{what}: got {type(values).__name__}, wanted a list (or a 1-D array or tensor); convert it"
        )
    return list(values)


def _counts(values, what):
    values = _items(values, what)
    if all(
        type(value) is int and 0 <= value < 2**63 for value in values
    ):  # the quick way for long sequences
        return values
    return [_count(value, f"{what}[{i}]") for i, value in enumerate(values)]


def _from_histogram(histogram, where):
    """histogram[j]: steps that accepted j drafts. Returns all steps, [steps that accepted at least 1, 2, .. drafts]."""
    bins = _counts(histogram, f"{where}: histogram")
    return sum(bins), [sum(bins[k:]) for k in range(1, len(bins))]


def _checked(
    where, drafted, accepted, steps, positions=None, emitted=None, num_tokens=None, max_drafts=None
):
    """The record, if the identities hold. num_tokens: the response with prefill's token; max_drafts: of one step."""
    drafted, accepted, steps = _counts(
        [drafted, accepted, steps], f"{where}: [drafted, accepted, verify steps]"
    )
    got = f"{where}: got {accepted} accepted of {drafted} drafted in {steps} verify steps"
    if accepted > drafted:
        raise ValueError(
            f"{got}, wanted accepted <= drafted; count drafts only, neither bonus tokens nor prefill's"
        )
    if drafted and not steps:
        raise ValueError(
            f"{got}, wanted the steps that verified them; has the engine another name for steps?"
        )
    if max_drafts is not None and drafted > max_drafts * steps:
        raise ValueError(f"{got}, wanted at most {max_drafts} drafted a step; pass both of one run")
    if positions is not None:
        positions = tuple(_counts(positions, f"{where}: accepted per position"))
        if any(here > before for before, here in zip((steps, *positions), positions, strict=False)):
            raise ValueError(
                f"{got}, per position {positions}; wanted at most {steps}, not rising, and no histogram"
            )
        if sum(positions) != accepted:
            raise ValueError(
                f"{got}, per position {positions}; wanted a sum of {accepted}; pass both of one request"
            )
    if (
        num_tokens is not None
    ):  # fewer tokens than steps is a DELTA output: then the number is unknown
        num_tokens = _count(num_tokens, f"{where}: tokens")
        emitted = num_tokens - 1 if num_tokens >= max(steps, 1) else None
    emitted = None if emitted is None else _count(emitted, f"{where}: emitted tokens")
    return SpecCounts(drafted, accepted, steps, positions, emitted)


def _known(counts, what):
    known = [(f"{what}[{i}]", c) for i, c in enumerate(_items(counts, what)) if c is not None]
    for where, c in known:
        if not isinstance(c, SpecCounts):
            raise TypeError(
                f"{where}: got {type(c).__name__}, wanted SpecCounts or None; see counts_from_*"
            )
    return [_checked(where, *vars(c).values()) for where, c in known]


def _add(rows):
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def main():
    drafted, accepted, steps = [12, 0, 3], [9, 0, 0], [4, 0, 1]
    print(f"drafted {drafted}  accepted {accepted}  verify steps {steps}")
    before = compute_spec_decode_metrics(drafted, accepted, steps)
    after = summarize([SpecCounts(*row) for row in zip(drafted, accepted, steps, strict=True)])
    for when, metrics in (("before", before), ("after", after)):
        print("\n".join(f"{when:8}{name:30}{value:8.4f}" for name, value in metrics.items()))

    tokens, drafts, stale = (
        [1, 2, 10, 11, 12, 13, 14, 15, 16],
        [0, 11, 0, 99, 14, 0, 16],
        [0, 11, 0, 99, 98, 97, 16],
    )
    rows = [["."] * len(tokens) for _ in range(2)]
    index = 3
    for decision in replay_acceptance(tokens, 2, drafts):
        rows[0][index], rows[1][index] = drafts[index - 2], decision
        index += 1 + decision
    for name, row in zip(
        ("index", "token", "draft", "decision"), (range(len(tokens)), tokens, *rows), strict=True
    ):
        print(f"{name:8}" + "".join(f"{cell:>4}" for cell in row))
    report = explain_disagreement(tokens, 2, drafts, [1, 0, 0, 0, 1], {"stale drafter": stale})
    print(f"engine decided [1, 0, 0, 0, 1]: {report['message']}")


if __name__ == "__main__":
    main()
