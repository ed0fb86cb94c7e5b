"""DuoAttention: classes of heads from a file, from a list, and from the prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from siftkv.errors import PolicyError
from siftkv.policies import DuoAttention, parse_policy
from siftkv.policies.base import UNLIMITED
from tests.policies.views import G, H, N, R, attention, view_of

SCORES = [[0.9, 0.1], [0.2, 0.8], [0.3, 0.05]]
RETRIEVES = [[True, False], [False, True], [True, False]]


def test_streaming_heads_keep_sinks_and_window_for_good(tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    file.write_text(json.dumps({"scores": SCORES}))
    for policy in (DuoAttention(heads=SCORES), parse_policy(f"duo:heads={file}")):
        for layer, retrieves in enumerate(RETRIEVES):
            tier = policy.classify(view_of(policy, 500, layer))
            assert [bool((tier[:, head] == 0).all()) for head in range(H)] == retrieves
            assert [bool((tier[:, head] < 0).all()) for head in range(H)] == [not x for x in retrieves]
        cap = policy.decode_rule(3, 2).cap[..., 0]
        assert cap.tolist() == [[UNLIMITED if x else 0 for x in row] for row in RETRIEVES]


def test_the_share_of_streaming_heads_is_of_all_layers() -> None:
    for sparsity, count in ((0.0, 0), (0.3, 2), (0.5, 3), (1.0, 6)):
        cap = DuoAttention(sparsity=sparsity, heads=SCORES).decode_rule(3, 2).cap
        assert int((cap == 0).sum()) == count


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    for scores, retrieves in (([[1, 0]], [True, False]), ([[0.0, 1.0]], [False, True])):
        file.write_text(json.dumps(scores))
        found = DuoAttention(heads=str(file)).retrieves
        assert found is not None
        assert found.tolist() == [retrieves]


def test_what_a_file_says_tells_policies_apart(tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    made = []
    for scores in ([[1, 0]], [[1, 0]], [[0.0, 1.0]]):
        file.write_text(json.dumps(scores))
        made.append(DuoAttention(heads=str(file)))
    assert made[0] == made[1] != made[2]
    assert len(set(made)) == 2
    assert repr(made[1]) != repr(made[2]), "records of an evaluation go by it"
    assert DuoAttention(heads=SCORES) == DuoAttention(heads=SCORES) != DuoAttention(heads=SCORES[::-1])


def test_heads_are_measured_by_what_they_see_between_sinks_and_window() -> None:
    policy = DuoAttention(window=10, sinks=3)
    view = view_of(policy)
    tier = policy.classify(view)
    for prompt in range(R):
        far = [
            sum(float(attention(view, prompt, head, g)[-64:, 3 : N - 10].sum()) for g in range(G)) for head in range(H)
        ]
        weakest = far.index(min(far))
        assert [bool((tier[prompt, head] < 0).all()) for head in range(H)] == [head == weakest for head in range(H)]
    assert int(policy.decode_rule(2, 2).cap.min()) == UNLIMITED, "what a prompt says does not bind later tokens"


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", "[[1], [1, 2]]", '[["a"]]', "[[NaN, 1]]", '{"scores": 3}'])
def test_bad_files(text: str, tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    file.write_text(text)
    with pytest.raises(PolicyError, match="JSON"):
        parse_policy(f"duo:heads={file}")


def test_bad_settings() -> None:
    with pytest.raises(PolicyError, match="JSON"):
        parse_policy("duo:heads=/nowhere/at/all.json")
    with pytest.raises(PolicyError, match="sparsity"):
        parse_policy("duo:sparsity=1.5")
    with pytest.raises(PolicyError, match="list of numbers"):
        DuoAttention(heads=[[1.0], [1.0, 2.0]])
    with pytest.raises(PolicyError, match="4 layers of 2"):
        DuoAttention(heads=SCORES).decode_rule(4, 2)
    assert torch.equal(DuoAttention(heads=torch.tensor(SCORES).tolist()).retrieves, torch.tensor(RETRIEVES))  # type: ignore[arg-type]
