from tools.bench_scheduler import measure


def test_total_is_schedule_and_update() -> None:
    schedule, update, total = measure(5)

    assert 0 < schedule < total
    assert 0 < update < total
