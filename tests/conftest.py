"""Eight virtual CPU devices, 64 bits and no silent rank promotion, set before JAX starts."""
import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import hypothesis  # noqa: E402
import jax  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_enable_x64', True)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_enable_compilation_cache', False)  # every run compiles what it tests

hypothesis.settings.register_profile('branchreplay', deadline=None)  # first examples compile
hypothesis.settings.load_profile('branchreplay')
