"""Fix 6: records from vLLM and SGLang, what is made of them, and the replay. Cases 25 to 32 are literal."""

import json
import random
import shutil
import subprocess
import sys
import traceback
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spec_metrics
from spec_metrics import (
    SpecCounts,
    add_counts,
    compute_spec_decode_metrics,
    conditional_rates,
    counts_from_sglang,
    counts_from_vllm,
    counts_from_vllm_counters,
    decisions_from_gains,
    explain_disagreement,
    replay_acceptance,
    speedup_estimate,
    summarize,
)

quick = settings(derandomize=True, deadline=None, max_examples=60)


# What the code did before.


def before_bonus_counted(accepted, drafted):
    """SGLang before sglang#23530: the bonus token is among the accepted, and among the drafted."""
    return (accepted + 1) / (drafted + 1)


def before_missing_keys_are_zero(meta, speculative_num_draft_tokens):
    """verl 0.9.1, async_sglang_server.py: defaults where SGLang 0.5.11 renamed the keys (verl#7543)."""
    return (
        int(meta.get("spec_draft_token_num", speculative_num_draft_tokens)),
        int(meta.get("spec_accept_token_num", 0)),
        int(meta.get("spec_verify_ct", 0)),
    )


def before_histogram_is_tokens(histogram):
    """A histogram of steps taken for accepted tokens a position."""
    return sum(histogram[1:])


def before_upstream(drafts, accepts, verifies):
    """verl 0.9.1, ray_trainer.py compute_spec_decode_metrics, its arithmetic."""
    rate = [(a / d) if d > 0 else 0.0 for a, d in zip(accepts, drafts, strict=True)]
    length = [(1.0 + a / v) if v > 0 else 0.0 for a, v in zip(accepts, verifies, strict=True)]
    return sum(rate) / len(rate), sum(length) / len(length)


# The vLLM of this environment; its import takes 10 to 20 s, so only the tests that need it pay.


@pytest.fixture(scope="session")
def vllm():
    stats = pytest.importorskip("vllm.v1.metrics.stats")
    if not hasattr(stats, "RequestSpecDecodeMetrics"):
        pytest.skip("this vLLM has no per-request records; 0.32 has")
    from vllm.outputs import CompletionOutput, RequestOutput

    def completion(steps, num_spec_tokens, detailed=False, index=0):
        """A CompletionOutput as the engine fills it; steps: (drafted, accepted) a verify step, None: not recorded."""
        record = None
        if steps is not None:
            record = stats.RequestSpecDecodeMetrics.new(num_spec_tokens)
            for drafted, accepted in steps:
                record.observe(drafted, accepted, detailed)
        token_ids = [5] * (1 + sum(1 + accepted for _, accepted in steps or []))
        return CompletionOutput(
            index, "", token_ids, None, None, finish_reason="length", spec_decode_metrics=record
        )

    def request(*completions):
        return RequestOutput("0", None, [1, 2], None, list(completions), finished=True)

    return SimpleNamespace(completion=completion, request=request)


# Records from vLLM.


def test_case_28_a_vllm_histogram_counts_steps_by_accepted_drafts():
    record = SimpleNamespace(histogram=[39, 1, 0, 3], num_spec_tokens=3, num_draft_tokens=129)
    request = SimpleNamespace(outputs=[SimpleNamespace(spec_decode_metrics=record)])
    assert counts_from_vllm([request]) == [SpecCounts(129, 10, 43, (4, 3, 3))]
    assert before_histogram_is_tokens([39, 1, 0, 3]) == 4  # not the 10 accepted
    summary = summarize(counts_from_vllm([request]))
    assert summary["spec/accept_rate_micro"] == pytest.approx(0.0775, abs=5e-5)
    assert summary["spec/accept_length_micro"] == pytest.approx(1.2326, abs=5e-5)
    positions = [summary[f"spec/accept_rate_pos_{k}"] for k in (1, 2, 3)]
    assert positions == pytest.approx([0.0930, 0.0698, 0.0698], abs=5e-5)
    assert sum(positions) == pytest.approx(summary["spec/accept_length_micro"] - 1, rel=1e-12)


@pytest.mark.parametrize("detailed", [False, True])
def test_case_32_each_completion_of_a_vllm_request_has_its_own_record(vllm, detailed):
    steps = [[(3, 3), (3, 0), (1, 1)], [(3, 2)], []]
    requests = [
        vllm.request(*(vllm.completion(s, 3, detailed, index=i) for i, s in enumerate(steps))),
        vllm.request(vllm.completion([(3, 0)], 3, detailed)),
    ]
    counts = counts_from_vllm(requests)
    assert counts == [
        SpecCounts(7, 4, 3, (2, 1, 1)),
        SpecCounts(3, 2, 1, (1, 1, 0)),
        SpecCounts(0, 0, 0, (0, 0, 0)),
        SpecCounts(3, 0, 1, (0, 0, 0)),
    ]
    assert [c.emitted_tokens for c in counts] == [7, 3, 0, 1]
    assert summarize(counts)["spec/requests_without_drafts"] == 1


def test_the_record_is_what_vllm_says_of_itself(vllm):
    completion = vllm.completion([(3, 3), (3, 0), (2, 1)], 3, detailed=True)
    summary, own = (
        summarize(counts_from_vllm([vllm.request(completion)])),
        completion.spec_decode_metrics.to_dict(),
    )
    assert summary["spec/accept_rate_micro"] == own["draft_acceptance_rate"]
    assert summary["spec/accept_length_micro"] == own["mean_acceptance_length"]


def test_case_30_an_aborted_request_is_missing_and_the_others_count(vllm):
    whole = vllm.request(vllm.completion([(1, 1)], 1))
    silent = vllm.request(vllm.completion(None, 1), vllm.completion([(1, 0)], 1, index=1))
    counts = counts_from_vllm([None, whole, silent, vllm.request()])
    assert counts == [None, SpecCounts(1, 1, 1, (1,)), None, SpecCounts(1, 0, 1, (0,)), None]
    summary = summarize(counts)
    assert summary["spec/requests"] == 5 and summary["spec/requests_missing"] == 3
    assert summary["spec/accept_rate_micro"] == 0.5
    with pytest.raises(TypeError):  # before: verl's mean over the Nones
        before_upstream([None, 1], [None, 1], [None, 1])


def test_the_field_of_verls_vllm_fork_is_read_for_single_completions_only():
    stats = SimpleNamespace(num_draft_tokens=12, num_accepted_tokens=9, num_verify_steps=4)
    one = SimpleNamespace(
        metrics=SimpleNamespace(request_spec_decode_stats=stats), outputs=[SimpleNamespace()]
    )
    two = SimpleNamespace(metrics=one.metrics, outputs=one.outputs * 2)
    plain = SimpleNamespace(metrics=None, outputs=one.outputs)
    assert counts_from_vllm([one, two, plain]) == [SpecCounts(12, 9, 4), None, None, None]


def test_an_accepted_prefix_cut_by_a_stop_shows_in_the_emitted_length_only(vllm):
    completion = vllm.completion([(1, 1), (1, 1)], 1)
    completion.token_ids.pop()  # max_tokens cut the last bonus token off
    summary = summarize(counts_from_vllm([vllm.request(completion)]))
    assert summary["spec/accept_length_micro"] == 2.0 and summary["spec/emitted_length"] == 1.5


def test_fewer_tokens_than_steps_leave_the_emitted_length_unknown(vllm):
    completion = vllm.completion([(1, 0)] * 5, 1)
    completion.token_ids = completion.token_ids[-1:]  # a DELTA output
    assert counts_from_vllm([vllm.request(completion)])[0].emitted_tokens is None
    assert "spec/emitted_length" not in summarize(counts_from_vllm([vllm.request(completion)]))


# Engine counters.


def snapshot(*engines):
    """llm.get_metrics() by hand; an engine is (drafted, accepted, steps, per position)."""
    metrics = [SimpleNamespace(name="vllm:num_preemptions", labels={}, value=7)]
    for engine, row in enumerate(engines):
        names = (*spec_metrics.VLLM_COUNTERS, spec_metrics.VLLM_PER_POSITION)
        for name, value in zip(names, row, strict=True):
            key = "values" if isinstance(value, list) else "value"
            metrics.append(
                SimpleNamespace(name=name, labels={"engine": str(engine)}, **{key: value})
            )
    return metrics


def test_counters_of_two_engines_are_summed_and_one_that_went_backwards_is_missing():
    before = snapshot((30, 10, 10, [6, 3, 1]), (3, 0, 1, [0, 0, 0]))
    after = snapshot((60, 25, 20, [13, 8, 4]), (6, 3, 2, [1, 1, 1]))
    assert counts_from_vllm_counters(before, after) == SpecCounts(33, 18, 11, (8, 6, 4))
    assert counts_from_vllm_counters(after, before) is None
    assert (
        counts_from_vllm_counters(before, snapshot((60, 25, 20, [13, 8, 4]))) is None
    )  # an engine vanished
    restarted = snapshot((60, 25, 20, [13, 8, 4]), (0, 0, 0, [0, 0, 0]))
    assert counts_from_vllm_counters(before, restarted) is None
    assert counts_from_vllm_counters([], before) == SpecCounts(33, 10, 11, (6, 3, 1))
    assert counts_from_vllm_counters(before, before) == SpecCounts(0, 0, 0, (0, 0, 0))
    assert counts_from_vllm_counters(snapshot((0, 0, 0, [0])), []) is None
    same_label = snapshot((30, 10, 10, [6, 3, 1])) + snapshot((3, 0, 1, [0, 0, 0]))
    assert counts_from_vllm_counters([], same_label) == SpecCounts(33, 10, 11, (6, 3, 1))
    assert summarize([None])["spec/requests_missing"] == 1


def test_an_engine_without_speculation_gives_none_and_half_a_snapshot_is_refused():
    assert counts_from_vllm_counters(snapshot(), snapshot()) is None
    no_positions = [
        metric
        for metric in snapshot((3, 1, 1, []))
        if metric.name != spec_metrics.VLLM_PER_POSITION
    ]
    assert counts_from_vllm_counters([], no_positions) == SpecCounts(3, 1, 1)
    with pytest.raises(ValueError, match="wanted a sum of 1"):
        counts_from_vllm_counters([], snapshot((3, 1, 1, [])))
    with pytest.raises(ValueError, match="pass the whole snapshot"):
        counts_from_vllm_counters([], snapshot((3, 1, 1, [1, 0, 0]))[:3])


def test_the_counters_difference_is_the_sum_of_the_per_request_records(vllm, monkeypatch):
    import prometheus_client
    from vllm.v1.metrics import reader
    from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats

    registry = (
        prometheus_client.CollectorRegistry()
    )  # vLLM's own classes, apart from a running engine's registry
    monkeypatch.setattr(reader, "REGISTRY", registry)
    monkeypatch.setattr(
        SpecDecodingProm, "_counter_cls", partial(prometheus_client.Counter, registry=registry)
    )
    config, engines = SimpleNamespace(num_speculative_tokens=3), {0: ["m", "0"], 1: ["m", "1"]}
    prometheus = SpecDecodingProm(config, ["model_name", "engine"], engines)

    rng = random.Random(0)
    draw = lambda: [(n, rng.randint(0, n)) for n in rng.choices((1, 2, 3), k=rng.randint(0, 6))]  # noqa: E731
    before, requests = None, []
    for i in range(20):
        if i == 10:
            before = reader.get_metrics_snapshot()
        steps, stats = draw(), SpecDecodingStats.new(3)
        for drafted, accepted in steps:
            stats.observe_draft(drafted, accepted)
        prometheus.observe(stats, engine_idx=i % 2)
        requests += [vllm.request(vllm.completion(steps, 3))] if i >= 10 else []
    counted = counts_from_vllm_counters(before, reader.get_metrics_snapshot())
    assert counted == add_counts(counts_from_vllm(requests)) and counted.verify_steps > 10


# SGLang.

SGLANG_VERSIONS = {
    "0.5.10": {"spec_draft_token_num": 12, "spec_accept_token_num": 9, "spec_verify_ct": 4},
    "0.5.11": {"spec_proposed_drafts": 12, "spec_accepted_drafts": 9, "spec_verify_ct": 4},
    "0.5.12": {
        "spec_num_proposed_drafts": 12,
        "spec_num_correct_drafts": 9,
        "spec_verify_ct": 4,
        "spec_proposed_drafts": 12,
        "spec_accepted_drafts": 9,
    },
    "later": {"spec_num_proposed_drafts": 12, "spec_num_correct_drafts": 9, "spec_verify_ct": 4},
}


def test_case_31_all_of_sglangs_namings_give_the_same_triple():
    for meta in SGLANG_VERSIONS.values():
        meta = {
            "id": "x",
            "completion_tokens": 14,
            "spec_accept_rate": 0.75,
            "spec_accept_length": 3.5,
        } | meta
        (counts,) = counts_from_sglang([meta])
        assert counts == SpecCounts(12, 9, 4) and counts.emitted_tokens == 13
        assert (
            summarize([counts])["spec/accept_length_micro"] == 3.25
        )  # SGLang's 3.5 counts prefill's token
    assert before_missing_keys_are_zero(SGLANG_VERSIONS["0.5.10"], 4) == (12, 9, 4)
    assert before_upstream(
        *([x] for x in before_missing_keys_are_zero(SGLANG_VERSIONS["0.5.11"], 4))
    ) == (0.0, 1.0)


def test_case_31_none_of_the_keys_is_none_and_some_of_them_an_error():
    assert (
        counts_from_sglang([{}, {"completion_tokens": 1}, None, {"spec_verify_ct": None}])
        == [None] * 4
    )
    with pytest.raises(
        ValueError, match=r"meta_infos\[1\]: got only \['spec_verify_ct'\].* add them there"
    ):
        counts_from_sglang([{}, {"spec_verify_ct": 4, "spec_drafts_of_tomorrow": 12}])
    with pytest.raises(ValueError, match="wanted spec_verify_ct and a pair"):
        counts_from_sglang([{"spec_proposed_drafts": 12, "spec_accepted_drafts": 9}])
    with pytest.raises(ValueError, match="got only"):
        counts_from_sglang(
            [{"spec_proposed_drafts": 12, "spec_num_correct_drafts": 9, "spec_verify_ct": 4}]
        )


@pytest.mark.parametrize("key", ["spec_accept_histogram", "spec_correct_drafts_histogram"])
def test_case_31_sglangs_histogram_gives_positions(key):
    meta = {
        "spec_draft_token_num": 215,
        "spec_accept_token_num": 63,
        "spec_verify_ct": 43,
        key: [11, 14, 11, 4, 0, 3],
    }
    counts = counts_from_sglang([meta])
    assert counts == [SpecCounts(215, 63, 43, (32, 18, 7, 3, 3))]
    summary = summarize(counts)
    assert summary["spec/accept_rate_micro"] == pytest.approx(0.2930, abs=5e-5)
    assert summary["spec/accept_length_micro"] == pytest.approx(2.4651, abs=5e-5)
    with pytest.raises(ValueError, match="a histogram of 43 steps, wanted spec_verify_ct = 42"):
        counts_from_sglang([meta | {"spec_verify_ct": 42}])


def test_case_29_the_denominator_is_what_was_drafted():
    for m in range(4):
        (counts,) = counts_from_sglang(
            [{"spec_draft_token_num": 3, "spec_accept_token_num": m, "spec_verify_ct": 1}]
        )
        assert summarize([counts])["spec/accept_rate_micro"] == m / 3
        assert (before_bonus_counted(m, 3) == m / 3) == (m == 3)


# verl's function and the summary.


def test_case_26_requests_that_never_drafted_stay_out_of_the_means():
    columns = [12, 0, 3], [9, 0, 0], [4, 0, 1]
    assert compute_spec_decode_metrics(*columns) == {
        "rollout/spec_accept_rate": 0.25,
        "rollout/spec_accept_length": pytest.approx(1.4167, abs=5e-5),
    }
    assert summarize([SpecCounts(*row) for row in zip(*columns, strict=True)]) == {
        "spec/requests": 3.0,
        "spec/requests_without_drafts": 1.0,
        "spec/requests_missing": 0.0,
        "spec/accept_rate_micro": pytest.approx(0.6),
        "spec/accept_rate_macro": pytest.approx(0.375),
        "spec/accept_length_micro": pytest.approx(2.8),
        "spec/accept_length_macro": pytest.approx(2.125),
    }


def test_case_27_micro_and_macro():
    columns = [30, 3], [15, 3], [10, 1]
    upstream = compute_spec_decode_metrics(*columns)
    assert upstream == {"rollout/spec_accept_rate": 0.75, "rollout/spec_accept_length": 3.25}
    summary = summarize([SpecCounts(*row) for row in zip(*columns, strict=True)])
    assert summary["spec/accept_rate_macro"] == 0.75 and summary["spec/accept_length_macro"] == 3.25
    assert summary["spec/accept_rate_micro"] == pytest.approx(0.5455, abs=5e-5)
    assert summary["spec/accept_length_micro"] == pytest.approx(2.6364, abs=5e-5)


def test_case_25_a_rollout_drafted_in_vain_reads_zero_and_one_without_drafts_reads_nothing():
    assert summarize([SpecCounts(12, 0, 4), SpecCounts(3, 0, 1)])["spec/accept_rate_micro"] == 0.0
    for nothing in ([], [None], [SpecCounts(0, 0, 0), None]):
        assert set(summarize(nothing)) == {
            "spec/requests",
            "spec/requests_without_drafts",
            "spec/requests_missing",
        }


def test_upstreams_mask_drops_placeholders_and_no_input_is_no_metric():
    columns = np.array([3, 3, 3]), [3, 0, 0], torch.tensor([1, 1, 1])
    for mask in (np.array([True, False, False]), [1, 0, 0], torch.tensor([True, False, False])):
        metrics = compute_spec_decode_metrics(*columns, non_padding_mask=mask)
        assert metrics == {"rollout/spec_accept_rate": 1.0, "rollout/spec_accept_length": 4.0}
    assert compute_spec_decode_metrics(None, None, None) == {}
    assert (
        compute_spec_decode_metrics([], [], [])
        == compute_spec_decode_metrics([3], [1], [1], [False])
        == {}
    )
    assert compute_spec_decode_metrics(np.array([2.0]), [1], [1])["rollout/spec_accept_rate"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([3], None, [1]), r"None for \['accepts'\] only; pass all three"),
        ((None, None, [1]), "only; pass all three"),
        (([3, 3], [3], [1, 1]), r"lengths \[2, 1, 2, 2\]"),
        (([3], [3], [1], [True, False]), r"lengths \[1, 1, 1, 2\]"),
        (([3], [3], [1], [2]), "in the mask a bool"),
        (([3], [4], [1]), "more accepted than drafted"),
        (([3], [-1], [1]), r"accepts\[0\]: got -1"),
        (([float("nan")], [0], [0]), r"drafts\[0\]: got nan"),
        (([2.5], [0], [1]), r"drafts\[0\]: got 2.5, wanted a whole number"),
        (([True], [0], [1]), r"drafts\[0\]: got True \(bool\)"),
        ((["3"], [0], [1]), r"drafts\[0\]: got '3'"),
        (("3", [0], [1]), "drafts: got str, wanted a list"),
        (([[3]], [0], [1]), r"drafts\[0\]: got \[3\] \(list\)"),
        ((3, [0], [1]), "drafts: got int"),
    ],
)
def test_verls_function_names_what_it_cannot_take(arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        compute_spec_decode_metrics(*arguments)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (
            SpecCounts(3, 4, 1),
            r"\[1\]: got 4 accepted of 3 drafted in 1 verify steps, wanted accepted <= drafted",
        ),
        (SpecCounts(3, -1, 1), "got -1, wanted at least 0"),
        (SpecCounts(3, 1, 0), "wanted the steps that verified them"),
        (SpecCounts(3, 1, float("nan")), "got nan"),
        (SpecCounts(3, 1, None), "got None"),
        (SpecCounts(3, 1, True), "got True"),
        (SpecCounts(6, 3, 2, (1, 2, 0)), "not rising"),
        (SpecCounts(6, 3, 2, (3,)), "at most 2"),
        (SpecCounts(6, 3, 2, (2, 0, 0)), "wanted a sum of 3"),
        (SpecCounts(129, 10, 43, (39, 1, 0, 3)), "no histogram"),
        (SpecCounts(6, 3, 2, 3), "accepted per position: got int"),
        (SpecCounts(6, 3, 2, None, -1), "emitted tokens: got -1"),
        ((3, 1, 1), "got tuple, wanted SpecCounts"),
    ],
)
def test_a_broken_identity_is_an_error_that_names_the_request(counts, text):
    for function in (summarize, conditional_rates, add_counts):
        with pytest.raises((ValueError, TypeError), match=text):
            function([SpecCounts(3, 1, 1), counts])


def test_more_drafts_than_the_steps_can_hold_are_refused_where_k_is_known(vllm):
    completion = vllm.completion([(3, 3), (3, 0)], 3)
    completion.spec_decode_metrics.num_draft_tokens = 7
    with pytest.raises(ValueError, match="wanted at most 3 drafted a step"):
        counts_from_vllm([vllm.request(completion)])
    with pytest.raises(ValueError, match="wanted at most 1 drafted a step"):
        counts_from_vllm_counters([], snapshot((3, 1, 2, [1])))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda: counts_from_vllm(SimpleNamespace(outputs=[])),
            "request_outputs: got SimpleNamespace, wanted a list",
        ),
        (lambda: counts_from_vllm([{}]), r"request_outputs\[0\].outputs: got NoneType"),
        (lambda: counts_from_vllm_counters(None, []), "before: got NoneType"),
        (lambda: counts_from_sglang({"spec_verify_ct": 4}), "meta_infos: got dict, wanted a list"),
        (
            lambda: counts_from_sglang([[4]]),
            r"meta_infos\[0\]: got list, wanted SGLang's meta_info",
        ),
        (lambda: summarize(SpecCounts(3, 1, 1)), "counts: got SpecCounts, wanted a list"),
        (lambda: replay_acceptance([1, 2, 3], 0, [1]), "prompt_length: got 0, wanted 1 to 3"),
        (lambda: replay_acceptance([1, 2, 3], 4, [1]), "prompt_length: got 4, wanted 1 to 3"),
        (lambda: replay_acceptance([], 1, []), "prompt_length: got 1, wanted 1 to 0"),
        (
            lambda: replay_acceptance([1, 2, 3, 4], 2, [1]),
            "draft_token_ids: got 1 for 4 tokens; pass the prompt's slots too",
        ),
        (
            lambda: replay_acceptance([1, 2, 3, 4], 1, [0, -1]),
            r"draft_token_ids from slot 0\[1\]: got -1",
        ),
        (
            lambda: replay_acceptance([[1, 2, 3]], 1, [[1]]),
            r"token_ids\[0\]: got \[1, 2, 3\] \(list\)",
        ),
        (lambda: decisions_from_gains([1, 3]), "wanted prefill's 1 and then 1 or 2 a step"),
        (lambda: decisions_from_gains([2, 1]), "wanted prefill's 1"),
        (lambda: explain_disagreement([1, 2, 3, 4], 1, [3, 4], [1, 2]), "wanted 0 or 1 a step"),
        (
            lambda: explain_disagreement([1, 2, 3, 4], 1, [3, 4], [None, 1]),
            r"decisions\[0\]: got None",
        ),
        (
            lambda: explain_disagreement([1, 2, 3, 4], 1, [3, 4], [1], [3]),
            "drafts_by_cause: got list, wanted a dict",
        ),
        (lambda: speedup_estimate(0.9, 0.1), "accept_length: got 0.9, wanted at least 1"),
        (lambda: speedup_estimate(1.5, float("inf")), "draft_cost_ratio: got inf"),
    ],
)
def test_errors_say_what_came_and_what_was_wanted(function, text):
    with pytest.raises((ValueError, TypeError), match=text):
        function()


def test_conditional_rates_ask_how_good_a_draft_is_once_those_before_it_were_right():
    counts = [SpecCounts(30, 18, 10, (8, 6, 4)), SpecCounts(3, 1, 1), None]
    assert conditional_rates(counts) == {
        "spec/accept_rate_cond_pos_1": 8 / 10,
        "spec/accept_rate_cond_pos_2": 6 / 8,
        "spec/accept_rate_cond_pos_3": 4 / 6,
    }
    assert summarize(counts)["spec/accept_rate_pos_2"] == 6 / 10
    assert conditional_rates([SpecCounts(6, 0, 2, (0, 0, 0))]) == {
        "spec/accept_rate_cond_pos_1": 0.0
    }
    assert conditional_rates([]) == {}


def test_segments_of_a_conversation_add_up_and_a_missing_one_is_left_out():
    first, second = SpecCounts(6, 3, 2, (2, 1, 0), 5), SpecCounts(3, 3, 1, (1, 1, 1), 3)
    total = add_counts([first, None, second, SpecCounts(0, 0, 0, None, 0)])
    assert total == SpecCounts(9, 6, 3, (3, 2, 1)) and total.emitted_tokens == 8
    assert add_counts([first, SpecCounts(3, 3, 1)]) == SpecCounts(9, 6, 3)
    assert add_counts([]) is add_counts([None]) is None
    assert SpecCounts(6, 3, 2, [2, 1, 0]) == first


# Properties of histories: a request is a list of (drafted, accepted), one a verify step.

STEP = st.integers(1, 4).flatmap(
    lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))
)
HISTORIES = st.lists(st.lists(STEP, max_size=6), min_size=1, max_size=6)


def record(steps):
    drafted, accepted = sum(d for d, _ in steps), sum(a for _, a in steps)
    positions = tuple(sum(a >= k for _, a in steps) for k in range(1, 5))
    return SpecCounts(drafted, accepted, len(steps), positions, accepted + len(steps))


@quick
@given(HISTORIES)
def test_the_numbers_reconcile(histories):
    counts = [record(steps) for steps in histories]
    summary = json.loads(json.dumps(summarize(counts) | conditional_rates(counts)))
    drafted = [c for c in counts if c.draft_tokens]
    assert all(type(value) is float for value in summarize(counts).values())
    assert ("spec/accept_rate_micro" in summary) == bool(drafted)
    if not drafted:
        return
    rates = [c.accepted_tokens / c.draft_tokens for c in drafted]
    assert min(rates) - 1e-12 <= summary["spec/accept_rate_micro"] <= max(rates) + 1e-12
    length = summary["spec/accept_length_micro"]
    assert sum(summary[f"spec/accept_rate_pos_{k}"] for k in range(1, 5)) == pytest.approx(
        length - 1
    )
    assert summary["spec/emitted_length"] == pytest.approx(length)
    product = 1.0
    for k in range(1, 5):
        product *= summary.get(f"spec/accept_rate_cond_pos_{k}", 0.0)
        assert summary[f"spec/accept_rate_pos_{k}"] == pytest.approx(product)
    total = summarize([add_counts(counts)])
    assert total["spec/accept_length_micro"] == length
    columns = zip(
        *((c.draft_tokens, c.accepted_tokens, c.verify_steps) for c in counts), strict=True
    )
    columns = list(map(list, columns))
    ours = compute_spec_decode_metrics(*columns)
    assert list(ours.values()) == pytest.approx(before_upstream(*columns))


@quick
@given(HISTORIES, st.randoms(use_true_random=False))
def test_order_and_segmentation_do_not_matter(histories, rng):
    whole = add_counts([record(steps) for steps in histories])
    cuts = [rng.randint(0, len(steps)) for steps in histories]
    parts = [
        record(part)
        for steps, cut in zip(histories, cuts, strict=True)
        for part in (steps[:cut], steps[cut:])
    ]
    rng.shuffle(parts)
    assert asdict(add_counts(parts)) == asdict(whole)


# The replay.


def decode(target, draft, prompt_length, max_tokens, eos=None):
    """A greedy engine with one draft a step. target[i], draft[i]: its token, its draft for index i."""
    tokens, decisions, gains = target[: prompt_length + 1], [], [1]
    end = prompt_length + max_tokens
    while len(tokens) < end and tokens[-1] != eos:
        i = len(tokens)
        decisions.append(int(draft[i] == target[i]))
        step = target[i : i + 1 + decisions[-1]][: end - i]  # counted first, then cut
        step = step[: step.index(eos) + 1] if eos in step else step
        tokens, gains = tokens + step, [*gains, len(step)]
    return tokens, decisions, gains


def test_the_replay_takes_one_draft_a_step_and_a_bonus_token_after_each_accepted_one():
    tokens, drafts = [1, 2, 10, 11, 12, 13, 14, 15, 16], [0, 11, 12, 99, 14, 15, 16, 0, 0]
    assert replay_acceptance(tokens, 2, drafts) == [1, 0, 1, 1]
    assert replay_acceptance(tokens, 2, drafts[:7]) == [
        1,
        0,
        1,
        1,
    ]  # the last two slots have no token to predict
    assert replay_acceptance(torch.tensor(tokens), np.int64(2), torch.tensor(drafts)) == [
        1,
        0,
        1,
        1,
    ]
    assert (
        replay_acceptance(tokens[:3], 2, drafts) == replay_acceptance(tokens[:2], 2, drafts) == []
    )
    assert replay_acceptance([7, 7], 1, []) == replay_acceptance([7], 1, []) == []
    assert replay_acceptance([1, 2, 3], 1, [3]) == [1] and replay_acceptance([1, 2, 3], 1, [2]) == [
        0
    ]
    assert replay_acceptance([1, 2, 3, 4], 1, [3, 9]) == [1]  # not [1, 0]: token 4 is the bonus
    assert replay_acceptance([1, 2, 3, 4], 2, [-1, 4]) == [
        1
    ]  # slot 0 drafts prefill's token: not read


def test_a_request_aborted_and_resumed_is_replayed_a_segment_at_a_time():
    rng = random.Random(0)
    target, draft = ([rng.randint(0, 1) for _ in range(60)] for _ in range(2))
    first, decided, _ = decode(target, draft, 4, 20)
    whole, decided_later, _ = decode(target, draft, len(first), 20)
    assert replay_acceptance(first, 4, draft[2:]) == decided
    assert replay_acceptance(whole, len(first), draft[2:]) == decided_later
    records = [SpecCounts(len(d), sum(d), len(d), (sum(d),)) for d in (decided, decided_later)]
    assert add_counts(records).draft_tokens == len(decided) + len(decided_later)


TOKENS = st.lists(st.integers(0, 2), min_size=40, max_size=40)


@quick
@given(TOKENS, TOKENS, st.integers(1, 6), st.integers(1, 30), st.sampled_from([None, 2]))
def test_the_replay_predicts_a_simulated_engine_to_the_last_step(
    target, draft, prompt_length, max_tokens, eos
):
    tokens, decisions, gains = decode(target, draft, prompt_length, max_tokens, eos)
    assert replay_acceptance(tokens, prompt_length, draft[2:]) == decisions
    taken = decisions_from_gains([0, *gains, 0])
    assert len(taken) == len(decisions)
    assert all(
        t == d or (t is None and s == len(taken) - 1)
        for s, (t, d) in enumerate(zip(taken, decisions, strict=True))
    )
    assert explain_disagreement(tokens, prompt_length, draft[2:], taken)["agrees"]
    cut = len(decisions) + sum(decisions) + 1 - (len(tokens) - prompt_length)
    assert cut in (
        0,
        decisions[-1] if decisions else 0,
    )  # emitted = accepted + steps + 1, or a bonus token was cut


def test_the_replay_predicts_vllms_own_scheduler_at_every_kind_of_end(vllm, tmp_path):
    """The real Scheduler, fed by hand in place of a model: no engine, and the end of a request is decided by vLLM."""
    schedule = vllm_scheduler(tmp_path, max_model_len=40)
    rng = random.Random(0)
    ends = set()
    for case in range(60):
        kind, prompt_length = ("length", "stop", "max_model_len")[case % 3], rng.randint(2, 6)
        target, draft = ([rng.randint(2, 4) for _ in range(80)] for _ in range(2))
        if kind == "stop":
            target[rng.randint(prompt_length, prompt_length + 12)] = 1  # eos
            draft = [t if t == 1 else d for t, d in zip(target, draft, strict=True)]
        max_tokens = 100 if kind == "max_model_len" else rng.randint(1, 14)
        tokens, output = schedule(f"request {case}", target, draft, prompt_length, max_tokens)
        decisions, replay = (
            output.spec_decode_metrics.per_step_accepted,
            replay_acceptance(tokens, prompt_length, draft[2:]),
        )
        if (
            kind == "max_model_len" and replay != decisions
        ):  # the one end that vLLM does not draft for
            assert replay[:-1] == decisions and len(tokens) == 40
            report = explain_disagreement(tokens, prompt_length, draft[2:], decisions)
            assert "the decisions emit 1 tokens too few" in report["message"]
            kind = "not drafted"
        else:
            assert replay == decisions
            output = SimpleNamespace(
                outputs=[SimpleNamespace(spec_decode_metrics=output.spec_decode_metrics)]
            )
            (counts,) = counts_from_vllm([output])
            cut = counts.accepted_tokens + counts.verify_steps + 1 - (len(tokens) - prompt_length)
            kind += f", {cut} cut"
        ends.add(kind)
    assert ends == {
        "length, 0 cut",
        "length, 1 cut",
        "stop, 0 cut",
        "stop, 1 cut",
        "max_model_len, 0 cut",
        "not drafted",
    }


def vllm_scheduler(folder, max_model_len):
    """schedule(request id, target, draft, prompt length, max_tokens) -> (tokens, the last EngineCoreOutput)."""
    from vllm import SamplingParams
    from vllm.config import (
        CacheConfig,
        ModelConfig,
        ObservabilityConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 96,
        "vocab_size": 8,
    }
    kind = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(sizes | kind))
    cache = CacheConfig(block_size=16, enable_prefix_caching=False)
    cache.num_gpu_blocks = 100
    config = VllmConfig(
        model_config=ModelConfig(
            str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        speculative_config=SpeculativeConfig(
            method="ngram", num_speculative_tokens=1, prompt_lookup_max=2
        ),
        observability_config=ObservabilityConfig(per_request_spec_decode_metrics="detailed"),
    )
    layer = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    blocks = KVCacheConfig(
        num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)]
    )
    scheduler = Scheduler(
        config, blocks, StructuredOutputManager(config), block_size=16, log_stats=True
    )

    def schedule(name, target, draft, prompt_length, max_tokens):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        sampling.update_from_generation_config({}, 1)
        tokens = target[:prompt_length]
        scheduler.add_request(Request(name, list(tokens), sampling, None))
        while True:
            step = scheduler.schedule()
            drafts, i = step.scheduled_spec_decode_tokens.get(name), len(tokens)
            sampled = target[i : i + 2] if drafts and drafts[0] == target[i] else target[i : i + 1]
            runner = ModelRunnerOutput([name], {name: 0}, sampled_token_ids=[sampled])
            (output,) = scheduler.update_from_output(step, runner)[0].outputs
            tokens += output.new_token_ids
            if output.finish_reason is not None:
                return tokens, output
            scheduler.update_draft_token_ids(DraftTokenIds([name], [[draft[len(tokens)]]]))

    return schedule


def test_the_last_gain_of_one_is_unknown_since_the_stop_may_have_cut_the_bonus_token():
    assert decisions_from_gains([0, 0, 1, 2, 0, 1, 2]) == [1, 0, 1]
    assert decisions_from_gains([1, 2, 1]) == [1, None]
    assert decisions_from_gains([1]) == decisions_from_gains([]) == decisions_from_gains([0]) == []


def test_a_disagreement_names_the_step_the_drafts_and_the_fault_that_explains_every_decision():
    tokens, drafts = [1, 2, 10, 11, 12, 13, 14, 15, 16], [0, 11, 12, 99, 14, 15, 16, 0, 0]
    stale, unswapped = [0, 11, 12, 99, 98, 97, 16, 0, 0], [0, 90, 91, 92, 93, 94, 95, 0, 0]
    faults = {"stale drafter": stale, "halves not swapped": unswapped}
    engine = replay_acceptance(tokens, 2, stale)
    report = explain_disagreement(tokens, 2, drafts, engine, faults)
    assert json.loads(json.dumps(report)) == {
        "agrees": False,
        "first_step": 2,
        "token_index": 6,
        "token": 14,
        "trainer_draft": 14,
        "engine_draft": "!= 14",
        "causes": ["stale drafter"],
        "message": "step 2, index 6: the engine's draft was != 14, the trainer's is 14; explained by ['stale drafter']",
    }
    assert explain_disagreement(tokens, 2, stale, [1, 0, 1, 1])["engine_draft"] == "== 14"
    assert (
        "none of ['halves"
        in explain_disagreement(tokens, 2, drafts, engine, {"halves": unswapped})["message"]
    )
    agreed = explain_disagreement(tokens, 2, drafts, [1, 0, 1, 1], faults)
    assert agreed["agrees"] and agreed["causes"] == [] and agreed["first_step"] is None
    assert explain_disagreement(tokens, 2, drafts, [1, 0, 1, None])["agrees"]


def test_decisions_that_do_not_cover_the_sequence_are_reported_as_such():
    tokens, drafts = [1, 2, 10, 11, 12, 13, 14, 15, 16], [0, 11, 12, 99, 14, 15, 16, 0, 0]
    padded = explain_disagreement(
        tokens, 2, drafts, [0, 1, 0, 1, 1]
    )  # a prefill padded to a verify step
    assert (
        not padded["agrees"] and "emit 1 tokens too many" not in padded["message"]
    )  # could still be a cut bonus
    short = explain_disagreement(tokens, 2, drafts, [1, 0])
    assert (
        short["first_step"] is None
        and "2 decisions, the replay 4, equal as far as both go" in short["message"]
    )
    assert "emit 3 tokens too few" in short["message"]
    assert (
        "emit 1 tokens too many"
        in explain_disagreement(tokens, 2, drafts, [0, 1, 0, 1, 0])["message"]
    )
    assert (
        "emit 2 tokens too many"
        in explain_disagreement(tokens, 2, drafts, [1, 0, 1, 1, 0])["message"]
    )


@quick
@given(TOKENS, TOKENS, TOKENS, st.integers(1, 6))
def test_a_planted_fault_is_found_whenever_it_changed_a_decision(
    target, draft, faulty, prompt_length
):
    tokens, decisions, _ = decode(target, faulty, prompt_length, 30)
    report = explain_disagreement(
        tokens, prompt_length, draft[2:], decisions, {"fault": faulty[2:]}
    )
    assert report["agrees"] == (replay_acceptance(tokens, prompt_length, draft[2:]) == decisions)
    if not report["agrees"]:
        assert (
            report["causes"] == ["fault"]
            and report["trainer_draft"] == draft[report["token_index"]]
        )
        implied = report["engine_draft"] == f"== {report['token']}"
        assert implied == (faulty[report["token_index"]] == report["token"])
        assert implied != (report["trainer_draft"] == report["token"])


# Did it pay?


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.9])
def test_the_estimated_speedup_is_that_of_a_simulated_decode_loop(accuracy):
    rng, draft_cost_ratio = random.Random(0), 0.3
    target = [rng.randint(0, 9) for _ in range(3003)]
    draft = [token if rng.random() < accuracy else token + 1 for token in target]
    _, decisions, gains = decode(target, draft, 1, 3000)
    seconds = sum(
        1.0 + draft_cost_ratio for _ in decisions
    )  # verify and draft, after a prefill both ways
    speedup = (sum(gains[1:]) / seconds) / (sum(gains[1:]) / sum(1.0 for _ in target[2:3001]))
    counts = SpecCounts(len(decisions), sum(decisions), len(decisions), None, sum(gains[1:]))
    summary = summarize([counts])
    estimate = speedup_estimate(summary["spec/emitted_length"], draft_cost_ratio)
    assert estimate["spec/speedup_estimate"] == pytest.approx(speedup, rel=1e-12)
    break_even = summary["spec/accept_rate_micro"] > estimate["spec/break_even_accepted_per_step"]
    assert break_even == (speedup > 1) == (accuracy > draft_cost_ratio)


def test_at_break_even_speculation_neither_pays_nor_costs():
    estimate = speedup_estimate(1.5, 0.25)
    assert estimate == {
        "spec/speedup_estimate": 1.2,
        "spec/break_even_accept_length": 1.25,
        "spec/break_even_accepted_per_step": 0.25,
    }
    assert (
        speedup_estimate(estimate["spec/break_even_accept_length"], 0.25)["spec/speedup_estimate"]
        == 1.0
    )


# Whatever comes in, an answer or an error of ours.

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats()
    | st.sampled_from(
        [
            "",
            "12",
            b"1",
            10**400,
            1j,
            np.array([1, 2]),
            np.array(3),
            np.float32(2),
            torch.tensor([2, 1]),
        ]
    )
    | st.builds(
        SpecCounts,
        st.integers(-1, 9),
        st.integers(-1, 9),
        st.integers(-1, 3),
        st.none() | st.just((1, 1)),
    )
    | st.builds(
        lambda x: SimpleNamespace(outputs=x, spec_decode_metrics=x), st.lists(st.none(), max_size=2)
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["spec_verify_ct", *sum(spec_metrics.SGLANG_NAMES, ()), "x"]),
            inner,
            max_size=4,
        )
        | st.builds(
            lambda name, value: SimpleNamespace(name=name, labels={}, value=value, values=value),
            st.sampled_from([*spec_metrics.VLLM_COUNTERS, spec_metrics.VLLM_PER_POSITION]),
            inner,
        )
        | st.builds(
            lambda x: SimpleNamespace(
                outputs=[SimpleNamespace(spec_decode_metrics=x, token_ids=x)]
            ),
            inner,
        )
        | st.builds(lambda x, n: SimpleNamespace(histogram=x, num_draft_tokens=n), inner, inner)
    ),
    max_leaves=6,
)
ARITIES = {
    counts_from_vllm: (1, 1),
    counts_from_vllm_counters: (2, 2),
    counts_from_sglang: (1, 1),
    add_counts: (1, 1),
    compute_spec_decode_metrics: (3, 4),
    summarize: (1, 1),
    conditional_rates: (1, 1),
    replay_acceptance: (3, 3),
    decisions_from_gains: (1, 1),
    explain_disagreement: (4, 5),
    speedup_estimate: (2, 2),
}


@pytest.mark.parametrize("function", ARITIES, ids=lambda function: function.__name__)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_junk_gives_an_answer_or_an_error_raised_by_the_module_itself(function, data):
    low, high = ARITIES[function]
    arguments = data.draw(st.lists(JUNK | st.lists(JUNK, max_size=4), min_size=low, max_size=high))
    try:
        result = function(*arguments)
    except (ValueError, TypeError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        assert frame.filename == spec_metrics.__file__ and frame.line.startswith("raise "), (
            arguments
        )
    else:
        json.dumps(result, default=asdict, allow_nan=False)


def test_the_file_runs_alone_and_prints_its_picture(tmp_path):
    shutil.copy(spec_metrics.__file__, tmp_path)
    check = "import sys, spec_metrics; assert not {'numpy', 'torch', 'vllm'} & set(sys.modules); spec_metrics.main()"
    command = [sys.executable, "-c", check]
    picture = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    for number in (
        "0.2500",
        "1.4167",
        "0.6000",
        "2.8000",
        "0.3750",
        "2.1250",
        "explained by ['stale drafter']",
    ):
        assert number in picture
    rows = [line.split() for line in picture.splitlines()]
    assert ["decision", ".", ".", ".", "1", ".", "0", "1", ".", "1"] in rows
