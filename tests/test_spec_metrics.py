"""Fix 6: records from vLLM and SGLang, what is made of them, and the replay. Cases 25 to 32."""

import json
import random
import shutil
import subprocess
import sys
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
    compare_acceptance,
    compute_spec_decode_metrics,
    counts_from_sglang,
    counts_from_vllm,
    counts_from_vllm_counters,
    decisions_from_gains,
    expected_acceptance,
    explain_disagreement,
    replay_acceptance,
    replay_agreement,
    steps_from_vllm,
    summarize,
)

quick = settings(derandomize=True, deadline=None, max_examples=60)


# What the code did before.


def before_bonus_counted(accepted, drafted):
    """SGLang before sglang#23530: the bonus token is among the accepted, and among the drafted."""
    return (accepted + 1) / (drafted + 1)


def before_missing_keys_are_zero(meta, speculative_num_draft_tokens):
    """verl 0.9.1, async_sglang_server.py: defaults where SGLang 0.5.11 has new keys (verl#7543)."""
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
        """A CompletionOutput as the engine fills it; steps: (drafted, accepted), or no record."""
        record = None
        if steps is not None:
            record = stats.RequestSpecDecodeMetrics.new(num_spec_tokens)
            for drafted, accepted in steps:
                record.observe(drafted, accepted, detailed)
        token_ids = [5] * (1 + sum(1 + accepted for _, accepted in steps or []))
        return CompletionOutput(
            index, "", token_ids, None, None, finish_reason="length", spec_decode_metrics=record
        )

    def request(*completions, prompt=2, cached=None):
        return RequestOutput(
            "0", None, [1] * prompt, None, list(completions), True, num_cached_tokens=cached
        )

    return SimpleNamespace(completion=completion, request=request)


# Records from vLLM.


def test_case_28_a_vllm_histogram_counts_steps_by_accepted_drafts(vllm):
    request = vllm.request(vllm.completion([(3, 0)] * 39 + [(3, 1)] + [(3, 3)] * 3, 3))
    assert request.outputs[0].spec_decode_metrics.histogram == [39, 1, 0, 3]
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
        for name, value in zip(spec_metrics.VLLM_COUNTERS, row, strict=True):
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
    same_label = snapshot((30, 10, 10, [6, 3, 1])) + snapshot((3, 0, 1, [0, 0, 0]))
    assert counts_from_vllm_counters([], same_label) == SpecCounts(33, 10, 11, (6, 3, 1))
    assert summarize([None])["spec/requests_missing"] == 1


def test_an_engine_without_speculation_gives_none_and_half_a_snapshot_is_refused():
    assert counts_from_vllm_counters(snapshot(), snapshot()) is None
    with pytest.raises(ValueError):
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

    def draw():
        return [(n, rng.randint(0, n)) for n in rng.choices((1, 2, 3), k=rng.randint(0, 6))]

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
        assert counts == SpecCounts(12, 9, 4)
        assert (
            summarize([counts])["spec/accept_length_micro"] == 3.25
        )  # SGLang's 3.5 counts prefill's token
    assert before_missing_keys_are_zero(SGLANG_VERSIONS["0.5.10"], 4) == (12, 9, 4)
    assert before_upstream(
        *([x] for x in before_missing_keys_are_zero(SGLANG_VERSIONS["0.5.11"], 4))
    ) == (0.0, 1.0)


def test_case_31_none_of_the_keys_is_none_and_some_of_them_an_error():
    assert counts_from_sglang([{}, {"completion_tokens": 1}, None]) == [None] * 3
    with pytest.raises(
        ValueError, match=r"meta_infos\[1\].*\['spec_verify_ct'\].*spec_drafts_of_tomorrow"
    ):
        counts_from_sglang([{}, {"spec_verify_ct": 4, "spec_drafts_of_tomorrow": 12}])
    with pytest.raises(ValueError, match="SGLANG_NAMES"):
        counts_from_sglang([{"spec_proposed_drafts": 12, "spec_accepted_drafts": 9}])
    with pytest.raises(ValueError, match="SGLANG_NAMES"):
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
    with pytest.raises(ValueError, match=r"\[0\].*42.*43"):
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
    "columns",
    [
        ([3], None, [1]),
        (None, None, [1]),
        ([3, 3], [3], [1, 1]),
        ([3], [3], [1], [True, False]),
        ([3], [4], [1]),
        ([3], [-1], [1]),
    ],
)
def test_verls_function_takes_three_lists_of_one_length_without_bonus_tokens(columns):
    with pytest.raises(ValueError):
        compute_spec_decode_metrics(*columns)


@pytest.mark.parametrize(
    "counts",
    [
        SpecCounts(3, 4, 1),
        SpecCounts(3, -1, 1),
        SpecCounts(3, 1, 0),
        SpecCounts(3, 1, 4),
        SpecCounts(float("nan"), 1, 1),
        SpecCounts(6, 3, 2, (1, 2, 0)),
        SpecCounts(6, 3, 2, (3,)),
        SpecCounts(6, 3, 2, (2, 0, 0)),
        SpecCounts(6, 3, 2, (2, 2, -1)),
        SpecCounts(129, 10, 43, (39, 1, 0, 3)),
        SpecCounts(5, 3, 2, (2, 1, 0), (2, 1, 1)),
        SpecCounts(5, 3, 2, (2, 1, 0), (3, 1, 1)),
        SpecCounts(3, 3, 2, (2, 1), (1, 2)),
        SpecCounts(4, 4, 2, (2, 2), (2, 1, 1)),
        SpecCounts(4, 3, 2, (2, 1), (2, 2), (2, 0)),
    ],
)
def test_a_broken_identity_is_an_error_that_names_the_request(counts):
    for function in (summarize, add_counts):
        with pytest.raises(ValueError, match=r"\[1\]"):
            function([SpecCounts(3, 1, 1), counts])


def test_more_drafts_than_the_steps_can_hold_are_refused_where_k_is_known(vllm):
    completion = vllm.completion([(3, 3), (3, 0)], 3)
    completion.spec_decode_metrics.num_draft_tokens = 7
    with pytest.raises(ValueError, match="completion 1"):
        counts_from_vllm([None, vllm.request(completion)])
    with pytest.raises(ValueError, match=r"\[0\]"):
        counts_from_vllm_counters([], snapshot((3, 1, 2, [1])))


@pytest.mark.parametrize(
    "function",
    [
        lambda: replay_acceptance([1, 2, 3], 0, [1]),
        lambda: replay_acceptance([1, 2, 3], 4, [1]),
        lambda: replay_acceptance([1, 2, 3, 4], 2, [1]),
        lambda: replay_acceptance([1, 2, 3, 4, 5], 2, [[1, 2, 3], [1]]),
        lambda: replay_agreement([1, 2, 3, 4, 5], 1, [3, 4, 5], [2]),
        lambda: decisions_from_gains([1, 3]),
        lambda: decisions_from_gains([1, 5], 3),
        lambda: decisions_from_gains([2, 1]),
        lambda: counts_from_sglang([{"spec_verify_ct": 4, "spec_drafts_of_tomorrow": 12}]),
    ],
)
def test_what_would_be_misread_in_silence_is_refused(function):
    with pytest.raises((ValueError, IndexError)):
        function()


def test_conditional_rates_ask_how_good_a_draft_is_once_those_before_it_were_right():
    counts = [SpecCounts(30, 18, 10, (8, 6, 4)), SpecCounts(3, 1, 1), None]
    assert conditional(summarize(counts)) == {
        "spec/accept_rate_cond_pos_1": 8 / 10,
        "spec/accept_rate_cond_pos_2": 6 / 8,
        "spec/accept_rate_cond_pos_3": 4 / 6,
    }
    assert summarize(counts)["spec/accept_rate_pos_2"] == 6 / 10
    in_vain = summarize([SpecCounts(6, 0, 2, (0, 0, 0))])
    assert conditional(in_vain) == {"spec/accept_rate_cond_pos_1": 0.0}


def conditional(summary):
    return {name: rate for name, rate in summary.items() if "_cond_pos_" in name}


def test_segments_of_a_conversation_add_up_and_a_missing_one_is_left_out():
    first, second = (
        SpecCounts(6, 3, 2, (2, 1, 0), emitted_tokens=5),
        SpecCounts(3, 3, 1, (1, 1, 1), emitted_tokens=3),
    )
    total = add_counts([first, None, second, SpecCounts(0, 0, 0, emitted_tokens=0)])
    assert total == SpecCounts(9, 6, 3, (3, 2, 1)) and total.emitted_tokens == 8
    assert add_counts([first, SpecCounts(3, 3, 1)]) == SpecCounts(9, 6, 3)
    assert add_counts([]) is add_counts([None]) is None


# Drafts that change from step to step.


def test_a_step_without_a_draft_is_no_verify_step(vllm):
    detailed = vllm.completion([(3, 2), (0, 0), (3, 1)], 3, detailed=True)
    (counts,) = counts_from_vllm([vllm.request(detailed)])
    assert counts == SpecCounts(6, 3, 2, (2, 1, 0))
    assert counts.drafted_per_position == (2, 2, 2)
    summary = summarize([counts])
    assert summary["spec/accept_length_micro"] == 2.5
    assert [summary[f"spec/accept_rate_pos_{j}"] for j in (1, 2, 3)] == [1.0, 0.5, 0.0]
    before = 1 + 3 / 3, [2 / 3, 1 / 3, 0.0]
    assert before == (2.0, [pytest.approx(0.667, abs=5e-4), pytest.approx(0.333, abs=5e-4), 0.0])
    one_draft = vllm.completion([(1, 1), (0, 0), (1, 0)], 1)  # "summary"
    assert counts_from_vllm([vllm.request(one_draft)]) == [SpecCounts(2, 1, 2, (1,))]


def test_a_segment_without_drafts_leaves_the_length_as_it_was():
    segments = [SpecCounts(3, 3, 3, (3,)), SpecCounts(0, 0, 6, (0,))]
    assert add_counts(segments) == SpecCounts(3, 3, 3, (3,))
    assert summarize([add_counts(segments)])["spec/accept_length_micro"] == 2.0
    assert summarize(segments)["spec/accept_length_micro"] == 2.0
    assert 1 + 3 / (3 + 6) == pytest.approx(1.33, abs=5e-3)  # before


@pytest.mark.parametrize("source", ["vllm", "by hand"])
def test_a_position_is_measured_over_the_steps_that_drafted_it(vllm, source):
    counts = [SpecCounts(4, 4, 3, (3, 1), (3, 1))]
    if source == "vllm":
        completion = vllm.completion([(1, 1), (1, 1), (2, 2)], 2, detailed=True)
        counts = counts_from_vllm([vllm.request(completion)])
    assert summarize(counts)["spec/accept_rate_pos_2"] == 1.0  # before: 1/3
    assert summarize(counts)["spec/accept_rate_cond_pos_2"] == 1.0


def test_a_conditional_rate_counts_the_steps_that_drafted_on_from_an_accepted_draft(vllm):
    """One draft accepted, one pair rejected: no second draft had its chance."""
    completion = vllm.completion([(1, 1), (2, 0)], 2, detailed=True)
    counts = counts_from_vllm([vllm.request(completion)])
    assert conditional(summarize(counts)) == {"spec/accept_rate_cond_pos_1": 0.5}
    assert summarize(counts)["spec/accept_rate_pos_2"] == 0.0


def test_where_only_a_total_is_known_every_step_is_taken_to_have_drafted_as_many(vllm):
    full, varied = ([(3, 1), (3, 3)], [(3, 1), (2, 2)])
    known, unknown = (
        counts_from_vllm([vllm.request(vllm.completion(steps, 3))])[0] for steps in (full, varied)
    )
    assert known.drafted_per_position == (2, 2, 2) and unknown.drafted_per_position is None
    assert add_counts([known, unknown]).drafted_per_position is None
    assert summarize([unknown])["spec/accept_rate_pos_2"] == 1 / 2


# A draft that was never made.


@pytest.mark.parametrize("detailed", [False, True])
@pytest.mark.parametrize(("prompt", "cached"), [(1, 0), (17, 16)])
def test_a_padded_prefill_is_no_draft(vllm, detailed, prompt, cached):
    completion = vllm.completion([(1, 0), *[(1, 1)] * 4], 1, detailed)
    completion.token_ids.pop()  # the padded step emits prefill's token
    request = vllm.request(completion, prompt=prompt, cached=cached)
    assert counts_from_vllm([request]) == [SpecCounts(4, 4, 4, (4,))]  # before: 4 of 5
    assert steps_from_vllm([request]) == [([1] * 4, [1] * 4) if detailed else None]
    for other in (
        vllm.request(completion, prompt=prompt + 1, cached=cached),
        vllm.request(completion),
    ):
        assert counts_from_vllm([other]) == [SpecCounts(5, 4, 5, (4,))]
    completion.token_ids.append(5)  # one token more than a padded request can have
    assert counts_from_vllm([request]) == [SpecCounts(5, 4, 5, (4,))]


def test_vllms_own_scheduler_pads_a_prefix_cache_hit_and_the_record_is_mended(vllm, tmp_path):
    schedule = vllm_scheduler(tmp_path, max_model_len=60, prefix_caching=True)
    rng = random.Random(0)
    padded = 0
    for case in range(20):
        target = [rng.randint(2, 4) for _ in range(80)]
        for turn in range(2):  # the second finds 16 of its 17 tokens cached
            draft = [rng.randint(2, 4) for _ in range(80)]
            tokens, output, cached = schedule(f"{case}, {turn}", target, draft, 17, 20)
            completion = as_completion(tokens[17:], output)
            request = vllm.request(completion, prompt=17, cached=cached)
            ((accepted, drafted),) = steps_from_vllm([request])
            padded += len(output.spec_decode_metrics.per_step_accepted) - len(accepted)
            assert accepted == replay_acceptance(tokens, 17, draft[2:])
            assert counts_from_vllm([request])[0].draft_tokens == sum(drafted)
    assert padded == 20


# Properties: a request is played step by step, each step with 0 to 8 drafts.

STEP = st.integers(0, 8).flatmap(
    lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))
)
TURN = st.lists(STEP, max_size=8)
HISTORIES = st.lists(st.lists(TURN, min_size=1, max_size=3), min_size=1, max_size=4)


class Tally:
    """A verifier's own books: one draft after the other."""

    def __init__(self):
        self.steps = self.drafted = self.accepted = 0
        self.tried, self.drafted_at, self.accepted_at = ([0] * 9 for _ in range(3))

    def step(self, drafted, accepted):
        self.steps += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        for j in range(1, drafted + 1):
            self.drafted_at[j] += 1
            if accepted >= j - 1:
                self.tried[j] += 1
            if accepted >= j:
                self.accepted_at[j] += 1
        return self


def tally(turns):
    of = Tally()
    for turn in turns:
        for step in turn:
            of.step(*step)
    return of


@quick
@given(HISTORIES, st.booleans(), st.randoms(use_true_random=False))
def test_every_number_is_the_verifiers_own_whatever_each_step_drafted(vllm, histories, merged, rng):
    turns = [turn for request in histories for turn in request]
    segments = [
        counts_from_vllm([vllm.request(vllm.completion(turn, 8, detailed=True))])[0]
        for turn in turns
    ]
    books = tally(turns)
    if merged:
        rng.shuffle(segments)
    counts = [add_counts(segments)] if merged else segments
    summary = summarize(counts)
    assert all(type(value) is float for value in summary.values())
    assert ("spec/accept_rate_micro" in summary) == (books.drafted > 0)
    if not books.drafted:
        return
    assert summary["spec/accept_rate_micro"] == books.accepted / books.drafted
    assert summary["spec/accept_length_micro"] == 1 + books.accepted / books.steps
    for j in range(1, 9):
        rate, cond = f"spec/accept_rate_pos_{j}", f"spec/accept_rate_cond_pos_{j}"
        assert (rate in summary) == (books.drafted_at[j] > 0)
        assert (cond in summary) == (books.tried[j] > 0)
        if rate in summary:
            assert summary[rate] == books.accepted_at[j] / books.drafted_at[j]
        if cond in summary:
            assert summary[cond] == books.accepted_at[j] / books.tried[j]
    emitted = sum(1 + accepted for turn in turns for _, accepted in turn)
    if merged:  # steps without a draft emit, too
        assert summary["spec/emitted_length"] == emitted / books.steps


def from_vllm(vllm, steps, level):
    completion = vllm.completion([step for step in steps if step[0]], 8, level == "detailed")
    return counts_from_vllm([vllm.request(completion)])[0]


def from_counters(vllm, steps, level):
    books = tally([steps])
    row = (books.drafted, books.accepted, books.steps, books.accepted_at[1:])
    return counts_from_vllm_counters(snapshot((7, 5, 3, [3, 2])), grown(row))


def grown(row):
    first = [3, 2, *[0] * 6]
    return snapshot(
        (7 + row[0], 5 + row[1], 3 + row[2], [a + b for a, b in zip(first, row[3], strict=True)])
    )


def from_sglang(vllm, steps, level):
    books = tally([steps])
    most = max((accepted for drafted, accepted in steps if drafted), default=0)
    histogram = [0] * (most + 1)
    for drafted, accepted in steps:
        histogram[accepted] += drafted > 0
    totals = books.drafted, books.accepted, books.steps
    meta = dict(zip(spec_metrics.SGLANG_NAMES[level], totals, strict=True))
    meta |= {"spec_accept_histogram": histogram}
    return counts_from_sglang([meta if books.steps else {}])[0]


SOURCES = [
    (from_vllm, "detailed"), (from_vllm, "summary"), (from_counters, None),
    (from_sglang, 0), (from_sglang, 1), (from_sglang, 2),
]  # fmt: skip


@pytest.mark.parametrize(("source", "level"), SOURCES)
@quick
@given(TURN, st.integers(0, 8))
def test_all_sources_tell_the_same_and_what_they_do_not_know_is_none(
    vllm, source, level, steps, always
):
    if always or source is from_sglang:  # a fixed number of drafts
        steps = [(always or 3, min(accepted, always or 3)) for _, accepted in steps]
    books, counts = tally([steps]), source(vllm, steps, level)
    if counts is None:  # SGLang has no keys for a request that never drafted
        assert source is from_sglang and not books.steps
        return
    numbers = counts.draft_tokens, counts.accepted_tokens, counts.verify_steps
    assert numbers == (books.drafted, books.accepted, books.steps)
    width = len(counts.accepted_per_position)
    assert list(counts.accepted_per_position) == books.accepted_at[1 : width + 1]
    assert not any(books.accepted_at[width + 1 :])
    if counts.drafted_per_position is not None:
        assert list(counts.drafted_per_position) == books.drafted_at[1 : width + 1]
    known = level == "detailed" or source is from_sglang or always == 8 or not books.steps
    assert known <= (counts.drafted_per_position is not None)
    summary = summarize([counts, None])
    assert summary["spec/requests_missing"] == 1.0
    columns = [books.drafted], [books.accepted], [books.steps]
    ours = compute_spec_decode_metrics(*columns)
    assert list(ours.values()) == pytest.approx(before_upstream(*columns))
    if books.steps:
        assert summary["spec/accept_length_macro"] == ours["rollout/spec_accept_length"]


# The replay.


def decode(target, draft, prompt_length, max_tokens, eos=None):
    """A greedy engine, one draft a step. target[i], draft[i]: its token, its draft for index i."""
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
    """The real Scheduler, fed by hand in place of a model: vLLM decides when a request ends."""
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
        tokens, output, _ = schedule(f"request {case}", target, draft, prompt_length, max_tokens)
        decisions, replay = (
            output.spec_decode_metrics.per_step_accepted,
            replay_acceptance(tokens, prompt_length, draft[2:]),
        )
        if (
            kind == "max_model_len" and replay != decisions
        ):  # the one end that vLLM does not draft for
            assert replay[:-1] == decisions and len(tokens) == 40
            report = explain_disagreement(tokens, prompt_length, draft[2:], decisions)
            assert "no last draft" in report["causes"][0]
            kind = "not drafted"
        else:
            assert replay == decisions
            (counts,) = counts_from_vllm([vllm.request(as_completion(tokens, output))])
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


def as_completion(token_ids, output):
    """What a CompletionOutput carries of the scheduler's last EngineCoreOutput."""
    return SimpleNamespace(token_ids=token_ids, spec_decode_metrics=output.spec_decode_metrics)


def vllm_scheduler(folder, max_model_len, prefix_caching=False):
    """schedule(request id, target, draft, prompt length, max_tokens): tokens, output, cached."""
    from vllm import SamplingParams
    from vllm.config import (
        CacheConfig,
        ModelConfig,
        ObservabilityConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
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
    cache = CacheConfig(block_size=16, enable_prefix_caching=prefix_caching)
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

    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)

    def schedule(name, target, draft, prompt_length, max_tokens):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        sampling.update_from_generation_config({}, 1)
        tokens, cached = target[:prompt_length], 0
        scheduler.add_request(Request(name, list(tokens), sampling, None, block_hasher=hasher))
        while True:
            step = scheduler.schedule()
            drafts, i = step.scheduled_spec_decode_tokens.get(name), len(tokens)
            sampled = target[i : i + 2] if drafts and drafts[0] == target[i] else target[i : i + 1]
            runner = ModelRunnerOutput([name], {name: 0}, sampled_token_ids=[sampled])
            (output,) = scheduler.update_from_output(step, runner)[0].outputs
            tokens += output.new_token_ids
            if output.prefill_stats is not None:
                cached = output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                return tokens, output, cached
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
        "causes": ["stale drafter"],
        "message": report["message"],
    }
    for fact in ("step 2", "index 6", "engine accepted 0", "replay 1", "'stale drafter'"):
        assert fact in report["message"]
    report = explain_disagreement(tokens, 2, drafts, engine, {"halves": unswapped})
    assert report["causes"] == [] and "halves" not in report["message"]
    agreed = explain_disagreement(tokens, 2, drafts, [1, 0, 1, 1], faults)
    assert agreed["agrees"] and agreed["causes"] == [] and agreed["first_step"] is None
    assert explain_disagreement(tokens, 2, drafts, [1, 0, 1, None])["agrees"]


def test_decisions_that_do_not_cover_the_sequence_are_reported_as_such():
    tokens, drafts = [1, 2, 10, 11, 12, 13, 14, 15, 16], [0, 11, 12, 99, 14, 15, 16, 0, 0]
    padded = explain_disagreement(tokens, 2, drafts, [0, 1, 0, 1, 1])
    assert not padded["agrees"] and ["padded" in cause for cause in padded["causes"]] == [1]
    short = explain_disagreement(tokens, 2, drafts, [1, 0])
    assert short["first_step"] == 2 and short["causes"] == []
    assert "step 2, index 6: the engine accepted None" in short["message"]
    assert not explain_disagreement(tokens, 2, drafts, [1, 0, 1, 1, 0])["agrees"]


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
        assert report["causes"] == ["fault"]
        index = report["token_index"]
        assert (faulty[index] == tokens[index]) != (draft[index] == tokens[index])


# Several drafts a step.


def decode_k(target, drafts, prompt_length, max_tokens, fault=None):
    """A greedy engine with k drafts a step. drafts[j-1][i]: its draft j for index i.

    Returns tokens, accepted a step, drafted a step. fault: a step whose first decision is turned.
    """
    tokens, accepted, drafted = target[: prompt_length + 1], [], []
    end = prompt_length + max_tokens
    while len(tokens) < end:
        index, number = len(tokens), 0
        while number < len(drafts) and drafts[number][index + number] == target[index + number]:
            number += 1
        if len(accepted) == fault:
            number = 0 if number else 1
        accepted.append(number)
        drafted.append(len(drafts))
        tokens += target[index : index + number + 1][: end - index]
    return tokens, accepted, drafted


def at_slots(drafts):
    """[j-1][t] for token t+1+j, from [j-1][i] for index i."""
    return [row[j + 1 :] + [0] * (j + 1) for j, row in enumerate(drafts, 1)]


def test_with_k_drafts_a_step_reads_one_slot_of_all_rows():
    tokens = [1, 2, 10, 11, 12, 13, 14, 15, 16, 17]
    first = [0, 11, 0, 0, 0, 15, 0, 0]  # slots 0 to 7
    second = [0, 12, 0, 0, 0, 99, 0, 0]
    third = [0, 13, 0, 0, 0, 0, 0, 0]
    # 10 is prefill's. Slot 1 drafts 11 12 13, 14 is the bonus. Slot 5 drafts 15, then 99: 16 is the
    # bonus. Slot 7 drafts 0 for 17.
    assert replay_acceptance(tokens, 2, [first, second, third]) == [3, 1, 0]
    assert replay_acceptance(tokens, 2, torch.tensor([first, second, third])) == [3, 1, 0]
    assert replay_acceptance(np.array(tokens), 2, np.array([first])) == [1, 0, 0, 1, 0]
    assert replay_acceptance(tokens, 2, first) == replay_acceptance(tokens, 2, (first,))
    assert replay_agreement(tokens, 2, [first, second, third], [3, 1, 0]) == (3, 3)


ROWS = st.integers(1, 8).flatmap(lambda k: st.lists(TOKENS, min_size=k, max_size=k))


@quick
@given(TOKENS, ROWS, st.integers(1, 6), st.integers(1, 20))
def test_the_replay_predicts_a_simulated_engine_with_k_drafts(target, rows, prompt, max_tokens):
    target, rows = target * 2, [row * 2 for row in rows]
    tokens, accepted, drafted = decode_k(target, rows, prompt, max_tokens)
    replay = replay_acceptance(tokens, prompt, at_slots(rows))
    assert replay[:-1] == accepted[:-1] and len(replay) == len(accepted)
    for of in (None, drafted):
        agreement = replay_agreement(tokens, prompt, at_slots(rows), accepted, of)
        assert agreement == (len(accepted), len(accepted))
    if accepted:
        unseen = 1 + sum(accepted) + len(accepted) - max_tokens  # cut off with the last step
        assert replay[-1] == min(accepted[-1], accepted[-1] + 1 - unseen)
    gains = [1, *(number + 1 for number in accepted)]
    gains[-1] -= sum(gains) - (len(tokens) - prompt)
    taken = decisions_from_gains(gains, len(rows))
    assert taken[:-1] == accepted[:-1] and taken[-1:] in ([], [None], [len(rows)])
    agreement = replay_agreement(tokens, prompt, at_slots(rows), taken)
    assert agreement == (len(accepted), len(accepted))
    assert explain_disagreement(tokens, prompt, at_slots(rows), accepted)["agrees"]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("fault", [0, 7, 31, 48])
def test_one_wrong_decision_in_50_steps_counts_once(k, fault):
    rng = random.Random(k)
    target = [rng.randint(0, 1) for _ in range(400)]
    rows = [[rng.randint(0, 1) for _ in target] for _ in range(k)]
    tokens, accepted, _ = decode_k(target, rows, 4, 300, fault)
    steps = accepted[:50]
    tokens = tokens[: 4 + 1 + sum(steps) + len(steps)]
    assert replay_agreement(tokens, 4, at_slots(rows), steps) == (49, 50)
    replay = replay_acceptance(tokens, 4, at_slots(rows))
    before = sum(ours == engine for ours, engine in zip(replay, steps, strict=False))
    assert fault == 48 or before < 49  # shifted lists: one fault as many
    report = explain_disagreement(tokens, 4, at_slots(rows), steps, {"stale": at_slots(rows)})
    assert report["first_step"] == fault and "stale" not in report["causes"]


def test_a_step_that_drafted_fewer_is_replayed_with_as_many():
    tokens = [1, 2, 10, 11, 12, 13, 14, 15]
    drafts = [[0, 11, 12, 13, 14, 15], [0, 12, 13, 14, 15, 0]]
    assert replay_acceptance(tokens, 2, drafts) == [2, 2]
    accepted, drafted = [1, 0, 0, 1], [1, 0, 2, 1]  # 11 +12, -, 14 refused, 15
    assert replay_agreement(tokens, 2, drafts, accepted, drafted) == (2, 3)
    assert replay_agreement(tokens, 2, drafts, accepted)[0] < 3
    assert explain_disagreement(tokens, 2, drafts, accepted, None, drafted)["token_index"] == 6


def test_vllms_habits_are_named_where_no_planted_fault_explains_the_decisions():
    rng = random.Random(0)
    target = [rng.randint(1, 2) for _ in range(60)]
    rows = [[t if rng.random() < 0.8 else 3 for t in target] for _ in range(2)]
    tokens, accepted, _ = decode_k(target, rows, 4, 40)
    slots = at_slots(rows)

    def causes(engine, suspects=None):
        return explain_disagreement(tokens, 4, slots, engine, suspects)["causes"]

    padded, zeroed, dropped = (
        [f"vLLM: {habit}"]
        for habit in (
            "padded prefill step",
            "token 0 drafted near max_model_len",
            "no last draft at max_model_len",
        )
    )
    assert causes([0, *accepted]) == padded
    zeros = [row[: 32 + j] + [0] * 30 for j, row in enumerate(rows, 2)]  # from slot 32 on
    tokens, near_the_end, _ = decode_k(target, zeros, 4, 40)
    assert near_the_end != accepted and causes(near_the_end) == zeroed
    assert causes(near_the_end, {"stale": at_slots(zeros)}) == ["stale"]
    tokens = tokens[:40]
    assert causes(replay_acceptance(tokens, 4, slots)[:-1]) == dropped
    assert causes([1 - min(1, number) for number in accepted]) == []


# Probabilistic drafts.


def test_expected_acceptance_is_the_overlap_of_the_two_distributions():
    p, q = (
        np.array([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]),
        np.array([[0.2, 0.2, 0.6], [0.0, 1.0, 0.0]]),
    )
    assert expected_acceptance(p, q) == pytest.approx([0.6, 0.0])
    assert expected_acceptance(p, p) == pytest.approx([1.0, 1.0])
    rows = torch.tensor(p)[:, None], torch.tensor(q, requires_grad=True)[:, None]
    answer = expected_acceptance(*rows)
    assert answer.shape == (2, 1) and answer.requires_grad
    assert answer.tolist() == [[pytest.approx(0.6)], [0.0]]


def speculate(rng, p, q, prompt_length, num_steps):
    """A verifier with probabilistic drafts. p [T, V]: for index i; q [k, T, V]: draft j for i."""
    accepted, index = [], prompt_length + 1
    for _ in range(num_steps):
        number = 0
        while number < len(q):
            draft = rng.choice(len(p[0]), p=q[number, index + number])
            ratio = p[index + number, draft] / q[number, index + number, draft]
            if rng.random() >= ratio:
                break
            number += 1
        accepted.append(number)
        index += number + 1
    return accepted, index


def test_measured_acceptance_lies_within_standard_errors_of_the_expected_and_a_fault_does_not():
    rng = np.random.default_rng(0)
    requests, stale = [], []
    for _ in range(40):
        p = rng.dirichlet(np.ones(5), size=400)
        q = 0.7 * p + 0.3 * rng.dirichlet(np.ones(5), size=(3, 400))
        accepted, length = speculate(rng, p, q, 4, 60)
        for of, drafts in (requests, q), (stale, np.roll(q, 1, -1)):
            rates = np.stack([expected_acceptance(p, row) for row in drafts])
            of.append((4, at_slots([row[:length].tolist() for row in rates]), accepted, None))
    summary = compare_acceptance(requests)
    counted = summarize(
        [
            SpecCounts(180, sum(a), 60, tuple(sum(n >= j for n in a) for j in (1, 2, 3)))
            for _, _, a, _ in requests
        ]
    )
    for j in (1, 2, 3):
        measured = summary[f"spec/measured_cond_pos_{j}"]
        assert measured == pytest.approx(counted[f"spec/accept_rate_cond_pos_{j}"], abs=0.01)
        assert summary[f"spec/expected_cond_pos_{j}"] == pytest.approx(measured, abs=0.05)
        assert abs(summary[f"spec/z_cond_pos_{j}"]) < 4
        assert abs(compare_acceptance(stale)[f"spec/z_cond_pos_{j}"]) > 10
    drafted = [(4, rates, [1, None], [1, 3]) for _, rates, _, _ in requests]
    assert compare_acceptance(drafted).keys() == {
        f"spec/{name}_cond_pos_1" for name in ("expected", "measured", "z")
    }
    assert compare_acceptance([]) == {}


def test_the_file_needs_the_standard_library_only(tmp_path):
    shutil.copy(spec_metrics.__file__, tmp_path)
    check = "import sys, spec_metrics; assert not {'numpy', 'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, check=True)
