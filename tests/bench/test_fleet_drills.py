"""`python -m bench.fleet.drills`: its figures of answers that are made up here, and two drills on a small load."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet.drills.figures import Drill, DrillRun
from bench.fleet.drills.report import report
from bench.fleet.drills.streams import DrillAnswer, SeenRound

AT_S, ENDED_S = 104.0, 112.0


def answer_of(number: int, pause_s: float = 0.0) -> DrillAnswer:
    """Two tokens each quarter of a second from 100 to 112, where the session is not lost in between for so long."""
    answer, at_s = DrillAnswer(number, 100.0), 100.0
    while at_s < ENDED_S:
        is_hurt = at_s == AT_S and pause_s > 0
        at_s += 0.25 + is_hurt * pause_s
        answer.rounds.append(SeenRound(at_s, 2, 2, int(is_hurt), ""))
        answer.token_ids += [number, number]
    return answer


ANSWERS = [answer_of(0, pause_s=1.75), answer_of(1), answer_of(2), answer_of(3)]
RUN = DrillRun(Drill.KILLED, ANSWERS, AT_S, 3.0, 8.0, 0.5, 1.0, ["b:1", "b:1", "c:1"])
PLAIN = {each.number: each.token_ids for each in ANSWERS}


def test_pauses_are_of_the_hurt_and_gaps_of_the_others() -> None:
    """A pause ends with the round in which the session was opened again."""
    assert RUN.pauses_s == [2.0]
    assert RUN.hurt_rounds == [8.0]
    assert RUN.longest_rounds(RUN.began_s) == [1.0, 1.0, 1.0]
    late = replace(RUN, answers=[*ANSWERS, answer_of(4, pause_s=0.25)])
    assert late.pauses_s == [2.0, 0.5]
    assert RUN.spread == 2.0


def test_what_is_left_is_back_at_once_and_the_whole_after_the_pause() -> None:
    """Three streams of four go on; in the second in which the fourth comes back there are all tokens again."""
    assert RUN.rate(RUN.began_s, AT_S) == 32.0
    assert RUN.least(RUN.rate) == 24.0
    assert RUN.back_s(RUN.rate, 24.0) == 0.0
    assert RUN.back_s(RUN.rate, 32.0) == 1.75
    assert RUN.back_s(RUN.rate, 64.0) is None
    assert RUN.tokens_a_round(RUN.began_s, AT_S) == 2.0


def test_other_tokens_and_failures_are_found() -> None:
    """Of an answer that was cut off only the tokens that came are compared."""
    assert RUN.differing(PLAIN) == RUN.failed == []
    cut = replace(ANSWERS[1], token_ids=ANSWERS[1].token_ids[:5], error="gone")
    wrong = replace(ANSWERS[2], token_ids=[*ANSWERS[2].token_ids[:-1], 9])
    hurt = replace(RUN, answers=[cut, wrong])
    assert hurt.failed == ["gone"]
    assert hurt.differing(PLAIN) == [2]
    assert "| killed | 2 | 1 | 1 |" in report([hurt], PLAIN)


def test_a_newcomer_has_a_fair_share_when_its_sessions_are_near_an_equal_part() -> None:
    """Of five targets one that has two of twelve sessions has five sixths of an equal share."""
    moments = [(0.5, {"target 1": 10.0, "target 5": 0.0}), (1.0, {"target 1": 10.0, "target 5": 2.0})]
    others = {f"target {number}": 0.0 for number in (2, 3, 4)}
    run = replace(RUN, drill=Drill.JOINED, sessions=[(at_s, each | others) for at_s, each in moments])
    assert [round(share, 3) for _, share in run.shares] == [0.0, 0.833]
    assert run.fair_s == 1.0
    assert replace(run, sessions=run.sessions[:1]).fair_s is None


def test_other_weights_are_counted_by_how_many_targets_had_been_replaced() -> None:
    """One is replaced each two seconds; the weights of the first answer are the old ones."""
    asked = [(102.0, "old"), (104.5, "old"), (105.0, "new"), (111.5, "new"), (113.0, "new")]
    answers = [replace(ANSWERS[1], asked_s=at_s, model_hash=found) for at_s, found in asked]
    run = replace(RUN, drill=Drill.ROLLED, answers=answers)
    assert run.renewed == [(1, 0.0), (2, 0.5), (0, 0.0), (0, 0.0), (1, 1.0)]
    assert "| rolled | 0.00 of 1 | 0.50 of 2 | 0.00 of 0 | 0.00 of 0 | 1.00 of 1 |" in report([run], PLAIN)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_request_fails_and_no_token_is_another_one(tmp_path: Path) -> None:
    """A target is killed, one cut off, and all get other weights under load; how long anything takes is not asked."""
    options = "--drills killed,cut-off,rolled --streams 8 --tokens 48 --before 4 --after 3 --stretch 4"
    found = subprocess.run(
        (sys.executable, "-m", "bench.fleet.drills", *options.split(), "--save", str(tmp_path / "runs.json")),
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "SIMULATED" in found.stdout
    runs = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))["runs"]
    assert [(each["drill"], each["failed"], each["differing"]) for each in runs] == [
        ("killed", [], []),
        ("cut-off", [], []),
        ("rolled", [], []),
    ]
    assert all(each["answers"] for each in runs)
