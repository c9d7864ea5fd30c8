"""The environment server's Prometheus metrics. The field's rule for names: headrace_envs_<what>_<unit>."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

active_episodes = Gauge("headrace_envs_active_episodes", "episodes that are open", ["environment"])
steps = Counter("headrace_envs_steps", "resets and steps that the environment answered", ["environment"])
step_seconds = Histogram(
    "headrace_envs_step_seconds", "time that the environment took", ["environment", "call"], buckets=_SECONDS
)
failures = Counter(
    "headrace_envs_failures", "episodes that ended otherwise than by their task", ["environment", "cause"]
)
blocking_waiting = Gauge(
    "headrace_envs_blocking_waiting", "blocking calls that wait for a worker process", ["environment"]
)
blocking_running = Gauge("headrace_envs_blocking_running", "blocking calls that a worker process runs", ["environment"])
blocking_wait_seconds = Histogram(
    "headrace_envs_blocking_wait_seconds", "time that a blocking call waited", ["environment"], buckets=_SECONDS
)
blocking_killed = Counter(
    "headrace_envs_blocking_killed", "worker processes that were killed or died in a call", ["environment"]
)
pool_ready = Gauge("headrace_envs_pool_ready", "resources of a warm pool that are ready", ["pool"])
pool_dead = Counter("headrace_envs_pool_dead", "resources that were found dead and not handed out", ["pool"])
