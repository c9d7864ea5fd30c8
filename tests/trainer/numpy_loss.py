"""The policy loss once more, trajectory by trajectory in plain NumPy loops: what services/trainer/loss.py must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace import config


@dataclass(frozen=True)
class Trajectory:
    """Action tokens alone, float64[n] each."""

    logprobs: np.ndarray
    entropies: np.ndarray
    behaviour: np.ndarray
    start: np.ndarray
    reference: np.ndarray
    advantages: np.ndarray
    ages: np.ndarray


def policy_loss(
    trajectories: Sequence[Trajectory],
    settings: config.Loss,
    *,
    progress: float = 0.0,
    frozen: Sequence[np.ndarray] | None = None,
) -> float:
    """The aggregated loss; `frozen` are log pi where no gradient flows, for finite differences."""
    frozen = frozen or [trajectory.logprobs for trajectory in trajectories]
    losses = [_tokens(one, still, settings, progress) for one, still in zip(trajectories, frozen, strict=True)]
    kept = [tokens for tokens in losses if tokens]
    if settings.aggregation == "token_mean":
        everything = [loss for tokens in kept for loss in tokens]
        return sum(everything) / len(everything)
    if settings.aggregation == "sequence_mean_token_mean":
        return sum(sum(tokens) / len(tokens) for tokens in kept) / len(kept)
    length = settings.aggregation_tokens if settings.aggregation == "sequence_mean_constant" else 1
    return sum(sum(tokens) / length for tokens in kept) / len(kept)


def _tokens(one: Trajectory, still: np.ndarray, settings: config.Loss, progress: float) -> list[float]:
    count = len(one.logprobs)
    if settings.anchor == "sampler":
        anchor, start = one.behaviour, still
    elif settings.anchor == "start":
        anchor = start = one.start
    else:
        share = [a / (a + progress) if a + progress > 0 else 1.0 for a in one.ages]
        anchor = start = np.array([m + s * (p - m) for m, s, p in zip(one.behaviour, share, still, strict=True)])
    weights = np.exp(start - one.behaviour)
    if settings.geometric_bounds and not _inside(np.exp(np.log(weights).mean()), settings.geometric_bounds):
        return []
    if settings.veto_bounds and not all(_inside(weight, settings.veto_bounds) for weight in weights):
        return []
    losses = []
    for t in range(count):
        weight = {
            "none": 1.0,
            "token_tis": min(weights[t], settings.correction_cap),
            "sequence_tis": min(float(np.prod(weights)), settings.correction_cap),
            "icepop": weights[t],
        }[settings.correction]
        if settings.correction == "icepop" and not _inside(weights[t], settings.icepop_bounds):
            continue
        loss = weight * _surrogate(one, still, anchor, t, settings)
        gap = one.logprobs[t] - one.reference[t]
        divergence = {"k1": gap, "k2": gap**2 / 2, "k3": np.exp(-gap) + gap - 1}[settings.kl_estimator]
        if settings.kl_place == "loss":
            loss += settings.kl_coefficient * divergence
        losses.append(loss - settings.entropy_coefficient * one.entropies[t])
    return losses


def _surrogate(one: Trajectory, still: np.ndarray, anchor: np.ndarray, t: int, settings: config.Loss) -> float:
    low, high, advantage = 1 - settings.clip_low, 1 + settings.clip_high, one.advantages[t]
    ratio = np.exp(one.logprobs[t] - anchor[t])
    if settings.objective == "cispo":
        return -min(max(np.exp(still[t] - anchor[t]), low), high) * advantage * one.logprobs[t]
    if settings.objective == "gspo":
        ratio = np.exp((still - anchor).mean()) * np.exp(one.logprobs[t] - still[t])
    loss = max(-advantage * ratio, -advantage * min(max(ratio, low), high))
    if settings.dual_clip is not None and advantage < 0:
        loss = min(loss, -settings.dual_clip * advantage)
    return loss


def _inside(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]
