"""The loop in containers: locked down, apart where they must be, and stopped without losing a ticket."""

import ast

import pytest

# The first test waits for everything to start, the last for every service to start again.
pytestmark = pytest.mark.timeout(1800)

SERVICES = ("environment", "trainer", "inference", "gateway")


def test_the_loop_comes_up_healthy_and_trains(stack):
    for service in ("redis", *SERVICES):
        assert stack.container(service).attrs["State"]["Health"]["Status"] == "healthy"
    stack.wait(lambda: len(stack.steps()) >= 1)
    account(stack)


@pytest.mark.parametrize("service", SERVICES)
def test_containers_are_locked_down(stack, service):
    settings = stack.container(service).attrs["HostConfig"]
    assert settings["ReadonlyRootfs"]
    assert settings["CapDrop"] == ["ALL"]
    assert settings["Memory"] > 0
    assert "no-new-privileges:true" in settings["SecurityOpt"]
    status = stack.python(service, "print(open('/proc/self/status').read())")
    assert "Uid:\t65532" in status
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status


@pytest.mark.parametrize("service", SERVICES)
def test_images_hold_their_own_service_and_no_build_tools(stack, service):
    program = """
import importlib.util, os
print(sorted(name for name in os.listdir("/app/services") if name[0] != "_"))
print([name for name in ("pip", "grpc_tools") if importlib.util.find_spec(name)])
"""
    module = {"environment": "envs", "gateway": "rollout"}.get(service, service)
    assert stack.python(service, program) == f"['{module}']\n[]"


def test_an_environment_reaches_neither_redis_nor_a_way_out(stack):
    redis, trainer = ("redis", 6379), ("trainer", 50051)
    places = [redis, (address(stack, "redis"), 6379), trainer, (address(stack, "trainer"), 50051)]
    places += [(address(stack, "inference"), 30000), ("1.1.1.1", 53), ("169.254.169.254", 80), ("example.com", 443)]
    assert reached(stack, "environment", places) == []
    assert reached(stack, "gateway", [redis, ("1.1.1.1", 53)]) == [redis]
    # The engine drops what leaves an internal network.
    assert stack.networks("environment") == {"headrace-test_environments": True}


def test_every_service_drains_and_no_ticket_is_lost(stack):
    """Each is stopped in the middle of training and started again; every step happens, and once."""
    for service in ("redis", *SERVICES):
        go_on(stack)
        stack.compose("stop", service)
        assert stack.container(service).attrs["State"]["ExitCode"] == 0, stack.compose("logs", "--tail", "30", service)
        if service not in ("redis", "trainer"):
            account(stack)
        stack.compose("up", "--detach", "--wait", "--no-recreate", service)
        go_on(stack)
        account(stack)
    steps = stack.steps()
    assert steps == list(range(1, len(steps) + 1))


def account(stack):
    """Asserts that every ticket that was issued is out, ended, learned from or returned; and not twice."""
    tickets = stack.tickets()
    assert tickets.learned
    assert not tickets.lost
    assert not tickets.learned & tickets.returned


def address(stack, service):
    """One of a container's addresses."""
    return next(iter(stack.container(service).attrs["NetworkSettings"]["Networks"].values()))["IPAddress"]


def reached(stack, service, places):
    """Those of the (host, port) pairs to which a program in the service's container can open a connection."""
    program = f"""
import socket
for place in {places!r}:
    try:
        socket.create_connection(place, timeout=5).close()
        print(place)
    except OSError:
        pass
"""
    return [ast.literal_eval(line) for line in stack.python(service, program).splitlines()]


def go_on(stack):
    """Waits for two more steps."""
    done = len(stack.steps())
    stack.wait(lambda: len(stack.steps()) >= done + 2)
