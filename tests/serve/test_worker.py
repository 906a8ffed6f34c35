"""The thread that owns the batch."""

import queue
from contextlib import closing

import pytest

from compressor.decode import Law, Request
from compressor.errors import CompressError, UsageError
from compressor.serve import Worker
from compressor.serve.worker import Closed

LONG = 8000


@pytest.fixture
def worker(runner):
    with closing(Worker(runner, max_batch=2)) as worker:
        yield worker


def request(count=8, seed=0, law=None, stops=frozenset()):
    return Request([5, 6, 7], count, Law() if law is None else law, seed, stops)


def submit(worker, *args, **options):
    events = queue.SimpleQueue()
    return worker.submit(request(*args, **options), events.put), events


def collect(events):
    """Tokens up to the last event, and that event."""
    tokens = []
    while True:
        event = events.get(timeout=20)
        tokens += event.tokens
        if event.stop is not None or event.error is not None:
            return tokens, event


def test_a_request_gets_the_tokens_of_the_runner(worker, runner):
    _, events = submit(worker, 20, seed=3)
    tokens, last = collect(events)
    assert (tokens, last.stop) == (runner.generate([5, 6, 7], 20, Law(), 3, ()).token_ids, "length")


def test_more_requests_than_places_wait_in_their_order(worker, eventually):
    ended = queue.SimpleQueue()
    handles = [submit(worker, LONG)[0] for _ in range(2)]
    for i in range(4):
        worker.submit(request(i + 1), lambda event, i=i: event.stop and ended.put(i))
    assert eventually(lambda: worker.statistics()["running"] == 2)
    assert worker.statistics()["waiting"] == 4 and ended.empty()
    worker.cancel(handles[0])  # the other one keeps running: one place for four
    assert [ended.get(timeout=20) for _ in range(4)] == [0, 1, 2, 3]


def test_cancelling_frees_the_cache_of_a_running_request_and_drops_a_waiting_one(worker, eventually):
    (first, _), (second, _), (third, nothing) = (submit(worker, LONG) for _ in range(3))
    assert eventually(lambda: worker.statistics()["running"] == 2)
    one = worker.statistics()["cache_bytes"] // 2
    worker.cancel(third)
    assert worker.statistics()["waiting"] == 0
    worker.cancel(first)
    assert eventually(lambda: worker.statistics()["cache_bytes"] == one)
    worker.cancel(second)
    assert eventually(lambda: worker.statistics()["cache_bytes"] == worker.statistics()["running"] == 0)
    assert nothing.empty()


def test_a_request_that_the_batch_refuses_gets_its_error_and_nobody_else_does(worker):
    _, good = submit(worker, 5)
    _, bad = submit(worker, LONG * 2)
    assert collect(good)[1].stop == "length"
    tokens, last = collect(bad)
    assert not tokens and isinstance(last.error, UsageError) and "8192 positions" in str(last.error)


@pytest.mark.parametrize(("kind", "logged"), [(CompressError, False), (RuntimeError, True)])
def test_an_error_of_one_text_ends_that_text_alone_and_is_logged_where_nobody_foresaw_it(worker, caplog, kind, logged):
    class Nothing:
        def matcher(self):
            return self

        def allowed(self, path):
            raise kind("grammar: nothing is allowed")

    _, good = submit(worker, 30)
    _, bad = submit(worker, law=Law(grammar=Nothing()))
    assert str(collect(bad)[1].error) == "grammar: nothing is allowed"
    assert len(collect(good)[0]) == 30
    assert ("nothing is allowed" in caplog.text) == logged


def test_while_a_prompt_is_read_in_pieces_nothing_is_told(worker, monkeypatch):
    monkeypatch.setattr("compressor.decode.batch.CHUNK", 1)
    told = queue.SimpleQueue()
    worker.submit(request(4), told.put)
    events = [told.get(timeout=20)]
    while events[-1].stop is None:
        events.append(told.get(timeout=20))
    assert all(event.tokens for event in events)
    statistics = worker.statistics()
    assert statistics["cycles"] == len(events) and statistics["tokens"] == 4


def test_a_step_that_fails_fails_what_runs_and_the_thread_lives_on(worker, runner, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(runner.decoder, "forward", lambda *_: 1 / 0)
        both = [submit(worker)[1] for _ in range(2)]
        assert all(isinstance(collect(events)[1].error, ZeroDivisionError) for events in both)
    assert "ZeroDivisionError" in caplog.text
    assert worker.statistics()["running"] == worker.statistics()["cache_bytes"] == 0
    assert len(collect(submit(worker, 5)[1])[0]) == 5


def test_a_listener_that_is_gone_ends_its_request(worker, eventually):
    def gone(event):
        raise RuntimeError("Event loop is closed")

    worker.submit(request(LONG), gone)
    _, events = submit(worker, 5)
    assert collect(events)[1].stop == "length"
    assert eventually(lambda: worker.statistics()["cache_bytes"] == 0)


def test_closing_tells_everybody(runner):
    worker = Worker(runner, max_batch=1)
    waiting = [submit(worker, LONG)[1] for _ in range(3)]
    worker.close()
    worker.close()
    late = submit(worker)[1]
    assert all(isinstance(collect(events)[1].error, Closed) for events in [*waiting, late])
    assert worker.statistics()["cache_bytes"] == 0


def test_statistics_count_what_outputs_count(worker, runner):
    law = Law(temperature=0)
    outputs = [runner.generate([5, 6, 7], count, law, 0, ()) for count in (40, 60)]
    for count in (40, 60):
        collect(submit(worker, count, law=law)[1])
    found = worker.statistics()
    assert found["requests"] == 2 and found["tokens"] == 100
    assert found["cycles"] == sum(output.cycles for output in outputs)
    assert found["proposed"] == sum(output.proposed for output in outputs) > 0
    assert found["accepted"] == sum(output.accepted for output in outputs) > 0
    assert found["drafts"] == sum(1 for output in outputs for proposal in output.proposals if proposal)


def test_a_batch_without_places_is_refused(runner):
    with pytest.raises(UsageError, match="max_batch: 0"):
        Worker(runner, 0)
