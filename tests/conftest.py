"""Eight virtual CPU devices and 64 bits, set before JAX starts."""
import json
import os
import shutil
import tempfile

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Many small programs run once: what they cost is their compilation.
os.environ.setdefault('XLA_FLAGS', '--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 '
                      '--xla_cpu_parallel_codegen_split_count=1')

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
import tokenizers  # noqa: E402
from tokenizers import models, pre_tokenizers, trainers  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_enable_x64', True)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 1)

hypothesis.settings.register_profile('branchreplay', deadline=None)  # first examples compile
hypothesis.settings.load_profile('branchreplay')


def pytest_configure(config):
  """What a run of the tests compiles is compiled once, in all its processes; nothing is kept from earlier runs."""
  config.addinivalue_line('markers', 'slow: left out unless asked for with -m slow')
  if not hasattr(config, 'workerinput'):  # the first process; others inherit its environment
    os.environ['BRANCHREPLAY_TEST_CACHE'] = tempfile.mkdtemp()
  jax.config.update('jax_compilation_cache_dir', os.environ['BRANCHREPLAY_TEST_CACHE'])


LONG = ('test_gradients', 'test_hf_parity', 'test_objective_gradients', 'test_studies', 'test_train', 'test_edge_cases',
        'test_processes', 'test_scripts', 'test_user_data', 'test_tree', 'test_kernels', 'test_stream', 'test_lora',
        'test_blocks')  # minutes each; begun first, so that no process is left with one at the end


def pytest_collection_modifyitems(items):
  items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_unconfigure(config):
  if not hasattr(config, 'workerinput'):
    shutil.rmtree(os.environ['BRANCHREPLAY_TEST_CACHE'], ignore_errors=True)


@pytest.fixture
def tokenizer_folder(tmp_path):
  """A checkpoint folder's tokenizer, trained here, with a chat template."""
  made = tokenizers.Tokenizer(models.BPE())
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  made.train_from_iterator(['the fact is three', 'three is the answer'] * 9, trainers.BpeTrainer(
      vocab_size=300, special_tokens=['<|end|>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False))
  made.save(str(tmp_path / 'tokenizer.json'))
  template = ('{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}'
              '{% if add_generation_prompt %}[assistant]{% endif %}')
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '<|end|>', 'chat_template': template}))
  return tmp_path
