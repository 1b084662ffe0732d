"""Eight virtual CPU devices and 64 bits, set before JAX starts."""
import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Many small programs run once: what they cost is their compilation.
os.environ.setdefault('XLA_FLAGS', '--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0')

import hypothesis  # noqa: E402
import jax  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_enable_x64', True)
jax.config.update('jax_enable_compilation_cache', False)  # every run compiles what it tests

hypothesis.settings.register_profile('branchreplay', deadline=None)  # first examples compile
hypothesis.settings.load_profile('branchreplay')
