"""Every number here is from the published lecture and course text on speculation; each is recomputed."""

import pytest

from compressor.errors import UsageError
from compressor.measure.economics import acceptance_tax, best_k, expected_tokens, speedup

BANDWIDTH = 3.35e12  # bytes/s
BF16_BYTES, FP4_BYTES = 16e9, 4.5e9  # 8B parameters at 16 and at 4.5 bits


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"), [(0.7, 5, 2.94), (0.9, 7, 5.70), (0.85, 4, 3.71), (0.875, 1, 1.875), (1.0, 4, 5.0)]
)
def test_expected_tokens_of_the_worked_examples(alpha, k, tokens):
    assert expected_tokens(alpha, k) == pytest.approx(tokens, abs=0.005)


def test_expected_tokens_is_the_geometric_sum_and_saturates():
    for alpha in (0.1, 0.5, 0.785, 0.99):
        for k in range(12):
            assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert expected_tokens(0.8, 400) == pytest.approx(1 / (1 - 0.8))


def test_a_mean_rate_does_not_determine_the_mean_length():
    assert expected_tokens([0.9, 0.5], 2) == pytest.approx(2.35)
    assert expected_tokens(0.7, 2) == pytest.approx(2.19)
    assert expected_tokens([0.9, 0.5], 1) == pytest.approx(1.9)
    assert expected_tokens([], 0) == 1


def test_the_scan_at_080_and_010_peaks_at_six():
    assert best_k(0.8, 0.1, 10) == best_k(0.8, 0.1) == 6
    assert expected_tokens(0.8, 6) == pytest.approx(3.951424, abs=1e-9)
    assert speedup(0.8, 6, 0.1) == pytest.approx(2.46964, abs=1e-9)
    assert speedup(0.8, 5, 0.1) == pytest.approx(2.46, abs=0.005)
    assert speedup(0.8, 9, 0.1) == pytest.approx(2.35, abs=0.005)


@pytest.mark.parametrize(
    ("alpha", "c", "k", "s"),
    [
        (0.70, 0.05, 6, 2.35),
        (0.70, 0.10, 4, 1.98),
        (0.70, 0.20, 3, 1.58),
        (0.785, 0.10, 5, 2.38),
        (0.85, 0.05, 10, 3.70),
        (0.85, 0.20, 5, 2.08),
    ],
)
def test_best_length_by_regime(alpha, c, k, s):
    assert best_k(alpha, c) == k
    assert speedup(alpha, k, c) == pytest.approx(s, abs=0.005)


def test_a_cheaper_drafter_buys_depth():
    assert best_k(0.785, 0.05) == 7
    assert speedup(0.785, 7, 0.05) / speedup(0.785, 5, 0.10) == pytest.approx(1.24, abs=0.005)


def test_one_more_token_pays_exactly_when_its_survival_exceeds_the_price_of_time():
    for alpha in (0.3, 0.6, 0.8, 0.95):
        for c in (0.02, 0.1, 0.3):
            for k in range(10):
                pays = speedup(alpha, k + 1, c) > speedup(alpha, k, c)
                assert pays == (alpha ** (k + 1) > c * speedup(alpha, k, c))


def test_not_speculating_is_among_the_choices():
    assert best_k(0.1, 0.5) == 0
    assert speedup(0.1, 0, 0.5) == 1
    assert best_k([0.9, 0.9, 0.01], 0.1) == 2


def test_weight_streaming_scenarios():
    assert speedup(1, 0, 0) * BANDWIDTH / BF16_BYTES == pytest.approx(209.4, abs=0.05)
    assert speedup(1, 0, 0) * BANDWIDTH / FP4_BYTES == pytest.approx(744.44, abs=0.005)
    assert speedup(0.8, 5, 0.06) == pytest.approx(2.83790769, abs=1e-8)
    assert BANDWIDTH / BF16_BYTES * speedup(0.8, 5, 0.06) == pytest.approx(594.2, abs=0.05)
    assert speedup(0.875, 1, 0.05) == pytest.approx(1.78571, abs=1e-5)


def test_draft_cost_is_relative_to_the_new_target_step():
    both_faster = BANDWIDTH / FP4_BYTES * speedup(0.875, 1, 0.05)
    assert both_faster == pytest.approx(1329.37, abs=0.01)
    assert both_faster / (BANDWIDTH / BF16_BYTES) == pytest.approx(6.35, abs=0.005)
    scaled = 0.05 * BF16_BYTES / FP4_BYTES
    assert scaled == pytest.approx(0.17778, abs=1e-5)
    assert BANDWIDTH / FP4_BYTES * speedup(0.875, 1, scaled) == pytest.approx(1185.14, abs=0.01)


def test_the_tax_of_the_qkv_case_study():
    tax = acceptance_tax(147.87, 150.73, 2.792, 2.546)
    assert tax["realized_gain"] == pytest.approx(0.0193, abs=5e-5)
    assert tax["potential_gain"] == pytest.approx(0.1178, abs=5e-5)
    assert tax["tax"] == pytest.approx(0.836, abs=5e-4)
    assert tax["verdict"] == "reject"
    tau_ratio = (1 + tax["realized_gain"]) / (1 + tax["potential_gain"])
    assert tau_ratio == pytest.approx(0.9119, abs=5e-5)
    byte_reduction = 1 - 1 / (1 + tax["potential_gain"])
    assert byte_reduction == pytest.approx(0.105, abs=5e-4)
    assert byte_reduction == pytest.approx(0.1426 * (1 - 0.5625 / 2), abs=0.003)  # the independent byte count


def test_the_tax_of_other_cases():
    assert acceptance_tax(100, 120, 2.5, 2.5) == pytest.approx(
        {"potential_gain": 0.2, "realized_gain": 0.2, "tax": 0.0, "verdict": "keep"}
    )
    assert acceptance_tax(100, 150, 2.5, 2.6)["tax"] < 0  # acceptance rose
    assert acceptance_tax(100, 90, 2.5, 2.4) | {"potential_gain": 0, "realized_gain": 0} == {
        "potential_gain": 0,
        "realized_gain": 0,
        "tax": None,
        "verdict": "no gain",
    }
    assert acceptance_tax(100, 95, 2.8, 2.4)["tax"] > 1  # more than everything was lost


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_tokens(1.1, 2),
        lambda: expected_tokens([0.5, float("nan")], 2),
        lambda: expected_tokens([0.5, None], 2),
        lambda: expected_tokens([0.5], 2),
        lambda: expected_tokens(0.5, -1),
        lambda: speedup(0.5, 2, -0.1),
        lambda: speedup(0.5, 2, float("nan")),
        lambda: acceptance_tax(0, 1, 1, 1),
        lambda: acceptance_tax(1, float("inf"), 1, 1),
    ],
)
def test_impossible_inputs_are_refused(call):
    with pytest.raises(UsageError):
        call()
