"""The loop in containers: locked down, apart where they must be, and stopped without losing a ticket."""

import pytest

# The first test waits for everything to start, the last for every service to start again.
pytestmark = pytest.mark.timeout(1800)

SERVICES = ("environment", "trainer", "inference", "gateway")


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
    networks = stack.container("redis").attrs["NetworkSettings"]["Networks"]
    (address,) = [network["IPAddress"] for network in networks.values()]
    program = f"""
import socket
for host in ("redis", {address!r}):
    try:
        socket.create_connection((host, 6379), timeout=2).close()
        print("reached", host)
    except OSError:
        print("no way to", host)
"""
    assert stack.python("environment", program) == f"no way to redis\nno way to {address}"
    assert f"reached {address}" in stack.python("gateway", program)
    # The engine drops what leaves an internal network.
    assert stack.networks("environment") == {"headrace-test_environments": True}


def test_every_service_drains_and_the_run_goes_on(stack):
    """Each is stopped in the middle of training and started again; every step happens, and once."""
    for service in ("gateway", "inference", "environment", "trainer"):
        go_on(stack)
        stack.compose("stop", service)
        assert stack.container(service).attrs["State"]["ExitCode"] == 0, stack.compose("logs", "--tail", "30", service)
        stack.compose("up", "--detach", "--wait", "--no-recreate", service)
    go_on(stack)
    steps = stack.steps()
    assert steps == list(range(1, len(steps) + 1))


def go_on(stack):
    """Waits for two more steps."""
    done = len(stack.steps())
    stack.wait(lambda: len(stack.steps()) >= done + 2)
