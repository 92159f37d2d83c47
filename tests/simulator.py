"""
DESIGN §5 on plain dicts, whole tensors, no files: what every real path has to match, bit for bit.

It shares no code with `ram_trl`; it is meant to be read beside the contract.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Weights = dict[str, torch.Tensor]


def active(theta: Weights, before: Weights, criterion: tuple[str, float]) -> dict[str, torch.Tensor]:
    kind, number = criterion
    if kind == "ulp":
        return {n: theta[n].bfloat16() != before[n].bfloat16() for n in theta}
    tau = {n: theta[n] - before[n] for n in theta}
    if kind == "epsilon":
        limit = torch.tensor(number, dtype=torch.float32)
        return {n: tau[n].abs() > limit for n in tau}
    sizes = torch.cat([tau[n].abs().flatten() for n in sorted(tau)]).sort(descending=True).values
    kth = sizes[max(1, round(number * len(sizes))) - 1]
    return {n: (tau[n].abs() >= kth) & (tau[n] != 0) for n in tau}


@dataclass
class Published:
    base_round: int
    theta: Weights  # decoded: exact where active, S_b elsewhere
    consumed: bool = False


@dataclass
class Agent:
    theta: Weights
    round: int = 0
    published: Published | None = None
    taken: dict[int, Published] = field(default_factory=dict)  # by round


@dataclass
class Simulator:
    base: Weights
    criterion: tuple[str, float] = ("top", 0.2)
    r: float = 0.2
    alpha: float = 1.0
    carry: bool = True
    observe: bool = False
    states: list[Weights] = field(default_factory=list)
    agents: dict[str, Agent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = [self.base]

    def join(self, name: str) -> None:
        number = 0 if self.observe else len(self.states) - 1
        self.agents[name] = Agent({n: t.clone() for n, t in self.states[number].items()}, number)

    def publish(self, name: str) -> None:
        agent = self.agents[name]
        if any(k > agent.round for k in agent.taken) and not self.observe:
            self.load(name)
        number = 0 if self.observe else agent.round
        before = self.states[number]
        mask = active(agent.theta, before, self.criterion)
        kept = {n: t.bfloat16().float() if self.criterion[0] == "ulp" else t for n, t in agent.theta.items()}
        agent.published = Published(number, {n: torch.where(mask[n], kept[n], before[n]) for n in before})

    def eligible(self) -> dict[str, Published]:
        found = {}
        for name, agent in sorted(self.agents.items()):
            stale = agent.published and any(k > agent.published.base_round for k in agent.taken)
            if agent.published and (self.observe or not stale):
                found[name] = agent.published
        return found

    def close(self) -> None:
        taken = self.eligible()
        before = self.states[0 if self.observe else -1]
        previous = 0 if self.observe else len(self.states) - 1
        tau = {a: {n: p.theta[n] - self.states[p.base_round][n] for n in before} for a, p in taken.items()}
        mask = {a: {n: p.theta[n] != self.states[p.base_round][n] for n in before} for a, p in taken.items()}
        count = {n: sum(mask[a][n].int() for a in taken) for n in before}
        merged = {n: t.clone() for n, t in before.items()}
        for a, p in taken.items():
            alone = {n: mask[a][n] & (count[n] == 1) for n in before}
            unique = sum(int(m.sum()) for m in alone.values())
            shared = sum(int(mask[a][n].sum()) for n in before) - unique
            scale = torch.tensor(1 + self.r * min(shared / unique, self.alpha) if unique else 1.0)
            for n in before:
                moved = before[n] + scale * tau[a][n]
                if scale == 1 and p.base_round == previous:
                    moved = p.theta[n]
                merged[n] = torch.where(alone[n], moved, merged[n])
        for n in before:
            total = torch.zeros_like(before[n])
            for a in taken:
                total = total + torch.where(mask[a][n], tau[a][n], 0.0)
            merged[n] = torch.where(count[n] >= 2, before[n] + total / count[n], merged[n])
        self.states.append(merged)
        for a, p in taken.items():
            self.agents[a].taken[len(self.states) - 1] = p

    def load(self, name: str) -> None:
        agent, newest = self.agents[name], len(self.states) - 1
        before, state = self.states[agent.round], self.states[newest]
        used = next((p for k, p in sorted(agent.taken.items()) if k > agent.round), None)
        for n, theta in agent.theta.items():
            left = theta - before[n]
            same = state[n] == before[n]
            if used is not None:
                tau = used.theta[n] - self.states[used.base_round][n]
                left, same = left - tau, same & (tau == 0)
            carried = torch.where(same, theta, torch.where(left == 0, state[n], state[n] + left))
            agent.theta[n] = carried if self.carry else state[n].clone()
        agent.round = newest

    def restart(self, name: str, theta: Weights, round: int) -> None:
        """Comes back from a checkpoint with these weights, taken when `round` was the last one loaded."""
        agent = self.agents[name]
        agent.theta, agent.round = {n: t.clone() for n, t in theta.items()}, round
        if self.observe or round == len(self.states) - 1:
            return
        if any(k > round for k in agent.taken):
            agent.theta, agent.round = {n: t.clone() for n, t in self.states[-1].items()}, len(self.states) - 1
        else:
            kept, agent.taken = agent.taken, {}
            self.load(name)
            agent.taken = kept
