"""What the log says of the gain."""

import pytest

from serving.engine.shared import audit_log

REPORT = {
    "audited_step_share": 0.0162,
    "audit_cost_share": 0.0031,
    "speculation_held": 0.0,
    "num_audited_none": 212.0,
    "num_audited_best_fixed": 9.0,
    "speculation_gain_none": 1.312,
    "speculation_gain_none_lower": 1.274,
    "speculation_gain_none_upper": 1.35,
}


@pytest.mark.parametrize(("held", "so"), [(0.0, ""), (1.0, "; held back, for it lost")])
def test_a_sentence_tells_the_gain_its_interval_and_its_price(held, so):
    assert audit_log.describe(REPORT | {"speculation_held": held}) == (
        "Speculation: 1.31 (1.27 to 1.35) times the tokens of no speculation, cannot "
        f"tell yet against the best fixed length: 9 of 16 blocks{so} (audited 1.6% of "
        "the steps of the last hour, at a cost of 0.31% of the time)"
    )


def test_it_is_said_once_a_minute_and_only_by_audited_policies(monkeypatch):
    lines, now_s = [], 0.0
    monkeypatch.setattr(audit_log.logger, "info", lines.append)
    log = audit_log.AuditLog(lambda: now_s)
    for _ in range(180):
        now_s += 1.0
        log.say(REPORT | {"audit_cost_share": now_s / 1e4})
    assert len(lines) == 3
    now_s += 100.0
    log.say({"step_time_error": 0.1})
    assert len(lines) == 3
