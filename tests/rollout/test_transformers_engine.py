"""The transformers engine against transformers' own generate, a plain forward pass, and itself with other batch mates."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.rollout import transformers_engine
from teamtr_lora.rollout.sampler import Completion, Request, SamplingParams, derive_seed
from teamtr_lora.rollout.transformers_engine import TransformersSampler

STOP = 2  # <|im_end|>
PROMPTS = [[1, 80, 70, 90, 75], [1, 66], [1, 100, 101, 102, 103, 104, 105, 106, 107, 108], [1, 80, 70, 90, 75, 76]]

MakeSampler = Callable[..., TransformersSampler]


def request(
    prompt: list[int],
    agent: str = "a",
    *,
    seed: int = 0,
    temperature: float = 1.0,
    max_tokens: int = 8,
    stop: tuple[int, ...] = (),
) -> Request:
    return Request(list(prompt), agent, SamplingParams(temperature, max_tokens, stop), seed)


def run(sampler: TransformersSampler, requests: list[Request]) -> list[Completion]:
    """All completions in the order of the requests."""
    tickets = [sampler.submit(r) for r in requests]
    done: dict[int, Completion] = {}
    while len(done) < len(tickets):
        finished = sampler.poll()
        assert finished, "poll answers as long as something is queued"
        done.update({c.ticket: c for c in finished})
    assert sampler.poll() == []
    return [done[ticket] for ticket in tickets]


def logits(bank: AdapterBank, agent: str, ids: list[int]) -> torch.Tensor:
    """A plain forward pass: no cache, no padding, no mask; float64 from the logits on."""
    bank.activate(agent)
    with torch.no_grad():
        return bank.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


@pytest.mark.parametrize("agent", ["a", "b"])
def test_greedy_is_what_generate_does(bank: AdapterBank, make_sampler: MakeSampler, agent: str) -> None:
    greedy = run(make_sampler(), [request(p, agent, temperature=0, max_tokens=12, stop=(STOP,)) for p in PROMPTS])
    for prompt, completion in zip(PROMPTS, greedy, strict=True):
        bank.activate(agent)
        with torch.no_grad():
            output: Any = bank.model.generate(
                input_ids=torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=STOP, pad_token_id=0
            )
        assert completion.token_ids == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_log_probabilities_are_those_of_the_policy(bank: AdapterBank, make_sampler: MakeSampler, temperature: float) -> None:
    requests = [
        request(prompt, agent, seed=seed, temperature=temperature, max_tokens=10, stop=(STOP,))
        for seed, prompt in enumerate(PROMPTS)
        for agent in ("a", "b", "c")
    ]
    for asked, completion in zip(requests, run(make_sampler(), requests), strict=True):
        ids = asked.prompt_ids + completion.token_ids
        logp = torch.log_softmax(logits(bank, asked.agent, ids) / temperature, dim=-1)
        expected = [float(logp[len(asked.prompt_ids) - 1 + t, token]) for t, token in enumerate(completion.token_ids)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
        assert len(completion.logprobs) == len(completion.token_ids)


def test_an_episode_does_not_depend_on_its_batch_mates(make_sampler: MakeSampler) -> None:
    """Alone; with others of other lengths (padding); with other agents in the batch; in another order; in small batches."""
    wanted = [request(p, agent, seed=10 + i, max_tokens=10, stop=(STOP,)) for i, p in enumerate(PROMPTS) for agent in ("a", "b")]
    alone = [run(make_sampler(), [r])[0] for r in wanted]
    others = [
        request([1, *range(60, 60 + n)], agent, seed=n, max_tokens=3 + n % 10) for n in range(1, 30) for agent in ("b", "c")
    ]
    settings: list[tuple[list[Request], dict[str, Any]]] = [
        (wanted, {}),
        (wanted[::-1], {}),
        (wanted + others[:20], {}),
        (others + wanted, {}),
        (wanted + others[:7], {"requests_per_batch": 3}),
    ]
    for requests, options in settings:
        got = dict(zip(map(id, requests), run(make_sampler(**options), requests), strict=True))
        for r, expected in zip(wanted, alone, strict=True):
            assert got[id(r)].token_ids == expected.token_ids
            assert got[id(r)].logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            assert (got[id(r)].finish, got[id(r)].version) == (expected.finish, expected.version)


def test_mixed_and_single_agent_batches_agree(make_sampler: MakeSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(p, agent, seed=i) for i, p in enumerate(PROMPTS) for agent in ("a", "b", "c")]
    mixed = run(make_sampler(), requests)
    monkeypatch.setattr(transformers_engine, "MIXED_ROWS", {"cpu": 0})
    single = run(make_sampler(), requests)
    assert [c.token_ids for c in mixed] == [c.token_ids for c in single]
    by_agent = [[c.token_ids for c, r in zip(mixed, requests, strict=True) if r.agent == agent] for agent in ("a", "b", "c")]
    assert by_agent[0] != by_agent[1] != by_agent[2], "the adapters make a difference"


def test_equal_prompts_share_a_prefill_and_nothing_else(make_sampler: MakeSampler) -> None:
    requests = [request(PROMPTS[0], "a", seed=seed) for seed in range(12)] + [request(PROMPTS[0], "b", seed=0)]
    together = run(make_sampler(), requests)
    assert [c.token_ids for c in together] == [run(make_sampler(), [r])[0].token_ids for r in requests]
    assert len({tuple(c.token_ids) for c in together[:12]}) > 6


def test_a_longer_limit_continues_the_same_message(make_sampler: MakeSampler) -> None:
    short, long = (run(make_sampler(), [request(PROMPTS[0], seed=3, max_tokens=n)])[0].token_ids for n in (4, 12))
    assert long[:4] == short


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_first_token_is_drawn_from_softmax(bank: AdapterBank, make_sampler: MakeSampler, temperature: float) -> None:
    """Chi-square over 4000 seeds, rare tokens pooled. The seeds are fixed: this fails for a wrong law, not by chance."""
    count = 4000
    sampler = make_sampler(requests_per_batch=count)
    requests = [request(PROMPTS[1], seed=derive_seed("law", n), temperature=temperature, max_tokens=1) for n in range(count)]
    drawn = np.bincount([c.token_ids[0] for c in run(sampler, requests)], minlength=272)
    p = torch.softmax(logits(bank, "a", PROMPTS[1])[-1] / temperature, dim=-1).numpy()
    common = p * count >= 5
    expected = np.append(p[common], p[~common].sum()) * count
    observed = np.append(drawn[common], drawn[~common].sum())
    assert common.sum() > 20
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    wrong = torch.softmax(logits(bank, "b", PROMPTS[1])[-1] / temperature, dim=-1).numpy()
    assert stats.chisquare(observed, np.append(wrong[common], wrong[~common].sum()) * count).pvalue < 1e-6, "the test can tell"


def test_successive_tokens_use_fresh_randomness(bank: AdapterBank, make_sampler: MakeSampler) -> None:
    """Given the first token, the second is drawn from its own conditional law."""
    requests = [request(PROMPTS[1], seed=derive_seed("second", n), temperature=0.5, max_tokens=2) for n in range(3000)]
    pairs = [tuple(c.token_ids) for c in run(make_sampler(requests_per_batch=3000), requests)]
    first = max({a for a, _ in pairs}, key=[a for a, _ in pairs].count)
    second = [b for a, b in pairs if a == first]
    p = torch.softmax(logits(bank, "a", [*PROMPTS[1], first])[-1] / 0.5, dim=-1).numpy()
    common = p * len(second) >= 5
    observed = np.bincount(second, minlength=272)
    value = stats.chisquare(
        np.append(observed[common], observed[~common].sum()), np.append(p[common], p[~common].sum()) * len(second)
    ).pvalue
    assert len(second) > 150 and value > 1e-3


def test_stop_ids_end_a_message_and_belong_to_it(make_sampler: MakeSampler) -> None:
    free = run(make_sampler(), [request(PROMPTS[0], seed=5, max_tokens=12)])[0]
    assert free.finish == "length" and len(free.token_ids) == 12
    stop = free.token_ids[6]
    cut = free.token_ids[: free.token_ids.index(stop) + 1]
    stopped = run(make_sampler(), [request(PROMPTS[0], seed=5, max_tokens=12, stop=(271, stop))])[0]
    assert (stopped.token_ids, stopped.finish) == (cut, "stop")
    exact = run(make_sampler(), [request(PROMPTS[0], seed=5, max_tokens=len(cut), stop=(stop,))])[0]
    assert (exact.token_ids, exact.finish) == (cut, "stop"), "a stop token in the last place is a stop"


def test_limits_are_per_request(make_sampler: MakeSampler) -> None:
    done = run(make_sampler(), [request(PROMPTS[0], seed=n, max_tokens=n) for n in range(1, 20)])
    assert [len(c.token_ids) for c in done] == list(range(1, 20))
    assert {c.finish for c in done} == {"length"}


def test_temperatures_are_per_request(bank: AdapterBank, make_sampler: MakeSampler) -> None:
    greedy, hot = run(make_sampler(), [request(PROMPTS[0], temperature=0), request(PROMPTS[0], temperature=3.0, seed=1)])
    assert greedy.token_ids[0] == int(logits(bank, "a", PROMPTS[0])[-1].argmax())
    expected = torch.log_softmax(logits(bank, "a", PROMPTS[0])[-1] / 3.0, dim=-1)[hot.token_ids[0]]
    assert hot.logprobs[0] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request([1, 272]), "token id outside 0..271"),
        (request([1, -1]), "token id outside"),
        (request([]), "empty"),
        (request([1] * 125, max_tokens=4), "exceed the context of 128"),
        (request([1], "nobody"), "unknown agent 'nobody'; published: a, b, c"),
    ],
)
def test_a_bad_request_fails_alone(make_sampler: MakeSampler, bad: Request, message: str) -> None:
    good = [request(p, seed=i) for i, p in enumerate(PROMPTS)]
    expected = run(make_sampler(), good)
    got = run(make_sampler(), [good[0], bad, *good[1:]])
    failed = got.pop(1)
    assert message in (failed.error or "") and failed.token_ids == []
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert all(c.error is None for c in got)


def test_a_prompt_that_just_fits(make_sampler: MakeSampler) -> None:
    assert len(run(make_sampler(), [request([1] * 124, max_tokens=4)])[0].token_ids) == 4


def test_completions_name_the_version_that_made_them(bank: AdapterBank, make_sampler: MakeSampler) -> None:
    done = run(make_sampler(), [request([1, 70], agent) for agent in ("a", "b", "c")])
    assert [c.version for c in done] == [bank.version(agent).name for agent in ("a", "b", "c")]


def test_only_what_the_bank_holds_can_be_published(bank: AdapterBank, make_sampler: MakeSampler) -> None:
    sampler = make_sampler()
    current = bank.version("a")
    for other in (AdapterVersion("a", current.number + 1, current.content_hash), AdapterVersion("a", current.number, "0" * 64)):
        with pytest.raises(RuntimeError, match="bank holds another version"):
            sampler.publish(other)
    assert run(sampler, [request([1, 70])])[0].version == current.name


def test_a_new_version_is_not_sampled_before_it_is_published(bank: AdapterBank, make_sampler: MakeSampler) -> None:
    sampler, before, version = make_sampler(), bank.snapshot("a"), bank.version("a")
    old = run(sampler, [request(PROMPTS[0], seed=1, max_tokens=12)])[0]
    try:
        bank.restore("a", {name: tensor + 0.05 for name, tensor in before.items()})
        new = bank.commit("a")
        sampler.submit(request(PROMPTS[0], seed=1))
        with pytest.raises(RuntimeError, match="after .* was published"):
            sampler.poll()
        sampler = make_sampler()
        sampler.publish(new)
        made = run(sampler, [request(PROMPTS[0], seed=1, max_tokens=12)])[0]
        assert made.version == new.name != old.version and made.logprobs != old.logprobs
    finally:
        bank.load(version, before)


def test_close_forgets_what_is_queued(make_sampler: MakeSampler) -> None:
    sampler = make_sampler()
    sampler.submit(request([1, 70]))
    sampler.submit(request([]))
    sampler.close()
    assert sampler.poll() == []


def test_sampling_changes_no_parameter_and_no_global_generator(
    base: FrozenBase, bank: AdapterBank, make_sampler: MakeSampler
) -> None:
    before = {name: p.detach().clone() for name, p in bank.model.named_parameters()}
    state = torch.get_rng_state()
    run(make_sampler(), [request(p, agent, seed=3) for p in PROMPTS for agent in ("a", "b", "c")])
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in bank.model.named_parameters():
        assert torch.equal(parameter, before[name]) and not parameter.requires_grad, name
