"""The pool takes what the GPU has left, and no more."""

import pytest
import torch

from siftkv import LLM, SamplingParams
from siftkv.engine.memory import _RESERVE, _first_layers, _peak
from siftkv.errors import SiftKVError
from siftkv.models import LoadedModel, random_model
from tests.tiny import prompt, tiny_config, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests take memory of the same card meanwhile: as if only this process did."""
    total = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (total - torch.cuda.memory_reserved(), total))


def gpu_llm(**settings: object) -> LLM:
    model = tiny_model(dtype=torch.bfloat16, head_dim=64)
    model.decoder.cuda()
    return LLM(model, "diffkv:window=8", max_num_seqs=4, **settings)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_alone")
def test_the_pool_fills_the_share_that_is_asked_for() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.03
    llm = gpu_llm(gpu_memory_utilization=share)
    used = total - torch.cuda.mem_get_info()[0]
    assert 0.5 * 0.03 * total < used - (total - free) <= 0.03 * total
    [out] = llm.generate([prompt(60)], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert len(out.token_ids) == 30
    assert total - torch.cuda.mem_get_info()[0] <= share * total
    assert llm.cache.usage().workspace > 0


def test_a_share_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(SiftKVError, match="no memory is left"):
        gpu_llm(gpu_memory_utilization=1e-6)
    with pytest.raises(SiftKVError, match="above 0 and at most 1"):
        gpu_llm(gpu_memory_utilization=1.5)


LONG = 60_000
SHAPE = {"hidden_size": 1024, "intermediate_size": 8192, "num_layers": 4, "num_heads": 16, "num_kv_heads": 4}


@pytest.mark.parametrize(
    "kv", ["full", "sift", "diffkv", "uniform:k4v4", "hardkv:p=0.5,window=32,lower=64,upper=128,queries=16,format=k8v4"]
)
def test_a_prompt_longer_than_a_pass_takes_what_was_measured(kv: str) -> None:
    config = tiny_config(head_dim=64, max_position=LONG + 100, **SHAPE)
    model = LoadedModel(config, random_model(config, 0, torch.bfloat16, "cuda"), tiny_tokenizer(), "long")
    _peak(model.decoder, [LONG])  # libraries take their work space
    measured = _peak(_first_layers(model.decoder), [LONG])
    assert abs(measured - _peak(model.decoder, [LONG])) < 0.05 * measured, "two layers take as much as all"
    activations = LONG * (2 * 8192 + 8192) * 2
    assert measured < 0.5 * activations, "the MLP takes some rows at a time"
    llm = LLM(model, kv, max_num_seqs=2, max_num_batched_tokens=2048, kv_cache_memory_bytes=1 << 30)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm.generate([prompt(3000)], params)  # kernels are compiled, work space is taken
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    [out] = llm.generate([prompt(LONG)], params)
    assert len(out.token_ids) == 3
    assert torch.cuda.max_memory_allocated() - before < measured + _RESERVE // 2
