"""The document says what the budget and the formulas say."""

import pytest

from benchmarks.kernel_predictions import DOCUMENT, GPUS, predict, renewed
from engine.ops.gpu.traffic import Traffic


def test_the_document_is_fresh() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert renewed(text) == text, "run python -m benchmarks.kernel_predictions"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("work", [Traffic(10**9, 2 * 10**9, 1), Traffic(1, 10**9, 10**13)])
def test_nothing_is_expected_below_the_roofline(work: Traffic, gpu) -> None:
    predicted = predict(work, gpu)
    assert predicted.expected_s > predicted.roofline_s
    assert predicted.is_compute == (work.flops > 1)
