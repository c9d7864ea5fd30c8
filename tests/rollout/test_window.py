"""How many calls a gateway keeps at an engine: loads are given, nothing waits."""

from services.rollout.window import Load, Window, WindowLimits


def load(*, running=10, waiting=0, kv_used=0.5, retracted=0):
    return Load(1, running, waiting, kv_used, retracted)


def window(least=1, first=16, most=256):
    return Window(WindowLimits(least, first, most))


def test_it_doubles_while_calls_are_kept_back_until_the_first_cut_and_then_grows_by_steps():
    subject = window()
    sizes = []
    for _ in range(3):
        subject.observe(load(), calls=subject.size, wanted=True)
        sizes.append(subject.size)
    assert sizes == [32, 64, 128]
    subject.observe(load(kv_used=0.97), calls=128, wanted=True)
    assert subject.size == 64
    subject.observe(load(), calls=64, wanted=True)
    assert subject.size == 72


def test_it_stays_when_nobody_wants_more_or_the_cache_fills_up():
    subject = window()
    subject.observe(load(), calls=16, wanted=False)
    subject.observe(load(kv_used=0.85), calls=16, wanted=True)
    assert subject.size == 16


def test_it_stays_within_its_bounds():
    subject = window(least=3, first=200)
    subject.observe(load(), calls=200, wanted=True)
    assert subject.size == 256
    for _ in range(20):
        subject.observe(load(kv_used=1.0), calls=subject.size, wanted=True)
    assert subject.size == 3


def test_a_long_queue_counts_when_it_is_seen_twice_and_never_starves_the_engine():
    subject = window(first=128)
    subject.observe(load(running=64, waiting=64), calls=128, wanted=True)
    assert subject.size == 128
    subject.observe(load(running=64, waiting=64), calls=128, wanted=True)
    assert subject.size == 64
    subject = window(first=100)
    for _ in range(2):
        subject.observe(load(running=64, waiting=36), calls=100, wanted=True)
    assert subject.size == 64  # half would leave places at the engine empty


def test_of_an_engine_that_others_use_as_well_it_leaves_them_their_share():
    subject = window(first=100)
    for _ in range(2):
        subject.observe(load(running=60, waiting=140), calls=50, wanted=True)
    assert subject.size == 25


def test_a_retraction_halves_it_once():
    subject = window(first=64)
    subject.observe(load(retracted=7), calls=64, wanted=True)
    assert subject.size == 128  # those were before our time
    subject.observe(load(retracted=9), calls=100, wanted=True)
    assert subject.size == 50
    subject.observe(load(retracted=9), calls=100, wanted=True)
    assert subject.size == 50


def test_a_cut_has_to_show_before_there_is_another():
    subject = window(first=64)
    subject.observe(load(kv_used=1.0), calls=64, wanted=True)
    for _ in range(5):
        subject.observe(load(kv_used=1.0), calls=40, wanted=True)
    assert subject.size == 32
    subject.observe(load(kv_used=1.0), calls=30, wanted=True)
    assert subject.size == 15


def test_it_settles_at_what_an_engine_can_hold():
    """An engine with 64 places and any number of calls waiting for it: neither idle nor with a long queue."""
    subject, calls, history = window(first=256, most=4096), 0, []
    for _ in range(200):
        calls = subject.size
        running = min(64, calls)
        subject.observe(load(running=running, waiting=calls - running, kv_used=0.6), calls=calls, wanted=True)
        history.append(calls)
    settled = history[20:]
    assert min(settled) >= 64 and max(settled) <= 128
