"""What people see of a run while it goes."""

import io

from headrace import progress
from headrace.progress import Display
from headrace.step_log import Step
from headrace.v1 import trainer_service_pb2 as pb


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_status_that_is_written_over():
    terminal = Terminal()
    display = Display(terminal)
    display.show("step 1")
    display.show("step 1")
    display.say("gateway-0 died")
    display.show("step 2")
    display.end_status()
    assert terminal.getvalue() == "\r\033[Kstep 1\r\033[Kgateway-0 died\nstep 1\r\033[Kstep 2\n"


def test_elsewhere_every_status_is_a_line():
    stream = io.StringIO()
    display = Display(stream)
    display.show("step 1")
    display.show("step 1")
    display.say("gateway-0 died")
    display.show("step 2")
    display.end_status()
    assert stream.getvalue() == "step 1\ngateway-0 died\nstep 2\n"


def test_a_status_fits_the_terminal():
    terminal = Terminal()
    Display(terminal).show("x" * 10_000)
    assert len(terminal.getvalue()) < 1000


def test_before_the_first_step_it_says_what_is_waited_for():
    starting = pb.GetTrainerStatusResponse(phase=pb.TRAINER_PHASE_STARTING)
    waiting = pb.GetTrainerStatusResponse(
        phase=pb.TRAINER_PHASE_WAITING, outstanding_tickets=8, engine_versions={"engine-0": 1, "engine-1": 0}
    )
    assert "waiting for the trainer" in progress.describe([], None, total_steps=9)
    assert "starting" in progress.describe([], starting, total_steps=9)
    assert "tickets out: 8, engines that hold weights: 1" in progress.describe([], waiting, total_steps=9)


def test_a_step_says_how_the_run_goes():
    step = Step(
        step=3,
        time_s=0.0,
        step_s=2.0,
        reward_mean=0.25,
        trajectories=8,
        action_tokens=100,
        idle_fraction=0.5,
        staleness_mean=0.75,
        staleness_max=1,
    )
    assert progress.describe([step], None, total_steps=9) == (
        "step 3/9  reward 0.250  staleness 0.75 (max 1)  idle 50%  50 tokens/s  0.50 steps/s"
    )
