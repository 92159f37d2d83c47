"""LoRA agents that merge while they train: real GRPO trainers with `peft_config`, against peft and the simulator."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

import ram_trl
from ram_trl import MergeConfig
from ram_trl.config import ContinualConfig
from ram_trl.continual.export import Exporter, export_round
from ram_trl.continual.hub import Hub, HubError
from ram_trl.continual.member import Member
from ram_trl.evaluate import Scorer
from ram_trl.folders.offline import merge_to_adapter
from ram_trl.team import Team
from ram_trl.training.turns import take_turns
from ram_trl.weights.checkpoint import open_checkpoint
from ram_trl.weights.live import LayoutError
from ram_trl.weights.live.lora import LoraWeights
from tests import lora, models
from tests.simulator import Simulator
from tests.test_cli import run
from tests.training.test_callback import QUICK, letters_of, states, trainer_of
from tests.weights.test_adapter import VARIANTS

Weights = dict[str, torch.Tensor]
ALONE = QUICK | {"agents": ()}
ADAPTERS = {
    "tool": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]},
    "code": {"r": 5, "lora_alpha": 4, "target_modules": ["v_proj", "down_proj", "up_proj"], "use_rslora": True},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    models.tiny_model().save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


def lora_trainer(agent: str, base: Path, out: Path, adapter=None, **arguments):
    torch.manual_seed(7)
    return trainer_of(agent, base, out, peft_config=LoraConfig(**(adapter or ADAPTERS[agent])), **arguments)


def weights_of(model, base: Path, mode: str = "fold", agent: str = "tool") -> LoraWeights:
    return LoraWeights(model, Team(), None, agent, mode, lambda: open_checkpoint(base, "base").store)


def theta(live) -> Weights:
    live.refresh()
    return {s.name: live.read(*[s.name, s.start, s.stop]).view(live.shape(s.name)) for s in live.held()}


def change(model) -> Weights:
    """ΔW of a live PEFT model by stored name, float32: (scale · B) · A, from its own tensors."""
    found = {}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            a, b = module.lora_A["default"].weight.detach(), module.lora_B["default"].weight.detach()
            found[f"{name}.weight"] = (b * module.scaling["default"]) @ a
    return found


class Seen(TrainerCallback):
    """Keeps θ as the definition has it: what was loaded last, plus what the adapter changed since."""

    def __init__(self, weights: Weights) -> None:
        self.loaded = weights
        self.before: list[Weights] = []
        self.adapter: Weights = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % args.logging_steps == 0:
            now = change(model)
            self.before.append(
                {n: t + (now[n] - self.adapter.get(n, 0.0)) if n in now else t.clone() for n, t in self.loaded.items()}
            )


class Loaded(TrainerCallback):
    def __init__(self, seen: Seen, callback) -> None:
        self.seen, self.callback, self.after = seen, callback, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % args.logging_steps == 0:
            self.seen.loaded = theta(self.callback._live)
            self.seen.adapter = change(model)
            self.after.append((self.seen.loaded, lora.logits(copy.deepcopy(model))))


def together(base: Path, out: Path, mode: str, **ram):
    """Two agents of different ranks and targets in one hub, for three rounds of two steps."""
    start = {n: p.detach().clone() for n, p in AutoModelForCausalLM.from_pretrained(base).named_parameters()}

    def work(agent: str):
        def run():
            seen = Seen({n: t.clone() for n, t in start.items()})
            trainer = lora_trainer(agent, base, out, callbacks=[seen], logging_steps=2)
            arguments = {"hub": out / "hub", "agent": agent, "base": base, "merge_every": 2, "keep_rounds": 99}
            callback = ram_trl.attach(trainer, **arguments, lora=mode, **QUICK | ram)
            loaded = Loaded(seen, callback)
            trainer.add_callback(loaded)
            trainer.train()
            return seen.before, loaded.after, trainer

        return run

    return take_turns({agent: work(agent) for agent in ("tool", "code")})


def model_with(base: Path, weights: Weights):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    return model


@pytest.mark.parametrize(("mode", "carry"), [("fold", True), ("fold", False), ("svd", True)])
def test_agents_of_different_ranks_and_targets_match_the_simulator(base, tmp_path, mode, carry):
    """Every round and what every agent loads, bit for bit; and forward passes compute with what was loaded."""
    runs = together(base, tmp_path, mode, carry=carry)
    start = {n: p.detach().clone() for n, p in AutoModelForCausalLM.from_pretrained(base).named_parameters()}
    simulator = Simulator(start, carry=carry)
    for agent in runs:
        simulator.join(agent)
    held = states(tmp_path / "hub")
    for number in range(3):
        for agent, (before, _, _) in runs.items():
            simulator.agents[agent].theta = before[number]
            simulator.publish(agent)
        simulator.close()
        for agent, (_, after, _) in runs.items():
            simulator.load(agent)
            expected = simulator.agents[agent].theta
            for name, tensor in expected.items():
                assert torch.equal(after[number][0][name], tensor), (mode, number, agent, name)
            if mode == "fold":
                assert lora.distance(after[number][1], lora.logits(model_with(base, expected))) < 1e-5
        for name, tensor in simulator.states[-1].items():
            assert torch.equal(held[number + 1][name], tensor), (mode, number, name)
    assert any(not torch.equal(held[3][n], t) for n, t in start.items())


# ---- what θ is ----------------------------------------------------------------------------------------------------

UNPROVEN = {"dora", "dora_rslora", "conv1d_dora", "embedding_dora", "tokens", "tokens_untied", "experts",
            "one_of_the_experts", "expert_patterns", "square_experts", "transposed_experts", "router",
            "parameter_of_conv1d", "mica", "orthogonal", "tied_targets"}  # fmt: skip
RENAMED = {"experts_to_save"}  # its names on disk are not those in memory, which joining refuses
PROVEN = {"fold": sorted(VARIANTS.keys() - UNPROVEN - RENAMED)}
PROVEN["svd"] = [v for v in PROVEN["fold"] if not {"lora_bias", "ensure_weight_tying"} & VARIANTS[v][1].keys()]


def agent_of(variant: str, folder: Path):
    make, settings = VARIANTS[variant]
    make().save_pretrained(folder)
    settings = {"r": 4, "target_modules": list(lora.EVERYWHERE), "lora_alpha": 6} | settings
    torch.manual_seed(1)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LoraConfig(**settings))


def load(live: LoraWeights, weights: Weights) -> None:
    """As a member does with a round."""
    for span in live.held():
        live.write(span.name, span.start, weights[span.name].flatten())
    live.commit()


@pytest.mark.parametrize(("mode", "variant"), [(m, v) for m in PROVEN for v in PROVEN[m]])
def test_every_variant_computes_with_its_theta(tmp_path, mode, variant):
    """Trained, loaded with something else (fold), and trained again: forward passes, peft's own, are those of θ."""
    model = agent_of(variant, tmp_path)
    live = weights_of(model, tmp_path, mode)
    fresh = lora.logits(model_with(tmp_path, {}))
    lora.train(model, 1)
    assert lora.distance(lora.logits(model), fresh) > 1e-3
    assert lora.distance(lora.logits(model), lora.logits(model_with(tmp_path, theta(live)))) < 1e-5
    generator = torch.Generator().manual_seed(2)
    other = {n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in theta(live).items()}
    load(live, other)
    assert all(torch.equal(t, other[n]) for n, t in theta(live).items())
    if mode == "fold":
        assert lora.distance(lora.logits(model), lora.logits(model_with(tmp_path, other))) < 1e-5
        lora.train(model, 3)
        assert lora.distance(lora.logits(model), lora.logits(model_with(tmp_path, theta(live)))) < 1e-5
    else:
        base = {n: p.detach() for n, p in model_with(tmp_path, {}).named_parameters()}
        left = {n: t - base[n] for n, t in other.items()}
        got = {n: t - base[n] for n, t in merged_by_peft(model).items()}
        left = {n: t for n, t in left.items() if n not in live._whole}  # those are loaded as they are
        assert lora.far(got, left) == pytest.approx(live.fit_error, abs=1e-4)


def joined(live: LoraWeights, base: Path, hub: Hub, **config) -> Member:
    """An agent without a trainer, in a hub."""
    settings = {"merge_every": 1, "heartbeat": 0.05, "keep_rounds": 99} | config
    member = Member(hub, "tool", base, live, ContinualConfig(**settings))
    member.join(0, None, False)
    return member


@pytest.mark.parametrize(("mode", "variant"), [(m, v) for m in PROVEN for v in PROVEN[m]])
def test_agent_alone_goes_on_as_what_peft_computed(tmp_path, mode, variant):
    """Identity: merged alone with ε = 0, in the live model, in what is exported, and in what peft saves."""
    model, hub, base = agent_of(variant, tmp_path / "base"), Hub(tmp_path / "hub"), tmp_path / "base"
    member = joined(weights_of(model, base, mode), base, hub, merge=MergeConfig(epsilon=0))
    lora.train(model, 1)
    trained = lora.logits(model)
    assert lora.distance(trained, lora.of_folder(base)) > 1e-3
    assert member.meet(1).round == 1
    member.leave()
    assert lora.distance(lora.logits(model), trained) < 1e-5
    assert lora.distance(lora.of_folder(export_round(hub, 1, base)), trained) < 1e-5
    if mode == "svd":
        model.save_pretrained(tmp_path / "saved")
        assert lora.distance(lora.of_agent(base, tmp_path / "saved"), trained) < 1e-5


def merged_by_peft(model) -> Weights:
    """The weights that forward passes compute with, by peft's own merge of a copy."""
    whole = copy.deepcopy(model).merge_and_unload()
    return {n: p.detach().clone() for n, p in whole.named_parameters()}


def test_svd_is_exact_where_the_rank_allows_it_and_warns_where_it_does_not(base, tmp_path, caplog):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj"]))
    live = weights_of(model, base, "svd")
    start = theta(live)
    torch.manual_seed(0)
    name = "model.layers.0.self_attn.q_proj.weight"
    change_ = torch.randn(start[name].shape[0], 2) @ torch.randn(2, start[name].shape[1]) * 0.05
    load(live, start | {name: start[name] + change_})
    assert live.fit_error < 1e-6
    assert torch.allclose(merged_by_peft(model)[name], start[name] + change_, atol=1e-6)
    module = model.get_base_model().get_submodule(name.removesuffix(".weight"))
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    assert (a[2:] != 0).any()  # the directions the fit leaves free can be learnt: one factor is not zero
    assert (b[:, 2:] == 0).all()
    load(live, start | {"model.norm.weight": start["model.norm.weight"] + 1})
    assert live.fit_error == pytest.approx(1)
    assert "agent 'tool': its adapter misses 100 %" in caplog.text


@pytest.mark.parametrize("variant", sorted(UNPROVEN))
def test_what_was_not_shown_to_work_in_training_is_refused_by_name(tmp_path, variant):
    reasons = r"use_dora|trainable_token_indices|target_parameters|mica|orthogonal|non-contiguous"
    with pytest.raises(LayoutError, match=rf"cannot be merged while it trains(.|\n)*({reasons})"):
        weights_of(agent_of(variant, tmp_path), tmp_path)


def test_more_that_is_refused_by_name(base, tmp_path):
    def model(**settings):
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=settings.pop("dtype", torch.float32))
        return get_peft_model(loaded, LoraConfig(**({"target_modules": ["q_proj"]} | settings)))

    with pytest.raises(LayoutError, match="pissa"):  # TRAPS 3.10
        weights_of(model(init_lora_weights="pissa"), base)
    with pytest.raises(LayoutError, match=r"quantized base"):  # TRAPS 3.17: no weights of a float dtype
        weights_of(model(dtype=torch.float16), base)
    two = model()
    two.add_adapter("other", LoraConfig(target_modules=["k_proj"]))
    two.base_model.set_adapter(["default", "other"])
    with pytest.raises(LayoutError, match=r"several adapters"):
        weights_of(two, base)
    with pytest.raises(LayoutError, match=r"lora_bias"):
        weights_of(agent_of("lora_bias", tmp_path / "biased"), tmp_path / "biased", "svd")
    with pytest.raises(LayoutError, match=r"ties the two"):  # TRAPS 3.8
        weights_of(model(target_modules=["lm_head"]), base)


def test_the_live_base_is_not_trusted(base):
    """What the sync with vLLM does: W + ΔW − ΔW is not W."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj"]))
    live = weights_of(model, base)
    lora.train(model, 1, size=0.7)
    before = theta(live)
    model.merge_adapter()
    with pytest.raises(LayoutError, match="adapter 'default' is merged"):
        live.refresh()
    model.unmerge_adapter()
    drifted = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert not torch.equal(drifted, load_file(base / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"])
    assert all(torch.equal(t, before[n]) for n, t in theta(live).items())


# ---- trainers -----------------------------------------------------------------------------------------------------


def test_loading_starts_the_moments_again(base, tmp_path):
    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            counts.append(len(optimizer.state))

    counts: list[int] = []
    trainer = lora_trainer("tool", base, tmp_path, max_steps=3)
    ram_trl.attach(trainer, hub=tmp_path / "hub", agent="tool", base=base, merge_every=2, **ALONE)
    trainer.add_callback(Steps())
    trainer.train()
    assert counts[0] > 0
    assert counts[1] == 0
    assert counts[2] > 0


def test_scoring_a_generalist_leaves_training_alone(base, tmp_path):
    class Watched(Scorer):
        def score(self, model, tokenizer):
            seen.append(lora.logits(copy.deepcopy(model)))
            return super().score(model, tokenizer)

    def run(out: Path, scorer: Scorer | None):
        trainer = lora_trainer("tool", base, out)
        arguments = {"hub": out / "hub", "agent": "tool", "base": base, "merge_every": 2, "keep_rounds": 99}
        ram_trl.attach(trainer, **arguments, scorer=scorer, **ALONE)
        trainer.train()
        return trainer

    seen: list[torch.Tensor] = []
    scorer = Watched("letters", ["ab", "cd"], letters_of("tool"), max_new_tokens=3, batch_size=2)
    scored, plain = run(tmp_path / "scored", scorer), run(tmp_path / "plain", None)
    for shown, generalist in zip(seen, states(tmp_path / "scored" / "hub")[1:], strict=False):
        assert lora.distance(shown, lora.logits(model_with(base, generalist))) < 1e-5
    assert len(seen) == 3
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(parameter, scored.model.get_parameter(name))


def test_the_reference_is_what_was_loaded(base, tmp_path):
    """β > 0: the reference is the model without its adapter, and that is the base that rounds go into."""
    trainer = lora_trainer("tool", base, tmp_path, max_steps=2, beta=0.1)
    arguments = {"hub": tmp_path / "hub", "agent": "tool", "base": base, "merge_every": 2, "keep_rounds": 99}
    ram_trl.attach(trainer, **arguments, carry=False, **ALONE)
    trainer.train()
    with trainer.model.disable_adapter():
        reference = lora.logits(trainer.model)
    assert lora.distance(reference, lora.logits(model_with(base, states(tmp_path / "hub")[1]))) < 1e-5


@pytest.mark.parametrize("mode", ["fold", "svd"])
def test_resuming_equals_an_unbroken_run(base, tmp_path, mode):
    """Killed between two rounds: the checkpoint holds the adapter alone, and what it stands on comes from the hub."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                control.should_save = True
                control.should_training_stop = True

    def run(out: Path, broken: bool):
        def begin():
            adapter = ADAPTERS["tool"] | {"modules_to_save": ["norm"]}
            trainer = lora_trainer("tool", base, out, adapter=adapter, max_steps=6)
            arguments = {"hub": out / "hub", "agent": "tool", "base": base, "merge_every": 2, "keep_rounds": 99}
            return trainer, ram_trl.attach(trainer, **arguments, lora=mode, **ALONE)

        trainer, callback = begin()
        if broken:
            trainer.add_callback(Stop())
            callback.on_train_end = lambda *args, **kwargs: callback._member.leave()  # the process dies: no last words
            trainer.train()
            callback._exporter.close()
            trainer, callback = begin()
            trainer.train(resume_from_checkpoint=str(out / "tool" / "checkpoint-3"))
        else:
            trainer.train()
        return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}, states(out / "hub")

    weights, rounds = run(tmp_path / "unbroken", broken=False)
    resumed_weights, resumed_rounds = run(tmp_path / "broken", broken=True)
    assert len(rounds) == len(resumed_rounds) == 5
    for one, other in zip(rounds, resumed_rounds, strict=True):
        assert all(torch.equal(one[n], other[n]) for n in one)
    assert all(torch.equal(weights[n], resumed_weights[n]) for n in weights)
    shutil.rmtree(tmp_path / "broken" / "tool" / "checkpoint-3" / "ram_base")
    trainer = lora_trainer("tool", base, tmp_path / "broken")
    ram_trl.attach(
        trainer, hub=tmp_path / "broken" / "hub", agent="tool", base=base, merge_every=2, lora=mode, **ALONE
    )
    with pytest.raises((HubError, ValueError), match=r"not whole|modules_to_save|size|key"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "broken" / "tool" / "checkpoint-3"))


def test_observing_agents_train_as_if_alone(base, tmp_path):
    observed = lora_trainer("tool", base, tmp_path / "observed")
    arguments = {"hub": tmp_path / "hub", "agent": "tool", "base": base, "merge_every": 2, "keep_rounds": 99}
    ram_trl.attach(observed, **arguments, config=MergeConfig(epsilon=0), resync="none", **ALONE)
    observed.train()
    alone = lora_trainer("tool", base, tmp_path / "alone")
    alone.train()
    assert all(torch.equal(p, observed.model.get_parameter(n)) for n, p in alone.model.named_parameters())
    generalist = lora.logits(model_with(base, states(tmp_path / "hub")[3]))
    assert lora.distance(generalist, lora.logits(alone.model)) < 1e-5


def test_a_lora_agent_and_a_whole_model_share_a_hub(base, tmp_path):
    def work(agent: str):
        def run():
            make = lora_trainer if agent == "tool" else trainer_of
            trainer = make(agent, base, tmp_path)
            arguments = {"hub": tmp_path / "hub", "agent": agent, "base": base, "merge_every": 2, "keep_rounds": 99}
            ram_trl.attach(trainer, **arguments, carry=False, **QUICK)
            trainer.train()
            return lora.logits(trainer.model)

        return run

    found = take_turns({agent: work(agent) for agent in ("tool", "code")})
    decisions = Hub(tmp_path / "hub").decisions()
    assert [p.agent for p in decisions[0].publications] == ["code", "tool"]
    generalist = lora.logits(model_with(base, states(tmp_path / "hub")[3]))
    for logits in found.values():
        assert lora.distance(logits, generalist) < 1e-5


def trained(base: Path, out: Path, **ram) -> Hub:
    trainer = lora_trainer("tool", base, out, max_steps=2)
    arguments = {"hub": out / "hub", "agent": "tool", "base": base, "merge_every": 2, "keep_rounds": 99}
    ram_trl.attach(trainer, **arguments, **ALONE | ram)
    trainer.train()
    return Hub(out / "hub")


def test_the_generalist_is_a_model_and_later_an_adapter(base, tmp_path):
    hub = trained(base, tmp_path)
    generalist = hub.generalist_folder(len(hub.decisions()))
    _, fitted = merge_to_adapter(base, {"all": generalist}, tmp_path / "out", MergeConfig(epsilon=0), max_error=0.2)
    assert 0 < fitted.error <= 0.2
    assert lora.distance(lora.of_agent(base, tmp_path / "out"), lora.of_folder(generalist)) < 0.05


def test_the_generalist_is_an_adapter_on_request(base, tmp_path):
    """With a rank that holds all: what peft computes with it on the base is what the generalist computes."""
    hub = trained(base, tmp_path, export_rank=64)
    number = len(hub.decisions())
    assert hub.latest() == number
    generalist = lora.logits(model_with(base, states(tmp_path / "hub")[number]))
    assert lora.distance(lora.of_agent(base, hub.generalist_folder(number)), generalist) < 1e-5


def test_a_round_is_written_once_more_in_the_other_form(base, tmp_path):
    """Where the hub exports adapters, a model is to be had, and the other way round."""
    hub = trained(base, tmp_path, export_rank=4)
    number, state = len(hub.decisions()), states(tmp_path / "hub")[-1]
    for rank, out in ((None, "model"), (64, "adapter")):
        options = ["--rank", str(rank)] if rank else []
        done = run("export", hub.path, "--base", base, "--out", tmp_path / out, "--round", number, *options)
        assert done.exit_code == 0, done.output
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert all(torch.equal(p, state[n]) for n, p in made.named_parameters())
    assert lora.distance(lora.of_agent(base, tmp_path / "adapter"), lora.logits(made)) < 1e-5
    again = run("export", hub.path, "--base", base, "--out", tmp_path / "model")
    assert again.exit_code == 1
    assert "model exists; name a new folder, or remove it" in again.output
    missing = run("export", hub.path, "--base", base, "--out", tmp_path / "other", "--round", 77)
    assert missing.exit_code == 1
    assert f"holds the states of rounds 0, 1, {number};" in missing.output
    foreign = run("export", hub.path, "--base", tmp_path / "model", "--out", tmp_path / "other")
    assert foreign.exit_code == 1
    assert f"model is not the base of {hub.path}: " in foreign.output
    assert "hold other values, such as 'model." in foreign.output
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("mode", ["fold", "svd"])
def test_an_exported_adapter_is_the_best_fit_and_tells_its_error(base, tmp_path, mode, caplog):
    """S_k − W, on the base and not on any round."""
    model, hub = agent_of("plain", base), Hub(tmp_path / "hub")
    start = {n: t.detach() for n, t in model_with(base, {}).named_parameters()}
    member = joined(weights_of(model, base, mode), base, hub, export_rank=2)
    for step in (1, 2):
        lora.train(model, step)
        assert member.meet(step).round == step
    member.leave()
    folder = export_round(hub, 2, base)
    files = {"adapter_config.json", "adapter_model.safetensors", "adapter_report.json", "merge_report.json"}
    assert {path.name for path in folder.iterdir()} == files | {"README.md"}
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    wanted = {n: t - start[n] for n, t in states(tmp_path / "hub")[2].items() if not torch.equal(t, start[n])}
    agent = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
    held = {n: t - start[n] for n, t in merged_by_peft(agent).items() if n in wanted}
    report = json.loads((folder / "adapter_report.json").read_text())
    assert report["rank"] == 2
    assert lora.far(held, wanted) == pytest.approx(report["error"], abs=1e-3)
    best = sum(float(torch.linalg.svdvals(t.double())[2:].square().sum()) for t in wanted.values())
    size = sum(float(t.double().square().sum()) for t in wanted.values())
    assert report["error"] == pytest.approx((best / size) ** 0.5, rel=0.02)
    assert 0.5 < report["error"] < 1
    card = (folder / "README.md").read_text()
    assert f"a LoRA adapter of rank 2, which misses {report['error']:.1%} of what the merge changes" in card
    front = yaml.safe_load(card.split("---")[1])
    assert (front["library_name"], front["base_model_relation"]) == ("peft", "adapter")
    assert "lora" in front["tags"]
    told = f"the adapter misses {100 * report['error']:.1f} % of what round 2 changes"  # over half: worth a warning
    assert told in caplog.text


def test_all_jobs_export_alike(base, tmp_path):
    hub = Hub(tmp_path / "hub")
    joined(weights_of(agent_of("plain", base), base), base, hub, export_rank=4).leave()
    with pytest.raises(HubError, match=r"belongs to another run: .*export_rank"):
        joined(weights_of(agent_of("plain", base), base), base, hub)


def test_a_folded_adapter_is_told_not_to_belong_to_the_base(base, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(Exporter, "start", lambda self, number: None)  # a process that this is not about

    def warned(out: Path, mode: str) -> list[str]:
        caplog.clear()
        trainer = lora_trainer("tool", base, out, max_steps=4, save_strategy="steps", save_steps=1)
        arguments = {"hub": out / "hub", "agent": "tool", "base": base, "merge_every": 2, "keep_rounds": 99}
        ram_trl.attach(trainer, **arguments, **ALONE, lora=mode)
        trainer.train()
        return [told.getMessage() for told in caplog.records if "belongs to the newest round" in told.getMessage()]

    (told,) = warned(tmp_path / "fold", "fold")  # once, though there were two rounds
    generalist = Hub(tmp_path / "fold" / "hub").generalist_folder(1)
    assert told.startswith("agent 'tool': ")
    assert str(base) in told
    assert str(generalist) in told
    cards = {step: (tmp_path / "fold" / "tool" / f"checkpoint-{step}" / "README.md").read_text() for step in (1, 3, 4)}
    assert "not to" not in cards[1]  # before the first round it does belong to the base
    assert f"**not to {base}**" in cards[3]
    assert f"`{generalist}`" in cards[3]
    assert f"`{Hub(tmp_path / 'fold' / 'hub').generalist_folder(2)}`" in cards[4]
    assert not warned(tmp_path / "svd", "svd")
    assert "not to" not in (tmp_path / "svd" / "tool" / "checkpoint-4" / "README.md").read_text()
