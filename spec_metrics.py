"""Fix 6 of 6: acceptance numbers that agree with the engine, and a replay that says why they fell.

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
        that was emitted: the trainer's drafts predict every decision, unless the engine drafts with
        other weights or conventions. Here with one draft a step:
            index     0  1  2  3  4  5  6  7  8    P prompt, p prefill's token (never a draft)
            token     P  P  p 11 12 13 14 15 16    b bonus: comes with an accepted draft
            draft              11  b 99 14  b 16   the draft for index i stands in slot i-2
            decision            1     0  1     1   the last counts, its bonus token was cut off
Source  vllm 0.32.0 v1/metrics/stats.py, v1/spec_decode/metrics.py, v1/core/sched/scheduler.py;
        verl 0.9.1 ray_trainer.py; sglang 0.5.10 to 0.5.12 tokenizer_manager.py (sglang#23530)
Shapes  T tokens of a request, k drafts a step, V vocabulary
Run     python -m pytest tests/test_spec_metrics.py
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import fmean

# After "vllm:spec_decode_num_", in the order of SpecCounts' fields; the last is a vector.
VLLM_COUNTERS = ("draft_tokens", "accepted_tokens", "drafts", "accepted_tokens_per_pos")
# SGLang, in the same order: 0.5.12 on (which sends the next two too), 0.5.11, up to 0.5.10.
SGLANG_NAMES = (
    ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct"),
    ("spec_proposed_drafts", "spec_accepted_drafts", "spec_verify_ct"),
    ("spec_draft_token_num", "spec_accept_token_num", "spec_verify_ct"),
)
SGLANG_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # 0.5.12 on, before


@dataclass(frozen=True)
class SpecCounts:
    """What one request drafted, accepted and verified; ints. Position j is entry j-1 of a tuple.

    accepted_per_position  verify steps that accepted j drafts or more; None: not known
    drafted_per_position   verify steps that drafted j or more; None: not known, and each is taken
                           to have drafted as many (rates may be too low)
    reached_per_position   those of them that accepted the j-1 before; None: as many as there can be
    emitted_tokens         all but prefill's own, also of steps without a draft; None: not known
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
    `per_request_spec_decode_metrics="summary"` tells drafted_per_position only if each step drafted
    k. Drafts of token 0 near max_model_len are counted: `explain_disagreement` names them.
    """
    return [counts for counts, _ in _read_vllm(request_outputs)]


def steps_from_vllm(request_outputs):
    """(accepted, drafted) a completion, one number a step, for the replay; None if not "detailed".

    Steps scheduled without a draft are not in them; one whose drafts a grammar refused is, with 0.
    """
    return [steps for _, steps in _read_vllm(request_outputs)]


def _read_vllm(request_outputs):
    """(SpecCounts, steps) a completion, less the step that vLLM 0.32 only padded; None: not known.

    It pads a request with one token left to prefill (a prefix-cache hit, or a one-token prompt that
    joins others) to a verify step, and counts k drafts that nobody made.
    """
    pairs = [(r, c) for r in request_outputs for c in getattr(r, "outputs", None) or [None]]
    for i, (request, completion) in enumerate(pairs):
        record = getattr(completion, "spec_decode_metrics", None)
        if record is None:
            yield None, None
            continue
        rising = [j for j, steps in enumerate(record.histogram) for _ in range(steps)]
        accepted, drafted = record.per_step_accepted or rising, record.per_step_drafted
        depths, total = range(1, len(record.histogram)), record.num_draft_tokens
        num_prefilled = len(request.prompt_token_ids) - (request.num_cached_tokens or 0)
        num_tokens = len(completion.token_ids)
        # A real first step comes after prefill's token: one more, unless a stop cut it off.
        maybe_padded = accepted[:1] == [0] and num_tokens <= len(accepted) + sum(accepted)
        if num_prefilled == 1 and maybe_padded:
            accepted, drafted, total = accepted[1:], drafted[1:], total - len(depths)
        rows = [tuple(sum(a >= j for a in accepted) for j in depths)]
        is_detailed = len(drafted) == len(accepted)
        if is_detailed:
            steps = list(zip(accepted, drafted, strict=True))
            rows.append(tuple(sum(d >= j for _, d in steps) for j in depths))
            rows.append(tuple(sum(d >= j and a >= j - 1 for a, d in steps) for j in depths))
        num_steps = min(len(accepted) - drafted.count(0), total)  # in others no draft was left
        emitted = num_tokens - 1 if num_tokens > num_steps else None  # fewer: a DELTA output
        counts = SpecCounts(total, sum(accepted), num_steps, *rows, emitted_tokens=emitted)
        counts = add_counts([_checked(counts, f"completion {i}")])
        yield counts, (accepted, drafted) if is_detailed else None


def counts_from_vllm_counters(before, after):
    """One record of all that ran between two `llm.get_metrics()` snapshots (with log stats on).

    For vLLM 0.25.1, which has no per-request records; padded steps are in it. A snapshot's engines
    are summed. None without speculation, or if a counter went backwards or vanished (a restart).
    """
    gains = Counter()  # by place in SpecCounts, and labels: an engine is one of them
    for sign, metric in [(1, m) for m in after] + [(-1, m) for m in before]:
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name in VLLM_COUNTERS:
            values = metric.values if hasattr(metric, "values") else [metric.value]
            for place, value in enumerate(values, VLLM_COUNTERS.index(name)):
                gains[place, str(metric.labels)] += sign * value
    if not gains or min(gains.values()) < 0:
        return None
    places = range(1 + max(gains)[0])
    sums = [sum(gain for (at, _), gain in gains.items() if at == place) for place in places]
    drafted, accepted, steps, *positions = sums
    return add_counts([SpecCounts(drafted, accepted, steps, tuple(positions))])


def counts_from_sglang(meta_infos):
    """One record a request from SGLang's `meta_info` dicts, in any of its three namings.

    None without the keys (no verify step). Some of them only: an error, lest new names read as 0.
    """
    return [_of_meta(meta or {}, f"meta_infos[{i}]") for i, meta in enumerate(meta_infos)]


def _of_meta(meta, where):
    seen = sorted(meta.keys() & set(sum(SGLANG_NAMES, ())))
    known = [names for names in SGLANG_NAMES if meta.keys() >= set(names)]
    if not seen:
        return None
    if not known:
        raise ValueError(f"{where}: got {seen} of {sorted(meta)}; add new names to SGLANG_NAMES")
    drafted, accepted, steps = (meta[name] for name in known[0])
    histogram = next((meta[name] for name in SGLANG_HISTOGRAMS if name in meta), None)
    if histogram and sum(histogram) != steps:
        raise ValueError(f"{where}: {steps} verify steps, but {sum(histogram)} in {histogram}")
    # It ends at the most that a step accepted; in SGLang all steps draft as many.
    depths = range(1, 1 + drafted // max(steps, 1))
    positions = tuple(sum(histogram[j:]) for j in depths) if histogram else None
    return add_counts([_checked(SpecCounts(drafted, accepted, steps, positions), where)])


def add_counts(segments):
    """The record of a conversation, or of a request aborted and resumed, from its segments'.

    Left out: None, and the steps of segments without drafts. None if every one is None.
    """
    known = [_checked(c, f"record [{i}]") for i, c in enumerate(segments) if c is not None]
    if not known:
        return None
    names = ("draft_tokens", "accepted_tokens", "verify_steps")
    totals = [sum(getattr(c, name) for c in known) for name in names]
    emitted = [c.emitted_tokens for c in known]
    emitted = None if None in emitted else sum(emitted)
    if any(c.draft_tokens and not c.accepted_per_position for c in known):
        return SpecCounts(*totals, emitted_tokens=emitted)
    accepted, drafted, reached = _positions(known)
    drafted = drafted if sum(drafted) == totals[0] else None  # None: some step drafted less
    return SpecCounts(*totals, accepted or None, drafted, reached, emitted)


def _checked(c, where):
    """The record, if it adds up; without drafts there is no verify step."""
    c = c if c.draft_tokens else replace(c, verify_steps=0)
    drafted, accepted, steps = c.draft_tokens, c.accepted_tokens, c.verify_steps
    holds = 0 <= accepted <= drafted and min(drafted, 1) <= steps <= drafted
    for total, row in ((accepted, c.accepted_per_position), (drafted, c.drafted_per_position)):
        if row is not None:
            falls = [steps, *row, 0] == sorted([steps, *row, 0], reverse=True)
            holds &= falls and sum(row) == total and drafted <= steps * len(row)
    if not holds or any(not a <= r <= d for a, d, r in zip(*_positions([c]), strict=True)):
        raise ValueError(f"{where}: {c} does not add up; is a bonus token or a histogram in it?")
    return c


def _positions(counts):
    """Steps that accepted, drafted and reached position j, over the records that have positions."""
    triples = []
    for c in counts:
        accepted = c.accepted_per_position or ()
        drafted = c.drafted_per_position or (c.verify_steps,) * len(accepted)
        at_most = tuple(map(min, (c.verify_steps, *accepted), drafted))
        triples.append((accepted, drafted, c.reached_per_position or at_most))
    columns = zip(*triples, strict=True)
    return [tuple(map(sum, zip_longest(*rows, fillvalue=0))) for rows in columns]


def compute_spec_decode_metrics(drafts, accepts, verifies, non_padding_mask=None):
    """verl's two numbers, by verl's names and formulas, from one int a request.

    rollout/spec_accept_rate: mean over requests of accepted / drafted. rollout/spec_accept_length:
    mean of 1 + accepted / verify steps. A denominator of 0 makes its term 0.0, as upstream.
    non_padding_mask: False for the placeholders of a padded batch. Three Nones or no request: {}.
    """
    columns = [column for column in (drafts, accepts, verifies) if column is not None]
    if not columns:
        return {}
    if len(columns) < 3:
        raise ValueError(f"got {len(columns)} of three lists and None, wanted all or none of them")
    mask = [True] * len(drafts) if non_padding_mask is None else non_padding_mask
    requests = [row for *row, keep in zip(*columns, mask, strict=True) if keep]
    if any(not 0 <= accepted <= drafted for drafted, accepted, _ in requests):
        raise ValueError("wanted 0 <= accepted <= drafted; count drafts only, no bonus tokens")
    if not requests:
        return {}
    rate = fmean(accepted / drafted if drafted else 0.0 for drafted, accepted, _ in requests)
    length = fmean(1.0 + accepted / steps if steps else 0.0 for _, accepted, steps in requests)
    return {"rollout/spec_accept_rate": rate, "rollout/spec_accept_length": length}


def summarize(counts):
    """Floats to log, from one record (or None) a request. Without drafts, rates are absent, not 0.

    spec/requests: all; _missing of them gave no record, _without_drafts drafted nothing.
    spec/accept_rate, _length: _micro over all steps, _macro a mean over the requests that drafted.
    spec/accept_rate_pos_j: over the steps that drafted j, of the requests that have positions.
    spec/accept_rate_cond_pos_j: over those of them that accepted the j-1 before.
    spec/emitted_length: tokens a verify step, less what a stop cut off.
    """
    counts = list(counts)
    total = add_counts(counts)
    known = [c for c in counts if c is not None]
    drafting = [c for c in known if c.draft_tokens]
    summary = {"spec/requests": float(len(counts))}
    summary["spec/requests_without_drafts"] = float(len(known) - len(drafting))
    summary["spec/requests_missing"] = float(len(counts) - len(known))
    if not drafting:
        return summary
    for name, records in ("micro", [total]), ("macro", drafting):
        rows = [(c.draft_tokens, c.accepted_tokens, c.verify_steps) for c in records]
        rate, length = compute_spec_decode_metrics(*zip(*rows, strict=True)).values()
        summary |= {f"spec/accept_rate_{name}": rate, f"spec/accept_length_{name}": length}
    for j, (accepted, drafted, reached) in enumerate(zip(*_positions(drafting), strict=True), 1):
        if drafted:
            summary[f"spec/accept_rate_pos_{j}"] = accepted / drafted
        if reached:
            summary[f"spec/accept_rate_cond_pos_{j}"] = accepted / reached
    if emitting := add_counts(c for c in drafting if c.emitted_tokens is not None):
        summary["spec/emitted_length"] = emitting.emitted_tokens / emitting.verify_steps
    return summary


def decisions_from_gains(gains, num_drafts=1):
    """The drafts accepted a step, from the tokens that a request gained a step (vLLM 0.25.1).

    gains: ints from the request's first step on, prefill's 1 included; 0 where it got none. A last
    gain below num_drafts + 1 gives None: the stop may have cut tokens off.
    """
    first, *gains = [gain for gain in gains if gain] or [1]
    if first != 1 or any(not 0 < gain <= num_drafts + 1 for gain in gains):
        raise ValueError(f"got {[first, *gains]}, wanted prefill's 1, then 1 to {num_drafts + 1}")
    decisions = [gain - 1 for gain in gains]
    return [*decisions[:-1], *(d if d == num_drafts else None for d in decisions[-1:])]


def replay_acceptance(token_ids, prompt_length, draft_token_ids):
    """The number of drafts that each verify step accepts, in order, by the trainer's drafts alone.

    token_ids [T]: prompt and response. draft_token_ids [T], or [k, T]: entry [j-1][t] is the
    trainer's draft j for token t+1+j, as from `draft_tokens`; slots before prompt_length-1 are not
    read. Lists, arrays or tensors. A request aborted and resumed: a call a segment, all before it
    being its prompt. Not covered: the end at max_model_len, the first token after a preemption,
    steps without drafts; and for k > 1 the engine's last number may count what a stop cut off.
    """
    return [ours for _, ours, _ in _walk(token_ids, prompt_length, draft_token_ids)]


def replay_agreement(token_ids, prompt_length, draft_token_ids, accepted, drafted=None):
    """(agreed, total): in how many of the verify steps replay and engine accept as many drafts.

    First three as in `replay_acceptance`. accepted, drafted: the engine's numbers a step, from
    `steps_from_vllm` or `decisions_from_gains` (drafted None: always k). Each step is replayed at
    the slot where the engine took it, so one wrong decision counts once. A step without drafts does
    not count, a None in `accepted` agrees, a step that only one of the two took does not.
    """
    steps = list(_walk(token_ids, prompt_length, draft_token_ids, accepted, drafted))
    return sum(ours == engine for _, ours, engine in steps), len(steps)


def _walk(token_ids, prompt_length, draft_token_ids, accepted=(), drafted=None):
    """(index of the first draft's token, accepted by the replay, by the engine) a verify step.

    None: a step not taken. What the engine did not reveal, or a stop cut off, is as in the replay.
    """
    (tokens,), rows = _rows(token_ids), _rows(draft_token_ids)
    if not 1 <= prompt_length <= len(tokens):
        raise ValueError(f"got prompt_length {prompt_length} of {len(tokens)}; pass all tokens")
    steps = zip(accepted, drafted or [len(rows)] * len(accepted), strict=True)
    index = prompt_length + 1
    while (step := next(steps, None)) or index < len(tokens):
        engine, num_drafts = step or (None, len(rows))
        pairs = zip(rows[:num_drafts], tokens[index : index + num_drafts], strict=False)
        ours = [*(row[index - 2] == token for row, token in pairs), False].index(False)
        if engine is None or (engine > ours and index + ours == len(tokens)):
            engine = ours
        if not 0 <= engine <= num_drafts <= len(rows):
            raise ValueError(f"index {index}: {engine} of {num_drafts} drafts, got {len(rows)}")
        if num_drafts:
            yield index, ours if index < len(tokens) else None, engine if step else None
        index += 1 + engine


def explain_disagreement(
    token_ids, prompt_length, draft_token_ids, decisions, drafts_by_cause=None, drafted=None
):
    """Where the engine's decisions part from the replay, and which fault explains all of them.

    Arguments as in `replay_agreement`; drafts_by_cause: {fault: the trainer's drafts with that
    fault planted}. Returns a dict json can dump: agrees; first_step that differs and token_index of
    its first draft, or None; causes, the faults whose drafts replay to exactly the engine's
    decisions or, if none do, habits of vLLM 0.32 that would; message, all of it in one line.
    """
    rows = _rows(draft_token_ids)

    def differing(drafts, start=0):
        engine = decisions[start:], drafted and drafted[start:]
        steps = enumerate(_walk(token_ids, prompt_length, drafts, *engine))
        return [(n, *step) for n, step in steps if step[1] != step[2]]

    wrong = differing(rows)
    first, index, ours, engine = wrong[0] if wrong else (None,) * 4
    report = {"agrees": not wrong, "first_step": first, "token_index": index, "causes": []}
    if not wrong:
        return report | {"message": f"the replay takes all {len(decisions)} decisions"}
    explains = {cause: not differing(ids) for cause, ids in (drafts_by_cause or {}).items()}
    if not any(explains.values()):
        zeros = [row[: index - 2] + [0] * len(row) for row in rows]
        zeroed = all(step[3] is None for step in differing(zeros))
        explains["vLLM: padded prefill step"] = decisions[:1] == [0] and not differing(rows, 1)
        explains["vLLM: token 0 drafted near max_model_len"] = engine is not None and zeroed
        explains["vLLM: no last draft at max_model_len"] = engine is None and len(wrong) == 1
    causes = [cause for cause, explained in explains.items() if explained]
    took = f"the engine accepted {engine} drafts, the replay {ours} (None: took no step)"
    message = f"step {first}, index {index}: {took}; explained by {causes or 'none of the causes'}"
    return report | {"causes": causes, "message": message}


def expected_acceptance(p, q):
    """The chance that a draft sampled from q is accepted by a verifier with p: sum_v min(p_v, q_v).

    p, q [..., V]: probabilities of policy and MTP layer for the token that is drafted, at the
    request's temperature; arrays or tensors, float32 or better. Returns [...] of the same kind,
    with gradient where they have it. For vLLM's `draft_sample_method="probabilistic"`.
    """
    return (p - (p - q).clip(0)).sum(-1)


def compare_acceptance(requests):
    """What the engine accepted of probabilistic drafts beside what the trainer expects; floats.

    requests: (prompt_length, acceptance, accepted, drafted) each. acceptance [T] or [k, T]: entry
    [j-1][t] is `expected_acceptance` of draft j for token t+1+j; the last two as in
    `replay_agreement`. Over the steps that drafted j and accepted the j-1 before:
    spec/expected_cond_pos_j and spec/measured_cond_pos_j, rates, and spec/z_cond_pos_j, their
    difference in standard errors. With equal weights |z| is below 4, else far above: warn.
    """
    outcomes = {}  # of draft j: (expected rate, whether accepted) in each step that came to it
    for prompt_length, acceptance, accepted, drafted in requests:
        rows, index = _rows(acceptance), prompt_length + 1
        drafted = drafted or [len(rows)] * len(accepted)
        for number, num_drafts in zip(accepted, drafted, strict=True):
            if number is None:  # not revealed
                break
            for j, row in enumerate(rows[: min(num_drafts, number + 1)], 1):
                if index + j <= len(row) + 1:  # else a stop cut off what it was drafted from
                    outcomes.setdefault(j, []).append((row[index - 2], number >= j))
            index += 1 + number
    summary = {}
    for j, pairs in sorted(outcomes.items()):
        rates, hits = zip(*pairs, strict=True)
        variance = sum(max(rate * (1 - rate), 1e-6) for rate in rates)  # float32: no rate is 0 or 1
        summary[f"spec/expected_cond_pos_{j}"] = fmean(rates)
        summary[f"spec/measured_cond_pos_{j}"] = fmean(hits)
        summary[f"spec/z_cond_pos_{j}"] = (sum(hits) - sum(rates)) / variance**0.5
    return summary


def _rows(values):
    """[k, T] as k lists; [T] is one."""
    rows = values.tolist() if hasattr(values, "tolist") else list(values)
    return list(map(list, rows)) if rows and hasattr(rows[0], "__len__") else [rows]
