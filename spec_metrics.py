"""Fix 6 of 6: acceptance numbers that reconcile with the engine, and a replay that says why it fell.

Bug     Engines name and count drafts in different ways. A renamed key read with a default becomes
        "rate 0, length 1"; requests that never drafted are averaged in as zeros; a bonus token
        counts as an accepted draft; a step that drafted one token counts against position 2.
Rule    One record a request; what the engine did not say is None, and counted as missing. A verify
        step is an engine step with at least one draft for the request.
            rate = accepted / drafted             length = 1 + accepted / verify steps
            rate at position j = steps that accepted j or more / steps that drafted j or more
                drafted 12 0 3   accepted 9 0 0   verify steps 4 0 1    the second never drafted
                before   rate .250  length 1.417   its zeros pull both down
                after    rate .600  length 2.800   micro; macro over the two: .375 and 2.125
Replay  vLLM drafts the arg-max token, so at any temperature a draft is accepted iff it is the token
        that was emitted. The trainer's drafts thus predict every decision, or else the engine
        drafts with other weights or conventions. Here with one draft a step:
            index     0  1  2  3  4  5  6  7  8    P prompt, p prefill's token (never a draft)
            token     P  P  p 11 12 13 14 15 16    b bonus: comes with an accepted draft
            draft              11  b 99 14  b 16   the draft for index i stands in slot i-2
            decision            1     0  1     1   the last counts, its bonus token was cut off
Source  vllm 0.32.0 v1/metrics/stats.py, v1/spec_decode/metrics.py, v1/core/sched/scheduler.py;
        verl 0.9.1 ray_trainer.py; sglang 0.5.10 to 0.5.12 tokenizer_manager.py (sglang#23530)
Shapes  T tokens of a request, k drafts a step, V vocabulary
Run     python -m pytest tests/test_spec_metrics.py
"""

from dataclasses import dataclass, field, replace
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
SGLANG_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # 0.5.12 on, before

# What vLLM 0.32 does that no drafts of the trainer's show: scheduler.py pad_spec_decode,
# gpu_model_runner.py _input_fits_in_drafter, and no slot behind max_model_len.
VLLM_HABITS = (
    "a draft counted that was never made (vLLM's padded prefill)",
    "token 0 drafted (vLLM near max_model_len)",
    "no draft for the last token (vLLM at max_model_len)",
)


@dataclass(frozen=True)
class SpecCounts:
    """What one request drafted, accepted and verified; ints. Position j is entry j-1 of a tuple.

    accepted_per_position  verify steps that accepted j drafts or more; None: not known
    drafted_per_position   verify steps that drafted j or more; None: not known, and each is taken
                           to have drafted as many (rates may be too low)
    reached_per_position   those of them that accepted the j-1 before; None: not known, and taken
                           as many as the two above allow (exact if all steps drafted as many)
    emitted_tokens         tokens beyond prefill's own: accepted_tokens + verify_steps, less what a
                           stop (eos, max_tokens) cut off, plus steps without a draft
    Equality leaves out the last three: of two sources of one run, one may know more.
    """

    draft_tokens: int
    accepted_tokens: int
    verify_steps: int
    accepted_per_position: tuple[int, ...] | None = None
    drafted_per_position: tuple[int, ...] | None = field(default=None, compare=False)
    reached_per_position: tuple[int, ...] | None = field(default=None, compare=False)
    emitted_tokens: int | None = field(default=None, compare=False)


def counts_from_vllm(request_outputs):
    """One record a completion (n > 1 gives n), in order, from vLLM's `RequestOutput`s.

    None where the engine gave none: a request aborted or ended by a stop string, or None itself.
    vLLM 0.32: `per_request_spec_decode_metrics="detailed"` gives all fields, "summary" no
    drafted_per_position unless each step drafted k.
    Padded steps are left out (`steps_from_vllm`). Drafts of token 0, which vLLM counts near
    max_model_len, look like others here: ask `explain_disagreement`.
    """
    records = []
    for _, completion, record in _read_vllm(request_outputs):
        counts = None
        if record is not None:
            counts = _counts_of_steps(*record)
        num_tokens = len(getattr(completion, "token_ids", None) or ())
        records.append(counts and _finished(counts, f"completion {len(records)}", num_tokens))
    return records


def steps_from_vllm(request_outputs):
    """(accepted, drafted) a completion: lists of one number a step, for the replay; or None.

    From "detailed" records. Steps scheduled without a draft are not in them; one whose drafts a
    grammar refused is, with 0 drafted. vLLM 0.32 pads a request with one token left to prefill (a
    prefix-cache hit; a one-token prompt that joins others) to a verify step and counts k drafts
    that nobody made. Left out if prompt - num_cached_tokens is 1, the first step accepted nothing,
    and the tokens allow it (a real first step and a stop that cut a token off allow it, too).
    """
    records = [record for _, _, record in _read_vllm(request_outputs)]
    return [r[:2] if r is not None and len(r[0]) == sum(r[2]) else None for r in records]


def _read_vllm(request_outputs):
    """Accepted and drafted a step (empty in a "summary"), steps by number accepted, all drafted."""
    pairs = [(r, c) for r in request_outputs for c in getattr(r, "outputs", None) or [None]]
    for request, completion in pairs:
        record = getattr(completion, "spec_decode_metrics", None)
        if record is None:
            yield request, completion, None
            continue
        accepted = list(getattr(record, "per_step_accepted", ()))
        drafted = list(getattr(record, "per_step_drafted", ()))
        histogram, num_drafted = list(record.histogram), record.num_draft_tokens
        cached = getattr(request, "num_cached_tokens", None)
        if cached is not None and len(request.prompt_token_ids or ()) - cached == 1:
            emitted = sum(steps * (1 + number) for number, steps in enumerate(histogram))
            num_tokens = len(getattr(completion, "token_ids", None) or ())
            # Were the first step real, prefill's token would have come before it.
            if histogram[0] and not any(accepted[:1]) and num_tokens <= emitted:
                accepted, drafted = accepted[1:], drafted[1:]
                histogram[0], num_drafted = histogram[0] - 1, num_drafted - len(histogram) + 1
        yield request, completion, (accepted, drafted, histogram, num_drafted)


def _counts_of_steps(accepted, drafted, histogram, num_drafted):
    steps, positions = _from_histogram(histogram)
    counts = SpecCounts(num_drafted, sum(positions), steps - drafted.count(0), positions)
    if not drafted:
        return counts
    depths, pairs = range(1, len(histogram)), list(zip(accepted, drafted, strict=True))
    reached = tuple(sum(d >= j and a >= j - 1 for a, d in pairs) for j in depths)
    drafted = tuple(sum(d >= j for d in drafted) for j in depths)
    return replace(counts, drafted_per_position=drafted, reached_per_position=reached)


def _from_histogram(histogram):
    """histogram[j]: steps that accepted j drafts. All steps; those that accepted j or more."""
    return sum(histogram), tuple(sum(histogram[j:]) for j in range(1, len(histogram)))


def counts_from_vllm_counters(before, after):
    """One record of all that ran between two `llm.get_metrics()` snapshots (with log stats on).

    For vLLM 0.25.1, which has no per-request records; macro means of it mean nothing, and padded
    steps are in it. A snapshot's engines are summed; several LLMs: `add_counts`. None without
    speculation, or if a counter went backwards or vanished (an engine restarted).
    """
    before, after = _read_counters(before), _read_counters(after)
    sums = {}
    for key in before.keys() | after.keys():  # a counter that is not in `before` started from 0
        gains = _add([after.get(key, ()), [-value for value in before.get(key, ())]])
        if key not in after or min(gains, default=0) < 0:
            return None
        sums[key[0]] = _add([sums.get(key[0], ()), gains])
    if not sums:
        return None
    if any(name not in sums for name in VLLM_COUNTERS):
        raise ValueError(f"got only {sorted(sums)}, wanted {VLLM_COUNTERS}; pass all of after")
    totals = [sums[name][0] for name in VLLM_COUNTERS]
    return _finished(SpecCounts(*totals, sums.get(VLLM_PER_POSITION)), "after - before")


def _read_counters(snapshot):
    """{(name, labels): values}; an engine is one of the labels."""
    counters = {}
    for metric in snapshot:
        if metric.name in (*VLLM_COUNTERS, VLLM_PER_POSITION):
            key = metric.name, str(sorted(metric.labels.items()))
            values = metric.values if metric.name == VLLM_PER_POSITION else [metric.value]
            counters[key] = _add([counters.get(key, ()), values])
    return counters


def counts_from_sglang(meta_infos):
    """One record a request from SGLang's `meta_info` dicts, in any of its three namings.

    None without the keys: SGLang sends none for a request without a verify step, which so counts as
    missing. Some of the keys only: an error, lest a fourth naming pass for zeros.
    """
    records = []
    for i, meta in enumerate(meta_infos):
        meta = {key: value for key, value in (meta or {}).items() if value is not None}
        pair = next((pair for pair in SGLANG_NAMES if pair[0] in meta and pair[1] in meta), None)
        seen = sorted({"spec_verify_ct", *sum(SGLANG_NAMES, ())} & meta.keys())
        if seen and (pair is None or "spec_verify_ct" not in meta):
            wanted = f"spec_verify_ct and a pair of {SGLANG_NAMES}; new names? add them there"
            raise ValueError(f"meta_infos[{i}]: got only {seen} of {sorted(meta)}, wanted {wanted}")
        records.append(_sglang_counts(meta, pair, f"meta_infos[{i}]") if seen else None)
    return records


def _sglang_counts(meta, pair, where):
    drafted, accepted, steps = meta[pair[0]], meta[pair[1]], meta["spec_verify_ct"]
    positions = None
    histogram = next((meta[key] for key in SGLANG_HISTOGRAMS if key in meta), None)
    if histogram is not None:
        histogram_steps, positions = _from_histogram(histogram)
        if histogram_steps != steps:
            came = f"{where}: got a histogram of {histogram_steps} steps"
            raise ValueError(f"{came}, wanted spec_verify_ct = {steps}; pass both of one request")
        # It ends at the most that a step accepted; in SGLang all steps draft as many.
        positions += (0,) * (drafted // max(steps, 1) - len(positions))
    num_tokens = meta.get("completion_tokens", 0)
    return _finished(SpecCounts(drafted, accepted, steps, positions), where, num_tokens)


def add_counts(segments):
    """The record of a conversation (or of a request aborted and resumed) from those of its segments.

    None segments are left out: rate and length then describe the segments known. All None, or no
    segment: None. Of a segment without drafts only the emitted tokens count.
    """
    known = _known(segments, "segments")
    if not known:
        return None
    names = ("draft_tokens", "accepted_tokens", "verify_steps")
    totals = [sum(getattr(counts, name) for counts in known) for name in names]
    positions, emitted = [None] * 3, None
    if all(c.accepted_per_position is not None or not c.draft_tokens for c in known):
        rows = [_positions(c) for c in known if c.accepted_per_position is not None]
        positions = [_add(column) for column in zip(*rows, strict=True)] or positions
        if rows and sum(positions[1]) != totals[0]:  # some step drafted less: which, is not known
            positions[1] = None
    if all(c.emitted_tokens is not None for c in known):
        emitted = sum(c.emitted_tokens for c in known)
    return SpecCounts(*totals, *positions, emitted)


def _positions(counts):
    """Accepted, drafted and reached; the last two as SpecCounts says where they are not known."""
    accepted, drafted = counts.accepted_per_position, counts.drafted_per_position
    drafted = drafted or (counts.verify_steps,) * len(accepted)
    at_most = tuple(map(min, (counts.verify_steps, *accepted), drafted))
    return accepted, drafted, counts.reached_per_position or at_most


def compute_spec_decode_metrics(drafts, accepts, verifies, non_padding_mask=None):
    """verl's two numbers, by verl's names and formulas, from one int a request.

    rollout/spec_accept_rate: mean over requests of accepted / drafted. rollout/spec_accept_length:
    mean of 1 + accepted / verify steps. A denominator of 0 makes its term 0.0, as upstream.
    non_padding_mask: False for the placeholders of a padded batch. Three Nones or no request: {}.
    """
    num_absent = sum(column is None for column in (drafts, accepts, verifies))
    if num_absent == 3:
        return {}
    if num_absent:
        raise ValueError(f"got {num_absent} of three lists as None, wanted none of them or all")
    columns = [_list(column) for column in (drafts, accepts, verifies)]
    mask = [True] * len(columns[0]) if non_padding_mask is None else _list(non_padding_mask)
    requests = [row for *row, keep in zip(*columns, mask, strict=True) if keep]
    if any(not 0 <= accepted <= drafted or steps < 0 for drafted, accepted, steps in requests):
        raise ValueError("wanted 0 <= accepted <= drafted; count drafts only, no bonus tokens")
    if not requests:
        return {}
    rates = [accepted / drafted if drafted else 0.0 for drafted, accepted, _ in requests]
    lengths = [1.0 + accepted / steps if steps else 0.0 for _, accepted, steps in requests]
    names = ("rollout/spec_accept_rate", "rollout/spec_accept_length")
    return dict(zip(names, (fmean(rates), fmean(lengths)), strict=True))


def summarize(counts):
    """Floats to log, from one record (or None) a request. Without drafts, rates are absent, not 0.

    spec/requests: all; _missing of them gave no record, _without_drafts drafted nothing.
    spec/accept_rate_micro: all accepted / all drafted (0.0: a whole rollout drafted in vain, warn);
        _macro: mean of accepted / drafted over the requests that drafted.
    spec/accept_length_micro: 1 + all accepted / all verify steps; _macro: mean of the requests'.
    spec/accept_rate_pos_j: steps that accepted j or more / steps that drafted j or more, over the
        requests that have positions. If every step drafted k, their sum is accept_length_micro - 1.
    spec/emitted_length: tokens emitted / verify steps, where known: below accept_length_micro if a
        stop cut accepted tokens off, above it if some steps had no draft.
    """
    counts = list(counts)
    known = _known(counts, "counts")
    drafting = [c for c in known if c.draft_tokens]
    summary = {
        "spec/requests": float(len(counts)),
        "spec/requests_without_drafts": float(len(known) - len(drafting)),
        "spec/requests_missing": float(len(counts) - len(known)),
    }
    if not drafting:
        return summary
    total = add_counts(drafting)
    rates = [c.accepted_tokens / c.draft_tokens for c in drafting]
    lengths = [1 + c.accepted_tokens / c.verify_steps for c in drafting]
    summary["spec/accept_rate_micro"] = total.accepted_tokens / total.draft_tokens
    summary["spec/accept_rate_macro"] = fmean(rates)
    summary["spec/accept_length_micro"] = 1 + total.accepted_tokens / total.verify_steps
    summary["spec/accept_length_macro"] = fmean(lengths)
    summary |= _position_rates("spec/accept_rate_pos", drafting, 1)
    emitted = add_counts(c for c in drafting if c.emitted_tokens is not None)
    if emitted:
        summary["spec/emitted_length"] = emitted.emitted_tokens / emitted.verify_steps
    return summary


def conditional_rates(counts):
    """spec/accept_rate_cond_pos_j: steps that accepted j drafts or more / those that could have.

    Those drafted j or more and accepted the j-1 before: how good draft j is once those before it
    were right. If every step drafted k, the running product is `summarize`'s accept_rate_pos_j.
    """
    return _position_rates("spec/accept_rate_cond_pos", _known(counts, "counts"), 2)


def _position_rates(name, counts, denominator):
    rows = [_positions(c) for c in counts if c.accepted_per_position is not None]
    pairs = zip_longest(_add(r[0] for r in rows), _add(r[denominator] for r in rows), fillvalue=0)
    return {f"{name}_{j}": n / steps for j, (n, steps) in enumerate(pairs, 1) if steps}


def decisions_from_gains(gains, num_drafts=1):
    """The drafts accepted a step, from the tokens that a request gained a step (vLLM 0.25.1).

    gains: ints from the request's first step to its last; 0 where it got none. The first token is
    prefill's. A last gain below num_drafts + 1 gives None: the stop may have cut tokens off.
    """
    first, *gains = [gain for gain in gains if gain] or [1]
    if first != 1 or any(not 0 < gain <= num_drafts + 1 for gain in gains):
        wanted = f"prefill's 1, then 1 to {num_drafts + 1} a step; count from the first step on"
        raise ValueError(f"gains: got {[first, *gains]!r:.80}, wanted {wanted}")
    decisions = [gain - 1 for gain in gains]
    return [*decisions[:-1], *(d if d == num_drafts else None for d in decisions[-1:])]


def replay_acceptance(token_ids, prompt_length, draft_token_ids):
    """The number of drafts that each verify step accepts, in order, from the trainer's drafts alone.

    token_ids [T]: the whole sequence. prompt_length: its prompt's tokens. draft_token_ids [T], or
    [k, T]: entry [j-1][t] is the trainer's draft j for token t+1+j, as from `draft_tokens`; slots
    before prompt_length-1 and drafts beyond the last token are not read. Lists, arrays or tensors.
    Equal to vLLM's `per_step_accepted` iff the engine drafts with the trainer's weights and
    conventions. A request aborted and resumed: a call a segment, all before it being its prompt.

    vLLM counts before a stop cuts tokens off: eos and the last token of max_tokens are drafted like
    any other, and for k > 1 its last number may count tokens that are not there, the replay's can't
    (`replay_agreement` allows for it). Not covered: tokens near max_model_len (leave some room),
    the first token after a preemption, steps scheduled without drafts.
    """
    return [ours for _, ours, _ in _walk(token_ids, prompt_length, draft_token_ids, ())]


def replay_agreement(token_ids, prompt_length, draft_token_ids, accepted, drafted=None):
    """(agreed, total): in how many of the verify steps replay and engine accept as many drafts.

    First three as in `replay_acceptance`. accepted, drafted: the engine's numbers a step, from
    `steps_from_vllm` or `decisions_from_gains` (drafted None: always k). Each step is replayed at
    the slot where the engine took it, so one wrong decision counts once. A step without drafts does
    not count, a None in `accepted` agrees, a step that only one of the two took does not.
    """
    steps = list(_walk(token_ids, prompt_length, draft_token_ids, accepted, drafted))
    return sum(ours == engine for _, ours, engine in steps), len(steps)


def _walk(token_ids, prompt_length, draft_token_ids, accepted, drafted=None):
    """(index of the first draft's token, accepted by the replay, by the engine) a verify step.

    None: a step not taken. What the engine did not reveal, or a stop cut off, is as in the replay.
    """
    tokens, drafts = _list(token_ids), _rows(draft_token_ids)
    if not 1 <= prompt_length <= len(tokens):
        wanted = f"1 to {len(tokens)}, the length of token_ids; pass the prompt's tokens too"
        raise ValueError(f"prompt_length: got {prompt_length}, wanted {wanted}")
    if any(len(row) < len(tokens) - 1 - j for j, row in enumerate(drafts, 1)):
        came = f"draft_token_ids: got {[len(row) for row in drafts]} for {len(tokens)} tokens"
        raise ValueError(f"{came}, wanted one a token; pass the prompt's slots too")
    index, step = int(prompt_length) + 1, 0
    while step < len(accepted) or index < len(tokens):
        taken = step < len(accepted)
        num_drafts = drafted[step] if taken and drafted is not None else len(drafts)
        pairs = zip(drafts[:num_drafts], tokens[index : index + num_drafts], strict=False)
        ours = [*(row[index - 2] == token for row, token in pairs), False].index(False)
        engine = accepted[step] if taken and accepted[step] is not None else ours
        if not 0 <= engine <= num_drafts <= len(drafts):
            came = f"step {step}: got {engine} accepted of {num_drafts} drafted"
            raise ValueError(f"{came}, wanted at most the {len(drafts)} of draft_token_ids")
        cut = engine > ours and index + ours == len(tokens)
        if num_drafts:
            revealed = ours if cut else engine
            yield index, ours if index < len(tokens) else None, revealed if taken else None
        index, step = index + 1 + engine, step + 1


def explain_disagreement(
    token_ids, prompt_length, draft_token_ids, decisions, drafts_by_cause=None, drafted=None
):
    """Where the engine's decisions part from the replay, and which fault explains all of them.

    First three and drafted as in `replay_agreement`; decisions: its `accepted`.
    drafts_by_cause: {fault: the trainer's drafts with that fault planted, like draft_token_ids}.
    Returns a dict json can dump: agrees; first_step (from 0) that differs; token_index and token of
    the first draft decided otherwise; trainer_draft; engine_draft, "== 7" if the engine accepted,
    "!= 7" if it rejected (all that a decision tells); None each where no step differs; causes, the
    faults whose drafts replay to exactly the engine's decisions or, if none do, such VLLM_HABITS;
    and message, all of it in one line.
    """

    tokens, drafts = _list(token_ids), _rows(draft_token_ids)
    steps = list(_walk(tokens, prompt_length, drafts, decisions, drafted))
    report = dict.fromkeys(("first_step", "token_index", "token", "trainer_draft", "engine_draft"))
    if _agree(steps):
        message = f"the replay takes all {len(steps)} decisions"
        return {"agrees": True, **report, "causes": [], "message": message}
    first = next(n for n, step in enumerate(steps) if not _agree([step]))
    index, ours, engine = steps[first]
    if ours is None or engine is None:
        num_steps = len(replay_acceptance(tokens, prompt_length, drafts))
        message = f"the engine took {len(decisions)} decisions, the replay {num_steps}"
    else:
        j = min(ours, engine)
        token, draft = tokens[index + j], drafts[j][index - 2]
        implied = f"{'==' if engine > ours else '!='} {token}"
        report = dict(zip(report, (first, index + j, token, draft, implied), strict=True))
        where = f"step {first}, index {index + j}"
        message = f"{where}: the engine's draft was {implied}, the trainer's is {draft}"
    causes = [
        str(cause)
        for cause, ids in (drafts_by_cause or {}).items()
        if _agree(_walk(tokens, prompt_length, ids, decisions, drafted))
    ]
    if not causes:
        zeros = [row[: index - 2] + [0] * (len(row) - index + 2) for row in drafts]
        zeroed = _walk(tokens, prompt_length, zeros, decisions, drafted)
        later = _walk(tokens, prompt_length, drafts, decisions[1:], drafted and drafted[1:])
        explains = (
            decisions[:1] == [0] and _agree(later),
            engine is not None and _agree(step for step in zeroed if step[2] is not None),
            engine is None and _agree(steps[:-1]),
        )
        causes = [habit for habit, found in zip(VLLM_HABITS, explains, strict=True) if found]
    message += f"; explained by {causes or f'none of {list(drafts_by_cause or {})}'}"
    return {"agrees": False, **report, "causes": causes, "message": message}


def _agree(steps):
    return all(ours == engine for _, ours, engine in steps)


def expected_acceptance(p, q):
    """The chance that a draft sampled from q is accepted by a verifier with p: sum_v min(p_v, q_v).

    p, q [..., V]: probabilities, numpy arrays or torch tensors, float32 or better; returns [...] of
    the same kind, with gradient where they have it. p: the policy's for the token that is drafted,
    q: the MTP layer's, both at the request's temperature. For vLLM's
    `draft_sample_method="probabilistic"`; `compare_acceptance` sets it beside what was measured.
    """
    return (p - (p - q).clip(0)).sum(-1)


def compare_acceptance(requests):
    """What the engine accepted of probabilistic drafts beside what the trainer expects; floats.

    requests: (prompt_length, acceptance, accepted, drafted) each. acceptance [T] or [k, T]: entry
    [j-1][t] is `expected_acceptance` of draft j for token t+1+j; accepted, drafted as in
    `replay_agreement`. Over the steps that drafted j and accepted the j-1 before:
    spec/expected_cond_pos_j and spec/measured_cond_pos_j, rates, and spec/z_cond_pos_j, their
    difference in standard errors. A draft expected at rate r has variance r(1-r); given what came
    before, drafts are independent. With equal weights |z| is below 4, else far above: warn.
    """
    sums = {}
    for prompt_length, acceptance, accepted, drafted in requests:
        rows, index = _rows(acceptance), int(prompt_length) + 1
        for step, number in enumerate(accepted):
            if number is None:  # not revealed
                break
            num_drafts = len(rows) if drafted is None else drafted[step]
            for j, row in enumerate(rows[: min(num_drafts, number + 1)], 1):
                if index + j <= len(row) + 1:  # else a stop cut off what it was drafted from
                    rate = row[index - 2]
                    variance = max(rate * (1 - rate), 1e-6)  # float32 knows no rate better
                    sums[j] = _add([sums.get(j, ()), (1, rate, number >= j, variance)])
            index += 1 + number
    summary = {}
    for j, (reached, expected, measured, variance) in sorted(sums.items()):
        summary[f"spec/expected_cond_pos_{j}"] = expected / reached
        summary[f"spec/measured_cond_pos_{j}"] = measured / reached
        summary[f"spec/z_cond_pos_{j}"] = (measured - expected) / variance**0.5
    return summary


def _list(values):
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _rows(values):
    """[k, T] as k lists; [T] is one."""
    rows = [_list(row) if hasattr(row, "__len__") else row for row in _list(values)]
    return rows if rows and isinstance(rows[0], list) else [rows]


def _add(rows):
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))


def _known(counts, what):
    return [_checked(c, f"{what}[{i}]") for i, c in enumerate(counts) if c is not None]


def _checked(counts, where):
    """The record, if the identities hold; without drafts there is no verify step."""
    c = counts if counts.draft_tokens else replace(counts, verify_steps=0)
    totals = (c.accepted_tokens, c.draft_tokens)
    rows = (c.accepted_per_position, c.drafted_per_position)
    pairs = [(n, list(row)) for n, row in zip(totals, rows, strict=True) if row is not None]
    if not 0 <= c.accepted_tokens <= c.draft_tokens:
        wanted = "accepted <= drafted; count drafts only, no bonus tokens"
    elif not min(c.draft_tokens, 1) <= c.verify_steps <= c.draft_tokens:
        wanted = "the steps that had a draft"
    elif any(c.draft_tokens > c.verify_steps * len(row) for _, row in pairs):
        wanted = "a position for each draft of a step"
    elif any(sum(row) != n or row != sorted(row, reverse=True) for n, row in pairs):
        wanted = "positions that do not rise and sum up to the total; no histogram"
    elif any(not 0 <= n <= c.verify_steps for _, row in pairs for n in row):
        wanted = "positions of at most all steps"
    else:
        return c
    raise ValueError(f"{where}: got {c}, wanted {wanted}")


def _finished(counts, where, num_tokens=0):
    """A source's record, checked, with what follows from the rest. num_tokens: prefill's too."""
    steps = min(counts.verify_steps, counts.draft_tokens)  # in the others no draft was left
    emitted = num_tokens - 1 if num_tokens >= max(steps, 1) else None  # fewer: a DELTA output
    counts = replace(counts, verify_steps=steps, emitted_tokens=emitted)
    return add_counts([_checked(counts, where)])
