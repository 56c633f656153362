"""The configuration: what is written wins in a known order, and what cannot run is refused with the remedy."""

import math
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml

from trueup.config import ALGORITHMS, BatchConfig, ConfigError, RunConfig, Section
from trueup.configfile import load_config
from trueup.correction import PRESETS, Correction, Filter
from trueup.objectives import Objective

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def sections(section: type[Section] = RunConfig, path: str = ""):
    """Every field with its dotted path and whether it is a section itself."""
    for name, field in section.model_fields.items():
        yield f"{path}{name}", field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from sections(field.annotation, f"{path}{name}.")


def value_at(config, path: str):
    for part in path.split("."):
        config = getattr(config, part)
    return config


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_defaults_are_a_valid_run():
    config = load_config()
    assert config == RunConfig() == load_config({})
    assert (config.model, config.task, config.algorithm) == ("mini", "sums", "grpo")
    assert config.correction == PRESETS["none"] and config.strictly_on_policy
    assert config.sampler.spec == "vllm:bf16"


@pytest.mark.parametrize("path, field", [pytest.param(path, field, id=path) for path, field in sections()])
def test_every_field_has_a_default_and_says_what_it_is(path, field):
    assert not field.is_required()
    assert field.description and field.description.rstrip().endswith(".")


def test_a_configuration_does_not_change_once_made():
    config = load_config()
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3
    with pytest.raises(ValueError, match="frozen"):
        config.sampler.precision = "int8"


# --- where a value comes from -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, path, expected",
    [
        ("learner.lr=1e-6", "learner.lr", 1e-6),
        ("learner.lr=2.5E-5", "learner.lr", 2.5e-5),
        ("learner.lr=0.01", "learner.lr", 0.01),
        ("steps=7", "steps", 7),
        ("steps=1e3", "steps", 1000),
        ("learner.gradient_checkpointing=true", "learner.gradient_checkpointing", True),
        ("delivery.prove=false", "delivery.prove", False),
        ("critic.model=null", "critic.model", None),
        ("critic.model=org/name-1e-6", "critic.model", "org/name-1e-6"),
        ("objective.value_clip=null", "objective.value_clip", None),
        ("log.trackers=[tensorboard, wandb]", "log.trackers", ("tensorboard", "wandb")),
        ("log.trackers=[]", "log.trackers", ()),
        ("task=jsonl:data/a=b.jsonl", "task", "jsonl:data/a=b.jsonl"),
        ("correction=tis", "correction", PRESETS["tis"]),
        ("correction={preset: tis, high: 5}", "correction", Correction(high=5.0)),
        ("correction={level: none, filters: [{criterion: k3, aggregate: mean, high: 1e-2}]}", "correction.filters",
         (Filter("k3", "mean", high=0.01),)),
        ("batch={prompts: 3}", "batch", BatchConfig(prompts=3)),
    ],
)  # fmt: skip
def test_a_dotted_override_has_the_type_it_is_written_in(override, path, expected):
    found = value_at(load_config(None, [override]), path)
    assert found == expected and type(found) is type(expected)


def test_an_override_beats_the_file_and_the_file_beats_the_algorithm(tmp_path):
    assert load_config({"algorithm": "dapo"}).objective.clip_high == 0.28
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: dapo\nobjective: {clip_high: 0.3}\nsteps: 5\n")
    found = load_config(file)
    assert (found.objective.clip_high, found.objective.dual_clip, found.steps) == (0.3, 10.0, 5)
    found = load_config(file, ["objective.clip_high=0.4", "steps=6"])
    assert (found.objective.clip_high, found.objective.dual_clip, found.steps) == (0.4, 10.0, 6)
    found = load_config(file, ["algorithm=gspo"])
    assert (found.objective.kind, found.objective.clip_low, found.objective.clip_high) == ("gspo", 3e-4, 0.3)


def test_null_in_the_file_beats_a_value_of_the_algorithm():
    assert load_config({"algorithm": "dapo", "objective": {"dual_clip": None}}).objective.dual_clip is None


def test_of_two_overrides_the_later_wins():
    assert load_config(None, ["steps=5", "steps=6"]).steps == 6


def test_an_override_of_one_field_leaves_the_rest_of_the_section():
    found = load_config({"batch": {"prompts": 3, "samples": 4}}, ["batch.samples=5"])
    assert (found.batch.prompts, found.batch.samples) == (3, 5)


def test_overriding_a_field_of_a_named_correction_keeps_the_rest_of_the_preset():
    assert load_config({"correction": "mis"}, ["correction.high=5"]).correction == Correction(bound="mask", high=5.0)
    assert load_config(None, ["correction=icepop", "correction.low=0.25"]).correction == Correction(
        bound="mask", low=0.25, high=5.0
    )


def test_neither_the_given_mapping_nor_the_algorithms_are_changed():
    given = {"algorithm": "dapo", "batch": {"prompts": 3}}
    before = {name: {key: dict(value) for key, value in fields.items()} for name, fields in ALGORITHMS.items()}
    load_config(given, ["batch.prompts=4", "objective.clip_high=0.5", "reward.dynamic_sampling=false"])
    assert given == {"algorithm": "dapo", "batch": {"prompts": 3}}
    assert before == ALGORITHMS


def test_numbers_with_an_exponent_are_numbers_in_a_file_too(tmp_path):
    (tmp_path / "run.yaml").write_text("learner: {lr: 2e-5, eps: 1E-9}\nmodel: org/1e-6\n")
    found = load_config(tmp_path / "run.yaml")
    assert (found.learner.lr, found.learner.eps, found.model) == (2e-5, 1e-9, "org/1e-6")


@pytest.mark.parametrize(
    "algorithm, expected",
    [
        ("ppo", dict(advantage="gae", kind="ppo", clip=(0.2, 0.2), aggregation="token-mean")),
        ("grpo", dict(advantage="grpo", kind="ppo", clip=(0.2, 0.2), aggregation="sequence-mean")),
        ("dapo", dict(advantage="grpo", kind="ppo", clip=(0.2, 0.28), aggregation="token-mean")),
        ("rloo", dict(advantage="rloo", kind="reinforce", clip=(0.2, 0.2), aggregation="token-mean")),
        ("dr-grpo", dict(advantage="dr-grpo", kind="ppo", clip=(0.2, 0.2), aggregation="constant")),
        ("gspo", dict(advantage="grpo", kind="gspo", clip=(3e-4, 4e-4), aggregation="sequence-mean")),
        ("cispo", dict(advantage="grpo", kind="cispo", clip=(1.0, 4.0), aggregation="token-mean")),
        ("reinforce++", dict(advantage="reinforce++", kind="ppo", clip=(0.2, 0.2), aggregation="token-mean")),
    ],
)
def test_each_algorithm_is_the_set_of_fields_its_paper_names(algorithm, expected):
    config = load_config({"algorithm": algorithm})
    objective = config.objective
    found = dict(
        advantage=config.advantage.kind,
        kind=objective.kind,
        clip=(objective.clip_low, objective.clip_high),
        aggregation=objective.aggregation,
    )
    assert found == expected
    assert config.reward.dynamic_sampling == (algorithm == "dapo")


# --- YAML -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm, correction", [(name, "tis") for name in ALGORITHMS] + [("grpo", name) for name in PRESETS]
)
def test_the_resolved_configuration_reads_back_as_itself(tmp_path, algorithm, correction):
    config = load_config(
        {"algorithm": algorithm, "correction": correction}, ["learner.lr=3e-7", "log.trackers=[wandb]"]
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config


def test_filters_and_infinite_bounds_read_back_as_themselves(tmp_path):
    given = {"preset": "none", "filters": [{"criterion": "ratio", "low": 0.5, "negative_advantage_only": True}]}
    config = load_config({"correction": given})
    assert config.correction.filters[0].high == math.inf
    assert load_config(yaml.safe_load(config.to_yaml())) == config


def test_the_resolved_configuration_names_every_field():
    dumped = yaml.safe_load(load_config().to_yaml())
    for path, field in sections():
        value = dumped
        for part in path.split("."):
            value = value[part]
        if is_dataclass(field.annotation):
            assert set(value) == {field.name for field in fields(field.annotation)}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_loads_and_says_what_it_shows(path):
    load_config(path)
    assert path.read_text().startswith("# ")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, message",
    [
        ("smapler.precision=int8", "unknown key 'smapler'; did you mean sampler?"),
        ("step=3", "unknown key 'step'; did you mean steps?"),
        ("sampler.precison=int8", "unknown key 'sampler.precison'; did you mean sampler.precision?"),
        ("learner.learning_rate=1", "unknown key 'learner.learning_rate'; known: lr, warmup_steps"),
        ("critic.warmup_rollout=1", "unknown key 'critic.warmup_rollout'; did you mean critic.warmup_rollouts?"),
        ("objective.clip_hihg=0.3", "unknown key 'objective.clip_hihg'; did you mean objective.clip_high?"),
        ("correction.hihg=3", "correction has no field 'hihg', did you mean 'high'?"),
        ("correction={filters: [{criterio: k3}]}", "filter has no field 'criterio', did you mean 'criterion'?"),
        ("zzz=1", "unknown key 'zzz'; known: model, task, algorithm"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_at_every_level(override, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    "override, message",
    [
        ("algorithm=grop", "algorithm='grop': expected one of ppo, grpo, .*; did you mean grpo\\?"),
        (
            "sampler.precision=in8",
            "sampler.precision='in8': expected one of bf16, int8, .*, fp32; did you mean int8\\?",
        ),
        ("log.trackers=[wandbb]", "log.trackers.0='wandbb': expected one of .*; did you mean wandb\\?"),
        ("correction=tsi", "correction='tsi': unknown correction 'tsi', did you mean 'tis'\\?"),
        ("correction=[tis]", "a correction is a preset's name or a mapping of its fields"),
        ("objective.kind=pppo", "objective kind='pppo' is unknown; valid: ppo, gspo, cispo, reinforce"),
        ("batch.prompts=0", "batch.prompts=0: Input should be greater than or equal to 1"),
        ("sampler.temperature=0", "sampler.temperature=0: Input should be greater than 0"),
        ("learner.lr=nan", "learner.lr='nan': Input should be greater than 0"),
        ("learner.beta2=1", "learner.beta2=1: Input should be less than 1"),
        ("steps=many", "steps='many': Input should be a valid integer"),
        ("batch=7", "batch=7: Input should be a valid dictionary"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_what_is_expected(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


def test_every_problem_is_named_at_once():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["steps=0", "batch.prompts=0", "sampler.engin=vllm"])
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["sampler.precision=fp32"],
            "vllm cannot run 'fp32'; it runs bf16, int8, .* and int4-channel; transformers:fp32",
        ),
        (["sampler.engine=transformers", "sampler.precision=int8"], "transformers cannot run 'int8'.*vllm:int8 has it"),
        (["sampler.top_k=0"], "top_k=0: expected a positive number, or -1 to turn it off"),
        (["correction=tis", "sampler.top_p=0.9"], "top_p=0.9, top_k=-1, min_p=0.0 remove tokens.* or correction=none"),
        (["correction=tis", "sampler.top_k=50"], "Use top_p=1, top_k=-1, min_p=0 with a correction"),
        (["correction=ppo-is", "sampler.min_p=0.1"], "Use top_p=1, top_k=-1, min_p=0 with a correction"),
        (["algorithm=grpo", "batch.samples=1"], "advantage.kind=grpo compares .* at least 2, or algorithm=ppo"),
        (["algorithm=dr-grpo", "batch.samples=1"], "advantage.kind=dr-grpo compares the responses of a group"),
        (["algorithm=rloo", "batch.samples=1"], "advantage.kind=rloo compares the responses of a group"),
        (
            ["batch.minibatches=9", "batch.prompts=2", "batch.samples=4"],
            "batch.minibatches=9 but a step has only 8 responses",
        ),
        (
            ["algorithm=ppo", "batch.samples=1", "reward.dynamic_sampling=true"],
            "needs groups: set batch.samples to at least 2",
        ),
        (
            ["reward.overlong_buffer=64", "batch.response_length=64"],
            "overlong_buffer=64 must be shorter than .*length=64",
        ),
        (["log.eval_by=sampler", "sampler.precision=int4"], "report what int4 can do, not what was learned"),
        (["delivery.scales=frozen"], "delivery.scales=frozen but sampler.precision=bf16 has no scales; use fresh"),
        (
            ["sampler.activation_range=1.2", "sampler.precision=int8"],
            "activation_range=1.2 but sampler.precision=int8 .* or precision=int8-static",
        ),
        (["objective.dual_clip=1.1"], "dual_clip=1.1 must exceed 1 \\+ clip_high = 1.2"),
    ],
)
def test_an_impossible_combination_is_refused_with_the_remedy(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampler.engine=transformers", "sampler.precision=fp32"],
        ["sampler.top_p=0.9", "sampler.top_k=50", "sampler.min_p=0.1"],
        ["algorithm=ppo", "batch.samples=1"],
        ["algorithm=reinforce++", "batch.samples=1"],
        ["delivery.scales=frozen", "sampler.precision=int4"],
        ["sampler.activation_range=1.2", "sampler.precision=int8-static"],
        ["batch.minibatches=8", "batch.prompts=2", "batch.samples=4"],
        ["reward.overlong_buffer=63", "batch.response_length=64"],
    ],
)
def test_what_only_looks_impossible_is_allowed(overrides):
    load_config(None, overrides)


@pytest.mark.parametrize("override", ["steps", "=3", ""])
def test_an_override_without_a_key_or_a_value_is_refused(override):
    with pytest.raises(ConfigError, match=f"override {override!r} is not KEY=VALUE, e.g. sampler.precision=int8"):
        load_config(None, [override])


def test_an_override_that_is_not_yaml_is_refused():
    with pytest.raises(ConfigError, match="override 'steps=\\[1': '\\[1' is not a YAML value"):
        load_config(None, ["steps=[1"])


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_that_does_not_exist_is_named_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yaml' does not exist; give a YAML file such as configs/"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "sums-ppo.yaml").write_text("task: sums\n")
    with pytest.raises(ConfigError, match="does not exist; did you mean .*sums-ppo.yaml"):
        load_config(tmp_path / "sums-pop.yaml")


def test_the_file_that_an_error_suggests_exists():
    with pytest.raises(ConfigError) as error:
        load_config("/nowhere/nothing")
    assert (CONFIGS[0].parent.parent / str(error.value).rpartition(" ")[2]).is_file()


@pytest.mark.parametrize("text, message", [
    (b"steps: [1\n", "is not YAML"),
    (b"\xff\xfe\x00\x93", "is not YAML"),
    (b"[]\n", "holds list; expected keys and values"),
    (b"- steps\n- 3\n", "holds list; expected keys and values"),
    (b"steps=3\n", "holds str; expected keys and values"),
])  # fmt: skip
def test_a_file_that_is_no_yaml_mapping_is_named_with_what_it_holds(tmp_path, text, message):
    (tmp_path / "run.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=f"run.yaml' {message}"):
        load_config(tmp_path / "run.yaml")


def test_an_empty_file_is_the_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert load_config(str(tmp_path / "run.yaml")) == RunConfig()


# --- what others take from it -----------------------------------------------------------------------------------------


def test_the_sampling_of_a_step_is_that_of_the_configuration():
    overrides = ["sampler.temperature=0.7", "sampler.top_p=0.9", "sampler.top_k=5", "sampler.min_p=0.1"]
    config = load_config({"batch": {"samples": 3, "response_length": 9}}, overrides)
    found = config.sampling((1, 2), seed=4)
    assert (found.n, found.max_tokens, found.stop_token_ids, found.seed) == (3, 9, (1, 2), 4)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.7, 0.9, 5, 0.1)
    assert config.sampling((), temperature=0, n=1).temperature == 0


@pytest.mark.parametrize("batch, expected", [({}, True), ({"minibatches": 2}, False), ({"epochs": 2}, False)])
def test_one_update_a_batch_is_strictly_on_policy(batch, expected):
    assert load_config({"batch": batch}).strictly_on_policy is expected


def test_objects_may_be_given_instead_of_mappings():
    config = RunConfig(correction=Correction(high=3.0), objective=Objective(kind="cispo"), batch=BatchConfig(prompts=2))
    assert (config.correction.high, config.objective.kind, config.batch.prompts) == (3.0, "cispo", 2)
