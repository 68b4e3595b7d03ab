import pytest

from isojax.errors import ConfigError
from isojax.rl import config

GOOD = """
[policy]
checkpoint = "{checkpoint}"
[task]
reasoning_gym = "chain_sum"
[sampling]
max_tokens = 8
"""


@pytest.fixture
def write(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")

    def write(text=GOOD):
        path = tmp_path / "grpo.toml"
        path.write_text(text.replace("{checkpoint}", str(tmp_path / "policy")))
        return path

    return write


def test_defaults_are_those_that_the_documentation_names(write):
    run = config.load(write())
    assert (run.policy.numerics, run.policy.dtype) == ("exact", "bfloat16")
    assert (run.sampling.n, run.sampling.temperature, run.loss.clip, run.optimizer.lr) == (8, 1.0, 0.2, 1e-6)
    assert run.engine.gpu_memory_utilization == 0.35


def test_dotted_overrides_win_and_need_no_quotes(write):
    run = config.load(
        write(), ["optimizer.lr=2e-6", "policy.numerics=native", "sampling.stop=['x']", "run.contrast=true"]
    )
    assert (run.optimizer.lr, run.policy.numerics, run.sampling.stop, run.run.contrast) == (2e-6, "native", ["x"], True)


def test_all_violations_are_told_at_once(write):
    with pytest.raises(ConfigError) as refusal:
        config.load(write(GOOD.replace("max_tokens = 8", "n = 1")), ["optimizer.lrr=1", "train.steps=many", "oops"])
    message = str(refusal.value)
    assert "5 violations" in message
    for part in (
        "oops: write section.key=value",
        "optimizer.lrr: unknown key, did you mean lr?",
        "sampling.max_tokens: required",
        "sampling.n: input should be greater than or equal to 2, got 1",
        "train.steps: input should be a valid integer",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("override", "violation"),
    [
        ("policy.checkpoint=nowhere", "policy.checkpoint: no config.json in nowhere"),
        ("task.jsonl=x.jsonl", "task: name either reasoning_gym or jsonl"),
        ("train.gradient_group=6", "train.gradient_group: 6 is no power of two"),
        ("train.sequences=16", "train.sequences: 16 is more than the gradient group, 8"),
        ("sampling.max_tokens=4096", "leaves no room for a prompt"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(write, override, violation):
    with pytest.raises(ConfigError, match=violation):
        config.load(write(), [override])


@pytest.mark.parametrize("override", ["sampling.top_k=20", "sampling.top_p=0.9", "sampling.min_p=0.1"])
def test_truncated_sampling_is_fine_but_for_a_divergence_that_can_be_infinite(write, override):
    assert config.load(write(), [override]).sampling.truncated
    with pytest.raises(ConfigError, match=r"loss\.kl: .* infinite"):
        config.load(write(), [override, "loss.kl=0.1"])


@pytest.mark.parametrize("text", ["not toml at all", "policy = 3"])
def test_a_broken_file_is_a_refusal(write, text):
    with pytest.raises(ConfigError):
        config.load(write(text))


def test_a_missing_file_is_a_refusal(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        config.load(tmp_path / "none.toml")
