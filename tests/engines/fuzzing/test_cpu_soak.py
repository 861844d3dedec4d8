"""The GPU's soak on the CPU engine: it passes, and it notices what it is there to notice."""

from __future__ import annotations

import secrets

from ...gpu.soak import Level, Report, soak


async def test_mixed_traffic_leaves_nothing_behind() -> None:
    report = await soak(2.0, device="cpu", isolation="thread", largest_mib=4, seed=secrets.randbelow(1 << 32))
    assert not report.wrong, str(report)
    assert {"shapes", "hot runs", "copies", "cancels", "big uploads", "checked"} <= set(report.done)
    assert len(report.levels) == 2


def test_growth_is_what_the_second_half_added() -> None:
    report = Report(seed=0, seconds=1.0, levels=[Level(100.0, 500.0), Level(130.0, 490.0)])
    assert report.growth == Level(30.0, -10.0)
    assert "host +30 MiB, device -10 MiB" in str(report)
