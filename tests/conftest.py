"""Settings that hold for all tests."""

from hypothesis import HealthCheck, settings

# Machines are shared and slow at times: an example's run time proves nothing. The seeds
# are fixed, so that a change fails for what it changed; whoever wants others runs with
# --hypothesis-seed.
settings.register_profile(
    "shared",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shared")
