"""LLMEngine over a scripted model: beam searches beside other requests, aborted, dropped, refused."""

import pytest

from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import BeamSearchParams
from tests.engine.conftest import PROMPT, MakeEngine, finish, greedy
from tests.engine.scripted import continuation, next_token


def add_beams(engine: LLMEngine, request_id: str, *, beam_width: int = 3, max_tokens: int = 6) -> None:
    params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens, ignore_eos=True)
    engine.add(engine.make_beam_request(request_id, PROMPT, params))


def check_beams(output: RequestOutput, max_tokens: int = 6) -> None:
    """Check the three best outputs: the scripted model's log-probability of id i is -i/8, always."""
    assert output.finished
    assert [completion.cumulative_logprob for completion in output.outputs] == [0.0, -0.125, -0.125]
    assert [sum(completion.token_ids) for completion in output.outputs] == [0, 1, 1]
    assert {len(completion.token_ids) for completion in output.outputs} == {max_tokens}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget", [2, 64])
def test_beams_run_beside_other_requests(make_engine: MakeEngine, late: bool, budget: int) -> None:
    engine = make_engine(late=late, max_num_batched_tokens=budget)
    engine.add_request("before", PROMPT, greedy(logprobs=0))
    add_beams(engine, "beams")
    engine.add_request("after", PROMPT, greedy(n=2))

    outputs = finish(engine)

    check_beams(outputs["beams"])
    for name, n in {"before": 1, "after": 2}.items():
        assert [part.token_ids for part in outputs[name].outputs] == [continuation(PROMPT, 8)] * n
    assert engine.scheduler.num_used_blocks == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_aborted_beams_free_everything(make_engine: MakeEngine, late: bool, num_steps: int) -> None:
    engine = make_engine(late=late)
    add_beams(engine, "gone", max_tokens=50)
    add_beams(engine, "kept", max_tokens=20)
    for _ in range(num_steps):
        engine.step()

    engine.abort("gone")
    outputs = finish(engine)

    assert set(outputs) == {"kept"}
    check_beams(outputs["kept"], 20)
    assert engine.scheduler.num_used_blocks == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_drops_beams_too(make_engine: MakeEngine, late: bool) -> None:
    failures = [RuntimeError("no memory")]

    def fail_once(seen: int, position: int) -> int:
        if position == 5 and failures:
            raise failures.pop()
        return next_token(seen, position)

    engine = make_engine(late=late, follow=fail_once)
    add_beams(engine, "dropped")
    with pytest.raises(RuntimeError, match="no memory"):
        finish(engine)

    assert not engine.has_unfinished()
    add_beams(engine, "dropped")
    check_beams(finish(engine)["dropped"])


def test_an_id_in_use_is_refused_whoever_uses_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    add_beams(engine, "beams")
    engine.add_request("r", PROMPT, greedy())

    with pytest.raises(ValueError, match="'r' is in use"):
        add_beams(engine, "r")
    with pytest.raises(ValueError, match="'beams' is in use"):
        engine.add_request("beams", PROMPT, greedy())


@pytest.mark.parametrize(
    ("options", "beam_width", "message"),
    [
        ({}, 9, "beam_width is 9 but max_num_seqs is 8"),
        ({"num_blocks": 6, "max_model_len": 96}, 8, r"beam_width is 8\b.*blocks but there are 6"),
    ],
)
def test_beams_that_can_never_run_are_refused(
    make_engine: MakeEngine, options: dict[str, int], beam_width: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        add_beams(make_engine(**options), "r", beam_width=beam_width, max_tokens=90)
