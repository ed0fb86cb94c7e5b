"""Hard-KV in the engine on a GPU: triggers between graph replays and pipelined steps, fused or layer by layer."""

from __future__ import annotations

import pytest
import torch

from siftkv import LLM, SamplingParams, parse_policy
from siftkv.engine.beside import CurrentStream
from siftkv.engine.cascade import Cascade
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.engine.sequence import Sequence
from siftkv.engine.together import select_together
from siftkv.kernels import cuda
from siftkv.kernels.state import UNLIMITED
from siftkv.models import LoadedModel, ModelConfig, random_model
from siftkv.policies import HardKV
from tests.tiny import tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig("LlamaForCausalLM", 97, 256, 512, 4, 8, 2, 64, 2048, eos_token_ids=(0,))
HARDKV = "hardkv:p=0.5,window=32,lower=64,upper=128,interval=16,queries=16"
LENGTHS = (300, 7, 90, 500, 64)
GREEDY = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (n,), generator=generator).tolist() for n in LENGTHS]


def open_llm(kv: str = HARDKV, **settings: object) -> LLM:
    decoder = random_model(CONFIG, 0, torch.float32, "cpu").to(torch.bfloat16).to("cuda")
    model = LoadedModel(CONFIG, decoder, tiny_tokenizer(), "tiny")
    defaults: dict[str, object] = {"max_num_seqs": 5, "max_model_len": 1024, "formats": ["bf16", "k8v4", "k4v2"]}
    defaults |= {"kv_cache_memory_bytes": 1 << 29, "admission": "greedy"}
    return LLM(model, kv, **(defaults | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setting",
    [
        *("", ",budget=96", ",format=k8v4", ",metric=snapkv", ",metric=rkv,memory=true", ",layout=max"),
        *(",select=topk,budget=96,metric=rkv", ",budget=1MiB,format=k8v4"),
    ],
)
def test_graphs_and_eager_steps_trigger_alike(setting: str) -> None:
    kv = HARDKV + setting
    # Pooled scores of random weights are nearly equal: half their mass takes every token; and so does the longest head.
    if "snapkv" in kv or "layout" in kv:
        kv = kv.replace("p=0.5", "p=0.05")
    mixed = [kv, kv, "full", kv, "diffkv"]
    eager = open_llm(kv, enforce_eager=True, check_integrity=True).generate(prompts(), GREEDY, mixed)
    llm = open_llm(kv, check_integrity=True)
    graphs = llm.generate(prompts(), GREEDY, mixed)
    for ours, theirs in zip(graphs, eager, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.kv is not None
        assert theirs.kv is not None
        assert ours.kv.per_head_tokens == theirs.kv.per_head_tokens
    assert graphs[0].kv is not None
    assert graphs[0].kv.tokens_by_tier["dropped"] > 0
    assert llm.cache.free_pages == llm.cache.spec.num_pages


@pytest.mark.parametrize("metric", ["attention", "rkv", "accumulated"])
def test_prompts_that_are_selected_together_keep_what_they_keep_alone(metric: str) -> None:
    """But for what the order of 16-bit sums changes."""
    kv = f"{HARDKV},metric={metric}".replace("p=0.5", "p=0.3")
    llm, first = open_llm(kv), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in (300, 410, 260, 500, 140)]
    held = []
    for outs in (llm.generate(ids, first), [llm.generate([own], first)[0] for own in ids]):
        reports = [out.kv for out in outs if out.kv is not None]
        assert len(reports) == len(ids)
        assert all(report.tokens_by_tier["dropped"] > 0 for report in reports)
        held.append(torch.tensor([report.per_head_tokens for report in reports]).float())
    assert float((held[0] - held[1]).abs().mean()) < 0.03 * float(held[1].mean())


def test_with_p_of_one_it_is_the_full_engine() -> None:
    """Through every trigger: no token goes, and logits differ by no more than the order of 16-bit sums makes them."""
    kv = HARDKV.replace("p=0.5", "p=1")
    llm = open_llm(kv, formats=["bf16"])
    forced = prompts()[0]
    rows = [ForcedRow(prompts()[3], forced, parse_policy(name)) for name in (kv, "full:window=32")]
    run = ForcedRun(llm.engine, rows)
    ours, full = torch.stack([x.float().log_softmax(-1) for x in run], 1)
    assert run.cascades[0] is not None
    assert len(run.cascades[0].history) > 10
    found = {(t.position, int(t.kept.min()), int(t.kept.max())) for t in run.cascades[0].history}
    # What a selection beside a step finds is applied after that step, which brought a token.
    assert all(least == most == position + 1 for position, least, most in found), found
    assert float((full.exp() * (full - ours)).sum(-1).mean()) < 1e-3


@pytest.mark.parametrize(
    "setting",
    ["metric=attention", "metric=snapkv", "metric=accumulated", "metric=rkv", "metric=rkv,select=topk,budget=96"],
)
def test_the_fused_trigger_keeps_what_the_plain_one_keeps(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' selection may keep a few tokens more, never fewer of any row's share."""
    kv = f"{HARDKV},{setting}"
    forced = prompts()[0][:-8]  # the last step is none after which a trigger would have to wait for another
    found = []
    for fused in (True, False):
        llm = open_llm(kv)
        if not fused:
            monkeypatch.setattr(Cascade, "_rule", lambda *_: None)
        run = ForcedRun(llm.engine, [ForcedRow(prompts()[3], forced, parse_policy(kv))])
        logits = torch.stack([x[0].float().log_softmax(-1) for x in run])
        assert run.cascades[0] is not None
        found.append((run.cascades[0].history, logits))
    (ours, logp), (theirs, expected) = found
    assert [t.position for t in ours] == [t.position for t in theirs]
    first, plain = (next(t for t in history if t.rewritten) for history in (ours, theirs))
    assert bool((first.kept.cpu() >= plain.kept.cpu() - 2).all())
    assert float(first.kept.float().mean()) < 1.25 * float(plain.kept.float().mean())
    assert float((expected.exp() * (expected - logp)).sum(-1).mean()) < 0.05


@pytest.mark.parametrize("setting", ["metric=rkv,format=k8v4", "metric=rkv,select=topk,budget=96,layout=max"])
def test_the_host_does_not_wait_for_selections_that_no_kernel_serves(setting: str) -> None:
    kv = f"{HARDKV},{setting}"
    llm = open_llm(kv)
    bound, policy = llm.engine.bind(llm.kv), llm.kv
    assert isinstance(policy, HardKV)
    sequence = one(llm)
    until_selecting(llm, 0)
    sources = tuple(reversed(bound.pool_tiers))
    for mode in ("default", "error"):  # what is copied to the device once is there the second time
        before = cuda.snapshot(llm.cache.state, sequence.slot)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            select_together(before, 0, policy, sources, sequence.seen, UNLIMITED)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    llm.engine.abort("r0")


def one(llm: LLM, tokens: int = 80) -> Sequence:
    """The only request, queued."""
    llm.engine.add(prompts()[3], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), llm.kv, None, "r0")
    return llm.engine.sequences("r0")[0]


def finish(llm: LLM, sequence: Sequence) -> tuple[list[int], object, list[tuple[int, object, object]]]:
    while llm.engine.has_work:
        llm.engine.step()
    assert sequence.error is None
    assert sequence.kv is not None
    assert sequence.cascade is not None
    history = [(t.position, t.selected.tolist(), t.kept.tolist()) for t in sequence.cascade.history]
    llm.engine.forget("r0")
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    return sequence.output_ids, sequence.kv.per_head_tokens, history


@pytest.mark.parametrize("setting", ["interval=1", "interval=3,format=k8v4", "interval=2,metric=snapkv,budget=96"])
def test_selections_beside_decode_steps_find_what_they_find_between_them(setting: str) -> None:
    """As often as can be, in two runs beside the steps and in one on their stream."""
    kv = HARDKV.replace("interval=16", setting)
    llm = open_llm(kv)
    mixed = [kv, "full", kv, kv, "diffkv"]
    found = []
    for serial in (False, False, True):
        if serial:
            llm.cache.state.scratch["selections"] = CurrentStream()
        outs = llm.generate(prompts(), GREEDY, mixed)
        found.append([(o.token_ids, o.kv and o.kv.per_head_tokens) for o in outs])
        llm.cache.check_integrity()
    assert found[0] == found[1]
    assert found[0] == found[2]


def until_selecting(llm: LLM, steps: int) -> None:
    """A selection under way, at least `steps` later, and no decode step that has not landed."""
    for _ in range(steps):
        llm.engine.step()
    while not llm.cache.under_way:
        llm.engine.step()
    if llm.engine.flights.under_way is not None:
        llm.engine.flights.free_pages = -1
        llm.engine.step()
    assert llm.engine.flights.under_way is None
    assert llm.cache.under_way


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_request_preempted_during_a_selection_ends_as_an_undisturbed_one(preemption: str, eager: bool) -> None:
    llm = open_llm(enforce_eager=eager, preemption=preemption, check_integrity=True)
    expected = finish(llm, one(llm))
    sequence = one(llm)
    for _ in range(3):
        until_selecting(llm, 4)
        llm.engine.scheduler.running.remove(sequence)
        llm.engine.scheduler._preempt(sequence)
        assert not llm.cache.under_way
        assert llm.cache.free_pages == llm.cache.spec.num_pages
        llm.cache.check_integrity()
    assert finish(llm, sequence) == expected
    assert sequence.preemptions == 3


def test_an_abort_during_a_selection_gives_everything_back_and_disturbs_nobody() -> None:
    llm = open_llm(check_integrity=True)
    expected = finish(llm, one(llm))
    for steps in (0, 5, 20):
        one(llm)
        until_selecting(llm, steps)
        llm.engine.abort("r0")
        llm.engine.forget("r0")
        assert not llm.cache.under_way
        assert llm.cache.free_pages == llm.cache.spec.num_pages
        assert finish(llm, one(llm)) == expected
