"""Log-probabilities and KL of real messages on a real (tiny) model, against a float64 copy of it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from teamtr_lora.algorithm.token_kl import message_kl
from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.team import agent_sequences
from teamtr_lora.training.batches import MessageBatch, message_batch
from teamtr_lora.training.optimize import Learner, Minibatch, accumulate
from teamtr_lora.training.scoring import Scorer, keep_current


def scorer_of(playable, temperature: float = 1.0, chunk: int = 16) -> Scorer:
    return Scorer(playable.base, playable.bank, temperature=temperature, head_chunk_tokens=chunk)


def batch_of(
    episodes, agent: str, budget: int = 300, mask: bool = False, advantage=None, pack_width: int | None = None
) -> MessageBatch:
    values = advantage or [float(i % 3 - 1) for i in range(len(episodes))]
    return message_batch(
        agent_sequences(episodes, agent), values,
        tokens_per_microbatch=budget, mask_truncated=mask, device=torch.device("cpu"), pack_width=pack_width,
    )  # fmt: skip


def by_message(batch: MessageBatch, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Token values regrouped by message, in the batch's order."""
    values, owner = torch.cat(parts), torch.cat([p.message_N for p in batch.microbatches])
    return [values[owner == m] for m in range(len(batch.messages))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("agent", ["left", "right"])
def test_log_probabilities_are_the_full_softmax_of_each_message_alone(
    make_team, episodes, move, double_logp, agent: str, temperature: float
) -> None:
    playable = make_team()
    move(playable, agent, 0.05)
    playable.bank.activate(agent)
    batch = batch_of(episodes, agent)
    assert len(batch.microbatches) > 2, "the example should need several micro-batches"
    got = by_message(batch, keep_current(scorer_of(playable, temperature), batch).logp)
    _, logp = double_logp(playable, agent)
    for message, values in zip(batch.messages, got, strict=True):
        with torch.no_grad():
            wanted = logp(message, temperature)[torch.arange(len(message.token_ids)), message.token_ids]
        assert torch.allclose(values.double(), wanted, atol=2e-5)


@pytest.mark.parametrize("view", ["shared", "per_agent"])
def test_one_forward_serves_all_of_an_agents_messages_of_an_episode(make_team, play, double_logp, view: str) -> None:
    playable = make_team(router={"kind": "round_robin", "rounds": 3}, protocol={"view": view})
    played = play(playable, items=2, episodes=2)
    batch = batch_of(played, "left", budget=10_000)
    assert len(batch.messages) == 12
    assert sum(len(p.rows.ids_B_T) for p in batch.microbatches) == 4, "one sequence an episode"
    playable.bank.activate("left")
    got = by_message(batch, keep_current(scorer_of(playable), batch).logp)
    _, logp = double_logp(playable, "left")
    for message, values in zip(batch.messages, got, strict=True):
        with torch.no_grad():
            wanted = logp(message)[torch.arange(len(message.token_ids)), message.token_ids]
        assert torch.allclose(values.double(), wanted, atol=2e-5)


def test_the_sampler_and_the_trainer_agree(make_team, episodes) -> None:
    """Same weights, other code path (KV cache, left padding): the same log-probabilities to rounding."""
    playable = make_team()
    for agent in ("left", "right"):
        playable.bank.activate(agent)
        batch = batch_of(episodes, agent)
        kept = keep_current(scorer_of(playable), batch)
        for part, logp in zip(batch.microbatches, kept.logp, strict=True):
            assert torch.allclose(logp, part.sampler_logp_N, atol=1e-4)


def test_padding_and_micro_batches_do_not_matter(make_team, episodes) -> None:
    playable = make_team()
    playable.bank.activate("right")
    results = []
    for budget in (1, 150, 1_000_000):
        batch = batch_of(episodes, "right", budget)
        assert all(p.rows.ids_B_T.numel() <= budget or len(p.rows.ids_B_T) == 1 for p in batch.microbatches)
        assert sum(len(p.target_N) for p in batch.microbatches) == batch.tokens
        results.append(torch.cat(by_message(batch, keep_current(scorer_of(playable), batch).logp)))
    assert len(batch.microbatches) == 1
    assert torch.allclose(results[0], results[2], atol=2e-5) and torch.allclose(results[1], results[2], atol=2e-5)


@pytest.mark.parametrize("agent", ["left", "right"])
def test_a_shared_prefix_changes_neither_values_nor_gradients(make_team, episodes, move, agent: str) -> None:
    playable = make_team()
    move(playable, agent, 0.05)
    scorer = scorer_of(playable)
    assert scorer.pack_width == 64
    results = []
    for width in (None, 10**6):  # so wide that attention counts for nothing: every group is packed
        batch = batch_of(episodes, agent, budget=2000, pack_width=width)
        packed = [p.rows.mask() is not None for p in batch.microbatches]
        assert any(packed) == (width is not None)
        with playable.bank.training(agent) as parameters:
            logps = [scorer.score(p, scorer.hidden(p)).logp_N for p in batch.microbatches]
            weights = [torch.linspace(-1, 1, 7)[p.message_N % 7] for p in batch.microbatches]
            weighted = sum((logp * weight).sum() for logp, weight in zip(logps, weights, strict=True))
            gradients = torch.autograd.grad(weighted, parameters)
        results.append((torch.cat(by_message(batch, [x.detach() for x in logps])), gradients))
    assert torch.allclose(results[0][0], results[1][0], atol=2e-5)
    for alone, together in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(alone, together, atol=1e-4 * max(1.0, float(alone.abs().max())))


@pytest.mark.parametrize("budget", [40, 90, 2000])
def test_rows_that_lie_end_to_end_change_neither_values_nor_gradients(make_team, episodes, move, budget: int) -> None:
    """Whatever the micro-batches divide: groups that share an opening, and sequences that are longer than the budget."""
    playable = make_team()
    move(playable, "left", 0.05)
    scorer = scorer_of(playable)
    assert not scorer.takes_segments, "the flash kernels are a GPU's"
    scorer.takes_segments = True
    sequences, results = agent_sequences(episodes, "left"), []
    for segments in (False, True):
        batch = message_batch(sequences, None, tokens_per_microbatch=budget, device=torch.device("cpu"), segments=segments)
        with scorer.training("left") as parameters:
            logps = [scorer.score(p, scorer.hidden(p)).logp_N for p in batch.microbatches]
            weights = [torch.linspace(-1, 1, 7)[p.message_N % 7] for p in batch.microbatches]
            weighted = sum((logp * weight).sum() for logp, weight in zip(logps, weights, strict=True))
            gradients = torch.autograd.grad(weighted, parameters)
        results.append((torch.cat(by_message(batch, [x.detach() for x in logps])), gradients))
    sizes = [p.rows.ids_B_T.numel() for p in batch.microbatches]
    longest = max(len(s.ids) for s in sequences)
    assert all(size <= max(budget, longest) for size in sizes)
    assert budget < 2000 or sum(sizes) < sum(len(s.ids) for s in sequences), "openings are computed once"
    assert torch.allclose(results[0][0], results[1][0], atol=2e-5)
    for alone, together in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(alone, together, atol=1e-4 * max(1.0, float(alone.abs().max())))
    with pytest.raises(RuntimeError, match="training passes and quick ones"):
        scorer.hidden(batch.microbatches[0])


def test_gradients_of_a_shared_position_are_added_in_one_order() -> None:
    """Threads that race to add them would end a run, or its resumed copy, in other bits."""
    torch.manual_seed(0)
    hidden_B_T_D = torch.randn(1, 400, 64, requires_grad=True)
    place_N, gradient_N_D = torch.randint(0, 20, (2000,)), torch.randn(2000, 64)
    scorer = Scorer.__new__(Scorer)
    scorer._wide = scorer._training = False
    scorer._bank = SimpleNamespace(decoder=lambda **_: SimpleNamespace(last_hidden_state=hidden_B_T_D))
    rows = SimpleNamespace(ids_B_T=None, position_B_T=None, segments=None, mask=lambda: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = set()
        for _ in range(30):
            hidden_B_T_D.grad = None
            scorer.hidden(SimpleNamespace(rows=rows, place_N=place_N)).backward(gradient_N_D)
            found.add(hidden_B_T_D.grad.numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    expected = torch.zeros(400, 64, dtype=torch.float64).index_add_(0, place_N, gradient_N_D.double())
    assert torch.allclose(hidden_B_T_D.grad[0].double(), expected, atol=1e-4)


def test_packing_saves_the_tokens_of_the_common_prefix(episodes) -> None:
    alone = batch_of(episodes, "left", budget=10_000)
    together = batch_of(episodes, "left", budget=10_000, pack_width=10**6)
    rows = sum(len(p.rows.ids_B_T) for p in together.microbatches)
    assert rows == len({e.group for e in episodes})
    assert together.tokens == alone.tokens
    computed = [sum(p.rows.ids_B_T.numel() for p in batch.microbatches) for batch in (alone, together)]
    assert computed[1] < 0.6 * computed[0]


def test_a_batch_says_whose_message_is_whose(episodes) -> None:
    values = [0.25 * i for i in range(len(episodes))]
    batch = batch_of(episodes, "left", advantage=values)
    assert [id(m) for m in batch.messages] == [id(m) for e in episodes for m in e.messages if m.agent == "left"]
    assert batch.group_M.tolist() == [e.group for e in episodes]
    assert batch.advantage_M.tolist() == values
    assert batch.episode_M.tolist() == list(range(len(episodes)))
    targets = torch.cat([p.target_N for p in batch.microbatches]), torch.cat([p.message_N for p in batch.microbatches])
    for m, message in enumerate(batch.messages):
        assert targets[0][targets[1] == m].tolist() == message.token_ids


def test_truncated_messages_are_dropped_when_masked(episodes) -> None:
    cut = sum(m.truncated for e in episodes for m in e.messages if m.agent == "left")
    assert 0 < cut <= len(episodes)
    for e in episodes[:5]:
        e.messages[0].finish = "stop"
    kept = batch_of(episodes, "left", mask=True)
    assert len(kept.messages) == sum(not e.messages[0].truncated for e in episodes) >= 5
    assert not any(m.truncated for m in kept.messages)
    assert sum(len(p.target_N) for p in kept.microbatches) == sum(len(m.token_ids) for m in kept.messages)
    assert len(batch_of(episodes, "left", mask=False).messages) == len(episodes)


def exact_kl(playable, agent: str, episodes, current: dict, scorer: Scorer | None = None) -> list[float]:
    """Message-sum exact KL from the adapter `current` to the one in place, by the package."""
    scorer, batch = scorer or scorer_of(playable), batch_of(episodes, agent)
    now = playable.bank.snapshot(agent)
    playable.bank.activate(agent)
    playable.bank.restore(agent, current)
    kept = keep_current(scorer, batch)
    playable.bank.restore(agent, now)
    total = torch.zeros(len(batch.messages))
    with torch.no_grad():
        for part, kept_part in zip(batch.microbatches, kept.states, strict=True):
            kl_N = scorer.score_and_keep(part, kept_part)[0].kl_N
            assert kl_N is not None
            total += message_kl(kl_N, part.message_N, len(batch.messages), "message_sum")
    return total.tolist()


def test_kl_falls_as_alpha_squared_over_four_decades(make_team, episodes, move, double_logp) -> None:
    playable = make_team()
    bank = playable.bank
    move(playable, "left", 0.02, seed=1)  # both factors away from zero, as after some training
    current = bank.snapshot("left")
    move(playable, "left", 0.004, seed=2)
    candidate = bank.snapshot("left")
    chosen = episodes[:6]
    bank.restore("left", current)
    _, logp_current = double_logp(playable, "left")
    scaled = []
    for alpha in (1.0, 0.1, 1e-2, 1e-3, 1e-4):
        bank.interpolate("left", current, candidate, alpha)
        got = torch.tensor(exact_kl(playable, "left", chosen, current), dtype=torch.float64)
        _, logp = double_logp(playable, "left")
        with torch.no_grad():
            pairs = [(logp_current(e.messages[0]), logp(e.messages[0])) for e in chosen]
        wanted = torch.tensor([float((p.exp() * (p - q)).sum()) for p, q in pairs], dtype=torch.float64)
        assert torch.allclose(got.mean(), wanted.mean(), rtol=0.03), alpha
        scaled.append(float(got.mean()) / alpha**2)
    assert max(scaled) / min(scaled) < 1.05, scaled
    bank.interpolate("left", current, candidate, 0.0)
    assert exact_kl(playable, "left", chosen, current) == [0.0] * len(chosen)


def test_one_whole_step_has_the_brute_force_kl(make_team, episodes, move, double_logp) -> None:
    """At alpha = 1 the KL is no longer quadratic, but still the full-vocabulary sum at every sampled prefix."""
    playable = make_team()
    current = playable.bank.snapshot("right")
    _, logp_current = double_logp(playable, "right")
    move(playable, "right", 0.3)
    _, logp = double_logp(playable, "right")
    chosen = episodes[:6]
    scorer = scorer_of(playable, temperature=0.8)
    got = exact_kl(playable, "right", chosen, current, scorer)
    for episode, value in zip(chosen, got, strict=True):
        with torch.no_grad():
            p, q = logp_current(episode.messages[1], 0.8), logp(episode.messages[1], 0.8)
        wanted = float((p.exp() * (p - q)).sum())
        assert wanted > 0.01 and value == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("ratio", ["message", "token", "sequence_mean"])
def test_the_gradient_of_the_whole_loss_is_that_of_float64_finite_differences(
    make_team, episodes, move, double_logp, config, accelerator, ratio: str
) -> None:
    """beta KL - surrogate through micro-batches, chunks, recomputation and PEFT, against a loop over messages in float64."""
    playable = make_team()
    chosen, beta, clip = episodes[:6], 0.7, 0.2
    batch = batch_of(chosen, "left", budget=130)
    assert len(batch.microbatches) > 1
    batch = replace(batch, weight_M=torch.linspace(0.25, 3.0, len(batch.messages)), advantage_M=batch.advantage_M + 0.4)
    share = (batch.weight_M / batch.weight_M.sum()).tolist()
    move(playable, "left", 0.02)
    scorer = scorer_of(playable, chunk=4)
    playable.bank.activate("left")
    current = keep_current(scorer, batch)
    _, logp_current = double_logp(playable, "left")
    with torch.no_grad():
        fixed = [logp_current(m) for m in batch.messages]
    move(playable, "left", 0.01, seed=5)
    settings = config(ratio=ratio, clip_ratio=clip)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with playable.bank.training("left") as parameters:
        learner = Learner(
            scorer=scorer,
            optimizer=None,
            parameters=parameters,
            scaler=scaler,
            config=settings,
            region=Variants.of(settings).region,
            start_again=lambda: None,
        )
        seen = accumulate(learner, Minibatch(batch, current), beta)
        gradient = {name: p.grad.clone() for name, p in playable.bank.parameters("left").items()}
    assert len(parameters) == len(gradient)

    model, logp = double_logp(playable, "left")

    def loss(clip: float = clip) -> float:
        total = 0.0
        for m, message in enumerate(batch.messages):
            new, cur, a = logp(message), fixed[m], float(batch.advantage_M[m])
            tokens = (torch.arange(len(message.token_ids)), message.token_ids)
            logs = new[tokens] - cur[tokens]
            used = {"message": logs.sum()[None], "token": logs, "sequence_mean": logs.mean()[None]}[ratio]
            w = used.exp()
            total -= (float(torch.minimum(w * a, w.clamp(1 - clip, 1 + clip) * a).mean()) - a) / len(batch.messages)
            total += beta * share[m] * float((cur.exp() * (cur - new)).sum())
        return total

    twins = {n.replace(".agent_left.", "."): p for n, p in model.named_parameters() if ".agent_left." in n}
    assert twins.keys() == gradient.keys()
    step = 1e-5
    with torch.no_grad():
        assert loss(clip=math.inf) == pytest.approx(beta * seen.kl - seen.gain, rel=1e-3)  # measured without clipping
        for name in list(gradient)[::5]:
            place = int(gradient[name].abs().argmax())  # where the gradient is largest, so that the comparison means something
            flat = twins[name].view(-1)
            flat[place] += step
            up = loss()
            flat[place] -= 2 * step
            down = loss()
            flat[place] += step
            assert float(gradient[name].view(-1)[place]) == pytest.approx((up - down) / (2 * step), rel=2e-3, abs=1e-6), name


def test_a_first_pass_has_the_gradient_of_a_pass_that_knows_the_policy(make_team, episodes, accelerator, config) -> None:
    """Bit for bit: on a CPU the update needs no pass of its own for the policy that it starts from."""
    playable = make_team()
    scorer, settings = scorer_of(playable, chunk=4), config()
    batch = batch_of(episodes, "left")
    found = []
    for known in (False, True):
        with scorer.training("left") as parameters:
            learner = Learner(
                scorer=scorer,
                optimizer=None,
                parameters=parameters,
                scaler=torch.amp.GradScaler("cpu", enabled=False),
                config=settings,
                region=Variants.of(settings).region,
                start_again=lambda: None,
            )
            minibatch = Minibatch(batch, keep_current(scorer, batch) if known else None)
            seen = accumulate(learner, minibatch, 0.3)
            gradient = {name: p.grad.clone() for name, p in playable.bank.parameters("left").items()}
        assert minibatch.current is not None and seen.kl == 0
        found.append((gradient, minibatch.current.logp, minibatch.current.states))
    for name, gradient in found[0][0].items():
        assert torch.equal(gradient, found[1][0][name]), name
    assert float(sum(g.abs().sum() for g in found[0][0].values())) > 0
    for one, other in zip((*found[0][1], *found[0][2]), (*found[1][1], *found[1][2]), strict=True):
        assert torch.equal(one, other)
